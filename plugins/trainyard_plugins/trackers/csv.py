"""The ``csv`` tracker: ``progress.csv``, a row a result (Ray Tune's file).

RFC 4180 with CRLF line ends. Nested metrics are columns named with ``/``; the config is left out. When new metrics
appear the table grows columns at its right end; after a resume values go under their own headers.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from trainyard import Result, RunInfo, flatten, hookimpl

_BATCH = 500


class CsvTracker:
    """Writes the results of a run into its directory as a table. It has no options."""

    def __init__(self) -> None:
        self._path = Path()
        self._file: TextIO | None = None
        self._columns: dict[str, None] = {}

    @hookimpl
    def log_start(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Cut ``progress.csv`` back to the rows that are confirmed."""
        self._path = Path(run.path, "progress.csv")
        confirmed: list[str] = notes.setdefault("columns", [])
        rows, size = notes.setdefault("rows", 0), notes.setdefault("size", 0)
        self._columns = dict.fromkeys(confirmed)
        if not self._path.exists():
            self._path.touch()
        with open(self._path, newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
        if header == confirmed:
            self._open()
            assert self._file is not None
            self._file.truncate(size)
            self._file.seek(size)
        else:  # the table had grown columns, and we died before that was confirmed: the rows are in the new form
            self._columns = dict.fromkeys(header)
            self._rewrite(islice(self._read_rows(), rows), notes)

    @hookimpl
    def log_results(self, results: list[Result], notes: dict[str, Any]) -> None:
        """Append a row each."""
        assert self._file is not None
        rows = [_row(result) for result in results]
        new = [name for row in rows if row.keys() - self._columns.keys() for name in row if name not in self._columns]
        if new:
            self._columns.update(dict.fromkeys(new))
            self._rewrite(self._read_rows(), notes)
        text = self._format(rows)
        self._file.write(text)
        notes["rows"] += len(rows)
        notes["size"] += len(text.encode())

    @hookimpl
    def log_rewind(self, results: Iterable[Result], notes: dict[str, Any]) -> None:
        """Write ``progress.csv`` anew, with exactly these rows."""
        columns: dict[str, None] = {}
        for result in results:
            row = _row(result)
            if row.keys() - columns.keys():
                columns.update(dict.fromkeys(row))
        self._columns = columns
        self._rewrite((_row(result) for result in results), notes)

    @hookimpl
    def flush(self) -> None:
        """Make the rows durable."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    @hookimpl
    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._file = open(self._path, "r+", newline="", encoding="utf-8")

    def _format(self, rows: list[dict[str, Any]]) -> str:
        text = io.StringIO()
        writer = csv.writer(text)
        columns = self._columns
        for row in rows:
            if len(row) == len(columns) and list(row) == list(columns):
                writer.writerow(row.values())
            else:
                writer.writerow([row.get(name) for name in columns])
        return text.getvalue()

    def _read_rows(self) -> Iterator[dict[str, Any]]:
        if self._file is not None:
            self._file.flush()
        with open(self._path, newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)

    def _rewrite(self, rows: Iterator[dict[str, Any]], notes: dict[str, Any]) -> None:
        """Write the whole table anew with the columns as they are now, and go on behind it."""
        staged = self._path.with_name(".progress.csv.tmp")
        notes["rows"] = 0
        with open(staged, "w", newline="", encoding="utf-8") as file:
            if self._columns:
                csv.writer(file).writerow(self._columns)
            while batch := list(islice(rows, _BATCH)):
                file.write(self._format(batch))
                notes["rows"] += len(batch)
            file.flush()
            os.fsync(file.fileno())
        self.close()
        os.replace(staged, self._path)
        notes["columns"], notes["size"] = list(self._columns), self._path.stat().st_size
        self._open()
        assert self._file is not None
        self._file.seek(notes["size"])


def _row(result: Result) -> dict[str, Any]:
    metrics = result.metrics
    if dict in set(map(type, metrics.values())):
        metrics = dict(flatten({name: value for name, value in metrics.items() if name != "config"}))
    return metrics
