"""Everything that can record a result, behind one protocol: trainyard, the floors, and the peers.

Imports stand inside the functions, because each peer is installed in an environment of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import results

__all__ = [
    "LOGGERS",
    "PEERS",
    "SERVED",
    "Logger",
    "Peer",
    "abandon",
    "finished_run",
    "served",
    "start_run",
    "sync_processes",
]

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
    "lightning": Peer(
        "lightning", ("torch==2.13.0", "lightning", "numpy", "tensorboard"), "lightning.pytorch.loggers", optional=True
    ),
    "trackio": Peer("trackio", ("trackio",), "trackio"),
    "wandb": Peer("wandb", ("wandb",), "wandb"),
}
"""By the name of its environment below ``.bench/venvs``."""


class Logger(NamedTuple):
    """One way to record results: opened on a directory, it gives the function that training calls.

    Attributes:
        title: its row in the tables.
        peer: whose interpreter runs it; None: ours.
        open: a context manager that gives that function.
        distribution: what is measured, where it is not the peer's.
        needs: modules without which it is left out.
    """

    title: str
    peer: str | None
    open: Opener
    distribution: str = ""
    needs: tuple[str, ...] = ()

    @property
    def measured(self) -> str:
        """The distribution that is measured; empty for a floor."""
        own = "trainyard" if self.title.startswith("trainyard") else ""
        return self.distribution or (PEERS[self.peer].distribution if self.peer else own)


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


SERVED = ("json", "csv", "tensorboard", "mlflow")
"""The trackers that are all on where the sync process is measured; mlflow writes to its default, a sqlite file."""


def start_run(directory: Path, trackers: Any) -> Any:
    """An open run; the files by which its sync process is found go with the directory."""
    import trainyard

    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = None
    return trainyard.start_run(storage=directory, trackers=trackers)


def abandon(run: Any) -> None:
    """End a run without waiting for its trackers, and their process with it."""
    from trainyard import active_run

    active_run.DRAIN_S = 0.0
    run.finish()
    for process in sync_processes():
        process.kill()
        process.wait()


def served(run: Any, seq: int, limit_s: float = 120.0) -> float:
    """Wait until all trackers of a run have confirmed its first results. Returns the seconds.

    Args:
        run: a run, open or not.
        seq: how many results.
        limit_s: seconds that they have.
    """
    import trainyard

    lanes, started = trainyard.open_run(run.path).lanes, time.monotonic()
    wanted = len(run.record.settings.get("trackers", {}))
    while sum(state.seq >= seq for state in lanes()) < wanted:
        if time.monotonic() - started > limit_s:
            raise AssertionError(f"not served within {limit_s:.0f} s: {lanes()}")
        time.sleep(0.05)
    return time.monotonic() - started


def sync_processes() -> list[Any]:
    """The sync processes that this process has started, as psutil shows them."""
    import psutil

    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # git, for one, has just ended
            if "trainyard.sync" in child.cmdline():
                found.append(child)
    return found


@contextlib.contextmanager
def _synced(directory: Path, trackers: tuple[str, ...]) -> Iterator[Log]:
    """A logger around any loop; the sync process, if there is one, is at work before training begins."""
    run = start_run(directory, list(trackers))
    run.log({"first": 0.5})
    served(run, 1)
    try:
        yield lambda i, metrics: run.log(metrics, i)
    finally:
        abandon(run)  # what is still owed is not part of this


@contextlib.contextmanager
def _whole_run(directory: Path, trackers: tuple[str, ...]) -> Iterator[Log]:
    """The same with its beginning and its end, as users have it."""
    with start_run(directory, list(trackers)) as run:
        yield lambda i, metrics: run.log(metrics, i)


def finished_run(folder: Path, count: int) -> Any:
    """A run of so many results of 10 metrics that nobody was told of."""
    import trainyard

    metrics = results(10)
    with LOGGERS["trainyard-none"].open(folder) as train:
        for i in range(count):
            train(i, metrics[i % 64])
    (found,) = folder.glob("*/*/run.json")
    return trainyard.open_run(found.parent)


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


@contextlib.contextmanager
def _summary_writer(directory: Path, module: str) -> Iterator[Log]:
    writer = importlib.import_module(module).SummaryWriter(str(directory))
    add = writer.add_scalar

    def log(i: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            add(name, value, i)

    try:
        yield log
    finally:
        writer.close()


@contextlib.contextmanager
def _mlflow(directory: Path, batched: bool) -> Iterator[Log]:
    """MLflow's own calls, into a sqlite file: each metric as it comes, or full batches of 1,000."""
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="1")
    import mlflow
    from mlflow.entities import Metric

    uri = f"sqlite:///{directory}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("bench")).info.run_id
    points: list[Any] = []

    def log_each(i: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            client.log_metric(run_id, name, value, step=i)

    def log_batch(i: int, metrics: Metrics) -> None:
        moment = int(time.time() * 1000)
        points.extend(Metric(name, value, moment, i) for name, value in metrics.items())
        while len(points) >= 1000:
            client.log_batch(run_id, points[:1000])
            del points[:1000]

    yield log_batch if batched else log_each


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
    "synced": Logger("trainyard, json, csv, tensorboard and mlflow", None, lambda d: _synced(d, SERVED)),
    "synced-none": Logger("trainyard, no trackers", None, lambda d: _synced(d, ())),
    "whole": Logger("trainyard, json, csv, tensorboard and mlflow", None, lambda d: _whole_run(d, SERVED)),
    "whole-none": Logger("trainyard, no trackers", None, lambda d: _whole_run(d, ())),
    "tensorboardX": Logger(
        "tensorboardX SummaryWriter",
        None,
        lambda d: _summary_writer(d, "tensorboardX"),
        "tensorboardX",
        ("tensorboardX",),
    ),
    "torch": Logger(
        "torch SummaryWriter", "lightning", lambda d: _summary_writer(d, "torch.utils.tensorboard"), "torch"
    ),
    "mlflow-batch": Logger(
        "MLflow, log_batch of 1,000, sqlite", None, lambda d: _mlflow(d, True), "mlflow", ("mlflow",)
    ),
    "mlflow": Logger("MLflow, log_metric, sqlite", None, lambda d: _mlflow(d, False), "mlflow", ("mlflow",)),
}
