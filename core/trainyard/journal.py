"""The journal: one append-only file a writing process, and the only thing that training ever waits for.

A file is an 8-byte magic with the version, then frames: little-endian ``u32 length, u32 crc32, msgpack payload``.
One ``write()`` a record, so a record whose call has returned survives a SIGKILL; a background thread fsyncs at most
once a second, and :meth:`JournalWriter.sync` does it now. A frame that is cut or damaged never stops a reader.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainyard.errors import JournalError
from trainyard.files import sync_directory
from trainyard.records import Status
from trainyard.values import decode_extension, encode_extension

__all__ = [
    "ArtifactRecord",
    "CheckpointRecord",
    "EndedRecord",
    "JournalReader",
    "JournalWriter",
    "Record",
    "ResultRecord",
    "ResumedRecord",
    "StartedRecord",
]

logger = logging.getLogger("trainyard")

MAGIC = b"trainyd\x01"
FRAME_LIMIT = 1 << 30
_SYNC_PERIOD_S = 1.0
_SEARCH_LIMIT = 64 << 20  # bytes that a search for the next whole frame may look through

_HEADER = struct.Struct("<II")
_unpack = _HEADER.unpack_from
_pack = _HEADER.pack


class _Base(msgspec.Struct, tag_field="kind", frozen=True, kw_only=True):
    """What every record has: the version of its form, the seq of the newest result, and when it was written."""

    v: int = 1
    seq: int
    time: float


class StartedRecord(_Base, tag="started", frozen=True, kw_only=True):
    """The first record. `context`: the auto-filled keys that are the same in every result, told once."""

    context: dict[str, Any]


class ResultRecord(_Base, tag="result", frozen=True, kw_only=True):
    """One result. Its full metrics are ``{**metrics, **context}``."""

    step: int
    metrics: dict[str, Any]


class ArtifactRecord(_Base, tag="artifact", frozen=True, kw_only=True):
    """A file or directory of the run: below ``artifacts/`` by its name, or at `path` in the run directory."""

    name: str
    size: int
    path: str = ""


class CheckpointRecord(_Base, tag="checkpoint", frozen=True, kw_only=True):
    """A checkpoint that its store has confirmed."""

    index: int
    iteration: int
    url: str
    size: int
    metrics: dict[str, Any]


class ResumedRecord(_Base, tag="resumed", frozen=True, kw_only=True):
    """The run goes on in a new process. Earlier results with ``seq > keep`` are superseded."""

    keep: int
    context: dict[str, Any]


class EndedRecord(_Base, tag="ended", frozen=True, kw_only=True):
    """How the run ended."""

    status: Status
    error: str | None = None


Record = StartedRecord | ResultRecord | ArtifactRecord | CheckpointRecord | ResumedRecord | EndedRecord

_encode = msgspec.msgpack.Encoder(enc_hook=encode_extension).encode
_decode = msgspec.msgpack.Decoder(Record, ext_hook=decode_extension).decode

_writers: weakref.WeakSet[JournalWriter] = weakref.WeakSet()


def _disown_in_child() -> None:
    for writer in _writers:
        writer._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_in_child)


class JournalWriter:
    """Appends records to one file. Safe in threads; a forked child has no part in it.

    When the disk is full, records wait in memory, one warning is logged, and they are written in order as soon as
    there is room.

    Args:
        path: the file; made if it does not exist, its torn tail cut off if it does.

    Raises:
        JournalError: the file cannot be opened, or is no journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._dirty = False
        self._lost: str | None = None
        self._owner = os.getpid()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        except OSError as error:
            raise JournalError(f"cannot open the journal {path}: {error.strerror}") from error
        try:
            self._size = self._mend()
        except BaseException:
            os.close(self._fd)
            raise
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_regularly, name="trainyard-journal", daemon=True)
        self._syncer.start()
        _writers.add(self)

    def append(self, record: Record) -> None:
        """Write one record. When this returns, a kill of the process can no longer lose it.

        Raises:
            JournalError: the writer is closed or belongs to a parent process.
            TypeError, OverflowError, UnicodeEncodeError: the record holds what msgpack cannot; nothing was written.
        """
        payload = _encode(record)
        frame = _pack(len(payload), zlib.crc32(payload)) + payload
        with self._lock:
            self.check_open()
            if self._waiting:
                self._waiting.append(frame)
                return
            try:
                written = os.write(self._fd, frame)
            except OSError as error:
                self._hold(frame, error)
                return
            if written != len(frame):
                self._hold(frame, None)
                return
            self._size += written
            self._dirty = True

    def check_open(self) -> None:
        """Raise JournalError if this process cannot append any more."""
        if self._fd < 0:
            raise JournalError(self._why_closed())

    @property
    def waiting(self) -> int:
        """How many records wait in memory for room on the disk."""
        return len(self._waiting)

    def sync(self) -> None:
        """Make everything durable now.

        Raises:
            JournalError: the disk takes no more, or says that it lost what it had taken.
        """
        with self._lock:
            if self._fd < 0:
                return
            self._retry()
            if self._waiting:
                raise JournalError(f"{len(self._waiting)} records could not be written to {self.path}: no room")
            if self._lost is not None:
                raise JournalError(self._lost)
            fd, self._dirty = os.dup(self._fd), False
        try:  # outside of the lock, so that nobody's append waits for the disk
            os.fsync(fd)
        except OSError as error:
            self._lost = f"the disk failed to keep {self.path}: {error.strerror}"  # it says so only once
            raise JournalError(self._lost) from error
        finally:
            os.close(fd)

    def close(self) -> None:
        """Sync and close.

        Raises:
            JournalError: some records never reached the disk.
        """
        self._closing.set()
        try:
            self.sync()
        finally:
            with self._lock:
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1

    # -- inside ----------------------------------------------------------------------------------------------

    def _mend(self) -> int:
        """Cut what a crash left half-written behind the last whole frame. Returns the size."""
        data_size = os.fstat(self._fd).st_size
        if data_size < len(MAGIC) and MAGIC.startswith(_pread(self._fd, len(MAGIC), 0)):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, MAGIC)
            os.fsync(self._fd)
            sync_directory(self.path.parent)
            return len(MAGIC)
        reader = JournalReader(self.path)
        for _ in reader:
            pass
        if reader.offset < data_size:
            logger.warning(
                "cut %d bytes of a half-written record off the end of %s", data_size - reader.offset, self.path
            )
            os.ftruncate(self._fd, reader.offset)
            os.fsync(self._fd)
        return reader.offset

    def _hold(self, frame: bytes, error: OSError | None) -> None:
        """The write failed or fell short: take back the part that was written, keep the record, tell once."""
        os.ftruncate(self._fd, self._size)
        self._waiting.append(frame)
        why = error.strerror if error else "no room on the disk"
        logger.warning("cannot write to %s: %s; results are kept in memory until that ends", self.path, why)

    def _retry(self) -> None:
        """Write what waits, in order, as far as there is room."""
        done = 0
        for frame in self._waiting:
            try:
                written = os.write(self._fd, frame)
            except OSError:
                break
            if written != len(frame):
                os.ftruncate(self._fd, self._size)
                break
            self._size += written
            done += 1
        if done:
            self._dirty = True
            del self._waiting[:done]
            if not self._waiting:
                logger.warning("%s can be written again: %d records that waited are in it", self.path, done)

    def _sync_regularly(self) -> None:
        while not self._closing.wait(_SYNC_PERIOD_S):
            if self._dirty or self._waiting:
                try:
                    self.sync()
                except JournalError as error:
                    if not self._waiting:  # a full disk was told of when it filled up
                        logger.warning("%s", error)

    def _disown(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._lock = threading.Lock()
        self._waiting = []

    def _why_closed(self) -> str:
        if self._owner != os.getpid():
            return f"this run belongs to process {self._owner}; a forked child cannot log to it: return results to the parent"
        return f"the journal {self.path} is closed: the run has ended"


class JournalReader:
    """Iterates over the whole records of one file from an offset; go on iterating later to follow a live writer.

    A damaged frame in the middle is skipped with a warning; one at the end is left for its writer to finish or mend.
    Kinds of record that this version does not know are skipped.

    Args:
        path: the file; one that does not exist is empty.
        offset: where to start, a frame's boundary as :attr:`offset` gave it.

    Raises:
        JournalError: the file is no journal, or of a version that this trainyard cannot read.
    """

    CHUNK = 1 << 20

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = max(offset, len(MAGIC)) if offset else 0

    def __iter__(self) -> Iterator[Record]:
        try:
            fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            return
        try:
            yield from self._records(fd)
        finally:
            os.close(fd)

    def _records(self, fd: int) -> Iterator[Record]:
        if self.offset == 0:
            magic = _pread(fd, len(MAGIC), 0)
            if magic != MAGIC:
                if MAGIC.startswith(magic):
                    return  # its writer has only just made it
                raise JournalError(_not_a_journal(self.path, magic))
            self.offset = len(MAGIC)
        want = self.CHUNK
        while True:
            start = self.offset
            data = _pread(fd, want, start)
            view, position, size = memoryview(data), 0, len(data)
            while position + 8 <= size:
                length, crc = _unpack(data, position)
                end = position + 8 + length
                if end > size:
                    break
                payload = view[position + 8 : end]
                if zlib.crc32(payload) != crc:
                    break
                position = end
                self.offset = start + end
                try:
                    record = _decode(payload)
                except msgspec.MsgspecError as error:
                    logger.debug("skipped a record of %s that this version does not know: %s", self.path, error)
                    continue
                yield record
            if position:
                want = self.CHUNK
            elif size < want or self._damaged(fd, data, start):
                next_offset = self._next_whole_frame(fd, start)
                if next_offset is None:
                    return
                if next_offset > start:
                    logger.warning("skipped %d damaged bytes at %d in %s", next_offset - start, start, self.path)
                self.offset = next_offset
            else:
                want = 8 + _unpack(data, 0)[0]  # one frame that is larger than a chunk

    @staticmethod
    def _damaged(fd: int, data: bytes, start: int) -> bool:
        """Whether the frame at `start` cannot be a whole one that merely is larger than what was read."""
        length = _unpack(data, 0)[0]
        return bool(length > FRAME_LIMIT or start + 8 + length > os.fstat(fd).st_size or 8 + length <= len(data))

    def _next_whole_frame(self, fd: int, start: int) -> int | None:
        """The offset of the first whole frame from `start` on, or None: what lies there is the unfinished end.

        It may be the very one at `start`: a live writer has finished it since it was read.
        """
        data = _pread(fd, _SEARCH_LIMIT, start)
        size = len(data)
        view = memoryview(data)
        for position in range(size - 8):
            length, crc = _unpack(data, position)
            end = position + 8 + length
            # a payload is a msgpack map: cheap to tell, and it spares nearly every checksum
            if (
                length > 0
                and end <= size
                and data[position + 8] & 0xF0 == 0x80
                and zlib.crc32(view[position + 8 : end]) == crc
            ):
                return start + position
        return None


def _pread(fd: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, size, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, size)


def _not_a_journal(path: Path, magic: bytes) -> str:
    if magic[:7] == MAGIC[:7]:
        return f"{path} is a journal of version {magic[7]}, newer than this trainyard reads (1): upgrade trainyard"
    return f"{path} is not a journal"
