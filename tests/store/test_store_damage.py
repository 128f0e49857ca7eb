"""No byte of an entry can change without being noticed, and nothing but `EntryDamagedError` comes of it."""

from __future__ import annotations

import os
import struct

import pytest
import torch
from forging import forge
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reading import path_of, read
from safetensors.torch import save

from blend.errors import EntryDamagedError
from blend.store import open_store
from blend.types import ChunkCache, ChunkKey

KEY = ChunkKey("a" * 32, "b" * 64)
GENERATOR = torch.Generator().manual_seed(3)
CACHE = ChunkCache(
    tuple(torch.randn(1, 3, 4, generator=GENERATOR) for _ in range(3)),
    tuple(torch.randn(1, 3, 2, generator=GENERATOR) for _ in range(3)),
    start=2,
)
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("store"))
    store.put(KEY, CACHE)
    path = path_of(store, KEY)
    return store, path, path.read_bytes()


def damage(call) -> bool:
    """Whether `call` raises the one error that is allowed; any other passes through and fails the test."""
    try:
        call()
    except EntryDamagedError as error:
        return "\n" not in str(error)
    return False


def use(store, key=KEY) -> bool:
    """Open and read everything, both ways; every tensor that comes out must be right. True if all came out."""
    if damage(lambda: store.open(key).close()):
        return False
    with store.open(key) as reader:
        assert (reader.tokens, reader.layers, reader.start) == (3, 3, 2)
        return sum(use_layer(reader, index) for index in range(3)) == 3


def use_layer(reader, index) -> bool:
    out = torch.full((1, 3, 4), float("nan")), torch.full((1, 3, 2), float("nan"))
    if damage(lambda: reader.layer(index)):
        assert damage(lambda: reader.read_into(index, *out))
        assert all(t.isnan().all() for t in out)
        return False
    reader.read_into(index, *out)
    want = CACHE.keys[index], CACHE.values[index]
    assert all(map(torch.equal, reader.layer(index), want))
    assert all(map(torch.equal, out, want))
    return True


def test_the_untouched_entry_reads_and_the_forger_can_forge(entry):
    store, path, raw = entry
    for content in (raw, forge(raw, None)):
        path.write_bytes(content)
        assert use(store)


def test_every_byte_matters_and_every_truncation_is_noticed(entry):
    store, path, raw = entry
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1 << (at % 8)
        for content in (changed, raw[:at]):
            path.write_bytes(content)
            assert not use(store), at


@FUZZ
@given(st.data())
def test_regions_that_are_replaced_by_others(entry, data):
    store, path, raw = entry
    at, length = data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, 200))
    changed = raw[:at] + data.draw(st.binary(max_size=200)) + raw[at + length :]
    path.write_bytes(changed)
    assert use(store) == (changed == raw)


@FUZZ
@given(st.binary(max_size=400))
@example(b"")
@example(struct.pack("<Q", 0))
@example(struct.pack("<Q", 2**64 - 1) + b"x" * 100)
@example(struct.pack("<Q", 100_000) + b'{"__metadata__":{"blake3":"' + b"[" * 100_000)
@example(save({"000.k": torch.zeros(1, 3, 4)}))
def test_random_files(entry, content):
    store, path, _ = entry
    path.write_bytes(content)
    assert not use(store)


def meta(**fields):
    return lambda header, _data: header["__metadata__"].update(fields)


def drop_start(header, data):
    del header["__metadata__"]["start"]


def drop_layer(header, data):
    for part in "kv":
        del header[f"002.{part}"]


def rename_layer(header, data):
    header["007.k"] = header.pop("002.k")


def swap_dtype(header, data):
    header["001.k"]["dtype"] = "BF16"


def reshape(header, data):
    header["001.k"]["shape"] = [3, 1, 4]


def shift(header, data):
    header["001.k"]["data_offsets"] = [0, 48]


def far_away(header, data):
    header["001.k"]["data_offsets"] = [2**60, 2**60 + 48]


def huge(header, data):
    header["001.k"].update(shape=[2**40, 3, 4], data_offsets=[0, 2**60])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (meta(format="3"), "format version '3'"),
        (meta(namespace="c" * 32), "under another key"),
        (meta(digest="c" * 64), "under another key"),
        (meta(codec="zip"), "codec 'zip'"),
        (meta(codec="bfloat16"), "does not write torch.float32"),
        (meta(dtype="F31"), "F31"),
        (meta(layers="2"), "every layer"),
        (meta(layers="x"), "x"),
        (meta(tokens="4"), "for 4 tokens"),
        (meta(checksums=",".join(["0" * 32] * 3)), "not what was written"),
        (drop_start, "start"),
        (drop_layer, "every layer"),
        (rename_layer, "002.k"),
        (swap_dtype, "impossible shapes"),
        (reshape, "for 3 tokens"),
        (shift, "byte range"),
        (far_away, "byte range"),
        (huge, "impossible shapes"),
        (lambda header, _data: header.update({"001.k": [1]}), "not described"),
        (lambda _header, data: data[:-1], "bytes of data"),
        (lambda _header, data: data + b"x", "bytes of data"),
    ],
)
def test_foreign_entries_say_what_is_wrong(entry, change, message):
    store, path, raw = entry
    path.write_bytes(forge(raw, change))
    with pytest.raises(EntryDamagedError, match=f"must be computed again.*{message}"):
        read(store, KEY)


def test_a_file_that_shrinks_under_an_open_reader(entry):
    store, path, raw = entry
    path.write_bytes(raw)
    with store.open(KEY) as reader:
        os.truncate(path, len(raw) - 30)
        assert torch.equal(reader.layer(0)[0], CACHE.keys[0])
        with pytest.raises(EntryDamagedError, match="layer 2 is not what was written"):
            reader.layer(2)


def test_a_read_error_of_the_disk(entry, monkeypatch):
    store, path, raw = entry
    path.write_bytes(raw)

    def fail(*args):
        raise OSError(5, "Input/output error")

    with store.open(KEY) as reader:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(EntryDamagedError, match="Input/output error"):
            reader.layer(0)


def test_damage_of_one_among_several(entry):
    store, path, raw = entry
    other, missing = ChunkKey(KEY.namespace, "d" * 64), ChunkKey(KEY.namespace, "e" * 64)
    store.put(other, CACHE)
    path.write_bytes(raw[:100])
    error, none, reader = store.open_many([KEY, missing, other])
    assert isinstance(error, EntryDamagedError)
    assert "must be computed again" in str(error)
    assert none is None
    assert torch.equal(reader.layer(0)[0], CACHE.keys[0])
    reader.close()
    store.delete(other)


def test_a_damaged_entry_is_replaced_by_the_next_put(entry):
    store, path, raw = entry
    path.write_bytes(raw[:100])
    assert KEY not in store
    store.put(KEY, CACHE)
    assert use(store)
    assert path.read_bytes() == raw
