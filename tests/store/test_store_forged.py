"""Without a store key anyone can write an entry whose checksums hold: it is refused, or it is exactly what it says."""

from __future__ import annotations

import math
import os
import struct
from contextlib import suppress

import pytest
import torch
from forging import forge, header_of, resealed, sealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blend.errors import EntryDamagedError
from blend.store import open_store
from blend.types import ChunkCache, ChunkKey

KEY = ChunkKey("a" * 32, "b" * 64)
CACHE = ChunkCache(
    tuple(torch.arange(12.0).reshape(1, 3, 4) + index for index in range(3)),
    tuple(torch.arange(6.0).reshape(1, 3, 2) - index for index in range(3)),
    start=2,
)


def written(folder, codec):
    store = open_store(folder, codec=codec)
    store.put(KEY, CACHE)
    (path,) = (store.backend.root / "objects").rglob("*.safetensors")
    return store, path, path.read_bytes()


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    return written(tmp_path_factory.mktemp("store"), "native")


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
    for index, pair in enumerate(layers):
        for tensor, part in zip(pair, "kv", strict=True):
            heads, tokens, width = tensor.shape
            if header["__metadata__"]["codec"] == "native":
                assert list(tensor.shape) == header[f"{index:03d}.{part}"]["shape"]
            else:
                assert [heads, width] == header[f"{index:03d}.{part}.s"]["shape"][::2]
                packed = math.prod(header[f"{index:03d}.{part}"]["shape"])
                assert packed in (heads * tokens * width, heads * -(-tokens * width // 2), heads * tokens)
            assert tensor.shape[1] == reader.tokens
            assert tensor.is_floating_point()
    assert (str(reader.tokens), str(reader.layers), str(reader.start)) == tuple(
        header["__metadata__"][name] for name in ("tokens", "layers", "start")
    )
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


def places(value, here=()):
    """Where anything stands in a header, the header itself apart."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*here, name)
        yield from places(one, (*here, name))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10**6), VALUES), min_size=1, max_size=3))
def test_any_value_anywhere(any_entry, changes):
    store, path, raw = any_entry

    def change(header, data):
        everywhere = [place for place in places(header) if place[1:] != ("blake3",) and place != ("__metadata__",)]
        for number, value in changes:
            *inside, name = everywhere[number % len(everywhere)]
            with suppress(KeyError, IndexError, TypeError):  # what an earlier change has taken away
                holder = header
                for step in inside:
                    holder = holder[step]
                holder[name] = value

    content = forge(raw, change)
    path.write_bytes(content)
    used(store, content)


@given(st.lists(st.sampled_from(["000.k", "000.v", "001.k", "001.v", "002.k", "002.v", "checksums"]), max_size=8))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tensors_and_checksums_in_each_others_places(entry, order):
    """Every tensor that is described is one of the file, and every checksum is right for some layer."""
    store, path, raw = entry

    def change(header, data):
        sums = header["__metadata__"]["checksums"].split(",")
        for one, other in zip(order[::2], order[1::2], strict=False):
            if "checksums" in (one, other):
                sums = sums[1:] + sums[:1]
            else:
                header[one], header[other] = header[other], header[one]
        header["__metadata__"]["checksums"] = ",".join(sums)

    content = forge(raw, change)
    path.write_bytes(content)
    if used(store, content):
        with store.open(KEY) as reader:
            for index in range(3):
                assert torch.equal(reader.layer(index)[0], CACHE.keys[index])
                assert torch.equal(reader.layer(index)[1], CACHE.values[index])


def meta(**fields):
    return lambda header, _data: header["__metadata__"].update(fields)


def tensor(name, **fields):
    return lambda header, _data: header[name].update(fields)


def one_layer_twice(header, data):
    """Layer 1 is described as layer 0's bytes, with layer 0's checksum, and those of its own belong to nobody."""
    sums = header["__metadata__"]["checksums"].split(",")
    header["__metadata__"]["checksums"] = ",".join([sums[0], sums[0], sums[2]])
    header["001.k"], header["001.v"] = header["000.k"], header["000.v"]


def keys_for_values(header, data):
    header["001.k"], header["001.v"] = header["001.v"], header["001.k"]


def layers_exchanged(header, data):
    sums = header["__metadata__"]["checksums"].split(",")
    header["__metadata__"]["checksums"] = ",".join([sums[1], sums[0], sums[2]])
    for part in "kv":
        header[f"000.{part}"], header[f"001.{part}"] = header[f"001.{part}"], header[f"000.{part}"]


@pytest.mark.parametrize(
    "change",
    [
        one_layer_twice,
        layers_exchanged,
        keys_for_values,
        meta(dtype="I32"),
        meta(start="-1"),
        meta(start=" 2"),
        meta(start=2),
        meta(tokens="٣"),
        meta(tokens=3),
        meta(layers=3),
        meta(checksums=["0" * 32] * 3),
        meta(codec=["native"]),
        tensor("001.k", shape=[1.0, 3, 4]),
        tensor("001.k", shape=[True, 3, 4]),
        tensor("001.k", shape=[-1, 3, -4]),
        tensor("001.k", shape=[-1, 3, 4]),
        tensor("001.k", shape=[12]),
        tensor("001.k", shape={"0": 1, "1": 3, "2": 4}),
        tensor("001.k", shape="134"),
        tensor("001.k", dtype="I32"),
        tensor("001.k", dtype=["F32"]),
        tensor("001.k", data_offsets=[72.0, 120.0]),
        tensor("001.k", data_offsets=[72]),
        tensor("001.k", data_offsets=None),
    ],
)
def test_what_no_writer_writes_is_refused(any_entry, change):
    store, path, raw = any_entry
    for changed in (None, change):
        content = forge(raw, changed)
        path.write_bytes(content)
        assert used(store, content) == (changed is None)


@pytest.mark.parametrize("length", [2**20, 2**33, 2**60, 2**64 - 1])
def test_a_header_of_any_length_is_not_read(entry, length, monkeypatch):
    """The file is as long as it says, and takes no room on the disk."""
    store, path, raw = entry
    path.write_bytes(struct.pack("<Q", length) + raw[8:])
    with suppress(OSError, OverflowError):  # no file system has room for the last ones
        os.truncate(path, length + 100)
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    with pytest.raises(EntryDamagedError, match="not a chunk cache"):
        store.open(KEY)
    assert sum(read) <= 2**20
    path.unlink()


def test_a_layer_that_would_fill_the_memory(entry):
    """Zeros that take no room on the disk, and a header that describes every one of them."""
    store, path, raw = entry
    nbytes = 16 * 3 * 2**30
    ends = [0, nbytes, 2 * nbytes]

    def change(header, data):
        header["__metadata__"].update(layers="1", checksums="0" * 32)
        for part, begin, end in zip("kv", ends, ends[1:], strict=False):
            header[f"000.{part}"] = {"dtype": "F32", "shape": [4, 3, 2**30], "data_offsets": [begin, end]}
            del header[f"001.{part}"], header[f"002.{part}"]
        return b""

    path.write_bytes(forge(raw, change))
    os.truncate(path, path.stat().st_size + ends[-1])
    with pytest.raises(EntryDamagedError, match="too large for 3 tokens"):
        store.open(KEY)
    path.unlink()


def test_a_header_that_is_nested_too_deeply(entry):
    store, path, _ = entry
    for nested in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000):
        content = sealed({"__metadata__": {"blake3": "0" * 32}}, b"")
        text = content[8:-1] + b',"x":' + nested.encode() + b"}"
        path.write_bytes(resealed(text))
        with pytest.raises(EntryDamagedError, match="must be computed again"):
            store.open(KEY)
