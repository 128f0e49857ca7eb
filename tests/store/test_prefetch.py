"""Entries that are fetched ahead: in little memory, kept as they come; and entries that a tier has no room for."""

from __future__ import annotations

import pytest
import servers

from blend.errors import StoreError
from blend.store import Blob, ChunkStore, get_codec, open_store
from blend.store.backend import cache_name
from blend.store.disk import DiskBackend
from blend.store.seal import make_seal
from blend.store.tiered import TieredBackend, Tiers


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path / 'far'}"


def copies(store):
    return len(list(store.backend.tiers.local.names("objects/")))


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
    tiers = Tiers(WatchedDisk(tmp_path / "far", on_read), None, DiskBackend(tmp_path / "near"))
    seal = make_seal(None)
    return ChunkStore(TieredBackend(tiers, seal, prefetch_bytes=prefetch_bytes), get_codec("native"), seal)


@pytest.mark.parametrize("most", [0, 3])
def test_a_long_list_takes_the_memory_of_a_few(key, filled, tmp_path, most):
    begun, in_flight = set(), []

    def read(name):
        begun.add(name)
        in_flight.append(len(begun) - copies(store))  # in this order: one that ends in between must not count

    store = watched(tmp_path, most * filled, read)
    store.prefetch(map(key, range(100)))
    store.prefetch(map(key, range(90, 110)))
    assert store.backend.wait(60)
    assert copies(store) == len(begun) == 100
    assert 0 < max(in_flight) <= max(most, 1)


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
        nearer = store.backend.tiers.local
    else:
        monkeypatch.setattr("blend.store.redis.LARGEST", 100_000)
        store = open_store(far, hot=f"redis://127.0.0.1:{servers.redis_port()}/7")
        nearer = store.backend.tiers.hot
    for number in range(5):
        with store.open(key(number)) as reader:
            reader.layer(0)
        assert store.backend.wait(20)
    assert len(list(nearer.names("objects/"))) == 4
    (line,) = (record.getMessage() for record in caplog.records)
    assert "use smaller chunks; the store goes on without a copy there" in line
