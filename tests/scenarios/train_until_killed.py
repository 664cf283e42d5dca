"""What the kill scenarios run: a training that tells on stdout, after each call has returned, what it was promised.

train_until_killed.py STYLE STORAGE ITERATIONS
"""

import os
import sys
import time

import numpy as np

import trainyard as ty


def told(kind, number):
    os.write(1, f"{kind} {number}\n".encode())


class Walk(ty.Trainable):
    """A random walk: after a right resume its path is the one of a run that was never killed."""

    def setup(self, config):
        self.position, self.steps = np.zeros(1000), 0

    def step(self):
        self.steps += 1
        self.position += np.sin(self.steps)
        return {"steps": self.steps, "position": self.position[0], "nan": float("nan")} | (
            {"late": self.steps} if self.steps > 40 else {}
        )

    def train(self):
        result = super().train()
        told("result", result["training_iteration"])
        time.sleep(0.0005)
        return result

    def save(self, checkpoint_dir=None):
        checkpoint = super().save(checkpoint_dir)
        told("checkpoint", checkpoint.iteration)
        return checkpoint

    def save_checkpoint(self, checkpoint_dir):
        with open(os.path.join(checkpoint_dir, "note.txt"), "w") as file:
            file.write(str(self.steps))
        return {"position": self.position, "steps": self.steps}

    def load_checkpoint(self, checkpoint):
        self.position, self.steps = checkpoint["position"], checkpoint["steps"]


def walk(config):
    position, steps = np.zeros(1000), 0
    start = ty.get_checkpoint()
    if start:
        state = start.load()
        position, steps = state["position"], state["steps"]
    while True:
        steps += 1
        position += np.sin(steps)
        metrics = {"steps": steps, "position": position[0], "nan": float("nan")}
        if steps > 40:
            metrics["late"] = steps
        ty.report(metrics, checkpoint={"position": position, "steps": steps} if steps % 5 == 0 else None)
        told("result", steps)
        time.sleep(0.0005)


if __name__ == "__main__":
    style, storage, iterations = sys.argv[1:]
    result = ty.run(
        {"class": Walk, "function": walk}[style],
        {},
        storage=storage,
        experiment="kill",
        name="walk",
        resume="allow",
        stop={"training_iteration": int(iterations)},
        checkpoint={"every": 5, "keep": 3} if style == "class" else {"keep": 3},
    )
    result.raise_if_failed()
    told("ended", result.metrics["training_iteration"])
