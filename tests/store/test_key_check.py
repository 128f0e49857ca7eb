"""A sealed store is opened with its key alone; what one forgot must not cost all others their caches."""

from __future__ import annotations

import pytest

from blend.errors import StoreError
from blend.store import open_store, read_words

SECRET, OTHER = b"sixteen bytes at least", b"another key of some bytes"


# What writes to a store, sealed artifacts first.
SEALING = {
    "artifact": lambda store: store.write_artifact("map", b"content"),
    "note": lambda store: store.put_manifest("sources/_", b"{}"),
    "manifest": lambda store: store.swap_manifest("indexes/_/manifest.json", b"{}", None),
}


@pytest.mark.parametrize("how", SEALING)
def test_without_its_key_a_sealed_store_is_not_opened(tmp_path, key, cache, how):
    store = open_store(tmp_path, key=SECRET)
    store.put(key(1), cache())
    assert not store.check_key()
    SEALING[how](store)
    assert store.check_key()
    store.describe("abc", {"model": "tiny"})
    with pytest.raises(StoreError, match="is sealed with a store key: give --store-key"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match=r"another store key.*remove 'sealed'"):
        open_store(tmp_path, key=OTHER)
    assert key(1) in open_store(tmp_path, key=SECRET)
    assert read_words(tmp_path)["abc"] == {"model": "tiny"}


@pytest.mark.parametrize(("secret", "words"), [(None, "give --store-key"), (OTHER, "another store key")])
def test_a_shared_one_is_not_written_to(tmp_path, key, cache, secret, words):
    """Nothing is asked of a store elsewhere when it is opened."""
    place = f"file://{tmp_path / 'store'}"
    open_store(place, key=SECRET).write_artifact("map", b"content")
    other = {
        "put": lambda store: store.put(key(1), cache()),
        "delete": lambda store: store.delete(key(1)),
        "no artifact": lambda store: store.delete_artifact("map"),
    }
    for write in (SEALING | other).values():
        with pytest.raises(StoreError, match=words):
            write(open_store(place, key=secret))
    assert open_store(place, key=SECRET).read_artifact("map") == b"content"


def test_a_sealed_store_of_before_has_no_check_and_is_opened(tmp_path, key, cache):
    store = open_store(tmp_path, key=SECRET)
    store.put(key(1), cache())
    store.write_artifact("map", b"content")
    (tmp_path / "sealed").unlink()
    open_store(tmp_path)
    again = open_store(tmp_path, key=SECRET)
    assert key(1) in again
    again.write_artifact("map", b"more")
    assert (tmp_path / "sealed").is_file(), "it gets one with the next artifact"


def test_a_check_that_is_damaged_is_told_with_the_way_out(tmp_path):
    store = open_store(tmp_path, key=SECRET)
    store.write_artifact("map", b"content")
    (tmp_path / "sealed").write_bytes(b"kvblend artifact 1 0000\n")
    with pytest.raises(StoreError, match="remove 'sealed'"):
        open_store(tmp_path, key=SECRET)
    (tmp_path / "sealed").unlink()
    assert open_store(tmp_path, key=SECRET).read_artifact("map") == b"content"


def test_something_else_in_its_place_is_no_check(tmp_path):
    (tmp_path / "store").mkdir()
    open_store(tmp_path / "store")
    (tmp_path / "store" / "sealed").mkdir()
    open_store(tmp_path / "store").write_artifact("map", b"content")
    open_store(tmp_path / "store", key=SECRET).write_artifact("map", b"content")


def test_a_store_without_a_key_gets_no_check(tmp_path):
    store = open_store(tmp_path)
    store.write_artifact("map", b"content")
    assert not (tmp_path / "sealed").exists()
    assert not store.check_key()
