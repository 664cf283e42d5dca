"""The ``csv`` tracker: ``progress.csv``, a row a result (Ray Tune's file).

RFC 4180 with CRLF line ends. Nested metrics are columns named with ``/``; the config is left out. When new metrics
appear the table grows columns at its right end; after a resume values go under their own headers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainyard import MediaFile, Result, RunInfo, flatten, hookimpl
from trainyard_plugins.trackers._appended import AppendedFile, rewritten

_BATCH = 500
csv.field_size_limit((1 << 31) - 1)  # a metric may be a long string; the default would refuse to read it back


class CsvTracker:
    """Writes the results of a run into its directory as a table. It has no options."""

    guarantee = "Exactly once and in order; after a resume the file is written anew."
    one_per_run = True

    def __init__(self) -> None:
        self._path = Path()
        self._file: AppendedFile | None = None
        self._columns: list[str] = []

    @hookimpl
    def log_start(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Cut ``progress.csv`` back to the rows that are confirmed."""
        self.close()
        self._path = Path(run.path, "progress.csv")
        confirmed, rows = notes.setdefault("columns", []), notes.setdefault("rows", 0)
        self._columns = self._header()
        if self._columns == confirmed or not rows:
            self._columns = list(confirmed)
            self._file = AppendedFile(self._path, notes.setdefault("size", 0))
        else:  # the table had grown columns, and we died before that was confirmed: its rows are in the new form
            self._rewrite(islice(self._rows(), rows), notes)

    @hookimpl
    def log_results(self, results: list[Result], notes: dict[str, Any]) -> None:
        """Append a row each, in one write."""
        assert self._file is not None
        rows = [_row(result) for result in results]
        known = set(self._columns)
        new = {name: None for row in rows if not row.keys() <= known for name in row if name not in known}
        if new:
            self._columns += new
            self._rewrite(self._rows(), notes)
        self._file.append(self._format(rows))
        notes["rows"] += len(rows)
        notes["size"] = self._file.size

    @hookimpl
    def log_rewind(self, results: Iterable[Result], notes: dict[str, Any]) -> None:
        """Write ``progress.csv`` anew, with exactly these rows."""
        columns: dict[str, None] = {}
        for result in results:
            row = _row(result)
            if not row.keys() <= columns.keys():
                columns.update(dict.fromkeys(row))
        self._columns = list(columns)
        self._rewrite(map(_row, results), notes)

    @hookimpl
    def flush(self) -> None:
        """Make the rows durable."""
        if self._file is not None:
            self._file.sync()

    @hookimpl
    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _header(self) -> list[str]:
        try:
            with open(self._path, newline="", encoding="utf-8") as file:
                return next(csv.reader(file), [])
        except FileNotFoundError:
            return []

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():  # somebody took it away
            return
        with open(self._path, newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)

    def _format(self, rows: list[dict[str, Any]]) -> bytes:
        columns = self._columns
        text = io.StringIO()
        writer = csv.writer(text)
        for row in rows:
            if len(row) == len(columns) and list(row) == columns:
                writer.writerow(row.values())
            else:
                writer.writerow([row.get(name) for name in columns])
        return text.getvalue().encode()

    def _rewrite(self, rows: Iterator[dict[str, Any]], notes: dict[str, Any]) -> None:
        """Write the whole table anew with the columns as they are now, and go on behind it."""
        count = 0

        def pieces() -> Iterator[bytes]:
            nonlocal count
            if self._columns:
                yield self._format([dict(zip(self._columns, self._columns, strict=True))])
            while batch := list(islice(rows, _BATCH)):
                count += len(batch)
                yield self._format(batch)

        self.close()  # first: an open file cannot be replaced everywhere
        file = self._file = rewritten(self._path, pieces())
        notes.update(columns=list(self._columns), rows=count, size=file.size)


def _row(result: Result) -> dict[str, Any]:
    """The cells of a result, without the config."""
    metrics = dict(result.metrics)
    metrics.pop("config", None)
    if {dict, list}.isdisjoint(map(type, metrics.values())):
        return metrics
    return {name: _cell(value) for name, value in flatten(metrics)}


def _cell(value: Any) -> Any:
    """A media value in a list is its path, as one by itself is: that is its `str()`."""
    if isinstance(value, list):
        return [_cell(item) for item in value]
    return str(value) if isinstance(value, MediaFile) else value
