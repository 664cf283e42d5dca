"""The csv tracker: one table that grows columns, and exactly once after every kind of end."""

from __future__ import annotations

import copy
import csv
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.records import Result, RunInfo
from trainyard_plugins.trackers.csv import CsvTracker


def result(seq, **metrics):
    return Result(seq, float(seq), seq, {"i": seq, **metrics})


def info(folder):
    return RunInfo("0123456789", "run", "e", str(folder))


def start(folder, notes):
    tracker = CsvTracker()
    tracker.log_start(run=info(folder), notes=notes)
    return tracker


def table(folder):
    """Header and rows as a strict reader finds them."""
    with open(Path(folder, "progress.csv"), newline="", encoding="utf-8") as file:
        header, *rows = [*csv.reader(file, strict=True)] or [[]]
    assert len(set(header)) == len(header)
    assert all(len(row) == len(header) for row in rows)
    return header, rows


def numbers(folder):
    header, rows = table(folder)
    return [int(row[header.index("i")]) for row in rows]


def test_the_constructor_touches_nothing(tmp_path, monkeypatch):
    """A tracker that was never started leaves no file and can be flushed and closed."""
    monkeypatch.chdir(tmp_path)
    tracker = CsvTracker()
    tracker.flush()
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_row_a_result(tmp_path):
    """Nested metrics are columns with slashes, the config is left out, lines end with CRLF."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    metrics = {"loss": 0.5, "val": {"acc": 1, "deep": {"x": True}}, "config": {"lr": 1}, "none": None}
    tracker.log_results(results=[result(1, **metrics), result(2, **metrics)], notes=notes)
    tracker.flush()
    assert table(tmp_path) == (
        ["i", "loss", "val/acc", "val/deep/x", "none"],
        [["1", "0.5", "1", "True", ""], ["2", "0.5", "1", "True", ""]],
    )
    tracker.close()
    content = (tmp_path / "progress.csv").read_bytes()
    assert content.count(b"\r\n") == content.count(b"\n") == 3


def test_numbers_are_written_exactly(tmp_path):
    """A float is read back to the bit; NaN and infinities are written as Python does."""
    values = [0.1, 1e-300, -0.0, 5e-324, 2.0**60, math.nan, math.inf, -math.inf]
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(seq, x=value) for seq, value in enumerate(values)], notes=notes)
    tracker.close()
    assert [repr(float(row[1])) for row in table(tmp_path)[1]] == [repr(value) for value in values]


NASTY = ["a,b", 'say "x"', "line\nend", "dos\r\nend", "\r", " lead", "", "ü", "=1+1", "'", '"', ",,", "\u2028", "tab\t"]


@given(
    st.lists(
        st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=5
    )
)
@settings(max_examples=80, deadline=None)
def test_any_text_is_quoted_so_that_it_comes_back(tmp_path_factory, texts):
    """Commas, quotes and line ends in values and names are read back by the csv module, also after the table grew."""
    folder = tmp_path_factory.mktemp("run")
    notes: dict = {}
    tracker = start(folder, notes)
    tracker.log_results(results=[result(seq, text=text) for seq, text in enumerate(texts)], notes=notes)
    tracker.log_results(results=[result(99, **{'odd,"name"\n': 1})], notes=notes)
    tracker.close()
    header, rows = table(folder)
    assert header[-1] == 'odd,"name"\n'
    assert [row[header.index("text")] for row in rows[:-1]] == texts if texts else len(rows) == 1


def test_columns_grow_at_the_right(tmp_path):
    """New metrics add columns behind the old ones; earlier rows are empty there, later ones where one is missing."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(1, a=1)], notes=notes)
    tracker.log_results(results=[result(2, b=2), result(3, c=3, a=4)], notes=notes)
    tracker.log_results(results=[result(4)], notes=notes)
    tracker.close()
    assert table(tmp_path) == (
        ["i", "a", "b", "c"],
        [["1", "1", "", ""], ["2", "", "2", ""], ["3", "4", "", "3"], ["4", "", "", ""]],
    )


def test_values_go_under_their_own_names_after_a_restart(tmp_path):
    """A new process may report in another order, or less, or more."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(1, a="A", b="B")], notes=notes)
    tracker.close()
    notes = json.loads(json.dumps(notes))
    tracker = start(tmp_path, notes)
    swapped = [Result(2, 2.0, 2, {"b": "B", "a": "A", "i": 2}), Result(3, 3.0, 3, {"c": "C", "b": "B", "i": 3})]
    tracker.log_results(results=swapped, notes=notes)
    tracker.close()
    assert table(tmp_path) == (
        ["i", "a", "b", "c"],
        [["1", "A", "B", ""], ["2", "A", "B", ""], ["3", "", "B", "C"]],
    )


def test_a_restart_with_older_notes_cuts_back(tmp_path):
    """Rows that were never confirmed go, torn or whole, and stand once when they come again."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(1), result(2)], notes=notes)
    confirmed = copy.deepcopy(notes)
    tracker.log_results(results=[result(3), result(4)], notes=notes)
    tracker.close()
    path = tmp_path / "progress.csv"
    for cut in (0, 1, 4):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - cut])
        again = copy.deepcopy(confirmed)
        tracker = start(tmp_path, again)
        assert numbers(tmp_path) == [1, 2]
        tracker.log_results(results=[result(3), result(4), result(5)], notes=again)
        tracker.close()
        assert numbers(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("confirmed_rows", [0, 1, 3])
def test_death_between_growing_and_the_confirmation(tmp_path, confirmed_rows):
    """The table is in its new form, the notes still tell of the old one: each result stands exactly once."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    if confirmed_rows:
        tracker.log_results(
            results=[result(seq, a=f"line\n{seq}") for seq in range(1, confirmed_rows + 1)], notes=notes
        )
    confirmed = copy.deepcopy(notes)
    first = confirmed_rows + 1
    tracker.log_results(results=[result(first, a="lost")], notes=notes)
    tracker.log_results(results=[result(first + 1, b=1), result(first + 2, a=2, c=3)], notes=notes)
    tracker.close()
    for _ in range(2):  # and once more, from the same notes
        again = copy.deepcopy(confirmed)
        tracker = start(tmp_path, again)
        tracker.log_results(results=[result(seq, b=seq) for seq in range(first, first + 3)], notes=again)
        tracker.close()
        header, rows = table(tmp_path)
        assert numbers(tmp_path) == list(range(1, first + 3))
        assert [row[header.index("b")] for row in rows] == [""] * confirmed_rows + [str(first + i) for i in range(3)]
        if confirmed_rows:
            assert [row[header.index("a")] for row in rows[:confirmed_rows]] == [f"line\n{i}" for i in range(1, first)]


def test_a_long_text_does_not_stop_the_table_from_growing(tmp_path):
    """A value of any length is written, and stays when columns are added later."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(1, text="x" * 200_000)], notes=notes)
    tracker.log_results(results=[result(2, late=1)], notes=notes)
    tracker.close()
    content = (tmp_path / "progress.csv").read_bytes()
    assert content.count(b"\r\n") == 3
    assert b"x" * 200_000 in content


def test_many_rows_survive_growing(tmp_path):
    """A table of more rows than are rewritten at a time keeps them all, in order."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(seq, a=seq) for seq in range(1, 1202)], notes=notes)
    tracker.log_results(results=[result(1202, b=1)], notes=notes)
    tracker.close()
    assert numbers(tmp_path) == list(range(1, 1203))
    assert notes["rows"] == 1202
    assert notes["size"] == (tmp_path / "progress.csv").stat().st_size


def test_a_rewind_leaves_exactly_the_history(tmp_path):
    """After a rewind the table holds the given results with their columns only, and goes on behind them."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(1, a=1), result(2, gone=1), result(3, a=3)], notes=notes)
    tracker.log_rewind(results=[result(1, a=1), result(2, b=2)], notes=notes)
    assert table(tmp_path) == (["i", "a", "b"], [["1", "1", ""], ["2", "", "2"]])
    tracker.log_results(results=[result(3, b=5)], notes=notes)
    tracker.close()
    assert table(tmp_path)[1][2] == ["3", "", "5"]
    assert notes["size"] == (tmp_path / "progress.csv").stat().st_size


def test_a_rewind_to_nothing(tmp_path):
    """A run that begins again has an empty table, and columns of its own."""
    notes: dict = {}
    tracker = start(tmp_path, notes)
    tracker.log_results(results=[result(1, a=1)], notes=notes)
    tracker.log_rewind(results=[], notes=notes)
    assert (tmp_path / "progress.csv").read_bytes() == b""
    tracker.log_results(results=[result(1, b=1)], notes=notes)
    tracker.close()
    assert table(tmp_path) == (["i", "b"], [["1", "1"]])


def test_a_full_disk_leaves_whole_rows(tmp_path, forked):
    """A write that does not fit raises and leaves nothing of itself; the next one that fits goes on from there."""

    def full():
        import resource

        notes: dict = {}
        tracker = start(tmp_path, notes)
        tracker.log_results(results=[result(1, a="x" * 50)], notes=notes)
        for late in ({"a": "y" * 50}, {"b": "y" * 50}):
            before = copy.deepcopy(notes)
            resource.setrlimit(resource.RLIMIT_FSIZE, (notes["size"] + 5, resource.RLIM_INFINITY))
            with pytest.raises(OSError, match=r"File too large|No space left"):
                tracker.log_results(results=[result(2, **late)], notes=notes)
            assert numbers(tmp_path) == [1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            tracker.close()
            notes = before
            tracker = start(tmp_path, notes)  # what a lane does after a failure
            assert numbers(tmp_path) == [1]
        tracker.log_results(results=[result(2, b=1), result(3, a=1)], notes=notes)
        tracker.close()

    forked(full)
    assert numbers(tmp_path) == [1, 2, 3]


NAMES = st.sampled_from(["a", "b", "c/d", 'e,"', "f\n"])
ROWS = st.lists(st.dictionaries(NAMES, st.sampled_from(["1", "x,y", 'q"', "n\nl", ""]), max_size=3), max_size=3)


@given(st.lists(st.sampled_from(["confirm", "die", "rewind"]) | ROWS, max_size=14), st.data())
@settings(max_examples=80, deadline=None)
def test_each_result_stands_exactly_once(tmp_path_factory, steps, data):
    """Whenever the process dies, the table holds each result once, in order, each value under its own name."""
    folder = tmp_path_factory.mktemp("run")
    written: list[Result] = []
    confirmed, saved = 0, {}
    notes: dict = {}
    tracker = start(folder, notes)
    for step in steps:
        if isinstance(step, list):
            batch = [result(len(written) + 1 + i, **metrics) for i, metrics in enumerate(step)]
            if batch:
                tracker.log_results(results=batch, notes=notes)
            written += batch
        elif step == "die":
            tracker.close()
            del written[confirmed:]
            notes = copy.deepcopy(saved)
            tracker = start(folder, notes)
        else:
            if step == "rewind":
                del written[data.draw(st.integers(0, len(written))) :]
                tracker.log_rewind(results=list(written), notes=notes)
            tracker.flush()
            confirmed, saved = len(written), json.loads(json.dumps(notes))
        header, rows = table(folder)
        found = [{name: value for name, value in zip(header, row, strict=True) if value} for row in rows]
        assert found == [{k: str(v) for k, v in r.metrics.items() if v != ""} for r in written]
    tracker.close()
