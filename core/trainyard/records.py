"""The frozen vocabulary: what hooks are handed and what the journal holds.

Records only ever gain fields, and only with defaults, so that a plugin written today reads tomorrow's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["Artifact", "CheckpointInfo", "MediaFile", "Outcome", "Result", "RunInfo", "Status"]

Status = Literal["running", "completed", "failed", "interrupted", "preempted", "killed"]
"""How a run stands. `completed`: a stop condition, `done`, or the function returned; `failed`: an exception;
`interrupted`: Ctrl-C; `preempted`: SIGTERM; `killed`: found dead, without an end in its journal."""


class RunInfo(msgspec.Struct, frozen=True):
    """Which run this is.

    Attributes:
        id: unique, ten hexadecimal digits.
        name: the name of its directory.
        experiment: the named set of runs that it belongs to.
        path: its directory on this machine.
        config: the user's config, secrets redacted and ``${env:NAME}`` unresolved.
        tags: free words of the user.
    """

    id: str
    name: str
    experiment: str
    path: str
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    tags: dict[str, str] = msgspec.field(default_factory=dict)


class Result(msgspec.Struct, frozen=True):
    """One dict of metrics, numbered and timed. ``result["loss"]`` is short for ``result.metrics["loss"]``.

    Attributes:
        seq: from 1, without gaps, per run; with the run's id it identifies the result for ever.
        time: seconds since the epoch when it was logged.
        step: the step that was given, else ``training_iteration``, else ``seq``.
        metrics: the dict, nested as it was reported, with its auto-filled keys.
    """

    seq: int
    time: float
    step: int
    metrics: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.metrics[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.metrics[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self.metrics

    def get(self, key: str, default: Any = None) -> Any:
        """The metric of that name, or ``default``."""
        return self.metrics.get(key, default)


class Artifact(msgspec.Struct, frozen=True):
    """A file or directory kept with the run.

    Attributes:
        name: its path below ``artifacts/``, with forward slashes.
        path: where it lies on this machine.
        size: bytes, all files together.
        time: seconds since the epoch when it was logged.
    """

    name: str
    path: str
    size: int
    time: float


class MediaFile:
    """A media value of a result, as trackers get it: a reference to the file that it was stored as.

    Its ``str()`` is the path. It is no msgspec Struct, because those are written as plain maps: read back, nobody could
    tell one from a dict of the user's.

    Attributes:
        kind: ``image``, ``text``, ``table``, ``histogram``, ``audio`` or ``video``.
        path: the file, relative to the run directory, with forward slashes.
        size: bytes.
        caption: the user's words, or "".
        details: what a tracker needs besides: ``width`` and ``height`` in pixels of an image, ``rate`` in Hz of audio,
            ``fps`` of a video; None where it is not known.
    """

    __slots__ = ("caption", "details", "kind", "path", "size")

    kind: Literal["image", "text", "table", "histogram", "audio", "video"]
    path: str
    size: int
    caption: str
    details: dict[str, Any]

    def __init__(
        self,
        kind: Literal["image", "text", "table", "histogram", "audio", "video"],
        path: str,
        size: int,
        caption: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        for name, value in zip(_MEDIA_FIELDS, (kind, path, size, caption, details or {}), strict=True):
            object.__setattr__(self, name, value)

    def asdict(self) -> dict[str, Any]:
        """Its fields."""
        return {name: getattr(self, name) for name in _MEDIA_FIELDS}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a MediaFile does not change: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a MediaFile does not change: {name}")

    def __eq__(self, other: object) -> bool:
        return self.asdict() == other.asdict() if isinstance(other, MediaFile) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.kind, self.path, self.size, self.caption))

    def __reduce__(self) -> tuple[type[MediaFile], tuple[Any, ...]]:
        return MediaFile, tuple(self.asdict().values())

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"MediaFile({', '.join(f'{name}={value!r}' for name, value in self.asdict().items())})"


_MEDIA_FIELDS = ("kind", "path", "size", "caption", "details")


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A checkpoint that its store has confirmed.

    Attributes:
        index: the save index, from 0.
        iteration: ``training_iteration`` when it was saved.
        url: where it lies.
        metrics: the last result before it.
        size: bytes, all files together.
    """

    index: int
    iteration: int
    url: str
    metrics: dict[str, Any]
    size: int


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended.

    Attributes:
        status: one of :data:`Status`, never ``running``.
        error: the last line of the traceback, or None.
        time: seconds since the epoch.
    """

    status: Status
    error: str | None
    time: float
