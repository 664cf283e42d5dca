"""A file that only ever grows by whole lines, for trackers that write into the run directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

_BINARY = getattr(os, "O_BINARY", 0)


class AppendedFile:
    """An open file that was cut back to what is confirmed, and takes whole pieces or nothing.

    Args:
        path: the file; made if it is not there.
        size: its confirmed bytes; what lies beyond them was never confirmed and is cut off.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)
        self.size = min(size, os.fstat(self._fd).st_size)
        os.ftruncate(self._fd, self.size)
        os.lseek(self._fd, self.size, os.SEEK_SET)

    def append(self, data: bytes) -> None:
        """Write at the end, in one system call; nothing of it stays if that fails.

        Raises:
            OSError: it did not fit.
        """
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(data)

    def sync(self) -> None:
        """Make it durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def rewritten(path: Path, pieces: Iterable[bytes]) -> AppendedFile:
    """Replace a file durably by these pieces, and open it behind them; a reader sees the old file or the new one."""
    staged = path.with_name(f".{path.name}.tmp")
    with open(staged, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    os.replace(staged, path)
    return AppendedFile(path, size)
