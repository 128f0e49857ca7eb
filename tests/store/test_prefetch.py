"""Entries that are fetched ahead: in little memory, kept as they come; and entries that are too large, or claim to be.

Anybody can write a header that holds and claims a huge entry to a store without a key.
"""

import weakref

import pytest
import servers

from blend.errors import EntryDamagedError, StoreError
from blend.store import Blob, ChunkStore, get_codec, open_store
from blend.store.backend import cache_name
from blend.store.disk import DiskBackend
from blend.store.fetch import Download
from blend.store.format import pack_header
from blend.store.seal import make_seal
from blend.store.tiered import FETCHERS, TieredBackend


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path / 'far'}"


def copies(store):
    return len(list(store.backend.tiers["local"].names("objects/")))


@pytest.fixture
def filled(far, key, cache):
    """Bytes of each of a hundred entries."""
    store = open_store(far)
    for number in range(100):
        store.put(key(number), cache(number, tokens=100))
    return store.stats().nbytes // 100


class WatchedBlob(Blob):
    """Calls `on_read(name)` before each read of its layers."""

    def __init__(self, name, below, on_read):
        self._name, self._below, self._on_read = name, below, on_read
        self.nbytes, self.head = below.nbytes, below.head

    def read(self, *ranges):
        if ranges[0].into.nbytes > 8192:  # layers, and no header
            self._on_read(self._name)
        return self._below.read(*ranges)

    def close(self):
        self._below.close()


class WatchedDisk(DiskBackend):
    def __init__(self, root, on_read):
        super().__init__(root)
        self._on_read = on_read

    def open(self, name, head):
        blob = super().open(name, head)
        return None if blob is None or not name.startswith("objects/") else WatchedBlob(name, blob, self._on_read)


def watched(tmp_path, prefetch_bytes, on_read):
    """A store with a disk tier whose far place calls `on_read` with the name of each entry that it reads from."""
    far, local, seal = WatchedDisk(tmp_path / "far", on_read), DiskBackend(tmp_path / "near"), make_seal(None)
    backend = TieredBackend(far, local=local, seal=seal, prefetch_bytes=prefetch_bytes)
    return ChunkStore(backend, get_codec("native"), seal)


@pytest.mark.parametrize("most", [0, 3])
def test_a_long_list_takes_the_memory_of_a_few(key, filled, tmp_path, monkeypatch, most):
    begun, in_flight, alive, held, start = set(), [], weakref.WeakSet(), [], Download.start

    def started(download):
        alive.add(download)
        start(download)

    monkeypatch.setattr(Download, "start", started)

    def read(name):
        held.append(len(alive))
        begun.add(name)
        in_flight.append(len(begun) - copies(store))  # in this order: one that ends in between must not count

    store = watched(tmp_path, most * filled, read)
    store.prefetch(map(key, range(100)))
    store.prefetch(map(key, range(90, 110)))
    assert store.backend.wait(60)
    assert copies(store) == len(begun) == 100
    assert 0 < max(in_flight) <= max(most, 1)
    assert 0 < max(held) <= max(most, 1) + FETCHERS  # each thread holds what has just arrived until it takes the next


def test_what_fails_on_its_way_holds_up_nothing(key, filled, tmp_path):
    bad = {cache_name(key(number)) for number in range(0, 100, 2)}  # every time: what fails once is asked for once more

    def read(name):
        if name in bad:
            raise StoreError("it failed")

    store = watched(tmp_path, filled, read)
    store.prefetch(map(key, range(100)))
    assert store.backend.wait(60)
    assert copies(store) == 50


@pytest.mark.parametrize("tier", ["disk", "redis"])
def test_an_entry_that_a_tier_has_no_room_for_is_told_and_keeps_no_other_out(
    far, key, cache, tmp_path, caplog, monkeypatch, tier
):
    open_store(far).put(key(0), cache(0, tokens=4000))
    for number in range(1, 5):
        open_store(far).put(key(number), cache(number))
    if tier == "disk":
        store = open_store(far, cache=tmp_path / "near", budget_bytes=100_000)
        nearer = store.backend.tiers["local"]
    else:
        monkeypatch.setattr("blend.store.redis.LARGEST", 100_000)
        store = open_store(far, hot=f"redis://127.0.0.1:{servers.redis_port()}/7")
        nearer = store.backend.tiers["hot"]
    for number in range(5):
        with store.open(key(number)) as reader:
            reader.layer(0)
        assert store.backend.wait(20)
    assert len(list(nearer.names("objects/"))) == 4
    (line,) = (record.getMessage() for record in caplog.records)
    assert "use smaller chunks; the store goes on without a copy there" in line


def claim(root, key, nbytes):
    """A sparse file of one layer that says it has about so many bytes, and is as long."""
    path, tokens = root / cache_name(key), max(256, nbytes >> 21)
    path.parent.mkdir(parents=True, exist_ok=True)
    width = nbytes // (2 * 2 * 4 * tokens)
    half = 2 * tokens * width * 4
    shape = {"dtype": "F32", "shape": [2, tokens, width]}
    tensors = {"000.k": {**shape, "data_offsets": [0, half]}, "000.v": {**shape, "data_offsets": [half, 2 * half]}}
    words = {"format": "1", "namespace": key.namespace, "digest": key.digest, "start": "3", "tokens": str(tokens)}
    words |= {"layers": "1", "codec": "float32", "dtype": "F32", "checksums": "0" * 32}
    header = pack_header(words, tensors, make_seal(None))
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * half)


@pytest.fixture
def shared(tmp_path, key, cache):
    store = open_store(f"file://{tmp_path / 'far'}", cache=tmp_path / "near")
    store.put(key(2), cache(2))
    return store


def test_more_than_there_is_memory_for_is_damage(tmp_path, key, shared):
    try:
        claim(tmp_path / "far", key(1), 4 * 10**12)
    except OSError:
        pytest.skip("no file of this file system is so long")
    with pytest.raises(EntryDamagedError):
        _ = shared.open(key(1)).layer(0)
    assert key(2) in shared.held([key(1), key(2)])
    shared.prefetch([key(1), key(2)])
    assert shared.backend.wait(30)
    assert list(shared.over(shared.backend.tiers["local"]).keys()) == [key(2)]


def test_what_is_larger_than_it_may_be_is_not_fetched_ahead(tmp_path, key, shared, monkeypatch):
    claim(tmp_path / "far", key(1), 64 << 20)
    started, start = [], Download.start
    monkeypatch.setattr(Download, "start", lambda self: (started.append(self.header.nbytes), start(self)))
    shared.prefetch([key(1), key(2)], 1 << 20)
    assert shared.backend.wait(30)
    assert len(started) == 1
    assert started[0] < 1 << 20
