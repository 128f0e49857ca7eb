"""A store that is always full: what goes, how often it is listed for that, and what a clock that is wrong does to it."""

import os
import time
from contextlib import contextmanager

import pytest
from reading import path_of

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
        store = open_store(tmp_path / "store", budget_bytes=count * size)
        for number in range(count):
            store.put(key(number), cache(number))
        return store

    return make


@pytest.fixture
def listings(tmp_path, monkeypatch):
    """How often the store's folder of entries was listed, on a machine on which all of it takes no time."""
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
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


@pytest.mark.parametrize(("how", "evicted"), [("new", 60), ("replaced", 0), ("deleted", 0)])
def test_a_full_store_is_not_listed_for_every_put(full, key, cache, listings, how, evicted):
    store = full(40)
    listings.clear()
    for number in range(60):
        if how == "deleted":
            store.delete(key(number))
        store.put(key(number % 40 if how == "replaced" else number + 40), cache(number))
    assert len(listings) <= 60 // 4
    assert numbers(store, key, 100) == list(range(40) if how == "replaced" else range(60, 100))
    assert store.evictions == evicted
    assert store.tier_hits is None, "there is one place alone"


def test_entries_opened_since_the_listing_stay(tmp_path, key, cache, size, listings, monkeypatch):
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)
    store, number = open_store(tmp_path / "store", budget_bytes=40 * size), 0
    while number < 41 or not listings:
        listings.clear()
        store.put(key(number), cache(number))
        number, now = number + 1, now + 2
    held = numbers(store, key, number)
    listings.clear()
    for used in (held[1], held[3]):
        store.open(key(used)).close()
        now += 2
    for new in (number, number + 1, number + 2):
        store.put(key(new), cache(new))
    assert listings == []
    assert set(held) - set(numbers(store, key, number)) == {held[0], held[2], held[4]}


def test_one_large_entry_pushes_out_many(full, key, cache, size):
    store = full(20)
    store.put(key(99), cache(99, tokens=60))
    assert key(99) in store
    assert 10 * size < store.stats().nbytes <= 20 * size
    store.put(key(98), cache(98, tokens=60))
    assert {key(98), key(99)} <= set(store.keys())
    assert store.stats().nbytes <= 20 * size


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
    small = open_store(tmp_path / "store", budget_bytes=3 * size)
    small.put(key(30), cache(30))
    assert numbers(small, key, 40) == [28, 29, 30]


def test_two_stores_of_one_folder_keep_the_budget_together(tmp_path, key, cache, size):
    stores = [open_store(tmp_path / "store", budget_bytes=20 * size) for _ in range(2)]
    for number in range(100):
        stores[number % 2].put(key(number), cache(number))
        # Each may have written an eighth more before it hears of the other.
        assert stores[0].stats().nbytes <= 20 * size * (1 + 2 / 8)
    assert len(numbers(stores[0], key, 100)) >= 15


def test_what_another_process_frees_is_free(full, tmp_path, key, cache, size):
    other, one = open_store(tmp_path / "store", budget_bytes=40 * size), full(40)
    other.prune((), key(0).namespace)
    for number in range(40, 80):
        one.put(key(number), cache(number))
    assert len(numbers(one, key, 80)) >= 30


@contextmanager
def clock(monkeypatch, moment):
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: moment)
        yield


@pytest.mark.parametrize("years", [-10, -0.01, 10])
def test_a_clock_that_jumps_does_not_turn_the_order_round(tmp_path, key, cache, size, monkeypatch, years):
    """A clock that is set back makes what is used from then on look as if it had not been used for the longest."""
    store, now = open_store(tmp_path / "store", budget_bytes=10 * size), time.time()
    for number in range(10):
        with clock(monkeypatch, now + 2 * number):
            store.put(key(number), cache(number))
    later = now + years * 365 * 86400
    for step in range(5):
        with clock(monkeypatch, later + 2 * step):
            store.open(key(step)).close()
    for number in range(10, 15):
        with clock(monkeypatch, later + 2 * number):
            store.put(key(number), cache(number))
    assert numbers(store, key, 20) == [*range(5), *range(10, 15)]


def test_a_process_with_a_wrong_clock_follows_the_store(full, tmp_path, key, cache, size, monkeypatch):
    store, late = full(10), open_store(tmp_path / "store", budget_bytes=10 * size)
    for number in range(10, 16):
        with clock(monkeypatch, 1000.0 + 2 * number):
            late.put(key(number), cache(number))
    assert numbers(store, key, 20) == list(range(6, 16))


def test_entries_of_the_future_are_used_and_age(full, tmp_path, key, cache, size):
    os.utime(path_of(full(4), key(0)), (2e9, 2e9))
    again = open_store(tmp_path / "store", budget_bytes=4 * size)
    for number in range(4, 8):
        again.put(key(number), cache(number))
    assert numbers(again, key, 20) == [4, 5, 6, 7]
