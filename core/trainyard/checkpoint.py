"""A checkpoint: a directory that exists from the moment its manifest does, verified whenever it is read.

The user's files lie in it as they were, a dict state as :mod:`trainyard.state` writes it, and ``manifest.json``, which
is written last, names every file with its size and hash, and holds the counters and metrics of the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from trainyard.errors import CheckpointCorrupt, CheckpointError
from trainyard.files import HashingWriter, hash_bytes, hash_file, sync_directory, sync_file, write_atomic
from trainyard.results import Counters
from trainyard.state import DATA_NAME, TREE_NAME, load_state, save_state
from trainyard.values import flatten, strict_metrics, with_nonfinite
from trainyard.version import __version__

__all__ = ["MANIFEST_NAME", "Checkpoint", "FileEntry", "Manifest", "Staging", "local_path"]

MANIFEST_NAME = "manifest.json"
METADATA_NAME = ".metadata.json"  # the user's notes: changed after the commit, so no part of what is verified
STAGING_PREFIX = ".staging-"
FORMAT = "trainyard-checkpoint"
VERSION = 1
_WORKERS = 8  # files hashed and fsynced at a time: their waits for the disk overlap


class FileEntry(msgspec.Struct, omit_defaults=True):
    """One file of a checkpoint: its path with forward slashes, its size in bytes, its hash."""

    path: str
    size: int
    hash: str


class Writer(msgspec.Struct):
    """Who wrote a checkpoint."""

    host: str
    pid: int
    python: str
    trainyard: str


class Manifest(msgspec.Struct, rename={"self_hash": "self"}):
    """``manifest.json``.

    Attributes:
        format, version: ``trainyard-checkpoint`` and 1.
        run_id: the run that wrote it; None for one saved outside of any run.
        index: the save index.
        token: random; by it a writer knows its own commit again.
        iteration: ``training_iteration`` when it was saved.
        counters: all counters of the run.
        metrics: the last result before it; NaN and infinities as strings.
        created: seconds since the epoch.
        journal_seq: the ``seq`` of that result: what comes after it is superseded by a resume from here.
        files: every file but this one.
        pickled: the leaves of the state that need pickle.
        writer: host, pid and versions.
        nonfinite: the metrics, by path, that are one of the strings which stand for NaN and the infinities.
        pickled_by: the run whose code the pickled leaves hold: it opens them without being allowed to.
        restore_path: the file in it that an old-style ``_save`` returned, for its ``_restore``; else empty.
        self_hash: in the file named ``self``: the hash of all the rest.
    """

    run_id: str | None
    index: int
    token: str
    iteration: int
    counters: Counters
    metrics: dict[str, Any]
    created: float
    journal_seq: int
    files: list[FileEntry]
    pickled: list[str]
    writer: Writer
    format: str = FORMAT
    version: int = VERSION
    self_hash: str = ""
    nonfinite: list[str] = []
    pickled_by: str | None = None
    restore_path: str = ""

    def encode(self) -> bytes:
        """The content of ``manifest.json``, its own hash included."""
        metrics, self.nonfinite = strict_metrics(self.metrics)
        rest = {**msgspec.to_builtins(msgspec.structs.replace(self, metrics={})), "metrics": metrics, "self": ""}
        self.self_hash = hash_bytes(_sorted_json(rest))
        return msgspec.json.format(msgspec.json.encode({**rest, "self": self.self_hash})) + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Read a manifest and check it against its own hash.

        Raises:
            CheckpointCorrupt: damaged, or no manifest at all.
            CheckpointError: written by a newer trainyard.
        """
        try:
            raw = msgspec.json.decode(data)
            if not isinstance(raw, dict) or raw.get("format") != FORMAT:
                raise CheckpointCorrupt(f"{where} is not the manifest of a trainyard checkpoint")
            if not isinstance(raw.get("version"), int) or raw["version"] > VERSION:
                raise CheckpointError(
                    f"{where} has the checkpoint format {raw.get('version')!r}, this trainyard reads {VERSION}: upgrade trainyard"
                )
            said = raw.get("self")
            if hash_bytes(_sorted_json({**raw, "self": ""})) != said:
                raise CheckpointCorrupt(f"{where} does not match its own hash")
            manifest = msgspec.convert(raw, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointCorrupt(f"{where} is damaged: {error}") from error
        for path in [entry.path for entry in manifest.files] + [manifest.restore_path] * bool(manifest.restore_path):
            refuse_escape(path, where)
        manifest.metrics = with_nonfinite(manifest.metrics, set(manifest.nonfinite))
        return manifest


_sorted_json = msgspec.json.Encoder(order="sorted").encode


def refuse_escape(path: str, where: str) -> None:
    """Raise CheckpointCorrupt for a file name that leads out of the checkpoint's directory."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or not pure.parts or Path(path).drive:
        raise CheckpointCorrupt(f"{where} names the file {path!r}, which is not inside of the checkpoint")


class Checkpoint:
    """A checkpoint that lies somewhere. Equal to another when both name the same place.

    Args:
        path: its directory, or a ``file://`` URL.

    Attributes:
        path: its directory.
        trusted: :meth:`load` opens pickled leaves; set where the very run that pickled them goes on from it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: str = str(local_path(path))
        self._manifest: Manifest | None = None
        self.trusted = False

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """A checkpoint of the files in a directory, to hand to ``report``; it need not be committed.

        Raises:
            CheckpointError: there is no such directory.
        """
        if not os.path.isdir(path):
            raise CheckpointError(f"{os.fspath(path)} is no directory")
        return cls(path)

    @property
    def url(self) -> str:
        """The place as a URL."""
        return Path(self.path).as_uri()

    @property
    def committed(self) -> bool:
        """Whether the store has confirmed it: its manifest is there."""
        return os.path.isfile(os.path.join(self.path, MANIFEST_NAME))

    def wait(self) -> None:
        """Return once it is committed. In a local store, it is from the start."""

    @property
    def manifest(self) -> Manifest:
        """What the manifest says.

        Raises:
            CheckpointError: there is none, or it is damaged, or from a newer trainyard.
        """
        if self._manifest is None:
            where = Path(self.path) / MANIFEST_NAME
            try:
                data = where.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                raise CheckpointError(_why_no_manifest(Path(self.path))) from None
            except OSError as error:
                raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
            self._manifest = Manifest.decode(data, str(where))
        return self._manifest

    @property
    def metrics(self) -> dict[str, Any]:
        """The last result before it was saved; empty if none was, or if it is not committed."""
        return self.manifest.metrics if self.committed else {}

    @property
    def iteration(self) -> int:
        """``training_iteration`` when it was saved; 0 if it is not committed."""
        return self.manifest.iteration if self.committed else 0

    @property
    def index(self) -> int:
        """The save index, from 0."""
        return self.manifest.index

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size for entry in self.manifest.files)

    def verify(self) -> None:
        """Read every file once and compare it with the manifest.

        Raises:
            CheckpointCorrupt: a file is missing, cut or changed; the message names it.
        """
        entries = self.manifest.files
        with ThreadPoolExecutor(1 if len(entries) < 4 else _WORKERS) as pool:
            for error in pool.map(self._check, entries):
                if error:
                    raise CheckpointCorrupt(error)

    def _check(self, entry: FileEntry) -> str | None:
        path = Path(self.path) / entry.path
        try:
            if os.path.realpath(path) != os.path.join(os.path.realpath(self.path), *entry.path.split("/")):
                return f"{path} is a link, or below one"
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return f"{path} is not a plain file"
            size = os.path.getsize(path)
            if size != entry.size:
                return f"{path} has {size:,} bytes, its manifest says {entry.size:,}"
            digest = hash_file(path)[1]
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return None if digest == entry.hash else f"{path} is damaged: its hash is not the one in the manifest"

    @property
    def holds_state(self) -> bool:
        """Whether it holds a dict state, rather than only files."""
        if self.committed:  # a state that merely lies beside the files was never verified
            return any(entry.path == TREE_NAME for entry in self.manifest.files)
        return os.path.isfile(os.path.join(self.path, TREE_NAME))

    def load(self, *, only: Collection[str] | None = None, allow_pickle: bool = False) -> Any:
        """Verify, and load the dict state. Arrays are mapped into memory, private and writable.

        Args:
            only: the leaves or branches to load, such as ``["model", "optimizer/step"]``.
            allow_pickle: run the code in pickled leaves. Only for checkpoints that you trust.

        Raises:
            CheckpointCorrupt: damaged.
            PickleRefused: it holds pickled leaves.
            CheckpointError: it holds no dict state, or not what `only` names.
        """
        self.verify()
        if not self.holds_state:
            raise CheckpointError(f"{self.path} holds files, no dict state: open them with as_directory()")
        return load_state(Path(self.path), only=only, allow_pickle=allow_pickle or self.trusted)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """The verified files, as a directory to read from; a local checkpoint's own one."""
        if self.committed:
            self.verify()
        yield self.path

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy it, verified, into a directory.

        Args:
            path: an empty or new directory; None makes a temporary one.

        Returns:
            The directory.
        """
        if path is None:
            import tempfile

            path = tempfile.mkdtemp(prefix="checkpoint_")
        with self.as_directory() as source:
            names = _files_below(Path(source))
            if self.committed:
                known = {entry.path for entry in self.manifest.files} | {MANIFEST_NAME, METADATA_NAME}
                names = [name for name in names if name in known]
            for name in sorted(names, key=lambda name: name == MANIFEST_NAME):  # the manifest last, as in a commit
                target = Path(path, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(source, name), target)
        return os.fspath(path)

    def get_metadata(self) -> dict[str, Any]:
        """The user's notes on this checkpoint; ``{}`` if there are none."""
        try:
            data = msgspec.json.decode(Path(self.path, METADATA_NAME).read_bytes())
        except FileNotFoundError:
            return {}
        return dict(data)

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Replace the notes. What JSON cannot hold is a TypeError."""
        write_atomic(Path(self.path, METADATA_NAME), msgspec.json.encode(metadata))

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Add to the notes."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and os.path.realpath(self.path) == os.path.realpath(other.path)

    def __hash__(self) -> int:
        return hash(os.path.realpath(self.path))

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"


def local_path(place: str | os.PathLike[str]) -> Path:
    """The directory that a path or a ``file://`` URL names.

    Raises:
        CheckpointError: a URL of another scheme.
    """
    text = os.fspath(place)
    if text.startswith("file://"):
        from urllib.parse import unquote, urlsplit

        return Path(unquote(urlsplit(text).path))
    if "://" in text:
        raise CheckpointError(f"{text}: only checkpoints on this machine's disks can be opened here")
    return Path(os.path.abspath(text))


def _why_no_manifest(path: Path) -> str:
    if not path.exists():
        return f"there is no checkpoint at {path}"
    if not path.is_dir():
        return f"{path} is a file; a checkpoint is a directory"
    return f"{path} is not a checkpoint: it has no {MANIFEST_NAME} (a save that was interrupted leaves none)"


class Staging:
    """A directory in which a checkpoint is put together, beside the place where it will be.

    As a context manager, it is deleted at the end unless :meth:`commit` was called.

    Args:
        parent: where the checkpoint will be; the same filesystem, so that the commit is one rename.
    """

    def __init__(self, parent: Path) -> None:
        self.token = secrets.token_hex(8)
        self.path = parent / f"{STAGING_PREFIX}{self.token}"
        self._known: dict[str, FileEntry] = {}
        self._pickled: list[str] = []
        self._pickled_by: str | None = None
        self.restore_path = ""

    def __enter__(self) -> Staging:
        try:
            self.path.mkdir(parents=True)
            sync_directory(self.path.parent.parent)
        except OSError as error:
            raise CheckpointError(f"cannot write a checkpoint into {self.path.parent}: {error.strerror}") from error
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add_state(self, state: dict[Any, Any]) -> None:
        """Write a dict state.

        Raises:
            CheckpointError: it cannot be saved.
        """
        with _saving(self.path.parent):
            saved = save_state(self.path, state)
        self._known.update({name: FileEntry(name, size, digest) for name, size, digest in saved.files})
        self._pickled = saved.pickled

    def add_files(self, source: Path) -> None:
        """Copy a directory's files; those of another checkpoint without its manifest.

        Raises:
            CheckpointError: a link or a special file among them.
        """
        if (source / MANIFEST_NAME).is_file():
            known = Checkpoint(source).manifest
            self._pickled, self._pickled_by, self.restore_path = known.pickled, known.pickled_by, known.restore_path
            expected = {entry.path: entry.hash for entry in known.files}
        else:
            expected = {}
        for relative in _files_below(source):
            if relative == MANIFEST_NAME:
                continue
            if relative == METADATA_NAME:
                shutil.copyfile(source / relative, self.path / relative)
                continue
            if relative in (TREE_NAME, DATA_NAME) and relative not in expected:
                raise CheckpointError(f"{source / relative} has a name that a checkpoint takes for its dict state")
            with _saving(self.path.parent):
                target = self.path / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                writer = HashingWriter(target)
                try:
                    with open(source / relative, "rb", buffering=0) as file:
                        while chunk := file.read(4 << 20):
                            writer.write(chunk)
                    digest = writer.close()
                finally:
                    writer.abort()
            if expected.get(relative, digest) != digest:
                raise CheckpointCorrupt(f"{source / relative} is damaged: its hash is not the one in the manifest")
            self._known[relative] = FileEntry(relative, writer.size, digest)

    def commit(
        self,
        target: Path,
        *,
        run_id: str | None,
        index: int,
        counters: Counters,
        metrics: dict[str, Any],
        journal_seq: int,
    ) -> Checkpoint:
        """Make every file durable, write the manifest, and give the directory its name: the commit.

        Args:
            target: the final directory; one that is there must be empty or a checkpoint, which is replaced.
            run_id, index, counters, metrics, journal_seq: for the manifest.

        Raises:
            CheckpointError: links among the files, or `target` is taken by something else.
        """
        names = [name for name in _files_below(self.path) if name != METADATA_NAME]
        for name in {TREE_NAME, DATA_NAME}.intersection(names) - self._known.keys():
            raise CheckpointError(f"a file of the checkpoint is named {name}, which it takes for its dict state")
        if MANIFEST_NAME in names:
            raise CheckpointError(f"a file of the checkpoint is named {MANIFEST_NAME}, the name of its manifest")
        with _saving(target.parent):
            with ThreadPoolExecutor(1 if len(names) < 4 else _WORKERS) as pool:
                files = list(pool.map(self._seal, names))
            for folder in sorted(
                {above for name in names for above in (self.path / name).parents if self.path in above.parents}
            ):
                sync_directory(folder)
            manifest = Manifest(
                run_id=run_id,
                index=index,
                token=self.token,
                iteration=counters.iteration,
                counters=counters,
                metrics=metrics,
                created=time.time(),
                journal_seq=journal_seq,
                files=files,
                pickled=self._pickled,
                pickled_by=(self._pickled_by or run_id) if self._pickled else None,
                restore_path=self.restore_path,
                writer=Writer(platform.node(), os.getpid(), platform.python_version(), __version__),
            )
            write_atomic(self.path / MANIFEST_NAME, manifest.encode())
            _publish(self.path, target)
            checkpoint = Checkpoint(target)
            checkpoint._manifest = manifest
            return checkpoint

    def _seal(self, name: str) -> FileEntry:
        if name in self._known:  # hashed and fsynced while it was written
            return self._known[name]
        path = self.path / name
        size, digest = hash_file(path)
        sync_file(path)
        return FileEntry(name, size, digest)


@contextlib.contextmanager
def _saving(place: Path) -> Iterator[None]:
    """The operating system's errors while we write, as what they mean for a checkpoint."""
    try:
        yield
    except FileExistsError as error:
        raise CheckpointError(f"{error.filename} is a name that a checkpoint takes for itself") from error
    except OSError as error:
        raise CheckpointError(f"cannot save a checkpoint below {place}: {error.strerror or error}") from error


def _files_below(directory: Path) -> list[str]:
    """The plain files below a directory, sorted, with forward slashes.

    Raises:
        CheckpointError: a link, a device or a socket is among them.
    """
    out = []

    def fail(error: OSError) -> None:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error

    for root, folders, names in os.walk(directory, onerror=fail):
        for name in folders + names:
            path = Path(root, name)
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                kind = "a link" if stat.S_ISLNK(mode) else "not a plain file"
                raise CheckpointError(f"{path} is {kind}: a checkpoint holds plain files only")
            out.append(_checked_name(path.relative_to(directory)))
    return sorted(out)


def _checked_name(relative: Path) -> str:
    """A file's name as it stands in a manifest, if it can stand there."""
    name = relative.as_posix()
    try:
        name.encode()
        refuse_escape(name, "a checkpoint")
    except (UnicodeEncodeError, CheckpointCorrupt):
        raise CheckpointError(
            f"a checkpoint cannot hold a file named {name!r}: use UTF-8 without a backslash"
        ) from None
    return name


def _publish(staged: Path, target: Path) -> None:
    """Rename a staged directory to its final name; one that is in the way moves aside first."""
    aside = None
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: a checkpoint is a directory")
    if target.exists() and any(target.iterdir()):
        if not (target / MANIFEST_NAME).is_file():
            raise CheckpointError(f"{target} holds other files: save into a new or empty directory")
        aside = staged.with_name(f"{STAGING_PREFIX}old-{secrets.token_hex(4)}")
        os.rename(target, aside)
    try:
        if os.name == "nt" and target.exists():
            target.rmdir()
        os.rename(staged, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    sync_directory(target.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def score(metrics: dict[str, Any], metric: str | None, mode: str) -> tuple[bool, float]:
    """How good a checkpoint is, more is better; one without a usable number ranks worst in both modes.

    Args:
        metrics: as reported; nested names are joined with ``/``.
        metric: the name, or None: all are equal.
        mode: ``max`` or ``min``.
    """
    if metric is None:
        return True, 0.0
    value = metrics.get(metric)
    if value is None:
        value = dict(flatten(metrics)).get(metric)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return False, 0.0
    return True, float(value) if mode == "max" else -float(value)
