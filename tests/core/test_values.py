"""What can be recorded, what is refused and how, and strict JSON."""

from __future__ import annotations

import datetime
import enum
import json
import math
from collections import OrderedDict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainyard as ty
from trainyard.errors import MetricError
from trainyard.records import Result
from trainyard.values import (
    ARRAY_LIMIT,
    decode_extension,
    encode_extension,
    explain,
    flatten,
    recordable,
    strict_json,
    strict_metrics,
    with_nonfinite,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | NAMES
NESTED = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4))
METRICS = st.dictionaries(NAMES.map(lambda name: name.replace("/", "")), NESTED, max_size=5)


class Level(enum.IntEnum):
    """An integer with a name."""

    HIGH = 3


class Colour(enum.StrEnum):
    """A string with a name."""

    RED = "red"


class OldColour(str, enum.Enum):  # noqa: UP042
    """A string with a name, as it was written before StrEnum."""

    RED = "red"


class Tensor:
    """Has what a torch tensor has, on a device."""

    __module__ = "torch"

    def __init__(self, value, detached=False):
        self.value = np.asarray(value)
        self.ndim = self.value.ndim
        self.detached = detached

    def detach(self):
        return Tensor(self.value, True)

    def cpu(self):
        assert self.detached
        return self.value

    def item(self):
        assert self.detached
        return self.value.item()


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(1.5), 1.5),
        (np.int64(-7), -7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (np.array(3), 3),
        (np.array(False), False),
        (np.str_("word"), "word"),
        (np.bytes_(b"raw"), b"raw"),
        (Level.HIGH, 3),
        (Colour.RED, "red"),
        (OldColour.RED, "red"),
        (Tensor(1.25), 1.25),
        ((1, 2.0, "x"), [1, 2.0, "x"]),
        (OrderedDict(a=(1,)), {"a": [1]}),
        ([np.float32(1), {"b": np.int8(2)}], [1.0, {"b": 2}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_scalars_of_every_library_become_python_values(given, recorded, same):
    """What stands for a number, string or container is recorded as the plain Python one."""
    assert same(recordable({"m": given}), {"m": recorded})


def test_arrays_stay_arrays(same):
    """An array, and a tensor with dimensions, is kept as an array with its type."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert same(recordable({"m": array})["m"], array)
    assert same(recordable({"m": Tensor([1.0, 2.0])})["m"], np.array([1.0, 2.0]))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1, 2}, "set"),
        (object(), "object"),
        (datetime.datetime(2026, 1, 2), "datetime.datetime"),
        (1 + 2j, "complex"),
        (np.complex64(1), "numpy.complex64"),
        (np.datetime64("2026-01-02", "s"), "numpy.datetime64"),
        (np.datetime64("2026-01-02", "ns"), "numpy.datetime64"),
        (np.timedelta64(5, "ns"), "numpy.timedelta64"),
        (lambda: 0, "function"),
        (bytearray(b"x"), "bytearray"),
        (np.array(["a", "b"]), "<U1"),
        (np.array([object()]), "object"),
        (np.array([1j, 2j]), "complex128"),
        (np.zeros(ARRAY_LIMIT + 1, np.uint8), "1,048,577 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("place", ["flat", "nested", "listed"])
def test_what_cannot_be_recorded_is_refused_by_name_and_type(value, named, place):
    """A refusal names the metric, with its whole path, and the type."""
    metrics, name = {
        "flat": ({"good": 1, "bad": value}, "bad"),
        "nested": ({"outer": {"bad": value}}, "outer/bad"),
        "listed": ({"bad": [0, value]}, "bad/1"),
    }[place]
    with pytest.raises(MetricError) as refusal:
        recordable(metrics)
    assert repr(name) in str(refusal.value)
    assert named in str(refusal.value)


def test_an_array_at_the_limit_is_taken():
    """Exactly 1 MiB is still a small array."""
    assert recordable({"m": np.zeros(ARRAY_LIMIT, np.uint8)})["m"].nbytes == ARRAY_LIMIT


@pytest.mark.parametrize(
    ("value", "named"), [(2**64, "int"), (-(2**63) - 1, "int"), ("\ud800", "str"), ([1, 2**64], "int")]
)
def test_what_the_encoder_cannot_take_is_refused_by_name_and_type(value, named, tmp_path):
    """An integer over 64 bits or a broken string is a MetricError that names its metric, and no result."""
    with ty.start_run(storage=tmp_path, experiment="e", trackers=[]) as run:
        with pytest.raises(MetricError, match=f"'outer/bad' cannot be recorded: {named}"):
            run.log({"loss": 1.0, "outer": {"bad": value}})
        run.log({"loss": 2.0})
    assert [result["loss"] for result in ty.open_run(run.path).history()] == [2.0]


def test_a_broken_metric_name_is_refused_as_a_metric_error(tmp_path):
    """A name with a lone surrogate is a MetricError too, and no result."""
    with ty.start_run(storage=tmp_path, experiment="e", trackers=[]) as run:
        with pytest.raises(MetricError):
            run.log({"\ud800": 1.0})
        run.log({"loss": 2.0})
    assert len(ty.open_run(run.path).history()) == 1


@pytest.mark.parametrize(
    "metrics",
    [
        {"a": {"b": 1}, "a/b": 2},
        {"a/b": {"c": 1}, "a": {"b/c": 2}},
        {1: "x", "1": "y"},
        {True: 1, "True": 2},
        {"a": {2: 1, "2": 2}},
        {1.5: 1, "1.5": 2},
    ],
)
def test_two_metrics_of_one_name_are_refused(metrics):
    """Names that are one once they are flattened to strings would overwrite each other."""
    with pytest.raises(MetricError, match="two metrics are both named"):
        recordable(metrics)


def test_number_keys_become_strings():
    """A metric may be named by a number, at every level."""
    assert recordable({1: 1, np.int64(2): {3.5: 2, True: 3}}) == {"1": 1, "2": {"3.5": 2, "True": 3}}


@pytest.mark.parametrize("key", [None, (1, 2), b"x", object()], ids=lambda key: type(key).__name__)
def test_other_keys_are_refused(key):
    """A metric's name is a string or a number."""
    with pytest.raises(MetricError, match="metric name"):
        recordable({"outer": {key: 1}})


def test_a_metric_that_holds_itself_is_refused():
    """A cycle is a MetricError, not a crash."""
    knot: dict = {}
    knot["again"] = knot
    ring: list = []
    ring.append(ring)
    for value in (knot, ring):
        with pytest.raises(MetricError, match="nested deeper"):
            recordable({"m": value})


def test_the_given_dict_is_never_changed():
    """The user's own dict is the same afterwards, and is not shared with the record."""
    inner = {"x": np.float32(1)}
    metrics = {"inner": inner, "t": (1,)}
    out = recordable(metrics)
    out["new"] = out["inner"]["new"] = 1
    assert metrics == {"inner": {"x": np.float32(1)}, "t": (1,)}
    assert type(metrics["inner"]["x"]) is np.float32


@given(METRICS)
@settings(max_examples=150, deadline=None)
def test_plain_metrics_are_recorded_as_they_are(same, metrics):
    """What is plain already comes out equal, and recording it twice changes nothing."""
    once = recordable(metrics)
    assert same(once, metrics)
    assert same(recordable(once), once)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", ">i2", "<u2", ">i4", "u4", "i8", ">u8", "f2", ">f4", "f8"])
def test_arrays_travel_as_exact_little_endian_bytes(dtype):
    """An array comes back with its shape and values; the byte order on disk is always the same."""
    array = np.array([[0, 1], [1, 0]], dtype=dtype).T
    packed = msgspec.msgpack.encode(array, enc_hook=encode_extension)
    again = msgspec.msgpack.decode(packed, ext_hook=decode_extension)
    assert again.dtype == array.dtype.newbyteorder("<")
    assert again.tolist() == array.tolist()


def test_an_unknown_extension_stays_raw():
    """A value from a newer version is kept as bytes rather than refused."""
    packed = msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"new"))
    assert msgspec.msgpack.decode(packed, ext_hook=decode_extension) == msgspec.msgpack.Ext(99, b"new")


def test_explain_falls_back_to_the_encoders_words():
    """Where no single metric is to blame, the encoder's own message is passed on."""
    assert "some reason" in str(explain({"a": 1}, ValueError("some reason")))


@given(METRICS)
@settings(max_examples=100, deadline=None)
def test_flatten_reaches_every_leaf_once(metrics):
    """Flat names are the paths joined by `/`, and no dict is left among the values."""
    pairs = list(flatten(metrics))

    def leaves(value):
        return sum(map(leaves, value.values())) if isinstance(value, dict) else 1

    assert len(pairs) == sum(map(leaves, metrics.values()))
    assert not any(isinstance(value, dict) for _, value in pairs)
    for name, value in pairs:
        if name in metrics and not isinstance(metrics[name], dict):
            assert metrics[name] is value


def _refuse(name):
    raise AssertionError(f"{name} is not strict JSON")


def _as_json(value):
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[repr(value)]
    return value


@given(METRICS)
@settings(max_examples=200, deadline=None)
def test_strict_json_is_read_by_a_strict_parser(same, metrics):
    """Whatever the metrics hold, a parser that knows no NaN reads exactly them, NaN and infinities as words."""
    line = strict_json(metrics)
    assert b"\n" not in line
    assert same(json.loads(line, parse_constant=_refuse), _as_json(metrics))


def test_strict_json_of_arrays_and_bytes():
    """Arrays are nested lists, their NaN is a word, and bytes are base64."""
    line = strict_json({"a": np.array([[1.0, math.nan]]), "b": b"\x00\xff", "c": np.float32([math.inf])})
    expected = {"a": [[1.0, "NaN"]], "b": "AP8=", "c": ["Infinity"]}
    assert json.loads(line, parse_constant=_refuse) == expected


def test_strict_json_of_a_record_keeps_its_nan():
    """NaN is a word inside of records as well, never null."""
    line = strict_json({"result": Result(1, 0.0, 1, {"loss": math.nan})})
    assert json.loads(line)["result"]["metrics"] == {"loss": "NaN"}


@pytest.mark.parametrize("value", ["null", None, [None], {"null": 1.5}])
def test_strict_json_keeps_real_nulls(value):
    """None and the word null stay what they are."""
    assert json.loads(strict_json({"m": value})) == {"m": value}


@given(METRICS)
@settings(max_examples=100, deadline=None)
def test_with_nonfinite_undoes_strict_metrics(same, metrics):
    """Numbers come back as numbers, the non-finite ones too, and the string "NaN" stays a string."""
    metrics["text"] = "NaN"
    plain, replaced = strict_metrics(metrics)
    assert same(with_nonfinite(json.loads(json.dumps(plain, allow_nan=False)), set(replaced)), metrics)
