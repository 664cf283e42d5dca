"""A process is killed before and after every single file operation of a save."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import trainyard as ty
from trainyard.storage import RunCheckpoints

OPERATIONS = ("fsync", "write", "rename", "replace", "mkdir", "open", "unlink", "fdatasync")


class Saves(ty.Trainable):
    """Saves a dict with an array, and a file of its own."""

    def step(self):
        return {"loss": 1.0 / (self.iteration + 1)}

    def save_checkpoint(self, checkpoint_dir):
        with open(os.path.join(checkpoint_dir, "own.txt"), "w") as file:
            file.write("mine" * 5000)
        return {"iteration": self.iteration, "array": np.full(70_000, self.iteration)}

    def load_checkpoint(self, checkpoint):
        self.restored = checkpoint


def save_and_die(storage, at, before):
    """In a child: save once, then save again and be killed at the operation number `at`. Exits with 0 if it never comes."""
    trainable = Saves({}, storage=storage, trackers=[])
    trainable.train()
    trainable.save()
    trainable.train()
    count = 0

    def killing(operation):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            mine = count == at
            if mine and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*args, **kwargs)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in OPERATIONS:
        setattr(os, name, killing(getattr(os, name)))
    trainable.save()
    os._exit(0)


def in_a_fork(function, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_checkpoint_is_whole_or_absent(before, tmp_path):
    """Whatever operation the kill comes at, the newest checkpoint is the old one or the new one, bit for bit."""
    newest = set()
    for at in range(1, 200):
        storage = tmp_path / f"{at}"
        code = in_a_fork(save_and_die, storage, at, before)
        (path,) = (storage / "default").iterdir()
        run = ty.open_run(path)
        checkpoints = RunCheckpoints(path / "checkpoints", run.id)
        good = checkpoints.newest_good()
        state = good.load()
        assert good.iteration == state["iteration"]
        assert np.array_equal(np.full(70_000, good.iteration), state["array"])
        assert (path / "checkpoints" / f"checkpoint_{good.index:06d}" / "own.txt").read_text() == "mine" * 5000
        assert [0, 1][: good.index + 1] == [checkpoint.index for checkpoint in run.checkpoints]
        checkpoints.collect_garbage()
        assert all(name.startswith("checkpoint_") for name in os.listdir(path / "checkpoints"))
        newest.add(good.iteration)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert at > 15
    assert {1, 2} == newest
