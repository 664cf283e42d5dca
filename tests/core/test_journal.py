"""The journal: exact round trips, damage of every kind, full disks, threads and forks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import struct
import tempfile
import threading
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainyard import journal
from trainyard.errors import JournalError
from trainyard.journal import (
    MAGIC,
    ArtifactRecord,
    CheckpointRecord,
    EndedRecord,
    JournalReader,
    JournalWriter,
    ResultRecord,
    ResumedRecord,
    StartedRecord,
)
from trainyard.values import recordable

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=6)
ARRAYS = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="<")
    | hnp.unsigned_integer_dtypes(endianness="<")
    | hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3),
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**63, 2**64 - 1, -(2**63)])
    | NAMES
    | st.binary(max_size=8)
)
VALUES = st.recursive(
    SCALARS | ARRAYS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
)
METRICS = st.dictionaries(NAMES.map(lambda name: name.replace("/", "")), VALUES, max_size=4)


def ended(seq):
    return EndedRecord(seq=seq, time=float(seq), status="completed")


def write(path, records):
    writer = JournalWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


def seqs(path, offset=0):
    return [record.seq for record in JournalReader(path, offset)]


def frame(payload):
    packed = msgspec.msgpack.encode(payload)
    return struct.pack("<II", len(packed), zlib.crc32(packed)) + packed


def boundaries(data):
    """Where each frame begins, and the end."""
    found = [len(MAGIC)]
    while found[-1] < len(data):
        found.append(found[-1] + 8 + struct.unpack_from("<I", data, found[-1])[0])
    return found


@contextlib.contextmanager
def hear():
    """The warnings that trainyard gives, as a list that grows."""
    messages = []

    class Ear(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logging.getLogger("trainyard").addHandler(ear)
    try:
        yield messages
    finally:
        logging.getLogger("trainyard").removeHandler(ear)


@given(st.lists(METRICS, max_size=4))
@settings(max_examples=100, deadline=None)
def test_metrics_survive_exactly(same, results):
    """Every recordable value is read back with its type and its bits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "0.log")
        recorded = [recordable(metrics) for metrics in results]
        write(path, [ResultRecord(seq=i, time=i / 7, step=-i, metrics=m) for i, m in enumerate(recorded, 1)])
        read = list(JournalReader(path))
    assert [(r.v, r.seq, r.time, r.step) for r in read] == [(1, i, i / 7, -i) for i in range(1, len(read) + 1)]
    assert same([r.metrics for r in read], recorded)


def test_every_kind_survives(tmp_path):
    """Each kind of record is read back equal, and in order."""
    records = [
        StartedRecord(seq=0, time=1.0, context={"pid": 1}),
        ArtifactRecord(seq=0, time=2.0, name="plot.png", size=3),
        CheckpointRecord(seq=1, time=3.0, index=0, iteration=1, url="file:///x", size=9, metrics={"a": 1.5}),
        ResumedRecord(seq=1, time=4.0, keep=1, context={"pid": 2}),
        EndedRecord(seq=1, time=5.0, status="failed", error="ValueError: x"),
    ]
    write(tmp_path / "0.log", records)
    assert list(JournalReader(tmp_path / "0.log")) == records


def test_the_file_is_as_documented(tmp_path):
    """Magic with version, then little-endian length, crc32, and a msgpack map with its kind."""
    write(tmp_path / "0.log", [ended(4)])
    data = (tmp_path / "0.log").read_bytes()
    length, crc = struct.unpack_from("<II", data, 8)
    payload = data[16:]
    assert data[:8] == b"trainyd\x01"
    assert (length, crc) == (len(payload), zlib.crc32(payload))
    expected = {"kind": "ended", "v": 1, "seq": 4, "time": 4.0, "status": "completed", "error": None}
    assert msgspec.msgpack.decode(payload) == expected


def test_a_file_cut_anywhere_loses_only_the_cut_record(tmp_path):
    """At every length: a reader yields the whole frames, and a writer cuts the rest and goes on."""
    path = tmp_path / "0.log"
    write(path, map(ended, (1, 2, 3)))
    data = path.read_bytes()
    ends = boundaries(data)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        whole = [i for i, end in enumerate(ends[1:], 1) if end <= size]
        assert seqs(path) == whole, size
        write(path, [ended(9)])
        assert seqs(path) == [*whole, 9], size
        assert path.stat().st_size == ends[len(whole)] + ends[1] - ends[0], size


def test_a_cut_is_told(tmp_path, caplog):
    """The writer says how much of a half-written record it cut; a clean file is reopened in silence."""
    path = tmp_path / "0.log"
    write(path, [ended(1)])
    write(path, [ended(2)])
    assert not caplog.records
    with open(path, "ab") as file:
        file.write(b"\x05\x00\x00")
    write(path, [])
    assert [record.getMessage() for record in caplog.records] == [
        f"cut 3 bytes of a half-written record off the end of {path}"
    ]


def test_a_flipped_byte_loses_only_its_own_frame(tmp_path):
    """Whichever byte of a frame in the middle is damaged, header or payload, the others are read and kept."""
    path = tmp_path / "0.log"
    write(path, map(ended, (1, 2, 3, 4)))
    data = path.read_bytes()
    ends = boundaries(data)
    for position in range(ends[1], ends[2]):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= mask
            path.write_bytes(damaged)
            assert seqs(path) == [1, 3, 4], (position, mask)
    write(path, [ended(5)])
    assert seqs(path) == [1, 3, 4, 5]
    assert path.read_bytes().startswith(damaged)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_damage_stops_a_reader(data):
    """Whatever happens to the bytes behind the magic, a reader yields some of the records, in order, and no others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "0.log")
        write(path, map(ended, range(1, 6)))
        content = bytearray(path.read_bytes())
        start = data.draw(st.integers(8, len(content)))
        end = data.draw(st.integers(start, len(content)))
        content[start:end] = data.draw(st.binary(max_size=40))
        path.write_bytes(content)
        read = list(JournalReader(path))
        write(path, [ended(9)])
        again = list(JournalReader(path))
    assert [r.seq for r in read] == sorted({r.seq for r in read})
    assert all(r == ended(r.seq) for r in read)
    assert again == [*read, ended(9)]


def test_several_damaged_places_lose_only_their_frames(tmp_path):
    """Damage in more than one frame costs those frames."""
    path = tmp_path / "0.log"
    write(path, map(ended, range(1, 8)))
    content = bytearray(path.read_bytes())
    ends = boundaries(content)
    for damaged in (2, 3, 6):
        content[ends[damaged - 1] + 12] ^= 0xFF
    path.write_bytes(content)
    assert seqs(path) == [1, 4, 5, 7]


def test_a_damaged_length_of_a_large_frame(tmp_path):
    """A frame larger than what a reader takes at once is read whole, and skipped whole if its length is damaged."""
    path = tmp_path / "0.log"
    large = ResultRecord(seq=2, time=0.0, step=2, metrics={"m": b"x" * (JournalReader.CHUNK + 99)})
    write(path, [ended(1), large, ended(3)])
    assert seqs(path) == [1, 2, 3]
    data = path.read_bytes()
    at = boundaries(data)[1]
    for wrong in (0, 5, JournalReader.CHUNK + 50, len(data), 2**31):
        content = bytearray(data)
        struct.pack_into("<I", content, at, wrong)
        path.write_bytes(content)
        assert seqs(path) == [1, 3], wrong


def test_unknown_kinds_and_keys_are_skipped(tmp_path, caplog):
    """What a newer version adds neither stops an older reader nor is cut off by an older writer."""
    path = tmp_path / "0.log"
    write(path, [ended(1)])
    with open(path, "ab") as file:
        file.write(frame({"kind": "comet", "v": 1, "seq": 2, "time": 0.0}))
        file.write(frame({"kind": "ended", "v": 2, "seq": 3, "time": 3.0, "status": "failed", "colour": [1, {}]}))
        file.write(frame({"kind": "ended", "v": 1, "seq": 4, "time": 0.0, "status": "vanished"}))
        file.write(frame({"no": "kind"}))
    size = path.stat().st_size
    write(path, [ended(5)])
    assert [(r.seq, r.status) for r in JournalReader(path)] == [(1, "completed"), (3, "failed"), (5, "completed")]
    assert path.stat().st_size > size
    assert not caplog.records


def test_a_newer_version_is_refused_with_the_mend(tmp_path):
    """A journal of a later version says to upgrade, to the reader and to the writer, and is left as it is."""
    path = tmp_path / "0.log"
    path.write_bytes(b"trainyd\x02" + b"new" * 9)
    with pytest.raises(JournalError, match=r"version 2.*upgrade trainyard"):
        list(JournalReader(path))
    with pytest.raises(JournalError, match=r"version 2.*upgrade trainyard"):
        JournalWriter(path)
    assert path.read_bytes() == b"trainyd\x02" + b"new" * 9


@pytest.mark.parametrize("content", [b"epoch,loss\n1,2\n", b"notes\n"], ids=["long", "shorter than the magic"])
def test_a_foreign_file_is_no_journal(tmp_path, content):
    """A file of something else is refused by both sides and not touched."""
    path = tmp_path / "0.log"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="is not a journal"):
        list(JournalReader(path))
    with pytest.raises(JournalError, match="is not a journal"):
        JournalWriter(path)
    assert path.read_bytes() == content


def test_a_missing_file_is_empty(tmp_path):
    """A reader of a file that is not there yields nothing, and yields records once they come."""
    reader = JournalReader(tmp_path / "0.log")
    assert list(reader) == []
    write(tmp_path / "0.log", [ended(1)])
    assert [r.seq for r in reader] == [1]


def test_a_writer_without_a_directory_says_so(tmp_path):
    """A journal that cannot be opened is a JournalError with the path."""
    with pytest.raises(JournalError, match=r"cannot open the journal .*missing"):
        JournalWriter(tmp_path / "missing" / "0.log")


def test_a_reader_follows_a_live_writer(tmp_path):
    """Each iteration yields what came since; an offset of another reader is a place to go on from."""
    path = tmp_path / "0.log"
    writer = JournalWriter(path)
    reader = JournalReader(path)
    for seq in (1, 2, 3):
        writer.append(ended(seq))
        before = reader.offset
        assert [r.seq for r in reader] == [seq]
        assert seqs(path, before) == [seq]
    assert list(reader) == []
    writer.close()
    assert reader.offset == path.stat().st_size


def test_a_reader_waits_for_a_half_written_record(tmp_path):
    """A frame that is still being written is yielded once it is whole, whatever its parts."""
    path = tmp_path / "0.log"
    write(path, [ended(1), ended(2)])
    data = path.read_bytes()
    path.write_bytes(b"")
    reader, read = JournalReader(path), []
    for byte in data:
        with open(path, "ab") as file:
            file.write(bytes([byte]))
        read += [(path.stat().st_size, r.seq) for r in reader]
    ends = boundaries(data)
    assert read == [(ends[1], 1), (ends[2], 2)]


def test_a_record_that_is_finished_while_it_is_read_is_not_skipped(tmp_path, monkeypatch):
    """The writer may finish a frame, and write the next, between a reader's two looks at it: both are read."""
    path = tmp_path / "0.log"
    write(path, [ended(1), ended(2), ended(3)])
    behind_first = boundaries(path.read_bytes())[1]
    early_looks = [12]  # so many bytes of the second frame are there at the first look
    read = journal._pread

    def look(fd, size, offset):
        return read(fd, early_looks.pop() if early_looks else size, offset)

    reader = JournalReader(path, behind_first)
    monkeypatch.setattr(journal, "_pread", look)
    assert [record.seq for record in reader] == [2, 3]


def test_what_msgpack_cannot_hold_writes_nothing(tmp_path):
    """A record that cannot be encoded raises and leaves the file as it was."""
    path = tmp_path / "0.log"
    writer = JournalWriter(path)
    for value, error in ((2**64, OverflowError), (object(), TypeError), ("\ud800", UnicodeEncodeError)):
        with pytest.raises(error):
            writer.append(ResultRecord(seq=1, time=0.0, step=1, metrics={"m": value}))
    writer.append(ended(1))
    writer.close()
    assert seqs(path) == [1]


def test_a_record_is_in_the_file_when_append_returns(tmp_path):
    """Nothing needs to be closed or synced for another reader to see a record."""
    writer = JournalWriter(tmp_path / "0.log")
    writer.append(ended(1))
    assert seqs(tmp_path / "0.log") == [1]
    writer.close()


def test_a_closed_writer_refuses(tmp_path):
    """After close an append is a JournalError, and closing again is none."""
    writer = JournalWriter(tmp_path / "0.log")
    writer.close()
    writer.close()
    with pytest.raises(JournalError, match="the run has ended"):
        writer.append(ended(1))


def test_threads_lose_nothing(tmp_path):
    """Records of many threads are all there, each thread's in its order."""
    path, each = tmp_path / "0.log", 200
    writer = JournalWriter(path)

    def work(number):
        for seq in range(each):
            writer.append(ResultRecord(seq=seq, time=0.0, step=number, metrics={"pad": "x" * (seq % 50)}))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    records = list(JournalReader(path))
    assert len(records) == 6 * each
    for number in range(6):
        assert [r.seq for r in records if r.step == number] == list(range(each))


def test_a_forked_child_never_writes_to_its_parents_journal(tmp_path, forked):
    """In a child, append is refused with the reason, close is harmless, and the parent goes on."""
    path = tmp_path / "0.log"
    writer = JournalWriter(path)
    writer.append(ended(1))
    size = path.stat().st_size

    def child():
        with pytest.raises(JournalError, match="a forked child cannot log"):
            writer.append(ended(2))
        writer.sync()
        writer.close()
        with pytest.raises(JournalError, match="a forked child cannot log"):
            writer.append(ended(2))

    forked(child)
    assert path.stat().st_size == size
    writer.append(ended(3))
    writer.close()
    assert seqs(path) == [1, 3]


def test_a_forked_child_takes_no_waiting_records_along(tmp_path, forked):
    """Records that wait for room stay the parent's: the child neither writes nor counts them."""

    def full():
        path = tmp_path / "0.log"
        writer = JournalWriter(path)
        limit = path.stat().st_size + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        writer.append(ended(1))
        assert writer.waiting == 1

        def child():
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert writer.waiting == 0
            with pytest.raises(JournalError, match="a forked child cannot log"):
                writer.append(ended(2))
            writer.close()

        forked(child)
        assert seqs(path) == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.close()
        assert seqs(path) == [1]

    forked(full)


@pytest.mark.parametrize("room", [0, 1, 30, 200])
def test_a_full_disk_loses_nothing(tmp_path, forked, room):
    """Results wait in memory in order, with one warning, and are written when there is room again."""
    path = tmp_path / "0.log"

    def full():
        writer = JournalWriter(path)
        writer.append(ended(1))
        size = path.stat().st_size
        with hear() as warnings:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
            for seq in range(2, 30):
                writer.append(ended(seq))
            assert writer.waiting >= 20
            assert seqs(path) == list(range(1, 30 - writer.waiting))
            with pytest.raises(JournalError, match="could not be written"):
                writer.sync()
            assert len(warnings) == 1
            assert "results are kept in memory" in warnings[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            writer.append(ended(30))
            writer.sync()
            assert writer.waiting == 0
            assert len(warnings) == 2
            assert "can be written again" in warnings[1]
            writer.append(ended(31))
            writer.close()
            assert len(warnings) == 2

    forked(full)
    assert seqs(path) == list(range(1, 32))


def test_a_disk_that_stays_full_fails_the_close(tmp_path, forked):
    """Close raises where records never reached the disk; what is in the file is whole, and no append is taken."""
    path = tmp_path / "0.log"

    def full():
        writer = JournalWriter(path)
        writer.append(ended(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, resource.RLIM_INFINITY))
        writer.append(ended(2))
        with pytest.raises(JournalError, match="1 records could not be written"):
            writer.close()
        with pytest.raises(JournalError, match="the run has ended"):
            writer.append(ended(3))

    forked(full)
    assert seqs(path) == [1]


def test_a_disk_that_fills_up_again(tmp_path, forked):
    """Some of what waits is written, the rest waits on, and the order holds."""
    path = tmp_path / "0.log"

    def full():
        writer = JournalWriter(path)
        writer.append(ended(1))
        one = path.stat().st_size - len(MAGIC)
        for limit in (0, 2, 5):
            size = len(MAGIC) + one * (1 + limit) + 3
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            writer.append(ended(2 + limit * 10))
            writer.append(ended(3 + limit * 10))
            with contextlib.suppress(JournalError):
                writer.sync()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.close()

    forked(full)
    assert seqs(path) == [1, 2, 3, 22, 23, 52, 53]


def test_arrays_come_back_big_endian_or_not(tmp_path):
    """An array's values are the same whatever its byte order was."""
    array = np.array([1, 256], dtype=">i4")
    write(tmp_path / "0.log", [ResultRecord(seq=1, time=0.0, step=1, metrics={"a": array})])
    (record,) = JournalReader(tmp_path / "0.log")
    assert record.metrics["a"].tolist() == [1, 256]


def test_the_writer_makes_the_file_readable_by_others(tmp_path):
    """The file is a plain one with ordinary permissions."""
    mask = os.umask(0o022)
    try:
        write(tmp_path / "0.log", [])
    finally:
        os.umask(mask)
    assert (tmp_path / "0.log").stat().st_mode & 0o777 == 0o644
