"""``trainyard doctor``: do the trackers and the store that a config names answer, and who is behind?"""

from __future__ import annotations

import functools
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.markup import escape

from trainyard import plugins
from trainyard.cli.running import set_option
from trainyard.cli.tables import console, duration, table
from trainyard.config import (
    DEFAULT_STORAGE,
    DEFAULT_TRACKERS,
    RunConfig,
    Source,
    apply_overrides,
    check_keys,
    open_storage,
    read_yaml,
    split_trackers,
    tracker_specs,
)
from trainyard.delivery import TrackerSpec
from trainyard.errors import TrainyardError
from trainyard.redaction import hide, redact
from trainyard.rundir import list_runs
from trainyard.sync import standing
from trainyard.version import __version__

_TIMEOUT_S = 20.0


@click.command()
@click.argument("file", type=click.Path(dir_okay=False), required=False)
@set_option
def doctor(file: str | None, overrides: tuple[str, ...]) -> int:
    """Reach the trackers and the store that a YAML file names, and say what answered; without a file, the default ones.

    Also: what each tracker promises, and how far live runs are behind. Exits with 1 if something does not answer.
    """
    source = read_yaml(file) if file else Source("", "", {}, {})
    apply_overrides(source, overrides)
    check_keys(source.data, RunConfig, "", source.place)
    storage = source.data.get("storage") or os.environ.get("TRAINYARD_STORAGE") or DEFAULT_STORAGE
    out = console()
    out.print(f"trainyard {__version__}, Python {platform.python_version()} on {platform.platform()}")
    rows = table("", "name", "package", "answer", "what it promises")
    well, root = True, Path(DEFAULT_STORAGE)
    try:
        root = open_storage(str(storage), source.place("storage")).path("x").parent
        answer = _reach(lambda: _try_storage(root))
    except TrainyardError as error:
        answer = (False, str(error))
    well &= answer[0]
    rows.add_row("store", escape(str(redact(str(storage)))), "", _coloured(*answer), "a checkpoint is whole or absent")
    for name, options in _trackers(source):
        spec: TrackerSpec | None = None
        package = promise = ""
        try:
            (spec,) = tracker_specs({name: options}, source.place)
            plugin = spec.build()
            package = next((found.place for found in plugins.installed() if found.name == spec.type), "")
            promise = str(getattr(plugin.instance, "guarantee", "at least once, in order"))
            answer = _reach(functools.partial(_check, plugin, root))
        except TrainyardError as error:
            answer = (False, str(error))
        well &= answer[0]
        text = hide(answer[1], spec.secrets if spec else ())
        rows.add_row("tracker", escape(name), escape(package), _coloured(answer[0], text), escape(promise))
    out.print(rows)
    _show_live_runs(root)
    return int(not well)


def _trackers(source: Source) -> list[tuple[str, object]]:
    given = source.data.get("trackers") or os.environ.get("TRAINYARD_TRACKERS", "").split(",")
    if not isinstance(given, dict):
        given = [entry.strip() if isinstance(entry, str) else entry for entry in given if entry] or list(
            DEFAULT_TRACKERS
        )
    return split_trackers(given, source.place)


def _reach(ask: Callable[[], str]) -> tuple[bool, str]:
    """Ask with a time limit. Returns whether that went well, and the words."""
    answer: list[tuple[bool, str]] = []

    def asking() -> None:
        try:
            answer.append((True, ask()))
        except BaseException as error:
            answer.append((False, f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return answer[0] if answer else (False, f"no answer within {_TIMEOUT_S:.0f} s")


def _check(plugin: plugins.Plugin, root: Path) -> str:
    return plugin.call("check", storage=str(root)) or "ok"


def _try_storage(root: Path) -> str:
    """Write, read and delete a small file."""
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    probe = existing / f".trainyard-doctor-{secrets.token_hex(4)}"
    content = secrets.token_bytes(16)
    try:
        probe.write_bytes(content)
        if probe.read_bytes() != content:
            raise OSError(f"{existing} does not give back what was written")
    finally:
        probe.unlink(missing_ok=True)
    disk = os.statvfs(existing) if hasattr(os, "statvfs") else None
    free = f", {disk.f_bavail * disk.f_frsize / 2**30:.1f} GiB free" if disk else ""
    return ("writable" if existing == root else f"will be made in {existing}") + free


def _show_live_runs(root: Path) -> None:
    rows = table("live run", "tracker", ">delivered", ">owed", ">lag", "last error")
    for run in list_runs(root):
        if run.status != "running":
            continue
        results = run.history()
        for name in run.record.settings.get("trackers", {}):
            how = standing(run, name, live=True)
            waiting = results[-how.owed].time if 0 < how.owed <= len(results) else None
            lag = duration(time.time() - waiting) if waiting else ""
            rows.add_row(
                escape(run.name), escape(name), str(how.delivered), str(how.owed), lag, escape(how.error or "")
            )
    if rows.row_count:
        console().print(rows)


def _coloured(well: bool, text: str) -> str:
    return escape(text) if well else f"[red]{escape(text)}[/]"
