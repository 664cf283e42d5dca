"""Which measurements there are, in what sizes, and what they are held against."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.loggers import LOGGERS, PEERS

__all__ = ["PARTS", "TARGETS", "Measurement", "Target", "plan"]

PARTS = {
    "log": "One result: what the training thread waits for",
    "where": "Where the time of one result goes",
    "lanes": "Many results: delivery and reading",
    "trackers": "Trackers: what training waits for, and how fast they are served",
    "outage": "An MLflow server that fails: what training loses, and how it is caught up",
    "sync": "The sync process",
    "checkpoint": "Checkpoints: durable save, cold restore",
    "memory": "Memory",
    "import": "Import",
}
"""The parts, and their titles."""


class Measurement(NamedTuple):
    """One thing to measure, once a round.

    Attributes:
        part: one of :data:`PARTS`.
        table: its table in that part.
        title: its row in that table.
        what, options: see :mod:`benchmarks.measures`.
        peer: whose interpreter runs it; None: ours.
        shown: the figures in the table, the first one is compared.
        floor: whether the others are compared with it.
        needs: modules without which it is left out.
    """

    part: str
    table: str
    title: str
    what: str
    options: dict[str, Any]
    shown: tuple[str, ...]
    peer: str | None = None
    floor: bool = False
    needs: tuple[str, ...] = ()


class Target(NamedTuple):
    """What a figure of ours is meant to be. `than`: the row whose median it is divided by first."""

    table: str
    title: str
    figure: str
    sign: str
    limit: float
    than: str = ""


def plan(quick: bool) -> list[Measurement]:
    """All measurements, in the order in which a round runs them."""
    small = 10 if quick else 1
    out: list[Measurement] = []
    for width, work_us, count in ((10, 0, 20_000), (10, 200, 20_000), (1000, 0, 2_000)):
        out += _logs("log", _log_table(width, work_us), _ALONE, width, count // small, work_us)
    stages = ("whole", "step, check", "fill", "recordable", "encode", "crc, frame", "write", "remaining")
    out += [
        Measurement("where", "us of one train() without trackers", f"{width} metrics", "where",
                    {"width": width, "count": 20_000 // small if width == 10 else 2_000 // small}, stages)
        for width in (10, 1000)
    ]  # fmt: skip
    for tracker in ("json", "csv"):
        table = f"{tracker} lane"
        options: dict[str, Any] = {"tracker": tracker, "count": 200_000 // small}
        out += [
            Measurement("lanes", table, "trainyard", "lane", options, ("per_s", "cpu_per_s")),
            Measurement("lanes", table, f"floor: {'orjson' if tracker == 'json' else 'csv.writer'}, 500 rows a write",
                        "lane_floor", options, ("per_s", "cpu_per_s"), floor=True, needs=("orjson",)),
        ]  # fmt: skip
    out.append(
        Measurement("lanes", "journal", "trainyard", "read", {"count": 500_000 // small}, ("per_s", "cpu_per_s"))
    )
    out += [
        Measurement("lanes", "table of 100,000 results", title, "dataframe", {"count": 100_000 // small, "how": how},
                    ("seconds",), needs=("pandas",))
        for how, title in (("trainyard", "trainyard"), ("csv", "pandas.read_csv"), ("json", "pandas.read_json"))
    ]  # fmt: skip
    out += _trackers(small) + _outage(small) + _sync(small)
    for arrays, mib, shape in ((1, 1024, "one array of 1 GiB"), (1000, 250, "1,000 arrays of 256 KiB")):
        for verb in ("save", "restore"):
            for how, title in _CHECKPOINT_WAYS:
                options = {"verb": verb, "how": how, "arrays": arrays, "mib": mib / (4 if quick else 1)}
                shown = ("mib_s", "over_mib", "cpu_s")
                out.append(
                    Measurement("checkpoint", f"{verb}, {shape}", title, "checkpoint", options, shown,
                                "lightning" if how == "torch" else None, how == "raw",
                                ("numpy", "torch") if how == "torch" else ("numpy",))
                )  # fmt: skip
    out.append(
        Measurement("memory", "growth over 1,000,000 results", "trainyard, json and csv", "memory",
                    {"count": 1_000_000 // small}, ("growth_mib", "before_mib"))
    )  # fmt: skip
    starts = {"import trainyard": None, "import trainyard; trainyard.run, trainyard.Trainable": None}
    peers = {f"import {peer.module}": name for name, peer in PEERS.items()}
    out += [
        Measurement("import", "CPU over the bare interpreter", code, "imports",
                    {"code": code, "times": 5 if quick or peer else 15}, ("cpu_ms", "bare_ms"), peer)
        for code, peer in {**starts, **peers}.items()
    ]  # fmt: skip
    return out


def _logs(part: str, table: str, names: tuple[str, ...], width: int, count: int, work_us: int) -> list[Measurement]:
    """One table: a row for each way to record results. The slow ones record fewer."""
    out = []
    for name in names:
        logger = LOGGERS[name]
        fewer = 50 if name == "mlflow" else 10 if (logger.peer and width > 10) or name in _SLOW else 1
        options: dict[str, Any] = {"logger": name, "width": width, "count": max(10, count // fewer), "work_us": work_us}
        shown = ("p50_us", "p99_us", "mean_us", "cpu_us", *(("added_us",) if work_us else ()))
        needs = ("orjson",) if name == "floor" else logger.needs
        out.append(Measurement(part, table, logger.title, "log", options, shown, logger.peer, name == "floor", needs))
    return out


def _trackers(small: int) -> list[Measurement]:
    out: list[Measurement] = []
    for width, work_us, count in ((10, 0, 10_000), (10, 200, 10_000), (1000, 0, 500)):
        out += _logs("trackers", _served_table(width, work_us), _SERVED, width, count // small, work_us)
    work_us = 500
    for name, base in (("whole", "whole-none"), ("tensorboardX", "dict"), ("mlflow-batch", "dict")):
        options: dict[str, Any] = {
            "logger": name,
            "base": base,
            "count": 10_000 // small,
            "work_us": work_us,
            "times": 2,
        }
        out.append(
            Measurement("trackers", _TRAINER, LOGGERS[name].title, "trainer", options,
                        ("cpu_ratio", "more_s", "peak_ratio", "peak_mib"), None, needs=LOGGERS[name].needs)
        )  # fmt: skip
    options = {"tracker": "tensorboard", "count": 100_000 // small}
    few = {"tracker": "tensorboard", "count": 20_000 // small}
    out += [
        Measurement("trackers", "tensorboard lane", "trainyard", "lane", options, ("per_s", "cpu_per_s"),
                    needs=("tensorboardX",)),
        Measurement("trackers", "tensorboard lane", "tensorboardX SummaryWriter", "lane_floor", few,
                    ("per_s", "cpu_per_s"), needs=("tensorboardX",)),
    ]  # fmt: skip
    out += [
        Measurement("trackers", "mlflow lane, next to log_batch with 1,000 points a call", f"trainyard, {title}", "mlflow_lane",
                    {"where": where, "count": 3_000 // small, "times": 2},
                    ("of_batches", "cpu_of_batches", "points_s", "batch_points_s", "per_s"), needs=("mlflow",))
        for where, title in (("server", "mlflow server over sqlite"), ("sqlite", "sqlite file"))
    ]  # fmt: skip
    return out


def _outage(small: int) -> list[Measurement]:
    turns = 12 if small > 1 else 60
    out = [
        Measurement("outage", _outage_table(kind), title, "outage",
                    {"kind": kind, "who": who, "turns": turns if who == "trainyard" else 4},
                    ("of_rate", "per_s", "longest_ms"), needs=("mlflow",))
        for kind in _FAILURES
        for who, title in (("trainyard", _MLFLOW_ON), ("mlflow", "MLflow's own client"))
    ]  # fmt: skip
    out.append(
        Measurement("outage", "results owed when the server comes back", _MLFLOW_ON, "caught_up", {"count": 20_000 // small},
                    ("per_s", "turns_per_s", "seconds"), needs=("mlflow",))
    )  # fmt: skip
    return out


def _sync(small: int) -> list[Measurement]:
    pairs = 5 if small > 1 else 7
    return [
        Measurement("sync", "start", f"trainyard, {title}", "first_step", {"trackers": trackers, "times": pairs},
                    ("more_ms", "first_ms", "without_ms", "lost_ms"), needs=needs)
        for trackers, title, needs in (
            (_FILES, "json, csv and tensorboard", ("tensorboardX",)), ((*_FILES, "mlflow"), "and mlflow", ("mlflow",))
        )
    ] + [
        Measurement("sync", "at work", _FILES_ON, "idle", {"seconds": 20.0 if small == 1 else 10.0, "count": 20_000 // small},
                    ("idle_percent", "rss_mib", "uss_mib", "trainer_percent"), needs=("tensorboardX", "psutil")),
        Measurement("sync", "end of a run that owes nothing", _FILES_ON, "finish", {"times": 20 if small == 1 else 5},
                    ("finish_p50_ms", "finish_p90_ms", "finish_max_ms"), needs=("tensorboardX",)),
    ]  # fmt: skip


_ALONE = (
    "trainyard", "trainyard-none", "floor", "dict", "ray", "ray-all", "ray-none", "lightning", "trackio", "wandb",
)  # fmt: skip
_SERVED = (
    "synced", "synced-none", "floor", "ray-all", "tensorboardX", "torch", "wandb", "mlflow-batch", "mlflow",
)  # fmt: skip
_SLOW = ("tensorboardX", "torch", "mlflow-batch")
_FILES = ("json", "csv", "tensorboard")
_FILES_ON = "trainyard, json, csv and tensorboard"
_MLFLOW_ON = "trainyard, mlflow"
_FAILURES = {
    "refused": "it refuses connections",
    "silent": "it never answers",
    "slow": "it takes 2 s for each answer",
    "error": "it answers 500",
}
_TRAINER = "a whole run of 10,000 results with 500 us of training each, next to the same without"
_CHECKPOINT_WAYS = (
    ("raw", "floor: write, fsync / read"),
    ("trainyard", "trainyard: durable, hashed / verified"),
    ("raw", "floor: write, fsync / read"),  # on both sides of ours, because disks drift
    ("numpy", "numpy.savez / load"),
    ("torch", "torch.save / load"),
)


def _log_table(width: int, work_us: int) -> str:
    how = f"{work_us} us of training between calls" if work_us else "back to back"
    return f"{width:,} metrics, {how}"


def _served_table(width: int, work_us: int) -> str:
    return f"{_log_table(width, work_us)}, trackers served"


def _outage_table(kind: str) -> str:
    return f"1 ms of training a result, {_FAILURES[kind]}"


_OURS = LOGGERS["trainyard"].title
_ALL_ON = LOGGERS["synced"].title
TARGETS = [
    Target(_log_table(10, 0), _OURS, "p50_us", "<=", 12),
    Target(_log_table(10, 0), _OURS, "p99_us", "<=", 40),
    Target(_log_table(1000, 0), _OURS, "p50_us", "<=", 120),
    Target("json lane", "trainyard", "per_s", ">=", 100_000),
    Target("csv lane", "trainyard", "per_s", ">=", 60_000),
    Target("journal", "trainyard", "per_s", ">=", 500_000),
    Target("table of 100,000 results", "trainyard", "seconds", "<=", 0.5),
    *(
        Target(f"{verb}, {shape}", _CHECKPOINT_WAYS[1][1], figure, sign, limit, than)
        for shape in ("one array of 1 GiB", "1,000 arrays of 256 KiB")
        for verb, share in (("save", 0.85), ("restore", 0.8))
        for figure, sign, limit, than in (("mib_s", ">=", share, _CHECKPOINT_WAYS[0][1]), ("over_mib", "<=", 128, ""))
    ),
    Target(_served_table(10, 0), _ALL_ON, "p50_us", "<=", 10),
    Target(_served_table(10, 0), _ALL_ON, "p99_us", "<=", 40),
    Target(_served_table(1000, 0), _ALL_ON, "p50_us", "<=", 120),
    Target(_TRAINER, _ALL_ON, "cpu_ratio", "<=", 1.02),
    Target(_TRAINER, _ALL_ON, "peak_ratio", "<=", 1.02),
    Target("tensorboard lane", "trainyard", "per_s", ">=", 20_000),
    Target(
        "mlflow lane, next to log_batch with 1,000 points a call",
        "trainyard, mlflow server over sqlite",
        "of_batches",
        ">=",
        0.9,
    ),
    *(Target(_outage_table(kind), _MLFLOW_ON, "of_rate", ">=", 0.97) for kind in _FAILURES),
    Target("start", _FILES_ON, "more_ms", "<=", 30),
    Target("at work", _FILES_ON, "idle_percent", "<=", 0.5),
    Target("at work", _FILES_ON, "rss_mib", "<=", 80),
    Target("end of a run that owes nothing", _FILES_ON, "finish_p50_ms", "<=", 100),
    Target("growth over 1,000,000 results", _OURS, "growth_mib", "<=", 16),
    Target("CPU over the bare interpreter", "import trainyard", "cpu_ms", "<=", 60),
]
