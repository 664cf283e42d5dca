"""Copies of what a run prints: streams that write to the terminal and to a file."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Tee", "capture"]


class Tee(io.TextIOBase):
    """A text stream that writes to two: a terminal and a file. Everything that can be asked of a stream is answered
    by the first, so that ``isatty``, ``fileno`` and ``buffer`` are the terminal's own.

    Args:
        stream: the first, and the one that answers.
        copy: the second; once it is closed it is left alone.
    """

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        """Write to both. Returns the number of characters."""
        with contextlib.suppress(ValueError, OSError):  # closed, or the disk is full: no reason to stop a print
            self._copy.write(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        """Write several strings to both."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush both."""
        with contextlib.suppress(ValueError, OSError):
            self._copy.flush()
        with contextlib.suppress(ValueError):
            self._stream.flush()

    def close(self) -> None:
        """Flush; the streams belong to others."""
        self.flush()

    @property
    def closed(self) -> bool:
        """Whether the first is closed."""
        return self._stream.closed

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The first's."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """The first's."""
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        """The first's; bytes that are written to it are in no copy."""
        return self._stream.buffer

    def fileno(self) -> int:
        """The first's."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the first is a terminal."""
        return self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def writable(self) -> bool:
        """True."""
        return True


@contextlib.contextmanager
def capture(stdout: Path | None, stderr: Path | None) -> Iterator[None]:
    """Copy ``sys.stdout`` and ``sys.stderr`` into files, to which is appended; both may be one file.

    The redirection is the process', as the streams are. What subprocesses or C code print is not captured.

    Args:
        stdout, stderr: the files; None leaves that stream alone.
    """
    files: dict[Path, TextIO] = {}
    tees: dict[str, Tee] = {}
    for name, path in (("stdout", stdout), ("stderr", stderr)):
        if path is not None:
            if path not in files:
                path.parent.mkdir(parents=True, exist_ok=True)
                files[path] = open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
            before: TextIO = getattr(sys, name)
            tee = Tee(before, files[path])
            tees[name] = tee
            setattr(sys, name, tee)
    try:
        yield
    finally:
        for name, tee in tees.items():
            top: Any = getattr(sys, name)
            if top is tee:
                setattr(sys, name, tee._stream)
            while isinstance(top, Tee):  # somebody redirected on top of us: leave the chain
                if top._stream is tee:  # type: ignore[comparison-overlap]
                    top._stream = tee._stream
                top = top._stream
        for file in files.values():
            with contextlib.suppress(OSError):
                file.close()
