"""The ``file`` store: a directory on this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from trainyard import ConfigError, Denied, Entry, Exists, Full, LocalStore, NotFound, StoreError, Transient, hookimpl

_STAGED = ".staged-"


class FileStorePlugin:
    """Opens ``file://`` URLs and plain paths. It has no options."""

    @hookimpl
    def open_store(self, url: str, options: dict[str, Any]) -> LocalStore:
        """Called with the `storage` of a run that is a path or begins with ``file://``."""
        if options:
            raise ConfigError(f"the file store has no options, but was given {', '.join(sorted(options))}")
        return FileStore(unquote(urlsplit(url).path) if url.startswith("file://") else url)


class FileStore:
    """Keys are files below a root directory. A put is staged beside its target, fsynced and linked or renamed."""

    atomic_create = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))

    def path(self, key: str) -> Path:
        """The file or directory of a key.

        Raises:
            StoreError: a key that leads out of the root.
        """
        parts = key.split("/")
        if (
            not key
            or key.startswith("/")
            or "\\" in key
            or "\0" in key
            or any(part in ("", ".", "..") for part in parts)
        ):
            raise StoreError(f"{key!r} is no key: a key is a relative path with forward slashes")
        return self.root.joinpath(*parts)

    def put(self, key: str, source: bytes | Path, *, create: bool = False) -> None:
        """See :class:`trainyard.Store`."""
        target = self.path(key)
        staged = target.with_name(f"{_STAGED}{secrets.token_hex(8)}")
        with _translated(key):
            new_folders = [folder for folder in target.parents if not folder.exists()]
            try:
                with _created(staged) as file:
                    if isinstance(source, bytes):
                        file.write(source)
                    else:
                        with open(source, "rb") as original:
                            shutil.copyfileobj(original, file, 4 << 20)
                    file.flush()
                    os.fsync(file.fileno())
                if create:
                    os.link(staged, target)  # unlike rename, fails where the name is taken
                else:
                    os.replace(staged, target)
            finally:
                staged.unlink(missing_ok=True)
            for folder in [target.parent, *(folder.parent for folder in new_folders)]:
                _sync(folder)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See :class:`trainyard.Store`."""
        with _translated(key), open(self.path(key), "rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def list(self, prefix: str, after: str = "") -> Iterator[Entry]:
        """See :class:`trainyard.Store`."""
        found = []
        # only the part of the tree that can hold such keys
        below = self.root.joinpath(*[part for part in prefix.split("/")[:-1] if part not in ("", "..")])
        for folder, _, names in os.walk(below):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.root).as_posix()
                if key.startswith(prefix) and key > after and not name.startswith(_STAGED):
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        found.append(Entry(key, status.st_size, status.st_mtime))
        yield from sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`trainyard.Store`."""
        for key in keys:
            path = self.path(key)
            with contextlib.suppress(NotFound), _translated(key):
                path.unlink()
                for folder in path.parents:  # an empty directory would stand in the way of a key of its name
                    if folder == self.root or not _removed(folder):
                        break

    def __repr__(self) -> str:
        return f"FileStore({str(self.root)!r})"


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    """The operating system's errors in the words that every store uses."""
    try:
        yield
    except StoreError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFound(f"no object {key!r}: {error.strerror}") from error
    except FileExistsError as error:
        raise Exists(f"the object {key!r} exists") from error
    except PermissionError as error:
        raise Denied(f"{key!r}: {error.strerror} ({error.filename})") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Full(f"{key!r}: {error.strerror}") from error
        if error.errno in (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT):
            raise Transient(f"{key!r}: {error.strerror}") from error
        raise StoreError(f"{key!r}: {error.strerror}") from error


def _removed(folder: Path) -> bool:
    """Remove a directory if it is empty. Returns whether it was."""
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _created(path: Path) -> BinaryIO:
    """A new file, and the directories above it, which a delete may take away meanwhile."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return open(path, "xb")
        except FileNotFoundError:
            continue


def _sync(folder: Path) -> None:
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
