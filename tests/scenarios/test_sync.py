"""What trackers are owed is delivered afterwards, by hand."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainyard as ty
from trainyard import active_run, sync
from trainyard.cli.main import call
from trainyard.delivery import Lane, LaneState, TrackerSpec
from trainyard.journal import EndedRecord, JournalWriter, ResumedRecord
from trainyard.plugins import hold
from trainyard.rundir import RunDirectory, last_outcome

NEW_RUN = active_run.new_run

SCRIPT = """
import os, signal, sys
import trainyard as ty

def train(config):
    for i in range(1, 51):
        ty.report({"i": i}, checkpoint={"i": i} if i == 20 else None)
    os.kill(os.getpid(), signal.SIGKILL)

ty.run(train, storage=sys.argv[1], experiment="sync", name="it")
"""


def count(config):
    """Goes on from its checkpoint, to 60."""
    start = ty.get_checkpoint()
    for i in range((start.load()["i"] if start else 0) + 1, 61):
        ty.report({"i": i})


@pytest.fixture
def killed(tmp_path):
    """The directory of a run that was killed after 50 results, with a checkpoint after 20."""
    child = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    return tmp_path / "sync" / "it"


def in_json(path):
    return [json.loads(line)["i"] for line in (path / "result.json").read_bytes().splitlines()]


def in_csv(path):
    with open(path / "progress.csv", newline="") as file:
        return [int(row["i"]) for row in csv.DictReader(file)]


def test_a_killed_run_is_ended_and_delivered(killed, capsys):
    """`sync` writes the outcome that the dead process could not, and brings json and csv up to its last result."""
    assert call(["sync", str(killed)]) == 0
    assert list(range(1, 51)) == in_json(killed) == in_csv(killed)
    assert (ty.open_run(killed).status, json.loads((killed / "run.json").read_text())["status"]) == ("killed", "killed")
    assert last_outcome(killed) == ("killed", None)
    assert call(["sync", str(killed), "--only", "csv"]) == 0
    assert list(range(1, 51)) == in_csv(killed)


@pytest.mark.parametrize("synced", [True, False], ids=["synced before", "not synced"])
def test_a_resume_after_a_sync_has_everything_once(killed, synced):
    """A run that was ended as killed can be resumed, and each result that counts stands once."""
    if synced:
        sync.sync_run(ty.open_run(killed))
    result = ty.run(count, storage=killed.parents[1], experiment="sync", name="it", resume="must")
    assert ("completed", list(range(1, 61))) == (result.status, [r["i"] for r in result.history()])
    assert list(range(1, 61)) == in_json(killed) == in_csv(killed)


class Ends:
    """Remembers how it was told that the run ended."""

    def __init__(self):
        self.statuses = []

    @ty.hookimpl
    def log_end(self, outcome):
        self.statuses.append(outcome.status)


def test_an_end_that_a_resume_has_overtaken_is_not_told(killed):
    """A tracker that hears of the run only after its resume is not told that it was killed meanwhile."""
    sync.end_if_killed(RunDirectory(killed))
    result = ty.run(count, storage=killed.parents[1], experiment="sync", name="it", resume="must")
    late = Ends()
    assert Lane(result.info(), TrackerSpec("late", "Ends", lambda: hold("late", late))).attempt()
    assert late.statuses == ["completed"]


def new_run_at(path, *args, **settings):
    """A new run in a directory that is there already."""
    _, record = NEW_RUN(*args, **settings)
    record.name = path.name
    return RunDirectory(path), record


def test_what_is_owed_at_the_end_goes_out_later(tmp_path, monkeypatch, capsys):
    """A tracker that could not work until the run was over is owed its results, and `sync` delivers them, once."""
    monkeypatch.setattr(active_run, "DRAIN_S", 0.3)
    monkeypatch.setattr(sync, "DEADLINE_S", 0.3)

    path = tmp_path / "default" / "it"
    (path / "result.json").mkdir(parents=True)  # in the way of the json tracker
    monkeypatch.setattr(active_run, "new_run", lambda *args, **settings: new_run_at(path, *args, **settings))
    with ty.start_run(storage=tmp_path, name="it") as run:
        run.log({"i": 1})
    assert run.path == str(path)
    assert call(["sync", str(path)]) == 1
    assert "Is a directory" in capsys.readouterr().out
    (path / "result.json").rmdir()
    assert call(["sync", str(path)]) == 0
    assert in_json(path) == [1]
    state = LaneState.read(path / "delivery" / "json.json")
    assert (state.delivered, state.error, state.ended) == (1, None, True)


def test_a_live_run_is_left_to_its_process(tmp_path, capsys):
    """`sync` on a run that is being written says so, and exits with 0."""
    with ty.start_run(storage=tmp_path, name="it") as run:
        run.log({"i": 1})
        assert call(["sync", run.path]) == 0
        assert "being delivered" in capsys.readouterr().out


def test_replay_delivers_to_a_tracker_the_run_never_had(tmp_path, capsys):
    """`replay` goes from the first result to the end; a second one changes nothing."""
    with ty.start_run(storage=tmp_path, name="it", trackers=["json"]) as run:
        for i in range(1, 31):
            run.log({"i": i})
    path = Path(run.path)
    assert not (path / "progress.csv").exists()
    for _ in range(2):
        assert call(["replay", run.path, "--to", "csv"]) == 0
        assert list(range(1, 31)) == in_csv(path)
    assert "csv has all 30 results" in capsys.readouterr().out
    assert call(["replay", run.path, "--to", "json"]) == 2
    assert call(["replay", run.path, "--to", "csv", "--option", "x=1"]) == 2
    assert call(["replay", run.path, "--to", "nobody"]) == 2


def test_sync_of_everything_below_a_directory(tmp_path, capsys):
    """Without a run it goes through all of them; a tracker nobody has is one line and exit code 1 or 2."""
    for name in ("one", "two"):
        with ty.start_run(storage=tmp_path, name=name) as run:
            run.log({"i": 1})
    assert call(["sync", "--storage", str(tmp_path)]) == 0
    assert call(["sync", str(tmp_path)]) == 0
    assert call(["sync", str(tmp_path / "default")]) == 0
    out = capsys.readouterr().out
    assert 6 == out.count("json") == out.count("csv")
    assert call(["sync", str(tmp_path), "--only", "jsn"]) == 2
    assert "unknown tracker 'jsn': did you mean 'json'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "trackers", [None, ["csv"], {"csv": None}, {"../../../evil": {}}], ids=["null", "list", "no options", "a path"]
)
def test_a_damaged_identity_is_one_runs_matter(killed, trackers, caplog):
    """Whatever somebody wrote into its `settings`: a mistake that names the file, nothing is written, others are served."""
    record = json.loads((killed / "run.json").read_text())
    (killed / "run.json").write_text(json.dumps({**record, "settings": {"trackers": trackers}}))
    before = {path for path in killed.parents[2].rglob("*") if "delivery" not in path.parts}
    with pytest.raises(ty.ConfigError, match=r"run\.json"):
        sync.sync_run(ty.open_run(killed))
    follower = sync.Follower(killed.parent)
    follower.serve(lambda: True)
    assert "cannot" in caplog.text
    assert {path for path in killed.parents[2].rglob("*") if "delivery" not in path.parts} == before


def test_what_a_resume_added_is_owed_though_an_end_was_confirmed(killed):
    """A tracker that was told of an end, and of nothing since, is owed what a resume did."""
    sync.sync_run(ty.open_run(killed))
    directory = RunDirectory(killed)
    journal = JournalWriter(directory.journal)
    journal.append(ResumedRecord(seq=50, time=time.time(), keep=50, context={}))
    journal.append(EndedRecord(seq=50, time=time.time(), status="completed"))
    journal.close()
    assert sync.standing(ty.open_run(killed), "json").error is not None
    follower = sync.Follower(killed.parent)
    deadline = time.monotonic() + 20
    follower.serve(lambda: time.monotonic() > deadline or sync.standing(ty.open_run(killed), "json").error is None)
    assert sync.standing(ty.open_run(killed), "json").error is None


def test_following_a_directory_that_is_still_to_come(tmp_path, monkeypatch):
    """`sync --follow runs` may be typed before the first run: it is no mistake."""
    from trainyard.cli import syncing

    monkeypatch.chdir(tmp_path)
    assert syncing._directory("runs", None, follow=True) == Path("runs")
    with pytest.raises(ty.ConfigError, match="there is no directory runs"):
        syncing._directory("runs", None)
