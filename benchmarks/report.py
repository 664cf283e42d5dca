"""Rows into tables: on the screen, as ``docs/benchmarks.md``, and as a plot."""

from __future__ import annotations

import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plan import PARTS, TARGETS, Measurement, Target

__all__ = ["Medians", "draw", "page", "tables"]

_UNITS = {
    "p50_us": "p50 us", "p99_us": "p99 us", "mean_us": "mean us", "cpu_us": "CPU us", "added_us": "loop +us", "per_s": "a second",
    "cpu_per_s": "a CPU second", "mib_s": "MiB/s", "over_mib": "memory beyond the state, MiB", "cpu_s": "CPU s",
    "growth_mib": "growth MiB", "before_mib": "before MiB", "cpu_ms": "CPU ms", "bare_ms": "bare interpreter ms", "seconds": "s",
    "cpu_ratio": "CPU, times the other's", "peak_ratio": "peak memory, times the other's", "peak_mib": "peak MiB",
    "of_batches": "of log_batch's speed", "cpu_of_batches": "CPU a point, times log_batch's", "points_s": "points a second",
    "batch_points_s": "log_batch, points a second", "of_rate": "of the rate without trackers", "longest_ms": "longest call ms",
    "turns_per_s": "training meanwhile, turns a second", "more_ms": "ms more than without trackers",
    "first_ms": "first step after ms",
    "without_ms": "without trackers ms", "lost_ms": "lost in the first 1,000 turns of 1 ms, ms", "more_s": "CPU s more",
    "idle_percent": "CPU when idle, % of a core",
    "trainer_percent": "the training process, %", "rss_mib": "RSS MiB", "uss_mib": "USS MiB", "finish_p50_ms": "p50 ms",
    "finish_p90_ms": "p90 ms", "finish_max_ms": "max ms",
}  # fmt: skip
_MORE_IS_BETTER = {"per_s", "cpu_per_s", "mib_s", "of_batches", "of_rate"}
_COMPARED_ALREADY = {"of_batches", "of_rate", "cpu_ratio", "more_ms"}
_INTRO = """\
What recording costs, next to the least that could do it and to what people use instead. Each figure is the median of
{rounds} rounds; in a round every measurement ran once, in a fresh process, ours and the peers' in turn. "x floor" and
"x ours" compare the first figure of a row with the floor's and with ours: 2.0 means twice as slow.

Command: `{command}`, finished {date}, on {machine}. Other processes shared the machine: compare
ratios, not figures of different days.
"""
_NOTES = {
    "log": 'Wall-clock time around each call, for all. "CPU us" counts all threads of the process for each result, without the '
    'training; "loop +us" is what a turn of the loop really lost, background threads included. Child processes are not counted.',
    "where": "Each stage by itself, timed in groups of calls; the whole is the median of `train()`.",
    "lanes": "From a finished journal, by one lane with nothing delivered yet; the floors have their rows in memory already.",
    "checkpoint": "A save ends when everything is durable. A restore reads files that are not in the page cache and touches every "
    "page; trainyard's is verified by hash. The floor of a restore reads into new memory, as a "
    "plain read must; trainyard maps the files, so where new memory is slow, as in a virtual machine, the ratio flatters us.",
    "trackers": "trainyard by `start_run` and `Run.log`, all four trackers on and delivered by the sync process, which is at work "
    "before the first call that counts; mlflow writes to its default, a sqlite file. The CPU of a whole run is the training "
    "process' own, from the opening to the end of `finish()`; of the peers it includes their import. The lanes deliver a finished "
    "journal; their results have two metrics more, the times, which the points count.",
    "outage": "The loop with MLflow and the one without take turns of a quarter of a second on one core, after 3 s in which the "
    "client is imported (its cost is below); the sync process is stopped while the other one has its turn. MLflow's own client "
    "gives up a call after 244 s: its longest one here has just not ended.",
    "sync": "The loss in the first 1,000 turns is what its start takes from training on a machine whose cores are all busy. Memory "
    "is the sync process', after so many results that all its code has run.",
    "memory": "Resident memory of the process, from the 10,000th result on.",
    "import": "User and system time of a new process.",
}


class Medians:
    """The rows of all rounds, by table and title."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            self._rows[row["table"], row["title"]].append(row)

    def get(self, table: str, title: str, figure: str) -> float | None:
        """The median of one figure; None if it was not measured."""
        found = [row[figure] for row in self._rows[table, title] if figure in row]
        return statistics.median(found) if found else None

    def spread(self, table: str, title: str, figure: str) -> str:
        """The least and the most of it."""
        found = [row[figure] for row in self._rows[table, title] if figure in row]
        return f"{_figure(min(found))} to {_figure(max(found))}" if found else ""

    def version(self, table: str, title: str) -> str:
        """The version that was measured."""
        return next((row["version"] for row in self._rows[table, title] if row.get("version")), "")

    def why_not(self, table: str, title: str) -> str:
        """Why there is nothing of it."""
        return next((row["error"] for row in self._rows[table, title] if "error" in row), "not run")


def tables(measurements: list[Measurement], medians: Medians, part: str) -> Iterator[str]:
    """The tables of a part, as Markdown."""
    by_table: dict[str, dict[str, Measurement]] = defaultdict(dict)
    for one in measurements:
        if one.part == part:
            by_table[one.table].setdefault(one.title, one)
    for table, rows in by_table.items():
        first = next(iter(rows.values()))
        figure = first.shown[0]
        floor = next((medians.get(table, one.title, figure) for one in rows.values() if one.floor), None)
        ours = next(
            (medians.get(table, title, figure) for title in rows if title.startswith(("trainyard", "import tr"))), None
        )
        compared = len(rows) > 1 and part != "where" and figure not in _COMPARED_ALREADY
        columns = [_UNITS.get(name, name) for name in first.shown]
        heads = [table, *columns, *(["x floor"] if floor else []), *(["x ours"] if compared else []), "all rounds"]
        lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
        for title, one in rows.items():
            value = medians.get(table, title, figure)
            if value is None:
                lines.append(_line([title, medians.why_not(table, title), *[""] * (len(heads) - 2)]))
                continue
            figures = [medians.get(table, title, name) for name in one.shown]
            cells = ["" if number is None else _figure(number) for number in figures]
            ratios = [_ratio(figure, value, floor)] if floor else []
            ratios += [_ratio(figure, value, ours)] if compared else []
            name = f"{title} ({version})" if (version := medians.version(table, title)) else title
            lines.append(_line([name, *cells, *ratios, medians.spread(table, title, figure)]))
        yield "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(figure: str, value: float, other: float | None) -> str:
    if not other or not value:
        return ""
    return _figure(other / value if figure in _MORE_IS_BETTER else value / other)


def _figure(number: float) -> str:
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f}"


def targets(medians: Medians) -> str:
    """What was aimed for, and whether it was met, as Markdown."""
    lines = [_line(["target", "wanted", "measured", ""]), _line(["---", "---:", "---:", "---"])]
    for target in TARGETS:
        value = _value(target, medians)
        if value is not None:
            met = value <= target.limit if target.sign == "<=" else value >= target.limit
            unit = "of the floor's speed" if target.than else _UNITS[target.figure]
            name = f"{target.table}: {unit}"
            lines.append(
                _line([name, f"{target.sign} {_figure(target.limit)}", _figure(value), "met" if met else "missed"])
            )
    return "\n".join(lines)


def _value(target: Target, medians: Medians) -> float | None:
    value = medians.get(target.table, target.title, target.figure)
    if value is None or not target.than:
        return value
    other = medians.get(target.table, target.than, target.figure)
    return value / other if other else None


def page(measurements: list[Measurement], medians: Medians, *, command: str, rounds: int, date: str) -> str:
    """``docs/benchmarks.md``."""
    parts = ["# Benchmarks", _INTRO.format(rounds=rounds, command=command, date=date, machine=_machine())]
    parts += ["![Microseconds a result](benchmarks.svg)", "## Targets", targets(medians)]
    for part, title in PARTS.items():
        parts += [f"## {title}", _NOTES[part], *tables(measurements, medians, part)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _machine() -> str:
    """This machine in words; no names."""
    model = ""
    try:
        info = Path("/proc/cpuinfo").read_text()
        model = next(line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (OSError, ValueError, StopIteration):
        memory = ""
    cores = os.cpu_count() or 1
    named = f" ({model})" if model else ""
    return f"{platform.system()} {platform.machine()}, {cores} cores{named}{memory}, Python {platform.python_version()}"


def draw(measurements: list[Measurement], medians: Medians, path: Path) -> None:
    """The plot: microseconds a result on the training thread, on a logarithmic scale.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    chosen = [one for one in measurements if one.part == "log"]
    widths = [table for table in dict.fromkeys(one.table for one in chosen) if "back to back" in table]
    figure, axes = plt.subplots(1, len(widths), figsize=(11, 3.6), sharey=True, layout="constrained")
    titles = [title for title in dict.fromkeys(one.title for one in chosen) if medians.get(widths[0], title, "p50_us")]
    for axis, table in zip(axes, widths):
        for i, title in enumerate(reversed(titles)):
            value = medians.get(table, title, "p50_us")
            if value is not None:
                color = "#1f6f5c" if title.startswith("trainyard") else "#bbbbbb" if "floor" in title else "#c9803c"
                axis.barh(i, value, color=color, height=0.7)
                axis.text(value * 1.15, i, _figure(value), va="center", fontsize=8)
        axis.set_xscale("log")
        axis.set_title(table, fontsize=10)
        axis.set_xlabel("median microseconds a result, on the training thread")
        axis.set_yticks(range(len(titles)), list(reversed(titles)), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.25)
    with plt.rc_context({"svg.hashsalt": "trainyard", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
