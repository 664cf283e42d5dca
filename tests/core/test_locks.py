"""Locks that die with their holder."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import warnings

import pytest

from trainyard import locks
from trainyard.locks import FileLock

HOLD = """
import pathlib, sys
from trainyard.locks import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]))
print(lock.acquire(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".lock"


@pytest.fixture
def stranger(path):
    """A process that holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_one_holder_at_a_time(path):
    """Who comes second gets nothing until the first gives it back."""
    first, second = FileLock(path), FileLock(path)
    assert first.acquire()
    assert not second.acquire()
    assert not second.free
    first.release()
    assert second.free
    assert second.acquire()
    second.release()


def test_release_without_holding_changes_nothing(path):
    """Giving back what one does not have leaves the holder its lock."""
    first, second = FileLock(path), FileLock(path)
    assert first.acquire()
    assert not second.acquire()
    second.release()
    assert not second.free
    first.release()
    first.release()


def test_no_file_is_a_free_lock(path):
    """A lock that nobody ever took is free, and asking makes no file."""
    assert FileLock(path).free
    assert not path.exists()


def test_the_holder_is_named(path):
    """The file tells host and pid of who took it last; else it is an unknown process."""
    lock = FileLock(path)
    assert lock.holder() == "an unknown process"
    path.write_text("something much longer than any host and pid\n" * 3)
    assert lock.acquire()
    assert lock.holder() == f"host {platform.node()}, pid {os.getpid()}"
    lock.release()


def test_another_process_is_kept_out(path, stranger):
    """The lock holds between processes, and names the other one."""
    lock = FileLock(path)
    assert not lock.acquire()
    assert not lock.free
    assert lock.holder() == f"host {platform.node()}, pid {stranger.pid}"


def test_a_killed_holder_frees_it(path, stranger):
    """The kernel gives the lock back however its holder dies."""
    stranger.send_signal(signal.SIGKILL)
    stranger.wait()
    lock = FileLock(path)
    assert lock.free
    assert lock.acquire()
    lock.release()


def test_a_forked_child_does_not_hold_it(path, forked):
    """In a child the parent's lock is held by the parent only; the child's release takes nothing away."""
    lock = FileLock(path)
    assert lock.acquire()

    def child():
        assert not lock.free
        lock.release()
        assert not FileLock(path).acquire()

    forked(child)
    assert not FileLock(path).free
    lock.release()


def test_a_forked_child_that_lives_on_does_not_keep_it(path):
    """When the parent lets go while its child lives, the lock is free."""
    reader, writer = os.pipe()
    said, say = os.pipe()
    lock = FileLock(path)
    assert lock.acquire()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
        pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.write(say, b"up")
        os.read(reader, 1)  # until the parent closes its end
        os._exit(0)
    try:
        assert os.read(said, 2) == b"up"
        lock.release()
        assert FileLock(path).free
    finally:
        for fd in (reader, writer, said, say):
            os.close(fd)
        os.waitpid(pid, 0)


def test_where_there_are_no_locks_nobody_is_declared_dead(path, monkeypatch):
    """A filesystem without locks lets everybody in, but never says that nobody is there."""

    def refuse(fd, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = FileLock(path)
    assert lock.acquire()
    assert (FileLock(path).held, FileLock(path).free) == (None, False)
    lock.release()


def test_asking_leaves_no_lock_in_a_child(path, monkeypatch):
    """A child that is forked while somebody asks whether the lock is free keeps nothing of it."""
    FileLock(path).acquire()
    children = []
    real = locks._try_lock

    def forking(fd, shared=False):
        got = real(fd, shared)
        children.append(os.dup(fd))  # as a forked child has it
        return got

    monkeypatch.setattr(locks, "_try_lock", forking)
    other = path.with_name("other")
    other.touch()
    assert FileLock(other).free
    monkeypatch.undo()
    assert FileLock(other).free
    for fd in children:
        os.close(fd)


def test_two_who_ask_do_not_take_each_other_for_the_holder(path, monkeypatch):
    """While one process looks whether a lock is free, it is free to another one that looks."""
    FileLock(path).acquire()
    other = path.with_name("other")
    other.touch()
    answers = []
    real = locks._unlock

    def asking(fd):
        monkeypatch.undo()
        answers.append(FileLock(other).free)  # in the very moment in which the first one has it
        real(fd)

    monkeypatch.setattr(locks, "_unlock", asking)
    assert FileLock(other).free
    assert answers == [True]
