"""A lock between processes that the kernel frees when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import time
import weakref
from pathlib import Path

__all__ = ["FileLock"]

logger = logging.getLogger("trainyard")

_TEXT_SIZE = 127

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # a forked data loader that outlives its trainer must not keep the trainer's lock
    for lock in _held:
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


class FileLock:
    """An exclusive lock on a file, which says who holds it.

    Args:
        path: the lock file; it stays behind, empty of meaning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self, patience: float = 0.1, role: str = "") -> bool:
        """Take the lock.

        Args:
            patience: seconds to try for: somebody may only be asking whether it is free.
            role: a word on what for, which :meth:`taken` tells.

        Returns:
            Whether we have it.
        """
        deadline = time.monotonic() + patience
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if _try_lock(fd) is not False:
                try:
                    if os.name == "nt" or os.path.samestat(os.fstat(fd), os.stat(self.path)):
                        break
                except FileNotFoundError:
                    pass  # its last holder has just tidied it away
            os.close(fd)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        try:
            # one write over what stood there: nobody ever reads nothing
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, f"{platform.node()} {os.getpid()} {role}".encode().ljust(_TEXT_SIZE) + b"\n")
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)
        return True

    def release(self) -> None:
        """Give it back; nothing happens if we do not have it."""
        self._close()
        _held.discard(self)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def free(self) -> bool:
        """Whether it is certain that nobody holds it at this moment."""
        return self.held is False

    @property
    def held(self) -> bool | None:
        """Whether somebody holds it at this moment; None where that cannot be told."""
        try:
            fd = os.open(self.path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        try:
            ours = _try_lock(fd, shared=True)  # so that two who ask do not take each other for the holder
            if ours:
                _unlock(fd)  # closing is not enough: a child that is forked in this moment has it open as well
            return None if ours is None else not ours
        finally:
            os.close(fd)

    def taken(self) -> tuple[str, int]:
        """Who took it last, as ``HOST PID ROLE``, and when, in nanoseconds: another answer means that it was taken anew."""
        try:
            return self.path.read_text().strip(), self.path.stat().st_mtime_ns
        except OSError:
            return "", 0

    def holder(self) -> str:
        """Who took it last: ``host HOST, pid PID``."""
        try:
            host, pid, *_ = self.path.read_text().split()
        except (OSError, ValueError):
            return "an unknown process"
        return f"host {host}, pid {pid}"


def _unlock(fd: int) -> None:
    if os.name != "nt":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def _try_lock(fd: int, shared: bool = False) -> bool | None:
    """Whether we have it now; None: this filesystem has no locks."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(fd, 1 << 30, os.SEEK_SET)  # far behind the text, which others may read
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
            os.lseek(fd, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        logger.warning(
            "this filesystem has no locks (%s): keep other processes away from what this one writes", error.strerror
        )
        return None
    return True
