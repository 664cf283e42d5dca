"""Run: one run directory being written. Results, artifacts and checkpoints go in; the journal is all that is waited for."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import math
import os
import secrets
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.checkpoint import Checkpoint, Staging
from trainyard.config import DeliveryMode, named_trackers, open_storage, parse_config, tracker_specs
from trainyard.delivery import Delivery, Owed, TrackerSpec, drain
from trainyard.errors import CheckpointError, ConfigError, DeliveryError, JournalError, MetricError, RunLocked, unknown
from trainyard.journal import (
    ArtifactRecord,
    CheckpointRecord,
    EndedRecord,
    JournalReader,
    JournalWriter,
    ResultRecord,
    ResumedRecord,
    StartedRecord,
)
from trainyard.plugins import Plugin
from trainyard.records import MediaFile, Result, RunInfo, Status
from trainyard.redaction import hide, redact, secret_values
from trainyard.resources import Resources
from trainyard.results import Counters, context
from trainyard.rundir import (
    NAME_LIMIT,
    RunDirectory,
    RunRecord,
    RunResult,
    captured_files,
    check_name,
    git_state,
    new_record,
    read_lanes,
    safe_name,
)
from trainyard.storage import CheckpointPolicy, RunCheckpoints
from trainyard.sync_client import SyncedDelivery, export, is_portable, take_back
from trainyard.values import Media, explain, recordable

if TYPE_CHECKING:
    from trainyard.media import MediaFolder

__all__ = ["Run", "get_run"]

logger = logging.getLogger("trainyard")

DRAIN_S = 30.0
"""Seconds that the end of a run gives its trackers to catch up; what is left then stays in the journal."""

_current: contextvars.ContextVar[Run | None] = contextvars.ContextVar("trainyard_run", default=None)
_open_runs: set[Run] = set()  # strong: a run that nobody holds any more is still to be ended at exit


def _after_fork_in_child() -> None:
    for run in _open_runs:
        run._lock, run._saving = threading.RLock(), threading.RLock()  # a thread that is not here may have held them


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

CheckpointSource = dict[Any, Any] | str | os.PathLike[str] | Checkpoint | Callable[[Staging], None]


class Run:
    """One run directory, written by this process.

    Made by :func:`trainyard.run`, :func:`trainyard.start_run` or a bare :class:`trainyard.Trainable`. Safe in threads.
    After a fork the child has no part in it: what it logs is refused.

    Args:
        directory: where; created if need be.
        record: its identity; None continues the run that is there.
        config: the config as it is used; what is written of it is redacted.
        written_config: the config as the user wrote it, ``${env:NAME}`` unresolved; default `config`.
        trackers: whom to deliver to.
        callbacks: plugins with ``on_result`` and ``should_stop``.
        policy: which checkpoints to keep.
        stop: says of a result whether the run is to end.
        resources: what it was given.
        tags: added to those that the run has.
        settings: what a later resume needs; None leaves those on record.
        delivery: who delivers to the trackers that have a name: the sync ``process``, or ``thread``s.
        waiting: called at the end, while trackers catch up, with how each stands and the seconds that are left.

    Attributes:
        info: what hooks are told of the run.
        start_checkpoint: where a resumed run goes on from, else None.
        counters: how far it has come.
        seq: of the newest result.
        head: the seq of the newest result that no restore has superseded.
        last_result: the last result as it was returned, empty before the first.
        draining: at its end, it waits for its trackers.

    Raises:
        RunLocked: a live process writes to it.
        ConfigError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: RunDirectory,
        record: RunRecord | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        written_config: Mapping[str, Any] | None = None,
        trackers: Sequence[TrackerSpec] = (),
        callbacks: Sequence[Plugin] = (),
        policy: CheckpointPolicy | None = None,
        stop: Callable[[Result], bool] | None = None,
        resources: Resources | None = None,
        tags: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        delivery: DeliveryMode = "process",
        waiting: Callable[[list[Owed], float], None] | None = None,
    ) -> None:
        directory.create()
        directory.take_lock(2.0)  # its death may just be noted by the sync process
        try:
            resumed = record is None
            if record is not None and directory.json.exists():
                raise RunLocked(
                    f"run {record.name} was begun by another process in this moment: start again to resume it"
                )
            self._directory = directory
            self.record = directory.read() if record is None else record
            self.config: dict[str, Any] = dict(config or {}) if not isinstance(config, dict) else config
            given = written_config if written_config is not None else self.config
            written, self._secrets = redact(given), secret_values(given)
            self.record.config, self.record.status = written, "running"
            self.record.tags = {**self.record.tags, **(tags or {})}
            self.record.settings = self.record.settings if settings is None else dict(settings)
            directory.write(self.record)
            path = str(directory.path)
            self.info = RunInfo(
                self.record.id, self.record.name, self.record.experiment, path, written, self.record.tags
            )

            self.checkpoints = RunCheckpoints(directory.checkpoints, self.id, policy)
            self.checkpoints.collect_garbage()
            self.counters = Counters()
            self.last_result: dict[str, Any] = {}
            self._last_written: dict[str, Any] = {}
            self._media: MediaFolder | None = None
            self.start_checkpoint: Checkpoint | None = None
            self.seq = 0
            self.head = 0
            self.stop = stop
            self.resources = resources
            self._lock = threading.RLock()
            self._saving = threading.RLock()
            self._ended: Status | None = None
            self._context = context(self.id, self.config)
            self._on_result = [plugin for plugin in callbacks if "on_result" in plugin.hooks]
            self._should_stop = [plugin for plugin in callbacks if "should_stop" in plugin.hooks]
            self._logged_at = time.perf_counter()
            self._owner = os.getpid()
            self._working_directory = os.getcwd()
            if resumed:
                self._find_where_it_stopped()
            self._journal = JournalWriter(directory.journal)
            self._written_context = {**self._context, "config": written}
            if resumed:
                if self.start_checkpoint is not None and self.start_checkpoint.index not in self._recorded:
                    self._note_checkpoint(self.start_checkpoint, self.head)  # it was killed right behind its commit
                self._journal.append(
                    ResumedRecord(seq=self.seq, time=time.time(), keep=self.head, context=self._written_context)
                )
            else:
                self._journal.append(StartedRecord(seq=0, time=time.time(), context=self._written_context))
            self.draining = False
            self._exported: set[str] = set()
            self._specs = {spec.name: spec for spec in trackers}
            self._joined: list[tuple[Plugin, str]] = []
            self._tracker_failure: str | None = None
            self._waiting = waiting or _SayOnce(self.name)
            elsewhere = [spec for spec in trackers if delivery == "process" and is_portable(spec)]
            self.deliveries: list[Delivery | SyncedDelivery] = [
                Delivery(self.info, [spec for spec in trackers if spec not in elsewhere], self._note_failure)
            ]
            if elsewhere:
                self.deliveries.append(SyncedDelivery(self.info, elsewhere, self._note_failure))
            for deliverer in self.deliveries:
                deliverer.start()
        except BaseException:
            if hasattr(self, "_journal"):
                self._journal.close()
            directory.lock.release()
            raise
        _open_runs.add(self)
        self._git_thread = threading.Thread(target=self._note_git_state, name="trainyard-git", daemon=True)
        self._git_thread.start()

    # -- which run -----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Unique, ten hexadecimal digits."""
        return self.record.id

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.record.name

    @property
    def experiment(self) -> str:
        """The named set of runs that it belongs to."""
        return self.record.experiment

    @property
    def path(self) -> str:
        """Its directory."""
        return self.info.path

    @property
    def context(self) -> dict[str, Any]:
        """The auto-filled keys that are the same in every result."""
        return dict(self._context)

    @property
    def status(self) -> Status:
        """``running`` until :meth:`finish`."""
        return self._ended or "running"

    # -- what goes in --------------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """Record one result.

        Args:
            metrics: numbers, bools, strings, None, small arrays, media values, or dicts and lists of these.
            step: its place on the x axis; default the number of the result.

        Returns:
            The result with its auto-filled keys.

        Raises:
            MetricError: a value that cannot be recorded; nothing was written.
        """
        now = time.perf_counter()
        duration, self._logged_at = now - self._logged_at, now
        return self.record_result(metrics, duration, step=step)

    def record_result(
        self,
        metrics: Mapping[str, Any],
        duration: float,
        *,
        step: int | None = None,
        before: Callable[[dict[str, Any]], object] | None = None,
    ) -> dict[str, Any]:
        """Fill in one result, show it to the callbacks, and append it to the journal.

        Args:
            metrics: as the user returned them.
            duration: seconds that they took.
            step: default ``training_iteration``.
            before: called with the filled result, which it may change, before the callbacks.

        Returns:
            The result as it was recorded, with the user's own objects in it.

        Raises:
            MetricError: a value that cannot be recorded; no counter has changed.
            DeliveryError: a tracker with ``on_error: raise`` failed since the last result.
        """
        if not isinstance(metrics, Mapping):
            raise MetricError(f"metrics are a dict, not a {type(metrics).__name__}: {metrics!r}")
        with self._lock:
            if self._tracker_failure is not None:
                raise DeliveryError(self._tracker_failure)
            now = time.time()
            result, after = self.counters.fill(metrics, duration, now)
            seq = self.seq + 1
            written = result
            if before is not None or self._on_result:
                result.update(self._context)
                if before is not None:
                    before(result)
                for plugin in self._on_result:
                    shown = Result(seq, now, self._step(step, result, seq), result)
                    plugin.call("on_result", run=self.info, result=shown)
                written = {name: value for name, value in result.items() if name not in self._context}
            written = recordable(written, self._store_media)
            step = self._step(step, written, seq)
            try:
                self._journal.append(ResultRecord(seq=seq, time=now, step=step, metrics=written))
            except (TypeError, ValueError, OverflowError) as error:
                if self._media is not None:
                    self._media.discard(seq)
                raise explain(written, error) from error
            result.update(self._context)
            self.counters, self.seq, self.head, self.last_result, self._last_written = after, seq, seq, result, written
            return result

    @staticmethod
    def _step(step: int | None, result: dict[str, Any], seq: int) -> int:
        if step is None:
            step = result.get("training_iteration")
        return int(step) if isinstance(step, int | float) and math.isfinite(step) else seq

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Keep a copy of a file or directory with the run.

        Args:
            path: what to keep.
            name: its path below ``artifacts/``; default its own name. One that is there is replaced.

        Raises:
            ConfigError: there is no such file, or the name leads out of the run.
            JournalError: the run has ended, or belongs to a parent process.
        """
        self._journal.check_open()
        source = Path(path)
        name = name or source.resolve().name
        target = self._directory.artifacts / name
        if self._directory.artifacts.resolve() not in target.resolve().parents:
            raise ConfigError(f"artifact {name!r}: the name leads out of the run's directory")
        if not source.exists():
            raise ConfigError(f"artifact {source}: there is no such file")
        staged = self._directory.path / f".artifact-{secrets.token_hex(4)}"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if source.is_dir():
                shutil.copytree(source, staged, symlinks=False)
            else:
                shutil.copyfile(source, staged)
            if target.is_dir():
                shutil.rmtree(target)
            elif staged.is_dir():
                target.unlink(missing_ok=True)
            os.replace(staged, target)
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(staged) if staged.is_dir() else staged.unlink()
        size = (
            sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
            if target.is_dir()
            else target.stat().st_size
        )
        with self._lock:
            self._journal.append(ArtifactRecord(seq=self.seq, time=time.time(), name=Path(name).as_posix(), size=size))

    def save_checkpoint(self, source: CheckpointSource) -> Checkpoint:
        """Save a checkpoint of this moment: hashed, durable, whole or absent.

        Args:
            source: a dict state; a directory whose files are copied; a Checkpoint; or a function that fills the
                staging directory.

        Returns:
            The committed checkpoint.

        Raises:
            CheckpointError: it could not be saved; there is nothing of it.
            JournalError: the run has ended, or belongs to a parent process.
        """
        self._journal.check_open()
        with self._saving:  # a lock of its own: other threads log meanwhile
            with self._lock:
                moment: dict[str, Any] = {
                    "counters": self.counters, "metrics": self.written_metrics(), "journal_seq": self.head
                }  # fmt: skip
            with self.checkpoints.stage() as staging:
                fill(staging, source)
                self._journal.sync()  # a checkpoint must never know of results that a power cut can take back
                checkpoint = self.checkpoints.commit(staging, **moment)
            self._note_checkpoint(checkpoint, self.seq)
            self.checkpoints.retain()
            return checkpoint

    def _note_checkpoint(self, checkpoint: Checkpoint, seq: int) -> None:
        self._journal.append(
            CheckpointRecord(
                seq=seq,
                time=time.time(),
                index=checkpoint.index,
                iteration=checkpoint.iteration,
                url=checkpoint.url,
                size=checkpoint.size,
                metrics=checkpoint.metrics,
            )
        )

    def written_metrics(self) -> dict[str, Any]:
        """The last result as it stands in the journal."""
        return {name: value for name, value in self._last_written.items() if name not in self._context}

    # -- the trackers' side of it ------------------------------------------------------------------------------------

    @property
    def trackers(self) -> dict[str, dict[str, Any]]:
        """What each tracker has noted of this run so far, such as the id that it has there."""
        return {lane.tracker: lane.notes for lane in read_lanes(self._directory.delivery)}

    def export_environment(self, tracker: str, timeout_s: float = 60.0) -> dict[str, str]:
        """Set the environment variables by which a tracker's own library, in this process, joins this very run.

        With ``mlflow`` these are ``MLFLOW_RUN_ID`` and ``MLFLOW_TRACKING_URI``, so that ``mlflow.autolog()`` logs into the
        MLflow run that trainyard writes to. The end of the run sets them back.

        Args:
            tracker: its name.
            timeout_s: seconds to wait until it has been reached; training waits for a tracker nowhere else.

        Returns:
            The variables; empty, with a warning, if it was not reached in time.

        Raises:
            ConfigError: the run has no such tracker, or it has no such variables.
        """
        known = [owed.tracker for delivery in self.deliveries for owed in delivery.standing(0)]
        if tracker not in known:
            raise ConfigError(f"run {self.name}: {unknown('tracker', tracker, known, label='its trackers')}")
        deadline = time.monotonic() + timeout_s
        while not (notes := self.trackers.get(tracker)):
            if time.monotonic() > deadline:
                logger.warning("tracker %r was not reached within %.0f s: no environment variables", tracker, timeout_s)
                return {}
            time.sleep(0.05)
        if "environment" not in notes:
            raise ConfigError(f"tracker {tracker!r} has no environment variables to join it by")
        variables: dict[str, str] = notes["environment"]
        export(variables)
        self._exported.update(variables)
        if all(name != tracker for _, name in self._joined):
            plugin = self._specs[tracker].build()
            self._joined.append((plugin, tracker))
            plugin.call("join", run=self.info, notes=notes)
        return variables

    def _leave(self) -> None:
        """Undo :meth:`export_environment`."""
        for plugin, tracker in self._joined:
            try:
                plugin.call("leave", run=self.info, notes=self.trackers.get(tracker, {}))
            except Exception as error:
                logger.warning("tracker %r failed to leave: %s: %s", tracker, type(error).__name__, error)
        self._joined.clear()
        take_back(self._exported)

    # -- how it goes on ------------------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Whether the last result ends the run: it says ``done``, the stop condition holds, or a callback says so."""
        result = self.last_result
        if not result:
            return False
        if result.get("done"):
            return True
        if self.stop is None and not self._should_stop:
            return False
        shown = Result(self.seq, time.time(), self._step(None, result, self.seq), result)
        if self.stop is not None and self.stop(shown):
            return True
        for plugin in self._should_stop:
            answer = plugin.call("should_stop", run=self.info, result=shown)
            if answer is not None:
                return bool(answer)
        return False

    def restore_counters(self, checkpoint: Checkpoint | None) -> None:
        """Go on counting from where a checkpoint was saved; results of this run that lie beyond it are superseded.

        Args:
            checkpoint: None: from the beginning.
        """
        manifest = checkpoint.manifest if checkpoint else None
        with self._lock:
            if manifest is None or manifest.run_id == self.id:
                keep = manifest.journal_seq if manifest else 0
                if keep < self.head:
                    self.head = keep
                    self._journal.append(
                        ResumedRecord(seq=self.seq, time=time.time(), keep=keep, context=self._written_context)
                    )
            self.counters = manifest.counters.restored() if manifest else Counters()
            self._last_written = dict(manifest.metrics) if manifest else {}
            self.last_result = {**self._last_written, **self._context} if self._last_written else {}

    def finish(self, status: Status = "completed", error: BaseException | None = None) -> RunResult:
        """End the run: everything durable, trackers caught up within 30 s. Calling it again changes nothing.

        Args:
            status: how it ended.
            error: the exception that ended it; its traceback goes into ``error.txt``.

        Returns:
            What there is to know of it.

        Ctrl-C ends the waiting for the trackers.

        Raises:
            JournalError: results are still waiting for room on the disk, and none came within 30 s.
        """
        if self._owner != os.getpid():
            return RunResult(self.path, error)  # a forked child leaves its parent's run
        self._git_thread.join()  # a few ms, once a process; git itself has a deadline
        with self._lock:
            if self._ended is not None:
                return RunResult(self.path, error)
            self._ended = status
        _open_runs.discard(self)
        self._leave()
        message = None
        try:
            if error is not None:
                text = "".join(traceback.format_exception_only(error)).strip()
                message = hide(text, self._secrets).encode(errors="backslashreplace").decode()
                self.note_error(error)
            for name, size in captured_files(self._directory.path, self.record):
                self._journal.append(ArtifactRecord(seq=self.seq, time=time.time(), name=name, size=size, path=name))
            self._journal.append(EndedRecord(seq=self.seq, time=time.time(), status=status, error=message))
            self._close_journal()
            self.record.status = status
            try:
                self._directory.write(self.record)
            except OSError as why:  # the journal has it
                logger.warning("cannot write %s: %s", self._directory.json, why.strerror)
        finally:
            self._directory.lock.release()
            try:
                self.draining = True
                drain(self.deliveries, DRAIN_S, lambda left: self._waiting(self.owed(), left))
            except KeyboardInterrupt:
                logger.warning("not waiting for the trackers any longer")
            finally:
                self.draining = False
        for tracker in self.owed():
            logger.warning(
                "tracker %r is still owed %d results of run %s (%s); to send them: trainyard sync %s",
                tracker.tracker, tracker.owed, self.name, tracker.error, self.path,
            )  # fmt: skip
        return RunResult(self.path, error)

    def owed(self) -> list[Owed]:
        """The trackers that have not confirmed the end of the run, or all results so far."""
        every = [tracker for delivery in self.deliveries for tracker in delivery.standing(self.seq)]
        return [tracker for tracker in every if tracker.error is not None]

    def note_error(self, error: BaseException) -> None:
        """Append a traceback to ``error.txt``."""
        try:
            with open(self._directory.error, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(hide("".join(traceback.format_exception(error)), self._secrets))
        except OSError as why:
            logger.warning("cannot write %s: %s", self._directory.error, why.strerror)

    @contextlib.contextmanager
    def current(self) -> Iterator[Run]:
        """While this holds, :func:`get_run` in this thread is this run."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def __enter__(self) -> Run:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        _current.reset(self._token)
        self.finish(*how_it_ended(error))

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.status}, path={self.path!r})"

    # -- inside --------------------------------------------------------------------------------------------------

    def _note_failure(self, message: str) -> None:
        self._tracker_failure = message

    def _store_media(self, name: str, value: Media) -> MediaFile | None:
        """Store a media value of the result that is being recorded."""
        self._journal.check_open()  # a forked child must not touch its parent's files
        if self._media is None:
            from trainyard.media import MediaFolder  # not before there is one

            self._media = MediaFolder(self._directory.path)
        return self._media.store(value, name, self.seq + 1)

    def _find_where_it_stopped(self) -> None:
        self._recorded: set[int] = set()  # checkpoints
        for record in JournalReader(self._directory.journal):
            if isinstance(record, ResultRecord):
                self.seq = record.seq
            elif isinstance(record, CheckpointRecord):
                self._recorded.add(record.index)
        self.start_checkpoint = self._trusted(self.checkpoints.newest_good())
        self.head = 0
        if self.start_checkpoint is not None:
            self.head = self.start_checkpoint.manifest.journal_seq
            self.seq = max(self.seq, self.head)  # larger only if somebody took the journal away
            self.restore_counters(self.start_checkpoint)

    def _trusted(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """A checkpoint that opens its pickled leaves, if it was this run that pickled them."""
        if checkpoint is not None:
            checkpoint.trusted = checkpoint.manifest.pickled_by == self.id
        return checkpoint

    def newest_good_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of this run that verifies."""
        return self._trusted(self.checkpoints.newest_good())

    def _close_journal(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._journal.waiting and time.monotonic() < deadline:
            with contextlib.suppress(JournalError):
                self._journal.sync()
            time.sleep(0.2)
        self._journal.close()

    def _note_git_state(self) -> None:
        state = git_state(self._working_directory)
        if state is not None:  # finish() waits for us before it writes
            self.record.git = state
            with contextlib.suppress(OSError):
                self._directory.write(self.record)


class _SayOnce:
    """Says, once and only if it takes long, whom the end of a run is waiting for."""

    PATIENCE_S = 3.0

    def __init__(self, run: str) -> None:
        self._run = run
        self._began: float | None = None
        self._said = False

    def __call__(self, trackers: list[Owed], left: float) -> None:
        now = time.monotonic()
        self._began = self._began or now
        if trackers and not self._said and now - self._began > self.PATIENCE_S:
            self._said = True
            who = ", ".join(f"{tracker.tracker} ({tracker.owed} results)" for tracker in trackers)
            logger.warning("run %s is over; waiting up to %.0f s for its trackers: %s", self._run, left, who)


def fill(staging: Staging, source: CheckpointSource) -> None:
    """Put what a checkpoint is made of into its staging directory."""
    if isinstance(source, dict):
        staging.add_state(source)
    elif isinstance(source, str | os.PathLike | Checkpoint):
        path = Path(source.path if isinstance(source, Checkpoint) else source)
        if not path.is_dir():
            raise CheckpointError(f"{path} is no directory: a checkpoint is a dict, a directory or a Checkpoint")
        staging.add_files(path)
    elif callable(source):
        source(staging)
    else:
        raise CheckpointError(f"a checkpoint is a dict, a directory or a Checkpoint, not a {type(source).__name__}")


def how_it_ended(error: BaseException | None) -> tuple[Status, BaseException | None]:
    """The status that an exception out of the user's code means, and the exception if it is a failure."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "completed", None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    return "failed", error


def get_run() -> Run | None:
    """The run that this code is in; None outside of any.

    In a thread that the user started, the process' only open run.
    """
    run = _current.get()
    if run is not None or threading.current_thread() is threading.main_thread():
        return run
    still_open = [run for run in _open_runs if run.status == "running"]
    return still_open[0] if len(still_open) == 1 else None


def new_run_directory(
    root: Path, experiment: str, trainable: str, name: str | None, run_id: str, adopt: bool
) -> RunDirectory:
    """Make the directory for a new run. A name that is taken, even in this moment, gets a suffix.

    Args:
        root: the storage root.
        experiment: a safe name.
        trainable: the trainable's name, for the default ``<trainable>_<id>``.
        name: the user's name for it, or None.
        run_id: the run's id.
        adopt: take a directory of that name that holds no run yet, rather than another name.
    """
    if name is None:
        name = f"{safe_name(trainable)[: NAME_LIMIT - len(run_id) - 1]}_{run_id}"
    check_name(name, "name")
    taken = name
    while True:
        directory = RunDirectory(root / experiment / name)
        if directory.claim() or adopt:
            return directory
        name = f"{taken[: NAME_LIMIT - 5]}_{secrets.token_hex(2)}"


def new_run(
    root: Path,
    experiment: str,
    trainable: str,
    name: str | None,
    written_config: Mapping[str, Any],
    adopt: bool = False,
    **settings: Any,
) -> tuple[RunDirectory, RunRecord]:
    """The directory and identity of a new run; its arguments as in :func:`new_run_directory`.

    Returns:
        Both, for :class:`Run`; the directory is empty yet.
    """
    run_id = secrets.token_hex(5)
    directory = new_run_directory(
        root, check_name(experiment, "experiment"), trainable.rpartition(":")[2], name, run_id, adopt
    )
    record = new_record(
        id=run_id,
        name=directory.path.name,
        experiment=experiment,
        trainable=trainable,
        config=redact(written_config),
        settings=redact(settings),
    )
    return directory, record


def open_new_run(
    *,
    trainable: str,
    config: dict[str, Any],
    written_config: Mapping[str, Any],
    storage: str | os.PathLike[str] | None = None,
    trackers: Any = None,
    experiment: str | None = None,
    name: str | None = None,
    tags: dict[str, str] | None = None,
    delivery: DeliveryMode | None = None,
) -> Run:
    """A new run for code that has its own loop; what is None comes from the environment, then from the defaults."""
    given = {
        "storage": storage, "trackers": trackers, "experiment": experiment, "name": name, "tags": tags, "delivery": delivery
    }  # fmt: skip
    settings = parse_config(
        {"trainable": trainable, **{key: value for key, value in given.items() if value is not None}}
    )
    specs = tracker_specs(settings.trackers)
    root = open_storage(settings.storage).path(settings.experiment).parent
    directory, record = new_run(
        root, settings.experiment, trainable, settings.name, written_config, trackers=named_trackers(settings.trackers)
    )
    record.tags = redact(settings.tags)
    return Run(
        directory, record, config=config, written_config=written_config, trackers=specs, delivery=settings.delivery
    )


@atexit.register
def _finish_open_runs() -> None:
    """A process that ends without ending its runs: say how it ended, and let the trackers catch up."""
    error = getattr(sys, "last_value", None)
    for run in list(_open_runs):
        try:
            run.finish(*how_it_ended(error))
        except Exception as why:
            logger.warning("could not finish run %s: %s", run.name, why)
