"""What the trackers make alike of the results that they are handed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard import MediaFile

NOT_METRICS = frozenset(
    {
        "checkpoint_dir_name", "config", "date", "done", "hostname", "iterations_since_restore", "node_ip", "pid",
        "should_checkpoint", "time_since_restore", "timestamp", "timesteps_since_restore", "training_iteration", "trial_id",
    }
)  # fmt: skip
"""What trainyard fills in that is no curve: it is constant, or runs along with the x-axis."""


def media_apart(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a list that holds media, each by its number; any other value as it is."""
    if isinstance(value, list) and any(isinstance(item, MediaFile) for item in value):
        for i, item in enumerate(value):
            yield f"{name}/{i}", item
    else:
        yield name, value


def media_path(run: str, file: MediaFile) -> Path | None:
    """Where a media file lies; None if it is gone, or leads out of the run's directory."""
    path = Path(run, file.path)
    return path if path.is_file() and path.resolve().is_relative_to(Path(run).resolve()) else None
