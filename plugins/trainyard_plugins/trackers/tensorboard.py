"""The ``tensorboard`` tracker: an event file in the run's directory; ``tensorboard --logdir runs`` shows every run.

tensorboardX gives the messages; the file is ours. Its ``SummaryWriter`` keeps events in a queue
that a kill loses and a full disk blocks for ever, so it could confirm nothing.

The same results always become the same bytes. So after a crash the file is cut back to what is confirmed and grows
as it had grown before: a TensorBoard that looks on, and has read beyond the cut, never notices. After a resume the
history is another one, so it goes into a new file with a later name, and the old file is emptied and then removed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import json
import logging
import math
import os
import platform
import re
import struct
import time
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard import MediaFile, Outcome, PluginConfigError, Rejected, Result, RunInfo, flatten, hookimpl, strict_json
from trainyard_plugins.trackers._appended import AppendedFile
from trainyard_plugins.trackers._results import NOT_METRICS, media_apart

logger = logging.getLogger("trainyard")

_OURS = re.compile(r"events\.out\.tfevents\.(\d+)\..*\.trainyard-(\d{9})")
"""The mark at the end tells our files from those that others write into the same directory."""

_STAGED = ".trainyard-events.tmp"  # both readers open whatever has "tfevents" in its name

_SCALARS = frozenset({float, int, bool})
_MEDIA = {
    "image": {".png", ".jpg", ".jpeg", ".gif"},
    "video": {".gif"},
    "text": {".txt", ".md"},
    "table": {".json"},
    "histogram": {".json"},
    "audio": {".wav"},
}
_STATUS = {"completed": "STATUS_SUCCESS", "failed": "STATUS_FAILURE", "killed": "STATUS_FAILURE"}
_PIECE = 4 << 20
_BINS = 64
_EXACT = 1 << 53  # beyond it, not every integer is a double


class TensorBoardTracker:
    """Writes the results of a run into its directory as TensorBoard's events. It has no options.

    A run has at most one: TensorBoard takes all event files of a directory together for one run.
    """

    guarantee = "Exactly once and in order; after a resume the event file is written anew."
    one_per_run = True

    def __init__(self) -> None:
        for needed in ("tensorboardX", "google_crc32c"):
            if importlib.util.find_spec(needed) is None:
                raise PluginConfigError(f"{needed} is not installed: pip install 'trainyard[tensorboard]'")
        self._folder = Path()
        self._file: AppendedFile | None = None
        self._events: _Events | None = None
        self._told: set[tuple[str, str]] = set()

    @hookimpl
    def log_start(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Cut the event file back to what is confirmed, and remove what an interrupted rewind has left."""
        self.close()
        self._folder = Path(run.path)
        name, end = notes.get("file", ""), notes.get("end")
        size = end["at"] if end else notes.get("size", 0)
        path = self._folder / name
        self._events = _Events(self._folder, notes.setdefault("steps", {}), self._tell)
        if name and path.exists() and path.stat().st_size >= size:
            self._remove_all_but(name)
            self._file = AppendedFile(path, size)
            if end:  # the run may have gone on over it, unconfirmed
                self._file.append(self._events.end(end["status"], end["time"]))
            return
        if name and not any(other != path and other.stat().st_size for other in self._ours()):
            # else it was a rewind that was interrupted, and comes again
            logger.warning("%s is gone or was cut: TensorBoard shows only what run %s logs from now on", path, run.name)
        notes.pop("end", None)
        notes.setdefault("started", time.time())
        self._write_anew([self._head(run, notes)], notes)

    @hookimpl
    def log_results(self, results: list[Result], notes: dict[str, Any]) -> None:
        """Append an event each."""
        beyond = [result.seq for result in results if result.step >= 1 << 63]
        if beyond:
            raise Rejected(beyond, "TensorBoard's steps are integers of 64 bits")
        self._leave_out_end(notes)
        assert self._events is not None
        assert self._file is not None
        for piece in _pieces(map(self._events.result, results)):
            self._file.append(piece)
        notes["size"] = self._file.size

    @hookimpl
    def log_rewind(self, run: RunInfo, results: Iterable[Result], notes: dict[str, Any]) -> None:
        """Write exactly these results into a new file, and empty the old one."""
        notes["steps"] = {}
        notes.pop("end", None)
        events = self._events = _Events(self._folder, notes["steps"], self._tell)

        def history() -> Iterator[bytes]:
            yield self._head(run, notes)
            yield from map(events.result, results)

        self._write_anew(_pieces(history()), notes)

    @hookimpl
    def log_end(self, outcome: Outcome, notes: dict[str, Any]) -> None:
        """Append how the run ended, for the HParams tab."""
        self._leave_out_end(notes)
        self._remove_all_but(notes["file"])
        assert self._events is not None
        assert self._file is not None
        notes["end"] = {"at": self._file.size, "status": outcome.status, "time": outcome.time}
        self._file.append(self._events.end(outcome.status, outcome.time))
        notes["size"] = self._file.size

    @hookimpl
    def flush(self) -> None:
        """Make the events durable."""
        if self._file is not None:
            self._file.sync()

    @hookimpl
    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @hookimpl
    def check(self) -> str:
        """Make an event with what is installed."""
        _Events(Path(), {}, self._tell).head({}, "", 0.0, session=True)
        return f"tensorboardX {importlib.metadata.version('tensorboardX')}, event files in the run directories"

    def _head(self, run: RunInfo, notes: dict[str, Any]) -> bytes:
        assert self._events is not None
        alone = all(_OURS.fullmatch(path.name) for path in self._folder.glob("*tfevents*"))
        return self._events.head(run.config, f"{run.experiment}/{run.name}", notes["started"], session=alone)

    def _write_anew(self, pieces: Iterable[bytes], notes: dict[str, Any]) -> None:
        """Go on behind these pieces in a new file, which replaces the others of ours.

        After a kill before the notes are saved all that comes again.
        """
        name = _later_name(notes.get("file", ""))
        staged = AppendedFile(self._folder / _STAGED, 0)
        try:
            for piece in pieces:
                staged.append(piece)
            staged.sync()
        finally:
            staged.close()
        self.close()
        os.replace(self._folder / _STAGED, self._folder / name)
        _sync_directory(self._folder)
        for other in self._ours():
            if other.name != name:
                # Emptied first: TensorBoard's Python reader never leaves a file that vanishes while it reads
                os.truncate(other, 0) if other.stat().st_size else other.unlink()
        self._file = AppendedFile(self._folder / name, staged.size)
        notes["file"], notes["size"] = name, staged.size

    def _ours(self) -> list[Path]:
        return [path for path in self._folder.glob("events.out.tfevents.*") if _OURS.fullmatch(path.name)]

    def _remove_all_but(self, name: str) -> None:
        for path in (self._folder / _STAGED, *self._ours()):
            if path.name != name:
                path.unlink(missing_ok=True)

    def _leave_out_end(self, notes: dict[str, Any]) -> None:
        """Take back the end of a run that was not dead: TensorBoard holds on to the first status that it reads."""
        end = notes.pop("end", None)
        if end:
            self.close()
            self._file = AppendedFile(self._folder / notes["file"], end["at"])

    def _tell(self, name: str, complaint: str, why: str) -> None:
        """Warn, once for each metric and complaint."""
        if (name, complaint) not in self._told:
            self._told.add((name, complaint))
            logger.warning("TensorBoard: %r of %s %s", name, self._folder.name, why)


class _Events:
    """Turns results into framed events: the same result in the same state always into the same bytes.

    Args:
        folder: the run directory, where media files lie.
        steps: of each metric the kinds of its values, and the last step of each; changed here.
        tell: warns of what cannot be shown.
    """

    def __init__(self, folder: Path, steps: dict[str, dict[str, int]], tell: Callable[[str, str, str], None]) -> None:
        import google_crc32c  # tensorboardX's own takes a byte at a time, and with that half of all time
        from tensorboardX.proto import api_pb2, event_pb2, plugin_hparams_pb2, summary_pb2, tensor_pb2  # type: ignore[import-untyped]

        self._folder = folder
        self._steps = steps
        self._tell = tell
        self._tags: dict[tuple[str, str], str] = {}
        self._crc: Callable[[bytes], int] = google_crc32c.value
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2
        self._hparams: Any = plugin_hparams_pb2
        self._api: Any = api_pb2

    def result(self, result: Result) -> bytes:
        """One event with all that TensorBoard can show of a result; nothing, if there is nothing."""
        step = result.step
        event = self._event.Event(wall_time=result.time, step=step)
        add = event.summary.value.add
        for name, value in flatten({k: v for k, v in result.metrics.items() if k not in NOT_METRICS}):
            if type(value) in _SCALARS:
                tag = self._tag(name, "scalar", step)
                if tag:
                    add(tag=tag, simple_value=value)
            elif value is not None:
                for each, item in media_apart(name, value):
                    shown = self._shown(each, item)
                    tag = self._tag(each, shown[0], step) if shown else ""
                    if shown and tag:
                        add(tag=tag, **shown[1])
        return self._frame(event) if event.summary.value else b""

    def head(self, config: dict[str, Any], name: str, started: float, *, session: bool) -> bytes:
        """What an event file begins with: its version, and the hyperparameters.

        Args:
            config: the run's.
            name: the run's in the HParams tab.
            started: seconds since the epoch.
            session: begin a session. At the second one TensorBoard's Python reader forgets all it has read in the
                directory, also from files of others.
        """
        message = self._event.Event
        begin = self._event.SessionLog(status=self._event.SessionLog.START)
        start = self._hparams.SessionStartInfo(group_name=name, start_time_secs=started)
        for key, value in flatten(config):
            try:
                field, shown = _hparam(value)
                if field:
                    setattr(start.hparams[_printable(key)], field, shown)
            except Exception as error:
                self._tell(key, "hparam", f"is no hyperparameter there: {type(error).__name__}: {error}")
        return b"".join(
            [
                self._frame(message(wall_time=started, file_version="brain.Event:2")),
                self._frame(message(wall_time=started, session_log=begin)) if session else b"",
                self._session("session_start_info", start, started),
            ]
        )

    def end(self, status: str, when: float) -> bytes:
        """How the run ended. One that was stopped from outside has neither succeeded nor failed."""
        number = self._api.Status.Value(_STATUS.get(status, "STATUS_UNKNOWN"))
        return self._session("session_end_info", self._hparams.SessionEndInfo(status=number, end_time_secs=when), when)

    def _session(self, what: str, info: Any, when: float) -> bytes:
        # No EXPERIMENT beside it: TensorBoard takes any one run's for all, and would hide the others' columns
        content = self._hparams.HParamsPluginData(**{what: info}).SerializeToString(deterministic=True)
        event = self._event.Event(wall_time=when)
        event.summary.value.add(tag=f"_hparams_/{what}", metadata=self._metadata("hparams", content))
        return self._frame(event)

    def _frame(self, event: Any) -> bytes:
        """A record of the TFRecord format."""
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        return b"".join([length, self._checksum(length), data, self._checksum(data)])

    def _checksum(self, data: bytes) -> bytes:
        crc = self._crc(data)
        return struct.pack(
            "<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
        )  # "masked", as it says

    def _tag(self, name: str, kind: str, step: int) -> str:
        """The tag to write a value under; none if its curve is beyond that step already.

        A tag holds values of one kind, that of the first; so a metric that changes its kind has a tag for each.
        """
        kinds = self._steps.get(name)
        if kinds is None:
            kinds = self._steps[name] = {}
        if step < kinds.get(kind, 0):
            self._tell(name, "step", f"has steps that go back, or below 0, which are not shown: {step}")
            return ""
        kinds[kind] = step
        tag = self._tags.get((name, kind))
        if tag is None:
            tag = _printable(name) if next(iter(kinds)) == kind else f"{_printable(name)}\\{kind}"
            self._tags[name, kind] = tag
        return tag

    def _shown(self, name: str, value: Any) -> tuple[str, dict[str, Any]] | None:
        """The kind of a value, and the fields that hold it."""
        if isinstance(value, MediaFile):
            return self._media(name, value)
        if isinstance(value, str):
            return "text", self._text(value)
        if isinstance(value, list | tuple):
            return "text", self._text(strict_json(value).decode())
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0:
            return "scalar", {"simple_value": float(value)}
        if hasattr(value, "ndim"):
            return self._histogram(name, value)
        self._tell(name, "type", f"is a {type(value).__name__}, which is not shown")
        return None

    def _histogram(self, name: str, array: Any) -> tuple[str, dict[str, Any]] | None:
        import numpy

        values = numpy.asarray(array, dtype=numpy.float64).reshape(-1)
        values = values[numpy.isfinite(values)]
        try:
            if not values.size:
                raise ValueError("it holds no finite number")
            with numpy.errstate(all="ignore"):
                low, high = float(values.min()), float(values.max())
                counts, edges = numpy.histogram(values, _BINS if low < high else [low, high])
                moments = {"min": low, "max": high, "num": values.size, "sum": values.sum()}
                moments["sum_squares"] = values @ values
                histogram = _buckets(counts.tolist(), edges.tolist(), moments)
        except ValueError as error:  # also a range that no float can hold
            self._tell(name, "histogram", f"has no histogram: {error}")
            return None
        return "histogram", {"histo": self._summary.HistogramProto(**histogram)}

    def _text(self, text: str) -> dict[str, Any]:
        tensor = self._tensor.TensorProto(dtype="DT_STRING", string_val=[_encoded(text)])
        tensor.tensor_shape.SetInParent()  # of rank 0, or it would be shown as a table
        return {"tensor": tensor, "metadata": self._metadata("text")}

    def _metadata(self, plugin: str, content: bytes = b"") -> Any:
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        return self._summary.SummaryMetadata(plugin_data=data)

    def _media(self, name: str, media: MediaFile) -> tuple[str, dict[str, Any]] | None:
        path = self._folder / media.path
        if path.suffix.lower() not in _MEDIA.get(media.kind, ()):
            self._tell(name, "media", f"is {media.kind} in a {path.suffix} file, which is not shown")
            return None
        try:
            data = path.read_bytes()
        except OSError as error:
            self._tell(name, "missing", f"has lost its file: {error}")
            return None
        try:
            match media.kind:
                case "image" | "video":
                    return "image", {"image": self._image(data, media.details)}
                case "audio":
                    return "audio", {"audio": self._audio(data, media.details)}
                case "text":
                    return "text", self._text(data.decode(errors="replace"))
                case "table":
                    return "text", self._text(_markdown(json.loads(data)))
                case "histogram":
                    table = json.loads(data)
                    histogram = _buckets(table["counts"], table["edges"], table)
                    return "histogram", {"histo": self._summary.HistogramProto(**histogram)}
        except (ValueError, TypeError, LookupError) as error:
            self._tell(name, "broken", f"has a file that cannot be read: {media.path}: {error}")
        return None

    def _image(self, data: bytes, details: dict[str, Any]) -> Any:
        size = {side: details.get(side) or 0 for side in ("width", "height")}
        return self._summary.Summary.Image(encoded_image_string=data, colorspace=3, **size)

    def _audio(self, data: bytes, details: dict[str, Any]) -> Any:
        try:
            with wave.open(io.BytesIO(data)) as file:
                rate, channels, frames = file.getframerate(), file.getnchannels(), file.getnframes()
        except (wave.Error, EOFError):  # a browser may know more formats than Python does
            rate, channels, frames = details.get("rate") or 0, 0, 0
        return self._summary.Summary.Audio(
            sample_rate=rate,
            num_channels=channels,
            length_frames=frames,
            encoded_audio_string=data,
            content_type="audio/wav",
        )


def _buckets(counts: Sequence[float], edges: Sequence[float], moments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a histogram, without the empty buckets at its ends, which the readers do not agree on.

    Raises:
        ValueError, LookupError: it is none.
    """
    filled = [i for i, count in enumerate(counts) if count > 0]
    if not filled or len(edges) != len(counts) + 1:
        raise ValueError(f"{len(filled)} buckets of {len(counts)} hold something, between {len(edges)} edges")
    first, behind = filled[0], filled[-1] + 1
    return {
        "bucket": counts[first:behind],
        "bucket_limit": edges[first + 1 : behind + 1],
        **{key: float(moments[key]) for key in ("min", "max", "num", "sum", "sum_squares")},
    }


def _hparam(value: Any) -> tuple[str, Any]:
    """The field of a protobuf Value that holds a hyperparameter, and what it holds; no field for None."""
    if value is None:
        return "", None
    if isinstance(value, bool):
        return "bool_value", value
    if isinstance(value, int) and abs(value) <= _EXACT:
        return "number_value", value
    if isinstance(value, float) and math.isfinite(value):  # TensorBoard leaves out the others
        return "number_value", value
    return "string_value", _encoded(value if isinstance(value, str) else str(value)).decode()


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


@functools.lru_cache(maxsize=10_000)
def _printable(name: str) -> str:
    r"""A metric's name as a tag. No two names become one.

    TensorBoard shows any name that can be printed. Only control characters, the backslash that escapes them, an empty
    name and the one prefix that TensorBoard keeps to itself are written otherwise.

    >>> _printable("cpu [%]/β"), _printable("a\nb"), _printable("a\\nb")
    ('cpu [%]/β', 'a\\x0ab', 'a\\\\nb')
    """
    if not name:
        return "\\empty"
    tag = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", lambda c: f"\\x{ord(c[0]):02x}", name.replace("\\", "\\\\"))
    return f"\\{tag}" if tag.startswith("_hparams_/") else tag


def _markdown(table: dict[str, Any]) -> str:
    def row(cells: Iterable[Any]) -> str:
        texts = ("" if cell is None else str(cell).replace("|", "\\|") for cell in cells)
        return "| " + " | ".join(" ".join(text.splitlines()) for text in texts) + " |"

    columns = table["columns"]
    return "\n".join([row(columns), row("---" for _ in columns), *map(row, table["data"])])


def _later_name(previous: str) -> str:
    """A name for an event file that sorts behind the previous one, whatever the clock does; readers go by it."""
    stamp = time.time_ns()
    if before := _OURS.fullmatch(previous):
        stamp = max(stamp, int(before[1]) * 10**9 + int(before[2]) + 1)
    host = re.sub(r"[^\w.-]", "_", platform.node())[:64] or "localhost"
    return f"events.out.tfevents.{stamp // 10**9:010d}.{host}.trainyard-{stamp % 10**9:09d}"


def _pieces(events: Iterable[bytes]) -> Iterator[bytes]:
    """Join events to pieces of a size worth writing at once."""
    piece: list[bytes] = []
    size = 0
    for event in events:
        piece.append(event)
        size += len(event)
        if size >= _PIECE:
            yield b"".join(piece)
            piece, size = [], 0
    yield b"".join(piece)


def _sync_directory(folder: Path) -> None:
    if os.name == "nt":  # it cannot open directories
        return
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
