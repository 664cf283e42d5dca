"""The checkpoints of a run: which are kept, which are found, what is cleared away."""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.checkpoint import FileEntry, Manifest, Writer
from trainyard.results import Counters
from trainyard.storage import CheckpointPolicy, LocalStore, RunCheckpoints, Store


def save(checkpoints, metrics=None, content=b"weights"):
    with checkpoints.stage() as staging:
        (staging.path / "f").write_bytes(content)
        return checkpoints.commit(staging, counters=Counters(), metrics=metrics or {}, journal_seq=0)


def forge(root, index, metrics):
    """A checkpoint without files, written in the quickest way."""
    files: list[FileEntry] = []
    manifest = Manifest("r", index, "t", 0, Counters(), metrics, 0.0, 0, files, [], Writer("h", 1, "3", "0"))
    (root / f"checkpoint_{index:06d}").mkdir(parents=True)
    (root / f"checkpoint_{index:06d}" / "manifest.json").write_bytes(manifest.encode())


def indices(checkpoints):
    return [checkpoint.index for checkpoint in checkpoints.all()]


def keeping(root, **policy):
    return RunCheckpoints(root, "r", CheckpointPolicy(**policy))


def kept(root, scores, metric="score", **policy):
    """Forge a checkpoint for each score, and tell which retention keeps."""
    for index, value in enumerate(scores):
        forge(root, index, {} if value is None else {metric: value})
    checkpoints = keeping(root, metric=metric, **policy)
    checkpoints.retain()
    return indices(checkpoints)


def test_saves_are_numbered_and_found(tmp_path):
    """Checkpoints get indices from 0 and are listed in their order; names have six digits."""
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", "r")
    assert checkpoints.all() == []
    assert checkpoints.newest_good() is None
    assert checkpoints.best(None) is None
    assert checkpoints.retain() == []
    checkpoints.collect_garbage()
    assert [save(checkpoints).index for _ in range(3)] == [0, 1, 2]
    assert indices(checkpoints) == [0, 1, 2]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"checkpoint_{i:06d}" for i in range(3)]
    assert RunCheckpoints(tmp_path / "checkpoints", "r").next_index == 3


def test_more_than_a_million_sort_by_number(tmp_path):
    """Seven digits come behind six."""
    for index in (1_000_000, 999_999):
        forge(tmp_path, index, {})
    assert indices(keeping(tmp_path)) == [999_999, 1_000_000]


def test_the_newest_are_kept_without_a_metric(tmp_path):
    """`keep` alone keeps the newest, and tells which are gone."""
    checkpoints = keeping(tmp_path, keep=2)
    for _ in range(4):
        save(checkpoints)
    assert [Path(c.path).name for c in checkpoints.retain()] == ["checkpoint_000000", "checkpoint_000001"]
    assert indices(checkpoints) == [2, 3]
    assert checkpoints.retain() == []
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000002", "checkpoint_000003"]


def test_all_are_kept_without_keep(tmp_path):
    """Without `keep` nothing is ever deleted."""
    assert kept(tmp_path, [3, 2, 1]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("scores", "policy", "expected"),
    [
        ([1, 3, 2], {"keep": 1}, [1, 2]),
        ([1, 3, 2], {"keep": 1, "mode": "min"}, [0, 2]),
        ([1, 2, 3], {"keep": 1}, [2]),
        ([5, 5, 5, 1], {"keep": 1}, [2, 3]),
        ([5, 5, 5, 9], {"keep": 2, "mode": "min"}, [1, 2, 3]),
        ([math.nan, 1, 2, 0], {"keep": 2}, [1, 2, 3]),
        ([math.nan, 1, 2, 3], {"keep": 2, "mode": "min"}, [1, 2, 3]),
        ([None, 1, None, 1], {"keep": 2}, [1, 3]),
        ([None, "x", True, 1], {"keep": 2, "mode": "min"}, [2, 3]),
        ([math.inf, 1, math.nan, 2], {"keep": 1, "mode": "min"}, [1, 3]),
        ([1, 2, 3], {"keep": 9}, [0, 1, 2]),
    ],
)
def test_retention_by_a_metric(tmp_path, scores, policy, expected):
    """The best stay, ties go to the newer, no usable score ranks worst in both modes, the newest stays besides."""
    assert kept(tmp_path, scores, **policy) == expected


@pytest.mark.parametrize("metrics", [[{"val": {"acc": 9}}, {"val": {"acc": 1}}], [{"val/acc": 9}, {"val/acc": 1}]])
def test_nested_names_count(tmp_path, metrics):
    """A nested metric is named with slashes, as is one that has a slash in its name."""
    for index, values in enumerate([*metrics, {}]):
        forge(tmp_path, index, values)
    checkpoints = keeping(tmp_path, keep=1, metric="val/acc")
    assert checkpoints.best("val/acc").index == 0
    assert checkpoints.best("val/acc", "min").index == 1
    checkpoints.retain()
    assert indices(checkpoints) == [0, 2]


SCORES = st.none() | st.floats() | st.integers(-3, 3) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])


@given(st.lists(SCORES, min_size=1, max_size=6), st.integers(1, 4), st.sampled_from(["max", "min"]))
@settings(max_examples=150, deadline=None)
def test_retention_keeps_the_best_and_the_newest(scores, keep, mode):
    """Against a model: a real number beats none, then the better, then the newer; the newest is never deleted."""

    def rank(index):
        value = scores[index]
        if value is None or math.isnan(value):
            return (0, 0.0, index)
        return (1, value if mode == "max" else -value, index)

    best = sorted(range(len(scores)), key=rank)
    with tempfile.TemporaryDirectory() as folder:
        assert set(kept(Path(folder), scores, keep=keep, mode=mode)) == {*best[-keep:], len(scores) - 1}


def test_an_index_is_never_used_twice(tmp_path):
    """A number that once was taken, even by a damaged one that was set aside, is not given again."""
    checkpoints = keeping(tmp_path, keep=1)
    for _ in range(3):
        save(checkpoints)
    (tmp_path / "checkpoint_000002" / "f").write_bytes(b"changed")
    assert checkpoints.newest_good().index == 1
    assert checkpoints.next_index == 3
    assert RunCheckpoints(tmp_path, "r").next_index == 3


def test_the_newest_good_one_falls_back(tmp_path, caplog):
    """Damaged ones are passed over with a warning each and set aside, not deleted; those without a manifest are skipped."""
    checkpoints = keeping(tmp_path)
    for _ in range(4):
        save(checkpoints)
    (tmp_path / "checkpoint_000001" / "f").write_bytes(b"changed")
    (tmp_path / "checkpoint_000002" / "manifest.json").write_bytes(b"{")
    (tmp_path / "checkpoint_000003" / "manifest.json").unlink()
    assert checkpoints.newest_good().index == 0
    assert len(caplog.records) == 2
    assert "manifest.json" in caplog.text
    assert (tmp_path / "checkpoint_000001.damaged" / "f").read_bytes() == b"changed"
    assert (tmp_path / "checkpoint_000003" / "f").exists()


def test_a_damaged_one_that_was_set_aside_is_out_of_the_game(tmp_path, caplog):
    """Once set aside it is not listed, not the best, not found again, and takes no place in retention."""
    checkpoints = keeping(tmp_path, keep=1, metric="score")
    for value in (1, 9):
        save(checkpoints, {"score": value})
    (tmp_path / "checkpoint_000001" / "f").write_bytes(b"changed")
    assert checkpoints.newest_good().index == 0
    caplog.clear()
    assert checkpoints.newest_good().index == 0
    assert not caplog.records
    assert indices(checkpoints) == [0]
    assert checkpoints.best("score").index == 0
    save(checkpoints, {"score": 0})
    checkpoints.retain()
    assert indices(checkpoints) == [0, 2]


def test_all_damaged_is_none(tmp_path):
    """Where nothing is good there is nothing to resume from."""
    checkpoints = keeping(tmp_path)
    save(checkpoints)
    (tmp_path / "checkpoint_000000" / "f").unlink()
    assert checkpoints.newest_good() is None


def test_a_damaged_manifest_is_left_out_of_retention(tmp_path, caplog):
    """Ranking goes on without one that cannot be read; it is not deleted."""
    for index in range(3):
        forge(tmp_path, index, {"score": index})
    (tmp_path / "checkpoint_000000" / "manifest.json").write_bytes(b"{")
    keeping(tmp_path, keep=1, metric="score").retain()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000000", "checkpoint_000002"]
    assert "left out of retention" in caplog.text


def test_an_interrupted_save_is_invisible_and_cleared_away(tmp_path):
    """What was staged or half deleted when a process died is no checkpoint, and is collected."""
    checkpoints = keeping(tmp_path)
    save(checkpoints)
    for name in (".staging-0123", ".removed-checkpoint_000009-ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"{}")
    assert indices(checkpoints) == [0]
    assert checkpoints.newest_good().index == 0
    checkpoints.collect_garbage()
    assert os.listdir(tmp_path) == ["checkpoint_000000"]


def test_a_directory_without_a_manifest_has_a_grace_time(tmp_path):
    """It may be a copy in progress: it is collected after a day, and what is not trainyard's never."""
    checkpoints = keeping(tmp_path)
    save(checkpoints)
    long_ago = time.time() - 3 * 24 * 3600
    for name in ("checkpoint_000001", "checkpoint_000002", "notes", "checkpoint_000003.damaged"):
        (tmp_path / name).mkdir()
        if name != "checkpoint_000001":
            os.utime(tmp_path / name, (long_ago, long_ago))
    os.utime(tmp_path / "checkpoint_000000", (long_ago, long_ago))
    checkpoints.collect_garbage()
    expected = ["checkpoint_000000", "checkpoint_000001", "checkpoint_000003.damaged", "notes"]
    assert sorted(os.listdir(tmp_path)) == expected
    assert indices(checkpoints) == [0]


def test_removing_twice_is_no_error(tmp_path, caplog):
    """A checkpoint that is gone already is none to warn of."""
    checkpoints = keeping(tmp_path)
    checkpoint = save(checkpoints)
    checkpoints.remove(checkpoint)
    checkpoints.remove(checkpoint)
    assert os.listdir(tmp_path) == []
    assert not caplog.records


def test_nothing_is_deleted_by_a_commit(tmp_path):
    """Older ones stay until retention is asked for, when the new one is on record."""
    checkpoints = keeping(tmp_path, keep=1)
    for _ in range(3):
        save(checkpoints)
    assert indices(checkpoints) == [0, 1, 2]


def test_when_a_checkpoint_is_due():
    """`every` counts iterations from 1; 0 is never."""
    assert [i for i in range(1, 11) if CheckpointPolicy(every=5).due(i)] == [5, 10]
    assert not any(CheckpointPolicy().due(i) for i in range(1, 11))


def test_a_store_is_what_has_the_four_verbs():
    """The protocols are recognised by their methods, without inheritance."""

    class Mine:
        atomic_create = False

        def put(self, key, source, *, create=False): ...
        def get(self, key, start=0, length=None): ...
        def list(self, prefix, after=""): ...
        def delete(self, keys): ...

    assert isinstance(Mine(), Store)
    assert not isinstance(Mine(), LocalStore)
    assert not isinstance(object(), Store)
