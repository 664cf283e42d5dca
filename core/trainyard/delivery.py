"""Lanes: each takes one tracker from its cursor to the end of a run's journal, at its own pace.

A lane reads the journal file and nothing else, so it is the same code in a thread of the training process and in a
process of its own. Whatever goes wrong, it does one thing: close the plugin, wait, and begin again from what was last
confirmed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from trainyard.errors import Rejected
from trainyard.files import sync_file, write_atomic
from trainyard.journal import (
    ArtifactRecord,
    CheckpointRecord,
    EndedRecord,
    JournalReader,
    Record,
    ResultRecord,
    ResumedRecord,
    StartedRecord,
)
from trainyard.locks import FileLock
from trainyard.plugins import Plugin
from trainyard.records import Artifact, CheckpointInfo, Outcome, Result, RunInfo
from trainyard.redaction import hide, redact
from trainyard.results import AUTO_FILLED
from trainyard.values import strict_json

__all__ = [
    "BATCH",
    "Delivery",
    "History",
    "Lane",
    "LaneState",
    "OnError",
    "Owed",
    "TrackerSpec",
    "drain",
    "failure_text",
    "in_call_since",
    "owed",
    "surviving",
]

logger = logging.getLogger("trainyard")

BATCH = 500
"""The most results that one ``log_results`` gets."""

MAIN_JOURNAL = "0.log"
SYNC_JOURNAL = "sync.log"

_POLL_S = 0.1
_LOCKED_S = 0.5  # until a lane is asked for again that another process has
_IDLE_S = 5.0
_CONFIRM_EVERY_S = 0.5
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_LONGEST_BACKOFF_AT_END_S = 1.0

OnError = Literal["spool", "drop", "raise"]


class TrackerSpec(msgspec.Struct, frozen=True):
    """One tracker of a run: what core itself needs to know of it.

    Attributes:
        name: the instance's name, which names its cursor file.
        type: the plugin's name.
        build: makes the plugin; called in the lane, and again after every failure.
        include, exclude: globs on metric names; an empty `include` takes all.
        on_error: keep it for later, drop the batch, or fail the run.
        secrets: strings that its errors must not show.
        options: as they are written in the config, from which another process can build it; None for a plugin object.
    """

    name: str
    type: str
    build: Callable[[], Plugin]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    on_error: OnError = "spool"
    secrets: frozenset[str] = frozenset()
    options: Mapping[str, Any] | None = None


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
        where: the address that it delivers to, if it has told one.
    """

    run: str
    tracker: str
    delivered: int
    owed: int
    since: float | None = None
    error: str | None = None
    live: bool = False
    where: str = ""


class LaneState(msgspec.Struct):
    """``delivery/<tracker>.json``: what is confirmed, written in one step.

    Attributes:
        tracker, type: which lane.
        cursor: journal file to the offset behind the last confirmed record.
        context_at: where the record lies whose context holds for the next result.
        resumed_at: when the run was last resumed, as far as it is confirmed; an older end does not count any more.
        seq: of the last confirmed result.
        delivered, dropped: counts of results.
        rejected: the results that were set aside.
        notes: the tracker's own.
        error: the last error, while it lasts.
        failing_since: seconds since the epoch, while an error lasts.
        ended: the end of the run is confirmed.
        deaths: how often in a row the process died while it was in the tracker's code.
        restarts: how often the tracker had to be begun anew in a process of its own, and `restarted_for` why.
    """

    tracker: str
    type: str
    cursor: dict[str, int] = {}
    context_at: int = 0
    resumed_at: float = 0.0
    seq: int = 0
    delivered: int = 0
    dropped: int = 0
    rejected: list[int] = []
    notes: dict[str, Any] = {}
    error: str | None = None
    failing_since: float | None = None
    ended: bool = False
    deaths: int = 0
    restarts: int = 0
    restarted_for: str | None = None

    @classmethod
    def read(cls, path: Path) -> LaneState | None:
        """The state in a file; None where there is none, or none that can be read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.warning("cannot read %s (%s): delivering that run from its beginning", path, error)
            return None

    def write(self, path: Path) -> None:
        """Replace the file; not durably: after a power cut an older state only means that more is delivered again."""
        write_atomic(path, msgspec.json.format(msgspec.json.encode(self)), durable=False)


class _Group(NamedTuple):
    """Some consecutive records of one kind, and the place behind them."""

    records: list[Any]
    journal: str
    offset: int


class Lane:
    """One tracker of one run.

    Args:
        run: which run; its path holds ``journal/`` and ``delivery/``.
        spec: the tracker.
        on_failure: called with the error of a tracker whose `on_error` is ``raise``.
    """

    def __init__(self, run: RunInfo, spec: TrackerSpec, on_failure: Callable[[str], None] | None = None) -> None:
        self.run = run
        self.spec = spec
        self._on_failure = on_failure
        self._journals = Path(run.path) / "journal"
        folder = Path(run.path) / "delivery"
        self._state_path = folder / f"{spec.name}.json"
        self._rejected_path = folder / f"{spec.name}.rejected.jsonl"
        self._lock = FileLock(folder / f".{spec.name}.lock")
        self._call_path = folder / f".{spec.name}.call"
        self._call_fd = -1
        self.state = self._read_state()
        self._plugin: Plugin | None = None
        self._called = False
        self._keep = _metric_filter(spec.include, spec.exclude)
        self._rewind_to_confirmed()

    # -- the lane's life -----------------------------------------------------------------------------------------

    def follow(
        self, closing: threading.Event, deadline: Callable[[], float], wake: threading.Event | None = None
    ) -> None:
        """Deliver what comes until `closing` is set and nothing is owed, or the deadline is over.

        While the tracker fails the lane is free for other processes, on this or another machine.

        Args:
            closing: set when no more records will come.
            deadline: the monotonic time at which to stop trying, asked once `closing` is set.
            wake: set whenever there may be something new, and with `closing`; without it the journal is looked at ten
                times a second.
        """
        backoff = 0.0
        locked = False
        try:
            while True:
                if wake is not None:
                    wake.clear()
                last_round = closing.is_set()
                locked = locked or self._take_lock()
                if locked and self.attempt(hurry=last_round):
                    backoff = 0.0
                    if last_round:
                        return
                elif not locked:
                    backoff = _LOCKED_S
                else:
                    locked = self._let_go()
                    drops = last_round and self.spec.on_error == "drop"
                    backoff = 0.0 if drops else min(max(_FIRST_BACKOFF_S, 2 * backoff), _LONGEST_BACKOFF_S)
                if closing.is_set():
                    left = deadline() - time.monotonic()
                    if left <= 0:
                        return
                    if backoff:
                        time.sleep(min(backoff * random.uniform(0.5, 1.0), left, _LONGEST_BACKOFF_AT_END_S))
                elif backoff:
                    closing.wait(backoff * random.uniform(0.5, 1.0))
                elif wake is None:
                    closing.wait(_POLL_S)
                else:
                    wake.wait(_CONFIRM_EVERY_S if self._unconfirmed else _IDLE_S)
        finally:
            self._close_plugin()
            self._let_go()

    def _take_lock(self) -> bool:
        try:
            if not self._lock.acquire():
                return False
            self._call_fd = os.open(self._call_path, os.O_RDWR | os.O_CREAT, 0o644)
            died = os.read(self._call_fd, 1) == b"1"
        except OSError as error:
            logger.debug("cannot lock %s: %s", self._lock.path, error)
            self._let_go()
            return False
        self.state = self._read_state()  # another process may have come further
        if died:
            self._note_death()
        self._rewind_to_confirmed()
        return True

    def _let_go(self) -> bool:
        """Give the lane back; nothing happens if we do not have it. Returns that we have it no more."""
        if self._call_fd >= 0:
            os.close(self._call_fd)
            self._call_fd = -1
        self._lock.release()
        return False

    def _in_call(self, yes: bool) -> None:
        """Leave word for whoever comes after us, should this process die in the tracker's code."""
        if self._call_fd >= 0:
            with contextlib.suppress(OSError):
                os.lseek(self._call_fd, 0, os.SEEK_SET)
                os.write(self._call_fd, b"1" if yes else b"0")

    def _note_death(self) -> None:
        state = self.state
        state.deaths += 1
        state.error = "the process that delivered to it died while it was in the tracker's code"
        state.failing_since = state.failing_since or time.time()
        with contextlib.suppress(OSError):
            self._save(state)
        self._in_call(False)

    @property
    def deaths(self) -> int:
        """How often in a row a process died in this tracker's code, as far as can be told without the lock."""
        return self.state.deaths + (in_call_since(Path(self.run.path), self.spec.name) is not None)

    def attempt(self, *, hurry: bool = True) -> bool:
        """Deliver all that the journal holds now.

        Args:
            hurry: confirm it at once; else twice a second is enough, since a confirmation costs the disk an fsync.

        Returns:
            Whether it worked; if not, the lane stands again at what was last confirmed.
        """
        self._called = False
        try:
            while True:
                try:
                    for group in self._groups():
                        self._hand_over(group)
                        ended = isinstance(group.records[-1], EndedRecord)
                        if ended or self.spec.on_error == "drop" or self._confirmation_is_due:
                            self._confirm()
                    if self._unconfirmed and (hurry or self._confirmation_is_due):
                        self._confirm()
                    return True
                except Rejected as refusal:
                    try:
                        self._set_aside(refusal)
                    except Exception as error:
                        self._failed(error)
                        return False
                except BaseException as error:  # SystemExit and all: a tracker's failure is never ours
                    self._failed(error)
                    return False
        finally:
            if self._called:
                self._in_call(False)

    @property
    def _confirmation_is_due(self) -> bool:
        return time.monotonic() - self._confirmed_at > _CONFIRM_EVERY_S

    @property
    def position(self) -> int:
        """The seq of the last result that needs no delivery any more."""
        return self.state.seq

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_state(self) -> LaneState:
        fresh = LaneState(self.spec.name, self.spec.type)
        state = LaneState.read(self._state_path) or fresh
        for journal, offset in state.cursor.items():
            path = self._journals / journal
            if offset > (path.stat().st_size if path.exists() else 0):
                logger.warning("%s is shorter than what tracker %r has had of it: it begins anew", path, self.spec.name)
                return fresh
        return state

    def _rewind_to_confirmed(self) -> None:
        """Stand where the state file says, and forget all that came after."""
        self._cursor = dict(self.state.cursor)
        self._context_at, self._resumed_at = self.state.context_at, self.state.resumed_at
        self._context: dict[str, Any] | None = None
        self._seq, self._delivered, self._ended = self.state.seq, self.state.delivered, self.state.ended
        self._notes: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.state.notes))
        self._unconfirmed = False
        self._confirmed_at = time.monotonic()
        self._group: _Group | None = None

    def _groups(self) -> Iterator[_Group]:
        for journal in (MAIN_JOURNAL, SYNC_JOURNAL):
            reader = JournalReader(self._journals / journal, self._cursor.get(journal, 0))
            results: list[ResultRecord] = []
            behind_results = 0
            for record in reader:
                if isinstance(record, ResultRecord):
                    results.append(record)
                    behind_results = reader.offset
                    if len(results) == BATCH:
                        yield _Group(results, journal, behind_results)
                        results = []
                else:
                    if results:
                        yield _Group(results, journal, behind_results)
                        results = []
                    if isinstance(record, StartedRecord | ResumedRecord):
                        self._context, self._context_at = record.context, self._cursor.get(journal, 0)
                    yield _Group([record], journal, reader.offset)
            if results:
                yield _Group(results, journal, behind_results)

    def _results(self, records: list[ResultRecord]) -> list[Result]:
        if self._context is None:
            self._context = _context_at(self._journals / MAIN_JOURNAL, self._context_at)
        context, keep, aside = self._context, self._keep, set(self.state.rejected)
        results = []
        for record in records:
            if record.seq in aside:
                continue
            metrics = keep(record.metrics) if keep else record.metrics
            results.append(Result(record.seq, record.time, record.step, {**metrics, **context}))
        return results

    def _history(self, group: _Group) -> History:
        return History(self._journals / MAIN_JOURNAL, group.offset, self._keep, frozenset(self.state.rejected))

    # -- handing over --------------------------------------------------------------------------------------------

    def _hand_over(self, group: _Group) -> None:
        self._group = group
        plugin = self._started()
        first: Record = group.records[0]
        run, notes = self.run, self._notes
        match first:
            case ResultRecord():
                results = self._results(group.records)
                if results:
                    plugin.call("log_results", run=run, results=results, notes=notes)
                self._seq, self._delivered = group.records[-1].seq, self._delivered + len(results)
            case ArtifactRecord():
                path = Path(run.path, first.path or f"artifacts/{first.name}")
                if not path.resolve().is_relative_to(
                    Path(run.path).resolve()
                ):  # a journal from elsewhere may say anything
                    logger.warning("artifact %r leads out of run %s: it is not delivered", first.name, run.name)
                    self._pass(group)
                    return
                artifact = Artifact(first.name, str(path), first.size, first.time)
                plugin.call("log_artifact", run=run, artifact=artifact, notes=notes)
            case CheckpointRecord():
                metrics = self._keep(first.metrics) if self._keep else first.metrics
                checkpoint = CheckpointInfo(first.index, first.iteration, first.url, metrics, first.size)
                plugin.call("log_checkpoint", run=run, checkpoint=checkpoint, notes=notes)
            case ResumedRecord():
                self._resumed_at = first.time
                run = self.run = msgspec.structs.replace(run, config=first.context.get("config", run.config))
                if self._ended:
                    plugin.call("log_start", run=run, notes=notes)
                    self._ended = False
                plugin.call("log_rewind", run=run, results=self._history(group), notes=notes)
            case EndedRecord() if first.time < self._resumed_at:
                pass  # it was found dead, and resumed before anybody was told
            case EndedRecord():
                outcome = Outcome(first.status, first.error, first.time)
                plugin.call("log_end", run=run, outcome=outcome, notes=notes)
                self._ended = True
            case StartedRecord():
                pass
        self._pass(group)

    def _pass(self, group: _Group) -> None:
        self._cursor[group.journal] = group.offset
        self._unconfirmed = True

    def _started(self) -> Plugin:
        self._mark_call()
        if self._plugin is None:
            plugin = self.spec.build()
            self._plugin = plugin
            plugin.call("log_start", run=self.run, notes=self._notes)
        return self._plugin

    def _mark_call(self) -> None:
        if not self._called:
            self._called = True
            self._in_call(True)

    def _confirm(self) -> None:
        """Have the tracker flush, then move the cursor and save the notes, in one step."""
        if self._plugin is not None:
            self._mark_call()
            self._plugin.call("flush")
        sync_file(self._journals / MAIN_JOURNAL)  # the cursor must never know of records that a power cut can take back
        state = msgspec.structs.replace(
            self.state,
            cursor=dict(self._cursor),
            context_at=self._context_at,
            resumed_at=self._resumed_at,
            seq=self._seq,
            delivered=self._delivered,
            ended=self._ended,
            notes=msgspec.json.decode(msgspec.json.encode(self._notes)),  # the tracker goes on changing its own
            error=None,
            failing_since=None,
            deaths=0,
        )
        self._save(state)
        if self.state.failing_since is not None:
            logger.warning("tracker %r works again: run %s is being caught up", self.spec.name, self.run.name)
        self.state = state
        self._unconfirmed = False
        self._confirmed_at = time.monotonic()

    def _save(self, state: LaneState) -> None:
        state.write(self._state_path)

    # -- what goes wrong -----------------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        group = self._group
        self._close_plugin()
        message = hide(f"{type(error).__name__}: {error}", self.spec.secrets)
        if self.state.failing_since is None:
            logger.warning("%s", failure_text(self.spec, self.run.name, message))
            logger.debug("the traceback", exc_info=error)
            self.state.failing_since = time.time()
        self.state.error = message
        self._rewind_to_confirmed()
        if self.spec.on_error == "drop" and group is not None:
            self._drop(group)
        elif self.spec.on_error == "raise" and self._on_failure is not None:
            self._on_failure(f"tracker {self.spec.name!r} failed: {message}")
        try:
            self._save(self.state)
        except OSError as full:
            logger.debug("cannot write %s: %s", self._state_path, full)

    def _drop(self, group: _Group) -> None:
        """Go past a batch that was refused once; `drop` confirms after each group, so nothing else is lost."""
        state = self.state
        last = group.records[-1]
        if isinstance(last, ResultRecord):
            state.dropped += len(group.records)
            state.seq = last.seq
        elif isinstance(last, StartedRecord | ResumedRecord):
            state.context_at = state.cursor.get(group.journal, 0)
            state.resumed_at = last.time if isinstance(last, ResumedRecord) else state.resumed_at
        state.ended = isinstance(last, EndedRecord)
        state.cursor = {**state.cursor, group.journal: group.offset}
        self._rewind_to_confirmed()

    def _set_aside(self, refusal: Rejected) -> None:
        """Put the rejected results into a file, and stand before their batch again.

        Raises:
            Rejected: it names no result of the batch, so handing it over again would change nothing.
            OSError: they cannot be written.
        """
        group = self._group
        batch: dict[int, Any] = {}
        if group is not None:
            rewound = isinstance(group.records[0], ResumedRecord)
            batch = {
                r.seq: r
                for r in (self._history(group) if rewound else group.records)
                if isinstance(r, Result | ResultRecord)
            }
        seqs = [seq for seq in refusal.seqs if seq in batch and seq not in self.state.rejected]
        if not seqs:
            raise refusal
        lines = [
            strict_json({"why": refusal.why, "result": Result(r.seq, r.time, r.step, r.metrics)})
            for r in map(batch.__getitem__, seqs)
        ]
        with open(self._rejected_path, "ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))
        logger.warning(
            "tracker %r rejected %d results of run %s: %s. They are in %s",
            self.spec.name, len(seqs), self.run.name, refusal.why, self._rejected_path,
        )  # fmt: skip
        self.state.rejected = [*self.state.rejected, *seqs]
        self._close_plugin()
        self._rewind_to_confirmed()
        self._save(self.state)

    def _close_plugin(self) -> None:
        plugin, self._plugin = self._plugin, None
        if plugin is not None:
            self._mark_call()
            try:
                plugin.call("close")
            except BaseException as error:
                message = hide(f"{type(error).__name__}: {error}", self.spec.secrets)
                logger.warning("tracker %r failed to close: %s", self.spec.name, message)
            finally:
                self._called = False
                self._in_call(False)


_WHAT_NEXT = {
    "spool": "Results are kept, and delivered when it works again",
    "drop": "The batch is dropped",
    "raise": "The run fails at its next result",
}


def failure_text(spec: TrackerSpec, run: str, error: str) -> str:
    """The one warning of an outage."""
    return f"tracker {spec.name!r} failed for run {run}: {error}. {_WHAT_NEXT[spec.on_error]}"


def _metric_filter(
    include: tuple[str, ...], exclude: tuple[str, ...]
) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """A function that leaves out the metrics that a tracker should not see; None if it sees all."""
    if not include and not exclude:
        return None
    wanted = _any_of(include) if include else None
    unwanted = _any_of(exclude) if exclude else None
    known: dict[str, bool] = {}

    def keeps(name: str) -> bool:
        if name not in known:
            known[name] = (wanted is None or bool(wanted(name))) and not (unwanted is not None and unwanted(name))
        return known[name]

    def keep(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        out = {}
        for key, value in metrics.items():
            if not prefix and key in AUTO_FILLED:
                out[key] = value
            elif isinstance(value, dict):
                if inner := keep(value, f"{prefix}{key}/"):
                    out[key] = inner
            elif keeps(prefix + key):
                out[key] = value
        return out

    return keep


def _any_of(globs: tuple[str, ...]) -> Callable[[str], Any]:
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs)).match


def _context_at(journal: Path, offset: int) -> dict[str, Any]:
    for record in JournalReader(journal, offset):
        if isinstance(record, StartedRecord | ResumedRecord):
            return record.context
        break
    return {}


class History:
    """The results of a run that still count, in order, read from the journal at each iteration.

    Args:
        journal: the main journal.
        until: read up to this offset; None: to the end.
        keep: a filter on the metrics.
        aside: the seqs of results that were set aside.
    """

    def __init__(
        self,
        journal: Path,
        until: int | None = None,
        keep: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        aside: frozenset[int] = frozenset(),
    ) -> None:
        self._aside = aside
        self._journal = journal
        self._until = until
        self._keep = keep

    def _records(self) -> Iterator[Record]:
        reader = JournalReader(self._journal)
        for record in reader:
            if self._until is not None and reader.offset > self._until:
                return
            yield record

    def __iter__(self) -> Iterator[Result]:
        # Each resume supersedes what lies beyond its `keep`; so a result counts if no later resume is below its seq.
        keeps = [record.keep for record in self._records() if isinstance(record, ResumedRecord)]
        for i in range(len(keeps) - 2, -1, -1):
            keeps[i] = min(keeps[i], keeps[i + 1])
        bounds = iter(keeps)
        bound = next(bounds, None)
        context: dict[str, Any] = {}
        for record in self._records():
            if isinstance(record, ResultRecord):
                if (bound is None or record.seq <= bound) and record.seq not in self._aside:
                    metrics = self._keep(record.metrics) if self._keep else record.metrics
                    yield Result(record.seq, record.time, record.step, {**metrics, **context})
            elif isinstance(record, StartedRecord | ResumedRecord):
                context = record.context
                if isinstance(record, ResumedRecord):
                    bound = next(bounds, None)


def surviving(journal: Path) -> list[Result]:
    """The same as a list, in one pass over the journal."""
    out: list[Result] = []
    context: dict[str, Any] = {}
    for record in JournalReader(journal):
        if isinstance(record, ResultRecord):
            out.append(Result(record.seq, record.time, record.step, {**record.metrics, **context}))
        elif isinstance(record, StartedRecord | ResumedRecord):
            context = record.context
            if isinstance(record, ResumedRecord):
                while out and out[-1].seq > record.keep:
                    out.pop()
    return out


class Delivery:
    """Lanes of one run, each in a thread of this process.

    Args:
        run: which run.
        trackers: its trackers.
        on_failure: called with the error of a tracker whose `on_error` is ``raise``.
    """

    def __init__(
        self, run: RunInfo, trackers: Sequence[TrackerSpec], on_failure: Callable[[str], None] | None = None
    ) -> None:
        self._deadline = float("inf")
        self._closing = threading.Event()
        self._lanes: list[tuple[Lane, threading.Thread]] = []
        for spec in trackers:
            lane = Lane(run, spec, on_failure)
            thread = threading.Thread(
                target=lane.follow,
                args=(self._closing, lambda: self._deadline),
                name=f"trainyard-{spec.name}",
                daemon=True,  # a tracker that never returns must not keep the process alive
            )
            self._lanes.append((lane, thread))

    def start(self) -> None:
        """Begin to deliver."""
        for _, thread in self._lanes:
            thread.start()

    def close(self, deadline: float) -> None:
        """Nothing more will come; stop trying at that monotonic time."""
        self._deadline = deadline
        self._closing.set()

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to wait for."""
        return not any(thread.is_alive() for _, thread in self._lanes)

    def standing(self, newest: int) -> list[Owed]:
        """How each tracker stands, given the seq of the newest result."""
        return [owed(lane.run.path, lane.state, newest, options=lane.spec.options) for lane, _ in self._lanes]

    def stop(self) -> None:
        """The time is over: say who does not return."""
        for lane, thread in self._lanes:
            thread.join(0.5)
            if thread.is_alive():
                logger.warning("tracker %r does not return; what it is owed stays in the journal", lane.spec.name)


def owed(
    run: str,
    state: LaneState,
    newest: int,
    refused: str | None = None,
    *,
    live: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Owed:
    """How a lane stands.

    Args:
        run: the run's directory.
        state: the lane's.
        newest: the seq of the newest result.
        options: the tracker's, for its address.
        refused: why it cannot even be begun.
        live: a running process delivers to it.
    """
    count = max(0, newest - state.seq)
    settled = state.ended and not count and not _more(Path(run), state)
    error = refused or state.error
    if error is None and not live and not settled:
        since = in_call_since(Path(run), state.tracker)
        error = f"it has not returned for {time.time() - since:.0f} s" if since is not None else "it was too slow"
    told = [
        value
        for value in (*(options or {}).values(), *state.notes.values())
        if isinstance(value, str) and "://" in value
    ]
    where = redact(told[0]) if told else ""
    return Owed(
        run, state.tracker, state.delivered, count, state.failing_since, None if settled else error, live, where
    )


def _more(run: Path, state: LaneState) -> bool:
    """Whether the main journal holds a whole record beyond what is confirmed."""
    return any(True for _ in JournalReader(run / "journal" / MAIN_JOURNAL, state.cursor.get(MAIN_JOURNAL, 0)))


def in_call_since(run: Path, tracker: str) -> float | None:
    """Since when a lane is in its tracker's code, or died there: seconds since the epoch; None: it is not."""
    path = run / "delivery" / f".{tracker}.call"
    try:
        return path.stat().st_mtime if path.read_bytes() == b"1" else None
    except OSError:
        return None


class _Drainable(Protocol):
    @property
    def settled(self) -> bool: ...

    def close(self, deadline: float) -> None: ...

    def stop(self) -> None: ...


def drain(deliveries: Sequence[_Drainable], seconds: float, waiting: Callable[[float], object] | None = None) -> None:
    """Let deliveries that get no more records come to their end, and wait for it.

    Args:
        deliveries: which.
        seconds: that they have.
        waiting: called now and then meanwhile, with the seconds that are left.
    """
    deadline = time.monotonic() + seconds
    for delivery in deliveries:
        delivery.close(deadline)
    pause = 0.001
    while not all(delivery.settled for delivery in deliveries):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if waiting is not None:
            waiting(left)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)
    for delivery in deliveries:
        delivery.stop()
