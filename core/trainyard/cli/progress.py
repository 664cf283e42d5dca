"""The live line of ``trainyard run``: iteration, metrics, rate, time left."""

from __future__ import annotations

import sys
import time
from typing import Any

import rich.progress
from rich.console import Console
from rich.text import Text

from trainyard.cli.tables import duration, metrics_line
from trainyard.delivery import Owed
from trainyard.hookspecs import hookimpl
from trainyard.records import Result, RunInfo

_REFRESH_S = 0.1
_PLAIN_EVERY_S = 5.0
_RATE_AFTER_S = 0.2  # before that a rate says nothing


class ProgressLine:
    """A callback that shows how a run is doing: a live line on a terminal, now and then a plain one elsewhere.

    Args:
        total: iterations until the run stops, if that is known.
    """

    def __init__(self, total: int | None) -> None:
        # the stream itself: `sys.stderr` may become a copying one while the line is live
        self.console = Console(file=sys.stderr, highlight=False)
        self._total = total
        self._began = time.perf_counter()
        self._first: int | None = None
        self._shown_at = 0.0
        self._waited_since: float | None = None
        self._broken = False
        self._period = _REFRESH_S if self.console.is_terminal else _PLAIN_EVERY_S
        self._live: rich.progress.Progress | None = None
        self._task: Any = None

    def __enter__(self) -> ProgressLine:
        if self.console.is_terminal:
            columns: list[Any] = [rich.progress.SpinnerColumn("line"), "[bold]{task.description}[/]"]
            if self._total:
                columns.append(rich.progress.BarColumn(24))
            columns.append("{task.fields[text]}")
            self._live = rich.progress.Progress(*columns, console=self.console, transient=True, refresh_per_second=10)
            self._task = self._live.add_task("starting", total=self._total, text="")
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    @hookimpl
    def on_result(self, run: RunInfo, result: Result) -> None:
        """Show a result, unless the last one was shown only just now."""
        now = time.perf_counter()
        iteration = result.step
        if self._first is None:
            self._first = iteration - 1
            self._began = now - (result.get("time_this_iter_s") or 0.0)
        if self._broken or (now - self._shown_at < self._period and iteration != self._total):
            return
        self._shown_at = now
        text = self._text(iteration, result, now)
        try:
            if self._live is not None:
                self._live.update(self._task, description=run.name, completed=iteration, text=text)
            else:
                self.console.print(Text(f"{run.name}  {text}"), soft_wrap=True)
        except (OSError, SystemExit):  # rich exits when nobody reads any more; a run does not end for that
            self._broken = True

    def waiting(self, trackers: list[Owed], left: float) -> None:
        """Show which trackers the end of the run is waiting for.

        Args:
            trackers: those that are not done.
            left: seconds that they still have.
        """
        now = time.perf_counter()
        if self._waited_since is None:
            self._waited_since = self._shown_at = now
        if not trackers or self._broken or now - self._shown_at < self._period:
            return
        self._shown_at = now
        parts = [f"{t.tracker}{f' at {t.where}' if t.where else ''}: {t.owed} results to go" for t in trackers]
        text = f"delivering to {'; '.join(parts)}; {left:.0f} s left"
        try:
            if self._live is not None:
                self._live.update(self._task, text=text)
            else:
                self.console.print(Text(text), soft_wrap=True)
        except (OSError, SystemExit):
            self._broken = True

    def _text(self, iteration: int, result: Result, now: float) -> str:
        done = iteration - (self._first or 0)
        rate = done / (now - self._began) if now > self._began else 0.0
        parts = [f"iteration {iteration}" + (f"/{self._total}" if self._total else ""), metrics_line(result.metrics)]
        if rate and now - self._began > _RATE_AFTER_S:
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{duration(1 / rate)} each")
            if self._total and iteration < self._total:
                parts.append(f"{duration((self._total - iteration) / rate)} left")
        return "  ".join(part for part in parts if part)
