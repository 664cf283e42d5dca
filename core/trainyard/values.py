"""The one place that turns users' values into what is recorded.

A metric is a number, a bool, a string, None, bytes, a small array, a media value, or a dict or list of these. Everything
else is refused before anything is written, by name and type.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from trainyard.errors import MetricError
from trainyard.records import MediaFile

__all__ = ["ARRAY_LIMIT", "Media", "decode_extension", "encode_extension", "flatten", "recordable", "strict_json"]

ARRAY_LIMIT = 1 << 20
"""Bytes that one array among the metrics may have; what is larger belongs into an artifact or a checkpoint."""

_ARRAY = 1  # msgpack extension code: [dtype, shape, raw little-endian C-order bytes]
_MEDIA = 2  # msgpack extension code: a map of the fields of a MediaFile
_STRUCT_CODES = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"} | {
    "f2": "e",
    "f4": "f",
    "f8": "d",
}
_DEPTH_LIMIT = 64
_PLAIN = frozenset({float, int, str, bool, type(None), bytes})
_SCALAR_MODULES = ("numpy", "torch", "jax", "jaxlib", "ml_dtypes", "cupy", "tensorflow")


class Media:
    """What :class:`trainyard.Image` and its like have in common: they are stored as a file beside the journal."""

    __slots__ = ()


Store = Callable[[str, Media], MediaFile | None]


def recordable(metrics: Mapping[Any, Any], store: Store | None = None) -> dict[str, Any]:
    """Turn a dict of metrics into one that the journal can hold.

    Numpy, torch and JAX scalars and 0-d arrays become Python numbers; arrays of up to 1 MiB stay arrays; tuples
    become lists; keys that are numbers or bools become strings; media values become the MediaFile that they were stored
    as. The given dict is never changed.

    Args:
        metrics: the dict.
        store: stores one media value, given its name; None where that failed for no fault of the value's, which is then
            left out. Called only once all else is known to be recordable. Without it media values are refused.

    Raises:
        MetricError: a value or key that cannot be recorded, or two keys of one flattened name.
    """
    if set(map(type, metrics)) == {str}:
        if _PLAIN.issuperset(map(type, metrics.values())):
            return dict(metrics)
        media: list[str] = []
        out = dict(metrics)
        for name, value in out.items():
            if type(value) not in _PLAIN:
                out[name] = _value(value, name, 0, media)
    else:
        media = []
        out = dict(_items(metrics, "", 0, media))
    if any(type(v) is dict for v in out.values()):
        _refuse_collisions(out)
    if media:
        if store is None:
            raise MetricError(f"metric {media[0]!r} is a media value, which only the results of a run can hold")
        _store_media(out, "", store)
    return out


def _items(mapping: Mapping[Any, Any], path: str, depth: int, media: list[str]) -> Iterator[tuple[str, Any]]:
    if depth > _DEPTH_LIMIT:
        raise MetricError(f"metric {path!r} is nested deeper than {_DEPTH_LIMIT} levels")
    seen = set()
    for key, value in mapping.items():
        if not isinstance(key, str):
            if not isinstance(key, int | float | bool) and not _is_scalar_type(key):
                where = f" in {path!r}" if path else ""
                raise MetricError(f"metric name {key!r}{where} is a {_name(key)}; a name is a string or a number")
            key = str(key)
        name = f"{path}/{key}" if path else str(key)
        if key in seen:
            raise MetricError(f"two metrics are both named {name!r} once their names are strings")
        seen.add(key)
        yield str(key), _value(value, name, depth, media)


def _value(value: Any, path: str, depth: int, media: list[str]) -> Any:
    """One value as it is recorded; a media value stays what it is for now, and its name is noted."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    base: type[Any]
    for base in (float, int, str, bytes):  # numpy.float64 is a float, IntEnum an int, numpy.str_ a str
        if isinstance(value, base):
            return str.__str__(value) if base is str else base(value)  # an Enum's own str() is its name
    if isinstance(value, Mapping):
        return dict(_items(value, path, depth + 1, media))
    if isinstance(value, list | tuple):
        if depth > _DEPTH_LIMIT:
            raise MetricError(f"metric {path!r} is nested deeper than {_DEPTH_LIMIT} levels")
        return [_value(item, f"{path}/{i}", depth + 1, media) for i, item in enumerate(value)]
    if _is_scalar_type(value):
        return _from_array(value, path)
    if isinstance(value, Media):
        media.append(path)
        return value
    raise MetricError(
        f"metric {path!r} is a {_name(value)}, which cannot be recorded: "
        "a metric is a number, bool, string, None, small array, media value, or a dict or list of these"
    )


def _store_media(container: Any, path: str, store: Store) -> None:
    """Put a MediaFile in the place of each media value of a dict or list; one that could not be stored is taken out."""
    left_out = []
    for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
        name = f"{path}/{key}" if path else str(key)
        if isinstance(value, Media):
            file = store(name, value)
            if file is None:
                left_out.append(key)
            else:
                container[key] = file
        elif isinstance(value, dict | list):
            _store_media(value, name, store)
    for key in reversed(left_out):
        del container[key]


def _is_scalar_type(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _SCALAR_MODULES or hasattr(value, "__array__")


def _from_array(value: Any, path: str) -> Any:
    """A Python number of a 0-d array or scalar; else a numpy array that fits the journal."""
    if hasattr(value, "detach"):
        value = value.detach()
        value = value.cpu() if value.ndim else value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        scalar = value.item()
        if type(scalar) in _PLAIN and kind not in ("m", "M"):  # times may come out as bare integers
            return scalar
        if kind == "f":
            return float(scalar)  # longdouble
        raise MetricError(f"metric {path!r} is a {_name(value)} of {_name(scalar)}, which cannot be recorded")
    import numpy

    try:
        array = numpy.asarray(value)
    except (TypeError, ValueError):
        array = numpy.asarray(value.float())  # torch.bfloat16, which numpy does not know
    if array.dtype.kind not in "bifu" or array.dtype.name == "longdouble":
        raise MetricError(
            f"metric {path!r} is an array of {array.dtype}, which cannot be recorded: only numbers and bools"
        )
    if array.nbytes > ARRAY_LIMIT:
        raise MetricError(
            f"metric {path!r} is an array of {array.nbytes:,} bytes; among metrics an array has at most {ARRAY_LIMIT:,}: "
            "keep it as an artifact"
        )
    return array.copy() if array.ndim else array.item()


def _refuse_collisions(metrics: dict[str, Any]) -> None:
    names: set[str] = set()
    for name, _ in flatten(metrics):
        if name in names:
            raise MetricError(f"two metrics are both named {name!r}: once nested, once with the '/' in the name")
        names.add(name)


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def explain(metrics: Mapping[str, Any], error: Exception) -> MetricError:
    """Name the metric that the encoder could not take (an integer over 64 bits, a broken string)."""
    for name, value in flatten(metrics):
        for item in value if isinstance(value, list) else [value]:
            try:
                msgspec.msgpack.encode({name: item}, enc_hook=encode_extension)
            except Exception as why:
                return MetricError(f"metric {name!r} cannot be recorded: {_name(item)}: {why}")
    return MetricError(f"metrics cannot be recorded: {error}")


def encode_extension(value: Any) -> msgspec.msgpack.Ext:
    """msgspec's ``enc_hook``: an array becomes a msgpack extension with its exact bytes, a MediaFile one with its fields."""
    if type(value) is MediaFile:
        return msgspec.msgpack.Ext(_MEDIA, msgspec.msgpack.encode(value.asdict(), enc_hook=encode_extension))
    array = _numpy_array(value)
    if array is None:
        raise TypeError(f"a {_name(value)} cannot be recorded")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode([little.dtype.str, array.shape, little.tobytes()]))


def decode_extension(code: int, data: memoryview) -> Any:
    """msgspec's ``ext_hook``: a numpy array where numpy is installed, else a flat list; a MediaFile; all else stays raw."""
    if code == _MEDIA:
        return _media_file(data) or msgspec.msgpack.Ext(code, bytes(data))
    if code != _ARRAY:
        return msgspec.msgpack.Ext(code, bytes(data))
    dtype, shape, raw = msgspec.msgpack.decode(data)
    try:
        import numpy
    except ImportError:
        return [item for (item,) in struct.iter_unpack("<" + _STRUCT_CODES[dtype[1:]], raw)]
    return numpy.frombuffer(raw, dtype=dtype).reshape(shape)


class _MediaFields(msgspec.Struct):
    """What a MediaFile needs to hold; what a newer version holds besides is left aside."""

    kind: str
    path: str
    size: int
    caption: str = ""
    details: dict[str, Any] = {}


def _media_file(data: memoryview) -> MediaFile | None:
    """None for one that is damaged, or that would have a tracker open a file outside of the run's ``media/``."""
    try:
        fields = msgspec.msgpack.decode(data, type=_MediaFields)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    first, *rest = re.split(r"[/\\]", fields.path)
    if first != "media" or not rest or not {"", ".", ".."}.isdisjoint(rest) or "\0" in fields.path:
        return None
    return MediaFile(fields.kind, fields.path, fields.size, fields.caption, fields.details)  # type: ignore[arg-type]


def _numpy_array(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    kind = getattr(numpy, "ndarray", None)  # missing while another thread imports numpy
    return value if kind is not None and isinstance(value, kind) else None


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk nested metrics as pairs of a name joined by ``/`` and its value; empty dicts vanish.

    >>> list(flatten({"loss": 1, "val": {"acc": 2}}))
    [('loss', 1), ('val/acc', 2)]
    """
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _json_hook(value: Any) -> Any:
    if type(value) is MediaFile:
        return value.asdict()
    return value.tolist() if _numpy_array(value) is not None else str(value)


_json = msgspec.json.Encoder(enc_hook=_json_hook)


def strict_json(value: Any, encode: Callable[[Any], bytes] = _json.encode) -> bytes:
    """One value as JSON that every strict parser reads.

    NaN and the infinities, which JSON does not have, are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``;
    bytes are base64; arrays are nested lists; a MediaFile is an object of its fields.
    """
    line = encode(value)
    # msgspec writes the non-finite numbers as null, so only a line with a null in it can hold one
    return encode(_finite(value)) if b"null" in line else line


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if type(value) is MediaFile:
        value = value.asdict()
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if _numpy_array(value) is not None:
        return _finite(value.tolist())
    return value


def strict_metrics(value: Any) -> tuple[Any, list[str]]:
    """Metrics as plain JSON values, and the paths of those that are a string in place of NaN or an infinity.

    A MediaFile is its path, a string: a leaf as it was, and no metrics of its own.
    """
    replaced: list[str] = []

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            replaced.append(path)
            return _finite(value)
        if isinstance(value, bytes):
            return msgspec.to_builtins(value)
        if type(value) is MediaFile:
            return value.path
        if _numpy_array(value) is not None:
            value = value.tolist()
        if isinstance(value, dict):
            return {k: walk(v, f"{path}/{k}") for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, f"{path}/{i}") for i, v in enumerate(value)]
        return value

    return walk(value, ""), replaced


def with_nonfinite(value: Any, replaced: set[str], path: str = "") -> Any:
    """Undo :func:`strict_metrics`."""
    if not replaced:
        return value
    if path in replaced and isinstance(value, str):
        return float(value)
    if isinstance(value, dict):
        return {k: with_nonfinite(v, replaced, f"{path}/{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [with_nonfinite(v, replaced, f"{path}/{i}") for i, v in enumerate(value)]
    return value
