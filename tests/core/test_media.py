"""Media values: what can be one, the file it becomes, and that a reference never dangles."""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import wave
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import PIL.Image
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from trainables import python

import trainyard as ty
from trainyard import media
from trainyard.errors import JournalError, MetricError
from trainyard.values import decode_extension, encode_extension, recordable, strict_json

UNITS = st.floats(0, 1, width=32)


class Tensor:
    """Has what a torch tensor has: a type of its own, on a device, with a gradient."""

    def __init__(self, value, kind="torch.float32", detached=False):
        self.value, self.dtype, self.detached = np.asarray(value), kind, detached
        self.shape = self.value.shape

    def detach(self):
        return Tensor(self.value, self.dtype, True)

    def cpu(self):
        assert self.detached
        return self

    def float(self):
        return Tensor(self.value.astype(np.float32), "torch.float32", True)

    def __array__(self, dtype=None, copy=None):
        assert self.detached
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.value


@pytest.fixture
def run(tmp_path):
    """A run that is being written."""
    with ty.start_run(storage=tmp_path, experiment="e", trackers=[]) as run:
        yield run


@pytest.fixture
def keep(run):
    """Records one value in the run, and gives back what its journal has of it, and the file."""

    def keep(value, name="m"):
        run.log({name: value})
        file = ty.open_run(run.path).history()[-1].metrics[name]
        path = Path(run.path, file.path)
        assert file.size == path.stat().st_size
        return file, path

    return keep


def stored(value, folder):
    """One value as a file, without a run."""
    return Path(folder, media.store(value, folder, "m", 1).path)


def files(run_or_path):
    """All files and directories of a run's media, hidden ones too."""
    return sorted(Path(getattr(run_or_path, "path", run_or_path), "media").rglob("*"))


def pixels(path):
    with PIL.Image.open(path) as picture:
        return np.asarray(picture)


def samples(path):
    with wave.open(str(path), "rb") as file:
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return data, file.getframerate()


# -- images ------------------------------------------------------------------------------------------------------

RGB = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
GREY = RGB[..., 0]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (RGB, RGB),
        (GREY, GREY),
        (RGB[..., :1], GREY),
        (np.dstack([RGB, GREY]), np.dstack([RGB, GREY])),
        (RGB[::-1, ::2], RGB[::-1, ::2]),
        (RGB.transpose(2, 0, 1), RGB),
        (GREY[None], GREY),
        (GREY > 9, (GREY > 9) * np.uint8(255)),
        (RGB / 255, RGB),
        ((RGB / 255).astype(np.float32), RGB),
        ((RGB / 255).astype(">f8"), RGB),
        (np.float16([[0, 0.5, 1]]), np.uint8([[0, 128, 255]])),
        (np.array([[-1e300, 1e300, math.nan, math.inf, 0.5]]), np.uint8([[0, 255, 0, 255, 128]])),
        (Tensor(RGB / 255, "torch.float64"), RGB),
        (Tensor(RGB.transpose(2, 0, 1), "torch.uint8"), RGB),
        (Tensor(np.float32([[0, 1]]), "torch.bfloat16"), np.uint8([[0, 255]])),
    ],
)
def test_an_image_of_an_array_has_exactly_its_pixels(data, expected, keep):
    """Every type, layout and range of numbers that is a picture comes back as that picture."""
    file, path = keep(ty.Image(data, "a cat"))
    assert (file.kind, file.caption, path.suffix) == ("image", "a cat", ".png")
    assert file.details == {"width": expected.shape[1], "height": expected.shape[0]}
    assert pixels(path).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"]
)
def test_an_image_of_every_mode_of_pillow(mode, tmp_path):
    """What a PNG cannot hold is converted to what it can."""
    with PIL.Image.open(stored(ty.Image(PIL.Image.new(mode, (3, 2))), tmp_path)) as picture:
        assert picture.size == (3, 2)


def test_a_deep_pillow_image_keeps_its_depth(tmp_path):
    """Sixteen bits a pixel stay sixteen."""
    deep = np.array([[0, 300, 65535]], np.uint16)
    assert pixels(stored(ty.Image(PIL.Image.fromarray(deep)), tmp_path)).tolist() == deep.tolist()


@pytest.mark.parametrize(("form", "extension"), [("PNG", "png"), ("JPEG", "jpg"), ("GIF", "gif"), ("WEBP", "webp")])
def test_an_image_file_is_copied(form, extension, tmp_path, keep):
    """The user's file is stored as it is, named by what it holds, and may be overwritten afterwards."""
    source = tmp_path / "plot.dat"
    PIL.Image.fromarray(RGB).save(source, form)
    before = source.read_bytes()
    file, path = keep(ty.Image(source))
    source.write_bytes(b"")
    assert path.read_bytes() == before
    assert (path.suffix, file.details) == (f".{extension}", {"width": 6, "height": 5})


@given(
    st.one_of(
        arrays.arrays(np.uint8, arrays.array_shapes(min_dims=2, max_dims=2, max_side=9)),
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([3, 4])).flatmap(
            lambda shape: arrays.arrays(np.uint8, shape)
        ),
    )
)
@settings(max_examples=60, deadline=None)
def test_any_uint8_image_round_trips(array):
    """Every byte of every pixel."""
    content = ty.Image(array).encode().content
    assert pixels(BytesIO(content)).tolist() == array.tolist()


@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 8), st.integers(1, 8)), elements=UNITS))
@settings(max_examples=60, deadline=None)
def test_any_float_image_is_rounded_to_the_nearest(array):
    """A float is at most half of a 255th away."""
    again = pixels(BytesIO(ty.Image(array).encode().content))
    assert np.abs(again / 255 - array).max() <= 0.5 / 255 + 1e-6


def test_floats_that_are_bytes_are_told_of_once(run, caplog):
    """0 to 255 in floats is a common mistake: the picture is all white, and that is said, but only once."""
    for _ in range(3):
        run.log({"m": [ty.Image(RGB.astype(float)), ty.Image(RGB.astype(float))]})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "'m/0'" in told[0]
    assert "0 to 255" in told[0]


# -- figures, texts, tables --------------------------------------------------------------------------------------


@pytest.fixture
def pyplot():
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_figure_is_a_picture_of_its_own_size(pyplot, keep):
    """A figure, or its axes, becomes a PNG; it stays open unless that is asked for."""
    figure, axes = pyplot.subplots(figsize=(3, 2), dpi=50)
    axes.plot([1, 2, 4])
    first = keep(ty.Figure(figure, "curve"))
    assert pyplot.get_fignums()
    second = keep(ty.Figure(axes, close=True))
    assert not pyplot.get_fignums()
    for file, path in (first, second):
        assert (file.kind, file.details) == ("image", {"width": 150, "height": 100})
        assert pixels(path).shape == (100, 150, 4)
    assert first[1].read_bytes() == second[1].read_bytes()


@pytest.mark.parametrize("text", ["", "plain", "ü 日本 🦊\r\nsecond line\0"])
def test_a_text_is_its_utf8(text, keep):
    """Line ends and all."""
    file, path = keep(ty.Text(text))
    assert (file.kind, path.suffix, path.read_bytes().decode()) == ("text", ".txt", text)


def test_a_table_of_rows(keep):
    """Cells become strict JSON: library scalars numbers, NaN a word, what else there is its own words."""
    rows = [[1, np.float32(0.5), "x"], (None, math.nan, Path("a")), np.array([1, 2, 3])]
    file, path = keep(ty.Table(["n", "ü", 3], rows, "some rows"))
    assert (file.kind, file.details, file.caption) == ("table", {"rows": 3, "columns": 3}, "some rows")
    expected = [[1, 0.5, "x"], [None, "NaN", "a"], [1, 2, 3]]
    assert json.loads(path.read_bytes()) == {"columns": ["n", "ü", "3"], "data": expected}


def test_a_table_of_a_dataframe(keep):
    """Its columns and rows, without the index; pandas' words for nothing are null."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"a": [1, 2], "b": [0.5, math.inf], "when": [pandas.Timestamp("2026-01-02"), pandas.NaT]}, index=["x", "y"]
    )
    _, path = keep(ty.Table(frame))
    expected = [[1, 0.5, "2026-01-02 00:00:00"], [2, "Infinity", None]]
    assert json.loads(path.read_bytes()) == {"columns": ["a", "b", "when"], "data": expected}


# -- histograms --------------------------------------------------------------------------------------------------


def test_a_histogram_of_values(keep):
    """Counts, edges and moments; what is not finite is left out and counted."""
    file, path = keep(ty.Histogram([1.0, 2.0, 2.0, 5.0, math.nan, math.inf], bins=4))
    assert (file.kind, file.details) == ("histogram", {"bins": 4})
    assert json.loads(path.read_bytes()) == {
        "counts": [1, 2, 0, 1], "edges": [1, 2, 3, 4, 5], "min": 1, "max": 5, "num": 4, "sum": 10, "sum_squares": 34,
        "nonfinite": 2,
    }  # fmt: skip


def test_a_histogram_of_counts(keep):
    """Somebody else's bins, with the moments of their middles."""
    _, path = keep(ty.Histogram(counts=np.array([0, 2, 1.5]), edges=[0, 1, 3, 5]))
    assert json.loads(path.read_bytes()) == {
        "counts": [0, 2, 1.5], "edges": [0, 1, 3, 5], "min": 1, "max": 5, "num": 3.5, "sum": 10, "sum_squares": 32,
        "nonfinite": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        [], [math.nan], [3.0], [1.0, 1.0 + 2**-52], [0.0, 5e-324], [1e20, 1e20], [-1.7e308, 1.7e308], [1e308] * 9,
        [sys.float_info.max, 1.797693e308], [-sys.float_info.max] * 2,
        np.array([True, False]), np.arange(6, dtype=np.int8).reshape(2, 3), np.float16([1, 2]), Tensor([1.0, 2.0]),
        Tensor(np.float32([1, 2]), "torch.bfloat16"), np.float64(2),
    ],
    ids=repr,
)  # fmt: skip
def test_no_distribution_is_too_odd_for_a_histogram(values):
    """Diverging and vanishing gradients are the ones that one wants to see."""
    fields = json.loads(ty.Histogram(values).encode().content)
    assert len(fields["edges"]) == len(fields["counts"]) + 1 == 65
    assert sum(fields["counts"]) == fields["num"]
    assert all(low < high for low, high in zip(fields["edges"], fields["edges"][1:], strict=False))
    assert all(
        math.isfinite(number) for number in [*fields["edges"], *(v for v in fields.values() if type(v) is float)]
    )


@given(arrays.arrays(np.float64, st.integers(0, 30)))
@example(np.array([math.inf, sys.float_info.max, 1.7976895394796414e308]))
@settings(max_examples=200, deadline=None)
def test_every_finite_value_is_in_a_bin(values):
    """Whatever the numbers are."""
    fields = json.loads(ty.Histogram(values, bins=7).encode().content)
    finite = values[np.isfinite(values)]
    assert sum(fields["counts"]) == fields["num"] == finite.size == values.size - fields["nonfinite"]
    if finite.size:
        assert (fields["min"], fields["max"]) == (finite.min(), finite.max())


# -- audio and video ---------------------------------------------------------------------------------------------


@given(
    arrays.arrays(np.int16, st.integers(1, 40))
    | arrays.arrays(np.int16, st.tuples(st.integers(1, 40), st.integers(1, 6)))
)
@settings(max_examples=60, deadline=None)
def test_any_int16_audio_round_trips(array):
    """Every sample of every channel."""
    data, rate = samples_of(ty.Audio(array, 8000))
    assert rate == 8000
    assert data.tolist() == array.reshape(len(array), -1).tolist()


def samples_of(audio):
    with wave.open(BytesIO(audio.encode().content), "rb") as file:
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return data, file.getframerate()


@given(arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1, 1, width=32)))
@settings(max_examples=60, deadline=None)
def test_any_float_audio_is_rounded_to_the_nearest(array):
    """A sample is at most half of a step away."""
    data, _ = samples_of(ty.Audio(array, 44100))
    assert np.abs(data[:, 0] / 32767 - array).max() <= 0.5 / 32767 + 1e-6


def test_audio_out_of_range_is_clipped_and_channels_may_come_first(keep):
    """As torch has them; NaN is silence."""
    data = np.zeros((2, 100))
    data[:, :3] = [[2.0, math.nan, 0.5], [-2.0, -math.inf, 0]]
    file, path = keep(ty.Audio(Tensor(data), np.int64(100), "noise"))
    assert (file.kind, file.details, file.caption) == ("audio", {"rate": 100}, "noise")
    again, rate = samples(path)
    assert (again.shape, rate) == ((100, 2), 100)
    assert again[:3].tolist() == [[32767, -32767], [0, -32767], [16384, 0]]


def test_an_audio_file_is_copied(tmp_path, keep):
    """A wav tells its own rate; of others it is known if it is given."""
    source = stored(ty.Audio(np.zeros(9), 22050), tmp_path)
    file, path = keep(ty.Audio(str(source)))
    assert (path.read_bytes(), file.details) == (source.read_bytes(), {"rate": 22050})
    (tmp_path / "a").write_bytes(b"fLaC....")
    assert keep(ty.Audio(tmp_path / "a", 48000))[0].details == {"rate": 48000}
    (tmp_path / "b").write_bytes(b"OggS....")
    assert keep(ty.Audio(tmp_path / "b"))[0].details == {"rate": None}


@pytest.mark.parametrize("colours", [0, 1, 3, 4])
def test_a_video_of_an_array_is_a_gif(colours, keep):
    """Its frames, at its pace; grey ones to the pixel."""
    grey = np.random.default_rng(1).integers(0, 256, (6, 8, 9), dtype=np.uint8)
    array = grey if not colours else np.repeat(grey[..., None], colours, 3)
    file, path = keep(ty.Video(array, fps=20))
    assert (file.kind, path.suffix, file.details) == ("video", ".gif", {"fps": 20, "width": 9, "height": 8})
    with PIL.Image.open(path) as gif:
        assert gif.n_frames == 6
        for i in range(6):
            gif.seek(i)
            assert gif.info["duration"] == 50
            assert np.array_equal(np.asarray(gif.convert("L")), grey[i])


def test_a_video_of_torch(tmp_path):
    """Channels first in each frame, floats."""
    array = np.zeros((3, 3, 8, 9), np.float32)
    array[1, 0] = 1
    with PIL.Image.open(stored(ty.Video(Tensor(array)), tmp_path)) as gif:
        gif.seek(1)
        assert (gif.info["duration"], gif.convert("RGB").getpixel((4, 4))) == (250, (255, 0, 0))


@pytest.mark.parametrize(("head", "extension"), [(b"\0\0\0\x18ftypmp42", "mp4"), (b"\x1aE\xdf\xa3....", "webm")])
def test_a_video_file_is_copied(head, extension, tmp_path, keep):
    """As it is, whatever its size."""
    source = tmp_path / "v"
    source.write_bytes(head + os.urandom(3 << 20))
    file, path = keep(ty.Video(source))
    assert (path.suffix, path.read_bytes()) == (f".{extension}", source.read_bytes())
    assert file.details == {"fps": None, "width": None, "height": None}


@pytest.mark.parametrize(
    "value",
    [
        ty.Image(GREY, "c"), ty.Text("t", "c"), ty.Table(["a"], [[1]], "c"), ty.Histogram([1, 2], caption="c"),
        ty.Audio(np.zeros(5), 9, "c"), ty.Video(np.zeros((2, 8, 8)), caption="c"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_may_be_copied_and_pickled(value):
    """A result goes to other processes, and into users' own copies."""
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert (again.caption, again.encode()) == ("c", value.encode())


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ty.Image(3), "path or an array, not an int"),
        (lambda: ty.Image(None), "NoneType"),
        (lambda: ty.Image([[1, 2]]), "list"),
        (lambda: ty.Image(np.zeros(3)), r"\(H, W\)"),
        (lambda: ty.Image(np.zeros((0, 3))), r"\(0, 3\)"),
        (lambda: ty.Image(np.zeros((9, 9, 2))), "1, 3 or 4 channels"),
        (lambda: ty.Image(np.zeros((9, 9), np.int64)), "int64"),
        (lambda: ty.Image(Tensor(np.zeros((9, 9)), "torch.int64")), "int64"),
        (lambda: ty.Image(np.zeros((9, 9), complex)), "complex"),
        (lambda: ty.Image(GREY, caption=3), "caption"),
        (lambda: ty.Figure(3), "matplotlib figure"),
        (lambda: ty.Text(3), "string"),
        (lambda: ty.Table(3), "dataframe"),
        (lambda: ty.Table("ab", []), "list of names"),
        (lambda: ty.Table(["a"], (i for i in [])), "list of rows"),
        (ty.Histogram, "values, or"),
        (lambda: ty.Histogram([1], counts=[1], edges=[0, 1]), "values, or"),
        (lambda: ty.Histogram(counts=[1, 2], edges=[0, 1]), "one edge more"),
        (lambda: ty.Histogram([1], bins=0), "bins"),
        (lambda: ty.Histogram("abc"), "str"),
        (lambda: ty.Audio(np.zeros(9)), "needs a rate"),
        (lambda: ty.Audio(np.zeros(9), 0), "rate"),
        (lambda: ty.Audio(np.zeros(9), 44.1), "44.1"),
        (lambda: ty.Audio(np.zeros(9, np.uint8), 9), "uint8"),
        (lambda: ty.Audio(np.zeros((99, 99)), 9), r"\(99, 99\)"),
        (lambda: ty.Audio([0.0], 9), "list"),
        (lambda: ty.Video(np.zeros((9, 9))), r"\(T, H, W\)"),
        (lambda: ty.Video(np.zeros((2, 9, 9)), fps=0), "fps"),
    ],
)
def test_a_mistake_is_found_when_the_value_is_made(make, words):
    """At the line that made it, without touching a disk."""
    with pytest.raises(MetricError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: ty.Image(folder / "no.png"), "no such file"),
        (ty.Image, "no such file"),
        (lambda folder: ty.Image(__file__), "it is no png, jpg, gif or webp file"),
        (lambda folder: ty.Image(folder / "broken.png"), "that cannot be stored"),
        (lambda folder: ty.Audio(__file__), "it is no wav"),
        (lambda folder: ty.Text("\ud800"), "surrogates"),
        (lambda folder: ty.Text("x", caption="\ud800"), "surrogates"),
        (lambda folder: ty.Table(["a", "b"], [[1]]), "row 0 of the table has 1 cells"),
        (lambda folder: ty.Table(["a", "a"], []), "both named 'a'"),
        (lambda folder: ty.Table(["a"], [{"a": 1}]), "row 0 of the table is a dict"),
        (lambda folder: ty.Table(["a"], ["x"]), "row 0 of the table is a str"),
        (lambda folder: ty.Table(["a"], [[ty.Text("x")]]), "a cell of the table is a Text"),
        (lambda folder: ty.Histogram(["a"]), "numbers, not"),
        (lambda folder: ty.Histogram(counts=[-1], edges=[0, 1]), "counts"),
        (lambda folder: ty.Histogram(counts=[1], edges=[1, 1]), "edges"),
        (lambda folder: object(), "cannot be recorded"),
        (lambda folder: 2**64, "cannot be recorded"),
    ],
)
@pytest.mark.parametrize("place", ["flat", "nested", "listed"])
def test_a_bad_value_refuses_the_whole_result_and_leaves_nothing(make, words, place, tmp_path, run):
    """The refusal names the metric; of the good values beside it no file stays, and the number is used again."""
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
    bad, good = make(tmp_path), {"a": ty.Text("good"), "b": [ty.Image(GREY)]}
    metrics, name = {
        "flat": ({**good, "bad": bad}, "bad"),
        "nested": ({**good, "outer": {"bad": bad}}, "outer/bad"),
        "listed": ({**good, "bad": [ty.Text("x"), bad]}, "bad"),
    }[place]
    run.log({"first": ty.Text("first")})
    before = files(run)
    with pytest.raises(MetricError, match=words) as refusal:
        run.log(metrics)
    assert f"'{name}" in str(refusal.value)
    assert files(run) == before
    run.log(good)
    history = ty.open_run(run.path).history()
    assert [result.seq for result in history] == [1, 2]
    assert Path(run.path, history[1]["a"].path).read_text() == "good"


def test_a_refused_result_without_media_takes_nothing_away(run):
    """The files of the result before it stay."""
    run.log({"m": ty.Text("kept")})
    with pytest.raises(MetricError):
        run.log({"bad": 2**64})
    assert Path(run.path, ty.open_run(run.path).history()[0]["m"].path).read_text() == "kept"


def test_a_figure_that_cannot_be_drawn_is_refused_by_name(pyplot, run):
    """What a library says of a value is passed on."""
    figure, axes = pyplot.subplots()
    axes.set_title("$\\nonsense{$")
    with pytest.raises(MetricError, match=r"'plot'.*Figure that cannot be stored"):
        run.log({"plot": ty.Figure(figure)})


@pytest.mark.parametrize("missing", ["numpy", "PIL.Image"])
def test_a_missing_library_is_named_with_its_cure(missing, monkeypatch, run):
    """An array needs numpy and pillow."""
    image = ty.Image(GREY)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MetricError, match=r"metric 'm'.*pip install 'trainyard\[media\]'"):
        run.log({"m": image})


def test_a_file_needs_no_library(monkeypatch, tmp_path, run):
    """A picture that is a file already is only copied."""
    PIL.Image.fromarray(RGB).save(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    run.log({"m": ty.Image(tmp_path / "a.png")})
    assert ty.open_run(run.path).history()[0]["m"].details == {"width": None, "height": None}


def test_media_outside_of_a_run_are_refused():
    """Somebody else who records metrics cannot store them."""
    with pytest.raises(MetricError, match="'a/b' is a media value"):
        recordable({"a": {"b": ty.Text("x")}})


# -- where they are ----------------------------------------------------------------------------------------------


def test_media_at_every_depth(run):
    """In dicts and lists, next to numbers; the user's own dict and the returned result hold the user's own objects."""
    image, texts = ty.Image(GREY), [ty.Text("a"), ty.Text("b")]
    metrics = {"x": 1.5, "val": {"image": image, "deep": [{"t": texts[0]}, 3, texts]}, 7: image}
    returned = run.log(metrics)
    assert metrics == {"x": 1.5, "val": {"image": image, "deep": [{"t": texts[0]}, 3, texts]}, 7: image}
    assert returned["val"]["image"] is image
    result = ty.open_run(run.path).history()[0]
    paths = [
        result["val"]["image"].path, result["val"]["deep"][0]["t"].path,
        *[text.path for text in result["val"]["deep"][2]], result["7"].path,
    ]  # fmt: skip
    assert [path.rpartition("/")[0] for path in paths] == [
        "media/val-image", "media/val-deep-0-t", "media/val-deep-2-0", "media/val-deep-2-1", "media/7",
    ]  # fmt: skip
    assert all(Path(run.path, path).is_file() for path in paths)
    assert result["x"] == 1.5
    assert result["val"]["deep"][1] == 3


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("loss", "loss"), ("val/x", "val-x"), ("../../x", "x"), ("..", "unnamed"), ("", "unnamed"), ("/etc/passwd", "etc-passwd"),
        ("日本語", "unnamed"), ("a b\0c\\d", "a-b-c-d"), ("n" * 5000, "n" * 60), ("CON", "CON-"), ("nul.txt", "nul.txt-"),
        (".hidden", "hidden"),
    ],
)  # fmt: skip
def test_no_name_leads_out_of_the_directory(name, folder, keep, run):
    """Every metric's name is a directory's name below `media`."""
    file, path = keep(ty.Text("x"), name)
    assert file.path.split("/")[:2] == ["media", folder]
    assert path.resolve().parent.parent == Path(run.path, "media").resolve()


def test_metrics_whose_names_are_one_on_disk_keep_their_own_files(run):
    """They share a directory, not a file."""
    run.log({"a/b": ty.Text("1"), "a-b": ty.Text("2"), "a b": ty.Text("2")})
    result = ty.open_run(run.path).history()[0]
    assert [Path(run.path, result[name].path).read_text() for name in ("a/b", "a-b", "a b")] == ["1", "2", "2"]


@pytest.mark.parametrize("name", ["a/b", "ü", "x" * 200])
def test_a_mutated_array_does_not_change_what_was_recorded(name, keep):
    """The file holds the array of the moment that it was logged at."""
    array = RGB.copy()
    _, path = keep(ty.Image(array), name)
    array[:] = 0
    assert np.array_equal(pixels(path), RGB)


# -- in the journal and in the files of the trackers -------------------------------------------------------------


def through_msgpack(value):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=encode_extension), ext_hook=decode_extension)


def test_a_media_file_is_told_from_a_dict():
    """A user's dict with the same fields stays a dict."""
    file = ty.MediaFile("image", "media/a/b.png", 3, "ü", {"width": 1, "height": None})
    metrics = {"a": file, "b": file.asdict(), "c": [file]}
    again = through_msgpack(metrics)
    assert again == metrics
    assert (type(again["a"]), type(again["b"])) == (ty.MediaFile, dict)


def test_a_media_file_is_a_value():
    """Equal by its fields, hashable, picklable, unchangeable, and its words are its path."""
    file = ty.MediaFile("text", "media/a/b.txt", 3, "c")
    assert file == ty.MediaFile("text", "media/a/b.txt", 3, "c", {}) == pickle.loads(pickle.dumps(file))
    assert len({file, pickle.loads(pickle.dumps(file))}) == 1
    assert file != ty.MediaFile("text", "media/a/b.txt", 4)
    assert file != file.asdict()
    assert str(file) == "media/a/b.txt"
    assert eval(repr(file), {"MediaFile": ty.MediaFile}) == file
    with pytest.raises(AttributeError):
        file.path = "x"
    with pytest.raises(AttributeError):
        del file.path


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "media/../../x", "media/./x", "media//x", "media", "media/", "x/media/y", "media\\..\\..\\x", "media/\0", ""],
)  # fmt: skip
def test_a_reference_that_leads_out_of_the_run_is_not_followed(path):
    """A journal from a stranger cannot have a tracker upload another file."""
    assert type(through_msgpack(ty.MediaFile("image", path, 3))) is msgspec.msgpack.Ext


@pytest.mark.parametrize("fields", [[1], {"kind": "image"}, {"kind": "image", "path": 3, "size": 4}])
def test_a_damaged_reference_stays_raw(fields):
    """As every unknown extension does."""
    raw = msgspec.msgpack.Ext(2, msgspec.msgpack.encode(fields))
    assert through_msgpack(raw) == raw
    assert through_msgpack(msgspec.msgpack.Ext(2, b"\xc1")) == msgspec.msgpack.Ext(2, b"\xc1")


def test_a_reference_of_a_newer_version_is_read():
    """With a kind and fields that are not known yet."""
    fields = {"kind": "mesh", "path": "media/m/1.ply", "size": 4, "new": [1]}
    file = through_msgpack(msgspec.msgpack.Ext(2, msgspec.msgpack.encode(fields)))
    assert (file.kind, file.path, file.caption, file.details) == ("mesh", "media/m/1.ply", "", {})


def test_strict_json_of_a_media_file():
    """An object of its fields, also beside a NaN."""
    file = ty.MediaFile("video", "media/a/b.gif", 3, "", {"fps": None, "x": math.nan})
    expected = {
        "kind": "video",
        "path": "media/a/b.gif",
        "size": 3,
        "caption": "",
        "details": {"fps": None, "x": "NaN"},
    }
    assert json.loads(strict_json({"m": file, "n": math.nan})) == {"m": expected, "n": "NaN"}


def test_media_in_everything_that_is_written(tmp_path):
    """json has the fields, csv and the dataframe's text the path, a checkpoint the path; `show` passes over them."""
    pytest.importorskip("pandas")
    with ty.start_run(storage=tmp_path, experiment="e", trackers=["json", "csv"], name="r") as run:
        run.log(
            {"loss": 1.5, "image": ty.Image(GREY), "texts": [ty.Text("a"), ty.Text("b")], "val": {"t": ty.Text("c")}}
        )
        checkpoint = run.save_checkpoint({"w": 1})
    result = ty.open_run(run.path)
    (recorded,) = result.history()
    image = recorded["image"]
    (line,) = Path(run.path, "result.json").read_text().splitlines()
    assert json.loads(line)["image"] == image.asdict()
    assert json.loads(line)["texts"] == [text.asdict() for text in recorded["texts"]]
    with open(Path(run.path, "progress.csv"), newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["image"], row["val/t"]) == (image.path, recorded["val"]["t"].path)
    assert row["texts"] == str([text.path for text in recorded["texts"]])
    frame = result.dataframe()
    assert frame["image"][0] == image
    assert image.path in frame.to_csv()
    assert result.metrics["image"] == image
    assert (checkpoint.metrics["image"], result.checkpoint.metrics["image"]) == (image, image.path)
    for options in ([], ["--json"]):
        shown = subprocess.run(
            [sys.executable, "-m", "trainyard.cli.main", "show", run.path, *options], capture_output=True, text=True
        )
        assert (shown.returncode, shown.stderr) == (0, "")
        assert ("media/" in shown.stdout) is bool(options)
    assert json.loads(shown.stdout)["metrics"]["image"] == image.asdict()


def test_a_resumed_run_goes_on_with_media(tmp_path):
    """From a checkpoint whose last result had some, into new files."""

    class Training(ty.Trainable):
        def step(self):
            return {"m": ty.Text(f"step {self.iteration}")}

        def save_checkpoint(self, checkpoint_dir):
            return {}

        def load_checkpoint(self, checkpoint):
            pass

    options = {"storage": tmp_path, "name": "r", "resume": "allow", "checkpoint": {"every": 2}}
    ty.run(Training, stop={"training_iteration": 3}, **options).raise_if_failed()
    result = ty.run(Training, stop={"training_iteration": 5}, **options)
    result.raise_if_failed()
    texts = [Path(result.path, each["m"].path).read_text() for each in result.history()]
    assert texts == [f"step {i}" for i in range(5)]


def test_callbacks_see_the_users_own_value(tmp_path):
    """And may change it before it is stored."""
    seen = []

    class Callback:
        @ty.hookimpl
        def on_result(self, result):
            seen.append(result["m"])
            result["m"] = ty.Text("changed")

    def train(config):
        ty.report({"m": ty.Text("given")})

    result = ty.run(train, storage=tmp_path, callbacks=[Callback()])
    result.raise_if_failed()
    assert seen[0].text == "given"
    assert Path(result.path, result.history()[0]["m"].path).read_text() == "changed"


# -- when things go wrong ----------------------------------------------------------------------------------------


def test_a_full_disk_leaves_media_out_and_training_goes_on(run, monkeypatch, caplog):
    """One warning; the numbers are recorded, and media again once there is room."""
    full = True

    def replace(source, target, original=os.replace):
        if full and "media" in str(target):
            raise OSError(28, "No space left on device")
        original(source, target)

    monkeypatch.setattr(media.os, "replace", replace)
    for i in range(3):
        run.log({"i": i, "m": ty.Text("x"), "l": [1, ty.Text("y")], "d": {"t": ty.Text("z"), "n": 2}})
    assert files(run) == []
    full = False
    run.log({"i": 3, "m": ty.Text("x")})
    history = ty.open_run(run.path).history()
    assert [result["i"] for result in history] == [0, 1, 2, 3]
    assert ["m" in result for result in history] == [False, False, False, True]
    assert (history[0]["l"], history[0]["d"]) == ([1], {"n": 2})
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "No space left on device" in warning.getMessage()
    assert "'m'" in warning.getMessage()


FULL_DISK = """
import resource, signal, sys
import numpy as np
import trainyard as ty
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # a write beyond the limit fails, as on a full disk
with ty.start_run(storage=sys.argv[1], experiment="e", name="r", trackers=[]) as run:
    run.log({"m": ty.Audio(np.zeros(20_000), 8000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    for i in range(5):
        run.log({"i": i, "m": ty.Audio(np.zeros(20_000), 8000), "small": ty.Text("fits")})
"""


def test_a_file_that_does_not_fit_is_left_out_whole(tmp_path):
    """Nothing half-written stays; what fits is kept."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot store metric 'm'") == 1
    run = ty.open_run(tmp_path / "e" / "r")
    history = run.history()
    assert [result.get("i") for result in history] == [None, 0, 1, 2, 3, 4]
    assert ["m" in result for result in history] == [True, False, False, False, False, False]
    assert [path.name[0] for path in files(run) if path.is_file()] == ["0"] * 6


def test_a_source_that_cannot_be_read_is_the_values_fault(tmp_path, run, monkeypatch):
    """It refuses the result; it is not taken for a full disk."""
    source = tmp_path / "a.png"
    PIL.Image.fromarray(RGB).save(source)
    known = media._known_file

    def gone(*arguments):
        found = known(*arguments)
        source.unlink()
        return found

    monkeypatch.setattr(media, "_known_file", gone)
    monkeypatch.setattr(media, "_picture_size", lambda path: {})
    with pytest.raises(MetricError, match="'m': cannot read"):
        run.log({"m": ty.Image(source)})
    assert files(run) == []


KILLED = """
import os, signal, sys
import trainyard as ty
from trainyard import journal, media
where = sys.argv[2]
with ty.start_run(storage=sys.argv[1], experiment="e", name="r", trackers=[]) as run:
    run.log({"m": ty.Text("first")})
    def die(*arguments, **named):
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "file":
        media.os.replace = die
    else:
        journal.JournalWriter.append = die
    run.log({"m": ty.Text("second")})
"""


@pytest.mark.parametrize("where", ["file", "record"])
def test_a_kill_leaves_at_most_an_orphan(where, tmp_path):
    """No record refers to a file that is not there, and the run can be gone on with."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), where], timeout=60)
    assert done.returncode == -signal.SIGKILL
    run = ty.open_run(tmp_path / "e" / "r")
    (result,) = run.history()
    assert Path(run.path, result["m"].path).read_text() == "first"
    assert len([path for path in files(run) if path.is_file()]) == 2


def test_a_forked_child_touches_no_file(run, forked):
    """What it logs is refused before anything is stored."""
    run.log({"m": ty.Text("x")})
    before = files(run)

    def log():
        with pytest.raises(JournalError, match="forked child"):
            run.log({"m": ty.Text("y")})

    forked(log)
    assert files(run) == before


# -- what it costs those who do not use it -----------------------------------------------------------------------


def test_plain_numbers_import_nothing_of_this(tmp_path):
    """Neither `import trainyard` nor a run of numbers imports media, wave, numpy or pillow."""
    code = f"""
import sys
import trainyard as ty
with ty.start_run(storage={str(tmp_path)!r}, experiment="e", trackers=[]) as run:
    run.log({{"loss": 1.0, "nested": {{"x": [1, 2]}}}})
print(*sys.modules)
"""
    found = set(python(code).stdout.split())
    assert found & {"trainyard.media", "wave", "numpy", "PIL", "PIL.Image", "matplotlib"} == set()


def test_making_a_value_imports_nothing_heavy(tmp_path):
    """A text, table or file needs neither numpy nor pillow, also when it is stored."""
    code = f"""
import sys
import trainyard as ty
with ty.start_run(storage={str(tmp_path)!r}, experiment="e", trackers=[]) as run:
    run.log({{"a": ty.Text("x"), "b": ty.Table(["c"], [[1]]), "d": ty.Histogram(counts=[1], edges=[0, 1])}})
ty.Image("x.png"), ty.Audio("x.wav"), ty.Video("x.mp4"), ty.Histogram([1.0])
print(*sys.modules)
"""
    found = set(python(code).stdout.split())
    assert found & {"numpy", "PIL", "PIL.Image", "matplotlib"} == set()
