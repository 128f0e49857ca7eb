"""`blend store prune` and `verify --delete` remove what is unused or damaged, and nothing that may be neither."""

from contextlib import suppress

import pytest
from filelock import FileLock, Timeout
from made_stores import SECRET, age, call, digests, key, key_file, left, made, note

from blend.store import open_store
from blend.store.admin import forget_sources, read_sources, write_sources
from blend.store.backend import pin_cache
from blend.store.disk import DiskBackend
from tests.store.reading import flip


def index(root, corpus=""):
    """A corpus that is there, as far as anybody looks."""
    folder = root / "corpora" / corpus / "index" if corpus else root / "index"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_empty_namespaces_are_left_out(tmp_path):
    store = made(tmp_path, 2)
    store.describe(key(0).namespace, {"model": "tiny", "dtype": "float32", "prefix_tokens": "9"})
    store.describe(key(0, "other").namespace, {"model": "other", "dtype": "float32", "prefix_tokens": "9"})
    shown = call(tmp_path).splitlines()
    assert shown[1:] == ["  tiny, float32, prefix of 9 tokens: 2 isolated caches"]


def test_what_is_new_stays_for_an_hour(tmp_path):
    made(tmp_path, 3, noted=())
    age(tmp_path, hours=0.9)
    assert "0 caches would go" in call(tmp_path, "prune", "--unused", "--dry-run")
    assert "0 caches removed" in call(tmp_path, "prune", "--unused", "--older-than", "0")
    age(tmp_path, hours=1.1)
    assert "3 caches removed" in call(tmp_path, "prune", "--unused")


def test_models_keep_notes_of_their_own(tmp_path):
    store = made(tmp_path, 3, noted=range(3))
    made(tmp_path, 3, model="second", noted=range(1))
    made(tmp_path, 3, model="unknown")
    assert "2 caches removed" in call(tmp_path, "prune", "--unused")
    of_unknown = digests(0, 1, 2, model="unknown")
    assert left(store) == digests(0, 1, 2) | digests(0, model="second") | of_unknown, "nothing is known without a note"


def test_a_namespace_that_a_corpus_has_left_is_still_known(tmp_path):
    """Caches behind a surrogate context that was replaced, and were not removed then."""
    store = made(tmp_path, 3)
    space, other = key(0).namespace, key(0, "behind a surrogate").namespace
    made(tmp_path, 2, model="behind a surrogate")
    write_sources(store, "", space, {space: {key(0).digest: "a"}, other: {key(0, "behind a surrogate").digest: "a"}})
    write_sources(store, "", space, {space: {key(0).digest: "a"}})
    assert "4 caches removed" in call(tmp_path, "prune", "--unused")


def test_what_no_corpus_holds_goes(tmp_path):
    store = made(tmp_path, 4, noted=(0, 1))
    note(store, (1, 2), "legal")
    index(tmp_path)
    index(tmp_path, "legal")
    assert "say what is to go" in call(tmp_path, "prune", code=2)
    assert "1 caches would go" in call(tmp_path, "prune", "--unused", "--dry-run")
    assert "1 caches removed" in call(tmp_path, "prune", "--unused")
    forget_sources(store, "")
    assert read_sources(store).corpora == {"legal"}
    assert left(store) == digests(0, 1, 2)


def damaged(store):
    (file,) = (store.backend.root / "sources").iterdir()
    flip(file, -5)


UNKNOWN = {
    "damaged": damaged,
    "a list": lambda store: store.put_manifest(f"sources/_.{key(0).namespace}", b"[1, 2]"),
    "no text": lambda store: store.put_manifest(f"sources/_.{key(0).namespace}", b'{"a": 1}'),
    "missing": lambda store: forget_sources(store, ""),
}


@pytest.mark.parametrize("what", UNKNOWN)
@pytest.mark.parametrize("secret", [None, SECRET])
def test_nothing_goes_while_a_corpus_does_not_say_what_it_uses(tmp_path, what, secret):
    root = tmp_path / "store"
    store = made(root, 3, secret, noted=range(3))
    index(root)
    UNKNOWN[what](store)
    options = () if secret is None else ("--store-key", key_file(tmp_path))
    for more in ((), ("--dry-run",)):
        refused = call(root, "prune", "--unused", *more, *options, code=7)
        assert "nothing is removed; run `blend precompute`" in refused
    assert len(left(store)) == 3
    call(root, "ls", *options)


def test_a_sealed_store_of_before_without_its_key(tmp_path):
    store = made(tmp_path, 3, SECRET, noted=range(3))
    (tmp_path / "kv" / "sealed").unlink()
    assert "of another --store-key" in call(tmp_path, "prune", "--unused", code=7)
    assert len(left(store)) == 3


@pytest.mark.parametrize("pinned", [False, True])
def test_who_comes_while_it_is_listed_loses_nothing(tmp_path, monkeypatch, pinned):
    store, listing = made(tmp_path, 3, noted=()), DiskBackend.listing

    def meanwhile(self, prefix):
        yield from listing(self, prefix)
        if prefix == "objects/":
            other = open_store(tmp_path / "kv")
            if pinned:
                pin_cache(other.backend, key(0).digest, on=True)
            else:
                note(other, (0,))

    monkeypatch.setattr(DiskBackend, "listing", meanwhile)
    options = ("--older-than", "0") if pinned else ("--unused",)
    assert "2 caches removed" in call(tmp_path, "prune", *options)
    assert left(store) == digests(0)


def test_nobody_tells_what_is_used_while_it_is_removed(tmp_path, monkeypatch):
    """What a precompute finds stored behind its note stays stored."""
    made(tmp_path, 2, noted=())
    delete, free = DiskBackend.delete, []

    def at_that_moment(self, name):
        if name.startswith("objects/"):
            with suppress(Timeout), FileLock(tmp_path / "kv" / ".writing", timeout=0):
                free.append(name)
        return delete(self, name)

    monkeypatch.setattr(DiskBackend, "delete", at_that_moment)
    assert "2 caches removed" in call(tmp_path, "prune", "--unused")
    assert free == []


def test_where_nothing_verifies_nothing_is_removed(tmp_path):
    store = made(tmp_path, 3, SECRET)
    assert "is --store-key missing" in call(tmp_path, "verify", "--delete", code=7)
    assert len(left(store)) == 3


def test_under_a_key_that_is_known_to_be_right_all_may_be_damaged(tmp_path):
    root = tmp_path / "store"
    store = made(root, 3)
    made(root, 0, SECRET).write_artifact("map", b"content")
    assert "3 damaged and removed" in call(root, "verify", "--delete", "--store-key", key_file(tmp_path))
    assert left(store) == set()
