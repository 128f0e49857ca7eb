"""No byte of an entry can change without being noticed, forged or not, and nothing but `EntryDamagedError` comes of it."""

import os
import struct

import pytest
import torch
from forging import forge, header_of
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
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(folder, codec):
    store = open_store(folder, codec=codec)
    store.put(KEY, CACHE)
    path = path_of(store, KEY)
    return store, path, path.read_bytes()


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    return written(tmp_path_factory.mktemp("store"), "native")


def use(store) -> bool:
    """Open and read everything, both ways; every tensor that comes out must be right. True if all came out."""
    try:
        reader = store.open(KEY)
    except EntryDamagedError:
        return False
    with reader:
        assert (reader.tokens, reader.layers, reader.start) == (3, 3, 2)
        return sum(use_layer(reader, index) for index in range(3)) == 3


def use_layer(reader, index) -> bool:
    out = torch.full((1, 3, 4), float("nan")), torch.full((1, 3, 2), float("nan"))
    try:
        layer = reader.layer(index)
    except EntryDamagedError:
        with pytest.raises(EntryDamagedError):
            reader.read_into(index, *out)
        assert all(part.isnan().all() for part in out)
        return False
    reader.read_into(index, *out)
    for found in (layer, out):
        assert all(map(torch.equal, found, (CACHE.keys[index], CACHE.values[index])))
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
@given(st.binary(max_size=400))
@example(b"")
@example(struct.pack("<Q", 0))
@example(struct.pack("<Q", 2**64 - 1) + b"x" * 100)
@example(struct.pack("<Q", 100_000) + b'{"__metadata__":{"blake3":"' + b"[" * 100_000)
@example(save({"000.k": torch.zeros(1, 3, 4)}))
def test_random_files(entry, content):
    store, path, _ = entry
    path.write_bytes(content)
    with pytest.raises(EntryDamagedError) as caught:
        store.open(KEY)
    assert "\n" not in str(caught.value)


def meta(**fields):
    return lambda header, _data: header["__metadata__"].update(fields)


def tensor(name, **fields):
    return lambda header, _data: header.setdefault(name, {}).update(fields)


def one_layer_twice(header, data):
    """Layer 1 is described as layer 0's bytes, with layer 0's checksum; no layer has its own bytes."""
    sums = header["__metadata__"]["checksums"].split(",")
    header["__metadata__"]["checksums"] = ",".join([sums[0], sums[0], sums[2]])
    header["001.k"], header["001.v"] = header["000.k"], header["000.v"]


def keys_for_values(header, data):
    header["001.k"], header["001.v"] = header["001.v"], header["001.k"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (meta(format="5"), "format version '5'"),
        (meta(digest="c" * 64), "under another key"),
        (meta(codec="zip"), "codec 'zip', which this kvblend does not know"),
        (meta(codec="bfloat16"), "does not write torch.float32"),
        (meta(dtype="F31"), "F31"),
        (meta(layers="2"), "every layer"),
        (meta(layers="x"), "x"),
        (meta(tokens="4"), "for 4 tokens"),
        (meta(checksums=",".join(["0" * 32] * 3)), "not what was written"),
        (meta(start=""), "start"),
        (tensor("007.k"), "tensors of no layer"),
        (tensor("001.k", dtype="BF16"), "impossible shapes"),
        (tensor("001.k", shape=[3, 1, 4]), "for 3 tokens"),
        (tensor("001.k", data_offsets=[2**60, 2**60 + 48]), "byte range"),
        (tensor("001.k", shape=[2**40, 3, 4], data_offsets=[0, 2**60]), "impossible shapes"),
        (lambda header, _data: header.update({"001.k": [1]}), "not described"),
        (one_layer_twice, "one byte range"),
        (keys_for_values, "one byte range"),
        (meta(dtype="I32"), "int32"),
        (meta(tokens="٣"), "tokens is '٣'"),
        (meta(tokens=3), "not all text"),
        (tensor("001.k", shape=[True, 3, 4]), "shape of 001.k"),
        (tensor("001.k", shape=[-1, 3, -4]), "shape of 001.k"),
        (tensor("001.k", shape=[12]), "shape of 001.k"),
        (tensor("001.k", shape="134"), "shape of 001.k"),
        (tensor("001.k", dtype="I32"), "does not write torch.int32"),
        (tensor("001.k", dtype=["F32"]), "values of type"),
        (tensor("001.k", data_offsets=[72.0, 120.0]), "byte range of 001.k"),
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
        with pytest.raises(EntryDamagedError, match="layer 2: it is truncated"):
            reader.layer(2)


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


# Without a store key anyone can write an entry whose checksums hold: it is refused, or it is exactly what it says.


@pytest.fixture(scope="module", params=["native", "int8", "int4"])
def any_entry(tmp_path_factory, request):
    return written(tmp_path_factory.mktemp("store"), request.param)


def used(store, content: bytes) -> bool:
    """Whether something could be read of what the file says; all of it is then what its header says."""
    header, layers = header_of(content), []
    try:
        with store.open(KEY) as reader:
            for index in range(reader.layers):
                layers.append(reader.layer(index))
                reader.read_into(index, *map(torch.empty_like, layers[-1]))
    except EntryDamagedError:
        return False
    meta = header["__metadata__"]
    assert (str(reader.tokens), str(reader.layers), str(reader.start)) == (
        meta["tokens"],
        meta["layers"],
        meta["start"],
    )
    for index, pair in enumerate(layers):
        for tensor, part in zip(pair, "kv", strict=True):
            if meta["codec"] == "native":
                assert list(tensor.shape) == header[f"{index:03d}.{part}"]["shape"]
            assert tensor.shape[1] == reader.tokens
            assert tensor.is_floating_point()
    return True


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 150),
    st.sampled_from([2**31, 2**60, 2**63, 2**64, -(2**70)]),
    st.floats(),
    st.sampled_from(
        ["", "0", "3", "-1", "03", " 3", "3.0", "٣", "1e3", "F64", "BF16", "I8", "native", "\ud800", "a\nb"]
    ),
    st.lists(st.one_of(st.integers(-1, 150), st.booleans(), st.floats(0, 50), st.none()), max_size=4),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), st.integers(0, 50), max_size=3),
)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 10**6), VALUES), max_size=3))
@example([])
def test_any_value_anywhere(any_entry, changes):
    store, path, raw = any_entry

    def change(header, data):
        lists = [value for fields in header.values() for value in fields.values() if isinstance(value, list)]
        places = [(holder, name) for holder in (header, *header.values()) for name in holder]
        places += [(holder, index) for holder in lists for index in range(len(holder))]
        places = [place for place in places if place[1] not in ("blake3", "__metadata__")]
        for number, value in changes:
            holder, name = places[number % len(places)]
            holder[name] = value

    content = forge(raw, change)
    path.write_bytes(content)
    assert used(store, content) or changes
