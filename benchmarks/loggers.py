"""Everything that can record a result, behind one protocol: trainyard, the floors, and the peers.

Imports stand inside the functions, because each peer is installed in an environment of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LOGGERS", "PEERS", "Logger", "Peer"]

Metrics = dict[str, float]
Log = Callable[[int, Metrics], object]
Opener = Callable[[Path], contextlib.AbstractContextManager[Log]]


class Peer(NamedTuple):
    """A library to compare with: what to install for it."""

    distribution: str
    requirements: tuple[str, ...]
    module: str
    optional: bool = False


PEERS = {
    "ray": Peer("ray", ("ray[tune]", "tensorboardX", "pandas"), "ray.tune"),
    "lightning": Peer("lightning", ("torch==2.13.0", "lightning", "numpy"), "lightning.pytorch.loggers", optional=True),
    "trackio": Peer("trackio", ("trackio",), "trackio"),
    "wandb": Peer("wandb", ("wandb",), "wandb"),
}
"""By the name of its environment below ``.bench/venvs``."""


class Logger(NamedTuple):
    """One way to record results: opened on a directory, it gives the function that training calls."""

    title: str
    peer: str | None
    open: Opener


@contextlib.contextmanager
def _trainyard(directory: Path, trackers: list[str]) -> Iterator[Log]:
    import trainyard

    class Empty(trainyard.Trainable):
        metrics: Metrics

        def step(self) -> Metrics:
            return self.metrics

    trainable = Empty({"lr": 0.1}, storage=directory, trackers=trackers)
    train = trainable.train

    def log(_: int, metrics: Metrics) -> object:
        trainable.metrics = metrics
        return train()

    try:
        yield log
    finally:
        trainable.stop()


@contextlib.contextmanager
def _dict_fill(directory: Path) -> Iterator[Log]:
    kept: list[Metrics] = [{}]

    def log(i: int, metrics: Metrics) -> object:
        filled = dict(metrics)
        filled["training_iteration"] = i
        kept[0] = filled
        return filled

    yield log


@contextlib.contextmanager
def _one_line(directory: Path) -> Iterator[Log]:
    """The least that survives a SIGKILL: one JSON line, one write, with the keys that trainyard fills in."""
    import orjson

    fd = os.open(directory / "results.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    dumps, newline, write = orjson.dumps, orjson.OPT_APPEND_NEWLINE, os.write

    def log(i: int, metrics: Metrics) -> object:
        filled = {
            **metrics, "time_this_iter_s": 0.123, "done": False, "training_iteration": i, "timestamp": 1700000000,
            "date": "2026-03-09_14-05-59", "time_total_s": 12.34, "time_since_restore": 12.34, "iterations_since_restore": i,
        }  # fmt: skip
        return write(fd, dumps(filled, None, newline))

    try:
        yield log
    finally:
        os.close(fd)


@contextlib.contextmanager
def _ray(directory: Path, loggers: tuple[str, ...]) -> Iterator[Log]:
    """``ray.tune.Trainable`` in this process, and the logger callbacks that Tune's driver calls with each result."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0")
    from ray.tune import Trainable
    from ray.tune import logger as tune

    class Empty(Trainable):
        metrics: Metrics

        def step(self) -> Metrics:
            return self.metrics

    class Trial:
        """What the callbacks read of a trial."""

        checkpoint = None
        config: dict[str, Any] = {}
        evaluated_params: dict[str, Any] = {}
        local_path = str(directory)

        def init_local_path(self) -> None:
            pass

    kinds = {"json": tune.JsonLoggerCallback, "csv": tune.CSVLoggerCallback, "tensorboard": tune.TBXLoggerCallback}
    callbacks, trial = [kinds[name]() for name in loggers], Trial()
    for callback in callbacks:
        callback.on_trial_start(0, [], trial)
    trainable = Empty()
    train = trainable.train

    def log(i: int, metrics: Metrics) -> None:
        trainable.metrics = metrics
        result = train()
        for callback in callbacks:
            callback.on_trial_result(i, [], trial, result)

    try:
        yield log
    finally:
        for callback in callbacks:
            callback.on_trial_complete(0, [], trial)
        trainable.stop()


@contextlib.contextmanager
def _lightning(directory: Path) -> Iterator[Log]:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(directory), name="run", version=0)

    def log(i: int, metrics: Metrics) -> None:
        logger.log_metrics(metrics, i)
        if i % 100 == 99:  # its default; the Trainer asks for it
            logger.save()

    try:
        yield log
    finally:
        logger.finalize("success")


@contextlib.contextmanager
def _trackio(directory: Path) -> Iterator[Log]:
    os.environ.update(
        TRACKIO_DIR=str(directory), HF_HUB_OFFLINE="1", GRADIO_ANALYTICS_ENABLED="False", DO_NOT_TRACK="1"
    )
    import trackio

    trackio.init(project="bench", name="run", embed=False)
    try:
        yield lambda i, metrics: trackio.log(metrics, step=i)
    finally:
        trackio.finish()


@contextlib.contextmanager
def _wandb(directory: Path) -> Iterator[Log]:
    places = {f"WANDB_{name}_DIR": str(directory) for name in ("CACHE", "CONFIG", "DATA")}
    os.environ.update(WANDB_DIR=str(directory), WANDB_ERROR_REPORTING="false", WANDB_DISABLE_GIT="true", **places)
    import wandb

    settings = wandb.Settings(x_disable_stats=True, silent=True, console="off")
    run = wandb.init(project="bench", dir=str(directory), mode="offline", settings=settings)
    try:
        yield lambda i, metrics: run.log(metrics, step=i)
    finally:
        run.finish()


LOGGERS = {
    "trainyard": Logger("trainyard, json and csv", None, lambda d: _trainyard(d, ["json", "csv"])),
    "trainyard-none": Logger("trainyard, journal only", None, lambda d: _trainyard(d, [])),
    "floor": Logger("floor: one orjson line, one write", None, _one_line),
    "dict": Logger("floor: fill a dict", None, _dict_fill),
    "ray": Logger("Ray Tune, json and csv", "ray", lambda d: _ray(d, ("json", "csv"))),
    "ray-all": Logger(
        "Ray Tune, its defaults (+ tensorboard)", "ray", lambda d: _ray(d, ("json", "csv", "tensorboard"))
    ),
    "ray-none": Logger("Ray Tune, no logger", "ray", lambda d: _ray(d, ())),
    "lightning": Logger("Lightning CSVLogger", "lightning", _lightning),
    "trackio": Logger("trackio", "trackio", _trackio),
    "wandb": Logger("wandb, offline", "wandb", _wandb),
}
