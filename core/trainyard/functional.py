"""The function style: ``report()`` and ``get_checkpoint()``, on the same Run as the class style.

Under ``run()`` a function is simply called, in the calling thread; the stop condition unwinds it out of its next
``report()``. Only :func:`wrap_function`, which gives such a function the step-by-step ``train()`` of a class, needs a
thread, and then only one of the two ever runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainyard.active_run import CheckpointSource, Run, get_run
from trainyard.checkpoint import Checkpoint, Staging
from trainyard.errors import CheckpointError, MetricError, TrainyardError
from trainyard.results import DUPLICATE
from trainyard.signatures import check_signature, takes_reporter
from trainyard.trainable import Trainable, unpacked

__all__ = ["get_checkpoint", "report", "wrap_function"]

logger = logging.getLogger("trainyard")

_UNWIND_S = 2.0  # how long a function has to leave its code once it was told to stop

_reporter: contextvars.ContextVar[Reporter | None] = contextvars.ContextVar("trainyard_reporter", default=None)
_active: list[Reporter] = []
_warned: set[str] = set()


class Unwind(BaseException):
    """Raised out of ``report()`` to end a function cleanly; its ``finally`` blocks run. Not for catching."""


class Reporter:
    """Where the reports of one running function go.

    Args:
        run: its run.
        until: asked after each report; True unwinds the function.
    """

    def __init__(self, run: Run, until: Callable[[], bool]) -> None:
        self.run = run
        self._until = until
        self._unwinding = False
        self._thread = 0
        self._reported_at = time.perf_counter()

    def report(self, metrics: Mapping[str, Any], checkpoint: CheckpointSource | None) -> None:
        """Record, save, and unwind if it is time."""
        if not self._unwinding:  # else the first one ended only a thread of the function, or was caught
            record(self.run, metrics, checkpoint, self._lap())
            self._unwinding = self._until()
        if self._unwinding:
            self._unwind()

    def _unwind(self) -> None:
        # a thread of the function's own ends by SystemExit without a word; the function itself comes to its next report
        raise Unwind if threading.get_ident() == self._thread else SystemExit

    def _lap(self) -> float:
        now = time.perf_counter()
        duration, self._reported_at = now - self._reported_at, now
        return duration

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """While this holds, ``report()`` in this thread comes here."""
        self._thread = threading.get_ident()
        token = _reporter.set(self)
        _active.append(self)
        try:
            with self.run.current():
                yield
        finally:
            _active.remove(self)
            _reporter.reset(token)


def record(
    run: Run, metrics: Mapping[str, Any], checkpoint: CheckpointSource | None, duration: float
) -> dict[str, Any]:
    """Record one report of a function, and save its checkpoint, before it goes on."""
    if not isinstance(metrics, Mapping):
        raise MetricError(f"report() takes a dict of metrics, not a {type(metrics).__name__}: {metrics!r}")
    if checkpoint is None:
        return run.record_result({**metrics, "checkpoint_dir_name": None}, duration)
    name = f"checkpoint_{run.checkpoints.next_index:06d}"
    result = run.record_result({**metrics, "checkpoint_dir_name": name, "should_checkpoint": True}, duration)
    run.save_checkpoint(checkpoint)
    return result


def report(metrics: Mapping[str, Any], *, checkpoint: CheckpointSource | None = None) -> None:
    """Report one result from inside a training function (Ray's ``tune.report``).

    It may not return: when a stop condition holds, the function is unwound from here.

    Args:
        metrics: a dict, as :meth:`Run.log` takes it.
        checkpoint: a directory, which is copied; a Checkpoint; a dict state; or None. It is durable on return.

    Raises:
        MetricError: a value that cannot be recorded; nothing was written.
        CheckpointError: the checkpoint could not be saved.
    """
    reporter = _current_reporter()
    if reporter is not None:
        reporter.report(metrics, checkpoint)
        return
    run = get_run()
    if run is not None:
        run.log(metrics)
        if checkpoint is not None:
            run.save_checkpoint(checkpoint)
        return
    _warn_once(
        "report", "report() was called outside of a run: nothing is recorded. Run the function by trainyard.run(...)"
    )


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint that a training function is to resume from; None for a fresh start."""
    reporter = _current_reporter()
    run = reporter.run if reporter is not None else get_run()
    if run is None:
        _warn_once("get_checkpoint", "get_checkpoint() was called outside of a run: there is nothing to resume from")
        return None
    return run.start_checkpoint


def _current_reporter() -> Reporter | None:
    reporter = _reporter.get()
    if reporter is None and _active and threading.current_thread() is not threading.main_thread():
        if len(_active) > 1:
            raise TrainyardError(
                f"{len(_active)} training functions are running, and a thread of its own cannot tell which one it reports "
                "for: start it with contextvars.copy_context().run as its target"
            )
        return _active[0]  # a thread that the function started
    return reporter


def _warn_once(name: str, message: str) -> None:
    if name not in _warned:
        _warned.add(name)
        logger.warning("%s", message)


def call(function: Callable[..., Any], config: dict[str, Any], reporter: Reporter) -> None:
    """Run a training function to its end: its reports, what it yields and what it returns.

    Raises:
        Unwind: it was told to stop.
        Exception: whatever it raises.
    """
    arguments: list[Any] = [copy.deepcopy(config)]
    if takes_reporter(function):
        arguments.append(_old_style(reporter))
    output = function(*arguments)
    if inspect.isgenerator(output):
        try:
            while True:
                try:
                    item = next(output)
                except StopIteration as end:
                    output, returned = None, end.value
                    break
                _report_output(reporter, item)
        finally:
            if output is not None:
                output.close()
        output = returned
    _report_output(reporter, output)


def _report_output(reporter: Reporter, output: Any) -> None:
    if getattr(output, "ndim", None) == 0 and hasattr(output, "item"):
        output = output.item()  # a numpy or torch scalar
    if isinstance(output, int | float) and not isinstance(output, bool):
        reporter.report({"_metric": output}, None)
    elif isinstance(output, Mapping):
        if output:
            reporter.report(output, None)
    elif output is not None:
        raise MetricError(
            f"a training function returns or yields a dict, a number or None, not a {type(output).__name__}"
        )


def _old_style(reporter: Reporter) -> Callable[..., None]:
    """The second argument of 2019: ``reporter(mean_accuracy=0.9)``."""

    def call_reporter(metrics: Mapping[str, Any] | None = None, **named: Any) -> None:
        reporter.report({**(metrics or {}), **named}, None)

    return call_reporter


class _Ended:
    """A function's thread is at its end.

    Args:
        error: what it raised, or None.
    """

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _SteppedReporter(Reporter):
    """Hands each report to the thread that calls ``train()``, and waits there until the next call."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, lambda: False)
        self.items: queue.SimpleQueue[tuple[Mapping[str, Any], CheckpointSource | None, float] | _Ended] = (
            queue.SimpleQueue()
        )
        self.go_on = threading.Semaphore(0)
        self.stopping = False
        self.refusal: Exception | None = None

    def report(self, metrics: Mapping[str, Any], checkpoint: CheckpointSource | None) -> None:
        if not isinstance(metrics, Mapping):
            raise MetricError(f"report() takes a dict of metrics, not a {type(metrics).__name__}: {metrics!r}")
        if self.stopping:
            self._unwind()
        self.items.put((metrics, checkpoint, self._lap()))
        self.go_on.acquire()
        self._reported_at = time.perf_counter()
        if self.stopping:
            self._unwind()
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal


class FunctionTrainable(Trainable):
    """The step-by-step view of a training function; made by :func:`wrap_function`."""

    _function: Callable[..., Any]
    _thread: threading.Thread | None = None
    _ended = False
    _reporter: _SteppedReporter
    _checkpoint: CheckpointSource | None = None
    _saved: Checkpoint | None = None

    def train(self) -> dict[str, Any]:
        """Let the function go on until its next report, and record it.

        After the function's end, once: ``{"__duplicate__": True, ...}``.

        Raises:
            RuntimeError: called again after that.
            Exception: what the function raised, with its type and traceback.
        """
        if self._ended:
            raise RuntimeError(f"the function {type(self).__name__} has ended: there is nothing more to train")
        if self._thread is None:
            self._start()
        else:
            self._reporter.go_on.release()
        while not isinstance(item := self._reporter.items.get(), _Ended):
            metrics, checkpoint, duration = item
            try:
                result = record(self._run, metrics, checkpoint, duration)
            except Exception as refusal:  # for the function: it is raised by its report
                self._reporter.refusal = refusal
                self._reporter.go_on.release()
                continue
            if checkpoint is not None:
                self._saved = self._run.checkpoints.all()[-1]
            return result
        self._ended = True
        if item.error is not None:
            raise item.error
        return {DUPLICATE: True, "should_checkpoint": False, "checkpoint_dir_name": None}

    def _start(self) -> None:
        reporter = self._reporter = _SteppedReporter(self._run)

        def work() -> None:
            error: BaseException | None = None
            try:
                with reporter.reporting():
                    call(type(self)._function, self.config, reporter)
            except Unwind:
                pass
            except BaseException as raised:
                error = raised
            reporter.items.put(_Ended(error))

        self._thread = threading.Thread(target=work, name=f"trainyard-{type(self).__name__}", daemon=True)
        self._thread.start()

    def save(self, checkpoint_dir: Any = None) -> Checkpoint:
        """The newest checkpoint that the function has reported.

        Args:
            checkpoint_dir: a directory to copy it to.

        Raises:
            CheckpointError: it has reported none.
        """
        if self._saved is None:
            raise CheckpointError(
                f"the function {type(self).__name__} has reported no checkpoint: report(metrics, checkpoint=...) saves one"
            )
        return self._saved if checkpoint_dir is None else Checkpoint(self._saved.to_directory(checkpoint_dir))

    def _fill(self, staging: Staging) -> None:
        staging.add_files(Path(self.save().path))

    def _moment(self) -> dict[str, Any]:
        known = self.save().manifest  # the function's state is the one of that report, not of the last
        names = ("run_id", "index", "counters", "metrics", "journal_seq")
        return {name: getattr(known, name) for name in names}

    def restore_from_object(self, obj: bytes, *, allow_pickle: bool = False) -> None:
        """The same from what ``save_to_object`` returned."""
        folder = unpacked(obj)
        self._cleanups.callback(shutil.rmtree, folder, ignore_errors=True)  # the function opens it when it starts
        self.restore(folder, allow_pickle=allow_pickle)

    def restore(self, checkpoint: Any, *, allow_pickle: bool = False) -> None:
        """Have the function start, or start again, from a checkpoint; it gets it by :func:`get_checkpoint`."""
        found = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        found.verify()
        self._unwind()
        self._run.start_checkpoint = found
        self._run.restore_counters(found)
        self._restored = True

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the function; the next ``train()`` starts it with the new config. False if it does not end in 2 s."""
        return self._unwind()

    def cleanup(self) -> None:
        """End the function."""
        self._unwind()

    def _unwind(self) -> bool:
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._reporter.stopping = True
            self._reporter.go_on.release()
            thread.join(_UNWIND_S)
            if thread.is_alive():
                logger.warning(
                    "the function %s goes on after it was told to stop: it is in a long step", type(self).__name__
                )
                return False
        self._thread, self._ended = None, False
        return True


def wrap_function(function: Callable[..., Any]) -> type[Trainable]:
    """Give a training function the step-by-step ``train()`` of a Trainable.

    Args:
        function: takes ``(config)`` or ``(config, reporter)``; may be a generator.

    Returns:
        A class of the same name. There may be any number of them, and of their objects, in one process.

    Raises:
        ConfigError: it takes other arguments.
    """
    check_signature(function)
    name = getattr(function, "__name__", type(function).__name__)
    members: dict[str, Any] = {
        "_function": staticmethod(function),
        "__module__": function.__module__,
        "__doc__": function.__doc__,
    }
    request = getattr(function, "default_resource_request", None)
    if request is not None:
        members["default_resource_request"] = classmethod(lambda cls, config: request(config))
    return type(name, (FunctionTrainable,), members)
