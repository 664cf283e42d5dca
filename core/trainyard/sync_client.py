"""The training process' side of the sync process: start it or join it, keep an eye on it, wait for it at the end.

One sync process serves all runs of an experiment directory that were started in the same surroundings: the same
working directory, environment and plugins, since trackers may read any of these. Which runs those are, it finds in a
folder of the machine's temporary directory, where each training process puts an entry for each of its runs.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainyard import plugins
from trainyard.config import is_plain
from trainyard.delivery import MAIN_JOURNAL, Delivery, LaneState, Owed, TrackerSpec, failure_text, owed
from trainyard.files import write_atomic
from trainyard.locks import FileLock
from trainyard.records import RunInfo
from trainyard.redaction import REDACTED, redact

__all__ = ["SyncedDelivery", "export", "is_portable", "runtime_folder", "take_back"]

logger = logging.getLogger("trainyard")

_LOOK_EVERY_S = 1.0
_LOG_LIMIT = 1 << 20
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0

# variables that differ between two runs of one job, and mean nothing to a tracker
_NOISE = re.compile(
    r"_|SHLVL|PWD|OLDPWD|TERM.*|COLORTERM|COLUMNS|LINES|WINDOWID|TMUX.*|STY|WINDOW|SSH_.*|XDG_SESSION.*|DISPLAY|LS_COLORS|"
    r"PYTEST_.*|CUDA_VISIBLE_DEVICES|OMP_.*|MKL_.*|OPENBLAS_.*|NUMEXPR_.*|(LOCAL_|GROUP_|ROLE_)?RANK|SLURM_(TASK|STEP|PROCID|"
    r"LOCALID|ARRAY_TASK).*|TRAINYARD_.*|PYTHONHASHSEED|JPY_.*|VSCODE_.*"
)

_clients: dict[str, _SyncClient] = {}
_exported: dict[str, str | None] = {}  # what a run has put into the environment, and what was there before


def runtime_folder() -> Path:
    """Where the processes of one user on this machine find each other."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folder = Path(tempfile.gettempdir(), f"trainyard-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if hasattr(os, "getuid") and (
        not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077
    ):
        raise PermissionError(13, "it is not ours alone", str(folder))
    return folder


def _token(experiment: Path, cwd: str, given: Mapping[str, str], named: set[str], private: bool) -> str:
    """Names the one sync process that a run in these surroundings belongs to; options read the variables in `named`."""
    environment = {name: value for name, value in given.items() if name in named or not _NOISE.fullmatch(name)}
    visible = [(plugin.name, plugin.module, plugin.package, plugin.version) for plugin in plugins.installed()]
    surroundings = [
        os.path.realpath(experiment), cwd, sys.executable, sorted(environment.items()), visible,
        os.getpid() if private else 0,
    ]  # fmt: skip
    return hashlib.blake2b(repr(surroundings).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def is_portable(spec: TrackerSpec) -> bool:
    """Whether another process can build a tracker: it has a name, and its options are plain values."""
    if spec.options is None:
        return False
    return is_plain(spec.options)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def export(variables: Mapping[str, str]) -> None:
    """Set environment variables for a while; the sync process never sees them."""
    for name, value in variables.items():
        _exported.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def take_back(names: Iterable[str]) -> None:
    """Undo :func:`export`."""
    for name in names:
        before = _exported.pop(name, None)
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _environment() -> dict[str, str]:
    now = {**os.environ, **_exported}
    return {name: value for name, value in now.items() if value is not None}


class _SyncClient:
    """One sync process as this training process sees it: its own child, or one that another has started."""

    def __init__(self, experiment: Path, token: str, cwd: str, environment: Mapping[str, str]) -> None:
        folder = self._folder = runtime_folder()
        self._cwd = cwd
        self._environment = environment
        self._experiment = experiment
        self._token = token
        self._announced = folder / token
        self._log = folder / f"{token}.log"
        self._lock = FileLock(folder / f"{token}.lock")
        self._given: dict[str, Mapping[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = 0.0
        self._not_before = 0.0
        self._mutex = threading.Lock()

    def announce(self, run: Path, private: Mapping[str, Any] | None) -> None:
        """Have a run served from now on, and the process started if there is none."""
        with self._mutex:
            if private is not None:
                self._given[str(run)] = private
                self._tell({"run": str(run), "trackers": private})
        self.look_after(run)

    def look_after(self, run: Path) -> None:
        """See that the run is announced, and that somebody is there to serve it."""
        entry, us = self._announced / run.name, f"{platform.node()} {os.getpid()}"
        while True:
            with contextlib.suppress(FileNotFoundError):  # a process that leaves removes entry and folder
                if entry.read_text() == us:
                    break
            self._announced.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                write_atomic(entry, us.encode(), durable=False)
        with self._mutex:
            if self._process is None or self._process.returncode is not None:
                self._start()

    def hurry(self) -> None:
        """A run waits at its end: begin the process anew within a second, however often it has died."""
        self._not_before = min(self._not_before, time.monotonic() + 1.0)

    def poke(self) -> None:
        """Have it look at once; one that is not our child looks often enough."""
        with self._mutex:
            self._tell(None)

    def _start(self) -> None:
        if time.monotonic() < self._not_before or self._lock.held:
            return
        self._pause = min(max(_FIRST_PAUSE_S, 2 * self._pause), _LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause
        library = {os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload")}
        # the standard library first: a file beside the script may have the name of one of its modules
        entries = [entry for entry in sys.path if isinstance(entry, str) and entry]
        path = os.pathsep.join(sorted(entries, key=lambda entry: entry not in library))
        full = self._log.exists() and self._log.stat().st_size > _LOG_LIMIT
        with open(self._log, "wb" if full else "ab") as log, _starting:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "trainyard.sync",
                    str(self._experiment),
                    "--token",
                    self._token,
                    "--runtime",
                    str(self._folder),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                env={**self._environment, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C and the end of the terminal are for the training
            )
        for run, trackers in self._given.items():
            self._tell({"run": run, "trackers": trackers})
        threading.Thread(target=self._reap, args=(self._process,), name="trainyard-sync", daemon=True).start()

    def _tell(self, what: Mapping[str, Any] | None) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            self._process.stdin.write((_encode(what) if what else b"") + b"\n")
            self._process.stdin.flush()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        code = process.wait()
        with self._mutex:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            if time.monotonic() - began > _LONGEST_PAUSE_S or code == 0:
                self._pause = self._not_before = 0.0
        if code not in (0, -signal.SIGTERM) and self._pause <= _FIRST_PAUSE_S:
            logger.warning(
                "the process that delivers to the trackers ended with %d (%s); it is begun anew", code, self._log
            )

    def let_go(self) -> None:
        """The end of this process, or a fork's child: what it still has to do, it does without us."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            if process.returncode is None:
                process.returncode = 0  # nobody waits for it any more


_starting = threading.Lock()
"""Held while a process is started: a child forked in that moment would keep Popen's pipe open, for which Popen then waits."""


def _in_child() -> None:
    _starting.release()
    for client in _clients.values():
        client._mutex = threading.Lock()
        client.let_go()
    _clients.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_in_child)


class SyncedDelivery:
    """The trackers of one run that the sync process delivers to; the same to a Run as ``Delivery``.

    Args:
        run: which run.
        trackers: its trackers, each with its options.
        on_failure: called with the error of a tracker whose `on_error` is ``raise``.
    """

    def __init__(self, run: RunInfo, trackers: Sequence[TrackerSpec], on_failure: Callable[[str], None]) -> None:
        self._info = run
        self._run = Path(run.path)
        self._journal = self._run / "journal" / MAIN_JOURNAL
        self._specs = {spec.name: spec for spec in trackers}
        self._on_failure = on_failure
        self._over = threading.Event()
        self._stopped = threading.Event()
        self._deadline = float("inf")
        self._cwd, self._environment = os.getcwd(), _environment()  # as they are now: the user's code may change them
        self._failing: dict[str, float] = {}
        self._client: _SyncClient | None = None
        self._threads: Delivery | None = None  # where no process can be started
        self._known: dict[str, tuple[tuple[int, int, int], LaneState]] = {}
        self._watcher = threading.Thread(target=self._watch, name="trainyard-watch", daemon=True)

    def start(self) -> None:
        """Have it started, in the background."""
        self._watcher.start()

    def close(self, deadline: float) -> None:
        """Nothing more will come; the sync process has a deadline of its own."""
        self._deadline = deadline
        self._over.set()
        if self._threads is not None:
            self._threads.close(deadline)
        elif self._client is not None:
            self._client.poke()

    @property
    def settled(self) -> bool:
        """Whether every tracker has confirmed the end of the run."""
        if self._threads is not None:
            return self._threads.settled
        try:
            size = self._journal.stat().st_size
        except FileNotFoundError:
            return True  # somebody took the run away
        states = [self._state(name) for name in self._specs]
        return all(state.ended and state.cursor.get(MAIN_JOURNAL, 0) >= size for state in states)

    def standing(self, newest: int) -> list[Owed]:
        """How each tracker stands, given the seq of the newest result."""
        return [
            owed(str(self._run), self._state(name), newest, options=spec.options) for name, spec in self._specs.items()
        ]

    def stop(self) -> None:
        """The time is over. What is owed stays in the journal."""
        self._stopped.set()
        if self._threads is not None:
            self._threads.stop()

    # -- in the background ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            client = self._client = self._attach()
        except Exception as error:  # whatever it is that keeps us from a process
            logger.warning("cannot start the process that delivers to the trackers (%s): threads do it", error)
            self._threads = Delivery(self._info, list(self._specs.values()), self._on_failure)
            self._threads.start()
            if self._over.is_set():
                self._threads.close(self._deadline)
            return
        if self._over.is_set():
            client.poke()
        while not self._over.wait(_LOOK_EVERY_S):
            with contextlib.suppress(Exception):  # the next look may do better
                client.look_after(self._run)
            self._tell_of_failures()
        while not self._stopped.wait(0.5) and not self.settled:
            with contextlib.suppress(Exception):
                client.hurry()
                client.look_after(self._run)

    def _attach(self) -> _SyncClient:
        options = {name: spec.options or {} for name, spec in self._specs.items()}
        written = _encode(redact(options)).decode()
        secret = REDACTED in written
        named = set(re.findall(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}", written))
        token = _token(self._run.parent, self._cwd, self._environment, named, secret)
        client = _clients.setdefault(token, _SyncClient(self._run.parent, token, self._cwd, self._environment))
        client.announce(self._run, options if secret else None)
        return client

    def _tell_of_failures(self) -> None:
        for name, spec in self._specs.items():
            state = self._state(name)
            if state.failing_since == self._failing.get(name):
                continue
            if state.failing_since is None:
                del self._failing[name]
                logger.warning("tracker %r works again: run %s is being caught up", name, self._run.name)
                continue
            self._failing[name] = state.failing_since
            logger.warning("%s", failure_text(spec, self._run.name, state.error or ""))
            if spec.on_error == "raise":
                self._on_failure(f"tracker {name!r} failed: {state.error}")

    def _state(self, name: str) -> LaneState:
        path = self._run / "delivery" / f"{name}.json"
        try:
            found = path.stat()
            changed = (found.st_mtime_ns, found.st_ino, found.st_size)  # the clock has coarse ticks
        except OSError:
            return LaneState(name, name)
        known = self._known.get(name)
        if known is None or known[0] != changed:
            known = self._known[name] = (changed, LaneState.read(path) or LaneState(name, name))
        return known[1]


@atexit.register
def _leave() -> None:
    for client in _clients.values():
        client.let_go()
