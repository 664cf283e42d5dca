"""The disk fills up in the middle of a training, and later there is room again, or there is not."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import trainyard as ty

SCRIPT = """
import os, resource, signal, sys, time
import trainyard as ty
from trainyard import active_run

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # a write beyond the limit fails, as on a full disk
active_run.DRAIN_S = 3.0
room_again = sys.argv[2] == "room"

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def train(config):
    run = ty.get_run()
    for i in range(1, 301):
        if i == 100:
            limit(os.path.getsize(run.path + "/journal/0.log") + 100)
        if i == 200 and room_again:
            limit(resource.RLIM_INFINITY)
        ty.report({"i": i})
        time.sleep(0.002)

try:
    result = ty.run(train, storage=sys.argv[1])
    print(result.status, os.getpid())
except ty.JournalError as error:
    print("JournalError", error)
"""


def train(storage, room):
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(storage), room], capture_output=True, text=True, timeout=60
    )
    (path,) = (storage / "default").iterdir()
    return child, ty.open_run(path)


def test_results_wait_in_memory_and_are_written_when_there_is_room(tmp_path):
    """No call fails, one warning tells of it, and in the end every result is in the journal, json and csv, in order."""
    child, run = train(tmp_path, "room")
    assert child.stdout.startswith("completed"), child.stderr
    expected = list(range(1, 301))
    assert expected == [result["i"] for result in run.history()]
    with open(f"{run.path}/result.json") as file:
        assert expected == [json.loads(line)["i"] for line in file]
    with open(f"{run.path}/progress.csv", newline="") as file:
        assert expected == [int(row["i"]) for row in csv.DictReader(file)]
    assert child.stderr.count("results are kept in memory until that ends") == 1
    assert child.stderr.count("can be written again") == 1
    assert "Traceback" not in child.stderr


def test_a_disk_that_stays_full_is_an_error_at_the_end(tmp_path):
    """What could not be written is said in numbers by an exception, and what had been written is whole."""
    child, run = train(tmp_path, "none")
    assert "JournalError" in child.stdout, child.stderr
    assert "records could not be written" in child.stdout
    history = run.history()
    assert list(range(1, len(history) + 1)) == [result["i"] for result in history]
    assert 99 <= len(history) < 200
    assert run.status == "killed"
