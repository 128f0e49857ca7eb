"""`blend store prune` and `verify --delete` remove what is unused or damaged, and nothing that may be neither."""

import pytest
from made_stores import age, call, key, left, made, note

from blend.store import open_store
from blend.store.admin import forget_sources, read_sources, write_sources
from blend.store.backend import pin_cache
from blend.store.disk import DiskBackend
from tests.store.reading import flip

SECRET = b"s" * 32


def index(root, corpus=""):
    """A corpus that is there, as far as anybody looks."""
    folder = root / "corpora" / corpus / "index" if corpus else root / "index"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_empty_namespaces_are_left_out(tmp_path):
    store = made(tmp_path, 2)
    store.describe(key(0).namespace, {"model": "tiny", "dtype": "float32", "prefix_tokens": "9"})
    store.describe(key(0, "other").namespace, {"model": "other", "dtype": "float32", "prefix_tokens": "9"})
    shown = call(tmp_path).output.splitlines()
    assert shown[1:] == ["  tiny, float32, prefix of 9 tokens: 2 isolated caches"]


def test_what_no_document_is_cached_in_goes(tmp_path):
    store = made(tmp_path, 5)
    note(store, range(3))
    index(tmp_path)
    assert call(tmp_path, "prune").exit_code == 2, "it asks for what to remove"
    assert "2 caches would go" in call(tmp_path, "prune", "--unused", "--dry-run").output
    assert "2 caches removed" in call(tmp_path, "prune", "--unused").output
    assert left(store) == {key(n).digest for n in range(3)}


def test_what_is_new_stays_for_an_hour(tmp_path):
    store = made(tmp_path, 3)
    note(store, ())
    age(tmp_path, hours=0.9)
    assert "0 caches would go" in call(tmp_path, "prune", "--unused", "--dry-run").output
    assert "0 caches removed" in call(tmp_path, "prune", "--unused", "--older-than", "0").output
    age(tmp_path, hours=1.1)
    assert "3 caches removed" in call(tmp_path, "prune", "--unused").output


def test_models_keep_notes_of_their_own(tmp_path):
    store = made(tmp_path, 3)
    note(store, range(3))
    made(tmp_path, 3, model="second")
    note(store, range(2), model="second")
    made(tmp_path, 3, model="unknown")
    note(store, range(1), model="second")
    assert "2 caches removed" in call(tmp_path, "prune", "--unused").output
    kept = {key(n).digest for n in range(3)} | {key(0, "second").digest} | {key(n, "unknown").digest for n in range(3)}
    assert left(store) == kept, "of a model without a note nothing is known"


def test_a_namespace_that_a_corpus_has_left_is_still_known(tmp_path):
    """Caches behind a surrogate context that was replaced, and were not removed then."""
    store = made(tmp_path, 3)
    space, other = key(0).namespace, key(0, "behind a surrogate").namespace
    made(tmp_path, 2, model="behind a surrogate")
    write_sources(store, "", space, {space: {key(0).digest: "a"}, other: {key(0, "behind a surrogate").digest: "a"}})
    write_sources(store, "", space, {space: {key(0).digest: "a"}})
    assert "4 caches removed" in call(tmp_path, "prune", "--unused").output


def test_corpora_share_what_both_hold(tmp_path):
    store = made(tmp_path, 4)
    note(store, (0, 1))
    note(store, (1, 2), "legal")
    index(tmp_path)
    index(tmp_path, "legal")
    assert "1 caches removed" in call(tmp_path, "prune", "--unused").output
    forget_sources(store, "")
    assert read_sources(store).corpora == {"legal"}
    assert left(store) == {key(n).digest for n in range(3)}


def damaged(store):
    (file,) = (store.backend.root / "sources").iterdir()
    flip(file, -5)


UNKNOWN = {
    "damaged": damaged,
    "a list": lambda store: store.put_manifest(f"sources/_.{key(0).namespace}", b"[1, 2]"),
    "a list within": lambda store: store.put_manifest(f"sources/_.{key(0).namespace}", b'{"a": [1, 2]}'),
    "no text": lambda store: store.put_manifest(f"sources/_.{key(0).namespace}", b'{"a": 1}'),
    "missing": lambda store: forget_sources(store, ""),
}


@pytest.mark.parametrize("what", UNKNOWN)
@pytest.mark.parametrize("secret", [None, SECRET])
def test_nothing_goes_while_a_corpus_does_not_say_what_it_uses(tmp_path, what, secret):
    root, file = tmp_path / "store", tmp_path / "key"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    store = made(root, 3, secret)
    note(store, range(3))
    index(root)
    UNKNOWN[what](store)
    options = () if secret is None else ("--store-key", file)
    for more in ((), ("--dry-run",)):
        refused = call(root, "prune", "--unused", *more, *options)
        assert refused.exit_code == 7
        assert "nothing is removed; run `blend precompute`" in refused.output
    assert len(left(store)) == 3
    assert call(root, "ls", *options).exit_code == 0


def test_a_sealed_store_of_before_without_its_key(tmp_path):
    store = made(tmp_path, 3, SECRET)
    note(store, range(3))
    (tmp_path / "kv" / "sealed").unlink()
    refused = call(tmp_path, "prune", "--unused")
    assert refused.exit_code == 7
    assert "of another --store-key" in refused.output
    assert len(left(store)) == 3


@pytest.mark.parametrize("pinned", [False, True])
def test_who_comes_while_it_is_listed_loses_nothing(tmp_path, monkeypatch, pinned):
    store, listing = made(tmp_path, 3), DiskBackend.listing
    note(store, ())

    def meanwhile(self, prefix):
        yield from listing(self, prefix)
        if prefix == "objects/":
            other = open_store(tmp_path / "kv")
            if pinned:
                pin_cache(other.backend, key(0).digest, on=True)
            else:
                note(other, (0,))

    monkeypatch.setattr(DiskBackend, "listing", meanwhile)
    done = call(tmp_path, "prune", *(("--older-than", "0") if pinned else ("--unused",)))
    assert "2 caches removed" in done.output
    assert left(store) == {key(0).digest}


def test_nobody_tells_what_is_used_while_it_is_removed(tmp_path, monkeypatch):
    """What a precompute finds stored behind its note stays stored."""
    store, delete = made(tmp_path, 2), DiskBackend.delete
    note(store, ())
    free = []

    def at_that_moment(self, name):
        if name.startswith("objects/"):
            from filelock import FileLock, Timeout

            try:
                with FileLock(tmp_path / "kv" / ".writing", timeout=0):
                    free.append(name)
            except Timeout:
                pass
        return delete(self, name)

    monkeypatch.setattr(DiskBackend, "delete", at_that_moment)
    assert "2 caches removed" in call(tmp_path, "prune", "--unused").output
    assert free == []


def test_where_nothing_verifies_nothing_is_removed(tmp_path):
    store = made(tmp_path, 3, secret=b"s" * 32)
    refused = call(tmp_path, "verify", "--delete")
    assert refused.exit_code == 7
    assert "is --store-key missing" in refused.output
    assert store.stats().entries == 3


def test_under_a_key_that_is_known_to_be_right_all_may_be_damaged(tmp_path):
    secret = tmp_path / "key"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    store = made(tmp_path / "store", 3)
    sealed = made(tmp_path / "store", 0, secret=b"s" * 32)
    sealed.write_artifact("map", b"content")
    done = call(tmp_path / "store", "verify", "--delete", "--store-key", secret)
    assert done.exit_code == 0, done.output
    assert "3 damaged and removed" in done.output
    assert store.stats().entries == 0
