"""The tensorboard tracker, read back by both of TensorBoard's readers: exactly once after every kind of end."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
import os
import re
import resource
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import wave
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainyard as ty
from trainyard.records import MediaFile, Outcome, Result, RunInfo
from trainyard_plugins.trackers import tensorboard as module
from trainyard_plugins.trackers.tensorboard import TensorBoardTracker

pytest.importorskip("tensorboardX")
pytest.importorskip("tensorboard")

from tensorboard import context
from tensorboard.backend.event_processing import data_provider, event_file_loader, plugin_event_multiplexer
from tensorboard.data import server_ingester
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups
from tensorboard.util import grpc_util

CONTEXT = context.RequestContext()
JSON = {"Content-Type": "application/json"}
ALL = {"scalars": 0, "text": 0, "histograms": 0, "images": 0, "audio": 0}


# -- what TensorBoard sees ---------------------------------------------------------------------------------------------


class Python:
    """The reader behind ``--load_fast=false``."""

    def __init__(self, logdir):
        self._logdir = str(logdir)
        self._events = plugin_event_multiplexer.EventMultiplexer(tensor_size_guidance=ALL)
        self.provider = data_provider.MultiplexerDataProvider(self._events, self._logdir)
        self.reload()

    def reload(self):
        """Read what is new."""
        self._events.AddRunsFromDirectory(self._logdir)
        self._events.Reload()

    def close(self):
        pass


class Rust:
    """The data server that TensorBoard uses by default; every checksum is checked."""

    def __init__(self, logdir, reload="once"):
        port = Path(logdir).parent / f"port-{time.monotonic_ns()}"
        path = server_ingester.get_server_binary().path
        options = [f"--logdir={logdir}", f"--reload={reload}", "--port=0", f"--port-file={port}", "--verbose"]
        samples = "--samples-per-plugin=" + ",".join(f"{plugin}=all" for plugin in ALL)
        self._server = subprocess.Popen(
            [path, *options, "--checksum", samples], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        self._finished_cycle()
        credentials = grpc_util.ChannelCredsType.LOCAL
        server = server_ingester.ExistingServerDataIngester(
            f"localhost:{port.read_text().strip()}", channel_creds_type=credentials
        )
        self.provider = server.data_provider

    def reload(self):
        """Wait for a load that began after now; it loads once a second."""
        self._finished_cycle()
        self._finished_cycle()

    def _finished_cycle(self):
        for line in self._server.stderr:
            if "Finished load cycle" in line:
                return
        raise AssertionError("the data server is gone")

    def close(self):
        self._server.kill()
        self._server.wait()
        self._server.stderr.close()


def seen(provider, run="run"):
    """All that a reader has of a run: plugin -> tag -> [(step, wall time, value)]."""
    out = {}
    for plugin in ("scalars", "text", "histograms", "images", "audio"):
        asked = {"experiment_id": "", "plugin_name": plugin}
        if plugin == "scalars":
            tags = provider.read_scalars(CONTEXT, downsample=10**6, **asked)
            value = lambda point: point.value  # noqa: E731
        elif plugin in ("text", "histograms"):
            tags = provider.read_tensors(CONTEXT, downsample=10**6, **asked)
            value = lambda point: point.numpy.tolist()  # noqa: E731
        else:
            tags = provider.read_blob_sequences(CONTEXT, downsample=10**6, **asked)
            value = lambda point: [provider.read_blob(CONTEXT, blob_key=blob.blob_key) for blob in point.values]  # noqa: E731
        for tag, points in sorted(tags.get(run, {}).items()):
            out.setdefault(plugin, {})[tag] = [(point.step, point.wall_time, value(point)) for point in points]
    return out


def hparams(provider):
    """The rows of the HParams tab, by name, as its own code makes them; and the names of its columns."""
    tab = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    asked = api_pb2.GetExperimentRequest()
    experiment = get_experiment.Handler(CONTEXT, tab, "", asked).run()
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    wanted = api_pb2.ListSessionGroupsRequest(slice_size=100, allowed_statuses=statuses)
    groups = list_session_groups.Handler(CONTEXT, tab, "", wanted).run().session_groups
    return {group.name: group for group in groups}, {info.name for info in experiment.hparam_infos}


READERS = [Python, Rust]


@contextlib.contextmanager
def reading(reader, *arguments):
    """A reader, stopped at the end."""
    opened = reader(*arguments)
    try:
        yield opened
    finally:
        opened.close()


def both(folder):
    """What both readers, started afresh, have of a run directory; they agree."""
    found = []
    for reader in READERS:
        with reading(reader, folder.parent) as opened:
            found.append(seen(opened.provider, folder.name))
    assert repr(found[0]) == repr(found[1])
    return found[0]


def scalars(folder):
    """tag -> [(step, value)]."""
    return {
        tag: [(step, value) for step, _, value in points] for tag, points in both(folder).get("scalars", {}).items()
    }


def events(folder):
    """The events of the one event file that is ours; a half one is an error."""
    (path,) = ours(folder)
    return list(event_file_loader.LegacyEventFileLoader(str(path)).Load())


def steps(folder):
    """The values of the metric `i`, by the bare reader: quick."""
    return [
        (event.step, round(value.simple_value))
        for event in events(folder)
        for value in event.summary.value
        if value.tag == "i"
    ]


def text(value):
    """A text of rank 0 as the Text tab gets it."""
    return value.decode() if isinstance(value, bytes) else value


def ours(folder):
    """Our event files; not those that a rewind has emptied."""
    found = [path for path in folder.iterdir() if re.search(r"tfevents.*\.trainyard-", path.name)]
    return sorted(path for path in found if path.stat().st_size)


# -- driving it --------------------------------------------------------------------------------------------------------


def result(seq, step=None, **metrics):
    return Result(seq, 1.7e9 + seq, seq if step is None else step, {"i": seq, **metrics})


def results(first, last, **metrics):
    return [result(seq, **metrics) for seq in range(first, last + 1)]


def info(folder, config=None, name="run"):
    return RunInfo("0123456789", name, "e", str(folder), config or {})


def start(folder, notes, config=None):
    tracker = TensorBoardTracker()
    tracker.log_start(run=info(folder, config, folder.name), notes=notes)
    return tracker


def log(folder, *batches, notes=None, config=None):
    """Start, log, flush and close."""
    notes = {} if notes is None else notes
    tracker = start(folder, notes, config)
    for batch in batches:
        tracker.log_results(results=batch, notes=notes)
    tracker.flush()
    tracker.close()
    return notes


def saved(notes):
    """What a lane keeps of the notes."""
    return json.loads(json.dumps(notes))


@pytest.fixture
def folder(tmp_path):
    """A run directory, alone below a log directory."""
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    return path


# -- values ------------------------------------------------------------------------------------------------------------


def test_the_constructor_touches_nothing(tmp_path, monkeypatch):
    """A tracker that was never started leaves no file and can be flushed and closed."""
    monkeypatch.chdir(tmp_path)
    tracker = TensorBoardTracker()
    tracker.flush()
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_importing_the_module_imports_no_sdk():
    """The SDK is imported in the lane, when a run begins."""
    code = (
        "import sys, trainyard_plugins.trackers.tensorboard as m; m.TensorBoardTracker();"
        "print(sorted({'tensorboardX', 'numpy', 'google.protobuf'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_a_missing_sdk_is_found_before_training(monkeypatch):
    """The constructor says what to install."""
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ty.PluginConfigError, match=re.escape("pip install 'trainyard[tensorboard]'")):
        TensorBoardTracker()


def test_check_says_what_is_there():
    """The doctor's line."""
    assert re.fullmatch(r"tensorboardX 2\.\S+, event files in the run directories", TensorBoardTracker().check())


def test_every_kind_of_number_with_its_step_and_time(folder):
    """Integers, floats, bools, numpy scalars, NaN and infinities; step and wall time are the result's own."""
    values = [3, -7, 0.5, True, False, 2**24, -(2.0**100), math.inf, -math.inf, 1e300, 2**63, math.nan]
    values += [np.float64(0.25), np.float32(1.5), np.int64(-9), np.array(4), np.bool_(True)]
    batch = [Result(i + 1, 1.6e9 + i / 8, 10 * i, {"x": value}) for i, value in enumerate(values)]
    log(folder, batch)
    points = both(folder)["scalars"]["x"]
    assert [(step, wall) for step, wall, _ in points] == [(10 * i, 1.6e9 + i / 8) for i in range(len(values))]
    with np.errstate(over="ignore"):
        expected = [float(np.float32(value)) for value in values]  # TensorBoard's numbers have 24 bits
    np.testing.assert_array_equal([value for *_, value in points], expected)


def test_nested_names_are_joined_and_the_filled_in_keys_left_out(folder):
    """Curves are what the user reported, and the counters that are more than the x-axis again."""
    metrics = {"val": {"acc": 1.0, "deep": {"x": 2}}, "none": None, "perf": {"ram": 3.0}, "time_total_s": 4.0}
    filled = {"config": {"lr": 1}, "pid": 7, "timestamp": 8, "done": False, "trial_id": "a", "training_iteration": 1}
    filled |= {"date": "d", "hostname": "h", "node_ip": "n", "time_since_restore": 1.0, "iterations_since_restore": 1}
    log(folder, [result(1, **metrics, **filled)])
    found = both(folder)
    assert set(found) == {"scalars"}
    assert set(found["scalars"]) == {"i", "val/acc", "val/deep/x", "perf/ram", "time_total_s"}


NAMES = [
    "a b", "100%", "x[0]", "{y}", "a:b", "a/b", "/a", "a/", "a//b", "", " ", "ünïcödé", "損失", "🙂", "x" * 300, "a\\b", "a\nb",
    "a\x00b", "a\\x0ab", "\\empty", "_hparams_/session_start_info", "\\_hparams_/session_start_info", "a", "a\\text", "<b>", "&",
]  # fmt: skip


def test_any_name_has_a_curve_of_its_own(folder):
    """Odd names are shown as they are wherever they can be printed, and no two ever share a curve."""
    log(folder, [Result(1, 1.0, 1, {name: number for number, name in enumerate(NAMES)})])
    found = scalars(folder)
    assert sorted(value for ((_, value),) in found.values()) == list(range(len(NAMES)))
    plain = [name for name in NAMES if name.isprintable() and "\\" not in name and name and "_hparams_" not in name]
    assert len(plain) == 17
    assert all(found[name] == [(1, NAMES.index(name))] for name in plain)
    assert all(tag.isprintable() for tag in found)


@given(st.lists(st.text(st.sampled_from("\\x0a\n_hparams/text\x85\ud800empty"), max_size=6), unique=True, max_size=20))
@settings(max_examples=300, deadline=None)
def test_names_never_collide(names):
    """The way in which names are escaped can be undone."""
    tags = [tag for name in names for tag in (module._printable(name), module._printable(name) + "\\text")]
    assert len(set(tags)) == len(tags)
    assert all(tag.encode() for tag in tags)


def test_strings_are_text_and_lists_are_their_json(folder):
    """Each stands with its step."""
    log(folder, [result(1, s="über *all*", l=[1, "a", math.nan]), result(2, s="", l=[])])
    found = both(folder)["text"]
    texts = {tag: [(step, text(value)) for step, _, value in points] for tag, points in found.items()}
    assert texts == {"s": [(1, "über *all*"), (2, "")], "l": [(1, '[1,"a","NaN"]'), (2, "[]")]}


def test_arrays_are_histograms_of_what_is_finite(folder, caplog):
    """Counts and edges are right; an array without a finite number is told once and costs nothing else."""
    array = np.array([[0.0, 1.0], [2.0, np.nan]])
    empty = np.array([np.nan])
    log(
        folder,
        [
            result(1, h=array, e=empty, b=np.array([True, False]), one=np.full(3, 2.0**70)),
            result(2, h=np.arange(100), e=empty),
        ],
    )
    found = both(folder)["histograms"]
    assert set(found) == {"h", "b", "one"}
    assert found["one"][0][2] == [[2.0**70, 2.0**70, 3]]
    (_, _, first), (_, _, second) = found["h"]
    assert [(buckets[0][0], buckets[-1][1], sum(b[2] for b in buckets)) for buckets in (first, second)] == [
        (0, 2, 3),
        (0, 99, 100),
    ]
    assert len(caplog.records) == 1
    assert steps(folder) == [(1, 1), (2, 2)]


def test_a_metric_that_changes_its_kind_has_a_tag_for_each(folder):
    """TensorBoard shows one kind under one tag; neither is lost, and other names stay apart."""
    notes = log(folder, [result(1, x=1.0, y="n/a"), result(2, x="bad", y=2.0)])
    log(folder, [result(3, x=3.0, y="again", **{"x\\text": "other"})], notes=saved(notes))
    found = both(folder)
    points = {tag: [step for step, *_ in points] for plugin in found.values() for tag, points in plugin.items()}
    assert points == {"i": [1, 2, 3], "x": [1, 3], "x\\text": [2], "y": [1, 3], "y\\scalar": [2], "x\\\\text": [3]}


def png(color):
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (3, 2), color).save(data, "PNG")
    return data.getvalue()


def sound():
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(struct.pack("<4h", 0, 9, -9, 0))
    return data.getvalue()


def media(folder, kind, name, data, **details):
    (folder / "media").mkdir(exist_ok=True)
    (folder / "media" / name).write_bytes(data)
    return MediaFile(kind, f"media/{name}", len(data), "a caption", details)


def test_media_are_shown(folder):
    """Images, a GIF, text, a table, a histogram and sound come back as they were stored."""
    red, blue, tone = png("red"), png("blue"), sound()
    table = {"columns": ["a", "b|c"], "data": [[1, "x\ny"], [None, "p|q"]]}
    counts = {
        "counts": [0, 1, 0, 3, 0],
        "edges": [-1, 0, 1, 2, 4, 5],
        "min": 0.5,
        "max": 3.5,
        "num": 4,
        "sum": 9,
        "sum_squares": 30,
    }
    metrics = {
        "image": media(folder, "image", "1.png", red, width=3, height=2),
        "gif": media(folder, "video", "1.gif", b"GIF89a...", fps=None),
        "note": media(folder, "text", "1.md", "**ü**".encode()),
        "table": media(folder, "table", "1.json", json.dumps(table).encode()),
        "counts": media(folder, "histogram", "2.json", json.dumps(counts).encode()),
        "sound": media(folder, "audio", "1.wav", tone, rate=8000),
    }
    second = media(folder, "image", "2.png", blue)
    log(folder, [result(1, nested=metrics), result(2, nested={"image": second}, many=[second, metrics["note"]])])
    found = both(folder)
    images = {tag: [(s, value) for s, _, value in points] for tag, points in found["images"].items()}
    assert images["nested/image"] == [(1, [b"3", b"2", red]), (2, [b"0", b"0", blue])]
    assert images["many/0"] == [(2, [b"0", b"0", blue])]
    assert images["nested/gif"][0][1][2] == b"GIF89a..."
    assert [value for *_, value in found["audio"]["nested/sound"]] == [[tone]]
    assert {tag: text(points[0][2]) for tag, points in found["text"].items()} == {
        "nested/note": "**ü**",
        "many/1": "**ü**",
        "nested/table": "| a | b\\|c |\n| --- | --- |\n| 1 | x y |\n|  | p\\|q |",
    }
    buckets = found["histograms"]["nested/counts"][0][2]
    assert buckets == [[0.5, 1, 1], [1, 2, 0], [2, 3.5, 3]]


def test_media_that_cannot_be_shown_are_told_once_and_cost_nothing_else(folder, caplog):
    """A format that TensorBoard lacks, a missing file and a broken one."""

    def metrics():
        return {
            "film": media(folder, "video", "1.mp4", b"..."),
            "lost": MediaFile("image", "media/none.png", 1),
            "torn": media(folder, "table", "1.json", b'{"columns": ["a"'),
            "odd": media(folder, "histogram", "2.json", b'{"counts": [1], "edges": [1]}'),
            "raw": b"\xff",
        }

    log(folder, [result(1, **metrics()), result(2, **metrics())])
    assert set(both(folder)) == {"scalars"}
    assert steps(folder) == [(1, 1), (2, 2)]
    told = [record.getMessage() for record in caplog.records]
    assert [re.search(r"'(\w+)' of run", line)[1] for line in told] == ["film", "lost", "torn", "odd", "raw"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


# -- hyperparameters ---------------------------------------------------------------------------------------------------


class Unprintable:
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("reader", READERS)
def test_hyperparameters_of_all_runs_are_columns(tmp_path, reader, caplog):
    """Each type as itself, a bad value alone is lost, and runs with other keys do not hide each other's."""
    first = {
        "lr": 0.1, "layers": 3, "amp": True, "opt": {"name": "adam", "betas": [0.9, 0.99]}, "none": None, "nan": math.nan,
        "seed": 2**60 + 1, "broken": Unprintable(), "text\ud800": "\ud800", "": 1, "b": b"\xff",
    }  # fmt: skip
    for name, config in (("one", first), ("two", {"lr": 0.2, "width": 7})):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        log(path, results(1, 2, loss=0.5), config=config)
    with reading(reader, tmp_path / "runs") as opened:
        rows, columns = hparams(opened.provider)
    assert set(rows) == {"e/one", "e/two"}
    values = {
        name: {key: getattr(value, value.WhichOneof("kind")) for key, value in row.hparams.items()}
        for name, row in rows.items()
    }
    assert rows["e/one"].hparams["amp"].WhichOneof("kind") == "bool_value"
    assert values["e/two"] == {"lr": 0.2, "width": 7}
    assert values["e/one"] == {
        "lr": 0.1, "layers": 3, "amp": True, "opt/name": "adam", "opt/betas": "[0.9, 0.99]", "nan": "nan",
        "seed": str(2**60 + 1), "text\\xd800": "\\ud800", "\\empty": 1, "b": "b'\\xff'",
    }  # fmt: skip
    assert columns == set(values["e/one"]) | set(values["e/two"])
    assert {metric.name.tag for metric in rows["e/one"].metric_values} >= {"loss", "i"}
    assert [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("reader", READERS)
def test_the_status_is_the_outcome(tmp_path, reader):
    """Success and failure; what was stopped from outside is neither, and a run that goes on has no end."""
    expected = {
        "completed": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE, "killed": api_pb2.STATUS_FAILURE,
        "interrupted": api_pb2.STATUS_UNKNOWN, "preempted": api_pb2.STATUS_UNKNOWN,
    }  # fmt: skip
    before = time.time()
    for status in [*expected, "running"]:
        path = tmp_path / "runs" / status
        path.mkdir(parents=True)
        notes: dict = {}
        tracker = start(path, notes)
        tracker.log_results(results=results(1, 1), notes=notes)
        if status != "running":
            tracker.log_end(outcome=Outcome(status, None, 1.7e9 + 99), notes=notes)
        tracker.close()
    with reading(reader, tmp_path / "runs") as opened:
        sessions = {row.sessions[0].name: row.sessions[0] for row in hparams(opened.provider)[0].values()}
    assert {name: session.status for name, session in sessions.items() if name != "running"} == expected
    assert {session.end_time_secs for name, session in sessions.items() if name != "running"} == {1.7e9 + 99}
    assert sessions["running"].end_time_secs == 0
    assert all(before <= session.start_time_secs <= time.time() for session in sessions.values())


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", ["rewound", "restarted", "ended again"])
def test_a_run_that_goes_on_after_its_end_does_not_keep_that_status(folder, reader, how):
    """Whether it was resumed or was not dead after all: what shows is how it ended at last."""
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 2), notes=notes)
    tracker.log_end(outcome=Outcome("failed", "x", 9.0), notes=notes)
    tracker.flush()
    if how == "restarted":
        tracker.close()
        notes = saved(notes)
        tracker = TensorBoardTracker()
    if how != "ended again":
        tracker.log_start(run=info(folder), notes=notes)
    if how == "rewound":
        tracker.log_rewind(run=info(folder), results=results(1, 2), notes=notes)
    if how != "ended again":
        tracker.log_results(results=results(3, 4), notes=notes)
    tracker.log_end(outcome=Outcome("completed", None, 10.0), notes=notes)
    tracker.close()
    with reading(reader, folder.parent) as opened:
        (row,) = hparams(opened.provider)[0].values()
    assert (row.sessions[0].status, row.sessions[0].end_time_secs) == (api_pb2.STATUS_SUCCESS, 10.0)
    assert steps(folder) == [(i, i) for i in range(1, 3 if how == "ended again" else 5)]


def test_a_death_on_the_way_past_an_end_leaves_what_was_confirmed(folder):
    """The end that was confirmed stands again, and what had been written over it comes again."""
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 2), notes=notes)
    tracker.log_end(outcome=Outcome("killed", None, 9.0), notes=notes)
    tracker.flush()
    confirmed = saved(notes)
    whole = ours(folder)[0].read_bytes()
    for last in (3, 9):
        notes = saved(confirmed)
        tracker.log_results(results=results(3, last), notes=notes)
        tracker.close()
        assert steps(folder) == [(i, i) for i in range(1, last + 1)]
        notes = saved(confirmed)
        tracker = start(folder, notes)
        assert ours(folder)[0].read_bytes() == whole
    tracker.log_results(results=results(3, 4), notes=notes)
    tracker.close()
    assert scalars(folder) == {"i": [(i, i) for i in range(1, 5)]}


# -- order -------------------------------------------------------------------------------------------------------------


def test_steps_of_a_tag_never_go_back(folder, caplog):
    """A value behind its curve is not shown, told once a metric, also after a restart; the same step again is."""
    notes = log(
        folder, [result(1, step=5, a=1), result(2, step=3, b=1), result(3, step=5, a=2), result(4, step=-1, c=1)]
    )
    assert [re.search(r"'(\w+)' of run", record.getMessage())[1] for record in caplog.records] == ["i", "c"]
    log(folder, [result(5, step=4, a=3, b=2), result(6, step=6)], notes=saved(notes))
    tags: dict = {}
    for event in events(folder):
        for value in event.summary.value:
            tags.setdefault(value.tag, []).append((event.step, value.simple_value))
    del tags["_hparams_/session_start_info"]
    assert tags == {"i": [(5, 1), (5, 3), (6, 6)], "a": [(5, 1), (5, 2)], "b": [(3, 1), (4, 2)]}


def test_a_rewind_lets_steps_begin_again(folder, caplog):
    """What the old history had reached does not hold back the new one."""
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 9, x="text first"), notes=notes)
    tracker.log_rewind(run=info(folder), results=[], notes=notes)
    tracker.log_results(results=results(1, 3, x=1.0), notes=notes)
    tracker.close()
    assert scalars(folder) == {"i": [(1, 1), (2, 2), (3, 3)], "x": [(1, 1), (2, 1), (3, 1)]}
    assert not caplog.records


# -- exactly once ------------------------------------------------------------------------------------------------------


def test_results_can_be_read_before_the_end(folder):
    """What was logged and flushed is shown while the run goes on."""
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 3), notes=notes)
    tracker.flush()
    assert scalars(folder) == {"i": [(1, 1), (2, 2), (3, 3)]}
    tracker.close()


def test_a_flush_makes_the_file_durable(folder, monkeypatch):
    """It is the event file that is synced."""
    synced = []
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 1), notes=notes)
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino) or sync(fd))
    tracker.flush()
    assert synced == [ours(folder)[0].stat().st_ino]
    assert ours(folder)[0].stat().st_size == notes["size"]
    tracker.close()


def test_the_same_results_are_the_same_bytes_however_they_come(folder):
    """In one batch or many, and again after any cut: a reader that was ahead of the cut is none the wiser."""
    values = {"h": np.arange(5), "s": "x", "n": {"y": 1.0}, "p": media(folder, "image", "1.png", png("red"))}
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 2, **values), notes=notes)
    tracker.flush()
    confirmed = saved(notes)
    tracker.log_results(results=results(3, 8, **values), notes=notes)
    tracker.log_end(outcome=Outcome("completed", None, 3.0), notes=notes)
    tracker.close()
    (path,) = ours(folder)
    whole = path.read_bytes()
    for cut in range(confirmed["size"], len(whole) + 1, 97):
        path.write_bytes(whole[:cut])
        again = saved(confirmed)
        tracker = start(folder, again)
        assert path.read_bytes() == whole[: confirmed["size"]]
        for seq in range(3, 9):
            tracker.log_results(results=results(seq, seq, **values), notes=again)
        tracker.log_end(outcome=Outcome("completed", None, 3.0), notes=again)
        tracker.close()
        assert path.read_bytes() == whole
        assert again == notes


@pytest.mark.parametrize("reader", [Python, lambda logdir: Rust(logdir, reload=1)], ids=["Python", "Rust"])
def test_a_live_tensorboard_sees_through_a_crash_and_a_resume(folder, reader):
    """It had read what was never confirmed, half a record even; and it reads on in the file that a resume makes."""
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 3), notes=notes)
    tracker.flush()
    confirmed = saved(notes)
    tracker.log_results(results=results(4, 6), notes=notes)
    tracker.close()
    (path,) = ours(folder)
    os.truncate(path, notes["size"] - 7)
    with reading(reader, folder.parent) as opened:

        def points():
            opened.reload()
            return [(step, value) for step, _, value in seen(opened.provider)["scalars"]["i"]]

        assert points() == [(i, i) for i in range(1, 6)]
        notes = saved(confirmed)
        tracker = start(folder, notes)
        assert points() == [(i, i) for i in range(1, 6)]
        tracker.log_results(results=results(4, 8), notes=notes)
        tracker.flush()
        assert points() == [(i, i) for i in range(1, 9)]
        tracker.log_rewind(run=info(folder), results=results(1, 4), notes=notes)
        tracker.log_results(results=[result(5, i=50)], notes=notes)
        tracker.flush()
        assert points() == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]
        tracker.log_results(results=[result(6, i=60)], notes=notes)
        tracker.close()
        assert points() == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50), (6, 60)]


def test_a_restart_without_notes_begins_anew(folder):
    """If nothing was ever confirmed, what was written is replaced, not doubled."""
    log(folder, results(1, 3))
    log(folder, results(1, 2))
    assert scalars(folder) == {"i": [(1, 1), (2, 2)]}
    assert len(ours(folder)) == 1


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_confirmed_file_that_is_gone_is_told(folder, caplog, harm):
    """Somebody removed or cut it: what comes is shown, in a file that can be read."""
    notes = log(folder, results(1, 3))
    (path,) = ours(folder)
    path.unlink() if harm == "gone" else os.truncate(path, notes["size"] - 5)
    notes = log(folder, results(4, 5), notes=saved(notes))
    assert scalars(folder) == {"i": [(4, 4), (5, 5)]}
    assert [path.name in record.getMessage() for record in caplog.records] == [True]


def test_a_rewind_leaves_exactly_the_history(folder):
    """Also tags that are not logged again are gone, and the config is the resumed run's."""
    notes: dict = {}
    tracker = start(folder, notes, {"lr": 1})
    tracker.log_results(results=[result(1), result(2), result(3, val=1.0), result(4)], notes=notes)
    old = ours(folder)[0].name
    tracker.log_rewind(run=info(folder, {"lr": 2}), results=iter(results(1, 2)), notes=notes)
    assert scalars(folder) == {"i": [(1, 1), (2, 2)]}
    tracker.log_results(results=[result(3, i=30)], notes=notes)
    tracker.close()
    assert scalars(folder) == {"i": [(1, 1), (2, 2), (3, 30)]}
    (new,) = ours(folder)
    assert new.name > old
    with reading(Rust, folder.parent) as opened:
        (row,) = hparams(opened.provider)[0].values()
    assert row.hparams["lr"].number_value == 2


class Killed(BaseException):
    pass


def test_a_rewind_is_durable_before_it_costs_the_old_file(folder, monkeypatch):
    """The new file and its name are on the disk first."""
    done = []
    notes: dict = {}
    tracker = start(folder, notes)
    for name in ("fsync", "replace", "truncate"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, call=call: done.append((name, *map(str, args))) or call(*args)
        )
    inodes = []
    fstat = os.fstat
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.append(fstat(fd).st_ino) or sync(fd))
    tracker.log_rewind(run=info(folder), results=results(1, 2), notes=notes)
    tracker.close()
    assert [name for name, *_ in done] == ["fsync", "replace", "fsync", "truncate"]
    assert inodes == [ours(folder)[0].stat().st_ino, folder.stat().st_ino]


def test_a_kill_at_any_point_of_a_rewind_is_mended(folder, monkeypatch, caplog):
    """After each of its system calls: the same rewind from the confirmed notes leaves exactly the history."""
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 5), notes=notes)
    tracker.flush()
    confirmed = saved(notes)
    tracker.close()
    kept = {path.name: path.read_bytes() for path in ours(folder)}
    calls = [(os, name) for name in ("write", "fsync", "replace", "unlink", "open")]
    kills = 0
    for at in range(100):
        for path in ours(folder):
            path.unlink()
        for name, data in kept.items():
            (folder / name).write_bytes(data)
        again = saved(confirmed)
        tracker = start(folder, again)
        left = at
        with monkeypatch.context() as patch:

            def dying(call):
                def wrapped(*arguments, **options):
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return call(*arguments, **options)

                return wrapped

            for where, name in calls:
                patch.setattr(where, name, dying(getattr(where, name)))
            try:
                tracker.log_rewind(run=info(folder), results=results(1, 2), notes=again)
                finished = True
            except Killed:
                finished = False
        if finished:
            break
        kills += 1
        assert all(len(list(event_file_loader.LegacyEventFileLoader(str(path)).Load())) > 2 for path in ours(folder))
        again = saved(confirmed)
        tracker = start(folder, again)
        tracker.log_rewind(run=info(folder), results=results(1, 2), notes=again)
        tracker.log_results(results=results(3, 3), notes=again)
        tracker.close()
        assert steps(folder) == [(1, 1), (2, 2), (3, 3)]
        assert [path.name for path in ours(folder)] == [again["file"]]
        start(folder, saved(again)).close()
        assert os.listdir(folder) == [again["file"]]
    assert kills >= 6
    assert not caplog.records


def test_files_of_others_are_left_alone(folder):
    """The user's own SummaryWriter in the same directory keeps its file and what it shows, also over a resume."""
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("theirs", 1.0, 1)
    with SummaryWriter(str(folder), filename_suffix=".trainyard", purge_step=2) as writer:
        writer.add_scalar("theirs", 2.0, 2)
    foreign = {path: path.read_bytes() for path in folder.iterdir()}
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 5), notes=notes)
    tracker.log_rewind(run=info(folder), results=results(1, 2), notes=notes)
    tracker.log_end(outcome=Outcome("completed", None, 3.0), notes=notes)
    tracker.close()
    start(folder, saved(notes)).close()
    start(folder, {}).close()
    assert {path: path.read_bytes() for path in foreign} == foreign
    tracker = start(folder, notes := {})
    tracker.log_results(results=results(1, 2), notes=notes)
    tracker.close()
    assert scalars(folder) == {"i": [(1, 1), (2, 2)], "theirs": [(1, 1), (2, 2)]}


def test_names_are_unique_and_sort_by_age_whatever_the_clock_does(monkeypatch):
    """Also within one tick, and when the clock was set back."""
    names = [""]
    for stamp in (5 * 10**18, 5 * 10**18, 5 * 10**18 - 1, 10**18, 5 * 10**18 + 7):
        monkeypatch.setattr(module.time, "time_ns", lambda stamp=stamp: stamp)
        names.append(module._later_name(names[-1]))
    assert names == sorted(set(names))
    assert all(re.fullmatch(r"events\.out\.tfevents\.\d{10}\.[\w.-]+\.trainyard-\d{9}", name) for name in names[1:])


def test_a_full_disk_leaves_whole_events(folder):
    """A write that does not fit raises and leaves nothing of itself; what a lane then does goes on from there."""
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=results(1, 2), notes=notes)
    tracker.flush()
    confirmed = saved(notes)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (notes["size"] + 5, hard))
        with pytest.raises(OSError, match=r"File too large|No space left"):
            tracker.log_results(results=results(3, 4), notes=notes)
        with pytest.raises(OSError, match=r"File too large|No space left"):
            tracker.log_rewind(run=info(folder), results=results(1, 9), notes=notes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.close()
    assert steps(folder) == [(1, 1), (2, 2)]
    log(folder, results(3, 4), notes=confirmed)
    assert scalars(folder) == {"i": [(1, 1), (2, 2), (3, 3), (4, 4)]}
    assert os.listdir(folder) == [confirmed["file"]]


def test_much_at_once_is_written_in_pieces(folder, monkeypatch):
    """A batch of large media never has to fit into one write."""
    monkeypatch.setattr(module, "_PIECE", 300)
    written = []
    append = module.AppendedFile.append
    monkeypatch.setattr(
        module.AppendedFile, "append", lambda self, data: written.append(len(data)) or append(self, data)
    )
    notes = log(folder, results(1, 50))
    assert max(written) < 1000
    assert len(written) > 5
    notes = saved(notes)
    tracker = start(folder, notes)
    tracker.log_end(outcome=Outcome("failed", None, 3.0), notes=notes)
    tracker.log_results(results=results(51, 60), notes=notes)
    tracker.close()
    assert steps(folder) == [(i, i) for i in range(1, 61)]


@given(st.lists(st.sampled_from(["batch", "confirm", "die", "rewind", "end"]), max_size=14), st.data())
@settings(max_examples=60, deadline=None)
def test_each_result_stands_exactly_once(tmp_path_factory, acts, data):
    """Whenever the process dies, what is confirmed and what is delivered again make each result once, in order."""
    folder = tmp_path_factory.mktemp("run")
    head, confirmed, kept = 0, 0, {}
    notes = copy.deepcopy(kept)
    tracker = start(folder, notes)
    for act in acts:
        if act == "batch":
            tracker.log_results(results=results(head + 1, head + 2), notes=notes)
            head += 2
        elif act == "end":
            tracker.log_end(outcome=Outcome("completed", None, 9.0), notes=notes)
        elif act == "rewind":
            head = data.draw(st.integers(0, head))
            tracker.log_rewind(run=info(folder), results=results(1, head), notes=notes)
            tracker.flush()  # a lane that dies before this is confirmed has a test of its own
            confirmed, kept = head, saved(notes)
        elif act == "confirm":
            tracker.flush()
            confirmed, kept = head, saved(notes)
        else:
            tracker.close()
            head, notes = confirmed, copy.deepcopy(kept)
            tracker = start(folder, notes)
        assert steps(folder) == [(i, i) for i in range(1, head + 1)]
        assert len(os.listdir(folder)) <= (1 if act == "end" else 2)  # one emptied, for those who read it
    tracker.close()


# -- end to end --------------------------------------------------------------------------------------------------------


class Counts(ty.Trainable):
    def setup(self, config):
        self.i = 0

    def step(self):
        self.i += 1
        if self.i == self.config["fails_at"]:
            self.config["fails_at"] = 0
            raise RuntimeError("once")
        return {"i": self.i, "nested": {"half": self.i / 2}, "phase": "train"}

    def save_checkpoint(self, checkpoint_dir):
        return {"i": self.i}

    def load_checkpoint(self, checkpoint):
        self.i = checkpoint["i"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that failed once, went on from a checkpoint, and completed; another of the same experiment."""
    storage = tmp_path_factory.mktemp("runs")
    options = {
        "storage": storage, "experiment": "demo", "trackers": ["json", "tensorboard"], "delivery": "thread",
        "failures": {"max_failures": 1}, "checkpoint": {"every": 2},
    }  # fmt: skip
    done = ty.run(Counts, {"lr": 0.1, "fails_at": 6}, stop={"training_iteration": 8}, **options)
    other = ty.run(Counts, {"width": 3, "fails_at": 0}, stop={"training_iteration": 2}, **options)
    assert [done.status, other.status] == ["completed", "completed"]
    return SimpleNamespace(storage=storage, path=Path(done.path), other=Path(other.path))


def test_a_run_with_a_failure_in_between_stands_once(finished):
    """TensorBoard and result.json tell the same."""
    lines = [json.loads(line) for line in (finished.path / "result.json").read_text().splitlines()]
    assert [line["i"] for line in lines] == list(range(1, 9))
    found = both(finished.path)
    assert [(step, value) for step, _, value in found["scalars"]["i"]] == [(i, i) for i in range(1, 9)]
    assert [value for *_, value in found["scalars"]["nested/half"]] == [i / 2 for i in range(1, 9)]
    assert len(found["text"]["phase"]) == 8
    assert set(found["scalars"]) == {"i", "nested/half", "time_this_iter_s", "time_total_s"}


@pytest.mark.parametrize("fast", ["true", "false"])
def test_the_real_tensorboard_shows_the_runs(finished, fast):
    """Over HTTP, as its page asks: curves, text, and the rows and columns of the HParams tab."""
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={finished.storage}", f"--load_fast={fast}"]
    server = subprocess.Popen(
        [*command, "--port=0", "--host=127.0.0.1", "--reload_interval=1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        url = next(found[1] for line in server.stderr if (found := re.search(r" at (http://127\.0\.0\.1:\d+/)", line)))

        def get(path, body=None, **query):
            address = f"{url}data/{path}?{urllib.parse.urlencode(query)}"
            with opener.open(urllib.request.Request(address, body, JSON)) as answer:
                return json.load(answer)

        run = f"demo/{finished.path.name}"
        until = time.monotonic() + 30
        while not {run, f"demo/{finished.other.name}"} <= set(get("runs")) and time.monotonic() < until:
            time.sleep(0.1)
        tags = get("plugin/scalars/tags")
        assert set(tags[run]) == {"i", "nested/half", "time_this_iter_s", "time_total_s"}
        points = get("plugin/scalars/scalars", run=run, tag="nested/half")
        assert [(step, value) for _, step, value in points] == [(i, i / 2) for i in range(1, 9)]
        assert "train" in get("plugin/text/text", run=run, tag="phase")[0]["text"]
        experiment = get("plugin/hparams/experiment", b'{"includeMetrics": true}')
        assert {column["name"] for column in experiment["hparamInfos"]} == {"lr", "width", "fails_at"}
        wanted = {"sliceSize": 10, "allowedStatuses": ["STATUS_SUCCESS"], "includeMetrics": True}
        groups = get("plugin/hparams/session_groups", json.dumps(wanted).encode())["sessionGroups"]
        assert {group["name"]: group["hparams"] for group in groups} == {
            run: {"lr": 0.1, "fails_at": 6},
            f"demo/{finished.other.name}": {"width": 3, "fails_at": 0},
        }
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def test_a_step_beyond_64_bits_is_rejected_alone(folder):
    """It cannot be written; the others of its batch come again without it."""
    notes = {}
    tracker = start(folder, notes)
    with pytest.raises(ty.Rejected) as refusal:
        tracker.log_results(results=[result(1, loss=1.0), result(2, step=1 << 63, loss=2.0)], notes=notes)
    assert refusal.value.seqs == [2]
    tracker.close()
