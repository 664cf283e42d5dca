"""The ``json`` tracker: ``result.json``, a line a result, with ``params.json`` and ``params.pkl`` (Ray Tune's files).

Every line is strict JSON: NaN and the infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainyard import Result, RunInfo, hookimpl, strict_json
from trainyard_plugins.trackers._appended import AppendedFile, rewritten


class JsonTracker:
    """Writes the results of a run into its directory. It has no options."""

    guarantee = "Exactly once and in order; after a resume the file is written anew."
    one_per_run = True

    def __init__(self) -> None:
        self._file: AppendedFile | None = None

    @hookimpl
    def log_start(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Write the config, and cut ``result.json`` back to what is confirmed."""
        self.close()
        folder = Path(run.path)
        config = json.dumps(json.loads(strict_json(run.config)), indent=2, sort_keys=True)
        for name, data in (("params.json", config.encode()), ("params.pkl", pickle.dumps(run.config))):
            rewritten(folder / name, [data]).close()
        self._file = AppendedFile(folder / "result.json", notes.get("size", 0))

    @hookimpl
    def log_results(self, results: list[Result], notes: dict[str, Any]) -> None:
        """Append a line each, in one write."""
        assert self._file is not None
        self._file.append(b"".join([strict_json(result.metrics) + b"\n" for result in results]))
        notes["size"] = self._file.size

    @hookimpl
    def log_rewind(self, run: RunInfo, results: Iterable[Result], notes: dict[str, Any]) -> None:
        """Write ``result.json`` anew, with exactly these lines."""
        self.close()
        self._file = rewritten(Path(run.path, "result.json"), (strict_json(r.metrics) + b"\n" for r in results))
        notes["size"] = self._file.size

    @hookimpl
    def flush(self) -> None:
        """Make the lines durable."""
        if self._file is not None:
            self._file.sync()

    @hookimpl
    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
