"""``trainyard run`` and ``trainyard resume``."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from trainyard.cli.progress import ProgressLine
from trainyard.cli.tables import coloured, console, duration, metrics_line, shown_path, table
from trainyard.config import RunConfig, Source, StopRule, apply_overrides, parse_config, read_yaml
from trainyard.errors import ConfigError, JournalError
from trainyard.launch import execute
from trainyard.redaction import REDACTED
from trainyard.rundir import RunDirectory, RunResult, open_run
from trainyard.values import flatten

_EXIT_CODES = {"completed": 0, "failed": 1, "interrupted": 130, "preempted": 143}

set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting, as in --set config.lr=0.01."
)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@set_option
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished run of the experiment.")
def run(file: str, overrides: tuple[str, ...], resume: bool) -> int:
    """Run what a YAML file describes."""
    source = read_yaml(file)
    apply_overrides(source, overrides)
    if resume:
        source.data["resume"] = "must"
    return _run(parse_config(source.data, source), source)


@click.command()
@click.argument("name", metavar="RUN")
@click.option("--storage", help="Where to look for it.  [default: TRAINYARD_STORAGE or ./runs]")
@set_option
def resume(name: str, storage: str | None, overrides: tuple[str, ...]) -> int:
    """Go on with a run: its directory, its id (or the beginning of it), or its name.

    It continues from its newest good checkpoint, with the settings it was started with.
    """
    found = open_run(name, storage)
    record = found.record
    data = {
        **_with_floats(record.settings),
        "trainable": record.trainable,
        "config": _with_floats(record.config),
        "experiment": record.experiment,
        "name": record.name,
        "storage": str(Path(found.path).parent.parent),
        "tags": record.tags,
        "resume": "must",
    }
    source = Source(f"{found.path}/run.json", record.directory, data, {})
    apply_overrides(source, overrides)
    for path, value in flatten({"config": data["config"], "trackers": _mapping(data.get("trackers"))}):
        if isinstance(value, str) and REDACTED in value:
            key = path.replace("/", ".")
            raise ConfigError(
                f"{key} was kept secret, so it is not on record: give it again with --set {key}=... (or as ${{env:NAME}})"
            )
    return _run(parse_config(data, source), source, RunDirectory(Path(found.path)))


def _with_floats(value: Any) -> Any:
    """JSON's three strings as the floats that they stand for."""
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _mapping(trackers: Any) -> dict[str, Any]:
    return trackers if isinstance(trackers, dict) else {}


def _run(config: RunConfig, source: Source, existing: RunDirectory | None = None) -> int:
    progress = ProgressLine(StopRule(config.stop).iterations)
    with progress:
        try:
            result = execute(config, [progress], source, existing, progress.waiting)
        except JournalError as error:  # the run was over by then
            click.echo(f"error: {error}", err=True)
            return 1
    _summarise(result)
    return _EXIT_CODES[result.status]


def _summarise(result: RunResult) -> None:
    out = console()
    metrics = result.metrics
    facts = table("", "")
    facts.show_header = False
    facts.add_row("run", f"[bold]{escape(result.name)}[/]  {coloured(result.status)}")
    if result.error is not None:
        facts.add_row("error", escape(f"{type(result.error).__name__}: {result.error}"))
    if metrics:
        took = duration(metrics.get("time_total_s") or 0.0)
        facts.add_row(
            "result", escape(f"iteration {metrics['training_iteration']}  {metrics_line(metrics)}  in {took}")
        )
    facts.add_row("directory", escape(shown_path(result.path)))
    written = [
        name for name in ("result.json", "progress.csv", "stdout", "error.txt") if Path(result.path, name).exists()
    ]
    written += ["events.out.tfevents.*"] if any(Path(result.path).glob("events.out.tfevents.*")) else []
    facts.add_row("files", escape("  ".join([*written, "journal/"])))
    behind = [lane for lane in result.lanes() if lane.error is not None or not lane.ended]
    for lane in behind:
        facts.add_row(
            "tracker",
            f"[yellow]{escape(lane.tracker)} is behind: {lane.delivered} delivered; {escape(lane.error or 'too slow')}[/]",
        )
    if result.checkpoint is not None:
        facts.add_row(
            "checkpoint", escape(f"{shown_path(result.checkpoint.path)}  (iteration {result.checkpoint.iteration})")
        )
    out.print()
    out.print(facts)
    out.print()
    place, trainyard = shlex.quote(shown_path(result.path)), _command()
    next_up = table("", "")
    next_up.show_header = False
    next_up.add_row("[dim]look at it[/]", f"{trainyard} show {place}")
    if behind:
        next_up.add_row("[dim]deliver the rest[/]", f"{trainyard} sync {place}")
    if result.status != "completed":
        next_up.add_row("[dim]go on[/]", f"{trainyard} resume {place}")
    next_up.add_row(
        "[dim]all runs[/]",
        f"{trainyard} runs --storage {shlex.quote(shown_path(str(Path(result.path).parent.parent)))}",
    )
    out.print(next_up)


def _command() -> str:
    """How to call us: by name where that is found, else by the path that we were called by."""
    return "trainyard" if shutil.which("trainyard") else shlex.quote(shown_path(os.path.abspath(sys.argv[0])))
