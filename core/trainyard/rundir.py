"""A run directory: its layout, its identity, how to find one, and what can be read from it afterwards."""

from __future__ import annotations

import bisect
import functools
import logging
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainyard.checkpoint import Checkpoint, local_path
from trainyard.delivery import MAIN_JOURNAL, SYNC_JOURNAL, LaneState, surviving
from trainyard.errors import ConfigError, RunLocked, TrainyardError, unknown
from trainyard.files import sync_directory, write_atomic
from trainyard.journal import EndedRecord, JournalReader, ResultRecord, ResumedRecord, StartedRecord
from trainyard.locks import FileLock
from trainyard.records import Result, RunInfo, Status
from trainyard.storage import RunCheckpoints
from trainyard.values import flatten, strict_json
from trainyard.version import __version__

if TYPE_CHECKING:
    import pandas

__all__ = ["RunDirectory", "RunRecord", "RunResult", "find_run", "list_runs", "open_run"]

logger = logging.getLogger("trainyard")

NAME_LIMIT = 60
_SILENCE_S = 300.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10))}


class GitState(msgspec.Struct):
    """The commit that the working directory is at, and whether tracked files differ from it."""

    commit: str
    dirty: bool


class RunRecord(msgspec.Struct):
    """``run.json``: the identity of a run.

    Attributes:
        id, name, experiment: as in :class:`trainyard.records.RunInfo`.
        trainable: ``module:name`` or ``path.py:name``.
        config: redacted, ``${env:NAME}`` unresolved.
        tags: free words of the user.
        settings: the rest of the run's configuration (stop, trackers, checkpoint ...), redacted: what a resume needs.
        created: seconds since the epoch.
        host, directory, python, trainyard: where it was made; `directory` was the working directory.
        git: None outside of a repository.
        status: as it was last written; a run that was killed still says ``running`` here.
    """

    id: str
    name: str
    experiment: str
    trainable: str
    config: dict[str, Any]
    created: float
    tags: dict[str, str] = {}
    settings: dict[str, Any] = {}
    host: str = msgspec.field(default_factory=platform.node)
    directory: str = msgspec.field(default_factory=os.getcwd)
    python: str = msgspec.field(default_factory=platform.python_version)
    trainyard: str = ""
    git: GitState | None = None
    status: Status = "running"


@functools.cache
def git_state(directory: str) -> GitState | None:
    """The repository that a directory is in; asked once a process and directory, at most 5 s."""
    try:
        ask = functools.partial(
            subprocess.run,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            stdin=subprocess.DEVNULL,
            cwd=directory,
        )
        commit = ask(["git", "rev-parse", "HEAD"]).stdout.strip()
        changed = ask(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return GitState(commit, bool(changed))


def safe_name(text: str) -> str:
    """A name that every filesystem takes."""
    name = _UNSAFE.sub("-", text).strip("-.") or "run"
    return f"{name}-" if name.lower() in _RESERVED else name


def check_name(name: str, where: str) -> str:
    """Refuse a name that cannot be a directory's on every filesystem.

    Raises:
        ConfigError: naming the place and a name that would do.
    """
    if name != safe_name(name) or len(name) > NAME_LIMIT:
        raise ConfigError(
            f"{where}: {name!r} cannot be the name of a directory on every filesystem: use at most {NAME_LIMIT} letters, "
            f"digits, '.', '_' and '-', as in {safe_name(name)[:NAME_LIMIT]!r}"
        )
    return name


class RunDirectory:
    """The files of one run.

    Args:
        path: ``<storage>/<experiment>/<name>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.json = path / "run.json"
        self.journal = path / "journal" / MAIN_JOURNAL
        self.sync_journal = path / "journal" / SYNC_JOURNAL
        self.delivery = path / "delivery"
        self.checkpoints = path / "checkpoints"
        self.artifacts = path / "artifacts"
        self.error = path / "error.txt"
        self.lock = FileLock(path / ".lock")

    def claim(self) -> bool:
        """Make the directory, unless there is one of its name. Returns whether it was us who made it.

        Raises:
            ConfigError: that is not possible there.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except FileExistsError:
            if self.path.exists():
                return False
            self.create()
        except OSError:
            self.create()
        return True

    def create(self) -> None:
        """Make the directory and those in it, as far as they are missing.

        Raises:
            ConfigError: that is not possible there.
        """
        try:
            for folder in (self.path, self.journal.parent, self.delivery):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, *list(self.path.parents)[:3]):  # their names, down from the storage root
                sync_directory(folder)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "Permission denied", str(self.path))
        except OSError as error:
            raise ConfigError(
                f"storage: cannot write to {error.filename}: {error.strerror}; name another place with --set storage=DIR "
                "or storage=..."
            ) from error

    def take_lock(self, patience: float = 0.1, role: str = "") -> None:
        """Become the one process that writes to this run.

        Args:
            patience: seconds to try for.
            role: ``sync`` if it is only to note how the run ended.

        Raises:
            RunLocked: a live process does.
        """
        try:
            taken = self.lock.acquire(patience, role)
        except OSError as error:
            raise ConfigError(f"cannot lock {self.lock.path}: {error.strerror}") from error
        if not taken:
            raise RunLocked(
                f"run {self.path.name} is being written to by {self.lock.holder()} ({self.path}): wait for it, or stop it"
            )

    def read(self) -> RunRecord:
        """What ``run.json`` says.

        Raises:
            ConfigError: this is no run directory, or its ``run.json`` is damaged.
        """
        try:
            return msgspec.json.decode(self.json.read_bytes(), type=RunRecord)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{self.path} is not a run directory: it has no run.json") from None
        except OSError as error:
            raise ConfigError(f"{self.json} cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.json} is damaged: {error}") from error

    def write(self, record: RunRecord) -> None:
        """Replace ``run.json``."""
        write_atomic(self.json, msgspec.json.format(strict_json(msgspec.to_builtins(record))) + b"\n")

    @property
    def alive(self) -> bool:
        """Whether a process writes to it. Its lock says so; on a filesystem without locks, the process' number does."""
        held, holder = self.lock.held, self.lock.taken()[0]
        host, _, pid = holder.partition(" ")
        gone = host == platform.node() and pid.isdecimal() and not _exists(int(pid))
        deadline = time.monotonic() + 0.3
        while held and gone and not holder.endswith(" sync") and time.monotonic() < deadline:
            time.sleep(
                0.01
            )  # a process that it was starting has the lock until its exec; or somebody only now takes it
            held, holder = self.lock.held, self.lock.taken()[0]
        if holder.endswith(" sync"):
            return False  # somebody is noting its death
        if held is not None:
            return held
        if self.json.exists() and self.read().status != "running":
            return False
        return not gone if host == platform.node() and pid.isdecimal() else not self.silent

    @property
    def silent(self) -> bool:
        """Whether a run of another machine, whose locks may not be seen here, has logged nothing for minutes."""
        try:
            return time.time() - self.journal.stat().st_mtime > _SILENCE_S
        except OSError:
            return True

    def status(self, record: RunRecord) -> Status:
        """How the run stands now: what its journal says last, and whether its process is alive."""
        if record.status != "running":
            return record.status
        if self.alive:
            return "running"
        return last_outcome(self.path)[0] or "killed"


def _exists(pid: int) -> bool:
    """Whether there is a process of that number on this machine."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def last_outcome(path: Path) -> tuple[Status | None, str | None]:
    """The status and error of the last ``ended`` record that nothing follows; ``(None, None)`` without one."""
    directory = RunDirectory(path)
    lasts: list[Any] = []
    for journal in (directory.journal, directory.sync_journal):
        last = None
        for record in JournalReader(journal):
            if isinstance(record, EndedRecord | StartedRecord | ResumedRecord | ResultRecord):
                last = record
        lasts.append(last)
    main, sync = lasts
    if isinstance(sync, EndedRecord) and (main is None or sync.time >= main.time) and not isinstance(main, EndedRecord):
        main = sync
    return (main.status, main.error) if isinstance(main, EndedRecord) else (None, None)


def captured_files(path: Path, record: RunRecord) -> list[tuple[str, int]]:
    """The files that ``log_to_file`` has written, with their sizes in bytes."""
    asked = record.settings.get("log_to_file")
    names = ["stdout", "stderr"] if asked is True else [asked] if isinstance(asked, str) else asked or []
    return [(name, (path / name).stat().st_size) for name in names if (path / name).is_file()]


class RunResult:
    """What is known of a run: after ``run()``, or of any run directory by ``open_run()``.

    Args:
        path: the run's directory.
        error: the exception that ended it, where it happened in this process.

    Attributes:
        id, name, experiment: which run.
        path: its directory, as a string.
        config: redacted.
        status: one of ``running``, ``completed``, ``failed``, ``interrupted``, ``preempted``, ``killed``.
    """

    def __init__(self, path: str | os.PathLike[str], error: BaseException | None = None) -> None:
        self._directory = RunDirectory(Path(os.path.abspath(path)))
        self.record = self._directory.read()
        self.path = str(self._directory.path)
        self.id, self.name, self.experiment = self.record.id, self.record.name, self.record.experiment
        self.config = self.record.config
        self.status: Status = self._directory.status(self.record)
        self._error = error

    @property
    def error(self) -> BaseException | None:
        """What ended the run, or None; a run of another process has a :class:`TrainyardError` with the same words."""
        if self._error is None and self.status == "failed":
            return TrainyardError(last_outcome(Path(self.path))[1] or "unknown")
        return self._error

    def raise_if_failed(self) -> None:
        """Raise the exception that ended the run, if one did."""
        if self.error is not None:
            raise self.error

    @property
    def metrics(self) -> dict[str, Any]:
        """The last result, auto-filled keys included; empty if there is none."""
        last: ResultRecord | None = None
        context: dict[str, Any] = {}
        context_of_last = context
        for record in JournalReader(self._directory.journal):
            if isinstance(record, ResultRecord):
                last, context_of_last = record, context
            elif isinstance(record, StartedRecord | ResumedRecord):
                context = record.context
                if isinstance(record, ResumedRecord) and last is not None and last.seq > record.keep:
                    last = None
        if last is None:  # none at all, or the last ones are superseded and an earlier one counts
            results = self.history()
            return results[-1].metrics if results else {}
        return {**last.metrics, **context_of_last}

    def history(self) -> list[Result]:
        """All results that count, in order; those that a resume superseded are left out."""
        return surviving(self._directory.journal)

    def dataframe(self) -> pandas.DataFrame:
        """The history as a table: a row a result, a column a metric, nested names joined with ``/``.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("a table of results needs pandas: pip install 'trainyard[pandas]'") from None
        return pandas.DataFrame(_columns(self._directory.journal))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Those that are committed, by index."""
        return self._saved.all()

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest one, or None."""
        found = self.checkpoints
        return found[-1] if found else None

    def best_checkpoint(self, metric: str, mode: str = "max") -> Checkpoint | None:
        """The kept checkpoint that was saved with the best value of a metric.

        Args:
            metric: its name, nested names joined with ``/``.
            mode: ``max`` or ``min``.
        """
        if mode not in ("max", "min"):
            raise ConfigError(f"mode is 'max' or 'min', not {mode!r}")
        return self._saved.best(metric, mode)

    @property
    def _saved(self) -> RunCheckpoints:
        return RunCheckpoints(self._directory.checkpoints, self.id)

    @property
    def trackers(self) -> dict[str, dict[str, Any]]:
        """What each tracker has noted of this run, such as the id that it has there: ``trackers["mlflow"]["run_id"]``."""
        return {lane.tracker: lane.notes for lane in self.lanes()}

    def lanes(self) -> list[LaneState]:
        """How far each tracker has been delivered to."""
        return read_lanes(self._directory.delivery)

    def info(self) -> RunInfo:
        """The run as hooks see it."""
        record = self.record
        return RunInfo(record.id, record.name, record.experiment, self.path, record.config, record.tags)

    def __repr__(self) -> str:
        return f"RunResult({self.name!r}, {self.status}, path={self.path!r})"


def read_lanes(folder: Path) -> list[LaneState]:
    """The lanes' states in a run's ``delivery/``."""
    found = [LaneState.read(path) for path in sorted(folder.glob("*.json"))]
    return [state for state in found if state is not None]


_CHUNK = 2000  # rows that are transposed at a time: few enough that the garbage collector never walks over all of them


class _Table:
    """The surviving results as columns, built while the journal is read."""

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._parts: dict[str, list[Any]] = {
            "seq": [],
            "step": [],
            "time": [],
        }  # each column as the arrays of its chunks
        self._chunk: list[ResultRecord] = []
        self._contexts: list[tuple[int, dict[str, Any]]] = []  # the row from which on each holds

    def add(self, record: ResultRecord) -> None:
        self._chunk.append(record)
        if len(self._chunk) == _CHUNK:
            self._transpose()

    def begin(self, record: StartedRecord | ResumedRecord) -> None:
        """Take over the context of a process, and drop the rows that a resume supersedes."""
        self._transpose()
        if isinstance(record, ResumedRecord):
            kept = bisect.bisect_right(self._seqs, record.keep)
            del self._seqs[kept:]
            self._parts = {name: [_joined(parts)[:kept]] if parts else [] for name, parts in self._parts.items()}
        config = {f"config/{name}": value for name, value in flatten(record.context.get("config", {}))}
        fixed = {name: value for name, value in record.context.items() if name != "config"}
        self._contexts.append((len(self._seqs), {**fixed, **config}))

    def finish(self) -> dict[str, Any]:
        """All columns, the contexts' at the end."""
        self._transpose()
        columns = {name: _joined(parts) for name, parts in self._parts.items()}
        ends = [start for start, _ in self._contexts[1:]] + [len(self._seqs)]
        for name in dict.fromkeys(name for _, context in self._contexts for name in context):
            column: list[Any] = []
            for (_, context), end in zip(self._contexts, ends, strict=True):
                del column[end:]
                column += [context.get(name)] * (end - len(column))
            columns.setdefault(name, column)
        return columns

    def _transpose(self) -> None:
        chunk, self._chunk = self._chunk, []
        if not chunk:
            return
        before, size = len(self._seqs), len(chunk)
        self._seqs += [record.seq for record in chunk]
        values = {"seq": _array(self._seqs[before:]), "step": _array([record.step for record in chunk])}
        values |= {"time": _array([record.time for record in chunk])}
        values |= _transposed([record.metrics for record in chunk])
        for name, column in values.items():
            if name not in self._parts:
                self._parts[name] = [_array([None] * before)] if before else []
            self._parts[name].append(column)
        for name in self._parts.keys() - values.keys():
            self._parts[name].append(_array([None] * size))


def _transposed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Flat columns of rows; those of one flat shape, the usual case, without a look at each value."""
    names = list(rows[0])
    if len(names) > 1 and all(row.keys() == rows[0].keys() for row in rows):
        columns = zip(names, zip(*map(itemgetter(*names), rows), strict=True), strict=True)
        arrays = {name: _array(column) for name, column in columns}
        if not any(array.dtype == object and dict in set(map(type, array)) for array in arrays.values()):
            return arrays
    rows = [dict(flatten(row)) for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: _array([row.get(name) for row in rows]) for name in names}


def _array(values: Sequence[Any]) -> Any:
    import numpy

    if values and type(values[0]) in (float, int, bool):
        array = numpy.array(values)
        if array.ndim == 1 and array.dtype.kind in "fiub":
            return array
    return numpy.fromiter(values, dtype=object, count=len(values))


def _joined(parts: list[Any]) -> Any:
    import numpy

    if not parts:
        return []
    kinds = {part.dtype.kind for part in parts}
    return numpy.concatenate(parts if len(kinds) == 1 or kinds <= {"f", "i"} else [p.astype(object) for p in parts])


def _columns(journal: Path) -> dict[str, Any]:
    table = _Table()
    for record in JournalReader(journal):
        if isinstance(record, ResultRecord):
            table.add(record)
        elif isinstance(record, StartedRecord | ResumedRecord):
            table.begin(record)
    return table.finish()


def list_runs(storage: Path, experiment: str | None = None) -> Iterator[RunResult]:
    """The runs below a storage root, the newest first.

    Args:
        storage: the root.
        experiment: only of this one.
    """
    found = []
    for path in storage.glob(f"{experiment or '*'}/*/run.json"):
        try:
            found.append(RunResult(path.parent))
        except TrainyardError as error:
            logger.warning("%s", error)
    yield from sorted(found, key=lambda run: run.record.created, reverse=True)


def find_run(name: str, storage: Path) -> RunResult:
    """The run that a directory, an id, the beginning of an id, or a name means.

    Args:
        name: any of these.
        storage: where to look for ids and names.

    Raises:
        ConfigError: there is none, or several.
    """
    if not name:
        raise ConfigError("no run was named: give its directory, its id, the beginning of its id, or its name")
    if (Path(name) / "run.json").is_file():
        return RunResult(name)
    runs = list(list_runs(storage))
    found = [run for run in runs if name in (run.id, run.name)] or [run for run in runs if run.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{name!r} means {len(found)} runs: {', '.join(run.path for run in found[:5])}; name one by its directory"
        )
    known = [run.name for run in runs]
    raise ConfigError(f"{unknown('run', name, known[:20], label=f'runs in {storage}')}; list them with: trainyard runs")


def open_run(place: str | os.PathLike[str], storage: str | os.PathLike[str] | None = None) -> RunResult:
    """Open a run to read it.

    Args:
        place: its directory, URL, id, the beginning of its id, or its name.
        storage: where to look for ids and names; default ``TRAINYARD_STORAGE``, else ``./runs``.

    Raises:
        ConfigError: there is no such run, or several.
    """
    text = os.fspath(place)
    if text.startswith("file://"):
        text = str(local_path(text))
    return find_run(text, Path(storage or os.environ.get("TRAINYARD_STORAGE") or "./runs"))


def new_record(
    *, id: str, name: str, experiment: str, trainable: str, config: Mapping[str, Any], **rest: Any
) -> RunRecord:
    """The identity of a run that begins now."""
    return RunRecord(id, name, experiment, trainable, dict(config), time.time(), trainyard=__version__, **rest)
