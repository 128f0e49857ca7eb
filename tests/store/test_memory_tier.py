"""The tier of memory: an entry that was read is in memory once, is what the store holds, and stays within the budget."""

import gc

import pytest
import torch
from reading import assert_holds, descriptors_before, flip, in_threads, open_descriptors, path_of, read

from blend.errors import ConfigError, EntryDamagedError
from blend.store import MemoryCache, open_store
from blend.store.admin import verify_entry
from blend.store.backend import cache_name
from blend.types import ChunkCache

MB = 1 << 20


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", memory_bytes=MB)


def big(mark, tokens=640):
    """A cache of some 240 KB; every element says which entry it is."""
    parts = tuple(torch.full((2, tokens, 8), float(mark)) for _ in range(3))
    return ChunkCache(parts, parts, start=1)


@pytest.mark.parametrize("secret", [None, b"a secret of the store"])
def test_an_entry_that_was_read_is_in_memory_for_later_readers(tmp_path, key, cache, secret):
    store = open_store(tmp_path / "store", memory_bytes=MB, key=secret)
    store.put(key(1), cache())
    assert store.memory == (0, 0, 0, 0, 0, MB)
    assert_holds(store, key(1), cache())
    assert store.memory == (0, 1, 0, 1, store.stats().nbytes, MB)
    before = descriptors_before()
    with store.open(key(1)) as one, store.open(key(1)) as two:
        assert open_descriptors() == before
        assert one.layer(2)[0].data_ptr() == two.layer(2)[0].data_ptr()
    assert_holds(store, key(1), cache())
    assert store.memory[:2] == (3, 1)


def test_looking_verifying_and_reading_that_does_not_count_bring_nothing_in(store, key, cache):
    store.put(key(1), cache())
    assert key(1) in store
    assert key(2) not in store
    store.open(key(1)).close()
    assert verify_entry(store, cache_name(key(1))) == ""
    with store.open(key(1)) as reader:
        reader.counts = False
        for index in range(reader.layers):
            reader.layer(index)
    assert store.memory[:4] == (0, 0, 0, 0)
    with store.open(key(1)) as reader:
        reader.layer(0)
    assert store.memory[:4] == (0, 1, 0, 0), "a part of it"


def test_the_least_recently_read_entries_go_and_the_budget_holds(store, key):
    for number in range(6):
        store.put(key(number), big(number))
    for number in (0, 1, 2, 3, 0, 4):
        assert float(read(store, key(number))[0][0].unique()) == number
        assert store.memory.nbytes <= MB
    hits = store.memory.hits
    for number in (0, 4, 3, 2):
        read(store, key(number))
    assert store.memory.hits == hits + 4
    read(store, key(1))
    assert store.memory.hits == hits + 4, "it was read longest ago"
    store.put(key(9), big(9, tokens=4000))
    assert float(read(store, key(9))[0][0].unique()) == 9
    assert 0 < store.memory.nbytes <= MB


def test_a_reader_keeps_what_was_evicted_or_deleted(store, key):
    store.put(key(0), big(0))
    read(store, key(0))
    reader = store.open(key(0))
    tensor = reader.layer(0)[0]
    store.delete(key(0))
    assert store.memory.entries == 0
    assert store.open(key(0)) is None
    assert float(reader.layer(2)[1].unique()) == 0
    reader.close()
    gc.collect()
    assert float(tensor.unique()) == 0


def test_what_another_process_replaces_damages_or_deletes_is_not_served(tmp_path, store, key, cache):
    other = open_store(tmp_path / "store")
    store.put(key(1), cache(1))
    assert_holds(store, key(1), cache(1))
    other.put(key(1), cache(2))
    for _ in range(2):
        assert_holds(store, key(1), cache(2))
    other.put(key(1), cache(3))
    flip(path_of(store, key(1)), -1)
    with pytest.raises(EntryDamagedError):
        read(store, key(1))
    assert store.memory.entries == 0
    other.delete(key(1))
    assert store.open(key(1)) is None


def test_stores_that_share_memory_keep_their_entries_apart(tmp_path, key, cache):
    memory = MemoryCache(MB)
    one = open_store(tmp_path / "one", memory_bytes=memory)
    two = open_store(tmp_path / "two", memory_bytes=memory)
    again = open_store(tmp_path / "one", memory_bytes=memory, key=b"another one's key")
    one.put(key(1), cache(1))
    two.put(key(1), cache(2))
    for _ in range(2):
        assert_holds(one, key(1), cache(1))
        assert_holds(two, key(1), cache(2))
        with pytest.raises(EntryDamagedError):
            again.open(key(1))
    assert (memory.stats.hits, memory.stats.entries) == (2, 2)


def work(store, key, seed):
    """A thread's share of everything that can be done to eleven entries."""
    for step in range(40):
        number = (5 * seed + step * step) % 11
        if (seed + step) % 5 == 0:
            store.put(key(number), big(100 * number + seed))
        elif (seed + step) % 13 == 0:
            store.delete(key(number))
        elif (layers := read(store, key(number))) is not None:
            (mark,) = {float(part.unique()) for pair in layers for part in pair}
            assert int(mark) // 100 == number
        assert store.memory.nbytes <= MB


def test_readers_and_writers_in_eight_threads(tmp_path, key):
    store = open_store(tmp_path / "store", memory_bytes=MB, budget_bytes=3 * MB)
    in_threads(8, lambda seed: work(store, key, seed))
    assert store.memory.hits > 20
    for number in range(11):
        store.delete(key(number))
    assert store.memory[3:5] == (0, 0)


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_that_is_none(tmp_path, budget):
    with pytest.raises(ConfigError, match="positive"):
        open_store(tmp_path / "store", memory_bytes=budget)


def test_a_store_in_memory_has_no_use_for_it(key, cache):
    store = open_store("memory:", memory_bytes=MB)
    store.put(key(1), cache())
    assert store.memory is None
    assert_holds(store, key(1), cache())
