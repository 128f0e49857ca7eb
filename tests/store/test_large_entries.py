"""Entries that are too large for a tier, or claim to be: anybody can write a header that holds to a store without a key."""

import pytest
import servers

from blend.errors import EntryDamagedError
from blend.store import open_store
from blend.store.backend import cache_name
from blend.store.format import pack_header
from blend.store.seal import Seal


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path / 'far'}"


@pytest.mark.parametrize("tier", ["local", "hot"])
def test_an_entry_that_a_tier_has_no_room_for_is_told_and_keeps_no_other_out(
    far, key, cache, tmp_path, caplog, monkeypatch, tier
):
    for number in range(5):
        open_store(far).put(key(number), cache(number, tokens=5 if number else 4000))
    monkeypatch.setattr("blend.store.redis.LARGEST", 100_000)
    near = {"local": {"cache": tmp_path / "near", "budget_bytes": 100_000}}
    near["hot"] = {"hot": f"redis://127.0.0.1:{servers.redis_port()}/7"}
    store = open_store(far, **near[tier])
    for number in range(5):
        with store.open(key(number)) as reader:
            reader.layer(0)
        assert store.backend.wait(20)
    assert len(list(store.backend.tiers[tier].names("objects/"))) == 4
    (line,) = (record.getMessage() for record in caplog.records)
    assert "use smaller chunks; the store goes on without this tier" in line


def test_more_than_there_is_memory_for_is_damage(far, tmp_path, key, cache):
    store = open_store(far, cache=tmp_path / "near")
    store.put(key(2), cache(2))
    path, half = tmp_path / "far" / cache_name(key(1)), 2 * 10**12
    shape = {"dtype": "F32", "shape": [2, 1 << 20, half >> 23]}
    half = 2 * (1 << 20) * (half >> 23) * 4
    tensors = {"000.k": {**shape, "data_offsets": [0, half]}, "000.v": {**shape, "data_offsets": [half, 2 * half]}}
    words = {"format": "1", "namespace": key(1).namespace, "digest": key(1).digest, "start": "3"}
    words |= {"tokens": str(1 << 20), "layers": "1", "codec": "float32", "dtype": "F32", "checksums": "0" * 32}
    header = pack_header(words, tensors, Seal(None))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        try:
            file.truncate(len(header) + 2 * half)
        except OSError:
            pytest.skip("no file of this file system is so long")
    with pytest.raises(EntryDamagedError, match="memory"):
        store.open(key(1)).layer(0)
    assert store.held([key(1), key(2)]) == {key(1), key(2)}
    assert store.backend.wait(30)
    assert not list(store.over(store.backend.tiers["local"]).keys())
