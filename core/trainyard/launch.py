"""run(): config in, result out. Everything that can be wrong is found before the first step; then it never gives up easily."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainyard import plugins
from trainyard.active_run import Run, how_it_ended, new_run, open_new_run
from trainyard.checkpoint import Checkpoint
from trainyard.config import (
    DeliveryMode,
    RunConfig,
    Source,
    StopRule,
    load_trainable,
    named_trackers,
    open_storage,
    parse_config,
    tracker_specs,
)
from trainyard.console import capture
from trainyard.delivery import Owed
from trainyard.errors import ConfigError, DeliveryError
from trainyard.functional import FunctionTrainable, Reporter, Unwind, call
from trainyard.records import Result, Status
from trainyard.redaction import redact, resolve_environment
from trainyard.resources import Resources
from trainyard.results import DUPLICATE
from trainyard.rundir import RunDirectory, RunResult, list_runs
from trainyard.signatures import check_signature
from trainyard.storage import CheckpointPolicy
from trainyard.trainable import Trainable

__all__ = ["execute", "run", "start_run"]

logger = logging.getLogger("trainyard")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0


def run(
    trainable: Any,
    config: dict[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | Callable[[Result], bool] | None = None,
    trackers: Any = None,
    storage: str | os.PathLike[str] | None = None,
    experiment: str | None = None,
    name: str | None = None,
    checkpoint: Mapping[str, Any] | CheckpointPolicy | None = None,
    resources: Mapping[str, Any] | Resources | None = None,
    executor: str = "inline",
    failures: Mapping[str, Any] | None = None,
    resume: Literal["never", "allow", "must"] = "never",
    callbacks: Sequence[object] = (),
    log_to_file: bool | str | Sequence[str] = False,
    delivery: DeliveryMode = "process",
    tags: Mapping[str, str] | None = None,
    chdir: bool = False,
) -> RunResult:
    """Run a trainable to its end.

    Ctrl-C lets the current step finish, saves a last checkpoint, and ends the run as ``interrupted``; a second one
    raises KeyboardInterrupt at once. SIGTERM does the same as the first, as ``preempted``.

    Args:
        trainable: a :class:`Trainable` class, a function ``train(config)``, or ``"module:name"``.
        config: handed to it.
        stop: thresholds (``{"training_iteration": 20}``: stops at or above), or a callable on each result.
        trackers: a mapping of name to options, or a list of names, one-entry mappings and plugin objects; default
            json and csv.
        storage: where run directories live; default ``./runs``.
        experiment: the named set of runs it belongs to; default ``default``.
        name: its directory; default ``<trainable>_<id>``. With `resume`, the run to go on with.
        checkpoint: ``every``, ``at_end``, ``keep``, ``metric``, ``mode``: see :class:`CheckpointPolicy`.
        resources: what it needs.
        executor: where it runs: ``inline``, this process.
        failures: ``max_failures``: how often it goes on from its newest checkpoint after an exception.
        resume: ``never``: a new run. ``allow``: go on with the named run, or the newest unfinished one of the
            experiment, if there is one. ``must``: it is an error if there is none.
        callbacks: objects with ``on_result`` and ``should_stop`` hooks.
        log_to_file: True: copy stdout and stderr into the run directory; or the name of one file, or two names.
        delivery: who delivers to the trackers: ``process``, one beside this one, which serves all runs of the
            experiment; ``thread``, threads of this process. Plugin objects are always served by threads.
        tags: free words, kept with the run.
        chdir: make the run directory the working directory meanwhile.

    Returns:
        Status, metrics, checkpoints and history. A failure of the trainable is in ``result.error``;
        ``result.raise_if_failed()`` raises it.

    Raises:
        TrainyardError: a mistake that was found before the first step; nothing was run.
    """
    given: dict[str, Any] = {
        "trainable": trainable,
        "config": config,
        "stop": stop,
        "trackers": trackers,
        "storage": storage,
        "experiment": experiment,
        "name": name,
        "checkpoint": checkpoint,
        "resources": resources.to_dict() if isinstance(resources, Resources) else resources,
        "executor": executor,
        "failures": failures,
        "resume": resume,
        "log_to_file": list(log_to_file) if isinstance(log_to_file, tuple) else log_to_file,
        "delivery": delivery,
        "tags": tags,
        "chdir": chdir,
    }
    source = Source("", "", {key: value for key, value in given.items() if value is not None}, {})
    return execute(parse_config(source.data, source), callbacks, source)


def start_run(
    *,
    experiment: str | None = None,
    config: dict[str, Any] | None = None,
    trackers: Any = None,
    storage: str | os.PathLike[str] | None = None,
    name: str | None = None,
    tags: dict[str, str] | None = None,
    delivery: DeliveryMode = "process",
) -> Run:
    """Only a logger, around any loop. Use it as a context manager, or call :meth:`Run.finish`.

    Args:
        experiment, config, trackers, storage, name, tags, delivery: as in :func:`run`.

    Returns:
        The open run: ``run.log({"loss": 0.3}, step=7)``, ``run.log_artifact(path)``, ``run.save_checkpoint(source)``.
    """
    written = config or {}
    return open_new_run(
        trainable=Path(sys.argv[0]).stem or "run",
        config=resolve_environment(written),
        written_config=written,
        storage=storage,
        trackers=trackers,
        experiment=experiment,
        name=name,
        tags=tags,
        delivery=delivery,
    )


def execute(
    config: RunConfig,
    callbacks: Sequence[object] = (),
    source: Source | None = None,
    existing: RunDirectory | None = None,
    waiting: Callable[[list[Owed], float], None] | None = None,
) -> RunResult:
    """Run what a config says.

    Args:
        config: validated.
        callbacks: plugin objects for the training process.
        source: the YAML file it came from, for the places of mistakes; trainables are looked for beside it too.
        existing: the very run to go on with, wherever it lies.
        waiting: called at the end, while trackers catch up, with how each stands and the seconds that are left.
    """
    place = source.place if source else str
    trainable = config.trainable
    if isinstance(trainable, str):
        trainable = load_trainable(trainable, source.directory if source else None, place("trainable"))
    name = _check_trainable(trainable, config.checkpoint, place)
    resolved = resolve_environment(config.config, place("config"))
    if resolved == config.config:
        resolved = config.config  # the user's own object
    root = open_storage(config.storage, place("storage")).path(config.experiment).parent
    existing = existing or _run_to_resume(config, root)
    if existing is not None and _is_complete(existing, config):
        return RunResult(existing.path)
    options: dict[str, Any] = {
        "config": resolved,
        "written_config": config.config,
        "trackers": tracker_specs(config.trackers, place),
        "callbacks": [_callback(callback) for callback in callbacks],
        "policy": config.checkpoint,
        "stop": StopRule(config.stop),
        "resources": _resources(config, trainable),
        "delivery": config.delivery,
        "waiting": waiting,
    }
    with _Signals() as signals:
        if existing is not None:
            opened = Run(existing, tags=redact(config.tags), settings=_settings(config), **options)
        else:
            spec = (
                config.trainable
                if isinstance(config.trainable, str)
                else f"{getattr(trainable, '__module__', '')}:{name}"
            )
            directory, record = new_run(
                root,
                config.experiment,
                spec,
                config.name,
                config.config,
                adopt=config.resume != "never",
                **_settings(config),
            )
            record.tags = redact(config.tags)
            if source is not None and isinstance(config.trainable, str) and not _lies_here(config.trainable):
                record.directory = source.directory or record.directory
            opened = Run(directory, record, **options)
        with (
            _captured(config.log_to_file, Path(opened.path)),
            _working_directory(opened.path if config.chdir else None),
        ):
            return _Attempts(opened, trainable, config, signals).run()


def _check_trainable(trainable: Any, policy: CheckpointPolicy, place: Callable[[str], str]) -> str:
    """The trainable's name.

    Raises:
        ConfigError: it is none, or cannot do what the config asks of it.
    """
    if isinstance(trainable, type):
        if not issubclass(trainable, Trainable):
            raise ConfigError(
                f"{place('trainable')}: {trainable.__name__} is a class, but no subclass of trainyard.Trainable"
            )
        can_save = trainable.save_checkpoint is not Trainable.save_checkpoint
        mend = f"override {trainable.__name__}.save_checkpoint"
        if issubclass(trainable, FunctionTrainable):
            can_save, mend = False, "a function saves by report(metrics, checkpoint=...)"
    else:
        if not callable(trainable):
            raise ConfigError(
                f"{place('trainable')}: {trainable!r} is no trainable: a Trainable class, a function, or module:name"
            )
        check_signature(trainable)
        can_save, mend = False, "a function saves by report(metrics, checkpoint=...)"
    asked = "every" if policy.every else "at_end" if policy.at_end else None
    if asked and not can_save:
        raise ConfigError(f"{place(f'checkpoint.{asked}')}: this trainable cannot be saved from outside: {mend}")
    return str(getattr(trainable, "__name__", type(trainable).__name__))


def _lies_here(trainable: str) -> bool:
    file = trainable.rpartition(":")[0]
    return not file.endswith(".py") or Path(file).is_file()


def _callback(callback: object) -> plugins.Plugin:
    plugin = plugins.hold(type(callback).__name__, callback)
    if not plugin.hooks & {"on_result", "should_stop"}:
        raise ConfigError(
            f"callbacks: {callback!r} has neither on_result nor should_stop, marked with @trainyard.hookimpl"
        )
    return plugin


def _resources(config: RunConfig, trainable: Any) -> Resources:
    if config.resources is not None:
        return Resources.parse(config.resources)
    request = getattr(trainable, "default_resource_request", None)
    return Resources.parse(request(config.config) if request else None, "default_resource_request")


def _run_to_resume(config: RunConfig, root: Path) -> RunDirectory | None:
    if config.resume == "never":
        return None
    place = root / config.experiment
    if config.name is not None:
        directory = RunDirectory(place / config.name)
        if directory.json.is_file():
            return directory
        missing = f"there is no run {config.name!r} in {place}"
    else:
        for found in list_runs(root, config.experiment):
            if found.status == "running":
                continue  # somebody is at it; a run of ours that died is 'killed'
            if found.status != "completed":
                return RunDirectory(Path(found.path))
        missing = f"there is no unfinished run in {place}"
    if config.resume == "must":
        raise ConfigError(f"resume: {missing}; list them with: trainyard runs --storage {root}")
    return None


def _is_complete(directory: RunDirectory, config: RunConfig) -> bool:
    """Whether a run that is to be resumed has come to its end already, and nothing asks for more of it."""
    found = RunResult(directory.path)
    if found.status != "completed":
        return False
    if callable(config.stop) or config.stop == found.record.settings.get("stop"):
        return True
    metrics = found.metrics
    return bool(metrics) and StopRule(config.stop)(Result(0, 0.0, 0, metrics))


def _settings(config: RunConfig) -> dict[str, Any]:
    """What a later ``trainyard resume`` needs; what only Python can say is left out."""
    settings: dict[str, Any] = {}
    defaults = RunConfig(trainable="")
    for key in RunConfig.__struct_fields__:
        value = getattr(config, key)
        if key in ("trainable", "config", "experiment", "name", "resume", "tags"):
            continue
        if value == getattr(defaults, key) and key != "trackers":
            continue
        if key == "stop" and callable(value):
            continue
        if key == "trackers":
            value = named_trackers(value)
        settings[key] = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    return redact(settings)  # type: ignore[no-any-return]


class _Attempts:
    """One run, tried as often as its failure policy allows."""

    def __init__(self, run: Run, trainable: Any, config: RunConfig, signals: _Signals) -> None:
        self.run_ = run
        self.trainable = trainable
        self.policy = config.checkpoint
        self.failures_left = config.failures.max_failures
        self.stop_rule = run.stop if isinstance(run.stop, StopRule) else None
        self.saved_at = run.counters.iteration if run.start_checkpoint else -1
        self.signals = signals
        self.pause_s = 0.0  # the first time at once

    def run(self) -> RunResult:
        run = self.run_
        while True:
            error: BaseException | None = None
            try:
                self.signals.armed = True
                with run.current():
                    self._train()
            except BaseException as raised:
                error = raised
            status, error = how_it_ended(error)
            if isinstance(error, Exception) and self._tries_again(error):
                continue
            if status == "completed" and self.signals.status is not None:
                status = self.signals.status
            self.signals.ending = run
            result = run.finish(status, error)
            if status == "interrupted" and self.signals.status is None:
                raise KeyboardInterrupt  # it was pressed twice
            return result

    def _tries_again(self, error: Exception) -> bool:
        """Note the failure, and stand at the newest good checkpoint. False: this one is final."""
        run = self.run_
        if self.failures_left == 0 or self.signals.status is not None or isinstance(error, DeliveryError):
            return False
        self.failures_left -= 1
        run.note_error(error)
        run.start_checkpoint = run.newest_good_checkpoint()
        run.restore_counters(run.start_checkpoint)
        self.saved_at = run.counters.iteration if run.start_checkpoint else -1
        where = f"iteration {run.counters.iteration}" if run.start_checkpoint else "the beginning"
        logger.warning("run %s failed: %s: %s; going on from %s", run.name, type(error).__name__, error, where)
        until = time.monotonic() + self.pause_s
        self.pause_s = min(max(_FIRST_PAUSE_S, 2 * self.pause_s), _LONGEST_PAUSE_S)
        while time.monotonic() < until and self.signals.status is None:
            time.sleep(0.05)
        return True

    def _train(self) -> None:
        if isinstance(self.trainable, type):
            self._train_class()
        else:
            self._train_function()

    def _train_function(self) -> None:
        run = self.run_
        if run.should_stop():
            return  # it was resumed at its end

        def until() -> bool:
            self._after_first_result()
            return self.signals.status is not None or run.should_stop()

        reporter = Reporter(run, until)
        try:
            with reporter.reporting():
                call(self.trainable, run.config, reporter)
        except Unwind:
            pass

    def _train_class(self) -> None:
        run = self.run_
        trainable: Trainable = self.trainable(run.config, run=run)
        try:
            if run.start_checkpoint is not None:
                trainable.restore(run.start_checkpoint)
            while self.signals.status is None and not run.should_stop():
                result = trainable.train()
                if DUPLICATE in result:
                    break
                self._after_first_result()
                if self.policy.due(run.counters.iteration) or (
                    result.get("should_checkpoint") and not isinstance(trainable, FunctionTrainable)
                ):
                    self._save(trainable)
            if self._wants_last_checkpoint(trainable):
                self._save(trainable)
        finally:
            trainable.stop()

    def _save(self, trainable: Trainable) -> Checkpoint:
        checkpoint = trainable.save()
        self.saved_at = self.run_.counters.iteration
        return checkpoint

    def _wants_last_checkpoint(self, trainable: Trainable) -> bool:
        if (
            isinstance(trainable, FunctionTrainable)
            or self.saved_at == self.run_.counters.iteration
            or not self.run_.last_result
        ):
            return False
        if self.policy.at_end is None:
            return type(trainable).save_checkpoint is not Trainable.save_checkpoint
        return self.policy.at_end

    def _after_first_result(self) -> None:
        """Once there is a result, tell of stop metrics that it does not have: with a typing mistake a run never ends."""
        if self.stop_rule is not None:
            for warning in self.stop_rule.unseen(self.run_.last_result):
                logger.warning("%s", warning)
            self.stop_rule = None


class _Signals:
    """Ctrl-C and SIGTERM as a wish to stop after the current step, while the main thread is ours.

    Attributes:
        status: what the run is to end as, once there was a signal.
        armed: a second Ctrl-C may raise KeyboardInterrupt now; while a run is being opened it must not.
        ending: the run that is being ended; a Ctrl-C now ends only the waiting for its trackers.
    """

    def __init__(self) -> None:
        self.status: Status | None = None
        self.armed = False
        self.ending: Run | None = None
        self._before: dict[int, Any] = {}
        self._owner = os.getpid()

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: object) -> None:
        if os.getpid() != self._owner:  # a forked worker: a signal means to it what it meant before
            signal.signal(number, self._before[number] or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.ending is not None:
            if number == signal.SIGINT and self.ending.draining:
                raise KeyboardInterrupt
            return
        if self.status is not None:
            if number == signal.SIGINT and self.armed:
                self.status = None  # run() raises it again
                raise KeyboardInterrupt
            return
        self.status = "interrupted" if number == signal.SIGINT else "preempted"
        if number == signal.SIGINT:
            os.write(2, b"\nstopping after this step and a last checkpoint; Ctrl-C again stops at once\n")


@contextlib.contextmanager
def _captured(log_to_file: Any, directory: Path) -> Iterator[None]:
    if not log_to_file:
        yield
        return
    names = (
        ["stdout", "stderr"]
        if log_to_file is True
        else [log_to_file] * 2
        if isinstance(log_to_file, str)
        else log_to_file
    )
    with capture(directory / names[0], directory / names[1]):
        yield


@contextlib.contextmanager
def _working_directory(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
