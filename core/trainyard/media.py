"""Images, texts, tables, histograms, audio and video as values of a result.

Making one copies nothing and touches no disk: it only looks whether the value can be one at all. When the result is
recorded it is stored as a file below ``media/`` in the run directory, before the journal's record that refers to it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import operator
import os
import re
import struct
import sys
import wave
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from trainyard.errors import MetricError
from trainyard.records import MediaFile
from trainyard.values import Media, recordable, strict_json

__all__ = ["Audio", "Figure", "Histogram", "Image", "MediaFolder", "Table", "Text", "Video", "store"]

logger = logging.getLogger("trainyard")

FOLDER = "media"
_CHUNK = 1 << 20
_NAME_LIMIT = 60
_MOST_CHANNELS = 16
_LARGEST = sys.float_info.max

_SIGNATURES = {
    "png": rb"\x89PNG\r\n\x1a\n",
    "jpg": rb"\xff\xd8\xff",
    "gif": rb"GIF8[79]a",
    "webp": rb"RIFF....WEBP",
    "wav": rb"RIFF....WAVE",
    "flac": rb"fLaC",
    "ogg": rb"OggS",
    "mp3": rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]",
    "mp4": rb"....ftyp",
    "webm": rb"\x1aE\xdf\xa3",
}


class Encoded(NamedTuple):
    """A value as it goes into a file.

    Attributes:
        kind: of the MediaFile.
        extension: of the file, without the dot.
        content: its bytes, or the file to copy.
        details: of the MediaFile.
        remark: what the user should be told of it once, or "".
    """

    kind: Literal["image", "text", "table", "histogram", "audio", "video"]
    extension: str
    content: bytes | Path
    details: dict[str, Any]
    remark: str = ""


class MediaValue(Media):
    """One of the values below.

    Attributes:
        caption: the user's words to it, or "".
    """

    __slots__ = ("caption",)

    def __init__(self, caption: str) -> None:
        if not isinstance(caption, str):
            raise MetricError(f"the caption of {_a(self)} is a string, not {_a(caption)}")
        self.caption = caption

    def encode(self) -> Encoded:
        """The value as a file, called when its result is recorded.

        Raises:
            MetricError: it cannot be one after all.
        """
        raise NotImplementedError


class Image(MediaValue):
    """A picture.

    Args:
        data: the path of a png, jpg, gif or webp file; a PIL image; or an array or tensor of (H, W), (H, W, 1),
            (H, W, 3) or (H, W, 4), or with the channels first where the last axis cannot be them. uint8 from 0 to 255,
            bool, or floats from 0 to 1: those outside are clipped, NaN is 0.
        caption: shown with it.

    Raises:
        MetricError: it is no picture.
    """

    __slots__ = ("data",)

    def __init__(self, data: Any, caption: str = "") -> None:
        super().__init__(caption)
        self.data = data
        if not isinstance(data, str | os.PathLike) and not _is_pil_image(data):
            _check_pixels(self, data, (2, 3))
            _channel_axis(self, data.shape)

    def encode(self) -> Encoded:
        """A PNG, or the user's own file."""
        if isinstance(self.data, str | os.PathLike):
            path, extension = _known_file(self, self.data, ("png", "jpg", "gif", "webp"))
            return Encoded("image", extension, path, _picture_size(path))
        if _is_pil_image(self.data):
            picture, remark = self.data, ""
        else:
            pixels, remark = _pixels(self, self.data)
            picture = _pillow().fromarray(pixels)
        if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            if picture.mode.startswith("I;16"):
                picture = picture.convert("I")
            picture = picture.convert({"I": "I;16", "La": "LA", "PA": "RGBA", "RGBa": "RGBA"}.get(picture.mode, "RGB"))
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=3)  # the default, 6, takes half as long again for a tenth less
        return Encoded("image", "png", file.getvalue(), {"width": picture.width, "height": picture.height}, remark)


class Figure(MediaValue):
    """A matplotlib figure, stored as a PNG of its own size and resolution.

    Args:
        figure: a figure, or axes of it.
        caption: shown with it.
        close: close the figure once it is stored; otherwise pyplot keeps those that it made.

    Raises:
        MetricError: it is no figure.
    """

    __slots__ = ("close", "figure")

    def __init__(self, figure: Any, caption: str = "", *, close: bool = False) -> None:
        super().__init__(caption)
        if not callable(getattr(figure, "savefig", None)):
            figure = getattr(figure, "figure", figure)
        if not callable(getattr(figure, "savefig", None)):
            raise MetricError(f"a Figure is made of a matplotlib figure, not {_a(figure)}")
        self.figure, self.close = figure, close

    def encode(self) -> Encoded:
        """A PNG."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png")
        content = file.getvalue()
        pyplot = sys.modules.get("matplotlib.pyplot")
        if self.close and pyplot is not None:
            pyplot.close(getattr(self.figure, "figure", None) or self.figure)
        return Encoded("image", "png", content, dict(zip(("width", "height"), _png_size(content), strict=True)))


class Text(MediaValue):
    """Words: a generated sample, a report, Markdown.

    Args:
        text: stored as UTF-8.
        caption: shown with it.

    Raises:
        MetricError: it is no string.
    """

    __slots__ = ("text",)

    def __init__(self, text: str, caption: str = "") -> None:
        super().__init__(caption)
        if not isinstance(text, str):
            raise MetricError(f"a Text is made of a string, not {_a(text)}")
        self.text = text

    def encode(self) -> Encoded:
        """A text file."""
        return Encoded("text", "txt", self.text.encode(), {})


class Table(MediaValue):
    """Rows and columns.

    Args:
        columns: their names; or a pandas or polars dataframe, without its index.
        rows: one sequence of cells each, as long as `columns`. A cell is what a metric may be; all else is stored as its
            ``str()``.
        caption: shown with it.

    Raises:
        MetricError: it is no table.
    """

    __slots__ = ("columns", "rows")

    def __init__(self, columns: Any, rows: Iterable[Sequence[Any]] | None = None, caption: str = "") -> None:
        super().__init__(caption)
        if rows is None:
            if not hasattr(columns, "columns") or not (hasattr(columns, "itertuples") or hasattr(columns, "rows")):
                raise MetricError(f"a Table is made of columns and rows, or of a dataframe, not of {_a(columns)} alone")
        elif isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
            raise MetricError(f"the columns of a Table are a list of names, not {_a(columns)}")
        elif isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__len__"):
            raise MetricError(f"the rows of a Table are a list of rows, not {_a(rows)}")
        self.columns, self.rows = columns, rows

    def encode(self) -> Encoded:
        """JSON: the names of the columns, and the cells by row."""
        if self.rows is None:
            frame = self.columns
            names = [str(name) for name in frame.columns]
            rows = frame.itertuples(index=False, name=None) if hasattr(frame, "itertuples") else frame.rows()
        else:
            names, rows = [str(name) for name in self.columns], self.rows
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise MetricError(f"two columns of the table are both named {twice!r}")
        data = []
        for number, row in enumerate(rows):
            if isinstance(row, str | bytes | Mapping) or not isinstance(row, Iterable):
                raise MetricError(f"row {number} of the table is {_a(row)}, not a sequence of cells")
            cells = [_cell(cell) for cell in row]
            if len(cells) != len(names):
                raise MetricError(f"row {number} of the table has {len(cells)} cells; there are {len(names)} columns")
            data.append(cells)
        content = strict_json({"columns": names, "data": data})
        return Encoded("table", "json", content, {"rows": len(data), "columns": len(names)})


class Histogram(MediaValue):
    """How values are distributed.

    Args:
        values: an array, tensor or list of numbers; those that are not finite are left out, and counted.
        bins: how many bins of equal width between the least and the largest value.
        counts: instead of `values`: how many lie in each bin.
        edges: the bounds of these bins, ascending, one more than `counts`.
        caption: shown with it.

    Raises:
        MetricError: it is no histogram.
    """

    __slots__ = ("bins", "counts", "edges", "values")

    def __init__(
        self, values: Any = None, bins: int = 64, *, counts: Any = None, edges: Any = None, caption: str = ""
    ) -> None:
        super().__init__(caption)
        if (values is None) == (counts is None) or (counts is None) != (edges is None):
            raise MetricError("a Histogram is made of values, or of counts and edges")
        if values is not None:
            if isinstance(values, str | bytes | Mapping) or not (
                hasattr(values, "shape") or hasattr(values, "__len__")
            ):
                raise MetricError(f"a Histogram is made of an array or a list of numbers, not {_a(values)}")
            bins = _whole(bins, "the bins of a Histogram are", 1, 1 << 20)
        elif len(edges) != len(counts) + 1 or not len(counts):
            raise MetricError(
                f"a Histogram has one edge more than counts, not {len(edges)} edges for {len(counts)} counts"
            )
        self.values, self.bins, self.counts, self.edges = values, bins, counts, edges

    def encode(self) -> Encoded:
        """JSON with the counts, the edges, and the moments that TensorBoard wants; every number in it is finite."""
        fields = self._counted() if self.values is None else self._binned()
        for name in ("sum", "sum_squares"):  # not even of values near the largest float
            fields[name] = min(max(fields[name], -_LARGEST), _LARGEST) if fields[name] == fields[name] else 0.0
        return Encoded("histogram", "json", strict_json(fields), {"bins": len(fields["counts"])})

    def _counted(self) -> dict[str, Any]:
        counts, edges = ([float(item) for item in items] for items in (self.counts, self.edges))
        if not all(math.isfinite(count) and count >= 0 for count in counts):
            raise MetricError("the counts of a histogram are finite numbers from 0")
        if not all(map(math.isfinite, edges)) or any(low >= high for low, high in itertools.pairwise(edges)):
            raise MetricError("the edges of a histogram are finite numbers, each larger than the one before")
        filled = [i for i, count in enumerate(counts) if count] or [0]
        middles = [low / 2 + high / 2 for low, high in itertools.pairwise(edges)]
        return {
            "counts": [int(count) if count.is_integer() else count for count in counts],
            "edges": edges,
            "min": edges[filled[0]],
            "max": edges[filled[-1] + 1],
            "num": sum(counts),
            "sum": sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            "sum_squares": sum(count * middle * middle for count, middle in zip(counts, middles, strict=True)),
            "nonfinite": 0,
        }

    def _binned(self) -> dict[str, Any]:
        numpy = _numpy()
        array = _array(self.values)
        if array.dtype.kind not in "biuf":
            raise MetricError(f"a histogram is made of numbers, not of {array.dtype}")
        with numpy.errstate(all="ignore"):
            array = array.astype(numpy.float64).ravel()
            finite = array[numpy.isfinite(array)]
            low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
            scale = 1.0 if math.isfinite(high - low) else 4.0
            try:
                counts, edges = numpy.histogram(finite / scale, self.bins)
            except ValueError:  # the values are too close to each other for so many bins: as numpy does for equal ones
                half = max(0.5, 1e-6 * max(-low, high))
                around = (max(low - half, -_LARGEST), min(high + half, _LARGEST))
                counts, edges = numpy.histogram(finite, self.bins, around)
            total, squares = float(finite.sum()), float((finite * finite).sum())
        return {
            "counts": counts.tolist(),
            "edges": (edges * scale).tolist(),
            "min": low,
            "max": high,
            "num": int(finite.size),
            "sum": total,
            "sum_squares": squares,
            "nonfinite": int(array.size - finite.size),
        }


class Audio(MediaValue):
    """Sound.

    Args:
        data: the path of a wav, flac, ogg or mp3 file; or an array or tensor of (samples,), (samples, channels), or with
            the channels first where there are more than 16 of the other. int16, or floats from -1 to 1: those outside
            are clipped, NaN is 0.
        rate: samples a second; a file knows its own.
        caption: shown with it.

    Raises:
        MetricError: it is no sound.
    """

    __slots__ = ("data", "rate")

    def __init__(self, data: Any, rate: int | None = None, caption: str = "") -> None:
        super().__init__(caption)
        if not isinstance(data, str | os.PathLike):
            kind = _dtype(self, data)
            if kind != "int16" and "float" not in kind:
                raise MetricError(f"the samples of an Audio are int16, or floats from -1 to 1, not {kind}")
            shape = tuple(data.shape)
            if len(shape) not in (1, 2) or 0 in shape or (len(shape) == 2 and min(shape) > _MOST_CHANNELS):
                raise MetricError(f"an Audio has the shape (samples,) or (samples, channels), not {shape}")
            if rate is None:
                raise MetricError("an Audio of an array needs a rate: samples a second")
        if rate is not None:
            rate = _whole(rate, "the rate of an Audio is", 1, 1 << 24)
        self.data, self.rate = data, rate

    def encode(self) -> Encoded:
        """A WAV file of 16 bits a sample, or the user's own file."""
        if isinstance(self.data, str | os.PathLike):
            path, extension = _known_file(self, self.data, ("wav", "flac", "ogg", "mp3"))
            rate = self.rate
            if extension == "wav":
                with contextlib.suppress(wave.Error, EOFError), wave.open(str(path), "rb") as given:
                    rate = given.getframerate()
            return Encoded("audio", extension, path, {"rate": rate})
        numpy = _numpy()
        samples, remark = _array(self.data), ""
        if samples.dtype.kind == "f":
            if bool((numpy.abs(samples) > 1.5).any()):
                remark = "the floats of an Audio are from -1 to 1; those outside were clipped"
            clipped = numpy.clip(samples, -1, 1).astype(numpy.float32)
            samples = numpy.rint(numpy.nan_to_num(clipped, nan=0.0) * 32767)
        if samples.ndim == 1:
            samples = samples[:, None]
        elif samples.shape[1] > _MOST_CHANNELS:
            samples = samples.T
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(samples.shape[1])
            out.setsampwidth(2)
            out.setframerate(self.rate or 1)
            out.writeframes(samples.astype("<i2").tobytes())
        return Encoded("audio", "wav", file.getvalue(), {"rate": self.rate}, remark)


class Video(MediaValue):
    """Moving pictures.

    Args:
        data: the path of an mp4, gif or webm file; or an array or tensor of (T, H, W) or (T, H, W, C), each frame as in
            :class:`Image`. It is stored as a GIF, which has 256 colours a frame and no transparency here.
        fps: frames a second of an array, up to 100; a file knows its own.
        caption: shown with it.

    Raises:
        MetricError: it is no video.
    """

    __slots__ = ("data", "fps")

    def __init__(self, data: Any, fps: float = 4, caption: str = "") -> None:
        super().__init__(caption)
        if not isinstance(data, str | os.PathLike):
            _check_pixels(self, data, (3, 4))
            _channel_axis(self, data.shape[1:])
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 100:
            raise MetricError(f"the fps of a Video are a number above 0 and up to 100, not {fps!r}")
        self.data, self.fps = data, fps

    def encode(self) -> Encoded:
        """A GIF, or the user's own file."""
        if isinstance(self.data, str | os.PathLike):
            path, extension = _known_file(self, self.data, ("mp4", "gif", "webm"))
            sizes = _picture_size(path) if extension == "gif" else {"width": None, "height": None}
            return Encoded("video", extension, path, {"fps": None, **sizes})
        pixels, remark = _pixels(self, self.data)
        pillow = _pillow()
        frames = [pillow.fromarray(frame[..., :3] if frame.ndim == 3 else frame) for frame in pixels]
        file = io.BytesIO()
        # a GIF counts in hundredths of a second
        frames[0].save(
            file, "GIF", save_all=True, append_images=frames[1:], duration=max(1, round(100 / self.fps)) * 10, loop=0
        )
        size = {"width": frames[0].width, "height": frames[0].height}
        return Encoded("video", "gif", file.getvalue(), {"fps": self.fps, **size}, remark)


# -- into the run directory --------------------------------------------------------------------------------------


def store(value: Media, run_directory: str | os.PathLike[str], name: str, seq: int) -> MediaFile:
    """Store one value as a file, whole or not at all.

    It is not fsynced: the journal itself promises no more than the last second but against a power cut, and training
    would wait for it.

    Args:
        value: what to store.
        run_directory: the file goes below its ``media/``.
        name: the metric.
        seq: of the result.

    Raises:
        MetricError: the value is at fault.
        OSError: the disk is.
    """
    return _write(value, _encoded(value, name), Path(run_directory), name, seq)


class MediaFolder:
    """The media of one run, as its writer sees them. Not safe in threads: the run's lock is held.

    Args:
        run_directory: of the run.
    """

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._seq = -1
        self._written: list[str] = []
        self._told: set[str] = set()

    def store(self, value: Media, name: str, seq: int) -> MediaFile | None:
        """Store one value; None, and one warning a run, when the disk does not take it: training goes on.

        Raises:
            MetricError: the value is at fault; what was stored of this result before is gone again.
        """
        if seq != self._seq:
            self._seq, self._written = seq, []
        try:
            encoded = _encoded(value, name)
            if encoded.remark:
                self._tell(encoded.remark, f"metric {name!r}: {encoded.remark}")
            file = _write(value, encoded, self._directory, name, seq)
        except MetricError:
            self.discard(seq)
            raise
        except OSError as error:
            self._tell(
                "disk",
                f"cannot store metric {name!r} below {self._directory / FOLDER}: {error.strerror}; media values are left "
                "out of the results until that ends",
            )
            return None
        self._written.append(file.path)
        return file

    def discard(self, seq: int) -> None:
        """Remove what was stored of a result that is refused after all."""
        if seq != self._seq:
            return
        for path in self._written:
            file = self._directory / path
            with contextlib.suppress(OSError):  # one that is still there only takes room
                file.unlink(missing_ok=True)
                file.parent.rmdir()
                file.parent.parent.rmdir()
        self._written = []

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s", message)


def _encoded(value: Media, name: str) -> Encoded:
    assert isinstance(value, MediaValue)
    try:
        value.caption.encode()
        return value.encode()
    except Exception as error:  # whatever a library says of a value that it cannot take
        why = str(error) if isinstance(error, MetricError) else f"{_a(value)} that cannot be stored: {error}"
        raise MetricError(f"metric {name!r}: {why}") from error


def _write(value: Media, encoded: Encoded, run_directory: Path, name: str, seq: int) -> MediaFile:
    folder = run_directory / FOLDER / _safe(name)
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f".{seq:06d}.tmp"
    digest, size = xxhash.xxh3_64(), 0
    try:
        with open(staged, "wb") as file:
            for piece in _pieces(encoded.content, name):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
        target = folder / f"{seq:06d}_{digest.hexdigest()[:8]}.{encoded.extension}"
        os.replace(staged, target)
    except BaseException:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
            folder.rmdir()  # if it is empty
            folder.parent.rmdir()
        raise
    caption = value.caption if isinstance(value, MediaValue) else ""
    return MediaFile(encoded.kind, f"{FOLDER}/{folder.name}/{target.name}", size, caption, encoded.details)


def _pieces(content: bytes | Path, name: str) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    try:
        with open(content, "rb", buffering=0) as file:
            while piece := file.read(_CHUNK):
                yield piece
    except OSError as error:  # the user's file is at fault, not our disk
        raise MetricError(f"metric {name!r}: cannot read {content}: {error.strerror}") from error


def _safe(name: str) -> str:
    """A directory's name for a metric, on every filesystem. Two metrics may share one: the files' names tell them apart."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:_NAME_LIMIT].strip("-.") or "unnamed"
    return f"{safe}-" if re.match(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", safe, re.IGNORECASE) else safe


# -- what a value is ---------------------------------------------------------------------------------------------


def _a(value: object) -> str:
    kind = type(value)
    name = kind.__name__ if kind.__module__ in ("builtins", __name__) else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _whole(value: Any, what: str, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise MetricError(f"{what} a whole number from {least} to {most}, not {value!r}")
    return number


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise MetricError("arrays need numpy: pip install 'trainyard[media]'") from None
    return numpy


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise MetricError("pictures of arrays need pillow: pip install 'trainyard[media]'") from None
    return PIL.Image


def _is_pil_image(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # whoever has one has imported it
    return pillow is not None and isinstance(value, pillow.Image)


def _array(value: Any) -> Any:
    """A numpy array of what any library calls one; numpy's own is not copied."""
    numpy = _numpy()
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        array = numpy.asarray(value)
    except TypeError:
        array = numpy.asarray(value.float())  # torch.bfloat16, which numpy does not know
    return array.astype(numpy.float32) if "float" in array.dtype.name and array.dtype.kind != "f" else array


def _dtype(value: MediaValue, data: Any) -> str:
    """The name of an array's type, whichever library it is of."""
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):
        raise MetricError(f"{_a(value)} is made of a path or an array, not {_a(data)}")
    return str(getattr(data.dtype, "name", data.dtype)).removeprefix("torch.")


def _check_pixels(value: MediaValue, data: Any, dimensions: tuple[int, int]) -> None:
    kind = _dtype(value, data)
    if kind not in ("uint8", "bool") and "float" not in kind:
        raise MetricError(
            f"the pixels of {_a(value)} are uint8 from 0 to 255, floats from 0 to 1, or bools, not {kind}"
        )
    shape = tuple(data.shape)
    if len(shape) not in dimensions or 0 in shape:
        wanted = "(H, W) or (H, W, channels)" if dimensions[0] == 2 else "(T, H, W) or (T, H, W, channels)"
        raise MetricError(f"{_a(value)} has the shape {wanted}, not {shape}")


def _channel_axis(value: MediaValue, shape: Sequence[int]) -> int | None:
    """Where the channels of one picture are: last, first, or there are none."""
    if len(shape) == 2:
        return None
    for axis in (2, 0):
        if shape[axis] in (1, 3, 4):
            return axis
    raise MetricError(
        f"{_a(value)} has 1, 3 or 4 channels, in the last axis or the first, not the shape {tuple(shape)}"
    )


def _pixels(value: MediaValue, data: Any) -> tuple[Any, str]:
    """One picture or many as uint8 with the channels last, none for grey; and what to remark."""
    numpy = _numpy()
    array, remark = _array(data), ""
    if array.dtype.kind == "b":
        array = array.astype(numpy.uint8) * numpy.uint8(255)
    elif array.dtype.kind == "f":
        if bool((array > 1.5).any()):
            remark = f"the floats of {_a(value)} are from 0 to 1; those outside were clipped (uint8 is from 0 to 255)"
        clipped = numpy.clip(array, 0, 1).astype(numpy.float32)
        array = (numpy.nan_to_num(clipped, nan=0.0) * 255 + 0.5).astype(numpy.uint8)
    frame_axes = array.ndim - (isinstance(value, Video))
    if frame_axes == 3:
        if _channel_axis(value, array.shape[-3:]) == 0:
            array = numpy.moveaxis(array, -3, -1)
        array = array[..., 0] if array.shape[-1] == 1 else array
    return numpy.ascontiguousarray(array), remark


def _cell(value: Any) -> Any:
    """A table's cell as JSON can hold it."""
    if value is None or type(value).__name__ in ("NaTType", "NAType"):  # pandas' words for nothing
        return None
    try:
        return recordable({"": value})[""]
    except MetricError:
        if isinstance(value, Media):
            raise MetricError(f"a cell of the table is {_a(value)}; a table holds numbers and words") from None
        return str(value)


# -- files of the user -------------------------------------------------------------------------------------------


def _known_file(value: MediaValue, given: str | os.PathLike[str], extensions: Sequence[str]) -> tuple[Path, str]:
    """A path and what the file's first bytes say that it is.

    Raises:
        MetricError: there is no such file, or it is none of these.
    """
    path = Path(given)
    if not path.is_file():
        raise MetricError(f"{_a(value)} of {path}: there is no such file")
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise MetricError(f"cannot read {path}: {error.strerror}") from error
    for extension in extensions:
        if re.match(_SIGNATURES[extension], head, re.DOTALL):
            return path, extension
    raise MetricError(f"{_a(value)} of {path}: it is no {', '.join(extensions[:-1])} or {extensions[-1]} file")


def _png_size(content: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def _picture_size(path: Path) -> dict[str, int | None]:
    """Width and height, as far as pillow is there to tell them."""
    try:
        import PIL.Image
    except ImportError:
        return {"width": None, "height": None}
    with PIL.Image.open(path) as picture:  # reads the header only
        return {"width": picture.width, "height": picture.height}
