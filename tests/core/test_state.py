"""The pickle-free state format: exact round trips, refusals, and damage."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections import OrderedDict, defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainyard.errors import CheckpointCorrupt, CheckpointError, PickleRefused
from trainyard.files import hash_file
from trainyard.state import DATA_NAME, TREE_NAME, load_state, save_state

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
DTYPES = (
    hnp.scalar_dtypes()
    | hnp.unicode_string_dtypes()
    | hnp.byte_string_dtypes()
    | hnp.array_dtypes(hnp.scalar_dtypes(), max_size=3, allow_subarrays=True)
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
LAYOUTS = {
    "plain": lambda array: array,
    "transposed": lambda array: array.T,
    "fortran": np.asfortranarray,
    "strided": lambda array: array[::2] if array.ndim else array,
    "backwards": lambda array: array[::-1] if array.ndim else array,
    "columns": lambda array: array[..., ::2] if array.ndim else array,
}
KEYS = TEXT | st.integers() | st.booleans() | st.none() | st.tuples(TEXT, st.integers())
HASHABLE = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | TEXT | st.binary()
LEAVES = HASHABLE | st.floats() | st.complex_numbers() | st.binary().map(bytearray) | ARRAYS.filter(lambda a: a.ndim)
TREES = st.recursive(
    LEAVES | st.frozensets(HASHABLE, max_size=3) | st.sets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)
STATES = st.dictionaries(KEYS, TREES, max_size=4)


class Point:
    """A leaf that only pickle can take."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, Point) and self.x == other.x

    __hash__ = None


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def round_trip(state, **options):
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder), state)
        return load_state(Path(folder), **options)


def write_tree(folder, tree, buffers=((0, 8),), data=bytes(64), **head):
    content = {"format": "trainyard-state", "version": 1, "tree": tree, "buffers": list(buffers), **head}
    Path(folder, TREE_NAME).write_bytes(msgspec.msgpack.encode(content))
    Path(folder, DATA_NAME).write_bytes(data)


@given(STATES)
@settings(max_examples=150, deadline=None)
def test_nested_states_come_back_exactly(same, state):
    """Every container, key and value comes back with its type and its bits, and nothing is pickled."""
    with tempfile.TemporaryDirectory() as folder:
        saved = save_state(Path(folder), state)
        loaded = load_state(Path(folder))
    assert saved.pickled == []
    assert same(loaded, state)


@given(ARRAYS, st.sampled_from(sorted(LAYOUTS)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_arrays_of_any_type_and_layout_come_back_exactly(same, array, layout, writable):
    """Type, shape and bytes of an array survive, however it lies in memory."""
    array = np.asarray(LAYOUTS[layout](array))
    array.flags.writeable = writable and array.flags.writeable
    loaded = round_trip({"a": array})["a"]
    assert same(loaded, array)
    assert loaded.flags.writeable


@given(DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, ())))
@settings(max_examples=100, deadline=None)
def test_numpy_scalars_come_back_exactly(same, array):
    """A numpy scalar stays a numpy scalar of its type."""
    assert same(round_trip({"s": array[()]})["s"], array[()])


@pytest.mark.parametrize("scalar", [np.str_(""), np.bytes_(b"")], ids=["str_", "bytes_"])
def test_empty_numpy_strings_come_back(same, scalar):
    """The empty string is a value like any other."""
    assert same(round_trip({"s": scalar})["s"], scalar)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2026-01-02", "NaT"], "datetime64[ns]"),
        np.array([1, -1], "timedelta64[3h]"),
        np.array([(1, [2.0, 3.0], (4,))], [("a", "i1"), ("b", "<f4", (2,)), ("c", [("d", ">u2")])]),
        np.array([(1, 2.0)], [(("title", "a"), "i1"), ("b", "f8")]),
        np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        np.zeros((2, 0, 3), "f2"),
        np.array([b"ab", b"c"], "V2"),
        np.array([1.5, 2.5], np.longdouble),
        np.array(True),
        np.zeros((0,), [("a", "i4")]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_unusual_arrays_come_back_exactly(same, array):
    """Dates, records with inner arrays, titles or padding, empty and 0-d arrays keep type and bytes."""
    assert same(round_trip({"a": array})["a"], array)


def test_fortran_order_is_kept():
    """An array that lay column by column does so again."""
    assert round_trip({"a": np.asfortranarray(np.ones((3, 4)))})["a"].flags.f_contiguous


def test_large_strided_arrays_come_back(same):
    """An array that is copied piece by piece comes back whole."""
    array = np.arange(6_000_000, dtype=np.int64).reshape(3, 1000, 2000)[:, :, ::2]
    assert same(round_trip({"a": array})["a"], array)


def test_memory_maps_become_arrays(tmp_path, same):
    """A mapped file is saved as the array that it stands for."""
    mapped = np.memmap(tmp_path / "m", np.float32, "w+", shape=(4, 2))
    mapped[:] = 7
    assert same(round_trip({"a": mapped})["a"], np.full((4, 2), 7, np.float32))


@pytest.mark.parametrize("bits", [63, 64, 65, 1000, 100_000])
def test_huge_integers_come_back(bits):
    """An integer of any size is kept."""
    for number in (1 << bits, -(1 << bits), (1 << bits) - 1):
        assert round_trip({"n": number})["n"] == number


@pytest.mark.parametrize("size", [0, (64 << 10) - 1, 64 << 10, 1 << 20])
def test_bytes_of_any_size_come_back(same, size):
    """Bytes stay bytes and bytearrays bytearrays, in the tree or beside it."""
    state = {"b": b"\xff" * size, "a": bytearray(b"\x01" * size)}
    assert same(round_trip(state), state)


def test_loaded_arrays_are_private_and_writable(tmp_path):
    """Writing into a loaded array changes neither the file nor what is loaded next."""
    save_state(tmp_path, {"a": np.arange(1000), "e": np.empty((0, 2)), "t": np.arange(6).reshape(2, 3).T})
    before = hash_file(tmp_path / DATA_NAME)
    loaded = load_state(tmp_path)
    for array in loaded.values():
        array[...] = -1
    assert hash_file(tmp_path / DATA_NAME) == before
    assert load_state(tmp_path)["a"].tolist() == list(range(1000))


def test_what_is_said_of_the_files_is_true(tmp_path):
    """The sizes and hashes that are returned are those of the files, and each buffer is aligned."""
    saved = save_state(tmp_path, {"a": np.ones(3), "b": np.ones((), "i1"), "c": b"x" * 70_000})
    assert sorted(os.listdir(tmp_path)) == sorted(name for name, _, _ in saved.files)
    assert all(hash_file(tmp_path / name) == (size, digest) for name, size, digest in saved.files)
    buffers = msgspec.msgpack.decode((tmp_path / TREE_NAME).read_bytes())["buffers"]
    assert len(buffers) == 3
    assert all(offset % 64 == 0 for offset, _ in buffers)


def test_a_state_is_never_written_over_another(tmp_path):
    """A directory that holds a state is refused, and the state stays."""
    save_state(tmp_path, {"a": 1})
    with pytest.raises(FileExistsError):
        save_state(tmp_path, {"a": 2})
    assert load_state(tmp_path) == {"a": 1}


def test_pickled_leaves_are_named_and_refused(tmp_path):
    """Leaves that need pickle are listed by path; they load only if allowed, and the others without."""
    state = {
        "model": {"w": np.ones(2)},
        "optimizer": {"scheduler": Point(1), "steps": [1, Point(2)]},
        "count": defaultdict(int, a=1),
    }
    saved = save_state(tmp_path, state)
    assert saved.pickled == ["optimizer/scheduler", "optimizer/steps/1", "count"]
    with pytest.raises(PickleRefused, match=r"'optimizer/scheduler'.*allow_pickle=True"):
        load_state(tmp_path)
    with pytest.raises(PickleRefused):
        load_state(tmp_path, only=["optimizer/scheduler"])
    assert load_state(tmp_path, only=["model", "optimizer/steps/0"])["model"]["w"].tolist() == [1, 1]
    loaded = load_state(tmp_path, allow_pickle=True)
    assert loaded["optimizer"] == state["optimizer"]
    assert loaded["count"] == state["count"]
    assert type(loaded["count"]) is defaultdict


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([Point(1), None]),
        np.ma.masked_array([1, 2], [True, False]),
        np.array(["a", "längere"], dtype=np.dtypes.StringDType()),
        "\ud800",
        range(3),
        type("Word", (str,), {})("w"),
    ],
    ids=["objects", "masked", "strings", "surrogate", "range", "subclass"],
)
def test_what_has_no_plain_form_goes_through_pickle(leaf):
    """Object arrays, masked arrays, broken strings and subclasses are pickled rather than changed."""
    loaded = round_trip({"leaf": leaf}, allow_pickle=True)["leaf"]
    assert str(type(loaded)) == str(type(leaf))
    assert repr(loaded) == repr(leaf) or list(loaded) == list(leaf)


def test_only_loads_branches_and_nothing_else(tmp_path):
    """`only` names leaves or branches; the dicts hold nothing else, and an unknown name is an error."""
    save_state(tmp_path, {"model": {"a": 1, "b": 2}, "optimizer": {"step": 3, "lr": 4}, 5: {"x": 6}})
    assert load_state(tmp_path, only=["model", "optimizer/step"]) == {
        "model": {"a": 1, "b": 2},
        "optimizer": {"step": 3},
    }
    assert load_state(tmp_path, only=["5/x"]) == {5: {"x": 6}}
    with pytest.raises(CheckpointError, match="has no 'model/c', 'nothing'"):
        load_state(tmp_path, only=["model/c", "nothing", "model/a"])


def test_a_leaf_that_nothing_can_take_is_named(tmp_path):
    """What even pickle refuses is a CheckpointError with its path and type."""
    with pytest.raises(CheckpointError, match=r"'deep/lock', a lock, cannot be saved"):
        save_state(tmp_path, {"deep": {"lock": threading.Lock()}})


def test_a_state_that_holds_itself_is_refused(tmp_path):
    """A cycle is a CheckpointError, not a crash."""
    knot: dict = {}
    knot["again"] = [knot]
    with pytest.raises(CheckpointError, match="does it hold itself"):
        save_state(tmp_path, knot)


def test_deep_states_come_back():
    """Nesting up to the limit that save allows can be loaded."""
    state: dict = {}
    for _ in range(200):
        state = {"d": state}
    assert round_trip(state) == state


def test_a_newer_format_says_to_upgrade(tmp_path):
    """A state of a later version is a CheckpointError with the mend, and not called damaged."""
    write_tree(tmp_path, ["dict", []], version=2)
    with pytest.raises(CheckpointError, match="upgrade trainyard") as refusal:
        load_state(tmp_path)
    assert not isinstance(refusal.value, CheckpointCorrupt)


@pytest.mark.parametrize("name", [TREE_NAME, DATA_NAME])
def test_a_missing_file_is_named(tmp_path, name):
    """Half a state is damage, and the message names the missing half."""
    save_state(tmp_path, {"a": np.ones(2)})
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointCorrupt, match=f"{name} is missing"):
        load_state(tmp_path)


def test_a_tensor_without_torch_says_what_is_missing(tmp_path, monkeypatch):
    """A state with tensors, where there is no torch, is a CheckpointError that names torch; the rest loads."""
    monkeypatch.setitem(sys.modules, "torch", None)
    write_tree(tmp_path, ["dict", ["t", ["tensor", "float32", [2], False, 0], "n", 1]])
    assert load_state(tmp_path, only=["n"]) == {"n": 1}
    with pytest.raises(CheckpointError, match="torch"):
        load_state(tmp_path)


@pytest.mark.parametrize(
    "node",
    [
        ["int", "many"],
        ["int", float("inf")],
        ["int", float("nan")],
        ["bytearray", 1 << 62],
        ["bytearray", "text"],
        ["bytearray", "text", "no such encoding"],
        ["bytes", 7],
        ["bytes", -1],
        ["pickled", 0],
        ["dict", ["key without a value"]],
        ["dict", [["dict", []], 1]],
        ["set", [["list", []]]],
        ["list"],
        [["list"], []],
        [],
        ["complex", "x", "y"],
        ["scalar", "<f8", b"short"],
        ["scalar", "O", bytes(8)],
        ["scalar", "V0", b""],
        ["array", "O", [1], "C", 0],
        ["array", [["f", "O"]], [1], "C", 0],
        ["array", "<f8", [3], "C", 0],
        ["array", "<f8", [1 << 40, 1 << 40], "C", 1],
        ["array", "<f8", [1 << 52], "C", 1],
        ["array", "<f8", [-1], "C", 1],
        ["array", "(2,", [1], "C", 0],
        ["array", "no such type", [1], "C", 0],
        ["array", "nosuchtype", [1], "C", 0],
        ["array", [["f", "(2,"]], [1], "C", 0],
        ["array", [[]], [1], "C", 0],
        ["array", 5, [1], "C", 0],
        ["array", "<f8", "1", "C", 0],
        ["array", "<f8", [1], "C", 0.5],
        ["array", "<f8", [1], "C", 2],
        ["array", "<f8", [1], "C", 3],
    ],
    ids=repr,
)
def test_a_nonsense_node_is_damage(tmp_path, node):
    """Each word with arguments that make no sense is CheckpointCorrupt, never another exception."""
    write_tree(tmp_path, ["dict", ["k", node]], buffers=[[0, 8], [0, 0], [60, 8], ["a", None]])
    with pytest.raises(CheckpointError):
        load_state(tmp_path)


WORDS = st.sampled_from([
    "dict", "ordered", "list", "tuple", "set", "frozenset", "int", "complex", "bytearray", "bytes", "array",
    "scalar", "pickle", "<f8", "|V4", "<U0", "f4,i2", "O", "<M8[ns]", "C", "F", "bfloat16", "a", "1",
])  # fmt: skip
# nothing between: an allocation either fits or fails
NUMBERS = st.integers(-2, 12) | st.sampled_from([1 << 52, 1 << 62, -(1 << 62), 2**64 - 1])
NODES = st.recursive(
    WORDS | NUMBERS | st.none() | st.booleans() | st.floats() | st.binary(max_size=9) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=5) | st.tuples(WORDS, inner, inner).map(list) | st.tuples(WORDS, inner).map(list)
    ),
    max_leaves=15,
)


@given(NODES, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_tree_loads_or_is_damage(tree, buffers):
    """A tree of arbitrary words and values either means something or is refused as damaged."""
    with tempfile.TemporaryDirectory() as folder:
        write_tree(folder, tree, buffers)
        with contextlib.suppress(CheckpointError):
            load_state(Path(folder))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_damage_is_found_or_harmless(data):
    """Whatever happens to the bytes of the tree, loading gives a value or a CheckpointError and never runs code."""
    with tempfile.TemporaryDirectory() as folder:
        trap = Path(folder, "trapped")
        state = {
            "a": np.arange(3.0),
            "s": np.float32(2),
            "r": np.zeros(2, [("x", "i1"), ("y", "f4")]),
            "big": 1 << 70,
            "t": (1, {2}, bytearray(b"b"), 1j, b"c"),
            "trap": Trap(trap),
        }
        save_state(Path(folder), state)
        path = Path(folder, TREE_NAME)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(content)))
            end = min(len(content), start + data.draw(st.integers(0, 4)))
            content[start:end] = data.draw(st.binary(max_size=4))
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            load_state(Path(folder))
        assert not trap.exists()
