"""The file store: four verbs over files."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.errors import ConfigError, Exists, NotFound, StoreError
from trainyard.storage import LocalStore, Store
from trainyard_plugins.stores.file import FileStore, FileStorePlugin


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path / "root")


def keys(store, prefix="", after=""):
    return [entry.key for entry in store.list(prefix, after)]


def test_it_is_a_store(store, tmp_path):
    """It has the protocols of a store and of one on this machine, and tells where keys lie."""
    assert isinstance(store, Store)
    assert isinstance(store, LocalStore)
    assert store.atomic_create
    assert store.path("a/b") == tmp_path / "root" / "a" / "b"
    assert str(tmp_path / "root") in repr(store)


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://{}/"])
def test_paths_and_urls_open_it(tmp_path, form, monkeypatch):
    """A path and a URL with quoted characters name the same directory; a relative path is below the current one."""
    root = tmp_path / "a b"
    url = form.format(str(root).replace(" ", "%20") if "file" in form else root)
    assert FileStorePlugin().open_store(url, {}).root == root
    monkeypatch.chdir(tmp_path)
    assert FileStorePlugin().open_store("./runs", {}).root == tmp_path / "runs"


def test_it_has_no_options():
    """An option is a mistake, and named."""
    with pytest.raises(ConfigError, match="region"):
        FileStorePlugin().open_store("./runs", {"region": "eu"})


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 50])
def test_what_is_put_is_got(store, tmp_path, content):
    """Bytes and files are stored whole, replaced whole, and nothing else is left behind."""
    store.put("a/b/c", b"old and longer" * 2000)
    store.put("a/b/c", content)
    assert store.get("a/b/c") == content
    (tmp_path / "source").write_bytes(content)
    store.put("from/file", tmp_path / "source")
    assert store.get("from/file") == content
    assert (tmp_path / "source").read_bytes() == content
    assert sorted(p.name for p in store.root.rglob("*") if p.is_file()) == ["c", "file"]


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 3, b"012"), (4, None, b"456789"), (8, 5, b"89"), (10, None, b""), (99, 4, b""), (2, 0, b"")],
)
def test_ranges(store, start, length, expected):
    """A range is what there is of it; beyond the end there is nothing."""
    store.put("k", b"0123456789")
    assert store.get("k", start, length) == expected


def test_what_is_not_there_is_not_found(store):
    """A missing key, a key above others and a key below an object are NotFound."""
    store.put("a/b", b"x")
    for key in ("nothing", "a", "a/b/c", "a/c"):
        with pytest.raises(NotFound, match=repr(key)):
            store.get(key)


def test_create_never_replaces(store):
    """The first one wins; the second is told, and changes nothing."""
    store.put("k", b"first", create=True)
    with pytest.raises(Exists, match="'k'"):
        store.put("k", b"second", create=True)
    assert store.get("k") == b"first"
    assert [p.name for p in store.root.iterdir()] == ["k"]


def test_one_of_many_creators_wins(store):
    """Of threads that create one key at the same time exactly one succeeds, and its content stands."""
    won, barrier = [], threading.Barrier(8)

    def create(number):
        barrier.wait()
        try:
            store.put("deep/k", str(number).encode() * 1000, create=True)
        except Exists:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("deep/k") == str(won[0]).encode() * 1000


def test_a_failed_put_leaves_the_old_object(store, tmp_path):
    """A source that cannot be read is a StoreError; the object stays whole, and no piece is left."""
    store.put("k", b"old")
    with pytest.raises(StoreError):
        store.put("k", tmp_path / "no such source")
    assert store.get("k") == b"old"
    assert [p.name for p in store.root.iterdir()] == ["k"]


@pytest.mark.parametrize(
    "key", ["", "/abs", "..", "../x", "a/../b", "a/..", "a//b", "a/", "./a", "a/.", "a\\b", "a\0b"]
)
def test_keys_that_are_none(store, tmp_path, key):
    """A key that is no relative path with forward slashes is refused by every verb, and nothing is touched."""
    for verb in (store.get, store.path, lambda k: store.put(k, b"x"), lambda k: store.delete([k])):
        with pytest.raises(StoreError, match="is no key"):
            verb(key)
    assert os.listdir(tmp_path) == []


def test_lists_are_complete_sorted_and_sized(store):
    """A prefix is any beginning of a key, not only a folder; `after` leaves out what comes up to it."""
    for key in ("a", "a.b", "a/b", "a/b.c", "a/b/c", "ab/c", "b"):
        if key not in ("a", "a/b"):
            store.put(key, key.encode())
    assert keys(store) == ["a.b", "a/b.c", "a/b/c", "ab/c", "b"]
    assert keys(store, "a") == ["a.b", "a/b.c", "a/b/c", "ab/c"]
    assert keys(store, "a/") == ["a/b.c", "a/b/c"]
    assert keys(store, "a/b/") == ["a/b/c"]
    assert keys(store, "", "a/b.c") == ["a/b/c", "ab/c", "b"]
    assert keys(store, "a/b", "a/b.c") == ["a/b/c"]
    assert keys(store, "nothing/") == keys(store, "../") == keys(store, "/") == []
    assert [entry.size for entry in store.list("ab")] == [4]
    assert all(entry.modified > 1e9 for entry in store.list(""))


def test_an_empty_store_lists_nothing(store):
    """A root that was never written to is empty."""
    assert keys(store) == []


def test_deleting_what_is_not_there_is_no_error(store):
    """Missing keys, also above or below others, are skipped, and the rest is deleted."""
    store.put("a/b", b"x")
    store.put("c", b"x")
    store.delete(["nothing", "no/thing", "a", "a/b/c", "c"])
    assert keys(store) == ["a/b"]


def test_it_travels_by_pickle(store):
    """A pickled store is the same store."""
    store.put("k", b"x")
    assert pickle.loads(pickle.dumps(store)).get("k") == b"x"


KEYS = st.lists(st.sampled_from(["a", "b", "a.b", "aä", "-", " "]), min_size=1, max_size=3).map("/".join)


@given(
    st.lists(st.tuples(st.sampled_from(["put", "create", "delete"]), KEYS, st.binary(max_size=5)), max_size=10), KEYS
)
@settings(max_examples=60, deadline=None)
def test_it_behaves_like_a_dict(steps, prefix):
    """Against a model: whatever is put, created and deleted in turn, gets and lists agree."""
    model: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as root:
        store = FileStore(root)
        for verb, key, content in steps:
            clash = any(key.startswith(f"{k}/") or k.startswith(f"{key}/") for k in model)
            if verb == "delete":
                if not clash:
                    store.delete([key])
                    model.pop(key, None)
            elif clash:
                continue  # a file system cannot hold both; an emptied folder is in the way as well
            else:
                try:
                    store.put(key, content, create=verb == "create")
                except Exists:
                    assert verb == "create"
                    assert key in model
                except NotFound:
                    assert os.path.isdir(os.path.join(root, key))
                else:
                    assert verb == "put" or key not in model
                    model[key] = content
        assert {key: store.get(key) for key in keys(store)} == model
        assert keys(store, prefix) == sorted(key for key in model if key.startswith(prefix))
        assert keys(store, "", prefix) == sorted(key for key in model if key > prefix)
