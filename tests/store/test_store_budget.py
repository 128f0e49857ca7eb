"""A store that is always full: what goes, and how often it is listed for that."""

import os
import time

import pytest
from reading import assert_holds, cache, key

from blend.errors import StoreError
from blend.store import open_store
from blend.store.backend import pin_cache


@pytest.fixture
def size(tmp_path):
    store = open_store(tmp_path / "one")
    store.put(key(0), cache())
    return store.stats().nbytes


@pytest.fixture
def full(tmp_path, size):
    """A store with room for so many entries, full of them."""

    def make(count):
        store = open_store(tmp_path / "store", budget_bytes=int((count + 0.5) * size))
        for number in range(count):
            store.put(key(number), cache(number))
        return store

    return make


@pytest.fixture
def listings(tmp_path, monkeypatch):
    seen, scandir = [], os.scandir

    def spy(path="."):
        if str(path) == str(tmp_path / "store" / "objects"):
            seen.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", spy)
    return seen


def numbers(store, count):
    held = set(store.keys())
    return [number for number in range(count) if key(number) in held]


def test_a_full_store_is_not_listed_for_every_put(full, listings):
    store = full(64)
    listings.clear()
    for number in range(64, 128):
        store.put(key(number), cache(number))
    assert len(listings) <= 64 // 4 + 1
    left = numbers(store, 128)
    assert 60 <= len(left) <= 64
    assert left == list(range(128 - len(left), 128))
    assert store.backend.evictions == 128 - len(left)


def test_replacing_within_a_budget_evicts_nothing(full):
    store = full(2)
    for number in (0, 1, 0, 1):
        store.put(key(number), cache(number))
    assert numbers(store, 2) == [0, 1]


def test_artifacts_do_not_count_towards_the_budget_and_are_not_evicted(full, size):
    store = full(2)
    store.write_artifact("map", bytes(10 * size))
    store.put(key(2), cache(2))
    assert numbers(store, 3) == [1, 2]
    assert store.read_artifact("map") == bytes(10 * size)


def test_entries_that_were_opened_stay(full, monkeypatch):
    now = time.time() + 100
    monkeypatch.setattr("time.time", lambda: now)
    store = full(4)
    for number in (0, 2):
        now += 10
        store.open(key(number)).close()
    for number in (4, 5):
        now += 10
        store.put(key(number), cache(number))
    assert numbers(store, 9) == [0, 2, 4, 5]


def test_an_entry_of_the_whole_budget(tmp_path, size):
    store = open_store(tmp_path / "store", budget_bytes=size)
    for number in range(5):
        store.put(key(number), cache(number))
        assert numbers(store, 9) == [number]
    with pytest.raises(StoreError, match="raise the budget"):
        store.put(key(9), cache(9, tokens=6))
    assert numbers(store, 9) == [4]


def test_a_store_opened_with_a_smaller_budget(full, tmp_path, size):
    full(30)
    small = open_store(tmp_path / "store", budget_bytes=int(3.5 * size))
    small.put(key(30), cache(30))
    assert numbers(small, 40) == [28, 29, 30]


def test_two_stores_of_one_folder_keep_the_budget_together(tmp_path, size):
    stores = [open_store(tmp_path / "store", budget_bytes=20 * size) for _ in range(2)]
    for number in range(100):
        stores[number % 2].put(key(number), cache(number))
        # Each may have written a sixteenth more before it hears of the other.
        assert stores[0].stats().nbytes <= 20 * size * (1 + 3 / 16)
    assert len(numbers(stores[0], 100)) >= 15


def test_a_store_in_memory_keeps_its_budget(size):
    store = open_store("memory:", budget_bytes=int(3.5 * size))
    store.write_artifact("map", bytes(10 * size))
    pin_cache(store.backend, key(0).digest, on=True)
    for number in range(4):
        store.put(key(number), cache(number))
    assert numbers(store, 9) == [0, 2, 3]
    store.open(key(2)).close()
    store.put(key(4), cache(4))
    assert numbers(store, 9) == [0, 2, 4]
    assert_holds(store, key(2), cache(2))
    assert store.backend.evictions == 2
    assert store.read_artifact("map") == bytes(10 * size)
    with pytest.raises(StoreError, match="raise the budget"):
        store.put(key(5), cache(5, tokens=40))
    assert numbers(store, 9) == [0, 2, 4]
    store.open(key(4)).close()
    store.put(key(2), cache(2))  # as new as can be
    store.put(key(6), cache(6))
    assert numbers(store, 9) == [0, 2, 6]
    for number in (2, 6):
        pin_cache(store.backend, key(number).digest, on=True)
    store.put(key(7), cache(7))  # where nothing may go, the newest stays
    assert numbers(store, 9) == [0, 2, 6, 7]
