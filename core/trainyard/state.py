"""The pickle-free form of a dict state: ``state.msgpack`` for the tree, ``state.data`` for the raw buffers.

``state.msgpack`` is one msgpack map ``{format, version, tree, buffers}``. In the tree None, bools, 64-bit integers,
floats, strings and short bytes stand for themselves; everything else is an array that begins with a word:

==============================================  ====================================================
``["dict", [k, v, k, v, ...]]``                 also ``"ordered"`` for an OrderedDict
``["list", [...]]``                             also ``"tuple"``, ``"set"``, ``"frozenset"``
``["int", "0x1f..."]``                          an integer over 64 bits, in hexadecimal
``["complex", re, im]``, ``["bytearray", b]``
``["bytes", buffer]``                           bytes of 64 KiB and more
``["array", dtype, shape, order, buffer]``      a numpy array; ``order`` is ``"C"`` or ``"F"``
``["scalar", dtype, bytes]``                    a numpy scalar
``["tensor", dtype, shape, grad, buffer]``      a torch tensor, restored on the CPU
``["pickle", buffer]``                          a leaf that only cloudpickle could take
==============================================  ====================================================

``buffer`` is an index into ``buffers``, a list of ``[offset, size]`` in ``state.data``, each offset a multiple of 64.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainyard.errors import CheckpointCorrupt, CheckpointError, PickleRefused
from trainyard.files import HashingWriter

__all__ = ["DATA_NAME", "TREE_NAME", "load_state", "save_state"]

TREE_NAME = "state.msgpack"
DATA_NAME = "state.data"
FORMAT = "trainyard-state"
VERSION = 1

_ALIGN = 64
_SMALL = 64 << 10  # bytes objects below this stay in the tree
_PIECE = 16 << 20  # how much of a strided array is copied at a time
_DEPTH_LIMIT = 200
_PLAIN = frozenset({bool, float, str, type(None)})
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_INT64 = range(-(1 << 63), 1 << 64)


class Saved(msgspec.Struct):
    """What :func:`save_state` wrote.

    Attributes:
        files: name, size in bytes and hash of each file.
        pickled: the paths of the leaves that cloudpickle had to take, like ``optimizer/scheduler``.
    """

    files: list[tuple[str, int, str]]
    pickled: list[str]


def save_state(directory: Path, state: dict[Any, Any]) -> Saved:
    """Write a dict state into a directory, durably and hashed.

    Args:
        directory: exists, and holds no state yet.
        state: nested dicts, lists, tuples, sets of plain values, numpy arrays (any dtype, any layout) and torch
            tensors. Any other leaf goes through cloudpickle. Shared references are not kept: each is saved by itself.

    Raises:
        CheckpointError: nested too deeply (perhaps in itself), or a leaf that cloudpickle cannot take either.
    """
    writer = HashingWriter(directory / DATA_NAME)
    encoder = _Encoder(writer)
    try:
        tree = encoder.node(state, "", 0)
        head = msgspec.msgpack.encode({"format": FORMAT, "version": VERSION, "tree": tree, "buffers": encoder.buffers})
        data_hash = writer.close()
    except BaseException:
        writer.abort()
        raise
    tree_writer = HashingWriter(directory / TREE_NAME)
    try:
        tree_writer.write(head)
        tree_hash = tree_writer.close()
    finally:
        tree_writer.abort()
    return Saved([(DATA_NAME, writer.size, data_hash), (TREE_NAME, len(head), tree_hash)], encoder.pickled)


class _Encoder:
    def __init__(self, writer: HashingWriter) -> None:
        self.writer = writer
        self.buffers: list[tuple[int, int]] = []
        self.pickled: list[str] = []

    def node(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value if kind is not str else self._string(value, path)
        if kind is int:
            return value if value in _INT64 else ["int", hex(value)]
        if depth > _DEPTH_LIMIT:
            raise CheckpointError(f"state {path!r} is nested deeper than {_DEPTH_LIMIT} levels; does it hold itself?")
        if kind is dict or kind is OrderedDict:
            pairs: list[Any] = []
            for key, item in value.items():
                where = f"{path}/{key}" if path else str(key)
                pairs += (self.node(key, where, depth + 1), self.node(item, where, depth + 1))
            return ["dict" if kind is dict else "ordered", pairs]
        if kind in (list, tuple, set, frozenset):
            items = [self.node(item, f"{path}/{i}" if path else str(i), depth + 1) for i, item in enumerate(value)]
            return [kind.__name__, items]
        if kind is bytes:
            return value if len(value) < _SMALL else ["bytes", self._buffer([value])]
        if kind is bytearray:
            return ["bytearray", bytes(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        return self._array(value) or self._tensor(value) or self._pickle(value, path)

    def _string(self, value: str, path: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:  # lone surrogates: a file name, say
            return self._pickle(value, path)
        return value

    def _array(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None or not (
            hasattr(numpy, "memmap") and hasattr(numpy, "generic")
        ):  # another thread may be importing it
            return None
        if isinstance(value, numpy.generic):
            if value.dtype.hasobject:
                return None
            return ["scalar", _describe_dtype(value.dtype), value.tobytes()]
        if type(value) not in (numpy.ndarray, numpy.memmap) or value.dtype.hasobject:
            return None
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        buffer = self._buffer(_pieces(value.T if order == "F" else value))
        return ["array", _describe_dtype(value.dtype), list(value.shape), order, buffer]

    def _tensor(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        kind = getattr(torch, "Tensor", None)  # missing while another thread imports torch
        if torch is None or type(value) is not kind or value.layout is not torch.strided or value.is_quantized:
            return None
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), value.requires_grad, self._buffer([flat])]

    def _pickle(self, value: Any, path: str) -> Any:
        import cloudpickle

        try:
            data = cloudpickle.dumps(value)
        except Exception as error:
            raise CheckpointError(f"state {path!r}, a {type(value).__qualname__}, cannot be saved: {error}") from error
        self.pickled.append(path)
        return ["pickle", self._buffer([data])]

    def _buffer(self, pieces: Any) -> int:
        padding = -self.writer.size % _ALIGN
        if padding:
            self.writer.write(bytes(padding))
        start = self.writer.size
        for piece in pieces:
            self.writer.write(piece)
        self.buffers.append((start, self.writer.size - start))
        return len(self.buffers) - 1


def _pieces(array: Any) -> Iterator[Any]:
    """The bytes of an array in C order, without a copy where it lies so, else a few MiB at a time."""
    import numpy

    if not array.size:
        return
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(numpy.uint8)
        return
    if array.nbytes <= _PIECE or array.ndim == 0:
        yield numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        return
    for part in array:
        yield from _pieces(part)


def _describe_dtype(dtype: Any) -> Any:
    from numpy.lib import format as npy

    if dtype.kind == "V" and dtype.names is None and dtype.name.isidentifier() and not dtype.name.startswith("void"):
        return dtype.name  # bfloat16 and its like, which ml_dtypes registers
    return npy.dtype_to_descr(dtype)


def _dtype(described: Any) -> Any:
    import numpy
    from numpy.lib import format as npy

    if isinstance(described, str) and described.isidentifier() and described not in numpy.sctypeDict:
        try:
            import ml_dtypes
        except ImportError:
            raise CheckpointError(f"the state has arrays of {described}: pip install ml_dtypes") from None
        described = getattr(ml_dtypes, described)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # a spelling that we never write
        try:
            dtype = npy.descr_to_dtype(_tuples(described)) if isinstance(described, list) else numpy.dtype(described)
        except DeprecationWarning as error:
            raise CheckpointCorrupt(f"the state names a dtype {described!r}, which is none: {error}") from None
    if dtype.hasobject:
        raise CheckpointCorrupt(f"the state names the dtype {dtype}, which holds objects")
    return dtype


def _tuples(fields: Any) -> Any:
    """A numpy type description as it was before msgpack made lists of its tuples."""
    out = []
    for field in fields:
        name, kind, *shape = field
        name = tuple(name) if isinstance(name, list) else name
        out.append((name, _tuples(kind) if isinstance(kind, list) else kind, *(tuple(s) for s in shape)))
    return out


def load_state(directory: Path, *, only: Collection[str] | None = None, allow_pickle: bool = False) -> Any:
    """Read what :func:`save_state` wrote. Arrays are mapped into memory: private, writable, read at first touch.

    Args:
        directory: holds ``state.msgpack`` and ``state.data``; verify them first, this does not.
        only: paths of the leaves or branches to load, like ``{"model", "optimizer/step"}``; dicts hold nothing else.
        allow_pickle: run the code that pickled leaves hold. Only for checkpoints that you trust.

    Raises:
        CheckpointCorrupt: not a state, or a damaged one.
        CheckpointError: written by a newer trainyard, or `only` names what is not there.
        PickleRefused: a leaf that is wanted is pickled, and `allow_pickle` is off.
    """
    try:
        head = msgspec.msgpack.decode((directory / TREE_NAME).read_bytes(), strict=False)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise CheckpointCorrupt(f"{directory / TREE_NAME} is not a trainyard state")
        if head["version"] != VERSION:
            raise CheckpointError(
                f"{directory / TREE_NAME} has the state format {head['version']}, this trainyard reads {VERSION}: upgrade trainyard"
            )
        with open(directory / DATA_NAME, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # private and writable: a change to an array never reaches the file
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)) if size else memoryview(bytearray())
        decoder = _Decoder(data, head["buffers"], allow_pickle, None if only is None else set(only))
        state = decoder.node(head["tree"], "", 0, only is None)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{error.filename} is missing") from error
    except _SIGNS_OF_DAMAGE as error:
        raise CheckpointCorrupt(f"the state in {directory} is damaged: {error}") from error
    if decoder.only:
        raise CheckpointError(f"the state in {directory} has no {', '.join(sorted(map(repr, decoder.only)))}")
    return state


_SIGNS_OF_DAMAGE = (
    msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError,
    RecursionError, SyntaxError,
)  # fmt: skip


def _of(kind: type[Any], value: Any) -> Any:
    """The value, if it is of that type: what a damaged tree hands to a constructor may ask for much more than its size."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


class _Decoder:
    def __init__(self, data: memoryview, buffers: list[Any], allow_pickle: bool, only: set[str] | None) -> None:
        self.data = data
        self.buffers = buffers
        self.allow_pickle = allow_pickle
        self.only = only  # what is still to be found

    def node(self, node: Any, path: str, depth: int, wanted: bool) -> Any:
        if self.only is not None and path in self.only:
            self.only.discard(path)
            wanted = True
        if not isinstance(node, list):
            return node
        if depth > _DEPTH_LIMIT + 1:
            raise CheckpointCorrupt(f"state {path!r} is nested deeper than {_DEPTH_LIMIT} levels")
        tag, *rest = node
        if tag in ("dict", "ordered"):
            return self._dict(rest[0], path, depth, wanted, dict if tag == "dict" else OrderedDict)
        if tag in _CONTAINERS:
            (items,) = rest
            at = f"{path}/" if path else ""
            return _CONTAINERS[tag](self.node(item, f"{at}{i}", depth + 1, wanted) for i, item in enumerate(items))
        if not wanted:
            return None
        if tag == "pickle":
            return self._unpickle(rest[0], path)
        return self._leaf(tag, *rest)

    def _leaf(self, tag: str, *rest: Any) -> Any:
        # no table of bound methods: that would be a cycle, and keep the file mapped until the garbage collector comes by
        match tag, rest:
            case "int", (digits,):
                return int(_of(str, digits), 16)
            case "complex", (real, imaginary):
                return complex(real, imaginary)
            case "bytearray", (data,):
                return bytearray(_of(bytes, data))
            case "bytes", (buffer,):
                return bytes(self._buffer(buffer))
            case "array", (described, shape, order, buffer):
                return self._array(described, shape, order, buffer)
            case "scalar", (described, raw):
                return self._scalar(described, raw)
            case "tensor", (dtype, shape, grad, buffer):
                return self._tensor(dtype, shape, grad, buffer)
        raise ValueError(f"unknown node {tag!r}")

    def _dict(
        self, pairs: list[Any], path: str, depth: int, wanted: bool, kind: type[dict[Any, Any]]
    ) -> dict[Any, Any]:
        out = kind()
        for i in range(0, len(pairs), 2):
            key = self.node(pairs[i], path, depth + 1, True)
            where = f"{path}/{key}" if path else str(key)
            if wanted or self._on_the_way(where):
                out[key] = self.node(pairs[i + 1], where, depth + 1, wanted)
        return out

    def _on_the_way(self, path: str) -> bool:
        return self.only is not None and any(name == path or name.startswith(path + "/") for name in self.only)

    def _buffer(self, index: int) -> memoryview:
        offset, size = self.buffers[index]
        if index < 0 or offset < 0 or size < 0 or offset + size > len(self.data):
            raise CheckpointCorrupt(f"buffer {index} reaches beyond the end of {DATA_NAME}")
        return self.data[offset : offset + size]

    def _array(self, described: Any, shape: list[int], order: str, buffer: int) -> Any:
        import numpy

        raw, dtype = self._buffer(buffer), _dtype(described)
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise CheckpointCorrupt(f"an array of shape {shape} and {dtype} does not fit its {len(raw)} bytes")
        if not raw:  # numpy.frombuffer takes no empty buffer
            return numpy.empty(shape, dtype=dtype)
        flat = numpy.frombuffer(raw, dtype=dtype)
        return flat.reshape(shape, order="F" if order == "F" else "C")

    def _scalar(self, described: Any, raw: bytes) -> Any:
        import numpy

        dtype = _dtype(described)
        return numpy.frombuffer(raw, dtype=dtype)[0] if dtype.itemsize else numpy.zeros((), dtype)[()]

    def _tensor(self, dtype: str, shape: list[int], grad: bool, buffer: int) -> Any:
        try:
            import torch
        except ImportError:
            raise CheckpointError(
                "the state has torch tensors, and torch is not installed: pip install torch"
            ) from None
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype):
            raise CheckpointCorrupt(f"{dtype!r} is no type of tensor")
        raw = self._buffer(buffer)
        tensor = (
            torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)
            if raw
            else torch.empty(shape, dtype=kind)
        )
        return tensor.requires_grad_(grad)

    def _unpickle(self, buffer: int, path: str) -> Any:
        if not self.allow_pickle:
            raise PickleRefused(
                f"state {path!r} is pickled, and opening it runs code from the checkpoint; if you trust where it comes "
                "from, say allow_pickle=True"
            )
        import pickle

        return pickle.loads(self._buffer(buffer))
