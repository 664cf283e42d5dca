"""Run directories: identity, status, history, tables, and finding them."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainyard as ty
from trainyard.checkpoint import Staging
from trainyard.delivery import History
from trainyard.errors import ConfigError, RunLocked
from trainyard.journal import EndedRecord, JournalWriter, ResultRecord, ResumedRecord, StartedRecord
from trainyard.results import Counters
from trainyard.rundir import (
    RunDirectory,
    RunResult,
    check_name,
    find_run,
    last_outcome,
    list_runs,
    new_record,
    open_run,
    safe_name,
)


def started(seq=0, **context):
    return StartedRecord(seq=seq, time=float(seq), context=context)


def result(seq, metrics=None):
    return ResultRecord(seq=seq, time=float(seq), step=seq, metrics={"loss": seq} if metrics is None else metrics)


def resumed(keep, **context):
    return ResumedRecord(seq=keep, time=0.0, keep=keep, context=context)


def ended(status="completed", error=None, time=100.0):
    return EndedRecord(seq=0, time=time, status=status, error=error)


def make_run(storage, *records, name="run_a", id="aaaa000000", experiment="e", **identity):
    """A run directory with these records in its journal."""
    directory = RunDirectory(Path(storage, experiment, name))
    directory.create()
    record = new_record(id=id, name=name, experiment=experiment, trainable="m:T", config={})
    for field, value in identity.items():
        setattr(record, field, value)
    directory.write(record)
    append(directory.journal, *records)
    return directory


def append(path, *records):
    writer = JournalWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


def history(directory):
    return [(r.seq, r.metrics) for r in RunResult(directory.path).history()]


def test_identity_survives(tmp_path):
    """What run.json says is read back, and is strict JSON."""
    directory = make_run(tmp_path, config={"lr": 0.1, "nan": math.nan}, tags={"team": "a"}, status="failed")
    record = directory.read()
    assert (record.id, record.name, record.experiment, record.status) == ("aaaa000000", "run_a", "e", "failed")
    assert record.config == {"lr": 0.1, "nan": "NaN"}
    assert record.trainyard == ty.__version__
    assert json.loads(directory.json.read_bytes())["tags"] == {"team": "a"}
    info = RunResult(directory.path).info()
    assert (info.id, info.path, info.tags) == ("aaaa000000", str(directory.path), {"team": "a"})


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float32(0.5),
        np.int64(3),
        np.bool_(True),
        np.arange(3),
        Path("data"),
        2**70,
        print,
        (1, 2),
        {1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_configs_of_other_types_start_a_run_or_are_refused_by_name(tmp_path, value):
    """Scalars of libraries, paths and the like in a config are written somehow, or refused with their place."""
    try:
        run = ty.start_run(storage=tmp_path, experiment="e", config={"net": {"width": value}}, trackers=[])
    except ConfigError as refusal:
        named = "width" in str(refusal)
    else:
        run.log({"loss": 1})
        run.finish()
        named = "width" in open_run(run.path).config["net"]
    assert named


def test_the_layout_is_as_documented(tmp_path):
    """The parts of a run lie where the documentation says."""
    directory = make_run(tmp_path)
    below = {p.relative_to(tmp_path / "e" / "run_a").as_posix() for p in directory.path.rglob("*")}
    assert below == {"run.json", "journal", "journal/0.log", "delivery"}
    directory.create()  # again, for a resume


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": 5}', b"{}", b'{"id": "\xff"}'])
def test_a_damaged_identity_is_a_config_error(tmp_path, content):
    """A run.json that cannot be read is named."""
    directory = make_run(tmp_path)
    directory.json.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        directory.read()


def test_a_later_version_may_add_keys(tmp_path):
    """Unknown keys of run.json are skipped."""
    directory = make_run(tmp_path)
    raw = json.loads(directory.json.read_bytes())
    directory.json.write_text(json.dumps({**raw, "colour": "blue"}))
    assert directory.read().id == "aaaa000000"


def test_what_is_no_run_directory_says_so(tmp_path):
    """A directory or a file without a run.json is a ConfigError."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="is not a run directory"):
            RunResult(path)


def test_a_place_that_cannot_be_made_is_a_config_error(tmp_path):
    """A storage below a file names the mend."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot write to .*--set storage=DIR"):
        RunDirectory(tmp_path / "file" / "e" / "run").create()


def test_one_writer_a_run(tmp_path):
    """A second one is told who the first is."""
    directory = make_run(tmp_path)
    directory.take_lock()
    with pytest.raises(RunLocked, match=r"run_a is being written to by host .*, pid"):
        RunDirectory(directory.path).take_lock()
    directory.lock.release()
    RunDirectory(directory.path).take_lock()


@pytest.mark.parametrize(
    ("records", "outcome"),
    [
        ([], (None, None)),
        ([started()], (None, None)),
        ([started(), result(1)], (None, None)),
        ([started(), ended()], ("completed", None)),
        ([started(), ended("failed", "ValueError: x")], ("failed", "ValueError: x")),
        ([started(), ended(), resumed(0)], (None, None)),
        ([started(), ended("failed", "x"), resumed(0), result(1), ended()], ("completed", None)),
    ],
)
def test_the_last_outcome_is_the_one_that_nothing_follows(tmp_path, records, outcome):
    """An end counts until the run goes on."""
    directory = make_run(tmp_path, *records)
    assert last_outcome(directory.path) == outcome
    assert RunResult(directory.path).status == (outcome[0] or "killed")


def test_status(tmp_path):
    """A held lock is running, a free one without an end is killed, and a written status counts before both."""
    directory = make_run(tmp_path, started())
    assert RunResult(directory.path).status == "killed"
    directory.take_lock()
    assert RunResult(directory.path).status == "running"
    directory.lock.release()
    append(directory.journal, ended("interrupted"))
    assert RunResult(directory.path).status == "interrupted"
    record = directory.read()
    record.status = "completed"
    directory.write(record)
    assert RunResult(directory.path).status == "completed"


def test_an_end_may_stand_in_the_sync_journal(tmp_path):
    """What another process found out about the end of a run counts, the newer before the older."""
    directory = make_run(tmp_path, started(), result(1))
    append(directory.sync_journal, ended("killed", time=105.0))
    assert last_outcome(directory.path) == ("killed", None)
    append(directory.journal, resumed(1), ended("completed", time=109.0))
    assert last_outcome(directory.path) == ("completed", None)


def test_a_run_that_went_on_after_it_was_found_dead_is_not_over(tmp_path):
    """A resume supersedes an older end in the sync journal."""
    directory = make_run(tmp_path, started(), result(1))
    append(directory.sync_journal, ended("killed", time=5.0))
    append(directory.journal, ResumedRecord(seq=1, time=6.0, keep=1, context={}))
    assert last_outcome(directory.path) == (None, None)


def test_an_end_counts_even_if_the_clock_was_set_back(tmp_path):
    """Within one journal the order of the records tells what is last, not their times."""
    directory = make_run(tmp_path, started(), result(7), ended(time=3.0))
    assert last_outcome(directory.path) == ("completed", None)


def test_a_failed_run_keeps_its_error(tmp_path):
    """The words of a failure in another process are in an exception; a run that did not fail has none."""
    failed = RunResult(make_run(tmp_path, started(), ended("failed", "ValueError: x")).path)
    assert "ValueError: x" in str(failed.error)
    with pytest.raises(ty.TrainyardError, match="ValueError: x"):
        failed.raise_if_failed()
    good = RunResult(make_run(tmp_path, started(), ended(), name="b").path)
    assert good.error is None
    good.raise_if_failed()
    mine = RunResult(failed.path, KeyError("k"))
    with pytest.raises(KeyError):
        mine.raise_if_failed()


def test_results_have_the_context_of_their_process(tmp_path):
    """The auto-filled keys that are told once stand in every result, each with those of its own process."""
    records = [started(pid=1), result(1), result(2), resumed(1, pid=2), result(2, {"loss": 20})]
    directory = make_run(tmp_path, *records)
    assert history(directory) == [(1, {"loss": 1, "pid": 1}), (2, {"loss": 20, "pid": 2})]


@pytest.mark.parametrize(
    ("records", "counting"),
    [
        ([], []),
        ([result(1), result(2), resumed(0), result(1)], [1]),
        ([result(1), result(2), resumed(1)], [1]),
        ([result(1), result(2), resumed(2), result(3)], [1, 2, 3]),
        ([result(1), result(2), result(3), resumed(2), result(3), resumed(1), result(2)], [1, 2]),
        ([result(1), ended(), resumed(0)], []),
    ],
)
def test_superseded_results_are_left_out(tmp_path, records, counting):
    """Each resume takes back what lies beyond its `keep`."""
    directory = make_run(tmp_path, started(), *records)
    found = RunResult(directory.path)
    assert [r.seq for r in found.history()] == counting
    assert [r.seq for r in History(directory.journal)] == counting
    assert list(found.dataframe()["seq"]) == counting
    assert found.metrics.get("loss") == (counting[-1] if counting else None)


@st.composite
def journals(draw):
    """The records of a run that was resumed now and then, each value telling which writing it is of."""
    records, head, written = [started(pid=0)], 0, itertools.count()
    for process in range(1, draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 4))):
            head += 1
            metrics = {"loss": next(written), **draw(st.sampled_from([{}, {"a": {"b": 1}}, {"late": None}]))}
            records.append(result(head, metrics))
        head = draw(st.integers(0, head))
        records.append(resumed(head, pid=process))
    for _ in range(draw(st.integers(0, 3))):
        head += 1
        records.append(result(head, {"loss": next(written)}))
    return records


@given(journals())
@settings(max_examples=100, deadline=None)
def test_all_ways_to_read_a_run_agree(records):
    """History, its lazy form, the table and the last metrics tell the same results, from 1 without gaps."""
    with tempfile.TemporaryDirectory() as storage:
        directory = make_run(storage, *records)
        found = RunResult(directory.path)
        results, lazy, table, last = found.history(), list(History(directory.journal)), found.dataframe(), found.metrics
    assert [r.seq for r in results] == list(range(1, len(results) + 1))
    assert lazy == results
    assert last == (results[-1].metrics if results else {})
    assert len(table) == len(results)
    for column in ("loss", "pid") if results else ():
        assert table[column].tolist() == [r[column] for r in results]


def test_a_lazy_history_can_be_read_twice_and_up_to_a_place(tmp_path):
    """Each iteration begins anew, and stops at the given offset."""
    directory = make_run(tmp_path, started(), result(1), result(2))
    size = directory.journal.stat().st_size
    append(directory.journal, result(3), resumed(1))
    lazy = History(directory.journal, until=size)
    assert [r.seq for r in lazy] == [r.seq for r in lazy] == [1, 2]


def test_the_table_has_a_row_a_result_and_a_column_a_metric(tmp_path):
    """Nested names are joined with slashes, the config too; what a result lacks is empty; types are kept."""
    records = [
        started(pid=1, config={"lr": 0.1, "net": {"depth": 2}}),
        result(1, {"loss": 0.5, "val": {"acc": 1}}),
        result(2, {"loss": math.inf, "new": "x"}),
    ]
    table = RunResult(make_run(tmp_path, *records).path).dataframe()
    assert isinstance(table, pandas.DataFrame)
    assert set(table.columns) == {
        "seq",
        "step",
        "time",
        "loss",
        "val/acc",
        "new",
        "pid",
        "config/lr",
        "config/net/depth",
    }
    assert table["seq"].tolist() == [1, 2]
    assert table["loss"].tolist() == [0.5, math.inf]
    assert table["val/acc"].isna().tolist() == [False, True]
    assert table["new"].isna().tolist() == [True, False]
    assert table["config/net/depth"].tolist() == [2, 2]


def test_tables_of_uniform_results(tmp_path):
    """Results of one shape, of one metric, with keys in another order, or with arrays make the same kind of table."""
    one = RunResult(make_run(tmp_path, started(), result(1), result(2)).path).dataframe()
    assert one["loss"].tolist() == [1, 2]
    two = [result(1, {"a": 1, "b": 2}), result(2, {"b": 4, "a": 3})]
    table = RunResult(make_run(tmp_path, started(), *two, name="two").path).dataframe()
    assert (table["a"].tolist(), table["b"].tolist()) == ([1, 3], [2, 4])
    arrays = [result(1, {"a": np.arange(2), "b": [1]}), result(2, {"a": np.arange(2), "b": [2]})]
    table = RunResult(make_run(tmp_path, started(), *arrays, name="arrays").path).dataframe()
    assert table["a"][1].tolist() == [0, 1]
    none = RunResult(make_run(tmp_path, started(), result(1, {}), result(2, {}), name="none").path).dataframe()
    assert len(none) == 2
    assert len(RunResult(make_run(tmp_path, name="empty").path).dataframe()) == 0


def test_contexts_of_different_keys_make_one_table(tmp_path):
    """When a resumed process fills in more, earlier rows are empty there."""
    records = [started(pid=1), result(1), resumed(1, pid=2, config={"lr": 1}), result(2)]
    table = RunResult(make_run(tmp_path, *records).path).dataframe()
    assert table["pid"].tolist() == [1, 2]
    assert table["config/lr"].isna().tolist() == [True, False]


def test_a_damaged_record_costs_one_result(tmp_path):
    """A run whose journal was damaged in one place is read all the same."""
    directory = make_run(tmp_path, started(), result(1))
    at = directory.journal.stat().st_size + 12
    append(directory.journal, result(2), result(3))
    content = bytearray(directory.journal.read_bytes())
    content[at] ^= 0xFF
    directory.journal.write_bytes(content)
    assert [seq for seq, _ in history(directory)] == [1, 3]


def test_runs_are_found_by_directory_id_prefix_and_name(tmp_path):
    """Whatever names exactly one run opens it."""
    directory = make_run(tmp_path, id="aaaa000001", name="first")
    make_run(tmp_path, id="aabb000002", name="second", experiment="other")
    for name in (str(directory.path), "aaaa000001", "aaa", "first"):
        assert find_run(name, tmp_path).id == "aaaa000001"
    assert open_run(directory.path.as_uri()).id == "aaaa000001"
    assert open_run("second", tmp_path).id == "aabb000002"


def test_an_exact_name_comes_before_a_prefix(tmp_path):
    """A run that is named like the beginning of another's id is the one that is meant."""
    make_run(tmp_path, id="beef000000", name="long")
    make_run(tmp_path, id="1234567890", name="beef")
    assert find_run("beef", tmp_path).id == "1234567890"


def test_what_means_several_runs_is_refused(tmp_path):
    """A prefix or a name of more than one run lists their directories."""
    paths = [make_run(tmp_path, id=f"aa0000000{i}", name="same", experiment=f"e{i}").path for i in range(2)]
    for name in ("same", "aa"):
        with pytest.raises(ConfigError, match="means 2 runs") as refusal:
            find_run(name, tmp_path)
        assert all(str(path) in str(refusal.value) for path in paths)


def test_an_unknown_run_names_the_nearest(tmp_path):
    """A typing mistake is answered with the nearest name, and an empty storage says so."""
    make_run(tmp_path, name="digits_1")
    with pytest.raises(ConfigError, match="did you mean 'digits_1'"):
        find_run("digit_1", tmp_path)
    with pytest.raises(ConfigError, match="none; list them with: trainyard runs"):
        find_run("x", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["", "."])
def test_an_empty_name_is_no_run(tmp_path, name, monkeypatch):
    """No name at all never means the one run that there is."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    with pytest.raises(ConfigError):
        find_run(name, tmp_path)


def test_storage_comes_from_the_environment(tmp_path, monkeypatch):
    """Without a storage, open_run looks where the environment says, else in ./runs."""
    make_run(tmp_path / "here", name="one")
    make_run(tmp_path / "runs", name="two")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAINYARD_STORAGE", raising=False)
    assert open_run("two").name == "two"
    monkeypatch.setenv("TRAINYARD_STORAGE", str(tmp_path / "here"))
    assert open_run("one").name == "one"


def test_runs_are_listed_newest_first(tmp_path, caplog):
    """The list is by creation, of all experiments or one; a damaged run is warned of and left out."""
    for created, (name, experiment) in enumerate([("a", "e"), ("b", "f"), ("c", "e")]):
        make_run(tmp_path, name=name, experiment=experiment, created=float(created))
    make_run(tmp_path, name="broken").json.write_bytes(b"{")
    assert [run.name for run in list_runs(tmp_path)] == ["c", "b", "a"]
    assert [run.name for run in list_runs(tmp_path, "e")] == ["c", "a"]
    assert "broken/run.json is damaged" in caplog.text


def test_checkpoints_of_a_run(tmp_path):
    """The newest and the best by a metric; without any, None; a wrong mode is refused."""
    directory = make_run(tmp_path)
    found = RunResult(directory.path)
    assert (found.checkpoints, found.checkpoint, found.best_checkpoint("a")) == ([], None, None)
    for index, value in enumerate([1, 3, math.nan]):
        with Staging(directory.checkpoints) as staging:
            staging.commit(
                directory.checkpoints / f"checkpoint_{index:06d}",
                run_id=found.id, index=index, counters=Counters(), metrics={"a": {"b": value}}, journal_seq=0,
            )  # fmt: skip
    assert found.checkpoint.index == 2
    assert found.best_checkpoint("a/b").index == 1
    assert found.best_checkpoint("a/b", "min").index == 0
    with pytest.raises(ConfigError, match="'max' or 'min'"):
        found.best_checkpoint("a/b", "best")


@pytest.mark.parametrize("name", ["a", "a.b_c-1", "x" * 60, "Run7"])
def test_good_names_are_kept(name):
    """A name that every filesystem takes is taken as it is."""
    assert check_name(name, "name") == name


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", ".a", "a b", "con", "COM1", "x" * 61, "ü", "a.", "-a", "a\n"])
def test_bad_names_are_refused_with_a_better_one(name):
    """The refusal names the place and a name that would do."""
    with pytest.raises(ConfigError, match=r"experiment: .*as in '") as refusal:
        check_name(name, "experiment")
    offered = str(refusal.value).rpartition("as in ")[2].strip("'")
    assert check_name(offered, "experiment") == offered


@given(st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_every_text_has_a_safe_name(text):
    """A safe name is safe already, and never leads out of a directory."""
    name = safe_name(text)
    assert safe_name(name) == name
    assert name not in ("", ".", "..")
    assert not set(name) & set('/\\:*?"<>| \0\n')
