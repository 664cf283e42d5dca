"""The json tracker: strict lines, and exactly once after every kind of end."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.records import Result, RunInfo
from trainyard_plugins.trackers.json import JsonTracker


def results(first, last, **metrics):
    return [Result(seq, float(seq), seq, {"training_iteration": seq, **metrics}) for seq in range(first, last + 1)]


def info(folder, config=None):
    return RunInfo("0123456789", "run", "e", str(folder), config or {})


def start(folder, notes, config=None):
    tracker = JsonTracker()
    tracker.log_start(run=info(folder, config), notes=notes)
    return tracker


def lines(folder):
    def refuse(name):
        raise AssertionError(f"{name} is not strict JSON")

    text = Path(folder, "result.json").read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def seqs(folder):
    return [line["training_iteration"] for line in lines(folder)]


def test_the_constructor_touches_nothing(tmp_path, monkeypatch):
    """A tracker that was never started leaves no file and can be flushed and closed."""
    monkeypatch.chdir(tmp_path)
    tracker = JsonTracker()
    tracker.flush()
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_every_result_is_a_strict_line(tmp_path):
    """Nested values stay nested, the config is in each line, and what JSON lacks is a word or base64."""
    tracker = start(tmp_path, {})
    metrics = {
        "loss": math.nan,
        "val": {"acc": -math.inf},
        "a": np.arange(2),
        "b": b"\xff",
        "config": {"lr": 1},
        "n": None,
    }
    tracker.log_results(results=[Result(1, 0.0, 1, metrics)], notes={})
    tracker.close()
    assert lines(tmp_path) == [
        {"loss": "NaN", "val": {"acc": "-Infinity"}, "a": [0, 1], "b": "/w==", "config": {"lr": 1}, "n": None}
    ]


def test_text_with_line_ends_stays_one_line(tmp_path):
    """No character of a value can break the format of a line a result."""
    text = 'a\nb\r\n"c"\u2028\x85 ü'
    tracker = start(tmp_path, {})
    tracker.log_results(results=results(1, 2, text=text), notes={})
    tracker.close()
    content = (tmp_path / "result.json").read_bytes().split(b"\n")
    assert [json.loads(line)["text"] for line in content[:-1]] == [text, text]


def test_params_hold_the_config(tmp_path):
    """params.json is strict and readable, params.pkl is the same config."""
    config = {"lr": 0.1, "nested": {"nan": math.nan}, "z": [1, "x"], "a": None}
    start(tmp_path, {}, config).close()
    assert json.loads((tmp_path / "params.json").read_bytes()) == {**config, "nested": {"nan": "NaN"}}
    loaded = pickle.loads((tmp_path / "params.pkl").read_bytes())
    assert math.isnan(loaded.pop("nested")["nan"])
    assert loaded == {"lr": 0.1, "z": [1, "x"], "a": None}


def test_results_can_be_read_before_the_end(tmp_path):
    """What was logged and flushed is in the file while the run goes on."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=results(1, 3), notes=notes)
    tracker.flush()
    assert seqs(tmp_path) == [1, 2, 3]
    tracker.close()


@pytest.mark.parametrize("cut", [0, 1, 7, 10_000])
def test_a_restart_with_older_notes_cuts_back(tmp_path, cut):
    """What was written after the last confirmation goes, torn or whole, and stands once when it comes again."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=results(1, 2), notes=notes)
    tracker.flush()
    confirmed = copy.deepcopy(notes)
    tracker.log_results(results=results(3, 5), notes=notes)
    tracker.close()
    path = tmp_path / "result.json"
    path.write_bytes(path.read_bytes()[: max(confirmed["size"], path.stat().st_size - cut)])
    tracker = start(tmp_path, confirmed)
    assert seqs(tmp_path) == [1, 2]
    tracker.log_results(results=results(3, 6), notes=confirmed)
    tracker.close()
    assert seqs(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_restart_without_notes_begins_anew(tmp_path):
    """If nothing was ever confirmed, whatever lies there is replaced."""
    (tmp_path / "result.json").write_text("left behind")
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=results(1, 1), notes=notes)
    tracker.close()
    assert seqs(tmp_path) == [1]


def test_a_rewind_leaves_exactly_the_history(tmp_path):
    """After a rewind the file holds the given results and goes on behind them."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=results(1, 5, try_=1), notes=notes)
    tracker.log_rewind(run=info(tmp_path), results=results(1, 2, try_=1), notes=notes)
    tracker.log_results(results=results(3, 4, try_=2), notes=notes)
    tracker.close()
    assert [(line["training_iteration"], line["try_"]) for line in lines(tmp_path)] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_a_rewind_that_was_not_confirmed_happens_again(tmp_path):
    """With the notes from before the rewind, the same rewind gives the same file."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=results(1, 5), notes=notes)
    old = copy.deepcopy(notes)
    for _ in range(2):
        again = copy.deepcopy(old)
        tracker.log_rewind(run=info(tmp_path), results=results(1, 2), notes=again)
        tracker.log_results(results=results(3, 3, pad="x" * 99), notes=again)
        tracker.close()
        assert seqs(tmp_path) == [1, 2, 3]
        tracker = start(tmp_path, copy.deepcopy(old))
    tracker.close()


def test_a_second_start_is_a_fresh_one(tmp_path):
    """A run that goes on after its end starts the tracker again, and nothing is lost or doubled."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=results(1, 2), notes=notes)
    tracker.log_start(run=info(tmp_path), notes=notes)
    tracker.log_results(results=results(3, 3), notes=notes)
    tracker.close()
    assert seqs(tmp_path) == [1, 2, 3]


def test_a_full_disk_leaves_whole_lines(tmp_path, forked):
    """A write that does not fit raises and leaves nothing of itself; the next one that fits goes on from there."""

    def full():
        import resource

        notes: dict = {}
        tracker = start(tmp_path, notes)
        tracker.log_results(results=results(1, 2), notes=notes)
        before = dict(notes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (notes["size"] + 5, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"File too large|No space left"):
            tracker.log_results(results=results(3, 4), notes=notes)
        assert notes == before
        assert seqs(tmp_path) == [1, 2]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        tracker.log_results(results=results(3, 4), notes=notes)
        tracker.close()

    forked(full)
    assert seqs(tmp_path) == [1, 2, 3, 4]


@given(st.lists(st.sampled_from(["batch", "confirm", "die", "rewind"]), max_size=14), st.data())
@settings(max_examples=60, deadline=None)
def test_each_result_stands_exactly_once(tmp_path_factory, steps, data):
    """Whenever the process dies, what is confirmed and what is delivered again make each result once, in order."""
    folder = tmp_path_factory.mktemp("run")
    head, confirmed, saved = 0, 0, {}
    notes = copy.deepcopy(saved)
    tracker = start(folder, notes)
    for step in steps:
        if step == "batch":
            tracker.log_results(results=results(head + 1, head + 2), notes=notes)
            head += 2
        elif step == "rewind":
            head = data.draw(st.integers(0, head))
            tracker.log_rewind(run=info(folder), results=results(1, head), notes=notes)
            tracker.flush()  # a lane that dies here does the rewind again, which has a test of its own
            confirmed, saved = head, json.loads(json.dumps(notes))
        elif step == "confirm":
            tracker.flush()
            confirmed, saved = head, json.loads(json.dumps(notes))
        else:
            tracker.close()
            head, notes = confirmed, copy.deepcopy(saved)
            tracker = start(folder, notes)
        assert seqs(folder) == list(range(1, head + 1))
    tracker.close()
