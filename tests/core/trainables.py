"""Trainables and small tools that the tests of core share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trainyard as ty
from trainyard.journal import JournalReader
from trainyard.rundir import RunDirectory

FILLED = frozenset(
    {
        "config",
        "date",
        "done",
        "hostname",
        "iterations_since_restore",
        "node_ip",
        "pid",
        "time_since_restore",
        "time_this_iter_s",
        "time_total_s",
        "timestamp",
        "training_iteration",
        "trial_id",
    }
)
"""The keys of a result for an empty dict."""


class Counting(ty.Trainable):
    """Counts its steps; saves and restores the count."""

    def setup(self, config):
        self.count = 0
        self.given = config

    def step(self):
        self.count += 1
        return {"count": self.count}

    def save_checkpoint(self, checkpoint_dir):
        return {"count": self.count}

    def load_checkpoint(self, checkpoint):
        self.count = checkpoint["count"]


class Returning(ty.Trainable):
    """Returns from each step what ``returns`` says at that moment."""

    def setup(self, config):
        self.returns = {}

    def step(self):
        return self.returns

    def results(self, *returned):
        """The results of steps that return these."""
        out = []
        for self.returns in returned:
            out.append(self.train())
        return out


class Watcher:
    """A callback that keeps what it is shown."""

    def __init__(self):
        self.iterations = []

    @ty.hookimpl
    def on_result(self, result):
        self.iterations.append(result["training_iteration"])


def build(cls, tmp_path, config=None):
    """A trainable with a run of its own below tmp_path, and no trackers."""
    return cls(config, storage=tmp_path, trackers=[])


def run(trainable, tmp_path, config=None, **options):
    """``trainyard.run`` below tmp_path, by default without trackers."""
    return ty.run(trainable, config, **{"storage": tmp_path, "trackers": [], **options})


def records(path):
    """All records in a run's journal."""
    return list(JournalReader(RunDirectory(Path(path)).journal))


def iterations(result):
    """The iterations in a run's history, in order."""
    return [row["training_iteration"] for row in result.history()]


def python(code, *arguments, check=True, cwd=None, **environment):
    """Run code in a fresh interpreter. Returns the finished process, with text output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=60,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def install(folder, package, entry_points, modules, version="1.0"):
    """Put a package with entry points into a folder, as an installer would lay it out.

    Args:
        folder: goes on ``sys.path``.
        package: the distribution's name.
        entry_points: plugin name to ``module:class``.
        modules: module name to source.
        version: the distribution's.
    """
    metadata = Path(folder, f"{package.replace('-', '_')}-{version}.dist-info")
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = "".join(f"{name} = {place}\n" for name, place in entry_points.items())
    (metadata / "entry_points.txt").write_text(f"[trainyard]\n{lines}")
    for module, source in modules.items():
        Path(folder, f"{module}.py").write_text(source)


RECORDER = '''
import json
from pathlib import Path
from trainyard import hookimpl


class Recorder:
    """Writes a line for each result that it gets, with its option."""

    def __init__(self, token="", where=None):
        self.token = token
        self.where = where

    @hookimpl
    def log_start(self, run, notes):
        self.path = Path(self.where or run.path, "recorded.txt")

    @hookimpl
    def log_results(self, results):
        with open(self.path, "a") as file:
            for result in results:
                file.write(f"{result.seq} {len(self.token)} {result.metrics['config']}\\n")
'''
"""The source of a module with a tracker."""
