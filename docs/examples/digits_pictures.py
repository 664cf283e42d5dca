"""The digits with pictures: what a result can hold beside numbers. `trainyard run docs/examples/digits_trackers.yaml`."""

import numpy as np
from digits import Digits

import trainyard as ty


class DigitsWithPictures(Digits):
    def step(self):
        result = super().step()
        network = self.network
        guesses = network.forward(network.x_val)[1].argmax(1)
        wrong = np.flatnonzero(guesses != network.y_val)
        if len(wrong):
            worst = wrong[0]
            picture = network.x_val[worst].reshape(8, 8).repeat(16, 0).repeat(16, 1)
            result["mistake"] = ty.Image(picture, caption=f"{network.y_val[worst]} taken for {guesses[worst]}")
        counts = np.zeros((10, 10), int)
        np.add.at(counts, (network.y_val, guesses), 1)
        result["confusion"] = ty.Table([str(digit) for digit in range(10)], counts.tolist())
        result["weights"] = {name: ty.Histogram(value) for name, value in network.weights.items()}
        return result
