"""``trainyard runs`` and ``trainyard show``."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from trainyard.cli.tables import (
    ago,
    coloured,
    console,
    duration,
    main_metrics,
    metrics_line,
    number,
    shown_path,
    size,
    table,
    user_metrics,
)
from trainyard.config import DEFAULT_STORAGE, open_storage
from trainyard.delivery import LaneState, in_call_since
from trainyard.records import Result
from trainyard.rundir import RunResult, list_runs, open_run
from trainyard.values import flatten, strict_json

_PATIENCE_S = 5.0
_CURVE_WIDTH, _CURVE_HEIGHT = 60, 4


@click.command()
@click.option("--storage", help="The storage root.  [default: TRAINYARD_STORAGE or ./runs]")
@click.option("--experiment", help="Only the runs of this experiment.")
@click.option("--limit", default=50, show_default=True, help="The newest so many; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="A JSON array, for scripts.")
def runs(storage: str | None, experiment: str | None, limit: int, as_json: bool) -> None:
    """List the runs, the newest first."""
    url = storage or os.environ.get("TRAINYARD_STORAGE") or DEFAULT_STORAGE
    root = open_storage(url).path("x").parent
    found = list(list_runs(root, experiment))
    shown = found[:limit] if limit else found
    if as_json:
        click.echo(_json([_summary(run) for run in shown]))
        return
    out = console()
    if not found:
        out.print(f"no runs in {root}; start one with: trainyard run FILE.yaml")
        return
    rows = table("run", "status", ">iteration", "metrics", "started", "experiment")
    for run in shown:
        metrics = run.metrics
        rows.add_row(
            escape(run.name),
            coloured(run.status),
            str(metrics.get("training_iteration", 0)),
            escape(metrics_line(metrics)),
            ago(run.record.created),
            escape(run.experiment),
        )
    out.print(rows)
    if len(shown) < len(found):
        out.print(f"[dim]... and {len(found) - len(shown)} more: --limit 0[/]")


@click.command()
@click.argument("name", metavar="RUN")
@click.option("--storage", help="Where to look for it.  [default: TRAINYARD_STORAGE or ./runs]")
@click.option("--json", "as_json", is_flag=True, help="A JSON object, for scripts.")
def show(name: str, storage: str | None, as_json: bool) -> None:
    """Show one run: its directory, its id (or the beginning of it), or its name."""
    run = open_run(name, storage)
    if as_json:
        click.echo(_json({**_summary(run), **_details(run)}))
        return
    out = console()
    history = run.history()
    _show_identity(out, run, history)
    _show_metrics(out, history)
    _show_trackers(out, run, history)
    _show_checkpoints(out, run)
    if run.status == "failed" and Path(run.path, "error.txt").exists():
        out.print("\n[bold]error.txt[/]")
        out.print(Text(Path(run.path, "error.txt").read_text(encoding="utf-8")[-3000:].rstrip(), style="red"))


def _summary(run: RunResult) -> dict[str, Any]:
    record = run.record
    return {
        "id": run.id,
        "name": run.name,
        "experiment": run.experiment,
        "status": run.status,
        "path": run.path,
        "trainable": record.trainable,
        "created": record.created,
        "config": run.config,
        "metrics": {name: value for name, value in run.metrics.items() if name != "config"},
    }


def _details(run: RunResult) -> dict[str, Any]:
    checkpoints = [
        {"index": c.index, "iteration": c.iteration, "path": c.path, "size": c.size, "metrics": c.metrics}
        for c in run.checkpoints
    ]
    return {
        "host": run.record.host,
        "python": run.record.python,
        "git": run.record.git,
        "tags": run.record.tags,
        "settings": run.record.settings,
        "trackers": [msgspec.to_builtins(lane) for lane in run.lanes()],
        "checkpoints": checkpoints,
    }


def _json(value: Any) -> str:
    return msgspec.json.format(strict_json(value)).decode()


def _show_identity(out: Console, run: RunResult, history: list[Result]) -> None:
    record = run.record
    facts = table("", "")
    facts.show_header = False
    facts.add_row("run", f"[bold]{escape(run.name)}[/]  {coloured(run.status)}")
    facts.add_row("id", f"{run.id}  of experiment {escape(run.experiment)}")
    facts.add_row(
        "started", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.created))} on {escape(record.host)}"
    )
    facts.add_row("trainable", escape(record.trainable))
    if record.git:
        facts.add_row("commit", record.git.commit[:12] + ("  (with changes)" if record.git.dirty else ""))
    facts.add_row("directory", escape(shown_path(run.path)))
    if history:
        last = history[-1].metrics
        facts.add_row(
            "progress",
            f"iteration {last['training_iteration']}, {len(history)} results, {duration(last['time_total_s'])}",
        )
    for name, value in flatten(run.config):
        facts.add_row("config", escape(f"{name}: {number(value)}"))
    out.print(facts)


def _show_metrics(out: Console, history: list[Result]) -> None:
    series = _series(history)
    if not series:
        return
    rows = table("metric", ">first", ">last", ">min", ">max")
    for name, values in series.items():
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        rows.add_row(escape(name), *map(number, (values[0], values[-1], min(finite), max(finite))))
    out.print()
    out.print(rows)
    for name in main_metrics(history[-1].metrics):
        if len(series.get(name, [])) > 1:
            _draw(out, name, series[name])


def _series(history: list[Result]) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {}
    for result in history:
        for name, value in user_metrics(result.metrics).items():
            series.setdefault(name, []).append(value)
    return series


def _draw(out: Console, name: str, values: list[float]) -> None:
    """A curve over all results, its highest and lowest value at the side."""
    from sparklines import sparklines

    width = min(_CURVE_WIDTH, out.width - 16)
    columns = _as_wide_as(values, width)
    known = [value for value in columns if value is not None]
    if not known:
        return
    lines = sparklines(columns, num_lines=_CURVE_HEIGHT)
    sides = [number(max(known)), *[""] * (len(lines) - 2), number(min(known))]
    out.print(f"\n{escape(name)}")
    for side, line in zip(sides, lines, strict=True):
        out.print(f"[dim]{side:>12}[/]  [cyan]{line}[/]")


def _as_wide_as(values: list[float], width: int) -> list[float | None]:
    """The curve in so many columns: means of neighbours, or each value several times; None for a gap."""
    columns: list[float | None] = []
    for i in range(width):
        low = i * len(values) // width
        part = [value for value in values[low : max(low + 1, (i + 1) * len(values) // width)] if math.isfinite(value)]
        columns.append(sum(part) / len(part) if part else None)
    return columns


def _show_trackers(out: Console, run: RunResult, history: list[Result]) -> None:
    lanes = {lane.tracker: lane for lane in run.lanes()}
    for name in run.record.settings.get("trackers", {}):
        lanes.setdefault(name, LaneState(name, name))
    if not lanes:
        return
    rows = table("tracker", ">delivered", ">owed", ">lag", ">set aside", "state")
    for lane in lanes.values():
        waiting = [result for result in history if result.seq > lane.seq]
        rows.add_row(
            escape(lane.tracker),
            str(lane.delivered),
            str(len(waiting)),
            duration(time.time() - waiting[0].time) if waiting else "",
            str(len(lane.rejected) + lane.dropped),
            _state(run, lane),
        )
    out.print()
    out.print(rows)


def _state(run: RunResult, lane: LaneState) -> str:
    """How a lane stands, and if it does not get on, why."""
    began_anew = ""
    if lane.restarted_for is not None:
        began_anew = f"; [yellow]{escape(lane.restarted_for)}[/], begun anew {lane.restarts} times"
    called = in_call_since(Path(run.path), lane.tracker)
    if lane.error is not None:
        return f"[red]{escape(lane.error)}[/], since {ago(lane.failing_since or time.time())}{began_anew}"
    if called is not None and time.time() - called > _PATIENCE_S:
        return f"[red]has not returned[/] since {ago(called)}{began_anew}"
    state = "done" if lane.ended else "[green]delivering[/]" if run.status == "running" else "[yellow]waiting[/]"
    return state + began_anew


def _show_checkpoints(out: Console, run: RunResult) -> None:
    checkpoints = run.checkpoints
    if not checkpoints:
        return
    rows = table("checkpoint", ">iteration", ">size", "metrics")
    for checkpoint in checkpoints:
        rows.add_row(
            Path(checkpoint.path).name,
            str(checkpoint.iteration),
            size(checkpoint.size),
            escape(metrics_line(checkpoint.metrics)),
        )
    out.print()
    out.print(rows)
