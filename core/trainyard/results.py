"""Which keys trainyard fills into every result, and who wins: the counters of a run.

The keys and the rules are Ray Tune's (``Trainable.train`` of Ray 2.x), so that code and notebooks that read Tune's
results read ours.
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from trainyard.errors import MetricError

__all__ = ["AUTO_FILLED", "Counters", "context"]

DUPLICATE = "__duplicate__"

AUTO_FILLED = frozenset(
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
        # only when the user counts them, or something is restored or saved:
        "timesteps_total",
        "episodes_total",
        "timesteps_since_restore",
        "checkpoint_dir_name",
        "should_checkpoint",
        "perf",
    }
)
"""The names that core puts into results; trackers' ``include`` and ``exclude`` leave them alone."""


def context(run_id: str, config: dict[str, Any]) -> dict[str, Any]:
    """The auto-filled keys that are the same in every result of one process."""
    return {
        "trial_id": run_id,
        "pid": os.getpid(),
        "hostname": platform.node(),
        "node_ip": node_ip(),
        "config": config,
    }


@functools.cache
def node_ip() -> str:
    """The address by which other machines would reach this one; 127.0.0.1 without a network. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # a datagram socket: this only looks up the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@functools.lru_cache(maxsize=2)
def date_string(second: int) -> str:
    """Local time as Ray Tune writes it, ``2026-03-09_14-05-59``."""
    return time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(second))


class Counters(msgspec.Struct):
    """How far a run has come. Saved inside every checkpoint.

    Attributes:
        iteration: results recorded so far, over all restores.
        time_total: seconds spent in steps, over all restores.
        timesteps_total: sum of ``timesteps_this_iter``, None until one was ever returned.
        episodes_total: sum of ``episodes_this_iter``, None until one was ever returned.
        iterations_since_restore, time_since_restore, timesteps_since_restore: the same since the last restore.
    """

    iteration: int = 0
    time_total: float = 0.0
    timesteps_total: int | float | None = None
    episodes_total: int | float | None = None
    iterations_since_restore: int = 0
    time_since_restore: float = 0.0
    timesteps_since_restore: int | float = 0

    def restored(self) -> Counters:
        """A copy to go on from: the same totals, and nothing yet since the restore."""
        return Counters(self.iteration, self.time_total, self.timesteps_total, self.episodes_total)

    def fill(self, metrics: Mapping[str, Any], duration: float, now: float) -> tuple[dict[str, Any], Counters]:
        """Fill the auto-filled keys into a copy of what the user returned.

        The user wins for ``done``, ``training_iteration``, ``time_this_iter_s``, ``timesteps_total``,
        ``episodes_total`` and a non-zero ``timestamp``; the system wins for the others. The keys of :func:`context`
        are added by the run.

        Args:
            metrics: what the user returned; not changed.
            duration: seconds that the step took.
            now: seconds since the epoch.

        Returns:
            The result, and the counters to go on with once it has been recorded; these stay as they are, so that a
            result which is refused counts for nothing.
        """
        result = dict(metrics)
        get = result.get
        given = get("time_this_iter_s")
        if given is not None:
            duration = _number("time_this_iter_s", given)
        else:
            result["time_this_iter_s"] = duration
        after = Counters(
            self.iteration + 1,
            self.time_total + duration,
            self.timesteps_total,
            self.episodes_total,
            self.iterations_since_restore + 1,
            self.time_since_restore + duration,
            self.timesteps_since_restore,
        )
        timesteps = get("timesteps_this_iter")
        if timesteps is not None:
            timesteps = _number("timesteps_this_iter", timesteps)
            after.timesteps_total = (after.timesteps_total or 0) + timesteps
            after.timesteps_since_restore += timesteps
        episodes = get("episodes_this_iter")
        if episodes is not None:
            episodes = _number("episodes_this_iter", episodes)
            after.episodes_total = (after.episodes_total or 0) + episodes

        second = int(now)
        result.setdefault("done", False)
        result.setdefault("training_iteration", after.iteration)
        if after.timesteps_total is not None:
            result.setdefault("timesteps_total", after.timesteps_total)
        if after.episodes_total is not None:
            result.setdefault("episodes_total", after.episodes_total)
        if after.timesteps_since_restore:
            result["timesteps_since_restore"] = after.timesteps_since_restore
        if not get("timestamp"):
            result["timestamp"] = second
        result["date"] = date_string(second)
        result["time_total_s"] = after.time_total
        result["time_since_restore"] = after.time_since_restore
        result["iterations_since_restore"] = after.iterations_since_restore
        return result, after


def _number(name: str, value: Any) -> Any:
    """A count or a duration of the user's as a Python number (it may be a numpy scalar)."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, int | float):
        return value
    raise MetricError(
        f"metric {name!r} is counted up, so it needs to be a number, not a {type(value).__name__}: {value!r}"
    )
