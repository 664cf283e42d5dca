"""What every measurement shares: clocks, payloads, memory, the page cache. Standard library only.

Peers run this file with their own interpreters, so nothing here may need trainyard.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib.metadata
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "CpuMeter", "cpu_seconds", "drop_from_cache", "have_memory_at_hand", "loops_for", "peak_rss", "percentiles", "results", "rss",
    "speed_us", "time_calls", "timed", "version", "work",
]  # fmt: skip

Opener = contextlib.AbstractContextManager[Callable[[int], object]]

MIB = 1 << 20
_now = time.perf_counter_ns


def results(width: int, kinds: int = 64) -> list[dict[str, float]]:
    """So many different results of full-precision floats; the same in every process.

    Args:
        width: metrics a result.
        kinds: how many results.
    """
    source = random.Random(0)
    names = [f"train/metric_{i:04d}" for i in range(width)]
    return [{name: source.random() * 10 for name in names} for _ in range(kinds)]


def version(distribution: str) -> str:
    """The installed version of a distribution; empty if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def work(loops: int) -> int:
    """Stands for pure-Python training."""
    total = 0
    for i in range(loops):
        total += i & 3
    return total


def loops_for(microseconds: float) -> int:
    """How many loops of :func:`work` take so long on a quiet machine."""
    best = min(_time_ns(lambda: work(1000)) for _ in range(50))
    return max(1, int(microseconds * 1e6 / best)) if microseconds else 0


def speed_us() -> float:
    """The median time of a fixed pure-Python loop now: how fast the machine is at the moment."""
    return sorted(_time_ns(lambda: work(1000)) for _ in range(41))[20] / 1e3


def _time_ns(call: Callable[[], object]) -> int:
    started = _now()
    call()
    return _now() - started


def percentiles(nanoseconds: Iterable[int]) -> dict[str, float]:
    """Mean, p50, p99 and maximum of latencies, in microseconds."""
    ordered = sorted(nanoseconds)
    count = len(ordered)
    return {
        "mean_us": sum(ordered) / count / 1e3,
        "p50_us": ordered[count // 2] / 1e3,
        "p99_us": ordered[min(count - 1, count * 99 // 100)] / 1e3,
        "max_us": ordered[-1] / 1e3,
    }


def time_calls(open_log: Opener, count: int, work_us: float, settle_s: float = 0.3) -> dict[str, float]:
    """Time each of `count` calls on this thread.

    Args:
        open_log: a context manager that gives the function to call with the number of the call.
        count: how often.
        work_us: microseconds of pure-Python training between two calls.
        settle_s: seconds to wait after the first calls, in which peers start their threads and processes.

    Returns:
        Latencies; ``cpu_us``: CPU time of all threads for each call; ``added_us``: what a turn of the loop took beyond
        the training by itself, which is what background threads took from it too; ``close_s``: the end of it.
    """
    loops = loops_for(work_us)
    training = _alone(loops)
    latencies, turns = array.array("q", bytes(8 * count)), array.array("q", bytes(8 * count))
    with open_log as call:
        for i in range(min(100, count)):
            call(i)
        time.sleep(settle_s)
        gc.collect()
        cpu, started = cpu_seconds(), _now()
        for i in range(count):
            before = _now()
            call(i)
            after = _now()
            latencies[i] = after - before
            if loops:
                work(loops)
                turns[i] = _now() - after
        turn, cpu = (_now() - started) / count / 1e3, cpu_seconds() - cpu
        closing = time.perf_counter()
    closed = time.perf_counter() - closing
    # by itself before and after, when no thread of the library runs, or in the loop, should the machine be faster then
    training = min((training + _alone(loops)) / 2, sorted(turns)[count // 2] / 1e3)
    added = {"added_us": turn - training} if loops else {}
    return {**percentiles(latencies), "cpu_us": cpu / count * 1e6 - training, **added, "close_s": closed}


def _alone(loops: int) -> float:
    """The median microseconds of one :func:`work` when nothing else runs in this process."""
    return sorted(_time_ns(lambda: work(loops)) for _ in range(1000))[500] / 1e3 if loops else 0.0


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """The seconds of one call, and its CPU seconds."""
    cpu, started = cpu_seconds(), time.perf_counter()
    call()
    return time.perf_counter() - started, max(1e-9, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """CPU time of this process, all threads, without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rss() -> int:
    """Resident memory now, in bytes; the peak where the system does not tell the present."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss()


def peak_rss() -> int:
    """The most resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def drop_from_cache(directory: Path) -> None:
    """Have the next read of every file below a directory come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def have_memory_at_hand(size: int) -> None:
    """Touch so much memory and free it, in a process of its own.

    A virtual machine gives unused memory back to its host, and whoever uses it next pays for it; this makes everyone
    start alike.
    """
    code = (
        "import mmap, os\n"
        "free = os.sysconf('SC_AVPHYS_PAGES') * mmap.PAGESIZE\n"
        f"size = min({size}, free // 2)\n"
        "area = mmap.mmap(-1, size)\n"
        "piece = bytes(1 << 20)\n"
        "for start in range(0, size - len(piece), len(piece)): area[start : start + len(piece)] = piece\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class CpuMeter:
    """Tells how many cores other processes used since it was made; None where the system does not tell."""

    def __init__(self) -> None:
        self._started, self._own, self._busy = time.monotonic(), _own_cpu(), _busy_cpu()

    def others(self) -> float | None:
        """Cores that were used by others, on average."""
        busy = _busy_cpu()
        if busy is None or self._busy is None:
            return None
        spent = busy - self._busy - (_own_cpu() - self._own)
        return round(max(0.0, spent) / max(1e-3, time.monotonic() - self._started), 2)


def _own_cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_cpu() -> float | None:
    try:
        fields: list[Any] = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, soft = map(int, fields[:7])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
