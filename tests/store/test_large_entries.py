"""Entries that are too large for a tier, or claim to be: anybody can write a header that holds to a store without a key."""

import os

import pytest
from forging import header_of, sealed
from reading import cache, key
from servers import redis_address

from blend.errors import EntryDamagedError
from blend.store import open_store
from blend.store.backend import cache_name


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path / 'far'}"


@pytest.mark.parametrize("tier", ["local", "hot"])
def test_an_entry_that_a_tier_has_no_room_for_is_told_and_keeps_no_other_out(far, tmp_path, caplog, monkeypatch, tier):
    for number in range(5):
        open_store(far).put(key(number), cache(number, tokens=5 if number else 4000))
    monkeypatch.setattr("blend.store.redis.LARGEST", 100_000)
    near = {"hot": redis_address(7)} if tier == "hot" else {"cache": tmp_path / "near", "budget_bytes": 100_000}
    store = open_store(far, **near)
    for number in range(5):
        with store.open(key(number)) as reader:
            reader.layer(0)
        assert store.backend.wait(20)
    assert len(list(store.backend.tiers[tier].names("objects/"))) == 4
    (line,) = (record.getMessage() for record in caplog.records)
    assert "use smaller chunks; the store goes on without this tier" in line


def test_more_than_there_is_memory_for_is_damage(far, tmp_path):
    store = open_store(far, cache=tmp_path / "near")
    for number in (1, 2):
        store.put(key(number), cache(number, layers=1))
    path, tokens, half = tmp_path / "far" / cache_name(key(1)), 1 << 20, 1 << 40
    header = header_of(path.read_bytes())
    header["__metadata__"]["tokens"] = str(tokens)
    header["000.k"] = {"dtype": "F32", "shape": [2, tokens, half // tokens // 8], "data_offsets": [0, half]}
    header["000.v"] = {**header["000.k"], "data_offsets": [half, 2 * half]}
    path.write_bytes(sealed(header, b""))
    try:
        os.truncate(path, path.stat().st_size + 2 * half)
    except OSError:
        pytest.skip("no file of this file system is so long")
    with pytest.raises(EntryDamagedError, match="memory"):
        store.open(key(1)).layer(0)
    assert store.held([key(1), key(2)]) == {key(1), key(2)}
    assert store.backend.wait(30)
    assert not list(store.over(store.backend.tiers["local"]).keys())
