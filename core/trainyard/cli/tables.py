"""What the verbs share: how values, sizes and times look in a table, and which metrics are the main ones."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainyard.results import AUTO_FILLED
from trainyard.values import flatten

STATUS_COLOURS = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "interrupted": "yellow",
    "preempted": "yellow",
    "killed": "red",
}


def console() -> Console:
    """The terminal; plain and wide text where there is none, for files and `grep`."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=200)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in the house style. A column that begins with ``>`` is right-aligned."""
    out = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        right = column.startswith(">")
        out.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return out


def number(value: Any) -> str:
    """A value with about four significant digits."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        if value == int(value) and abs(value) < 1e6 if math.isfinite(value) else False:
            return str(int(value))
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def size(count: float) -> str:
    """Bytes, in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """A time span, in the two units that fit."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def ago(moment: float) -> str:
    """How long ago a moment was."""
    return f"{duration(max(0.0, time.time() - moment))} ago"


def shown_path(path: str) -> str:
    """A path as one would type it here."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def coloured(status: str) -> str:
    """A status in its colour."""
    return f"[{STATUS_COLOURS.get(status, 'white')}]{status}[/]"


def user_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own metrics that are numbers, flat."""
    own = {name: value for name, value in metrics.items() if name not in AUTO_FILLED}
    return {
        name: value for name, value in flatten(own) if isinstance(value, int | float) and not isinstance(value, bool)
    }


def main_metrics(metrics: Mapping[str, Any], most: int = 4) -> dict[str, Any]:
    """Those that a line has room for: loss and accuracy first, then in the order they were reported."""

    def rank(name: str) -> int:
        lower = name.lower()
        return 0 if "loss" in lower else 1 if "acc" in lower else 2

    own = user_metrics(metrics)
    return {name: own[name] for name in sorted(own, key=rank)[:most]}


def metrics_line(metrics: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """``loss 0.1234  accuracy 0.97``."""
    shown = main_metrics(metrics) if names is None else {name: metrics[name] for name in names if name in metrics}
    return "  ".join(f"{name} {number(value)}" for name, value in shown.items())
