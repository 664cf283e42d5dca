"""Checkpoints: the commit, the manifest, and every kind of damage."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.checkpoint import Checkpoint, FileEntry, Manifest, Staging, Writer, score
from trainyard.errors import CheckpointCorrupt, CheckpointError, PickleRefused
from trainyard.files import hash_bytes, hash_file
from trainyard.results import Counters
from trainyard.state import save_state
from trainyard.values import recordable

FILES = {"model.bin": b"weights" * 100, "deep/er/vocab.txt": b"words", "empty": b""}


def commit(target, files=None, state=None, *, metrics=None, index=0, iteration=0):
    with Staging(target.parent) as staging:
        for name, content in (files or {}).items():
            path = staging.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if state is not None:
            staging.add_state(state)
        return staging.commit(
            target,
            run_id="0123456789",
            index=index,
            counters=Counters(iteration=iteration),
            metrics=metrics or {},
            journal_seq=iteration,
        )


def edit(path, change):
    """Change the manifest and make its own hash right again, as a forger would."""
    raw = json.loads((path / "manifest.json").read_bytes())
    change(raw)
    raw["self"] = hash_bytes(msgspec.json.encode({**raw, "self": ""}, order="sorted"))
    (path / "manifest.json").write_bytes(msgspec.json.encode(raw))


@pytest.fixture
def saved(tmp_path):
    """A committed checkpoint of files and a state, opened anew."""
    path = tmp_path / "checkpoint_000003"
    commit(path, FILES, {"w": np.arange(4.0)}, metrics={"loss": 0.5}, index=3, iteration=7)
    return Checkpoint(path)


def test_a_committed_checkpoint_tells_what_it_holds(saved, tmp_path):
    """Files, state, metrics, index and iteration come back, and nothing else lies beside it."""
    assert saved.committed
    saved.wait()
    saved.verify()
    assert (saved.index, saved.iteration, saved.metrics) == (3, 7, {"loss": 0.5})
    assert {name: Path(saved.path, name).read_bytes() for name in FILES} == FILES
    assert saved.load()["w"].tolist() == [0, 1, 2, 3]
    assert saved.size == sum(entry.size for entry in saved.manifest.files)
    assert os.listdir(tmp_path) == ["checkpoint_000003"]


def test_the_manifest_is_as_documented(saved):
    """Its keys are the documented ones, every file is in it with size and hash, and its own hash is over the rest."""
    raw = json.loads(Path(saved.path, "manifest.json").read_bytes())
    assert set(raw) >= {
        "format", "version", "run_id", "index", "token", "iteration", "counters", "metrics", "created", "journal_seq",
        "files", "pickled", "writer", "self",
    }  # fmt: skip
    assert (raw["format"], raw["version"], raw["run_id"], raw["journal_seq"]) == (
        "trainyard-checkpoint",
        1,
        "0123456789",
        7,
    )
    assert set(raw["writer"]) == {"host", "pid", "python", "trainyard"}
    assert [entry["path"] for entry in raw["files"]] == sorted([*FILES, "state.data", "state.msgpack"])
    for entry in raw["files"]:
        assert (entry["size"], entry["hash"]) == hash_file(Path(saved.path, entry["path"]))
    assert raw["self"] == hash_bytes(msgspec.json.encode({**raw, "self": ""}, order="sorted"))


NUMBERS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text('aé\n"', max_size=3)


@given(
    st.dictionaries(st.text("abé", max_size=3), NUMBERS | st.lists(NUMBERS, max_size=2), max_size=4),
    st.floats(0, 1e300),
)
@settings(max_examples=100, deadline=None)
def test_manifests_survive_exactly(same, metrics, seconds):
    """Metrics, NaN and infinities too, and counters come back as they were."""
    writer = {"host": "h", "pid": 1, "python": "3", "trainyard": "0"}
    manifest = msgspec.convert(
        {
            "run_id": None, "index": 1, "token": "t", "iteration": 2, "counters": {"time_total": seconds, "iteration": 2},
            "metrics": metrics, "created": seconds, "journal_seq": 2, "files": [], "pickled": ["a/b"], "writer": writer,
        },
        Manifest,
    )  # fmt: skip
    again = Manifest.decode(manifest.encode(), "here")
    assert same(again.metrics, metrics)
    assert again.counters == manifest.counters
    assert again.created == seconds


@pytest.mark.parametrize(
    "value",
    ["NaN", np.arange(3), b"raw", [np.ones(2)], math.nan, -0.0, 2**64 - 1],
    ids=["the word NaN", "array", "bytes", "listed array", "nan", "-0.0", "uint64"],
)
def test_whatever_can_be_reported_can_be_saved_with_a_checkpoint(tmp_path, value):
    """A checkpoint takes every metric that a result takes; strings and numbers stay what they are."""
    metrics = recordable({"m": value, "loss": 1.0})
    commit(tmp_path / "c", {"f": b""}, metrics=metrics)
    read = Checkpoint(tmp_path / "c").metrics
    assert read["loss"] == 1.0
    if isinstance(value, str | int | float):
        assert repr(read["m"]) == repr(value)


@pytest.mark.parametrize("name", [*FILES, "state.data", "state.msgpack"])
def test_a_flipped_bit_in_any_file_is_found_and_named(saved, name):
    """Every reader refuses a changed file and says which one it is."""
    path = Path(saved.path, name)
    content = bytearray(path.read_bytes()) or bytearray(b"\0")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for read in (saved.verify, saved.load, saved.to_directory, saved.as_directory().__enter__):
        with pytest.raises(CheckpointCorrupt, match=f"{name} "):
            read()


@pytest.mark.parametrize("name", ["model.bin", "deep/er/vocab.txt", "state.data", "state.msgpack"])
@pytest.mark.parametrize("damage", ["cut", "grown", "missing", "emptied", "directory", "link"])
def test_a_damaged_file_is_found_and_named(saved, tmp_path, name, damage):
    """A file that is cut, longer, gone, a directory or a link is refused by name."""
    path = Path(saved.path, name)
    content = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage == "link":
        (tmp_path / "same").write_bytes(content)
        path.symlink_to(tmp_path / "same")
    elif damage != "missing":
        path.write_bytes({"cut": content[:-1], "grown": content + b"\0", "emptied": b""}[damage])
    with pytest.raises(CheckpointCorrupt, match=name):
        saved.verify()
    with pytest.raises(CheckpointCorrupt):
        saved.load()


def test_a_folder_that_became_a_file_is_damage(saved):
    """A file below what is no longer a directory is a missing file."""
    folder = Path(saved.path, "deep")
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match=r"vocab\.txt"):
        saved.verify()


def test_a_folder_that_became_a_link_is_refused(saved, tmp_path):
    """A link to a directory elsewhere leads out of the checkpoint, whatever it holds."""
    folder = Path(saved.path, "deep")
    shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointCorrupt):
        saved.verify()


def test_an_extra_link_is_never_followed(saved, tmp_path):
    """A link that the manifest does not name does not bring its target into a copy."""
    (tmp_path / "private.txt").write_bytes(b"private")
    Path(saved.path, "extra").symlink_to(tmp_path / "private.txt")
    target = tmp_path / "copy"
    try:
        saved.to_directory(target)
    except CheckpointError:
        return
    assert not (target / "extra").exists()


def test_a_state_that_the_manifest_does_not_name_is_not_loaded(tmp_path):
    """Loading takes only verified files: a state put beside a checkpoint's files later is none of it."""
    commit(tmp_path / "c", FILES)
    save_state(tmp_path / "c", {"w": 1})
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path / "c").load()


@pytest.mark.parametrize(
    "escape", ["../secret", "/etc/hostname", "a/../../secret", "", ".", "..", "a\\..\\b", "../c/../secret"]
)
@pytest.mark.parametrize("where", ["files", "restore_path"])
def test_paths_that_leave_the_directory_are_refused(saved, tmp_path, escape, where):
    """A manifest with right hashes that names a file outside is corrupt before any file is read."""
    (tmp_path / "secret").write_bytes(b"x")
    if where == "restore_path" and not escape:
        escape = "../x"

    def change(raw):
        if where == "files":
            size, digest = hash_file(tmp_path / "secret")
            raw["files"].append({"path": escape, "size": size, "hash": digest})
        else:
            raw["restore_path"] = escape

    edit(Path(saved.path), change)
    with pytest.raises(CheckpointCorrupt, match="not inside of the checkpoint"):
        saved.verify()


def test_an_edited_manifest_is_found(saved):
    """A manifest whose content was changed by hand does not match its own hash."""
    path = Path(saved.path, "manifest.json")
    for old, new in ((b'"iteration": 7', b'"iteration": 8'), (b"0.5", b"0.6"), (b"model.bin", b"model.bim")):
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))
        with pytest.raises(CheckpointCorrupt, match="does not match its own hash"):
            Checkpoint(saved.path).verify()
        path.write_bytes(content)


def test_a_reformatted_manifest_is_the_same(saved):
    """Spaces and the order of keys do not count: the hash is over the content."""
    path = Path(saved.path, "manifest.json")
    raw = json.loads(path.read_bytes())
    path.write_text(json.dumps(dict(reversed(raw.items())), indent=7))
    saved.verify()


def test_a_newer_version_says_to_upgrade(saved):
    """A checkpoint of a later format is not called damaged."""
    edit(Path(saved.path), lambda raw: raw.update(version=2))
    with pytest.raises(CheckpointError, match="upgrade trainyard") as refusal:
        saved.verify()
    assert not isinstance(refusal.value, CheckpointCorrupt)


def test_unknown_keys_of_the_manifest_are_skipped(saved):
    """A later trainyard may add keys; what is known is read."""
    edit(Path(saved.path), lambda raw: raw.update(colour="blue"))
    saved.verify()
    assert saved.iteration == 7


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b'{"format": "other"}', b'"\xff"', b"\xff\xfe"])
def test_what_is_no_manifest_is_corrupt(saved, content):
    """Anything else in the manifest's place is CheckpointCorrupt with its path."""
    Path(saved.path, "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
        saved.verify()


@given(st.integers(0, 900), st.integers(1, 3), st.binary(max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_damaged_manifest_is_found(start, length, replacement):
    """Whatever happens to its bytes, a manifest says the same as before or is a CheckpointError."""
    writer = Writer("host", 1, "3", "0")
    files = [FileEntry("model.bin", 5, hash_bytes(b"model"))]
    metrics = {"loss": 0.25, "name": "ü"}
    content = Manifest("r", 3, "0123456789abcdef", 3, Counters(3), metrics, 1.5, 3, files, ["a/b"], writer).encode()
    before, content = Manifest.decode(content, "here"), bytearray(content)
    content[start : start + length] = replacement
    with contextlib.suppress(CheckpointError):
        assert Manifest.decode(bytes(content), "here") == before


def test_without_a_manifest_it_is_no_checkpoint(saved, tmp_path):
    """What is not committed says why, and has no metrics."""
    Path(saved.path, "manifest.json").unlink()
    assert not saved.committed
    assert (saved.metrics, saved.iteration) == ({}, 0)
    (tmp_path / "file").write_bytes(b"")
    for path, words in (
        (saved.path, "it has no manifest.json"),
        (tmp_path / "nowhere", "there is no checkpoint"),
        (tmp_path / "file", "is a file; a checkpoint is a directory"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Checkpoint(path).verify()


def test_a_checkpoint_of_files_holds_no_state(tmp_path):
    """Loading a state from a checkpoint of files points to as_directory."""
    checkpoint = commit(tmp_path / "c", FILES)
    assert not checkpoint.holds_state
    with pytest.raises(CheckpointError, match="as_directory"):
        checkpoint.load()
    with checkpoint.as_directory() as folder:
        assert Path(folder, "model.bin").read_bytes() == FILES["model.bin"]


def test_pickled_leaves_stand_in_the_manifest(tmp_path):
    """The manifest names them, and loading needs permission."""
    commit(tmp_path / "c", state={"plain": 1, "opt": {"f": range(3)}})
    checkpoint = Checkpoint(tmp_path / "c")
    assert checkpoint.manifest.pickled == ["opt/f"]
    with pytest.raises(PickleRefused):
        checkpoint.load()
    assert checkpoint.load(only=["plain"]) == {"plain": 1}
    assert checkpoint.load(allow_pickle=True)["opt"]["f"] == range(3)


def test_a_commit_replaces_an_old_checkpoint(saved, tmp_path):
    """Committing to the same place leaves exactly the new one."""
    commit(Path(saved.path), {"new": b"1"}, index=4)
    checkpoint = Checkpoint(saved.path)
    checkpoint.verify()
    assert checkpoint.index == 4
    assert sorted(os.listdir(saved.path)) == ["manifest.json", "new"]
    assert os.listdir(tmp_path) == ["checkpoint_000003"]


def test_a_commit_takes_an_empty_directory(tmp_path):
    """An empty directory in the place of the checkpoint is no obstacle."""
    (tmp_path / "c").mkdir()
    commit(tmp_path / "c", FILES).verify()


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_commit_never_replaces_what_is_no_checkpoint(tmp_path, kind):
    """Other files in the place of the checkpoint stay, the save is a CheckpointError, and nothing else stays behind."""
    target = tmp_path / "c"
    mine = target / "thesis.txt" if kind == "directory" else target
    mine.parent.mkdir(exist_ok=True)
    mine.write_bytes(b"mine")
    with pytest.raises(CheckpointError):
        commit(target, FILES)
    assert mine.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["c"]


def test_an_interrupted_save_leaves_nothing(tmp_path):
    """An exception before the commit takes the staging directory away, and the old checkpoint stays."""
    commit(tmp_path / "c", {"old": b""})
    with contextlib.suppress(RuntimeError), Staging(tmp_path) as staging:
        (staging.path / "half").write_bytes(b"half")
        raise RuntimeError("out of memory")
    Checkpoint(tmp_path / "c").verify()
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
@pytest.mark.parametrize("way", ["staged", "added"])
def test_links_and_special_files_are_not_saved(tmp_path, kind, way):
    """A checkpoint holds plain files only; the message names the one that is not."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_bytes(b"x")
    with Staging(tmp_path / "runs") as staging:
        source = tmp_path / "source" if way == "added" else staging.path
        source.mkdir(exist_ok=True)
        odd = source / "odd"
        if kind == "pipe":
            os.mkfifo(odd)
        else:
            odd.symlink_to(tmp_path / {"link": "target/file", "dangling": "nowhere", "folder": "target"}[kind])
        with pytest.raises(CheckpointError, match=r"odd.*plain files only"):
            staging.add_files(source) if way == "added" else staging.commit(
                tmp_path / "c", run_id=None, index=0, counters=Counters(), metrics={}, journal_seq=0
            )


def test_adding_another_checkpoint_takes_its_files_and_notes(saved, tmp_path):
    """A copied checkpoint gets a manifest of its own, and keeps the user's notes."""
    saved.set_metadata({"note": 1})
    with Staging(tmp_path) as staging:
        staging.add_files(Path(saved.path))
        copy = staging.commit(tmp_path / "c", run_id="b", index=9, counters=Counters(), metrics={}, journal_seq=0)
    Checkpoint(copy.path).verify()
    assert Checkpoint(copy.path).index == 9
    assert copy.get_metadata() == {"note": 1}
    assert Checkpoint(copy.path).load()["w"].tolist() == [0, 1, 2, 3]


def test_copying_a_damaged_checkpoint_is_refused(saved, tmp_path):
    """A copy never hides that a file of the original is damaged."""
    path = Path(saved.path, "state.data")
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with Staging(tmp_path) as staging, pytest.raises(CheckpointError, match="damaged"):
        staging.add_files(Path(saved.path))


def test_pickled_leaves_stay_their_own_runs(tmp_path):
    """A checkpoint that another run copies is opened without pickle by neither of them but the one that pickled it."""
    first = commit(tmp_path / "first", {}, {"f": len, "object": object()})
    with Staging(tmp_path) as staging:
        staging.add_files(Path(first.path))
        copy = staging.commit(tmp_path / "c", run_id="other", index=0, counters=Counters(), metrics={}, journal_seq=0)
    assert (copy.manifest.run_id, copy.manifest.pickled_by) == ("other", first.manifest.run_id)
    with pytest.raises(CheckpointError, match="pickled"):
        copy.load()


@pytest.mark.parametrize("name", ["state.msgpack", "state.data"])
def test_names_of_the_dict_state_are_refused(tmp_path, name):
    """A file of the user's with the name of a dict state would be taken for one, so it is refused at the save."""
    with pytest.raises(CheckpointError, match=name):
        commit(tmp_path / "c", {name: b"mine"})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["manifest.json", "state.data"])
def test_names_that_trainyard_takes_are_refused(tmp_path, name):
    """A file of the user's that would be overwritten is a CheckpointError."""
    with pytest.raises(CheckpointError, match=name):
        commit(tmp_path / "c", {name: b"mine"}, {"x": 1})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["back\\slash", os.fsdecode(b"\xff"), "new\nline", "ü", ".hidden", "sp ace", "-"])
def test_what_was_saved_can_be_restored_whatever_its_name(tmp_path, name):
    """A file name is either refused by the save, or its checkpoint verifies."""
    try:
        commit(tmp_path / "c", {name: b"x"})
    except CheckpointError:
        assert not (tmp_path / "c").exists()
    else:
        Checkpoint(tmp_path / "c").verify()


def test_metadata_is_beside_what_is_verified(saved):
    """The user's notes are set, updated and replaced, and the checkpoint stays good."""
    assert saved.get_metadata() == {}
    saved.set_metadata({"a": 1})
    saved.update_metadata({"b": [2]})
    assert Checkpoint(saved.path).get_metadata() == {"a": 1, "b": [2]}
    saved.set_metadata({"c": None})
    assert saved.get_metadata() == {"c": None}
    saved.verify()


def test_metadata_works_on_a_checkpoint_with_a_file_of_that_name(tmp_path):
    """A user's own file named like the notes does not make the checkpoint fail once notes are set."""
    try:
        checkpoint = commit(tmp_path / "c", {".metadata.json": b"{}", "f": b""})
    except CheckpointError:
        return
    checkpoint.set_metadata({"a": 1})
    Checkpoint(checkpoint.path).verify()


def test_a_copy_is_whole(saved, tmp_path):
    """to_directory gives a checkpoint that verifies, in a named or a new directory."""
    copy = Checkpoint(saved.to_directory(tmp_path / "copy"))
    copy.verify()
    assert copy != saved
    temporary = saved.to_directory()
    try:
        Checkpoint(temporary).verify()
    finally:
        shutil.rmtree(temporary)


def test_equal_when_they_name_the_same_place(saved, tmp_path, monkeypatch):
    """Paths, relative paths, URLs and links to one directory are one checkpoint."""
    (tmp_path / "link").symlink_to(saved.path)
    monkeypatch.chdir(tmp_path)
    places = [saved.path, "checkpoint_000003", saved.url, Path(saved.path), "link", f"{saved.path}/"]
    assert {Checkpoint(place) for place in places} == {saved}
    assert Checkpoint(tmp_path) != saved
    assert saved != saved.path


def test_urls_with_special_characters_come_back(tmp_path):
    """The URL of a directory with spaces and signs names that directory."""
    checkpoint = commit(tmp_path / "a b%20ü#?c", {"f": b"1"})
    Checkpoint(checkpoint.url).verify()
    assert Checkpoint(checkpoint.url) == checkpoint


def test_other_schemes_and_missing_directories_are_refused(tmp_path):
    """Only places on this machine can be opened; a directory to report has to be there."""
    with pytest.raises(CheckpointError, match="s3://bucket/c"):
        Checkpoint("s3://bucket/c")
    with pytest.raises(CheckpointError, match="is no directory"):
        Checkpoint.from_directory(tmp_path / "nowhere")
    assert not Checkpoint.from_directory(tmp_path).committed


@pytest.mark.parametrize(
    ("metrics", "metric", "high", "low"),
    [
        ({"a": 1}, "a", (True, 1.0), (True, -1.0)),
        ({"a": {"b": 2.5}}, "a/b", (True, 2.5), (True, -2.5)),
        ({"a/b": -3}, "a/b", (True, -3.0), (True, 3.0)),
        ({"a": math.nan}, "a", (False, 0.0), (False, 0.0)),
        ({"a": "best"}, "a", (False, 0.0), (False, 0.0)),
        ({"a": None}, "a", (False, 0.0), (False, 0.0)),
        ({"a": True}, "a", (False, 0.0), (False, 0.0)),
        ({"a": {"b": 1}}, "a", (False, 0.0), (False, 0.0)),
        ({}, "a", (False, 0.0), (False, 0.0)),
        ({"a": 1}, None, (True, 0.0), (True, 0.0)),
    ],
)
def test_scores(metrics, metric, high, low):
    """More is better in the mode's own direction; without a usable number both modes rank it worst."""
    assert score(metrics, metric, "max") == high
    assert score(metrics, metric, "min") == low
