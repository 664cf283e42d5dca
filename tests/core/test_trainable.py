"""The class style: its lifecycle, its checkpoints, its old names, and what is built on it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
import warnings
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from trainables import FILLED, Counting, Returning, build, iterations, python, records, run

import trainyard as ty
from trainyard import trainable as trainable_module
from trainyard.console import Tee, capture
from trainyard.journal import ResultRecord


@pytest.fixture
def counting(tmp_path):
    """A Counting of its own run."""
    made = build(Counting, tmp_path)
    yield made
    made.stop()


class Files(Counting):
    """Saves its count as a file."""

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "inner").mkdir()
        Path(checkpoint_dir, "inner", "count.txt").write_text(str(self.count))

    def load_checkpoint(self, checkpoint):
        self.count = int(Path(checkpoint, "inner", "count.txt").read_text())


class Breakable(Counting):
    """Raises in the method that ``breaks`` names."""

    breaks = ""

    def _maybe(self, name):
        if self.breaks == name:
            raise OSError(f"{name} broke")

    def step(self):
        self._maybe("step")
        return super().step()

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "half.bin").write_bytes(b"half")
        self._maybe("save_checkpoint")
        return super().save_checkpoint(checkpoint_dir)

    def load_checkpoint(self, checkpoint):
        self._maybe("load_checkpoint")
        super().load_checkpoint(checkpoint)

    def log_result(self, result):
        self._maybe("log_result")

    def cleanup(self):
        self._maybe("cleanup")


def state_of(trainable):
    """What must not change when something fails, times aside."""
    counters = trainable.run.counters
    return (trainable.get_state(), counters, trainable.run.seq, trainable.run.head, len(records(trainable.logdir)))


# -- construction ----------------------------------------------------------------------------------------------------


def test_the_methods_are_called_in_the_order_of_the_lifecycle(tmp_path):
    """setup, then step and log_result for each train, save, load, and cleanup once."""
    calls = []

    class Order(ty.Trainable):
        def setup(self, config):
            calls.append("setup")

        def step(self):
            calls.append("step")
            return {}

        def log_result(self, result):
            calls.append("log_result")

        def save_checkpoint(self, checkpoint_dir):
            calls.append("save")
            return {}

        def load_checkpoint(self, checkpoint):
            calls.append("load")

        def cleanup(self):
            calls.append("cleanup")

    made = build(Order, tmp_path)
    made.train()
    made.restore(made.save())
    made.train()
    made.stop()
    assert calls == ["setup", "step", "log_result", "save", "load", "step", "log_result", "cleanup"]


def test_config_is_kept_by_identity_and_setup_gets_a_deep_copy(tmp_path):
    """self.config is the object that was passed; what setup does to its copy does not reach it."""
    config = {"layers": [1, 2]}

    class Greedy(Counting):
        def setup(self, config):
            super().setup(config)
            config["layers"].append(3)

    made = build(Greedy, tmp_path, config)
    made.stop()
    assert made.config is config
    assert made.get_config() is config
    assert made.given is not config
    assert config == {"layers": [1, 2]}


def test_a_missing_config_is_an_empty_dict(counting):
    """Without a config self.config is {}."""
    assert counting.config == {}


@pytest.mark.parametrize(
    "value",
    [
        Counting,
        lambda step: 0.1,
        {"x"},
        {(1, 2): "a"},
        Path("data"),
        Fraction(1, 3),
        numpy.arange(3),
        object(),
        1 << 80,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_config_may_hold_any_object(tmp_path, value):
    """A config may hold classes, functions and objects, as in Tune; the run is recorded all the same."""
    result = run(Counting, tmp_path, {"thing": value}, stop={"training_iteration": 1}, trackers=["json", "csv"])
    assert result.status == "completed"
    assert "thing" in ty.open_run(result.path).config
    assert iterations(ty.open_run(result.path)) == [1]
    assert "thing" in json.loads(Path(result.path, "params.json").read_text())
    assert len(Path(result.path, "result.json").read_text().splitlines()) == 1


def test_the_magic_log_files_are_popped_and_written(tmp_path, capsys):
    """__stdout_file__ and __stderr_file__ leave the caller's dict; prints from setup on are in the files."""

    class Loud(Counting):
        def setup(self, config):
            super().setup(config)
            print("in setup")

        def step(self):
            print("oops", file=sys.stderr)
            return super().step()

        def cleanup(self):
            print("in cleanup")

    config = {"__stdout_file__": str(tmp_path / "out.txt"), "__stderr_file__": str(tmp_path / "err.txt"), "lr": 1}
    made = build(Loud, tmp_path, config)
    made.train()
    made.stop()
    print("after the end")
    assert config == {"lr": 1}
    assert (tmp_path / "out.txt").read_text() == "in setup\nin cleanup\n"
    assert (tmp_path / "err.txt").read_text() == "oops\n"
    assert capsys.readouterr().out == "in setup\nin cleanup\nafter the end\n"


def test_one_file_for_both_streams(tmp_path):
    """Both magic keys may name one file, which gets both streams in order."""
    with capture(tmp_path / "log", tmp_path / "log"):
        print("one")
        print("two", file=sys.stderr)
        print("three")
    assert (tmp_path / "log").read_text() == "one\ntwo\nthree\n"


def test_identity(counting, tmp_path):
    """trial_id, trial_name and logdir are the run's; nothing else is known of a trainable built by hand."""
    found = ty.open_run(counting.logdir)
    assert (counting.trial_id, counting.trial_name) == (found.id, found.name)
    assert Path(counting.logdir).parent.parent == tmp_path
    assert counting.trial_name == f"Counting_{counting.trial_id}"
    assert counting.trial_resources is None


def test_the_answers_of_a_class_that_overrides_nothing():
    """default_resource_request is None and resource_help is empty."""
    assert ty.Trainable.default_resource_request({}) is None
    assert ty.Trainable.resource_help({}) == ""


def test_a_failing_setup_ends_the_run_as_failed(tmp_path):
    """What setup raises comes out of the constructor, and the run that was opened says failed."""

    class Broken(Counting):
        def setup(self, config):
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        build(Broken, tmp_path)
    [path] = tmp_path.glob("*/*/run.json")
    found = ty.open_run(path.parent)
    assert found.status == "failed"
    assert "no data" in (path.parent / "error.txt").read_text()


def test_nothing_is_written_to_the_home_or_working_directory(tmp_path, monkeypatch):
    """All files of a trainable lie below its storage, and the working directory stays."""
    home, here, storage = tmp_path / "home", tmp_path / "here", tmp_path / "storage"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    made = ty.Trainable({}, storage=storage)
    assert Path.cwd() == here
    made.stop()
    assert not list(home.iterdir())
    assert not list(here.iterdir())


def test_a_bare_trainable_logs_json_and_csv(tmp_path):
    """Without trackers= the run directory holds result.json and progress.csv with every result."""
    made = Counting({"lr": 1}, storage=tmp_path)
    made.train()
    made.train()
    made.stop()
    folder = Path(made.logdir)
    assert len((folder / "result.json").read_text().splitlines()) == 2
    assert len((folder / "progress.csv").read_text().splitlines()) == 3
    assert (folder / "params.json").exists()
    assert (folder / "params.pkl").exists()


def test_a_slow_setup_gets_a_hint_that_names_the_threshold(tmp_path, caplog, monkeypatch):
    """A setup slower than the threshold is one INFO record that names both times."""
    monkeypatch.setattr(trainable_module, "SETUP_HINT_S", 0.0)
    with caplog.at_level(logging.INFO, logger="trainyard"):
        build(Counting, tmp_path).stop()
    [hint] = [r for r in caplog.records if "setup()" in r.getMessage()]
    assert hint.levelno == logging.INFO
    assert "more than 0 s" in hint.getMessage()
    assert "reset_config" in hint.getMessage()


def test_a_quick_setup_gets_no_hint(tmp_path, caplog):
    """Below the threshold nothing is said."""
    with caplog.at_level(logging.INFO, logger="trainyard"):
        build(Counting, tmp_path).stop()
    assert not [r for r in caplog.records if "setup()" in r.getMessage()]


# -- train -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returned", [None, 3, [("a", 1)], "loss"])
def test_a_step_that_returns_no_dict_is_refused(tmp_path, returned):
    """step() must return a dict; the message says so, and no counter moves."""
    made = build(Returning, tmp_path)
    with pytest.raises(ty.MetricError, match=r"step\(\).*needs to return a dict"):
        made.results(returned)
    assert made.iteration == 0
    made.stop()


def test_methods_that_are_not_overridden_say_so(tmp_path):
    """step, save_checkpoint and load_checkpoint raise NotImplementedError until they are overridden."""
    made = build(ty.Trainable, tmp_path)
    with pytest.raises(NotImplementedError, match="step"):
        made.train()
    with pytest.raises(NotImplementedError, match="save_checkpoint"):
        made.save()
    with pytest.raises(NotImplementedError, match="load_checkpoint"):
        made.load_checkpoint({})
    made.stop()


def test_a_duplicate_is_returned_untouched(tmp_path):
    """A result with __duplicate__ comes back as the same object, counted and recorded nowhere."""
    made = build(Returning, tmp_path)
    duplicate = {"__duplicate__": True, "loss": 1}
    first, second, third = made.results({}, duplicate, {})
    assert second is duplicate
    assert duplicate == {"__duplicate__": True, "loss": 1}
    assert (first["training_iteration"], third["training_iteration"]) == (1, 2)
    made.stop()
    assert iterations(ty.open_run(made.logdir)) == [1, 2]


def test_a_failed_step_changes_nothing(tmp_path):
    """An exception of step's comes out with its type; counters, last result and journal are as before."""
    made = build(Breakable, tmp_path)
    made.train()
    before = state_of(made)
    made.breaks = "step"
    with pytest.raises(OSError, match="step broke"):
        made.train()
    assert state_of(made) == before
    made.breaks = ""
    assert made.train()["training_iteration"] == 2
    made.stop()


def test_a_failed_log_result_changes_nothing(tmp_path):
    """An exception of log_result's refuses the result: no counter moves and nothing is written."""
    made = build(Breakable, tmp_path)
    made.train()
    before = state_of(made)
    made.breaks = "log_result"
    with pytest.raises(OSError, match="log_result broke"):
        made.train()
    assert state_of(made) == before
    made.breaks = ""
    made.stop()


def test_log_result_sees_the_filled_result_and_may_change_it(tmp_path):
    """log_result gets all 13 keys; what it adds is returned and recorded."""
    seen = []

    class Adds(Counting):
        def log_result(self, result):
            seen.append(dict(result))
            result["gap"] = 0.5

    made = build(Adds, tmp_path)
    assert made.train()["gap"] == 0.5
    made.stop()
    assert set(seen[0]) >= FILLED
    assert ty.open_run(made.logdir).metrics["gap"] == 0.5


def test_what_log_result_adds_must_be_recordable_too(tmp_path):
    """A value that log_result adds and that cannot be recorded refuses the result."""

    class Adds(Counting):
        def log_result(self, result):
            result["bad"] = object()

    made = build(Adds, tmp_path)
    with pytest.raises(ty.MetricError, match="'bad'"):
        made.train()
    assert made.iteration == 0
    made.stop()


def test_train_buffered_stops_at_its_length(counting):
    """The buffer's length bounds the number of results."""
    assert [r["count"] for r in counting.train_buffered(60, max_buffer_length=3)] == [1, 2, 3]


@pytest.mark.parametrize(("seconds", "length"), [(0, 1000), (60, 0), (60, 1)])
def test_train_buffered_gives_at_least_one(counting, seconds, length):
    """No time, or no room, still makes one result."""
    assert len(counting.train_buffered(seconds, length)) == 1


def test_train_buffered_stops_on_time(tmp_path):
    """Once the time is over no further step begins."""

    class Slow(Counting):
        def step(self):
            time.sleep(0.05)
            return super().step()

    made = build(Slow, tmp_path)
    assert len(made.train_buffered(0.01, 1000)) == 1
    made.stop()


@pytest.mark.parametrize("key", ["done", "should_checkpoint", "__duplicate__"])
def test_train_buffered_stops_for_a_result_that_wants_attention(tmp_path, key):
    """done, should_checkpoint and a duplicate end the buffer, as its last result."""

    class Third(Counting):
        def step(self):
            result = super().step()
            return {**result, key: True} if self.count == 3 else result

    made = build(Third, tmp_path)
    results = made.train_buffered(60)
    assert len(results) == 3
    assert results[-1][key] is True
    made.stop()


def test_a_false_should_checkpoint_does_not_end_the_buffer(tmp_path):
    """Only a truthy should_checkpoint ends the buffer."""

    class Never(Counting):
        def step(self):
            return {**super().step(), "should_checkpoint": False, "done": False}

    made = build(Never, tmp_path)
    assert len(made.train_buffered(60, 4)) == 4
    made.stop()


def test_done_ends_a_run(tmp_path):
    """A result with done ends run() as completed."""

    class Done(Counting):
        def step(self):
            return {**super().step(), "done": self.count == 3}

    result = run(Done, tmp_path)
    assert result.status == "completed"
    assert iterations(result) == [1, 2, 3]


def test_should_checkpoint_saves_one(tmp_path):
    """Under run() a truthy should_checkpoint has a checkpoint saved after that result."""

    class Asks(Counting):
        def step(self):
            return {**super().step(), "should_checkpoint": self.count == 2}

    result = run(Asks, tmp_path, stop={"training_iteration": 4}, checkpoint={"at_end": False})
    assert [checkpoint.iteration for checkpoint in result.checkpoints] == [2]


# -- save and restore ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Counting, Files])
def test_save_and_restore(tmp_path, cls):
    """A checkpoint brings state, counters and metrics into another object, which goes on from there."""
    first = build(cls, tmp_path)
    first.train_buffered(60, 3)
    saved = first.save()
    first.stop()
    second = build(cls, tmp_path)
    second.restore(saved.path)
    assert (second.count, second.iteration) == (3, 3)
    result = second.train()
    second.stop()
    assert (result["training_iteration"], result["iterations_since_restore"]) == (4, 1)
    assert result["time_total_s"] > result["time_since_restore"]
    assert result["count"] == 4


@pytest.mark.parametrize("how", [lambda c: c, lambda c: c.path, lambda c: Path(c.path), lambda c: c.url])
def test_restore_takes_a_checkpoint_a_path_or_a_url(counting, how):
    """All ways to name a checkpoint restore it with its counters."""
    counting.train()
    saved = counting.save()
    counting.train()
    counting.restore(how(saved))
    assert (counting.iteration, counting.count) == (1, 1)


@pytest.mark.parametrize("bad", [None, 3, {"count": 1}])
def test_restore_of_something_else_is_refused(counting, bad):
    """What names no checkpoint is a TypeError."""
    with pytest.raises(TypeError, match="Checkpoint"):
        counting.restore(bad)


def test_save_returns_what_the_checkpoint_says(counting):
    """save() returns a committed Checkpoint with the iteration, metrics and index of that moment."""
    empty = counting.save()
    counting.train()
    saved = counting.save()
    assert isinstance(saved, ty.Checkpoint)
    assert saved.committed
    assert (empty.iteration, empty.metrics, empty.index) == (0, {}, 0)
    assert (saved.iteration, saved.metrics["count"], saved.index) == (1, 1, 1)
    assert Path(saved.path) == Path(counting.logdir, "checkpoints", "checkpoint_000001")


def test_save_into_a_directory_of_the_users(counting, tmp_path):
    """save(dir) makes dir the checkpoint, beside the run's own ones, and can replace it."""
    counting.train()
    saved = counting.save(tmp_path / "mine")
    assert Path(saved.path) == tmp_path / "mine"
    counting.train()
    assert counting.save(tmp_path / "mine").iteration == 2
    counting.train()
    counting.restore(tmp_path / "mine")
    assert counting.iteration == 2
    assert not Path(counting.logdir, "checkpoints").exists()


def test_save_into_a_directory_with_other_files_is_refused(counting, tmp_path):
    """A directory that holds something else is never overwritten."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ty.CheckpointError, match="other files"):
        counting.save(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_an_empty_dict_is_a_state(tmp_path):
    """save_checkpoint may return {}, and load_checkpoint then gets {}."""
    loaded = []

    class Empty(Counting):
        def save_checkpoint(self, checkpoint_dir):
            return {}

        def load_checkpoint(self, checkpoint):
            loaded.append(checkpoint)

    made = build(Empty, tmp_path)
    made.restore(made.save())
    made.stop()
    assert loaded == [{}]


def test_a_dict_and_files_are_kept_together(tmp_path):
    """A save_checkpoint that writes a file and returns a dict loses neither."""

    class Both(Counting):
        def save_checkpoint(self, checkpoint_dir):
            Path(checkpoint_dir, "notes.txt").write_text("kept")
            return {"count": self.count}

    made = build(Both, tmp_path)
    made.train()
    saved = made.save()
    made.restore(saved)
    made.stop()
    assert made.count == 1
    assert Path(saved.path, "notes.txt").read_text() == "kept"


def test_the_directory_itself_may_be_returned(tmp_path):
    """save_checkpoint may return the directory that it was given."""

    class Returns(Files):
        def save_checkpoint(self, checkpoint_dir):
            super().save_checkpoint(checkpoint_dir)
            return checkpoint_dir

    made = build(Returns, tmp_path)
    made.train()
    made.restore(made.save())
    made.stop()
    assert made.count == 1


@pytest.mark.parametrize("what", ["sub-path", "elsewhere", "number", "list"])
def test_other_returned_values_are_refused(tmp_path, what):
    """A path that is not the given one, or a value of another type, is an error that names save_checkpoint."""

    class Odd(Counting):
        def save_checkpoint(self, checkpoint_dir):
            Path(checkpoint_dir, "file").write_text("x")
            return {"sub-path": f"{checkpoint_dir}/file", "elsewhere": "/tmp", "number": 7, "list": ["a"]}[what]

    made = build(Odd, tmp_path)
    with pytest.raises(ty.CheckpointError, match=r"save_checkpoint\(\) of Odd returned"):
        made.save()
    made.stop()
    assert ty.open_run(made.logdir).checkpoints == []


def test_a_failed_save_leaves_nothing(tmp_path):
    """When save_checkpoint raises, no checkpoint, no counter and no record has changed."""
    made = build(Breakable, tmp_path)
    made.train()
    kept = made.save()
    before = state_of(made)
    made.breaks = "save_checkpoint"
    with pytest.raises(Exception):  # noqa: B017  whichever: the next test is about that
        made.save()
    assert state_of(made) == before
    assert [p.name for p in Path(made.logdir, "checkpoints").iterdir()] == [Path(kept.path).name]
    made.breaks = ""
    made.stop()


@pytest.mark.parametrize("where", [None, "mine"])
def test_an_exception_of_save_checkpoint_comes_out_as_it_is(tmp_path, where):
    """Whatever save_checkpoint raises is what save() raises, an OSError with its message included."""
    made = build(Breakable, tmp_path)
    made.breaks = "save_checkpoint"
    with pytest.raises(OSError, match="save_checkpoint broke"):
        made.save(where and tmp_path / where)
    assert not (tmp_path / "mine").exists()
    made.breaks = ""
    made.stop()


@pytest.mark.parametrize("how", ["load raises", "missing", "damaged", "no manifest"])
def test_a_failed_restore_changes_nothing(tmp_path, how):
    """A restore that fails leaves counters, last result, state and history as they were."""
    made = build(Breakable, tmp_path)
    made.train()
    saved = made.save()
    made.train_buffered(60, 4)
    before = state_of(made)
    target, expected = saved.path, ty.CheckpointError
    if how == "load raises":
        made.breaks, expected = "load_checkpoint", OSError
    elif how == "missing":
        target = str(tmp_path / "nowhere")
    elif how == "damaged":
        tree = Path(saved.path, "state.msgpack")
        tree.write_bytes(tree.read_bytes()[:-1] + b"\xff")
    else:
        Path(saved.path, "manifest.json").unlink()
    with pytest.raises(expected):
        made.restore(target)
    made.breaks = ""
    assert state_of(made) == before
    assert made.count == 5
    assert made.train()["training_iteration"] == 6
    made.stop()
    assert iterations(ty.open_run(made.logdir)) == [1, 2, 3, 4, 5, 6]


def test_a_restore_within_the_run_supersedes_what_came_after(counting):
    """After a restore to iteration 2 each iteration stands in the history once, the new ones."""
    counting.train_buffered(60, 2)
    saved = counting.save()
    counting.train_buffered(60, 3)
    counting.restore(saved)
    assert [r["iterations_since_restore"] for r in counting.train_buffered(60, 2)] == [1, 2]
    counting.stop()
    history = ty.open_run(counting.logdir).history()
    assert [row["training_iteration"] for row in history] == [1, 2, 3, 4]
    assert [row.seq for row in history] == [1, 2, 6, 7]


def test_last_result_follows_a_restore(counting):
    """get_state() tells the last result as it was when the checkpoint was saved."""
    first = counting.train()
    saved = counting.save()
    counting.train()
    counting.restore(saved)
    assert counting.get_state()["last_result"]["count"] == first["count"]


def test_totals_come_back_from_a_bare_path(tmp_path):
    """Every total lives inside the checkpoint, so that a path is enough."""
    first = build(Returning, tmp_path)
    first.save_checkpoint = lambda folder: {}
    first.results({"timesteps_this_iter": 10, "episodes_this_iter": 2, "time_this_iter_s": 4.0})
    path = first.save(tmp_path / "c").path
    first.stop()
    second = build(Returning, tmp_path)
    second.load_checkpoint = lambda state: None
    second.restore(path)
    [result] = second.results({"timesteps_this_iter": 1, "time_this_iter_s": 1.0})
    second.stop()
    assert (result["timesteps_total"], result["episodes_total"], result["time_total_s"]) == (11, 2, 5.0)
    assert (result["timesteps_since_restore"], result["time_since_restore"]) == (1, 1.0)


@pytest.mark.parametrize("cls", [Counting, Files])
def test_objects_in_memory(tmp_path, cls):
    """save_to_object() is bytes that bring state and counters into another object."""
    first = build(cls, tmp_path)
    first.train_buffered(60, 2)
    data = first.save_to_object()
    first.stop()
    second = build(cls, tmp_path)
    second.restore_from_object(data)
    assert (type(data), second.count, second.train()["training_iteration"]) == (bytes, 2, 3)
    second.stop()
    assert not list(Path(second.logdir).glob("checkpoints/*"))


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x80"])
def test_bytes_that_are_no_object_are_refused(counting, data):
    """restore_from_object() of other bytes is CheckpointCorrupt and changes nothing."""
    counting.train()
    before = state_of(counting)
    with pytest.raises(ty.CheckpointCorrupt):
        counting.restore_from_object(data)
    assert state_of(counting) == before


def test_every_flipped_byte_of_an_object_is_noticed(counting):
    """A damaged object never restores: each of a number of flipped bytes is an error."""
    counting.train()
    data = counting.save_to_object()
    for at in range(0, len(data), 37):
        damaged = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
        with pytest.raises(ty.CheckpointError):
            counting.restore_from_object(damaged)
    assert counting.iteration == 1


def test_delete_checkpoint(counting):
    """A deleted checkpoint is gone whole, a missing one is no error, and the others stay."""
    first, second = counting.save(), counting.save()
    counting.delete_checkpoint(first)
    counting.delete_checkpoint(first.path)
    assert [p.name for p in Path(counting.logdir, "checkpoints").iterdir()] == [Path(second.path).name]


def test_delete_checkpoint_touches_nothing_else(counting, tmp_path):
    """A directory that is no checkpoint is refused and stays."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    with pytest.raises(ty.CheckpointError, match="not a checkpoint"):
        counting.delete_checkpoint(tmp_path / "photos")
    assert (tmp_path / "photos" / "one.jpg").exists()


def test_an_index_is_never_used_again(counting):
    """The checkpoint after a deleted one gets a new index."""
    counting.delete_checkpoint(counting.save())
    assert counting.save().index == 1


# -- export, reset, stop ---------------------------------------------------------------------------------------------


def test_export_model(tmp_path):
    """One format or several, in any case, go to the directory, by default the logdir; the answer is the override's."""

    class Exports(Counting):
        def _export_model(self, export_formats, export_dir):
            return {name: os.path.join(export_dir, name) for name in export_formats}

    made = build(Exports, tmp_path)
    assert made.export_model("model") == {"model": os.path.join(made.logdir, "model")}
    assert made.export_model([" ONNX", "H5"], "/x") == {"onnx": "/x/onnx", "h5": "/x/h5"}
    made.stop()


def test_export_model_leaves_the_given_list_alone(counting):
    """The list of formats is the caller's and is not changed."""
    formats = [" Model "]
    assert counting.export_model(formats) == {}
    assert formats == [" Model "]


def test_an_unknown_export_format_is_refused_with_the_nearest(counting):
    """A format that does not exist is a ConfigError that names the nearest one."""
    with pytest.raises(ty.ConfigError, match="did you mean 'model'"):
        counting.export_model(["modle"])


class Resettable(Counting):
    """Takes another config, if that says so."""

    def reset_config(self, new_config):
        if new_config.get("raises"):
            raise RuntimeError("cannot")
        if not new_config.get("take"):
            return False
        self.count, self.given = 0, new_config
        return True


def test_reset_starts_a_new_run_directory(tmp_path):
    """A reset that is taken ends the run, and begins another with the new config and fresh counters."""
    made = build(Resettable, tmp_path, {"a": 1})
    made.train_buffered(60, 2)
    old = made.logdir
    new_config = {"take": True}
    assert made.reset(new_config) is True
    assert made.config is new_config
    assert made.logdir != old
    assert (made.iteration, made.get_state()["last_result"]) == (0, {})
    assert made.train()["training_iteration"] == 1
    made.stop()
    assert ty.open_run(old).status == "completed"
    assert iterations(ty.open_run(old)) == [1, 2]
    assert iterations(ty.open_run(made.logdir)) == [1]
    assert ty.open_run(made.logdir).config == {"take": True}


def test_a_reset_that_is_not_taken_changes_nothing(tmp_path):
    """reset() returns False, and config, counters and run are as before; so too when reset_config raises."""
    config = {"a": 1}
    made = build(Resettable, tmp_path, config)
    made.train()
    before, logdir = state_of(made), made.logdir
    assert made.reset({"take": False}) is False
    with pytest.raises(RuntimeError, match="cannot"):
        made.reset({"raises": True})
    assert made.config is config
    assert (state_of(made), made.logdir) == (before, logdir)
    made.stop()


def test_reset_is_refused_by_default(counting):
    """A trainable that does not override reset_config cannot be reset."""
    assert counting.reset({"x": 1}) is False


def test_reset_moves_the_log_files(tmp_path):
    """A reset closes the copies of stdout and opens those that the new config names."""
    made = build(Resettable, tmp_path, {"__stdout_file__": str(tmp_path / "one")})
    print("first")
    made.reset({"take": True, "__stdout_file__": str(tmp_path / "two")})
    print("second")
    made.stop()
    assert (tmp_path / "one").read_text() == "first\n"
    assert (tmp_path / "two").read_text() == "second\n"


def test_stop_cleans_up_once(tmp_path):
    """stop() calls cleanup and ends the run; a second one does nothing."""
    calls = []

    class Cleans(Counting):
        def cleanup(self):
            calls.append(1)

    made = build(Cleans, tmp_path)
    made.stop()
    made.stop()
    assert calls == [1]
    assert ty.open_run(made.logdir).status == "completed"


def test_a_failing_cleanup_still_ends_everything(tmp_path):
    """What cleanup raises comes out, after the streams are closed and the run is ended as failed."""
    before = sys.stdout
    made = build(Breakable, tmp_path, {"__stdout_file__": str(tmp_path / "out")})
    made.breaks = "cleanup"
    with pytest.raises(OSError, match="cleanup broke"):
        made.stop()
    assert sys.stdout is before
    assert ty.open_run(made.logdir).status == "failed"
    assert "cleanup broke" in Path(made.logdir, "error.txt").read_text()


def test_a_trainable_in_somebody_elses_run_leaves_it_open(tmp_path):
    """With run= the results go to that run, which stays its owner's to end and cannot be reset away."""
    with ty.start_run(storage=tmp_path, trackers=[]) as owner:
        made = Resettable({}, run=owner)
        made.train()
        with pytest.raises(ty.ConfigError, match="somebody else"):
            made.reset({"take": True})
        made.stop()
        assert owner.status == "running"
        owner.log({"x": 1})
    assert [row.seq for row in ty.open_run(owner.path).history()] == [1, 2]


# -- what can be asked -----------------------------------------------------------------------------------------------


def test_get_state(counting):
    """get_state() is the counters, the last result and the version."""
    fresh = counting.get_state()
    assert (fresh["iteration"], fresh["timesteps_total"], fresh["episodes_total"]) == (0, None, None)
    assert (fresh["time_total"], fresh["last_result"]) == (0.0, {})
    result = counting.train()
    state = counting.get_state()
    assert set(state) == {
        "iteration", "timesteps_total", "time_total", "episodes_total", "last_result", "trainyard_version",
    }  # fmt: skip
    assert state["iteration"] == counting.iteration == counting.training_iteration == 1
    assert state["last_result"] == result
    assert state["trainyard_version"] == ty.__version__


def test_auto_filled_metrics_for_debugging(counting):
    """debug_metrics_only gives exactly the seven keys that need no iteration."""
    filled = counting.get_auto_filled_metrics(debug_metrics_only=True)
    assert set(filled) == {"trial_id", "date", "timestamp", "pid", "hostname", "node_ip", "config"}
    assert filled["config"] is counting.config


def test_auto_filled_metrics_agree_with_the_result(counting):
    """Asked right after a step they say what the result said."""
    result = counting.train()
    filled = counting.get_auto_filled_metrics(time_this_iter=result["time_this_iter_s"], timestamp=result["timestamp"])
    for key in FILLED - {"date"}:
        assert filled[key] == result[key], key


def test_auto_filled_metrics_count_timesteps_since_restore(tmp_path):
    """timesteps_since_restore is among them when it is among the results' keys."""
    made = build(Returning, tmp_path)
    made.results({"timesteps_this_iter": 7})
    assert made.get_auto_filled_metrics()["timesteps_since_restore"] == 7
    made.stop()


# -- the names of 2019 -----------------------------------------------------------------------------------------------


def old_style():
    """A class of 2019, and the warnings that its definition gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        class Old(ty.Trainable):
            def _setup(self, config):
                super()._setup(config)
                self.count, self.log = 0, ["setup"]

            def _train(self):
                self.count += 1
                return {"count": self.count}

            def _save(self, checkpoint_dir):
                path = os.path.join(checkpoint_dir, "model.txt")
                Path(path).write_text(str(self.count))
                return path

            def _restore(self, checkpoint):
                self.log.append(os.path.basename(checkpoint))
                self.count = int(Path(checkpoint).read_text())

            def _log_result(self, result):
                super()._log_result(result)
                self.log.append("log")

            def _stop(self):
                super()._stop()
                self.log.append("stop")

    return Old, caught


def test_old_names_warn_once_a_class():
    """Defining a class with names of 2019 is one DeprecationWarning, which tells each new name."""
    old, caught = old_style()
    assert [w.category for w in caught] == [DeprecationWarning]
    for word in (
        "Old",
        "_setup is now setup",
        "_train is now step",
        "_save is now save_checkpoint",
        "_stop is now cleanup",
    ):
        assert word in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings(record=True) as further:
        warnings.simplefilter("always")
        type("Child", (old,), {})
    assert further == []


def test_old_names_work(tmp_path):
    """A class of 2019 runs unchanged: super() calls, a file path from _save that _restore gets, the log and the stop."""
    old, _ = old_style()
    first = build(old, tmp_path)
    first.train()
    first.train()
    saved = first.save()
    first.stop()
    assert first.log == ["setup", "log", "log", "stop"]
    second = build(old, tmp_path)
    second.restore(saved)
    assert second.train()["training_iteration"] == 3
    second.stop()
    assert second.count == 3
    assert second.log == ["setup", "model.txt", "log", "stop"]


def test_old_save_may_return_a_dict(tmp_path):
    """An old _save that returns a dict has _restore get that dict."""
    with pytest.warns(DeprecationWarning, match="names of 2019"):

        class Old(ty.Trainable):
            def _setup(self, config):
                self.count = 0

            def _train(self):
                self.count += 1
                return {}

            def _save(self, checkpoint_dir):
                return {"count": self.count}

            def _restore(self, checkpoint):
                self.count = checkpoint["count"]

    made = build(Old, tmp_path)
    made.train()
    data = made.save_to_object()
    made.train()
    made.restore_from_object(data)
    assert (made.count, made.iteration) == (1, 1)
    made.stop()


def test_an_old_save_that_returns_a_prefix(tmp_path):
    """An old _save may return a prefix of its files' names, as TensorFlow's savers do; _restore gets that prefix."""
    with pytest.warns(DeprecationWarning, match="names of 2019"):

        class Old(ty.Trainable):
            def _train(self):
                return {}

            def _save(self, checkpoint_dir):
                for end in (".index", ".data"):
                    Path(checkpoint_dir, "model" + end).write_text(end)
                return os.path.join(checkpoint_dir, "model")

            def _restore(self, checkpoint):
                self.found = Path(checkpoint + ".index").read_text()

    made = build(Old, tmp_path)
    made.restore(made.save())
    made.stop()
    assert made.found == ".index"


def test_an_old_save_that_leads_out_is_refused(tmp_path):
    """Even an old _save may not return a path outside of the directory that it was given."""
    with pytest.warns(DeprecationWarning, match="names of 2019"):

        class Old(ty.Trainable):
            def _train(self):
                return {}

            def _save(self, checkpoint_dir):
                return str(tmp_path / "elsewhere")

    made = build(Old, tmp_path)
    with pytest.raises(ty.CheckpointError, match="returned the path"):
        made.save()
    made.stop()


def test_a_new_name_beside_an_old_one_wins(tmp_path):
    """A class that has both names in one place is new: it gets no warning, and its step is what runs."""

    class Both(ty.Trainable):
        def _train(self):
            return {"old": 1}

        def step(self):
            return {"new": 1}

    made = build(Both, tmp_path)
    assert "new" in made.train()
    made.stop()


def test_a_new_class_under_an_old_one(tmp_path):
    """A subclass of an old class may override by the new name, and call the old one through super()."""
    old, _ = old_style()

    class New(old):
        def step(self):
            return {**super()._train(), "extra": 1}

    made = build(New, tmp_path)
    result = made.train()
    made.stop()
    assert (result["count"], result["extra"]) == (1, 1)


# -- system usage, and streams ---------------------------------------------------------------------------------------


def test_log_sys_usage_adds_perf(tmp_path):
    """With log_sys_usage each result has a perf of CPU and RAM percentages; every one of them, at any speed."""
    made = build(Counting, tmp_path, {"log_sys_usage": True})
    results = made.train_buffered(60, 3)
    made.stop()
    for result in results:
        assert set(result["perf"]) >= {"cpu_util_percent", "ram_util_percent"}
        assert 0 < result["perf"]["ram_util_percent"] <= 100
    assert ty.open_run(made.logdir).metrics["perf"] == results[-1]["perf"]


def test_without_log_sys_usage_there_is_no_perf(counting):
    """perf is only there when it was asked for."""
    assert "perf" not in counting.train()


def test_log_sys_usage_ends_its_thread(tmp_path):
    """stop() ends the sampling thread; a failing setup does not leave one either."""
    import threading

    made = build(Counting, tmp_path, {"log_sys_usage": True})
    assert "trainyard-usage" in [t.name for t in threading.enumerate()]
    made.stop()
    assert "trainyard-usage" not in [t.name for t in threading.enumerate()]


def test_tee_is_a_text_stream(tmp_path):
    """A Tee writes to both, returns the count, and answers everything else like the terminal."""
    with open(tmp_path / "terminal", "w", encoding="ascii", errors="replace") as terminal:
        copy = io.StringIO()
        tee = Tee(terminal, copy)
        assert isinstance(tee, io.TextIOBase)
        assert tee.write("hello\n") == 6
        tee.writelines(["a\n", "b\n"])
        tee.flush()
        assert (tmp_path / "terminal").read_text() == copy.getvalue() == "hello\na\nb\n"
        assert (tee.fileno(), tee.isatty(), tee.closed) == (terminal.fileno(), False, False)
        assert (tee.encoding, tee.errors, tee.buffer) == ("ascii", "replace", terminal.buffer)
        assert tee.writable()
        assert not tee.readable()
    assert tee.closed


def test_tee_serves_a_subprocess(tmp_path):
    """A Tee has a file descriptor, so that it can be handed to a subprocess."""
    with open(tmp_path / "terminal", "w+") as terminal:
        tee = Tee(terminal, io.StringIO())
        subprocess.run([sys.executable, "-S", "-c", "print('child')"], stdout=tee, check=True)
    assert (tmp_path / "terminal").read_text() == "child\n"


def test_a_tee_outlives_its_copy(tmp_path):
    """Once the copy is closed, what is written still reaches the terminal, without an error."""
    terminal, copy = io.StringIO(), io.StringIO()
    tee = Tee(terminal, copy)
    copy.close()
    assert tee.write("late") == 4
    tee.flush()
    assert terminal.getvalue() == "late"


def test_closing_a_tee_closes_nobodys_stream():
    """close() leaves both streams open: they belong to others."""
    terminal, copy = io.StringIO(), io.StringIO()
    Tee(terminal, copy).close()
    assert (terminal.closed, copy.closed) == (False, False)


def test_nested_captures_give_the_streams_back(tmp_path):
    """Captures nest, in any order of ending, and the last one out leaves the process's own streams."""
    before = sys.stdout
    outer, inner = capture(tmp_path / "outer", None), capture(tmp_path / "inner", None)
    outer.__enter__()
    inner.__enter__()
    print("both")
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    left = sys.stdout
    sys.stdout = before
    assert (tmp_path / "outer").read_text() == (tmp_path / "inner").read_text() == "both\n"
    assert left is before


# -- what is built on it ---------------------------------------------------------------------------------------------


def test_validate_save_restore_of_a_good_one():
    """A trainable whose iterations go on in a fresh process is valid."""

    class Good(ty.Trainable):
        def setup(self, config):
            self.left = config["left"]

        def step(self):
            self.left -= 1
            return {"left": self.left}

        def save_checkpoint(self, checkpoint_dir):
            return {"left": self.left}

        def load_checkpoint(self, checkpoint):
            self.left = checkpoint["left"]

    assert ty.validate_save_restore(Good, {"left": 10}) is True


def test_validate_save_restore_of_one_that_cannot_load():
    """A trainable that cannot restore is refused with the reason."""

    class Bad(ty.Trainable):
        def step(self):
            return {}

        def save_checkpoint(self, checkpoint_dir):
            return {"a": 1}

        def load_checkpoint(self, checkpoint):
            raise KeyError("not what I saved")

    with pytest.raises(ty.CheckpointError, match=r"(?s)Bad does not resume.*not what I saved"):
        ty.validate_save_restore(Bad)


def test_validate_save_restore_of_one_that_saves_nothing():
    """A trainable without save_checkpoint is told so."""

    class Bare(ty.Trainable):
        def step(self):
            return {}

    with pytest.raises(NotImplementedError, match="save_checkpoint"):
        ty.validate_save_restore(Bare)


def test_validate_save_restore_of_a_class_beside_the_script(tmp_path):
    """The fresh process finds classes where this one did: in a module beside the script, from any directory."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model.py").write_text(
        textwrap.dedent("""
            import trainyard as ty

            class Model(ty.Trainable):
                def setup(self, config): self.n = 0
                def step(self): self.n += 1; return {"n": self.n}
                def save_checkpoint(self, checkpoint_dir): return {"n": self.n}
                def load_checkpoint(self, checkpoint): self.n = checkpoint["n"]
        """)
    )
    script = tmp_path / "code" / "check.py"
    script.write_text(
        "import trainyard as ty\nfrom model import Model\nif __name__ == '__main__': print(ty.validate_save_restore(Model))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_with_parameters_of_a_class(tmp_path):
    """setup gets the parameters by reference; the config and the given class are left as they are."""
    data = [1, 2, 3]

    class Needs(ty.Trainable):
        def setup(self, config, data=None, scale=1):
            self.data, self.scale = data, scale

        def step(self):
            return {"sum": sum(self.data) * self.scale}

    bound = ty.with_parameters(Needs, data=data, scale=2)
    assert bound.__name__ == "Needs"
    assert issubclass(bound, Needs)
    made = build(bound, tmp_path, {"lr": 1})
    assert made.data is data
    assert made.train()["sum"] == 12
    assert made.config == {"lr": 1}
    made.stop()
    plain = build(Needs, tmp_path)
    assert plain.data is None
    plain.stop()


def test_with_parameters_of_a_function(tmp_path):
    """A function gets the parameters by reference beside its config, and keeps its name."""
    data, got = {"big": 1}, []

    def train(config, data, scale=1):
        got.append((data, scale))
        ty.report({"x": config["x"]})

    bound = ty.with_parameters(train, data=data)
    result = run(bound, tmp_path, {"x": 5})
    assert result.status == "completed"
    assert got[0][0] is data
    assert result.name.startswith("train_")
    assert result.metrics["x"] == 5


def test_with_parameters_of_a_function_that_lacks_them():
    """A parameter that the function does not have, or one that is still missing, is a ConfigError."""

    def train(config, data, model):
        """Needs both."""

    with pytest.raises(ty.ConfigError, match="model"):
        ty.with_parameters(train, data=1)
    with pytest.raises(ty.ConfigError, match="oddity"):
        ty.with_parameters(train, data=1, model=2, oddity=3)


def test_with_parameters_of_something_else():
    """What is neither class nor function is refused."""
    with pytest.raises(ty.ConfigError, match="class or a function"):
        ty.with_parameters("module:name", data=1)


@pytest.mark.parametrize(
    "asked", [{"cpu": 2, "gpu": 1}, ty.Resources(cpu=2, gpu=1), lambda config: {"cpu": config["n"], "gpu": 1}]
)
def test_with_resources_of_a_class(tmp_path, asked):
    """The new class asks for these resources, keeps its name, and leaves the given one as it is."""
    bound = ty.with_resources(Counting, asked)
    assert bound.__name__ == "Counting"
    assert bound is not Counting
    assert bound.default_resource_request({"n": 2}) == ty.Resources(cpu=2, gpu=1)
    assert Counting.default_resource_request({"n": 2}) is None


def test_with_resources_of_a_function(tmp_path):
    """A function's copy asks for them; the given function is not touched."""

    def train(config):
        ty.report({"cpu": ty.get_run().resources.cpu})

    bound = ty.with_resources(train, {"cpu": 0.5})
    assert not hasattr(train, "default_resource_request")
    assert run(bound, tmp_path).metrics["cpu"] == 0.5
    assert run(train, tmp_path).metrics["cpu"] == 1


def test_with_parameters_keeps_the_resources(tmp_path):
    """with_parameters of something with resources still asks for them, class or function."""

    def train(config, data):
        ty.report({"cpu": ty.get_run().resources.cpu})

    def simple(config, data=None):
        ty.report({"cpu": ty.get_run().resources.cpu})

    bound = ty.with_parameters(ty.with_resources(Counting, {"cpu": 3}))
    assert bound.default_resource_request({}) == ty.Resources(cpu=3)
    assert run(ty.with_resources(ty.with_parameters(train, data=1), {"cpu": 2}), tmp_path).metrics["cpu"] == 2
    assert run(ty.with_parameters(ty.with_resources(simple, {"cpu": 2}), data=1), tmp_path).metrics["cpu"] == 2


def test_with_resources_before_the_parameters_are_given(tmp_path):
    """with_resources may come first, while the function still lacks a parameter."""

    def train(config, data):
        ty.report({"cpu": ty.get_run().resources.cpu})

    assert run(ty.with_parameters(ty.with_resources(train, {"cpu": 2}), data=1), tmp_path).metrics["cpu"] == 2


@pytest.mark.parametrize("bad", [{"cpus": 1}, {"cpu": -1}, {"cpu": "two"}, 7])
def test_bad_resources_are_refused(bad):
    """An unknown name or amount is a ConfigError at once."""
    with pytest.raises(ty.ConfigError):
        ty.with_resources(Counting, bad)


def test_with_resources_of_something_else():
    """What is neither class nor function is refused."""
    with pytest.raises(ty.ConfigError, match="class or a function"):
        ty.with_resources(3, {"cpu": 1})


def test_a_trainable_that_nobody_stopped_is_ended_with_the_process(tmp_path):
    """A trainable that nobody stopped is ended, and delivered, when the process ends."""
    python(
        """
        import sys, trainyard as ty
        class T(ty.Trainable):
            def step(self): return {"x": 1}
        t = T({}, storage=sys.argv[1])
        t.train()
        """.replace("\n        ", "\n"),
        tmp_path,
    )
    [path] = tmp_path.glob("*/*/run.json")
    assert ty.open_run(path.parent).status == "completed"
    assert len((path.parent / "result.json").read_text().splitlines()) == 1


def test_nothing_is_recorded_but_results(counting):
    """The journal of three steps holds three result records."""
    counting.train_buffered(60, 3)
    assert sum(isinstance(record, ResultRecord) for record in records(counting.logdir)) == 3
