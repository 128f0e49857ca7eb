"""A store that is always full: what goes, and how often it is listed for that."""

import os
import time

import pytest

from blend.errors import StoreError
from blend.store import open_store


@pytest.fixture
def size(tmp_path, key, cache):
    store = open_store(tmp_path / "one")
    store.put(key(0), cache())
    return store.stats().nbytes


@pytest.fixture
def full(tmp_path, key, cache, size):
    """A store with room for so many entries, full of them."""

    def make(count):
        store = open_store(tmp_path / "store", budget_bytes=int((count + 0.5) * size))
        for number in range(count):
            store.put(key(number), cache(number))
        return store

    return make


@pytest.fixture
def listings(tmp_path, monkeypatch):
    """How often the store's folder of entries was listed."""
    seen, scandir = [], os.scandir

    def spy(path="."):
        if str(path) == str(tmp_path / "store" / "objects"):
            seen.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", spy)
    return seen


def numbers(store, key, count):
    held = set(store.keys())
    return [number for number in range(count) if key(number) in held]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_full_store_is_not_listed_for_every_put(full, key, cache, listings, replaced):
    store = full(64)
    listings.clear()
    for number in range(64):
        store.put(key(number if replaced else number + 64), cache(number))
    assert len(listings) <= 64 // 4 + 1
    left = numbers(store, key, 128)
    assert 60 <= len(left) <= 64
    if not replaced:
        assert left == list(range(128 - len(left), 128))
        assert store.backend.evictions == 128 - len(left)
    assert store.backend.tier_hits is None, "there is one place alone"


def test_entries_that_were_opened_stay(full, key, cache, monkeypatch):
    now = time.time() + 100
    monkeypatch.setattr("time.time", lambda: now)
    store = full(4)
    for number in (0, 2):
        now += 10
        store.open(key(number)).close()
    for number in (4, 5):
        now += 10
        store.put(key(number), cache(number))
    assert numbers(store, key, 9) == [0, 2, 4, 5]


def test_an_entry_of_the_whole_budget(tmp_path, key, cache, size):
    store = open_store(tmp_path / "store", budget_bytes=size)
    for number in range(5):
        store.put(key(number), cache(number))
        assert numbers(store, key, 9) == [number]
    with pytest.raises(StoreError, match="raise the budget"):
        store.put(key(9), cache(9, tokens=6))
    assert numbers(store, key, 9) == [4]


def test_a_store_opened_with_a_smaller_budget(full, tmp_path, key, cache, size):
    full(30)
    small = open_store(tmp_path / "store", budget_bytes=int(3.5 * size))
    small.put(key(30), cache(30))
    assert numbers(small, key, 40) == [28, 29, 30]


def test_two_stores_of_one_folder_keep_the_budget_together(tmp_path, key, cache, size):
    stores = [open_store(tmp_path / "store", budget_bytes=20 * size) for _ in range(2)]
    for number in range(100):
        stores[number % 2].put(key(number), cache(number))
        # Each may have written a sixteenth more before it hears of the other.
        assert stores[0].stats().nbytes <= 20 * size * (1 + 3 / 16)
    assert len(numbers(stores[0], key, 100)) >= 15
