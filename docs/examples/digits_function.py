"""The same training as `digits.py`, in the function style: report after each epoch, resume if there is a checkpoint."""

from digits import Network

import trainyard as ty


def train(config):
    network = Network(config)
    start = ty.get_checkpoint()
    if start:
        network.load(start.load())
    while True:  # the stop condition of the run ends it, at a report
        metrics = network.epoch()
        ty.report(metrics, checkpoint=network.state())
