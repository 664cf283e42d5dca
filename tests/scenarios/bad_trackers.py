"""Trackers that misbehave on purpose, and one that tells what happens to it. Installed for the sync process as well."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from trainyard import hookimpl

ENTRY_POINTS = {"probe": "bad_trackers:Probe", "bad": "bad_trackers:Bad", "deadly": "bad_trackers:DiesWhenBuilt"}

IN_SYNC_PROCESS = hasattr(sys.modules["__main__"], "Follower")


class Probe:
    """Appends a line to a file for everything that it is told.

    Args:
        where: that file; default ``told.jsonl`` in the run's directory.
        api_key: a secret; its length is told.
        value: whatever; it is told as it arrived here.
        logins: secrets in a list.
        fails_until: as long as there is no such file, it raises.
    """

    def __init__(self, where=None, api_key="", value=None, logins=(), fails_until=None):
        self._where = where
        self._api_key = api_key
        self._value = value(1) if callable(value) else value
        self._logins = logins
        self._fails_until = fails_until

    @hookimpl
    def log_start(self, run, notes):
        """Begins a file."""
        self._path = Path(self._where or Path(run.path, "told.jsonl"))
        self._tell("log_start")

    @hookimpl
    def log_results(self, run, results, notes):
        """A line a result."""
        if self._fails_until and not Path(self._fails_until).exists():
            raise ConnectionError(f"nobody answers to {self._api_key}")
        for result in results:
            self._tell("log_results", run=run.name, seq=result.seq, i=result.metrics.get("i"))

    @hookimpl
    def log_end(self, run, outcome, notes):
        """A line for the end."""
        self._tell("log_end", run=run.name, status=outcome.status)

    @hookimpl
    def close(self):
        """Lets its secret slip, where it fails anyway."""
        if self._fails_until:
            raise RuntimeError(f"cannot say goodbye to {self._api_key}")

    def _tell(self, event, **more):
        passwords = [login.get("password") for login in self._logins]
        told = {"event": event, "pid": os.getpid(), "key": len(self._api_key), "value": repr(self._value), **more}
        with open(self._path, "a") as file:
            file.write(json.dumps({**told, "passwords": [len(word) for word in passwords], "cwd": os.getcwd()}) + "\n")


def _closes():
    if not Bad.closed:
        os.close(0)
        os.close(2)
        Bad.closed = True
    raise OSError("it closed what it should not")


def _leaks():
    Bad.leaked.append(bytearray(os.urandom(1 << 20) * 250))
    time.sleep(0.1)


def _raises():
    raise ConnectionError("nobody answers")


def _dies_then_sleeps():
    with open(os.environ["DEATHS"], "a+") as file:
        print("again", file=file, flush=True)
        file.seek(0)
        deaths = len(file.readlines())
    if deaths <= 2:
        os._exit(7)
    time.sleep(3600)


MISDEEDS = {
    "raises": _raises,
    "sleeps": lambda: time.sleep(3600),
    "exits": lambda: sys.exit("it had enough"),
    "dies": lambda: os._exit(7),
    "segfaults": lambda: ctypes.string_at(0),
    "leaks": _leaks,
    "prints": lambda: print("x" * 100_000),
    "closes": _closes,
    "dies_then_sleeps": _dies_then_sleeps,
}


class Bad:
    """Does one of the misdeeds whenever it gets results.

    Args:
        how: which.
    """

    leaked: list[bytearray] = []
    closed = False

    def __init__(self, how):
        self._do = MISDEEDS[how]

    @hookimpl
    def log_results(self, results):
        """The misdeed."""
        self._do()


class DiesWhenBuilt:
    """Takes the sync process down by being built there."""

    def __init__(self):
        if IN_SYNC_PROCESS:
            os._exit(7)

    @hookimpl
    def log_results(self, results):
        """Nothing."""
