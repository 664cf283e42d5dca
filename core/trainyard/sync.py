"""The sync process: lanes over all runs of an experiment. And by hand: deliver what is owed, replay a finished run.

``python -m trainyard.sync DIRECTORY --token TOKEN`` is what a training process starts (see ``sync_client.py``). It
serves the runs that are announced to it, and those in the directory that are dead and still owe something. It ends
when none of them is left: soon after the training process, or a moment after its last run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainyard.config import check_tracker_name, tracker_specs
from trainyard.delivery import Delivery, Lane, LaneState, Owed, TrackerSpec, drain, owed
from trainyard.errors import ConfigError, RunLocked, TrainyardError, unknown
from trainyard.journal import ArtifactRecord, EndedRecord, JournalReader, JournalWriter, ResultRecord
from trainyard.locks import FileLock
from trainyard.redaction import REDACTED
from trainyard.rundir import RunDirectory, RunResult, captured_files, last_outcome
from trainyard.sync_client import runtime_folder
from trainyard.values import flatten

__all__ = ["DEADLINE_S", "Follower", "Owed", "directories", "replay", "standing", "sync_run"]

logger = logging.getLogger("trainyard")

DEADLINE_S = 30.0
"""Seconds that one tracker is given, once its run is over, to take what it is owed."""

_POLL_S = 0.05
_CHECK_EVERY_S = 1.0
_LINGER_S = 1.0  # the next run of a sweep or a notebook finds it still there
_LEFTOVERS_AT_ONCE = 4
_LOOKED_AT_ONCE = 4
_LEFTOVERS_STAY_S = 5.0
_DEATHS_TO_ISOLATE = 2
_MEMORY_LIMIT = 1 << 30
_GREW = 75  # exit code: it had grown over the limit
_LONGEST_PAUSE_S = 30.0
_GIVEN = "_TRAINYARD_SYNC_GIVEN"  # hands the options over to ourselves


# -- by hand ---------------------------------------------------------------------------------------------------------


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
    trackers = _trackers_of(run, only)
    directory = RunDirectory(Path(run.path))
    directory.create()
    live = [standing(run, name, live=True) for name in trackers]
    if directory.alive:
        return live
    holder, _ = directory.lock.taken()
    try:
        directory.take_lock(role="sync")
    except RunLocked:
        return live
    try:
        end_if_killed(directory, holder)
        specs, refused = _specs(trackers)
        _deliver(run, specs)
    finally:
        directory.lock.release()
    standings = [standing(run, name, refused.get(name)) for name in trackers]
    if only is None:  # those that were handed over as objects
        others = [lane.tracker for lane in run.lanes() if lane.tracker not in trackers and not lane.ended]
        standings += [standing(run, name, "only the Python code that handed it over can build it") for name in others]
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
    holder, _ = directory.lock.taken()
    directory.take_lock(role="sync")
    try:
        end_if_killed(directory, holder)
        _deliver(run, tracker_specs({tracker: dict(options or {})}))
    finally:
        directory.lock.release()
    return standing(run, tracker)


def standing(run: RunResult, name: str, refused: str | None = None, *, live: bool = False) -> Owed:
    """How one tracker of a run stands.

    Args:
        run: the run.
        name: the tracker's.
        refused: why it cannot even be begun.
        live: a running process delivers to it.
    """
    directory = RunDirectory(Path(run.path))
    state = LaneState.read(directory.delivery / f"{name}.json") or LaneState(name, name)
    return owed(run.path, state, _newest_seq(directory), refused, live=live)


def _deliver(run: RunResult, specs: list[TrackerSpec]) -> None:
    delivery = Delivery(run.info(), specs)
    delivery.start()
    drain([delivery], DEADLINE_S)


def _trackers_of(run: RunResult, only: str | None) -> dict[str, Any]:
    trackers: Any = run.record.settings.get("trackers", {})
    if not isinstance(trackers, dict) or not all(isinstance(options, dict) for options in trackers.values()):
        raise ConfigError(f"{run.path}/run.json is damaged: settings.trackers is no mapping of names to options")
    for name in trackers:
        check_tracker_name(name, f"{run.path}/run.json")
    if only is None:
        return dict(trackers)
    if only not in trackers:
        raise ConfigError(f"run {run.name}: {unknown('tracker', only, trackers, label='its trackers')}")
    return {only: trackers[only]}


def _specs(trackers: Mapping[str, Any], *, check: bool = True) -> tuple[list[TrackerSpec], dict[str, str]]:
    """What can be built of a run's trackers, and why the others cannot; unless `check`, that is left to their lanes."""
    specs: list[TrackerSpec] = []
    refused: dict[str, str] = {}
    for name, options in trackers.items():
        if secret := _kept_secret(options):
            refused[name] = (
                f"its {', '.join(secret)} was kept secret, so it is not on record: write ${{env:NAME}} instead"
            )
            continue
        try:
            specs += tracker_specs({name: options}, check=check)
        except TrainyardError as error:
            refused[name] = str(error)
    return specs, refused


def _kept_secret(options: Mapping[str, Any]) -> list[str]:
    return [key for key, value in flatten(options) if REDACTED in str(value)]


def _newest_seq(directory: RunDirectory) -> int:
    return max((r.seq for r in JournalReader(directory.journal) if isinstance(r, ResultRecord)), default=0)


def end_if_killed(directory: RunDirectory, holder: str = "") -> None:
    """Write the end that a dead process could not write, into a journal that is not its own.

    Args:
        directory: the run, whose lock we have.
        holder: who had it before, as ``HOST PID``.
    """
    record = directory.read()
    if record.status != "running":
        return
    if (outcome := last_outcome(directory.path)[0]) is not None:
        record.status = outcome
        directory.write(record)
        return
    if holder.partition(" ")[0] not in ("", platform.node()) and not directory.silent:
        return  # it may go on on a machine whose locks are not seen here
    newest = _newest_seq(directory)
    journal = JournalWriter(directory.sync_journal)
    for name, size in captured_files(directory.path, record):
        journal.append(ArtifactRecord(seq=newest, time=time.time(), name=name, size=size, path=name))
    journal.append(EndedRecord(seq=newest, time=time.time(), status="killed"))
    journal.close()
    record.status = "killed"
    directory.write(record)


# -- the process -----------------------------------------------------------------------------------------------------


class _Isolated:
    """A lane in a process of its own, which is begun anew when it dies: for a tracker that takes its process down."""

    def __init__(self, run: Path, name: str, options: Mapping[str, Any], state: LaneState) -> None:
        self._run = run
        self._name = name
        self._options = options
        self._restarts = state.restarts

    def follow(self, closing: threading.Event, deadline: Callable[[], float]) -> None:
        """As :meth:`Lane.follow`."""
        pause = 0.0
        while True:
            began = time.monotonic()
            try:
                code = self._run_once(closing, deadline)
            except OSError as error:
                logger.warning("cannot start a process for tracker %r: %s", self._name, error)
                code = -1
            if code == 0:
                return
            self._note(code)
            pause = 0.1 if time.monotonic() - began > _LONGEST_PAUSE_S else min(max(0.1, 2 * pause), _LONGEST_PAUSE_S)
            if closing.is_set():
                left = deadline() - time.monotonic()
                if left <= 0:
                    return
                time.sleep(min(pause, left))
            else:
                closing.wait(pause)

    def _run_once(self, closing: threading.Event, deadline: Callable[[], float]) -> int:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainyard.sync", str(self._run), "--lane", self._name], stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(msgspec.json.encode(self._options) + b"\n")
            process.stdin.flush()
        while process.poll() is None:
            if closing.wait(0.2):
                with contextlib.suppress(OSError):
                    process.stdin.close()  # it makes its last round
                try:
                    process.wait(max(0.0, deadline() - time.monotonic()) + 0.5)
                except subprocess.TimeoutExpired:
                    process.kill()
        return process.wait()

    def _note(self, code: int) -> None:
        self._restarts += 1
        why = f"its process grew over {_MEMORY_LIMIT >> 20} MiB" if code == _GREW else f"its process {_died(code)}"
        if not self._restarts & (self._restarts - 1):  # the first, second, fourth ... time
            logger.warning(
                "tracker %r of run %s: %s; begun anew for the %d. time", self._name, self._run.name, why, self._restarts
            )
        with _lane_state(self._run, self._name, self._name) as state:
            state.restarts, state.restarted_for = self._restarts, why
            if code != _GREW:
                state.error, state.failing_since = why, state.failing_since or time.time()


@contextlib.contextmanager
def _lane_state(run: Path, name: str, kind: str) -> Iterator[LaneState]:
    """A lane's state to note something in; it stays as it is if another process has the lane at this moment."""
    path, lock = run / "delivery" / f"{name}.json", FileLock(run / "delivery" / f".{name}.lock")
    state = LaneState.read(path) or LaneState(name, kind)
    before = msgspec.json.encode(state)
    yield state
    with contextlib.suppress(OSError):
        if msgspec.json.encode(state) != before and lock.acquire():
            try:
                state.write(path)
            finally:
                lock.release()


def _died(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


class _Followed:
    """One run that is served.

    Args:
        path: its directory.
        trackers: name to options.
        isolate: each tracker gets a process of its own.
    """

    def __init__(self, path: Path, trackers: Mapping[str, Any], isolate: bool) -> None:
        self.directory = RunDirectory(path)
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._wakes: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        self._size = -1
        self.resumed = False
        self._checked = 0.0
        self._taken = self.directory.lock.taken()
        info = RunResult(path).info()
        specs, refused = _specs(
            trackers, check=False
        )  # to build one may take the process down: that is marked in its lane
        for spec in specs:
            lane = Lane(info, spec)
            arguments: tuple[Any, ...] = (self._closing, lambda: self._deadline)
            follow: Callable[..., None]
            if isolate or lane.deaths >= _DEATHS_TO_ISOLATE:
                follow = _Isolated(path, spec.name, spec.options or {}, lane.state).follow
            else:
                wake = threading.Event()
                self._wakes.append(wake)
                arguments, follow = (*arguments, wake), lane.follow
            thread = threading.Thread(target=follow, args=arguments, name=f"trainyard-{spec.name}", daemon=True)
            self._threads.append(thread)
        for name, why in refused.items():
            kind = str(trackers[name].get("type", name))
            with _lane_state(path, name, kind) as state:
                state.error, state.failing_since = why, state.failing_since or time.time()
        self.look(True)
        for thread in self._threads:
            thread.start()

    def look(self, now: bool) -> None:
        """Wake the lanes if there is something new, and see once a second whether the run is still alive.

        Args:
            now: see at once.
        """
        try:
            size = os.stat(self.directory.journal).st_size
        except OSError:
            size = 0
        if size != self._size:
            self._size = size
            self._wake()
        clock = time.monotonic()
        if not now and clock - self._checked < _CHECK_EVERY_S:
            return
        self._checked = clock
        taken = self.directory.lock.taken()
        if taken != self._taken and not taken[0].endswith(" sync"):
            self.resumed = True
            self.stop(clock)  # it was resumed, maybe with other trackers: whoever serves it next begins at the cursors
        elif not self._closing.is_set() and not self.directory.alive:
            self._close()

    def _close(self) -> None:
        """Its process is gone: end the run if that is still to be done, and have the lanes come to theirs."""
        with contextlib.suppress(TrainyardError, OSError):
            if self.directory.read().status == "running":  # else there is nothing to note
                self.directory.take_lock(role="sync")
                try:
                    end_if_killed(self.directory, self._taken[0])
                finally:
                    self.directory.lock.release()
        self.stop(time.monotonic() + DEADLINE_S)

    def stop(self, deadline: float) -> None:
        """Have the lanes make a last round, until that monotonic time."""
        self._deadline = min(self._deadline, deadline)
        self._closing.set()
        self._wake()

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    @property
    def finished(self) -> bool:
        """Whether its lanes are at their end, or out of time."""
        if not self._closing.is_set():
            return False
        return time.monotonic() > self._deadline + 1.0 or not any(thread.is_alive() for thread in self._threads)


class Follower:
    """Serves runs until none is left.

    Args:
        directory: the experiment directory (or, by hand, a run or a storage root).
        announced: the folder whose entries name the runs that are this process' own; None: all below `directory`.
        only: this tracker alone.
        isolate: each tracker gets a process of its own.
    """

    def __init__(
        self, directory: Path, announced: Path | None = None, only: str | None = None, isolate: bool = False
    ) -> None:
        self.directory = directory
        self.woken = threading.Event()
        self.given: dict[str, dict[str, Any]] = {}  # options with secrets, which are on no disk
        self.parent_is_gone = announced is None
        self.poked = False
        self.stopped = False
        self.isolate = isolate
        self._announced = announced
        self._only = only
        self._runs: dict[Path, _Followed] = {}
        self._looked = 0.0
        self._changed = 0
        self._leftovers: Iterator[Path | None] = iter(())
        self._leftover: set[Path] = set()

    def serve(self, leave: Callable[[], bool]) -> None:
        """Go on until there is nothing to do and `leave` agrees, or until :attr:`stopped`."""
        self._leftovers = self._dead_and_owed()
        busy_at = time.monotonic()
        while not self.stopped:
            poked, self.poked = self.poked, False
            self._look_for_runs(poked)
            for path, followed in list(self._runs.items()):
                followed.look(poked)
                if followed.finished:
                    self._done_with(path)
            now = time.monotonic()
            if self._runs:
                busy_at = now
            elif (self.parent_is_gone or now - busy_at > _LINGER_S) and leave():
                return
            self.woken.wait(_POLL_S)
            self.woken.clear()
        for followed in self._runs.values():
            followed.stop(time.monotonic() + 2.0)
        while not all(followed.finished for followed in self._runs.values()):
            time.sleep(0.02)

    @property
    def paths(self) -> list[Path]:
        """The runs that are served now."""
        return list(self._runs)

    def announced_now(self) -> bool:
        """Whether a run is announced that is not served yet."""
        return bool(self._announced and any(path not in self._runs for path in self._names(self._announced)))

    def _look_for_runs(self, now: bool) -> None:
        clock = time.monotonic()
        folder = self._announced or self.directory
        try:
            changed = os.stat(folder).st_mtime_ns
        except OSError:
            changed = 0
        if now or changed != self._changed or clock - self._looked > _CHECK_EVERY_S:
            self._changed, self._looked = changed, clock
            for path in self._names(folder) if self._announced else self._live():
                self._follow(path, self._announced is not None)
                self._leftover.discard(path)
        if self.parent_is_gone and self._announced:
            self._leftovers = iter(())
            for path in self._leftover & self._runs.keys():
                self._runs[path].stop(clock + _LEFTOVERS_STAY_S)
            self._leftover.clear()
        for leftover in itertools.islice(
            self._leftovers, _LOOKED_AT_ONCE if len(self._runs) < _LEFTOVERS_AT_ONCE else 0
        ):
            if leftover is not None:
                self._follow(leftover)
                self._leftover.add(leftover)

    def _names(self, folder: Path) -> list[Path]:
        try:
            return [self.directory / entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
        except OSError:
            return []

    def _live(self) -> Iterator[Path]:
        """All runs below a directory that somebody writes to."""
        for path in directories(self.directory):
            if path not in self._runs and RunDirectory(path).alive:
                yield path

    def _dead_and_owed(self) -> Iterator[Path | None]:
        """The dead runs that owe something; None for each other one, so that a look at many takes no long time."""
        for path in directories(self.directory):
            found = None
            try:
                if path not in self._runs and not RunDirectory(path).alive:
                    run = RunResult(path)
                    states = [standing(run, name) for name in _trackers_of(run, None)]
                    if run.record.status == "running" or any(state.error for state in states):
                        found = path
            except Exception as error:  # whatever it is, it is one run's matter
                logger.warning("cannot read run %s: %s", path, error)
            yield found

    def _follow(self, path: Path, announced: bool = False) -> None:
        if path in self._runs:
            return
        directory = RunDirectory(path)
        announced_by = _read(self._announced / path.name) if self._announced else ""
        if self._announced is not None and directory.alive and directory.lock.taken()[0] != announced_by:
            self._withdraw(path)  # it goes on in other surroundings, and another process serves it
            return
        try:
            trackers = self.given.get(str(path)) or _trackers_of(RunResult(path), self._only)
            if announced and not self.parent_is_gone and any(_kept_secret(options) for options in trackers.values()):
                return  # they are on their way to our standard input
            self._runs[path] = _Followed(path, trackers, self.isolate)
        except Exception as error:  # it is one run's matter: a damaged run.json, say
            logger.warning("cannot serve %s: %s", path, error)
            self._withdraw(path)

    def _done_with(self, path: Path) -> None:
        followed = self._runs.pop(path)
        if followed.directory.alive:
            self._looked = 0.0  # it was resumed, and may be announced anew
        elif followed.resumed:
            self._follow(path, self._announced is not None)  # it has ended again since
        else:
            self._withdraw(path)

    def _withdraw(self, path: Path) -> None:
        if self._announced is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._announced / path.name)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def directories(directory: Path) -> Iterator[Path]:
    """The runs that a run directory, an experiment's or a storage root holds."""
    if (directory / "run.json").is_file():
        yield directory
        return
    files = list(directory.glob("*/run.json")) or directory.glob("*/*/run.json")
    for file in files:
        yield file.parent


def _memory() -> int:
    """Bytes of memory that this process holds; 0 where that cannot be told."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _serve(directory: Path, token: str, folder: Path) -> None:
    """The process that a training process started."""
    lock, announced = FileLock(folder / f"{token}.lock"), folder / token
    if not lock.acquire():
        return  # another was quicker
    inherited = os.environ.pop(_GIVEN, None)
    follower = Follower(directory, announced, isolate=inherited is not None)
    follower.given = msgspec.json.decode(inherited or "{}")
    signal.signal(signal.SIGTERM, lambda *_: setattr(follower, "stopped", True))
    grown = threading.Event()
    stdin = _keep_from_trackers(0)
    heard = os.fdopen(stdin, "rb", closefd=False)

    def hear() -> None:
        try:
            for line in heard:
                if line.strip():
                    told: dict[str, Any] = msgspec.json.decode(line)
                    follower.given[told["run"]] = told["trackers"]
                follower.poked = True
                follower.woken.set()
        finally:  # a line that was cut off by its end is no line
            follower.parent_is_gone = follower.poked = True
            follower.woken.set()

    def watch_memory() -> None:
        while not follower.stopped:
            time.sleep(5.0)
            if _memory() > _MEMORY_LIMIT and not follower.isolate:
                logger.warning(
                    "grew over %d MiB: from now on each tracker has a process of its own", _MEMORY_LIMIT >> 20
                )
                grown.set()
                follower.stopped = True

    def leave() -> bool:
        log = folder / f"{token}.log"
        with contextlib.suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()
        with contextlib.suppress(OSError):
            lock.path.unlink()
        lock.release()
        if not follower.announced_now():
            with contextlib.suppress(OSError):
                os.rmdir(announced)
            return True
        return not lock.acquire()  # somebody came in this moment; if another process serves them, we can go

    threading.Thread(target=watch_memory, daemon=True).start()
    threading.Thread(target=hear, daemon=True).start()
    follower.serve(leave)
    if grown.is_set():  # begin anew, as small as at first, on the same standard input
        os.dup2(stdin, 0)
        os.environ[_GIVEN] = msgspec.json.encode(follower.given).decode()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "trainyard.sync", *sys.argv[1:]])


def _keep_from_trackers(fd: int) -> int:
    """Move a file out of the trackers' way; they find an empty one in its place."""
    kept = os.dup(fd)
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, fd)
    os.close(empty)
    return kept


def _serve_lane(run: Path, name: str) -> None:
    """One lane, for a tracker that took its process down before."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # whoever started us died in this moment
    options = msgspec.json.decode(line)
    specs, refused = _specs({name: options})
    if refused:
        raise SystemExit(refused[name])
    closing = threading.Event()
    deadline = [float("inf")]

    def hear() -> None:
        sys.stdin.buffer.read()
        deadline[0] = time.monotonic() + DEADLINE_S
        closing.set()
        time.sleep(DEADLINE_S + 2.0)
        os._exit(1)  # it does not return

    def watch_memory() -> None:
        while not closing.wait(2.0):
            if _memory() > _MEMORY_LIMIT:
                os._exit(_GREW)

    threading.Thread(target=hear, daemon=True).start()
    threading.Thread(target=watch_memory, daemon=True).start()
    Lane(RunResult(run).info(), specs[0]).follow(closing, lambda: deadline[0])


def main(arguments: list[str]) -> None:
    """The entry point of the process."""
    parser = argparse.ArgumentParser(prog="trainyard.sync")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--token")
    parser.add_argument("--lane")
    parser.add_argument("--runtime", type=Path)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(5)  # training comes first
        with contextlib.suppress(
            OSError
        ):  # in a session of our own a nice value counts only among ourselves, but for this
            Path("/proc/self/autogroup").write_text("10")
    log = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")  # a tracker may close what is not its own
    logging.basicConfig(format="%(asctime)s %(levelname)s: %(message)s", level=logging.WARNING, stream=log)
    if given.lane:
        _serve_lane(given.directory, given.lane)
    else:
        _serve(given.directory, given.token, given.runtime or runtime_folder())
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # a tracker that never returns must not keep us


if __name__ == "__main__":
    main(sys.argv[1:])
