"""Entries whose headers hold and say that they are huge, as anybody can write them to a store without a key."""

from __future__ import annotations

import pytest

from blend.errors import EntryDamagedError
from blend.store import open_store
from blend.store.admin import places
from blend.store.backend import cache_name
from blend.store.fetch import Download
from blend.store.format import pack_header
from blend.store.seal import make_seal


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
    assert list(shared.over(dict(places(shared.backend))["local"]).keys()) == [key(2)]


def test_what_is_larger_than_it_may_be_is_not_fetched_ahead(tmp_path, key, shared, monkeypatch):
    claim(tmp_path / "far", key(1), 64 << 20)
    started, start = [], Download.start
    monkeypatch.setattr(Download, "start", lambda self: (started.append(self.entry.nbytes), start(self)))
    shared.prefetch([key(1), key(2)], 1 << 20)
    assert shared.backend.wait(30)
    assert len(started) == 1
    assert started[0] < 1 << 20
