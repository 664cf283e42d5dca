"""Files written so that a power cut or a kill leaves the old one or the new one, with their hash on the way.

The hash is xxh3-128 (`xxhash`): faster than the disk, and made against damage, not against forgery.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["HashingWriter", "hash_bytes", "hash_file", "sync_directory", "sync_file", "write_atomic"]

HASH_PREFIX = "xxh3-128:"
CHUNK = 4 << 20
_READ_CHUNK = 1 << 20  # stays in the processor's cache between the read and the hash
_BINARY = getattr(os, "O_BINARY", 0)


def hash_bytes(data: bytes) -> str:
    """The hash of bytes in memory, as it stands in a manifest."""
    return HASH_PREFIX + xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> tuple[int, str]:
    """Read a file once, from the disk if need be at the disk's speed.

    Returns:
        Its size in bytes and its hash.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_CHUNK))
    size = 0
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return size, HASH_PREFIX + digest.hexdigest()


class HashingWriter:
    """Writes a new file piece by piece, hashes it in a second thread, and fsyncs it at the end.

    Both threads read the caller's memory as it lies there, so a piece must not change before :meth:`close`.
    Writing to the disk starts early, so that the final fsync finds little left to do.
    """

    _FLUSH_EVERY = 64 << 20

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o644)
        self._digest = xxhash.xxh3_128()
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(maxsize=16)
        self._hasher: threading.Thread | None = None
        self._flusher: threading.Thread | None = None
        self._flushed = 0
        self._flush_error: OSError | None = None

    def write(self, data: Any) -> None:
        """Append one piece.

        Args:
            data: contiguous bytes: anything with the buffer protocol.
        """
        view = memoryview(data).cast("B")
        if len(view) < CHUNK and self._hasher is None:
            self._digest.update(view)
            self._write(view)
            return
        if self._hasher is None:
            self._hasher = threading.Thread(target=self._hash_pieces, daemon=True)
            self._hasher.start()
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            self._pieces.put(piece)
            self._write(piece)

    def close(self) -> str:
        """Make the file durable and close it. Returns its hash."""
        try:
            if self._flusher is not None:
                self._flusher.join()
            if self._flush_error is not None:  # the disk tells of it only once
                raise self._flush_error
            os.fsync(self._fd)
        finally:
            self.abort()
        return HASH_PREFIX + self._digest.hexdigest()

    def abort(self) -> None:
        """Close without making it durable."""
        if self._flusher is not None:
            self._flusher.join()
        if self._hasher is not None:
            self._pieces.put(None)
            self._hasher.join()
            self._hasher = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, view: memoryview) -> None:
        while view:
            count = os.write(self._fd, view)
            self.size += count
            view = view[count:]
        if self.size - self._flushed >= self._FLUSH_EVERY and (self._flusher is None or not self._flusher.is_alive()):
            self._flushed = self.size
            self._flusher = threading.Thread(target=self._flush, daemon=True)
            self._flusher.start()

    def _flush(self) -> None:
        try:
            getattr(os, "fdatasync", os.fsync)(self._fd)
        except OSError as error:
            self._flush_error = error

    def _hash_pieces(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)


def sync_file(path: Path) -> None:
    """fsync a file that somebody else wrote."""
    fd = os.open(path, os.O_RDONLY | _BINARY if os.name != "nt" else os.O_RDWR | _BINARY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names in it survive a power cut; a no-op where the system has no such thing."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Write or replace a small file: readers see the old content or the new, never a part. One writer at a time.

    Args:
        path: its directory exists.
        data: the whole content, or its pieces.
        durable: fsync file and directory; without it a power cut may bring the old content back.
    """
    staged = path.with_name(f".{path.name}.tmp")
    try:
        with open(staged, "wb") as file:
            for piece in [data] if isinstance(data, bytes) else data:
                file.write(piece)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)
