"""Deliver afterwards what trackers are still owed, and deliver a run to a tracker that it never had."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainyard.config import tracker_specs
from trainyard.delivery import Delivery, LaneState, TrackerSpec
from trainyard.errors import ConfigError, RunLocked, TrainyardError, unknown
from trainyard.journal import EndedRecord, JournalReader, JournalWriter, ResultRecord
from trainyard.redaction import REDACTED
from trainyard.rundir import RunDirectory, RunResult, last_outcome
from trainyard.values import flatten

__all__ = ["Owed", "replay", "sync_run"]

DEADLINE_S = 30.0
"""Seconds that one tracker is given to take what it is owed."""


class Owed(msgspec.Struct):
    """How one tracker of one run stands.

    Attributes:
        run: the run's directory.
        tracker: its name.
        delivered: results that it has taken, over all time.
        owed: results that wait.
        since: seconds since the epoch, while it fails.
        error: why it fails; None once nothing is owed.
        live: a running process delivers to it.
    """

    run: str
    tracker: str
    delivered: int
    owed: int
    since: float | None = None
    error: str | None = None
    live: bool = False


def sync_run(run: RunResult, only: str | None = None) -> list[Owed]:
    """Deliver what a run's trackers are owed; a run that is found dead is ended as `killed` first.

    Args:
        run: the run. One that a live process writes to is left to that process.
        only: this tracker alone.

    Returns:
        How each tracker stands now.

    Raises:
        ConfigError: `only` is none of its trackers.
    """
    trackers: dict[str, Any] = run.record.settings.get("trackers", {})
    if only is not None:
        if only not in trackers:
            raise ConfigError(f"run {run.name}: {unknown('tracker', only, trackers, label='its trackers')}")
        trackers = {only: trackers[only]}
    directory = RunDirectory(Path(run.path))
    directory.create()
    try:
        directory.take_lock()
    except RunLocked:
        return [_standing(run, name, live=True) for name in trackers]
    try:
        _end_if_killed(directory)
        specs, refused = _specs(trackers)
        _deliver(run, specs)
    finally:
        directory.lock.release()
    standings = [_standing(run, name, refused.get(name)) for name in trackers]
    if only is None:  # those that were handed over as objects
        others = [lane.tracker for lane in run.lanes() if lane.tracker not in trackers and not lane.ended]
        standings += [_standing(run, name, "only the Python code that handed it over can build it") for name in others]
    return standings


def replay(run: RunResult, tracker: str, options: Mapping[str, Any] | None = None) -> Owed:
    """Deliver a run, from its beginning, to a tracker that it never had; called again, it goes on.

    Args:
        run: the run; not one that a live process writes to.
        tracker: the plugin's name.
        options: the tracker's options; what is left out is its default or its environment's.

    Raises:
        ConfigError: it is one of the run's own trackers, or the run is live.
    """
    if tracker in run.record.settings.get("trackers", {}):
        raise ConfigError(
            f"run {run.name} has the tracker {tracker!r} itself: trainyard sync {run.path} --only {tracker}"
        )
    directory = RunDirectory(Path(run.path))
    directory.take_lock()
    try:
        _end_if_killed(directory)
        _deliver(run, tracker_specs({tracker: dict(options or {})}))
    finally:
        directory.lock.release()
    return _standing(run, tracker)


def _deliver(run: RunResult, specs: list[TrackerSpec]) -> None:
    delivery = Delivery(run.info(), specs)
    delivery.start()
    delivery.drain(DEADLINE_S)


def _specs(trackers: Mapping[str, Any]) -> tuple[list[TrackerSpec], dict[str, str]]:
    """What can be built of a run's trackers, and why the others cannot."""
    specs: list[TrackerSpec] = []
    refused: dict[str, str] = {}
    for name, options in trackers.items():
        secret = [key for key, value in flatten(options) if isinstance(value, str) and REDACTED in value]
        if secret:
            refused[name] = (
                f"its {', '.join(secret)} was kept secret, so it is not on record: write ${{env:NAME}} instead"
            )
            continue
        try:
            specs += tracker_specs({name: options})
        except TrainyardError as error:
            refused[name] = str(error)
    return specs, refused


def _standing(run: RunResult, name: str, refused: str | None = None, *, live: bool = False) -> Owed:
    directory = RunDirectory(Path(run.path))
    state = LaneState.read(directory.delivery / f"{name}.json") or LaneState(name, name)
    newest = max((r.seq for r in JournalReader(directory.journal) if isinstance(r, ResultRecord)), default=0)
    owed = max(0, newest - state.seq)
    error = refused or state.error
    if error is None and not live and (owed or not state.ended):
        error = "it was too slow"
    return Owed(
        run.path, name, state.delivered, owed, state.failing_since, error if owed or not state.ended else None, live
    )


def _end_if_killed(directory: RunDirectory) -> None:
    """Write the end that a dead process could not write, into a journal that is not its own."""
    if directory.read().status != "running" or last_outcome(directory.path)[0] is not None:
        return
    newest = max((r.seq for r in JournalReader(directory.journal) if isinstance(r, ResultRecord)), default=0)
    journal = JournalWriter(directory.sync_journal)
    journal.append(EndedRecord(seq=newest, time=time.time(), status="killed"))
    journal.close()
    record = directory.read()
    record.status = "killed"
    directory.write(record)
