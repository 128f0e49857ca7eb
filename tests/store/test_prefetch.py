"""Entries that are fetched ahead: in little memory, kept as they come; and entries that a tier has no room for."""

from __future__ import annotations

import os

import pytest
import servers

from blend.errors import StoreError
from blend.store import open_store
from blend.store.disk import DiskBlob


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path / 'far'}"


def copies(store):
    return sum(map(len, store.backend.tiers.local.names("objects/")))


@pytest.fixture
def filled(far, key, cache):
    """Bytes of each of a hundred entries."""
    store = open_store(far)
    for number in range(100):
        store.put(key(number), cache(number, tokens=100))
    return store.stats().nbytes // 100


@pytest.mark.parametrize("most", [0, 3])
def test_a_long_list_takes_the_memory_of_a_few(far, key, filled, tmp_path, monkeypatch, most):
    store = open_store(far, cache=tmp_path / "near")
    ahead, seen, read = store.backend._ahead, [], DiskBlob.read
    ahead._most_bytes = most * filled

    def looked(blob, *ranges):
        if blob._files.root == tmp_path / "far":
            seen.append((ahead._in_flight_bytes, copies(store)))
        return read(blob, *ranges)

    monkeypatch.setattr(DiskBlob, "read", looked)
    store.prefetch(map(key, range(100)))
    store.prefetch(map(key, range(90, 110)))
    assert store.backend.wait(60)
    assert copies(store) == 100
    assert 0 < max(nbytes for nbytes, _ in seen) <= max(most, 1) * filled
    assert seen[-1][1] > 90  # of those before it
    assert (ahead._in_flight_bytes, len(ahead._opened), len(ahead._names)) == (0, 0, 0)


def test_what_fails_on_its_way_holds_up_nothing(far, key, filled, tmp_path, monkeypatch):
    store, read = open_store(far, cache=tmp_path / "near"), DiskBlob.read
    store.backend._ahead._most_bytes = filled
    files = sorted((tmp_path / "far").rglob("*.safetensors"))
    bad = {file.stat().st_ino for file in files[::2]}  # every time: what fails once is asked for once more

    def fails(blob, *ranges):
        of_layers = ranges[0].into.nbytes > filled // 2
        if of_layers and os.fstat(blob._descriptor).st_ino in bad:
            raise StoreError("it failed")
        return read(blob, *ranges)

    monkeypatch.setattr(DiskBlob, "read", fails)
    store.prefetch(map(key, range(100)))
    assert store.backend.wait(60)
    assert copies(store) == 50
    assert store.backend._ahead._in_flight_bytes == 0


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
    assert sum(map(len, nearer.names("objects/"))) == 4
    (line,) = (record.getMessage() for record in caplog.records)
    assert "use smaller chunks; the store goes on without a copy there" in line
