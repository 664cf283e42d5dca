"""Which measurements there are, in what sizes, and what they are held against."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.loggers import LOGGERS, PEERS

__all__ = ["PARTS", "TARGETS", "Measurement", "Target", "plan"]

PARTS = {
    "log": "One result: what the training thread waits for",
    "where": "Where the time of one result goes",
    "lanes": "Many results: delivery and reading",
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
    for width, work_us, counts in ((10, 0, 20_000), (10, 200, 20_000), (1000, 0, 2_000)):
        table = _log_table(width, work_us)
        for name, logger in LOGGERS.items():
            count = (counts // 10 if logger.peer and width > 10 else counts) // small
            options = {"logger": name, "width": width, "count": count, "work_us": work_us}
            shown = ("p50_us", "p99_us", "mean_us", "cpu_us", *(("added_us",) if work_us else ()))
            needs = ("orjson",) if name == "floor" else ()
            out.append(
                Measurement("log", table, logger.title, "log", options, shown, logger.peer, name == "floor", needs)
            )
    stages = ("whole", "step, check", "fill", "recordable", "encode", "crc, frame", "write", "remaining")
    out += [
        Measurement("where", "us of one train() without trackers", f"{width} metrics", "where",
                    {"width": width, "count": 20_000 // small if width == 10 else 2_000 // small}, stages)
        for width in (10, 1000)
    ]  # fmt: skip
    for tracker in ("json", "csv"):
        table, options = f"{tracker} lane", {"tracker": tracker, "count": 200_000 // small}
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


_OURS = LOGGERS["trainyard"].title
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
    Target("growth over 1,000,000 results", _OURS, "growth_mib", "<=", 16),
    Target("CPU over the bare interpreter", "import trainyard", "cpu_ms", "<=", 60),
]
