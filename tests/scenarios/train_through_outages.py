"""What the scenarios of outages run: a training that tells on stdout how far it is.

train_through_outages.py JSON, where JSON holds arguments of ``ty.run`` and what `main` takes out of them.
"""

import json
import multiprocessing
import os
import sys
import time

import trainyard as ty
from trainyard import active_run


def told(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def worker(asked, answers):
    """A data loader: it also logs, as a user might by mistake, which has to be refused."""
    try:
        ty.get_run().log({"i": -1})
    except ty.TrainyardError as error:
        answers.put(type(error).__name__)
    for number in iter(asked.get, None):
        answers.put(number)


class Loaders:
    """Forked processes that live until `stop`."""

    def __init__(self, count):
        fork = multiprocessing.get_context("fork")
        self._asked, self._answers = fork.Queue(), fork.Queue()
        self._workers = [fork.Process(target=worker, args=(self._asked, self._answers)) for _ in range(count)]
        for process in self._workers:
            process.start()
        assert {"JournalError"} == {self._answers.get(timeout=60) for _ in self._workers}

    def load(self, number):
        self._asked.put(number)
        assert number == self._answers.get(timeout=60)

    def stop(self):
        for _ in self._workers:
            self._asked.put(None)
        for process in self._workers:
            process.join(60)
            assert process.exitcode == 0


def main(
    *, count, pause=0.0, hold=None, width=0, every=0, drain=60.0, workers=0, names=("it",), fails=False, **options
):
    """Run once for each of `names`.

    Args:
        count: at least so many results.
        pause: seconds between two.
        hold: then go on until there is such a file.
        width: so many metrics more in each result.
        every: a checkpoint after each so many.
        drain: seconds that the end waits for trackers.
        workers: so many forked data loaders.
        fails: the training ends with an exception.
    """
    active_run.DRAIN_S = drain
    loaders = []

    def train(config):
        began = time.monotonic()
        if workers and not loaders:
            loaders.append(Loaders(workers))
        start = ty.get_checkpoint()
        i = start.load()["i"] if start else 0
        while i < count or (hold is not None and not os.path.exists(hold)):
            i += 1
            if loaders:
                loaders[0].load(i)
            metrics = {"i": i, "loss": 1 / i, **{f"m{n}": i + n for n in range(width)}}
            ty.report(metrics, checkpoint={"i": i} if every and i % every == 0 else None)
            told("result", i)
            time.sleep(pause)
        told("over", i, round(time.monotonic() - began, 3))
        if fails:
            raise RuntimeError("as told")

    for name in names:
        result = ty.run(train, name=name, **options)
        told("status", name, result.status)
    for each in loaders:
        each.stop()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
