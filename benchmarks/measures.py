"""The measurements, one a process: ``python -m benchmarks.measures JSON`` prints one row of JSON.

A peer's interpreter runs this file too, so trainyard is imported only where it is measured.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import tracking
from benchmarks.harness import (
    MIB,
    CpuMeter,
    drop_from_cache,
    have_memory_at_hand,
    peak_rss,
    results,
    rss,
    speed_us,
    time_calls,
    timed,
    version,
)
from benchmarks.loggers import LOGGERS, Logger, finished_run

__all__ = ["MEASURES", "measure"]

Row = dict[str, Any]


def measure(what: str, scratch: Path, options: dict[str, Any]) -> Row:
    """Run one measurement.

    Args:
        what: one of :data:`MEASURES`.
        scratch: where its files go, an existing directory; each gets a directory of its own in it.
        options: its arguments.
    """
    meter, speed = CpuMeter(), speed_us()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        row = MEASURES[what](Path(folder), **options)
    return {**row, "speed_us": round((speed + speed_us()) / 2, 2), "others_cores": meter.others()}


# -- one result ------------------------------------------------------------------------------------------------------


def log(folder: Path, logger: str, width: int, count: int, work_us: float = 0.0) -> Row:
    """What the training thread waits for, for each result."""
    chosen = LOGGERS[logger]
    row = time_calls(_numbered(chosen, folder, results(width)), count, work_us)
    return {**row, "version": version(chosen.measured) if chosen.measured else ""}


@contextlib.contextmanager
def _numbered(logger: Logger, folder: Path, metrics: list[dict[str, float]]) -> Iterator[Callable[[int], object]]:
    with logger.open(folder) as record:
        yield lambda i: record(i, metrics[i % 64])


def where(folder: Path, width: int, count: int) -> Row:
    """Where the time of ``train()`` without trackers goes: each stage by itself, and the whole."""
    import msgspec

    from trainyard.journal import ResultRecord
    from trainyard.results import Counters
    from trainyard.values import encode_extension, recordable

    metrics = results(width)[0]
    counters = Counters()
    filled, _ = counters.fill(metrics, 0.1, time.time())
    taken = recordable(filled)
    record = ResultRecord(seq=1, time=time.time(), step=1, metrics=taken)
    encode = msgspec.msgpack.Encoder(enc_hook=encode_extension).encode
    payload = encode(record)
    pack = struct.Struct("<II").pack
    frame = pack(len(payload), zlib.crc32(payload)) + payload
    fd = os.open(folder / "frames", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Step:
        def step(self) -> dict[str, float]:
            return metrics

    step = Step()

    def step_and_check() -> bool:
        started = time.perf_counter()
        returned = step.step()
        time.perf_counter()
        return type(returned) is dict and "__duplicate__" not in returned and bool(started)

    stages: dict[str, Callable[[], object]] = {
        "step, check": step_and_check,
        "fill": lambda: counters.fill(metrics, 0.1, time.time()),
        "recordable": lambda: recordable(filled),
        "encode": lambda: encode(ResultRecord(seq=1, time=1.5, step=1, metrics=taken)),
        "crc, frame": lambda: pack(len(payload), zlib.crc32(payload)) + payload,
        "write": lambda: os.write(fd, frame),
    }
    took = {name: _typical_us(call, count) for name, call in stages.items()}
    os.close(fd)
    whole = time_calls(_numbered(LOGGERS["trainyard-none"], folder, [metrics] * 64), count, 0.0)["p50_us"]
    return {**took, "remaining": whole - sum(took.values()), "whole": whole, "version": version("trainyard")}


def _typical_us(call: Callable[[], object], count: int) -> float:
    """The median over 20 groups of calls, so that reading the clock does not count."""
    size = max(1, count // 20)
    took = []
    for _ in range(20):
        started = time.perf_counter_ns()
        for _ in itertools.repeat(None, size):
            call()
        took.append((time.perf_counter_ns() - started) / size / 1e3)
    return statistics.median(took)


def memory(folder: Path, count: int) -> Row:
    """How much a process grows that logs so many results, json and csv on."""
    metrics = results(10)
    with LOGGERS["trainyard"].open(folder) as train:
        for i in range(10_000):
            train(i, metrics[i % 64])
        time.sleep(1.0)
        before, most = rss(), 0
        for i in range(count):
            train(i, metrics[i % 64])
            if not i & 0x3FFF:
                most = max(most, rss())
        after = rss()
    return {
        "growth_mib": (max(most, after) - before) / MIB,
        "before_mib": before / MIB,
        "version": version("trainyard"),
    }


# -- many results ----------------------------------------------------------------------------------------------------


def lane(folder: Path, tracker: str, count: int) -> Row:
    """Results a second that one lane delivers from a journal to its tracker."""
    from trainyard.config import tracker_specs
    from trainyard.delivery import Lane

    run = finished_run(folder, count)
    (spec,) = tracker_specs([tracker])
    one = Lane(run.info(), spec)
    seconds, cpu = timed(one.attempt)
    if one.position != count:
        raise AssertionError(f"{tracker} got {one.position} results of {count}")
    return {"per_s": count / seconds, "cpu_per_s": count / cpu, "version": version("trainyard")}


def lane_floor(folder: Path, tracker: str, count: int) -> Row:
    """The least that could make the same file: the same rows, from memory, 500 at a time."""
    metrics = results(10)
    filled = {"time_this_iter_s": 0.123, "done": False, "training_iteration": 123, "timestamp": 1700000000,
              "date": "2026-03-09_14-05-59", "time_total_s": 12.34, "time_since_restore": 12.34, "trial_id": "0123456789",
              "iterations_since_restore": 123, "pid": 123, "hostname": "host", "node_ip": "127.0.0.1"}  # fmt: skip
    rows = [{**some, **filled} for some in metrics]

    def write_json() -> None:
        import orjson

        with open(folder / "rows", "wb") as file:
            for start in range(0, count, 500):
                lines = [orjson.dumps(rows[i % 64], None, orjson.OPT_APPEND_NEWLINE) for i in range(start, start + 500)]
                file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def write_csv() -> None:
        import csv

        with open(folder / "rows", "w", newline="") as file:
            writer = csv.writer(file)
            for start in range(0, count, 500):
                writer.writerows([rows[i % 64].values() for i in range(start, start + 500)])
            file.flush()
            os.fsync(file.fileno())

    def write_events() -> None:
        with LOGGERS["tensorboardX"].open(folder) as record:
            for i in range(count):
                record(i, metrics[i % 64])

    seconds, cpu = timed({"json": write_json, "csv": write_csv, "tensorboard": write_events}[tracker])
    measured = version("tensorboardX") if tracker == "tensorboard" else ""
    return {"per_s": count / seconds, "cpu_per_s": count / cpu, "version": measured}


def read(folder: Path, count: int) -> Row:
    """Results a second that a reader of the journal gets, checksums verified."""
    from trainyard.journal import JournalReader

    journal = Path(finished_run(folder, count).path, "journal", "0.log")
    found: list[int] = []
    seconds, cpu = timed(lambda: found.append(sum(1 for _ in JournalReader(journal))))
    if found[0] != count + 2:
        raise AssertionError(f"the journal holds {found[0]} records, not {count + 2}")
    return {"per_s": count / seconds, "cpu_per_s": count / cpu, "version": version("trainyard")}


def dataframe(folder: Path, count: int, how: str) -> Row:
    """A table of all results: ours from the journal, or pandas from the files that Tune and trainyard both write."""
    import pandas

    run = finished_run(folder, count)
    if how != "trainyard":
        from trainyard.config import tracker_specs
        from trainyard.delivery import Lane

        Lane(run.info(), tracker_specs([how])[0]).attempt()
    run_path = Path(run.path)
    table: dict[str, Callable[[], Any]] = {
        "trainyard": run.dataframe,
        "csv": lambda: pandas.read_csv(run_path / "progress.csv"),
        "json": lambda: pandas.read_json(run_path / "result.json", lines=True),
    }
    found: list[int] = []
    seconds, _ = timed(lambda: found.append(len(table[how]())))
    if found != [count]:
        raise AssertionError(f"the table has {found} rows, not {count}")
    return {"seconds": seconds, "version": version("pandas" if how != "trainyard" else "trainyard")}


# -- checkpoints -----------------------------------------------------------------------------------------------------


def _state(arrays: int, mib: float) -> dict[str, Any]:
    import numpy

    count = int(mib * MIB / arrays / 4)
    source = numpy.random.default_rng(0)
    return {f"layer.{i}.weight": source.random(count, dtype=numpy.float32) for i in range(arrays)}


def _empty_state(arrays: int, mib: float) -> dict[str, Any]:
    import numpy

    return {f"layer.{i}.weight": numpy.empty(int(mib * MIB / arrays / 4), numpy.float32) for i in range(arrays)}


def _touch(state: Any) -> int:
    """Read one byte of every page, so that what is read lazily is read."""
    import numpy

    return sum(int(array.view(numpy.uint8).reshape(-1)[:: mmap.PAGESIZE].sum()) for array in state.values())


def _save(how: str, folder: Path, state: dict[str, Any]) -> None:
    if how == "trainyard":
        from trainyard.results import Counters
        from trainyard.storage import RunCheckpoints

        checkpoints = RunCheckpoints(folder, "bench")
        with checkpoints.stage() as staging:
            staging.add_state(state)
            checkpoints.commit(staging, counters=Counters(), metrics={}, journal_seq=0)
    elif how == "raw":
        fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT, 0o644)
        for array in state.values():
            view = memoryview(array).cast("B")
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
        os.close(fd)
    elif how == "numpy":
        import numpy

        with open(folder / "state.npz", "wb") as file:
            numpy.savez(file, **state)
            file.flush()
            os.fsync(file.fileno())
    else:
        import torch

        with open(folder / "state.pt", "wb") as file:
            torch.save({name: torch.from_numpy(array) for name, array in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())


def _restore(how: str, folder: Path, arrays: int, mib: float) -> None:
    if how == "trainyard":
        import trainyard

        _touch(trainyard.Checkpoint(folder / "checkpoint_000000").load())
    elif how == "raw":
        with open(folder / "raw", "rb", buffering=0) as file:
            for array in _empty_state(arrays, mib).values():
                view = memoryview(array).cast("B")
                while view:
                    view = view[file.readinto(view) :]
    elif how == "numpy":
        import numpy

        with numpy.load(folder / "state.npz") as loaded:
            _touch({name: loaded[name] for name in loaded.files})
    else:
        import torch

        _touch({name: tensor.numpy() for name, tensor in torch.load(folder / "state.pt").items()})


def checkpoint(folder: Path, verb: str, how: str, arrays: int, mib: float) -> Row:
    """Save or restore a state of float32 arrays: durable, and cold from the disk."""
    if verb == "restore":
        code = (
            f"from benchmarks.measures import save_state; save_state({how!r}, {os.fspath(folder)!r}, {arrays}, {mib})"
        )
        subprocess.run([sys.executable, "-c", code], check=True)  # a process of its own: its memory is not counted
        drop_from_cache(folder)
        _warm_up(how, folder)
        os.sync()
        have_memory_at_hand(3 * int(mib * MIB))
        before = rss()
        seconds, cpu = timed(lambda: _restore(how, folder, arrays, mib))
        over = peak_rss() - before - int(mib * MIB)
    else:
        state = _state(arrays, mib)
        _warm_up(how, folder)
        os.sync()
        have_memory_at_hand(3 * int(mib * MIB))
        before = peak_rss()
        seconds, cpu = timed(lambda: _save(how, folder, state))
        over = peak_rss() - before
    distribution = {"trainyard": "trainyard", "numpy": "numpy", "torch": "torch"}.get(how, "")
    return {"mib_s": mib / seconds, "seconds": seconds, "cpu_s": cpu, "over_mib": over / MIB, "peak_mib": peak_rss() / MIB,
            "version": version(distribution) if distribution else ""}  # fmt: skip


def save_state(how: str, folder: str, arrays: int, mib: float) -> None:
    """Save a state for a restore to read."""
    _save(how, Path(folder), _state(arrays, mib))


def _warm_up(how: str, folder: Path) -> None:
    """Have everything imported that the measured call needs."""
    with tempfile.TemporaryDirectory(dir=folder) as small:
        _save(how, Path(small), _state(1, 1))
        _restore(how, Path(small), 1, 1)


# -- imports ---------------------------------------------------------------------------------------------------------


def imports(folder: Path, code: str, times: int) -> Row:
    """CPU time of one import statement beyond the bare interpreter's; medians of interleaved starts."""

    def start(code: str) -> float:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise AssertionError(f"{code!r} ended with {process.returncode}")
        return (usage.ru_utime + usage.ru_stime) * 1e3

    start(code)  # writes the .pyc files
    pairs = [(start("pass"), start(code)) for _ in range(times)]
    bare, whole = (statistics.median(column) for column in zip(*pairs))
    return {"cpu_ms": whole - bare, "bare_ms": bare}


MEASURES: dict[str, Callable[..., Row]] = {
    "log": log,
    "where": where,
    "memory": memory,
    "lane": lane,
    "lane_floor": lane_floor,
    "read": read,
    "dataframe": dataframe,
    "checkpoint": checkpoint,
    "imports": imports,
    **tracking.MEASURES,
}


def main() -> None:
    """One measurement; what a peer prints goes to standard error, our row to standard output."""
    asked = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    row = measure(asked["what"], Path(asked["scratch"]), asked["options"])
    print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()
