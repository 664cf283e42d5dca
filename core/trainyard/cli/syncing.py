"""``trainyard sync`` and ``trainyard replay``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from trainyard.cli.tables import ago, console, table
from trainyard.config import DEFAULT_STORAGE, load_yaml
from trainyard.errors import ConfigError, TrainyardError
from trainyard.rundir import RunResult, find_run, open_run
from trainyard.sync import Follower, Owed, standing, sync_run
from trainyard.sync import directories as _directories
from trainyard.sync import replay as replay_run

_storage_option = click.option("--storage", help="Where to look for it.  [default: TRAINYARD_STORAGE or ./runs]")


@click.command()
@click.argument("place", metavar="[DIR|RUN]", required=False)
@_storage_option
@click.option("--only", metavar="TRACKER", help="Deliver to this tracker alone.")
@click.option("--follow", is_flag=True, help="Go on with what live and new runs log, until Ctrl-C.")
def sync(place: str | None, storage: str | None, only: str | None, follow: bool) -> int:
    """Deliver what trackers are still owed: of one run, of all runs below a directory, or of all runs.

    Each tracker gets 30 s a run. A run that was killed is ended as such. One that is live is left to its own process;
    with --follow it is served here, wherever its own process does not get through: on another machine, say, that
    shares the disk and reaches the tracker. Exits with 0 when nothing is owed any more, else with 1.
    """
    if follow:
        return _follow(place, storage, only)
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
    console().print(_table(standings) if standings else "nothing to deliver")
    return int(wrong or any(standing.error for standing in standings))


def _follow(place: str | None, storage: str | None, only: str | None) -> int:
    directory = _directory(place, storage, follow=True)
    follower = Follower(directory, only=only)
    serving = threading.Thread(target=follower.serve, args=(lambda: False,), name="trainyard-follow")
    serving.start()
    out = console()
    with Live(console=out, auto_refresh=False, transient=True) if out.is_terminal else contextlib.nullcontext() as live:
        try:
            while serving.is_alive():
                if live is not None:
                    live.update(_table(_standings(follower.paths, only), "following; Ctrl-C ends it"), refresh=True)
                time.sleep(2.0)
        except KeyboardInterrupt:
            follower.stopped = True
            follower.woken.set()
            serving.join()
    standings = _standings(_directories(directory), only)
    out.print(_table(standings) if standings else "nothing to deliver")
    return int(any(standing.error for standing in standings))


def _standings(paths: Iterable[Path], only: str | None) -> list[Owed]:
    found = []
    for path in sorted(paths):
        run = RunResult(path)
        names = [name for name in run.record.settings.get("trackers", {}) if only in (None, name)]
        found += [standing(run, name, live=run.status == "running") for name in names]
    return found


def _table(standings: list[Owed], caption: str | None = None) -> Table:
    out = table("run", "tracker", ">delivered", ">owed", "waiting since", "last error")
    for how in standings:
        out.add_row(
            escape(Path(how.run).name),
            escape(how.tracker),
            str(how.delivered),
            "being delivered" if how.live else str(how.owed),
            ago(how.since) if how.since else "",
            escape(how.error or ""),
        )
    out.caption = caption
    return out


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


def _directory(place: str | None, storage: str | None, follow: bool = False) -> Path:
    """The directory of a run, an experiment or a storage root that the user means; one to follow may be still to come."""
    root = Path(storage or os.environ.get("TRAINYARD_STORAGE") or DEFAULT_STORAGE)
    if place is None:
        return root
    if Path(place).is_dir() or (follow and os.sep in place):
        return Path(place)
    try:
        return Path(find_run(place, root).path)
    except ConfigError as error:
        if follow:
            return Path(place)
        raise ConfigError(f"there is no directory {place}; and {error}") from None


def _runs(place: str | None, storage: str | None) -> list[RunResult]:
    directory = _directory(place, storage)
    below = [RunResult(path) for path in _directories(directory)]
    if place is not None and not below:
        raise ConfigError(f"there are no runs in {place}")
    return sorted(below, key=lambda run: run.record.created, reverse=True)
