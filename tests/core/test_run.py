"""run() and start_run(): stopping, callbacks, failures, resuming, signals, and what a run keeps."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainables import Counting, Watcher, iterations, python, records, run

import trainyard as ty
from trainyard.journal import EndedRecord, ResultRecord, ResumedRecord


class Fails(Counting):
    """Raises at each of the iterations in ``at``, once in this process."""

    at: list[int] = []

    def step(self):
        result = super().step()
        if self.count in self.at:
            self.at.remove(self.count)
            raise RuntimeError(f"at {self.count}")
        return result


def failing(*at):
    """A Fails that raises there."""
    return type("Fails", (Fails,), {"at": list(at)})


def interrupted_at(iteration):
    """A Counting to which Ctrl-C comes at that iteration, once."""
    pending = [iteration]

    class Interrupted(Counting):
        def step(self):
            result = super().step()
            if pending and self.count == pending[0]:
                pending.clear()
                os.kill(os.getpid(), signal.SIGINT)
            return result

    return Interrupted


# -- stopping --------------------------------------------------------------------------------------------------------


def test_a_threshold_stops_at_or_above(tmp_path):
    """A run ends with the first result that reaches the threshold, even by more than it asks."""
    assert iterations(run(Counting, tmp_path, stop={"count": 3})) == [1, 2, 3]
    assert iterations(run(Counting, tmp_path, stop={"count": 2.5})) == [1, 2, 3]


def test_the_first_of_several_thresholds_stops(tmp_path):
    """With several thresholds the first one that is reached ends the run."""
    assert iterations(run(Counting, tmp_path, stop={"count": 100, "training_iteration": 2})) == [1, 2]


def test_a_callable_stops(tmp_path):
    """A callable is asked with each Result; a truthy answer ends the run."""
    asked = []

    def stop(result):
        asked.append((type(result), result.seq, result["count"]))
        return result["count"] >= 2

    assert iterations(run(Counting, tmp_path, stop=stop)) == [1, 2]
    assert set(asked) == {(ty.Result, 1, 1), (ty.Result, 2, 2)}


def test_a_callable_is_asked_once_a_result(tmp_path):
    """A stop callable with a memory of its own, such as one with patience, sees each result once."""
    asked = []

    def stop(result):
        asked.append(result.seq)
        return len(asked) == 3

    def train(config):
        for _ in range(10):
            ty.report({})

    run(Counting, tmp_path, stop=stop)
    assert asked == [1, 2, 3]
    asked.clear()
    run(train, tmp_path, stop=stop)
    assert asked == [1, 2, 3]


@pytest.mark.parametrize("reported", [{"val": {"acc": 0.9}}, {"val/acc": 0.9}])
def test_nested_names_stop(tmp_path, reported):
    """A threshold on a/b looks into nested metrics, and takes a flat name of that form too."""

    def train(config):
        for _ in range(5):
            ty.report(reported)

    assert iterations(run(train, tmp_path, stop={"val/acc": 0.5})) == [1]


@pytest.mark.parametrize("value", [float("nan"), None, -1.0])
def test_what_never_reaches_the_threshold_does_not_stop(tmp_path, value):
    """NaN, None and smaller numbers do not end a run."""

    def train(config):
        for _ in range(3):
            ty.report({"loss": value})

    assert iterations(run(train, tmp_path, stop={"loss": 0})) == [1, 2, 3]


def test_a_stop_metric_that_no_result_has_is_told(tmp_path, caplog):
    """A typing mistake in stop is one warning with the nearest name, since the run would never end."""
    with caplog.at_level(logging.WARNING, logger="trainyard"):
        run(Counting, tmp_path, stop={"cuont": 5, "training_iteration": 3})
    assert len(caplog.records) == 1
    assert "did you mean 'count'" in caplog.text


@pytest.mark.parametrize("bad", [5, "count", {"count": "many"}, {"count": True}, {"count": None}])
def test_a_bad_stop_is_refused_before_anything_runs(tmp_path, bad):
    """What is no rule is a ConfigError that names stop."""
    with pytest.raises(ty.ConfigError, match="stop"):
        run(Counting, tmp_path, stop=bad)
    assert not list(tmp_path.iterdir())


def test_an_exception_in_a_stop_callable_fails_the_run(tmp_path):
    """What the stop callable raises is the run's error."""

    def stop(result):
        raise ZeroDivisionError("mine")

    result = run(Counting, tmp_path, stop=stop)
    assert isinstance(result.error, ZeroDivisionError)


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_on_result_may_change_the_result(tmp_path):
    """What on_result puts into the result is returned, recorded, and what the stop condition sees."""

    class Doubles:
        @ty.hookimpl
        def on_result(self, run, result):
            result["double"] = 2 * result["count"]

    result = run(Counting, tmp_path, callbacks=[Doubles()], stop={"double": 6})
    assert [row["double"] for row in result.history()] == [2, 4, 6]


def test_should_stop_ends_the_run_and_the_first_answer_counts(tmp_path):
    """Callbacks are asked in order; the first that answers decides, None passes on."""

    class Answers:
        def __init__(self, answer):
            self.answer = answer

        @ty.hookimpl
        def should_stop(self, result):
            return self.answer if result["count"] == 2 else None

    assert iterations(run(Counting, tmp_path, callbacks=[Answers(None), Answers(True)])) == [1, 2]
    later = run(Counting, tmp_path, callbacks=[Answers(False), Answers(True)], stop={"training_iteration": 4})
    assert iterations(later) == [1, 2, 3, 4]


def test_hooks_get_the_run(tmp_path):
    """run is the RunInfo of this run."""
    seen = []

    class Looks:
        @ty.hookimpl
        def should_stop(self, run):
            seen.append(run)
            return True

    result = run(Counting, tmp_path, {"lr": 1}, callbacks=[Looks()], experiment="mine", tags={"a": "b"})
    assert isinstance(seen[0], ty.RunInfo)
    info = seen[0]
    assert (info.id, info.name, info.path) == (result.id, result.name, result.path)
    assert (info.experiment, info.config, info.tags) == ("mine", {"lr": 1}, {"a": "b"})


@pytest.mark.parametrize("hook", ["on_result", "should_stop"])
def test_an_exception_in_a_callback_propagates(tmp_path, hook):
    """What the user's own callback raises is the run's error; on_result refuses the result, should_stop comes after it."""

    class Raises:
        @ty.hookimpl
        def on_result(self, result):
            if hook == "on_result" and result["count"] == 2:
                raise LookupError("mine")

        @ty.hookimpl
        def should_stop(self, result):
            if hook == "should_stop" and result["count"] == 2:
                raise LookupError("mine")

    result = run(Counting, tmp_path, callbacks=[Raises()], stop={"training_iteration": 5})
    assert isinstance(result.error, LookupError)
    assert iterations(result) == ([1] if hook == "on_result" else [1, 2])


@pytest.mark.parametrize("bad", [Watcher, object(), 5])
def test_a_callback_that_is_none_is_refused(tmp_path, bad):
    """A class, or an object without a callback's hook, is refused before anything runs."""
    with pytest.raises(ty.TrainyardError):
        run(Counting, tmp_path, callbacks=[bad], stop={"training_iteration": 1})
    assert not list(tmp_path.iterdir())


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_is_in_the_result(tmp_path):
    """run() returns with status failed, the exception object, its traceback in error.txt, and the history so far."""
    result = run(failing(3), tmp_path)
    assert result.status == "failed"
    assert isinstance(result.error, RuntimeError)
    assert iterations(result) == [1, 2]
    with pytest.raises(RuntimeError, match="at 3") as caught:
        result.raise_if_failed()
    assert caught.value is result.error
    text = Path(result.path, "error.txt").read_text()
    assert "RuntimeError: at 3" in text
    assert "in step" in text


def test_a_failure_read_from_the_disk(tmp_path):
    """Another process knows the failure by its words; the journal's last record has them too."""
    result = run(failing(1), tmp_path)
    found = ty.open_run(result.path)
    assert found.status == "failed"
    with pytest.raises(ty.TrainyardError, match="RuntimeError: at 1"):
        found.raise_if_failed()
    last = records(result.path)[-1]
    assert isinstance(last, EndedRecord)
    assert (last.status, last.error) == ("failed", "RuntimeError: at 1")


def test_raise_if_failed_of_a_good_run(tmp_path):
    """A run that completed has no error and raises nothing."""
    result = run(Counting, tmp_path, stop={"training_iteration": 1})
    assert result.error is None
    assert result.raise_if_failed() is None
    assert not Path(result.path, "error.txt").exists()


def test_max_failures_goes_on_from_the_newest_checkpoint(tmp_path):
    """After a failure the run continues at its checkpoint; each iteration stands once in the history."""
    result = run(
        failing(4, 6), tmp_path, stop={"training_iteration": 7}, checkpoint={"every": 2}, failures={"max_failures": 2}
    )
    assert result.status == "completed"
    assert iterations(result) == [1, 2, 3, 4, 5, 6, 7]
    assert [row["count"] for row in result.history()] == [1, 2, 3, 4, 5, 6, 7]
    assert Path(result.path, "error.txt").read_text().count("RuntimeError: at") == 2
    assert [type(record) for record in records(result.path)].count(ResumedRecord) == 2


def test_one_failure_too_many(tmp_path):
    """The failure after max_failures ends the run, with that last exception."""
    result = run(failing(2, 3, 4), tmp_path, checkpoint={"every": 1}, failures={"max_failures": 2})
    assert (result.status, str(result.error)) == ("failed", "at 4")


def test_failures_for_ever(tmp_path):
    """max_failures -1 never gives up."""
    result = run(
        failing(*range(1, 9)), tmp_path, checkpoint={"every": 1}, failures={"max_failures": -1}, stop={"count": 8}
    )
    assert (result.status, iterations(result)) == ("completed", list(range(1, 9)))


def test_a_failure_without_a_checkpoint_begins_again(tmp_path):
    """Without any checkpoint the run begins from the beginning, counters and history too."""
    result = run(failing(3), tmp_path, failures={"max_failures": 1}, stop={"training_iteration": 4})
    assert result.status == "completed"
    assert iterations(result) == [1, 2, 3, 4]
    assert result.metrics["iterations_since_restore"] == 4


def test_a_failing_setup_counts_as_a_failure(tmp_path):
    """What setup raises is the run's error, and may be tried again."""
    left = [1]

    class Starts(Counting):
        def setup(self, config):
            super().setup(config)
            if left:
                left.pop()
                raise ConnectionError("not yet")

    result = run(Starts, tmp_path, failures={"max_failures": 1}, stop={"training_iteration": 1})
    assert result.status == "completed"
    left.append(1)
    assert isinstance(run(Starts, tmp_path).error, ConnectionError)


def test_a_damaged_newest_checkpoint_falls_back(tmp_path, caplog):
    """A retry goes on from the newest checkpoint that verifies, with a warning that names the damaged file."""

    class Damages(Counting):
        done = False

        def step(self):
            result = super().step()
            if self.count == 5 and not Damages.done:
                Damages.done = True
                tree = Path(self.logdir, "checkpoints", "checkpoint_000001", "state.msgpack")
                tree.write_bytes(tree.read_bytes()[:-1])
                raise RuntimeError("now")
            return result

    with caplog.at_level(logging.WARNING, logger="trainyard"):
        result = run(
            Damages, tmp_path, checkpoint={"every": 2}, failures={"max_failures": 1}, stop={"training_iteration": 6}
        )
    assert iterations(result) == [1, 2, 3, 4, 5, 6]
    assert [row["iterations_since_restore"] for row in result.history()] == [1, 2, 1, 2, 3, 4]
    assert "state.msgpack" in caplog.text


@pytest.mark.parametrize(
    ("code", "status"), [(0, "completed"), (None, "completed"), (3, "failed"), ("no data", "failed")]
)
def test_sys_exit_in_the_training_code(tmp_path, code, status):
    """sys.exit() ends the run: without a code as completed, with one as failed; run() returns."""

    def train(config):
        ty.report({})
        sys.exit(code)

    assert run(train, tmp_path).status == status


def test_the_last_checkpoint_at_the_end(tmp_path):
    """A trainable that can save is saved after its last iteration, unless at_end says no; not twice for one iteration."""
    assert [c.iteration for c in run(Counting, tmp_path, stop={"count": 3}).checkpoints] == [3]
    assert run(Counting, tmp_path, stop={"count": 3}, checkpoint={"at_end": False}).checkpoint is None
    every = run(Counting, tmp_path, stop={"count": 4}, checkpoint={"every": 2})
    assert [c.iteration for c in every.checkpoints] == [2, 4]


@pytest.mark.parametrize("policy", [{"every": 2}, {"at_end": True}])
def test_checkpoints_of_what_cannot_be_saved_are_refused(tmp_path, policy):
    """Asking for checkpoints of a function, or a class without save_checkpoint, is a ConfigError that says what to do."""

    class Bare(ty.Trainable):
        def step(self):
            return {}

    with pytest.raises(ty.ConfigError, match=r"Bare\.save_checkpoint"):
        run(Bare, tmp_path, checkpoint=policy)
    with pytest.raises(ty.ConfigError, match=r"report\(metrics, checkpoint="):
        run(lambda config: None, tmp_path, checkpoint=policy)


def test_retention_keeps_the_best_and_the_newest(tmp_path):
    """keep and metric keep the best checkpoints, and the newest besides."""

    def train(config):
        for i, score in enumerate([5, 9, float("nan"), 7, 1]):
            ty.report({"val": {"score": score}}, checkpoint={"i": i})

    result = run(train, tmp_path, checkpoint={"keep": 2, "metric": "val/score"})
    assert [c.index for c in result.checkpoints] == [1, 3, 4]
    assert result.best_checkpoint("val/score").index == 1
    assert result.best_checkpoint("val/score", "min").index == 4
    assert result.checkpoint.index == 4


# -- resuming --------------------------------------------------------------------------------------------------------


def test_resume_continues_counters_and_history(tmp_path):
    """The same run goes on: state, counters and seq continue, and each iteration stands once."""
    first = run(interrupted_at(4), tmp_path, name="it", stop={"training_iteration": 8})
    assert (first.status, iterations(first)) == ("interrupted", [1, 2, 3, 4])
    second = run(Counting, tmp_path, name="it", stop={"training_iteration": 8}, resume="must")
    assert (second.id, second.path, second.status) == (first.id, first.path, "completed")
    assert iterations(second) == list(range(1, 9))
    assert [row["count"] for row in second.history()] == list(range(1, 9))
    assert second.metrics["iterations_since_restore"] == 4
    assert second.metrics["time_total_s"] > second.metrics["time_since_restore"]


def test_resume_supersedes_what_lies_beyond_the_checkpoint(tmp_path):
    """Results after the checkpoint are superseded in the history, and their seqs are never used again."""
    first = run(failing(6), tmp_path, name="it", checkpoint={"every": 2})
    assert iterations(first) == [1, 2, 3, 4, 5]
    second = run(Counting, tmp_path, name="it", stop={"training_iteration": 7}, resume="must")
    assert iterations(second) == [1, 2, 3, 4, 5, 6, 7]
    assert [row.seq for row in second.history()] == [1, 2, 3, 4, 6, 7, 8]
    seqs = [record.seq for record in records(second.path) if isinstance(record, ResultRecord)]
    assert seqs == [1, 2, 3, 4, 5, 6, 7, 8]


def test_resumed_files_hold_each_iteration_once(tmp_path):
    """After a resume result.json and progress.csv hold exactly the history."""
    run(failing(6), tmp_path, name="it", checkpoint={"every": 2}, trackers=["json", "csv"])
    result = run(Counting, tmp_path, name="it", stop={"training_iteration": 7}, resume="must", trackers=["json", "csv"])
    import csv
    import json

    rows = [json.loads(line) for line in Path(result.path, "result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    with open(Path(result.path, "progress.csv"), newline="") as file:
        assert [row["training_iteration"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5", "6", "7"]


def test_resume_never_takes_a_new_name(tmp_path):
    """An existing name gets a suffix; the old run is untouched."""
    first = run(Counting, tmp_path, name="it", stop={"count": 1})
    second = run(Counting, tmp_path, name="it", stop={"count": 2})
    assert first.name == "it"
    assert second.name.startswith("it_")
    assert Path(second.path).name == second.name
    assert iterations(ty.open_run(first.path)) == [1]


def test_resume_allow_with_nothing_to_resume_begins(tmp_path):
    """resume="allow" without such a run begins one of that name."""
    result = run(Counting, tmp_path, name="it", stop={"count": 1}, resume="allow")
    assert (result.name, iterations(result)) == ("it", [1])


@pytest.mark.parametrize("name", ["it", None])
def test_resume_must_with_nothing_to_resume_is_an_error(tmp_path, name):
    """resume="must" without such a run is a ConfigError that says what was looked for; nothing is written."""
    with pytest.raises(ty.ConfigError, match="there is no"):
        run(Counting, tmp_path, name=name, resume="must")
    assert not list(tmp_path.rglob("run.json"))


def test_resume_without_a_name_takes_the_newest_unfinished(tmp_path):
    """Without a name the newest run of the experiment that did not complete goes on."""
    run(failing(2), tmp_path, name="old", experiment="e", checkpoint={"every": 1})
    unfinished = run(failing(3), tmp_path, name="new", experiment="e", checkpoint={"every": 1})
    run(Counting, tmp_path, name="finished", experiment="e", stop={"count": 1})
    run(failing(3), tmp_path, name="other", experiment="f", checkpoint={"every": 1})
    result = run(Counting, tmp_path, experiment="e", resume="allow", stop={"count": 4})
    assert result.id == unfinished.id
    assert iterations(result) == [1, 2, 3, 4]


def test_resume_of_a_finished_run_can_go_further(tmp_path):
    """A completed run that is resumed with a later stop goes on from its end."""
    first = run(Counting, tmp_path, name="it", stop={"count": 2})
    same = run(Counting, tmp_path, name="it", stop={"count": 2}, resume="must")
    assert (same.status, iterations(same)) == ("completed", [1, 2])
    further = run(Counting, tmp_path, name="it", stop={"count": 4}, resume="must")
    assert (further.id, iterations(further)) == (first.id, [1, 2, 3, 4])


def test_on_resume_the_given_config_wins(tmp_path):
    """The config of the resume is used and recorded; the results before keep the one they were made with."""
    run(failing(3), tmp_path, {"lr": 1}, name="it", checkpoint={"every": 1})
    result = run(Counting, tmp_path, {"lr": 2}, name="it", resume="must", stop={"count": 4})
    assert result.config == {"lr": 2}
    assert [row["config"]["lr"] for row in result.history()] == [1, 1, 2, 2]


def test_on_resume_the_given_tags_are_recorded(tmp_path):
    """Tags that the resume gives are added to the run's."""
    run(failing(2), tmp_path, name="it", checkpoint={"every": 1}, tags={"a": "1"})
    run(Counting, tmp_path, name="it", resume="must", stop={"count": 3}, tags={"b": "2"})
    assert ty.open_run(tmp_path / "default" / "it").record.tags == {"a": "1", "b": "2"}


def test_resume_of_a_function(tmp_path):
    """A resumed function finds its checkpoint by get_checkpoint()."""

    def train(config):
        start = ty.get_checkpoint()
        for i in range(start.load()["i"] + 1 if start else 0, config["until"]):
            ty.report({"i": i}, checkpoint={"i": i})
        if config["fail"]:
            raise RuntimeError

    run(train, tmp_path, {"until": 2, "fail": True}, name="it")
    result = run(train, tmp_path, {"until": 4, "fail": False}, name="it", resume="must")
    assert [row["i"] for row in result.history()] == [0, 1, 2, 3]


def test_a_bad_resume_word_is_refused(tmp_path):
    """resume is one of three words."""
    with pytest.raises(ty.ConfigError, match="resume"):
        run(Counting, tmp_path, resume="yes")


# -- signals ---------------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time, trainyard as ty
class Slow(ty.Trainable):
    def setup(self, config): self.n = 0
    def step(self):
        self.n += 1
        print(self.n, flush=True)
        time.sleep(0.02)
        return {"n": self.n}
    def save_checkpoint(self, checkpoint_dir): return {"n": self.n}
    def load_checkpoint(self, checkpoint): self.n = checkpoint["n"]
def function(config):
    n = 0
    try:
        while True:
            n += 1
            print(n, flush=True)
            time.sleep(0.02)
            ty.report({"n": n}, checkpoint={"n": n})
    finally:
        print("finally", flush=True)
try:
    result = ty.run(Slow if sys.argv[2] == "class" else function, storage=sys.argv[1], name="it", trackers=["json"])
    print("returned", result.status, flush=True)
except KeyboardInterrupt:
    print("raised", flush=True)
"""


def start_worker(tmp_path, style):
    """A training process that has begun its third step."""
    child = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), style],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in child.stdout:
        if line == "3\n":
            return child
    raise AssertionError(child.stderr.read())


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "preempted")], ids=["SIGINT", "SIGTERM"]
)
@pytest.mark.parametrize("style", ["class", "function"])
def test_a_signal_ends_the_run_after_the_step(tmp_path, number, status, style):
    """Ctrl-C and SIGTERM let the step finish, leave a last checkpoint, and run() returns with the status."""
    child = start_worker(tmp_path, style)
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert out.splitlines()[-1] == f"returned {status}"
    assert "Traceback" not in err
    assert style == "class" or "finally" in out
    result = ty.open_run(tmp_path / "default" / "it")
    assert result.status == status
    assert result.checkpoint.iteration == result.metrics["training_iteration"] == len(result.history()) >= 3
    assert len(Path(result.path, "result.json").read_text().splitlines()) == len(result.history())
    assert [record.status for record in records(result.path) if isinstance(record, EndedRecord)] == [status]


def test_the_command_exits_with_the_signals_code(tmp_path):
    """`trainyard run` ends with 143 after SIGTERM, and the run can be resumed from there."""
    (tmp_path / "slow.py").write_text(WORKER.partition("def function")[0])
    (tmp_path / "run.yaml").write_text("trainable: slow.py:Slow\ntrackers: []\nname: it\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "trainyard.cli.main", "run", "run.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in child.stdout:
        if line == "3\n":
            break
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 143, err
    assert "trainyard resume" in out or "resume" in out
    assert ty.open_run(tmp_path / "runs" / "default" / "it").status == "preempted"


def test_a_second_ctrl_c_raises_at_once(tmp_path):
    """The second Ctrl-C does not wait for the step: KeyboardInterrupt comes out of run(), the run is interrupted."""
    code = """
import os, signal, sys, time, trainyard as ty
class Stuck(ty.Trainable):
    def step(self):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        return {}
try:
    ty.run(Stuck, storage=sys.argv[1], name="it", trackers=[])
except KeyboardInterrupt:
    print("raised")
"""
    assert python(code, tmp_path).stdout == "raised\n"
    assert ty.open_run(tmp_path / "default" / "it").status == "interrupted"


def test_the_signal_handlers_are_given_back(tmp_path):
    """After run() the process has the handlers that it had before."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    inside = []

    def train(config):
        inside.append(signal.getsignal(signal.SIGTERM))

    run(train, tmp_path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert inside[0] != before[1]


def test_a_killed_process_is_found_dead(tmp_path):
    """A run whose process was killed reads as killed, holds all results, and resumes."""
    child = start_worker(tmp_path, "function")
    child.kill()
    child.communicate()
    found = ty.open_run(tmp_path / "default" / "it")
    assert found.status == "killed"
    assert len(found.history()) >= 2

    def train(config):
        ty.report({"n": ty.get_checkpoint().load()["n"] + 1})

    result = run(train, tmp_path, resume="must")
    assert result.id == found.id
    assert [row["n"] for row in result.history()] == list(range(1, len(result.history()) + 1))


# -- what a run keeps ------------------------------------------------------------------------------------------------


def test_the_run_directory(tmp_path):
    """Runs lie in storage/experiment/name; run.json tells who, what, where and when, and the tags."""
    result = run(Counting, tmp_path, {"lr": 0.1}, experiment="exp", stop={"count": 1}, tags={"team": "a"})
    assert Path(result.path) == tmp_path / "exp" / f"Counting_{result.id}"
    record = ty.open_run(result.path).record
    assert (record.name, record.experiment, record.config) == (result.name, "exp", {"lr": 0.1})
    assert record.trainable == f"{Counting.__module__}:Counting"
    assert record.tags == {"team": "a"}
    assert record.status == "completed"
    assert record.host
    assert record.created > 0
    assert record.trainyard == ty.__version__
    assert record.python == ".".join(map(str, sys.version_info[:3]))


def test_a_long_or_odd_name_of_a_trainable_is_made_safe(tmp_path):
    """A directory's name has at most 60 characters that every filesystem takes."""
    odd = type("Tränable<" + "x" * 200, (Counting,), {})
    name = run(odd, tmp_path, stop={"count": 1}).name
    assert len(name) <= 60
    assert name.isascii()
    assert not set(name) & set('<>:"/\\|?*')


@pytest.mark.parametrize("bad", ["a/b", "..", "", "x" * 61, "a b", "CON", ".hidden", "é"])
@pytest.mark.parametrize("what", ["name", "experiment"])
def test_names_that_some_filesystem_refuses_are_refused(tmp_path, what, bad):
    """A name or experiment that cannot be a directory everywhere is a ConfigError that names the key."""
    with pytest.raises(ty.ConfigError, match=what):
        run(Counting, tmp_path, stop={"count": 1}, **{what: bad})
    assert not list(tmp_path.iterdir())


def test_log_to_file(tmp_path, capsys):
    """True copies into stdout and stderr; one name gets both; two names get one each. The terminal still gets all."""

    def train(config):
        print("to out")
        print("to err", file=sys.stderr)

    folder = Path(run(train, tmp_path, log_to_file=True).path)
    assert (folder / "stdout").read_text() == "to out\n"
    assert (folder / "stderr").read_text() == "to err\n"
    folder = Path(run(train, tmp_path, log_to_file="all.log").path)
    assert (folder / "all.log").read_text() == "to out\nto err\n"
    folder = Path(run(train, tmp_path, log_to_file=("o", "e")).path)
    assert ((folder / "o").read_text(), (folder / "e").read_text()) == ("to out\n", "to err\n")
    folder = Path(run(train, tmp_path).path)
    assert not (folder / "stdout").exists()
    assert capsys.readouterr().out == "to out\n" * 4


@pytest.mark.parametrize("bad", [("a", "b", "c"), ("a",), 7, {"a": "b"}, [1, 2]])
def test_a_bad_log_to_file_is_refused(tmp_path, bad):
    """Anything but a bool, one name or two names is a ConfigError before anything runs."""
    with pytest.raises(ty.ConfigError, match="log_to_file"):
        run(Counting, tmp_path / "s", stop={"count": 1}, log_to_file=bad)
    assert not (tmp_path / "s").exists()


def test_chdir_only_when_asked(tmp_path, monkeypatch):
    """The working directory is the run's with chdir=True, else stays; afterwards it is as before."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def train(config):
        seen.append(Path.cwd())

    result = run(train, tmp_path, chdir=True)
    run(train, tmp_path)
    assert seen == [Path(result.path), tmp_path]
    assert Path.cwd() == tmp_path


def test_a_relative_storage_stays_where_it_was_said(tmp_path, monkeypatch):
    """A relative storage belongs to the working directory of that moment, also for a later run elsewhere and with chdir."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    paths = []
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path / name)
        paths.append(run(Counting, "here", stop={"count": 1}, chdir=True, checkpoint={"every": 1}).path)
    assert [Path(path).parts[len(tmp_path.parts)] for path in paths] == ["one", "two"]


def test_a_storage_that_cannot_be_written_is_refused(tmp_path):
    """A storage below a file is a ConfigError that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ty.ConfigError, match="storage"):
        run(Counting, tmp_path / "file", stop={"count": 1})


def test_a_live_run_is_locked(tmp_path):
    """Resuming a run that another process writes is RunLocked, with its host and pid; nothing is disturbed."""
    child = start_worker(tmp_path, "class")
    try:
        with pytest.raises(ty.RunLocked, match=f"host .*pid {child.pid}"):
            run(Counting, tmp_path, name="it", resume="allow")
        assert ty.open_run(tmp_path / "default" / "it").status == "running"
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=30)
    assert ty.open_run(tmp_path / "default" / "it").status == "preempted"


def test_a_live_run_in_this_process_is_locked_too(tmp_path):
    """A second writer in the same process is refused as well."""
    with (
        ty.start_run(storage=tmp_path, name="it", trackers=[]) as opened,
        pytest.raises(ty.RunLocked, match=f"pid {os.getpid()}"),
    ):
        run(Counting, tmp_path, experiment=opened.experiment, name="it", resume="must")


def test_the_lock_is_free_after_the_end(tmp_path):
    """A run that failed, or could not even start, locks nobody out."""
    run(failing(1), tmp_path, name="it")
    with pytest.raises(ty.PluginNotFound):
        run(Counting, tmp_path, name="it", resume="must", trackers=["nothing-of-that-name"])
    assert run(Counting, tmp_path, name="it", resume="must", stop={"count": 1}).status == "completed"


def test_resources_are_the_first_that_says_so(tmp_path):
    """Explicit resources beat the trainable's own request; the default is one CPU."""

    class Wants(Counting):
        @classmethod
        def default_resource_request(cls, config):
            return {"cpu": config["n"]}

        def step(self):
            return {**super().step(), "cpu": self.trial_resources.cpu}

    stop = {"count": 1}
    assert run(Wants, tmp_path, {"n": 3}, stop=stop).metrics["cpu"] == 3
    assert run(Wants, tmp_path, {"n": 3}, stop=stop, resources={"cpu": 2}).metrics["cpu"] == 2
    assert run(Wants, tmp_path, {"n": 3}, stop=stop, resources=ty.Resources(cpu=5)).metrics["cpu"] == 5


@pytest.mark.parametrize("bad", [3, "no-colon", dict, object()])
def test_what_is_no_trainable_is_refused(tmp_path, bad):
    """A trainable is a Trainable class, a function, or words; anything else is a ConfigError."""
    with pytest.raises(ty.ConfigError, match="trainable"):
        run(bad, tmp_path)


def test_get_run_inside_and_outside(tmp_path):
    """get_run() is the run inside of it, and None outside."""
    seen = []

    def train(config):
        seen.append(ty.get_run().name)

    assert ty.get_run() is None
    result = run(train, tmp_path)
    assert seen == [result.name]
    assert ty.get_run() is None


def test_open_run_by_path_id_prefix_and_name(tmp_path):
    """A run is found by its directory, URL, id, the beginning of its id, or its name."""
    result = run(Counting, tmp_path, stop={"count": 1})
    for place in (result.path, Path(result.path), Path(result.path).as_uri(), result.id, result.id[:6], result.name):
        assert ty.open_run(place, tmp_path).id == result.id
    with pytest.raises(ty.ConfigError, match="unknown run"):
        ty.open_run("zzz", tmp_path)


def test_a_result_as_a_table(tmp_path):
    """dataframe() has a row a result and a column a metric, nested names joined with /."""

    def train(config):
        ty.report({"loss": 1.0, "val": {"acc": 0.5}})
        ty.report({"loss": 0.5, "extra": 1})

    frame = run(train, tmp_path, {"lr": 0.1}).dataframe()
    assert list(frame["loss"]) == [1.0, 0.5]
    assert frame["val/acc"][0] == 0.5
    assert list(frame["config/lr"]) == [0.1, 0.1]
    assert list(frame["seq"]) == [1, 2]


# -- start_run -------------------------------------------------------------------------------------------------------


def test_start_run_is_a_logger_around_any_loop(tmp_path):
    """log, log_artifact and save_checkpoint work in a with block, which ends the run as completed."""
    (tmp_path / "plot.png").write_bytes(b"png")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_text("1")
    storage = tmp_path / "runs"
    with ty.start_run(experiment="mine", config={"a": 1}, storage=storage, trackers=["json"], name="it") as opened:
        assert ty.get_run() is opened
        returned = opened.log({"loss": 0.3}, step=7)
        opened.log({"loss": 0.2})
        opened.log_artifact(tmp_path / "plot.png")
        saved = opened.save_checkpoint(tmp_path / "model")
    assert ty.get_run() is None
    found = ty.open_run(storage / "mine" / "it")
    assert found.status == "completed"
    assert [(row.seq, row.step, row["loss"]) for row in found.history()] == [(1, 7, 0.3), (2, 2, 0.2)]
    assert found.history()[0].metrics == returned
    assert Path(found.path, "artifacts", "plot.png").read_bytes() == b"png"
    assert found.checkpoint == saved
    assert Path(saved.path, "w").read_text() == "1"
    assert len(Path(found.path, "result.json").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("raised", "status"),
    [(ValueError("mine"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(2), "failed"), (SystemExit(0), "completed")],
    ids=["exception", "ctrl-c", "exit 2", "exit 0"],
)  # fmt: skip
def test_an_exception_in_the_block_ends_the_run_and_propagates(tmp_path, raised, status):
    """The with block never swallows an exception, and the run's status tells of it."""

    def work():
        with ty.start_run(storage=tmp_path, trackers=[], name="it") as opened:
            opened.log({"a": 1})
            raise raised

    with pytest.raises(type(raised)):
        work()
    found = ty.open_run(tmp_path / "default" / "it")
    assert found.status == status
    assert len(found.history()) == 1
    assert Path(found.path, "error.txt").exists() == (status == "failed")


def test_finish_by_hand_and_twice(tmp_path):
    """Without a with block finish() ends the run; a second one changes nothing; a log after it is refused."""
    opened = ty.start_run(storage=tmp_path, trackers=[])
    opened.log({"a": 1})
    result = opened.finish()
    assert (result.status, opened.status) == ("completed", "completed")
    assert opened.finish("failed").status == "completed"
    with pytest.raises(ty.JournalError, match="ended"):
        opened.log({"a": 2})
    assert len(ty.open_run(result.path).history()) == 1


def test_run_log_refuses_what_is_no_dict(tmp_path):
    """log() of something else is a MetricError, and counts for nothing."""
    with ty.start_run(storage=tmp_path, trackers=[]) as opened:
        for bad in (3, None, [("a", 1)]):
            with pytest.raises(ty.MetricError, match="dict"):
                opened.log(bad)
        assert opened.log({})["training_iteration"] == 1


def test_an_unfinished_run_is_ended_with_the_process(tmp_path):
    """A process that ends without finish(), even by an exception, says how it ended and delivers all."""
    code = """
import sys, trainyard as ty
run = ty.start_run(storage=sys.argv[1], name=sys.argv[2], trackers=["json"])
run.log({"a": 1})
if sys.argv[2] == "bad":
    raise ValueError("mine")
"""
    python(code, tmp_path, "good")
    python(code, tmp_path, "bad", check=False)
    good, bad = (ty.open_run(tmp_path / "default" / name) for name in ("good", "bad"))
    assert (good.status, bad.status) == ("completed", "failed")
    for found in (good, bad):
        assert len(Path(found.path, "result.json").read_text().splitlines()) == 1


def test_artifacts_of_every_kind(tmp_path):
    """Files and directories are kept under their name or a given one; a second one of a name replaces the first."""
    (tmp_path / "f.txt").write_text("one")
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / "inner" / "x").write_text("x")
    with ty.start_run(storage=tmp_path / "s", trackers=[]) as opened:
        opened.log_artifact(tmp_path / "f.txt", "deep/er/g.txt")
        opened.log_artifact(tmp_path / "d")
        opened.log_artifact(tmp_path / "f.txt")
        (tmp_path / "f.txt").write_text("two")
        opened.log_artifact(str(tmp_path / "f.txt"))
        (tmp_path / "d" / "inner" / "x").unlink()
        opened.log_artifact(tmp_path / "d")
    kept = Path(opened.path, "artifacts")
    assert (kept / "deep" / "er" / "g.txt").read_text() == "one"
    assert (kept / "f.txt").read_text() == "two"
    assert not (kept / "d" / "inner" / "x").exists()
    assert not list(Path(opened.path).glob(".artifact-*"))


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "a/../../out.txt", ".", "..", "a/..", "link/out.txt"])
def test_artifact_names_that_leave_the_directory_are_refused(tmp_path, name):
    """A name that leads out of artifacts/, also by a link in it, is a ConfigError, and nothing is written."""
    source = tmp_path / "f.txt"
    source.write_text("one")
    (tmp_path / "elsewhere").mkdir()
    with ty.start_run(storage=tmp_path / "s", trackers=[]) as opened:
        kept = Path(opened.path, "artifacts")
        kept.mkdir()
        (kept / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ty.ConfigError, match="leads out"):
            opened.log_artifact(source, name)
        assert list(kept.iterdir()) == [kept / "link"]
        assert not list(tmp_path.rglob("out.txt"))
        assert not list(Path(opened.path).glob(".artifact-*"))
    assert "ArtifactRecord" not in [type(record).__name__ for record in records(opened.path)]


def test_an_artifact_that_does_not_exist_is_refused(tmp_path):
    """A missing file is a ConfigError that names it."""
    with ty.start_run(storage=tmp_path, trackers=[]) as opened, pytest.raises(ty.ConfigError, match="no such file"):
        opened.log_artifact(tmp_path / "nowhere")


def test_a_file_may_replace_a_directory_of_that_name(tmp_path):
    """An artifact replaces one of the same name, whichever of them is a directory."""
    (tmp_path / "f").write_text("file")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("x")
    with ty.start_run(storage=tmp_path / "s", trackers=[]) as opened:
        opened.log_artifact(tmp_path / "d", "it")
        opened.log_artifact(tmp_path / "f", "it")
        assert Path(opened.path, "artifacts", "it").read_text() == "file"
        opened.log_artifact(tmp_path / "d", "it")
        assert Path(opened.path, "artifacts", "it", "x").read_text() == "x"


@pytest.mark.parametrize("source", [7, None, ["a"]])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, source):
    """save_checkpoint takes a dict, a directory or a Checkpoint."""
    with ty.start_run(storage=tmp_path, trackers=[]) as opened:
        with pytest.raises(ty.CheckpointError, match="a dict, a directory or a Checkpoint"):
            opened.save_checkpoint(source)
        assert opened.checkpoints.all() == []


# -- fork ------------------------------------------------------------------------------------------------------------


def in_child(work):
    """Run that in a forked child; what it returns comes back."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send():
        try:
            sender.send(work())
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")
        sender.close()

    child = context.Process(target=send)
    child.start()
    sender.close()
    answer = receiver.recv()
    child.join()
    return answer


def written(path):
    """The files of a run that only its owner may write, with their content."""
    folders = [Path(path, name) for name in ("journal", "artifacts", "checkpoints", "delivery")]
    return {file: file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file()}


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "work",
    [
        lambda run: run.log({"from": "child"}),
        lambda run: run.log_artifact(__file__),
        lambda run: run.save_checkpoint({"from": "child"}),
    ],
    ids=["log", "log_artifact", "save_checkpoint"],
)
def test_a_forked_child_cannot_log(tmp_path, work):
    """What a child logs or saves is refused with the reason, never reaches the run's files, and the parent goes on."""
    opened = ty.start_run(storage=tmp_path, trackers=[])
    opened.log({"from": "parent"})
    before = written(opened.path)
    assert "a forked child cannot log to it" in in_child(lambda: work(opened))
    assert written(opened.path) == before
    opened.log({"from": "parent"})
    result = opened.finish()
    assert [row["from"] for row in result.history()] == ["parent", "parent"]
    assert result.status == "completed"


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_does_not_end_the_run(tmp_path):
    """finish() in a child, and the child's own end, leave the run open for its owner."""
    opened = ty.start_run(storage=tmp_path, trackers=[])
    in_child(opened.finish)
    assert opened.log({"a": 1})["training_iteration"] == 1
    assert ty.open_run(opened.path).status == "running"
    assert opened.finish().status == "completed"


@pytest.mark.parametrize(
    "work",
    [lambda run: run.log_artifact(__file__), lambda run: run.save_checkpoint({"a": 1})],
    ids=["artifact", "checkpoint"],
)
def test_after_the_end_nothing_is_written(tmp_path, work):
    """Artifacts and checkpoints of a run that has ended are refused before anything of them is written."""
    opened = ty.start_run(storage=tmp_path, trackers=[])
    opened.finish()
    before = written(opened.path)
    with pytest.raises(ty.TrainyardError, match="ended"):
        work(opened)
    assert written(opened.path) == before


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_child_that_outlives_its_parent_keeps_no_lock(tmp_path):
    """A forked data loader that goes on after its trainer died does not keep the run locked."""
    code = """
import os, sys, time, trainyard as ty
run = ty.start_run(storage=sys.argv[1], name="it", trackers=[])
run.log({"a": 1})
if os.fork() == 0:
    print("ready", flush=True)  # only once the child lives is there something to show
    sys.stdin.read()  # until the test says so
    os._exit(0)
time.sleep(60)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    child.kill()
    child.wait(timeout=20)
    try:
        deadline = time.monotonic() + 20  # a `git` that was being started at that moment has the lock until its exec
        while ty.open_run(tmp_path / "default" / "it").status != "killed":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert run(Counting, tmp_path, name="it", resume="must", stop={"count": 1}).status == "completed"
    finally:
        child.stdin.close()
        child.stdout.close()


def test_secrets_among_the_tags_are_redacted(tmp_path):
    """A tag that looks like a secret is not written, neither at the start nor at a resume."""
    for resume in ("never", "must"):
        result = run(
            Counting,
            tmp_path,
            name="it",
            resume=resume,
            stop={"count": 1 + (resume == "must")},
            tags={"api_key": "hushhush"},
        )
        assert result.record.tags == {"api_key": "<redacted>"}


def test_what_was_captured_is_an_artifact(tmp_path):
    """With `log_to_file`, what the run printed goes to the trackers that take artifacts, before the end."""
    heard = []

    class Hearing:
        @ty.hookimpl
        def log_artifact(self, artifact):
            with open(artifact.path) as file:
                heard.append((artifact.name, artifact.size, file.read()))

        @ty.hookimpl
        def log_end(self, outcome):
            heard.append(outcome.status)

    def train(config):
        print("hello")
        ty.report({"a": 1})

    run(train, tmp_path, trackers=[Hearing()], log_to_file=True)
    assert heard == [("stdout", 6, "hello\n"), ("stderr", 0, ""), "completed"]


class Joinable:
    """A tracker that says by which environment variables one joins it."""

    def __init__(self, notes):
        self.notes = notes

    @ty.hookimpl
    def log_start(self, notes):
        """Tell."""
        notes.update(self.notes)

    @ty.hookimpl
    def log_results(self, results):
        """Take them."""


def test_the_environment_joins_a_tracker_for_the_length_of_the_run(tmp_path, monkeypatch):
    """What the tracker names is set until the run ends, and then as it was before."""
    monkeypatch.setenv("THEIR_RUN", "before")
    monkeypatch.delenv("THEIR_URI", raising=False)
    variables = {"THEIR_RUN": "7", "THEIR_URI": "here"}
    with ty.start_run(storage=tmp_path, trackers=[Joinable({"run_id": "7", "environment": variables})]) as opened:
        assert opened.export_environment("Joinable") == variables
        assert (os.environ["THEIR_RUN"], os.environ["THEIR_URI"]) == ("7", "here")
        assert opened.trackers["Joinable"]["run_id"] == "7"
    assert os.environ["THEIR_RUN"] == "before"
    assert "THEIR_URI" not in os.environ
    assert ty.open_run(opened.path).trackers["Joinable"]["run_id"] == "7"


def test_a_tracker_that_cannot_be_joined_is_a_mistake(tmp_path):
    """One that the run does not have, and one that names no variables."""
    with ty.start_run(storage=tmp_path, trackers=["csv"]) as opened:
        with pytest.raises(ty.ConfigError, match=r"unknown tracker 'cvs': did you mean 'csv'"):
            opened.export_environment("cvs")
        with pytest.raises(ty.ConfigError, match="no environment variables"):
            opened.export_environment("csv")


def test_a_tracker_that_is_not_reached_does_not_hold_training_for_ever(tmp_path, caplog):
    """After the time there is a warning and no variable."""

    class Down(Joinable):
        @ty.hookimpl
        def log_start(self, notes):
            raise ConnectionError("down")

    with ty.start_run(storage=tmp_path, trackers=[{"csv": None}, Down({})]) as opened:
        assert opened.export_environment("Down", timeout_s=0.1) == {}
        assert "not reached within" in caplog.text
        opened.deliveries[0].close(0.0)  # the end need not wait for it
