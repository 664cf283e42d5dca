"""Runs whose end is not as planned."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainyard as ty
from trainyard.delivery import LaneState
from trainyard.files import hash_bytes


def in_a_process(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_run_that_nobody_holds_is_ended_at_exit(tmp_path):
    """A logger that was dropped without a finish() is ended, delivered and unlocked when the process ends."""
    code = """
import sys, trainyard as ty
def main():
    run = ty.start_run(storage=sys.argv[1], name="it")
    run.log({"a": 1})
main()
"""
    child = in_a_process(code, tmp_path)
    assert (child.wait(timeout=30), "") == (0, child.communicate()[1])
    run = ty.open_run(tmp_path / "default" / "it")
    assert run.status == "completed"
    assert json.loads((tmp_path / "default" / "it" / "result.json").read_text())["a"] == 1


def test_an_exception_at_exit_is_told(tmp_path):
    """A script that ends by an exception leaves its open run as failed."""
    code = "import sys, trainyard as ty; run = ty.start_run(storage=sys.argv[1], name='it'); run.log({'a': 1}); 1 / 0"
    in_a_process(code, tmp_path).communicate(timeout=30)
    run = ty.open_run(tmp_path / "default" / "it")
    assert (run.status, str(run.error)) == ("failed", "ZeroDivisionError: division by zero")


class Steps(ty.Trainable):
    """Counts, and can be resumed."""

    def setup(self, config):
        self.n = 0

    def step(self):
        self.n += 1
        return {"n": self.n}

    def save_checkpoint(self, checkpoint_dir):
        return {"n": self.n}

    def load_checkpoint(self, checkpoint):
        self.n = checkpoint["n"]


def test_a_checkpoint_from_a_newer_format_stops_the_resume(tmp_path):
    """It is neither taken for damaged nor gone back behind: the message says to upgrade, and nothing is touched."""
    result = ty.run(Steps, storage=tmp_path, name="it", stop={"n": 3})
    path = result.checkpoint.path + "/manifest.json"
    with open(path) as file:
        manifest = json.load(file)
    manifest |= {"version": 2, "self": ""}
    manifest["self"] = hash_bytes(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
    with open(path, "w") as file:
        json.dump(manifest, file)
    with pytest.raises(ty.CheckpointError, match="upgrade trainyard"):
        ty.run(Steps, storage=tmp_path, name="it", resume="must", stop={"n": 6})
    assert [r["n"] for r in ty.open_run(result.path).history()] == [1, 2, 3]
    assert [result.checkpoint] == ty.open_run(result.path).checkpoints


def test_a_script_that_is_done_can_be_started_again(tmp_path):
    """With resume="allow", a completed run is returned as it is, unless more is asked of it."""

    def three(config):
        for i in range(3):
            ty.report({"i": i})

    for _ in range(2):
        again = ty.run(three, storage=tmp_path, name="it", resume="allow")
        assert ([r["i"] for r in again.history()], again.history()[-1].seq) == ([0, 1, 2], 3)
    for limit, expected in ((3, 3), (3, 3), (5, 5)):
        result = ty.run(Steps, storage=tmp_path, name="steps", resume="allow", stop={"n": limit})
        assert (list(range(1, expected + 1)), expected) == (
            [r["n"] for r in result.history()],
            result.history()[-1].seq,
        )
    assert ty.open_run(result.path).record.settings["stop"] == {"n": 5}


def test_sigterm_ends_a_run_that_keeps_failing(tmp_path):
    """A run that is tried again for ever still obeys SIGTERM."""
    code = """
import sys, trainyard as ty
class Fails(ty.Trainable):
    def setup(self, config):
        print("trying", flush=True)
        raise RuntimeError("again")
print(ty.run(Fails, storage=sys.argv[1], failures={"max_failures": -1}).status)
"""
    child = in_a_process(code, tmp_path)
    assert "trying\n" == child.stdout.readline() == child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=30)
    assert out.splitlines()[-1] in ("failed", "preempted")


def test_a_tracker_that_raises_is_not_tried_for_ever(tmp_path):
    """`on_error: raise` ends the run at its next result, however many failures it may have."""
    attempts = []

    def train(config):
        attempts.append(1)
        path = Path(ty.get_run().path, "result.json")
        while not path.exists():
            time.sleep(0.01)
        path.unlink()
        path.mkdir()  # in the way of the json tracker, once it begins anew
        (path.parent / "delivery" / "json.json").unlink(missing_ok=True)
        ty.get_run().deliveries[0]._lanes[0][0]._close_plugin()
        for i in range(2000):
            ty.report({"i": i})
            time.sleep(0.005)

    result = ty.run(train, storage=tmp_path, trackers={"json": {"on_error": "raise"}}, failures={"max_failures": -1})
    assert (result.status, len(attempts)) == ("failed", 1)
    assert isinstance(result.error, ty.DeliveryError)


def test_a_cursor_beyond_the_journal_begins_anew(tmp_path):
    """A journal that lost its end, as in a power cut, is delivered again from its beginning, each result once."""
    with ty.start_run(storage=tmp_path, name="it") as run:
        for i in range(1, 9):
            run.log({"i": i})
    state_path = tmp_path / "default" / "it" / "delivery" / "json.json"
    state = LaneState.read(state_path)
    assert state.seq == 8
    journal = tmp_path / "default" / "it" / "journal" / "0.log"
    content = journal.read_bytes()
    journal.write_bytes(content[: len(content) * 2 // 3])
    kept = [r["i"] for r in ty.open_run(run.path).history()]
    assert 0 < len(kept) < 8

    def more(config):
        ty.report({"i": 100})

    ty.run(more, storage=tmp_path, name="it", resume="must", stop={"i": 1000})
    lines = (tmp_path / "default" / "it" / "result.json").read_bytes().splitlines()
    assert [json.loads(line)["i"] for line in lines] == [100]


def test_nobody_reading_the_output_does_not_end_a_run(tmp_path):
    """`trainyard run ... 2>&1 | head -1` lets the run go on to its end."""
    (tmp_path / "steps.py").write_text(
        "import time, trainyard as ty\n\nclass Steps(ty.Trainable):\n    def step(self):\n"
        "        time.sleep(0.001)\n        return {'n': self.iteration + 1}\n"
    )
    (tmp_path / "steps.yaml").write_text("trainable: steps.py:Steps\nstop: {n: 100}\n")
    command = f"{sys.executable} -m trainyard.cli.main run steps.yaml 2>&1 | head -1"
    subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, timeout=60)
    until = time.monotonic() + 20
    while time.monotonic() < until and not list(tmp_path.glob("runs/default/*/run.json")):
        time.sleep(0.05)
    (path,) = tmp_path.glob("runs/default/*")
    while time.monotonic() < until and ty.open_run(path).status == "running":
        time.sleep(0.05)
    assert (ty.open_run(path).status, len(ty.open_run(path).history())) == ("completed", 100)


def test_a_forked_worker_obeys_signals(tmp_path):
    """A pool inside of a step can be terminated: its workers do not inherit how a run takes signals."""
    code = """
import multiprocessing, os, sys, time, trainyard as ty
class Pools(ty.Trainable):
    def step(self):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return {"sum": sum(pool.map(abs, [-1, -2]))}
print(ty.run(Pools, storage=sys.argv[1], stop={"training_iteration": 2}).status)
"""
    out, errors = in_a_process(code, tmp_path).communicate(timeout=60)
    assert out == "completed\n", errors


def test_notes_are_saved_as_they_were_confirmed(tmp_path):
    """What a tracker changes in its notes after a confirmation is undone by a failure, however deep it lies."""

    class Keeps:
        failed = False

        @ty.hookimpl
        def log_results(self, results, notes):
            for result in results:
                notes.setdefault("seqs", []).append(result.seq)
                if result.seq == 40 and not Keeps.failed:
                    Keeps.failed = True
                    raise RuntimeError("once")

    def train(config):
        for i in range(60):
            ty.report({"i": i})
            time.sleep(0.02)

    result = ty.run(train, storage=tmp_path, trackers=[Keeps()])
    state = LaneState.read(Path(result.path, "delivery", "Keeps.json"))
    assert (True, list(range(1, 61))) == (Keeps.failed, state.notes["seqs"])


def test_a_copied_run_is_resumed_where_it_lies(tmp_path, monkeypatch):
    """`trainyard resume DIR` goes on with that very directory, wherever and whatever its name."""
    from trainyard.cli.main import call

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "counting.py").write_text(
        "import trainyard as ty\n\nclass Counting(ty.Trainable):\n    def step(self):\n        return {'n': self.iteration + 1}\n"
        "    def save_checkpoint(self, checkpoint_dir):\n        return {}\n"
        "    def load_checkpoint(self, checkpoint):\n        pass\n"
    )
    result = ty.run("counting.py:Counting", storage="runs", name="it", stop={"n": 3})
    shutil.copytree(result.path, tmp_path / "elsewhere" / "copy")
    assert call(["resume", "elsewhere/copy", "--set", "stop.n=5"]) == 0
    assert len(ty.open_run(tmp_path / "elsewhere" / "copy").history()) == 5
    assert len(ty.open_run(result.path).history()) == 3
    sys.modules.pop("counting")
