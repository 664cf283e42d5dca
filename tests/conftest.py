"""What several test files share."""

from __future__ import annotations

import math
import os
import struct
import traceback
import warnings

import pytest

from trainyard import active_run


@pytest.fixture(autouse=True)
def _threads_deliver(request, monkeypatch):
    """Start no sync process for a test that is about something else; those about it carry the mark `sync_process`."""
    if request.node.get_closest_marker("sync_process") is None:
        monkeypatch.setattr(active_run, "is_portable", lambda spec: False)


def _same(left, right):
    """Whether two values are equal to the bit and to the type; one NaN is as good as another."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if type(left) is complex:
        return _same(left.real, right.real) and _same(left.imag, right.imag)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(_same(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    if hasattr(left, "dtype"):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    return left == right


def _forked(function, *arguments):
    """Run a function in a forked child and wait for it; a failure there is a failure here."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        report = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, report or f"the child ended with {code}"


@pytest.fixture(scope="module")
def same():
    """The exact comparison."""
    return _same


@pytest.fixture(scope="module")
def forked():
    """Runs a function in a forked child."""
    return _forked
