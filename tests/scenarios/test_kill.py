"""A real training process is killed with -9 again and again, at random points, and resumed each time."""

from __future__ import annotations

import csv
import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainyard as ty
from trainyard.delivery import LaneState
from trainyard.journal import JournalReader, ResultRecord
from trainyard.rundir import RunDirectory

SCRIPT = Path(__file__).with_name("train_until_killed.py")
KILLS = 20
ITERATIONS = 400


def start(style, storage):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), style, str(storage), str(ITERATIONS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kill_at_random(child, rng):
    """Let it run for some results, or for a moment, and kill it. Returns what it was promised by then."""
    promised = []
    wait_for = rng.choice([0, 1, 2, 5, 9, 20])
    while sum(kind == b"result" for kind, _ in promised) < wait_for:
        line = child.stdout.readline()
        if not line:
            break
        promised.append(line.split())
    time.sleep(rng.random() * (0.4 if wait_for == 0 else 0.01))
    child.send_signal(signal.SIGKILL)
    rest, errors = child.communicate()
    promised += [line.split() for line in rest.splitlines(keepends=True) if line.endswith(b"\n")]
    assert b"Traceback" not in errors, errors.decode()
    return [(kind.decode(), int(number)) for kind, number in promised]


def strictly(line):
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def check_promises(run, promised):
    """All that the killed process was promised is there, and nothing that is there is half of anything."""
    recorded = [r.metrics["training_iteration"] for r in JournalReader(run.journal) if isinstance(r, ResultRecord)]
    results = [number for kind, number in promised if kind == "result"]
    assert set(results) <= set(recorded)
    found = ty.open_run(run.path)
    assert found.status in ("killed", "completed")
    saved = {checkpoint.iteration for checkpoint in found.checkpoints}
    promised_checkpoints = [number for kind, number in promised if kind == "checkpoint"]
    assert set(promised_checkpoints[-1:]) <= saved
    for checkpoint in found.checkpoints:
        checkpoint.verify()
        assert checkpoint.iteration == checkpoint.load()["steps"]


def check_delivered_once(run):
    """Each iteration stands exactly once, in order, in result.json and progress.csv, with the right values."""
    expected = list(range(1, ITERATIONS + 1))
    rows = [strictly(line) for line in (run.path / "result.json").read_bytes().splitlines()]
    assert expected == [row["training_iteration"] for row in rows]
    position = 0.0
    for row in rows:
        position += math.sin(row["steps"])
        assert row["position"] == pytest.approx(position)
        assert row["nan"] == "NaN"
        assert row.get("late") == (row["steps"] if row["steps"] > 40 else None)
    with open(run.path / "progress.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [str(i) for i in expected] == [row["training_iteration"] for row in table]
    assert [str(i) if i > 40 else "" for i in expected] == [row["late"] for row in table]
    for lane in ("json", "csv"):
        state = LaneState.read(run.delivery / f"{lane}.json")
        assert (state.ended, state.dropped, state.rejected) == (True, 0, [])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("style", ["class", "function"])
def test_nothing_is_lost_and_nothing_is_there_twice(style, tmp_path):
    """Over twenty kills every promise is kept, and after the last resume json and csv hold each iteration once."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    run = RunDirectory(tmp_path / "kill" / "walk")
    kills = 0
    while kills < KILLS:
        promised = kill_at_random(start(style, tmp_path), rng)
        kills += 1
        if run.json.exists():
            check_promises(run, promised)
        if any(kind == "ended" for kind, _ in promised):
            check_delivered_once(run)
            for path in sorted(run.path.rglob("*"), reverse=True):  # it came to its end: the next one starts anew
                path.unlink() if path.is_file() else path.rmdir()
            run.path.rmdir()
    out, errors = start(style, tmp_path).communicate()
    assert out.splitlines()[-1:] == [f"ended {ITERATIONS}".encode()], errors.decode()
    check_delivered_once(run)
    history = ty.open_run(run.path).history()
    assert list(range(1, ITERATIONS + 1)) == [result.metrics["training_iteration"] for result in history]
    assert history[-1].metrics["time_total_s"] >= history[-1].metrics["time_since_restore"] > 0
