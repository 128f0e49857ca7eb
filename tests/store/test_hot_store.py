"""The tier of memory: what is read often is there once, is what the store holds, and stays within its budget."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import pytest
from hot_stores import MB, big, holds, read, settled
from store_processes import finish

from blend.errors import ConfigError, EntryDamagedError
from blend.store import HotMemory, open_store
from blend.store.seal import Checksum, KeyedDigest


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def entries_in_memory(store, keys):
    """Which of these are in memory, found by reading them: the others come in by that."""
    found = []
    for key in keys:
        before = store.memory.hits
        read(store, key)
        found.append(store.memory.hits > before)
    return found


def test_what_was_read_once_is_in_memory_for_all_who_read_it_again(hot, key, cache):
    store = hot()
    store.put(key(1), cache())
    assert store.memory == (0, 0, 0, 0, 0, 0, MB, 0)
    assert holds(store, key(1), cache())
    stats, nbytes = settled(store), store.stats().nbytes
    assert (stats.hits, stats.misses, stats.entries, stats.loaded_bytes) == (0, 1, 1, nbytes)
    assert nbytes <= stats.nbytes < nbytes + 4096
    before = open_descriptors()
    one, two = store.open(key(1)), store.open(key(1))
    assert open_descriptors() == before
    assert one.layer(2)[0].data_ptr() == two.layer(2)[0].data_ptr()
    assert holds(store, key(1), cache())
    one.close()
    two.close()
    after = settled(store)
    assert (after.hits, after.misses, after.entries, after.loaded_bytes) == (3, 1, 1, nbytes)


def test_to_look_whether_an_entry_is_there_brings_nothing_in(hot, key, cache):
    store = hot()
    store.put(key(1), cache())
    assert key(1) in store
    assert key(2) not in store
    store.open(key(1)).close()
    assert settled(store)[:2] == (0, 0)
    assert store.memory.entries == 0


@pytest.mark.parametrize("secret", [None, b"a secret of the store"])
def test_what_is_in_memory_is_not_hashed_again(hot, key, cache, secret, monkeypatch):
    store = hot(key=secret)
    store.put(key(1), cache())
    read(store, key(1))
    settled(store)
    assert holds(store, key(1), cache())

    def fail(*_args):
        raise AssertionError("hashed")

    monkeypatch.setattr(KeyedDigest if secret else Checksum, "digest", fail)
    assert holds(store, key(1), cache())


def test_the_budget_holds_whatever_is_read(hot, key):
    store, budget, dice = hot(MB), MB, random.Random(0)
    for number in range(12):
        store.put(key(number), big(number, tokens=100 + 90 * (number % 5)))
    for _ in range(60):
        number = dice.randrange(12)
        assert float(read(store, key(number))[0][0].unique()) == number
        assert settled(store).nbytes <= budget
    assert store.memory.nbytes > budget / 2
    assert store.memory.evictions > 5
    store.put(key(20), big(20, tokens=3000))
    assert float(read(store, key(20))[0][0].unique()) == 20
    assert 0 < settled(store).nbytes <= budget


def test_what_is_read_stays_and_counts_though_it_was_deleted(hot, key):
    store = hot(MB)
    for number in range(8):
        store.put(key(number), big(number))
    store.prefetch([key(0), key(1)])
    size = settled(store).nbytes // 2
    readers = [store.open(key(0)), store.open(key(1))]
    tensors = [reader.layer(0)[0] for reader in readers]
    store.delete(key(0))
    assert settled(store)[4:6] == (1, 2 * size)
    store.prefetch(map(key, range(2, 8)))
    assert settled(store)[4:6] == (2, 3 * size)
    assert [float(tensor.unique()) for tensor in tensors] == [0.0, 1.0]
    for reader in readers:
        reader.close()
    store.delete(key(1))
    assert settled(store)[4:6] == (1, 3 * size)  # the tensors still lie there
    assert [float(tensor.unique()) for tensor in tensors] == [0.0, 1.0]
    del tensors
    assert settled(store)[4:6] == (1, size)
    store.prefetch(map(key, range(2, 8)))
    assert settled(store)[4:6] == (3, 3 * size)


def test_what_is_read_now_makes_no_room_for_what_is_read_ahead(hot, key):
    store = hot(600_000)
    for number in range(6):
        store.put(key(number), big(number))
    store.prefetch([key(0), key(1)])
    assert settled(store).entries == 2
    with store.open(key(0)), store.open(key(1)):
        store.prefetch(map(key, range(2, 6)))
        assert settled(store).evictions == 0
    store.prefetch(map(key, range(2, 4)))
    assert settled(store).evictions == 2


def test_a_prompt_that_read_ahead_uses_an_entry_once(hot, key):
    store = hot(600_000)
    for number in range(3):
        store.put(key(number), big(number))
    store.prefetch([key(0)])
    settled(store)
    read(store, key(0))
    read(store, key(1))
    assert settled(store).entries == 2
    read(store, key(2))  # takes the place of the older of two that were used as often
    settled(store)
    assert entries_in_memory(store, [key(1), key(2)]) == [True, True]


def test_what_is_used_often_stays_when_much_else_is_read(hot, key):
    store = hot(MB)
    for number in range(12):
        store.put(key(number), big(number))
    for number in [0] * 9 + list(range(1, 12)):
        read(store, key(number))
        settled(store)
    assert entries_in_memory(store, [key(0), key(1)]) == [True, False]


def test_the_thread_that_reads_ahead_ends_when_there_is_nothing_left(hot, key, cache):
    store, before = hot(), set(threading.enumerate())
    store.put(key(1), cache())
    for _ in range(20):
        store.prefetch([key(1), key(2)])
    settled(store)
    for thread in threading.enumerate():
        if thread.name == "kvblend-read-ahead":
            thread.join(10)
    assert set(threading.enumerate()) <= before


def test_stores_that_share_memory_keep_their_entries_apart(tmp_path, key, cache):
    memory = HotMemory(MB)
    one = open_store(tmp_path / "one", memory_bytes=memory)
    two = open_store(tmp_path / "two", memory_bytes=memory)
    again = open_store(tmp_path / "one", memory_bytes=memory, key=b"another one's key")
    one.put(key(1), cache(1))
    two.put(key(1), cache(2))
    for _ in range(2):
        assert holds(one, key(1), cache(1))
        assert holds(two, key(1), cache(2))
        with pytest.raises(EntryDamagedError):
            again.open(key(1))
        settled(one)
        settled(two)
    assert memory.stats.hits == 2
    assert memory.stats.entries == 2


def work(store, key, seed):
    """A thread's share of everything that can be done to eleven entries; every element says which one it belongs to."""
    for step in range(40):
        number = (5 * seed + step * step) % 11
        if (seed + step) % 5 == 0:
            store.put(key(number), big(100 * number + seed))
        elif (seed + step) % 13 == 0:
            store.delete(key(number))
        elif (seed + step) % 7 == 0:
            store.prefetch([key(number), key(number + 1)])
        elif (layers := read(store, key(number))) is not None:
            (mark,) = {float(part.unique()) for pair in layers for part in pair}
            assert int(mark) // 100 == number
        assert store.memory.nbytes <= MB


def in_threads(count, call):
    """`call(0)`, `call(1)` and so on, each in a thread; what they raised."""
    errors = []

    def run(seed):
        try:
            call(seed)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_readers_and_writers_in_eight_threads(hot, key):
    store, descriptors = hot(MB, budget_bytes=3 * MB), []
    for _ in range(2):  # what is opened once and for all is open after the first
        assert in_threads(8, lambda seed: work(store, key, seed)) == []
        settled(store)
        gc.collect()
        descriptors.append(open_descriptors())
    assert descriptors[0] == descriptors[1]
    assert store.memory.hits > 20
    for number in range(11):
        store.delete(key(number))
    assert settled(store)[4:6] == (0, 0)


def test_the_process_takes_no_more_memory_than_the_budget(root, spawn, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # so that tensors that are gone do not count
    work = """
    def resident():
        lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
        return int(lines["VmRSS"].split()[0]) * 1024

    def visit(number):
        with store.open(key(number)) as reader:
            reader.read_into(0, *out[number % 3])
        store.backend.wait(30)

    store = open_store(root, memory_bytes=40 << 20)
    sizes = [15_000 + 7_000 * size for size in range(3)]
    out = [[torch.zeros(2, size, 8) for _ in range(2)] for size in sizes]
    for number in range(12):
        store.put(key(number), cache(number, tokens=sizes[number % 3]))
    for number in range(12):
        visit(number)
    full, used = resident(), store.memory.nbytes
    for step in range(40):
        visit((step * step + 3 * step) % 7)
        visit(step % 12)
    grown = resident()
    print(used, store.memory.nbytes, grown - full, store.memory.evictions)
    for number in range(12):
        store.delete(key(number))
    print(store.memory.nbytes, grown - resident())
    """
    before, used, growth, evictions, left, shrunk = map(int, finish(spawn(root, work)))
    assert 25 * MB < before <= 40 * MB
    assert 25 * MB < used <= 40 * MB
    assert evictions > 10
    assert growth <= used - before + 4 * MB
    assert left == 0
    assert shrunk >= used - 4 * MB


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_that_is_none(hot, budget):
    with pytest.raises(ConfigError, match="positive"):
        hot(budget)


def test_a_store_in_memory_has_no_use_for_it(key, cache):
    store = open_store("memory:", memory_bytes=MB)
    store.put(key(1), cache())
    store.prefetch([key(1)])
    assert store.memory is None
    assert holds(store, key(1), cache())
