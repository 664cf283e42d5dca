"""Atomic files and their hashes."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.files import CHUNK, HashingWriter, hash_bytes, hash_file, sync_directory, sync_file, write_atomic


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_a_file_hashes_like_its_bytes(tmp_path, size):
    """A hash does not depend on how it was read, and is xxh3-128 of the content."""
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "f").write_bytes(data)
    expected = "xxh3-128:" + xxhash.xxh3_128_hexdigest(data)
    assert hash_file(tmp_path / "f") == (size, expected)
    assert hash_bytes(data) == expected


@given(st.lists(st.binary(max_size=50), max_size=6))
@settings(max_examples=60, deadline=None)
def test_pieces_are_written_in_order_and_hashed(pieces):
    """However a file is put together, it holds the pieces, and the hash is that of the whole."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "f")
        writer = HashingWriter(path)
        for piece in pieces:
            writer.write(piece)
        digest = writer.close()
        assert path.read_bytes() == b"".join(pieces)
    assert writer.size == sum(map(len, pieces))
    assert digest == hash_bytes(b"".join(pieces))


def test_large_and_small_pieces_mix(tmp_path):
    """Pieces that a second thread hashes and small ones before and behind them make one right hash."""
    rng = np.random.default_rng(0)
    pieces = [b"head", rng.bytes(CHUNK), b"", b"between", rng.bytes(3 * CHUNK + 5), b"tail"]
    writer = HashingWriter(tmp_path / "f")
    for piece in pieces:
        writer.write(piece)
    digest = writer.close()
    assert (tmp_path / "f").read_bytes() == b"".join(pieces)
    assert digest == hash_bytes(b"".join(pieces))


def test_any_contiguous_buffer_is_taken(tmp_path):
    """Arrays of any item size are written as their bytes."""
    writer = HashingWriter(tmp_path / "f")
    writer.write(np.arange(4, dtype=np.int32))
    writer.write(bytearray(b"xy"))
    writer.close()
    assert (tmp_path / "f").read_bytes() == np.arange(4, dtype=np.int32).tobytes() + b"xy"


def test_a_new_file_never_replaces_one(tmp_path):
    """The writer makes its file; one that is there is an error and stays."""
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        HashingWriter(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_abort_may_follow_anything(tmp_path):
    """Abort closes once, after large pieces and after close too, and leaves no thread behind."""
    before = threading.active_count()
    writer = HashingWriter(tmp_path / "f")
    writer.write(bytes(CHUNK))
    writer.abort()
    writer.abort()
    other = HashingWriter(tmp_path / "g")
    other.close()
    other.abort()
    assert threading.active_count() == before


@pytest.mark.parametrize("durable", [True, False])
def test_write_atomic_makes_and_replaces(tmp_path, durable):
    """A file is made, replaced, and written from pieces; nothing else stays in the directory."""
    path = tmp_path / "f.json"
    write_atomic(path, b"one", durable=durable)
    assert path.read_bytes() == b"one"
    write_atomic(path, iter([b"tw", b"o"]), durable=durable)
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["f.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """If the content fails halfway, the old file is whole and no litter stays."""
    path = tmp_path / "f.json"
    path.write_bytes(b"old")

    def pieces():
        yield b"half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_atomic(path, pieces())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f.json"]


def test_readers_see_old_or_new_never_a_part(tmp_path):
    """While a file is replaced again and again, every read finds one whole content."""
    path = tmp_path / "f"
    contents = [letter * 20_000 for letter in (b"a", b"b", b"c")]
    write_atomic(path, contents[0])
    done, seen = threading.Event(), set()

    def replace():
        for i in range(60):
            write_atomic(path, contents[i % 3], durable=False)
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    while not done.is_set():
        seen.add(path.read_bytes())
    thread.join()
    assert seen <= set(contents)


def test_syncing_what_is_not_there_fails(tmp_path):
    """A sync of files and directories works where they are, and is loud where they are not."""
    (tmp_path / "f").write_bytes(b"x")
    sync_file(tmp_path / "f")
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_file(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "missing")
