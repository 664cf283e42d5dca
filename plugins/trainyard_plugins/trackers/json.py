"""The ``json`` tracker: ``result.json``, a line a result, with ``params.json`` and ``params.pkl`` (Ray Tune's files).

Every line is strict JSON: NaN and the infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from trainyard import Result, RunInfo, hookimpl, strict_json


class JsonTracker:
    """Writes the results of a run into its directory. It has no options."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    @hookimpl
    def log_start(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Write the config, and cut ``result.json`` back to what is confirmed."""
        folder = Path(run.path)
        _replace(folder / "params.json", _pretty(run.config))
        _replace(folder / "params.pkl", pickle.dumps(run.config))
        path = folder / "result.json"
        confirmed = notes.setdefault("size", 0)
        self._file = open(path, "r+b" if path.exists() else "w+b")
        self._file.truncate(confirmed)
        self._file.seek(confirmed)

    @hookimpl
    def log_results(self, results: list[Result], notes: dict[str, Any]) -> None:
        """Append a line each, in one write."""
        assert self._file is not None
        data = b"".join([strict_json(result.metrics) + b"\n" for result in results])
        self._file.write(data)
        notes["size"] += len(data)

    @hookimpl
    def log_rewind(self, run: RunInfo, results: Iterable[Result], notes: dict[str, Any]) -> None:
        """Write ``result.json`` anew, with exactly these lines."""
        assert self._file is not None
        self._file.close()
        path = Path(run.path, "result.json")
        staged = path.with_name(".result.json.tmp")
        with open(staged, "wb") as file:
            for result in results:
                file.write(strict_json(result.metrics) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            notes["size"] = file.tell()
        os.replace(staged, path)
        self._file = open(path, "r+b")
        self._file.seek(notes["size"])

    @hookimpl
    def flush(self) -> None:
        """Make the lines durable."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    @hookimpl
    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _pretty(config: dict[str, Any]) -> bytes:
    import json

    return json.dumps(json.loads(strict_json(config)), indent=2, sort_keys=True).encode()


def _replace(path: Path, data: bytes) -> None:
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_bytes(data)
    os.replace(staged, path)
