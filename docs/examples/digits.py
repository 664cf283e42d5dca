"""A small neural network on scikit-learn's handwritten digits, in the class style.

Run it with `trainyard run docs/examples/digits.yaml`. `digits_function.py` is the same in the function style.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainyard as ty


class Network:
    """One hidden layer of rectified units and a softmax, trained by plain stochastic gradient descent."""

    def __init__(self, config):
        images, labels = load_digits(return_X_y=True)
        self.x, self.x_val, self.y, self.y_val = train_test_split(images / 16, labels, test_size=0.25, random_state=0)
        self.lr, self.batch = config.get("lr", 0.1), config.get("batch", 32)
        self.rng = np.random.default_rng(config.get("seed", 0))
        hidden = config.get("hidden", 64)
        self.weights = {
            "w1": self.rng.normal(0, 0.15, (64, hidden)),
            "b1": np.zeros(hidden),
            "w2": self.rng.normal(0, 0.15, (hidden, 10)),
            "b2": np.zeros(10),
        }

    def forward(self, x):
        w = self.weights
        hidden = np.maximum(x @ w["w1"] + w["b1"], 0)
        scores = hidden @ w["w2"] + w["b2"]
        exps = np.exp(scores - scores.max(1, keepdims=True))
        return hidden, exps / exps.sum(1, keepdims=True)

    def epoch(self):
        """One pass over the training images. Returns the mean loss and the validation accuracy."""
        losses, w = [], self.weights
        order = self.rng.permutation(len(self.x))
        for chosen in np.array_split(order, len(order) // self.batch):
            x, y = self.x[chosen], self.y[chosen]
            hidden, probability = self.forward(x)
            losses.append(-np.log(probability[np.arange(len(y)), y] + 1e-12).mean())
            slope = (probability - np.eye(10)[y]) / len(y)
            back = slope @ w["w2"].T * (hidden > 0)
            for name, change in (
                ("w2", hidden.T @ slope),
                ("b2", slope.sum(0)),
                ("w1", x.T @ back),
                ("b1", back.sum(0)),
            ):
                w[name] -= self.lr * change
        accuracy = (self.forward(self.x_val)[1].argmax(1) == self.y_val).mean()
        return {"loss": float(np.mean(losses)), "accuracy": float(accuracy)}

    def state(self):
        return {"weights": self.weights, "rng": self.rng.bit_generator.state}

    def load(self, state):
        self.weights = state["weights"]
        self.rng.bit_generator.state = state["rng"]


class Digits(ty.Trainable):
    def setup(self, config):
        self.network = Network(config)

    def step(self):
        return self.network.epoch()

    def save_checkpoint(self, checkpoint_dir):
        return self.network.state()

    def load_checkpoint(self, checkpoint):
        self.network.load(checkpoint)
