"""The tier of memory and what becomes of an entry below it: replaced, deleted or damaged while memory has it, or in memory."""

from __future__ import annotations

import pytest
import torch
from hot_stores import MB, big, holds, read, settled
from store_processes import finish

from blend.errors import EntryDamagedError, StoreError
from blend.store import HotMemory, open_store


def path_of(root, key):
    return root / "objects" / key.namespace / key.digest[:2] / f"{key.digest}.safetensors"


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def test_another_process_replaces_and_deletes(hot, root, key, cache, spawn):
    store, mine, other = hot(), key(1), key(2)
    work = f"""
    store, changes = open_store(root), {{}}
    from blend.types import ChunkKey
    store.put(ChunkKey(*{tuple(mine)}), cache(7))
    store.delete(ChunkKey(*{tuple(other)}))
    """
    for each in (mine, other):
        store.put(each, cache())
        read(store, each)
    assert settled(store).entries == 2
    with store.open(mine) as before:
        finish(spawn(root, work))
        assert store.open(other) is None
        assert float(read(store, mine)[2][1].unique()) == 700
        assert torch.equal(before.layer(2)[1], cache().values[2])
    assert float(read(store, mine)[2][1].unique()) == 700
    assert settled(store).entries == 1
    (found,) = store.open_many([other])
    assert found is None


@pytest.mark.parametrize("at", [20, 80, 400, None])
def test_damage_below_what_is_in_memory(hot, root, key, at):
    """In what an entry is told apart by, it is noticed at once."""
    store = hot()
    store.put(key(1), big(1))
    read(store, key(1))
    settled(store)
    path = path_of(root, key(1))
    if at is None:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, at)
    with pytest.raises(EntryDamagedError):
        store.open(key(1))
    store.put(key(1), big(3))
    assert holds(store, key(1), big(3))


def test_where_later_bytes_alone_are_damaged_memory_serves_what_was_written(hot, root, key):
    store = hot()
    store.put(key(1), big(1))
    read(store, key(1))
    settled(store)
    flip(path_of(root, key(1)), -1)
    assert holds(store, key(1), big(1))
    with pytest.raises(EntryDamagedError):
        read(open_store(root), key(1))


@pytest.mark.parametrize("ahead", [False, True])
def test_damage_below_does_not_come_into_memory(hot, root, key, cache, ahead):
    store = hot()
    store.put(key(1), cache())
    flip(path_of(root, key(1)), -1)
    if ahead:
        store.prefetch([key(1)])
    with pytest.raises(EntryDamagedError):
        read(store, key(1))
    stats = settled(store)
    assert (stats.entries, stats.nbytes) == (0, 0)
    with pytest.raises(EntryDamagedError):
        read(store, key(1))
    store.put(key(1), cache())
    assert holds(store, key(1), cache())
    assert settled(store).entries == 1


def test_damage_in_memory_is_found_and_read_from_below(hot, key):
    store = hot(HotMemory(MB, recheck_s=0.0))
    store.put(key(1), big(1))
    read(store, key(1))
    settled(store)
    with store.open(key(1)) as reader:
        reader.layer(0)[1].view(-1)[30_000] += 1
    assert holds(store, key(1), big(1))
    stats = settled(store)
    assert (stats.damaged, stats.misses, stats.entries) == (1, 2, 1)
    assert holds(store, key(1), big(1))
    assert settled(store).hits == 2


def test_reading_ahead_is_silent_about_what_the_reader_finds(hot, root, key, cache, tmp_path):
    store = hot()
    store.put(key(1), cache())
    store.put(key(2), cache())
    flip(path_of(root, key(2)), 90)
    store.prefetch([key(1), key(2), key(3)])
    assert settled(store).entries == 1
    assert store.open(key(3)) is None
    with pytest.raises(EntryDamagedError):
        store.open(key(2))
    root.rename(tmp_path / "elsewhere")
    store.prefetch([key(1)])
    settled(store)
    with pytest.raises(StoreError, match="is gone"):
        store.open(key(1))
    (tmp_path / "elsewhere").rename(root)
    assert holds(store, key(1), cache())


def test_a_put_through_it_shows_at_once(hot, key, cache):
    store = hot()
    for seed in range(5):
        store.put(key(1), cache(seed))
        for _ in range(2):
            assert holds(store, key(1), cache(seed))
            settled(store)
    store.delete(key(1))
    assert store.open(key(1)) is None
    assert settled(store)[:6] == (5, 5, 0, 0, 0, 0)
