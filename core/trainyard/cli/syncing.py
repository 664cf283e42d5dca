"""``trainyard sync`` and ``trainyard replay``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from trainyard.cli.tables import ago, console, table
from trainyard.config import DEFAULT_STORAGE, load_yaml
from trainyard.errors import ConfigError, TrainyardError
from trainyard.rundir import RunResult, find_run, list_runs, open_run
from trainyard.sync import Owed, sync_run
from trainyard.sync import replay as replay_run

_storage_option = click.option("--storage", help="Where to look for it.  [default: TRAINYARD_STORAGE or ./runs]")


@click.command()
@click.argument("place", metavar="[DIR|RUN]", required=False)
@_storage_option
@click.option("--only", metavar="TRACKER", help="Deliver to this tracker alone.")
def sync(place: str | None, storage: str | None, only: str | None) -> int:
    """Deliver what trackers are still owed: of one run, of all runs below a directory, or of all runs.

    Each tracker gets 30 s a run. A run that was killed is ended as such. One that is live is left to its own process.
    Exits with 0 when nothing is owed any more, else with 1.
    """
    standings: list[Owed] = []
    wrong = 0
    for run in _runs(place, storage):
        try:
            standings += sync_run(run, only)
        except TrainyardError as error:
            if only is not None:
                raise
            wrong = 1
            click.echo(f"error: {error}", err=True)
    out = table("run", "tracker", ">delivered", ">owed", "waiting since", "last error")
    for standing in standings:
        out.add_row(
            escape(Path(standing.run).name),
            escape(standing.tracker),
            str(standing.delivered),
            "being delivered" if standing.live else str(standing.owed),
            ago(standing.since) if standing.since else "",
            escape(standing.error or ""),
        )
    console().print(out if standings else "nothing to deliver")
    return int(wrong or any(standing.error for standing in standings))


@click.command()
@click.argument("run")
@click.option("--to", "tracker", required=True, metavar="TRACKER", help="The plugin to deliver to.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="An option of the tracker.")
@_storage_option
def replay(run: str, tracker: str, options: tuple[str, ...], storage: str | None) -> int:
    """Deliver a finished run to a tracker that it never had."""
    given: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option {option}: expected KEY=VALUE")
        given[key] = load_yaml(value)
    standing = replay_run(open_run(run, storage), tracker, given)
    console().print(_told(standing))
    return int(standing.error is not None)


def _told(standing: Owed) -> str:
    if standing.error is None:
        return f"{escape(standing.tracker)} has all {standing.delivered} results of {escape(Path(standing.run).name)}"
    return f"[red]{escape(standing.tracker)} is still owed {standing.owed} results: {escape(standing.error)}[/]"


def _runs(place: str | None, storage: str | None) -> list[RunResult]:
    root = Path(storage or os.environ.get("TRAINYARD_STORAGE") or DEFAULT_STORAGE)
    if place is None:
        return list(list_runs(root))
    directory = Path(place)
    if directory.is_dir() and not (directory / "run.json").is_file():
        below = [
            *list_runs(directory),
            *list_runs(directory.parent, directory.name),
        ]  # a storage root, or an experiment
        if below:
            return below
        raise ConfigError(f"there are no runs in {place}")
    return [find_run(place, root)]
