"""What a store must do; each test runs over each backend."""

import math

import pytest
import torch
from reading import assert_holds, cache, in_threads, key
from torch import zeros

from blend.errors import ConfigError, EntryDamagedError, StoreError
from blend.store import open_store
from blend.types import ChunkCache


@pytest.mark.parametrize(
    ("codec", "dtype", "shape"),
    [
        ("native", torch.float32, {}),
        ("native", torch.bfloat16, {"layers": 1, "tokens": 1}),
        ("native", torch.float16, {"layers": 2, "tokens": 63}),
        ("float32", torch.float32, {"layers": 5, "tokens": 111}),
        ("bfloat16", torch.float32, {}),
        ("float16", torch.float32, {}),
    ],
)
def test_returns_what_was_put_rounded_as_the_codec_says(make_store, codec, dtype, shape):
    store, put, given = make_store(codec), cache(dtype=dtype, **shape), cache(dtype=dtype, **shape)
    store.put(key(1), given)
    for tensor in (*given.keys, *given.values):  # the caller's, which the store must not hold on to
        tensor.fill_(float("nan"))
    assert_holds(store, key(1), put, None if codec == "native" else getattr(torch, codec))
    with store.open(key(1)) as reader:
        assert (reader.tokens, reader.layers, reader.start) == (put.tokens, put.layers, put.start)


def test_several_entries_at_once_of_which_some_are_missing(make_store):
    store = make_store()
    assert store.open(key(1)) is None
    assert key(1) not in store
    for number in (1, 3):
        store.put(key(number), cache(number))
    assert key(1) in store
    assert key(2) not in store
    assert store.open(key(1, "model-b")) is None
    readers = store.open_many([key(3), key(2), key(1), key(3)])
    assert readers[1] is None
    for reader, number in zip((readers[0], readers[2], readers[3]), (3, 1, 3), strict=True):
        assert torch.equal(reader.layer(2)[1], cache(number).values[2])
        reader.close()
    assert store.open_many([]) == []


def test_replacing_and_deleting_an_open_entry(make_store):
    store = make_store()
    store.put(key(1), cache(0))
    with store.open(key(1)) as old:
        store.put(key(1), cache(1, tokens=9))
        assert torch.equal(old.layer(2)[0], cache(0).keys[2])
    assert_holds(store, key(1), cache(1, tokens=9))
    assert store.stats().entries == 1
    with store.open(key(1)) as old:
        store.delete(key(1))
        assert torch.equal(old.layer(1)[1], cache(1, tokens=9).values[1])


@pytest.mark.parametrize(
    ("codec", "out_dtype"),
    [*(("native", torch.bfloat16), ("bfloat16", torch.float32)), *(("int8", torch.float32), ("int4", torch.bfloat16))],
)
def test_read_into_a_slice_equals_layer(make_store, codec, out_dtype):
    store, put = make_store(codec), cache(tokens=7)
    store.put(key(1), put)
    with store.open(key(1)) as reader:
        for index in range(3):
            keys = torch.full((2, 20, 4 + 2 * index), float("nan"), dtype=out_dtype)
            values = torch.full((2, 20, 6), float("nan"), dtype=out_dtype)
            reader.read_into(index, keys[:, 4:11], values[:, 4:11])
            for whole, want in ((keys, reader.layer(index)[0]), (values, reader.layer(index)[1])):
                assert torch.equal(whole[:, 4:11], want.to(out_dtype))
                assert whole[:, :4].isnan().all()
                assert whole[:, 11:].isnan().all()


def test_read_into_refuses_to_broadcast(make_store):
    store = make_store()
    store.put(key(1), cache(tokens=1))
    keys, values = torch.zeros(2, 5, 4), torch.zeros(2, 5, 6)
    with store.open(key(1)) as reader, pytest.raises(EntryDamagedError, match="shapes"):
        reader.read_into(0, keys, values)
    assert not keys.any()
    assert not values.any()


def test_delete_keys_stats_and_prune(make_store):
    store = make_store()
    assert store.stats() == (0, 0)
    mine, other = {key(n) for n in range(4)}, key(9, "model-b")
    for each in (*mine, other):
        store.put(each, cache())
    assert set(store.keys()) == {*mine, other}
    assert set(store.keys(other.namespace)) == {other}
    assert store.stats().entries == 5
    store.delete(key(0))
    store.delete(key(0))
    assert store.open(key(0)) is None
    assert store.prune([key(1), other], key(0).namespace) == 2
    assert set(store.keys()) == {key(1), other}


@pytest.mark.parametrize("name", ["budget_bytes", "memory_bytes"])
def test_budgets_must_be_positive(tmp_path, name):
    for location in ("memory:", tmp_path / "store"):
        for budget in (0, -5):
            with pytest.raises(ConfigError, match="positive"):
                open_store(location, **{name: budget})


def test_descriptions(make_store):
    store = make_store()
    assert store.namespaces() == {}
    store.put(key(1), cache())
    store.describe("abc", {"model": "old"})
    store.describe("abc", {"model": "tiny", "dtype": "float32"})
    assert store.namespaces() == {key(1).namespace: {}, "abc": {"model": "tiny", "dtype": "float32"}}
    store.describe(key(1).namespace, {"model": "real"})
    assert store.namespaces()[key(1).namespace] == {"model": "real"}


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ([], []),
        ([zeros(1, 2, 3)], []),
        ([zeros(1, 2, 3)], [zeros(1, 3, 3)]),
        ([zeros(2, 3)], [zeros(2, 3)]),
        ([zeros(1, 0, 3)], [zeros(1, 0, 3)]),
        ([zeros(1, 2, 3)], [zeros(1, 2, 3).half()]),
        ([zeros(1, 2, 3).long()], [zeros(1, 2, 3).long()]),
    ],
)
def test_caches_that_are_none_are_refused(keys, values):
    store = open_store("memory:")
    with pytest.raises(StoreError, match="not a chunk cache"):
        store.put(key(1), ChunkCache(tuple(keys), tuple(values), 0))
    assert store.stats() == (0, 0)


def test_float16_refuses_values_beyond_its_range():
    def filled(value):
        part = (torch.full((1, 2, 3), value),)
        return ChunkCache(part, part, 0)

    store = open_store("memory:", codec="float16")
    with pytest.raises(StoreError, match="bfloat16"):
        store.put(key(1), filled(1e5))
    store.put(key(1), filled(math.inf))
    assert_holds(store, key(1), filled(math.inf))


def test_artifacts_are_kept_as_they_are_and_replaced(make_store):
    store = make_store("bfloat16")
    assert store.read_artifact("surrogate-1") is None
    store.write_artifact("surrogate-1", b"first\nof two")
    store.write_artifact("surrogate-1", b"")
    store.write_artifact("map-2", bytes(range(256)))
    assert store.read_artifact("surrogate-1") == b""
    assert store.read_artifact("map-2") == bytes(range(256))
    assert sorted(store.artifacts()) == ["map-2", "surrogate-1"]
    store.delete_artifact("map-2")
    store.delete_artifact("map-2")
    assert store.read_artifact("map-2") is None
    assert list(store.artifacts()) == ["surrogate-1"]


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b", "a.b", "a" * 129])
def test_what_cannot_name_an_artifact_is_refused(name):
    store = open_store("memory:")
    for call in (store.read_artifact, store.delete_artifact, lambda it: store.write_artifact(it, b"")):
        with pytest.raises(StoreError, match="cannot name an artifact"):
            call(name)


def test_every_change_of_an_artifact_begins_a_generation(make_store):
    store = make_store()
    seen = [store.generation]
    for change in (
        lambda: store.write_artifact("a", b"1"),
        lambda: store.write_artifact("a", b"1"),
        lambda: store.delete_artifact("a"),
        store.advance,
    ):
        change()
        seen.append(store.generation)
    assert len(set(seen)) == len(seen)
    store.put(key(1), cache())
    assert store.generation == seen[-1]


def test_one_writer_at_a_time(make_store):
    store, inside, most = make_store(), [0], [0]

    def write(_):
        for _ in range(5):
            with store.writing():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                count = int(store.read_artifact("count") or 0)
                store.write_artifact("count", str(count + 1).encode())
                inside[0] -= 1

    in_threads(4, write)
    assert most == [1]
    assert store.read_artifact("count") == b"20"
