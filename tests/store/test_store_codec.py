import pytest
import torch
from reading import key

from blend.errors import ConfigError, EntryDamagedError, StoreError
from blend.store import Codec, codec_names, get_codec, open_store, register_codec
from blend.types import ChunkCache

PART = (torch.ones(1, 2, 3),)
ONES = ChunkCache(PART, PART, 0)


def test_unknown_codec_lists_the_choices(tmp_path):
    with pytest.raises(ConfigError, match=r"'zip'.*native, float32, bfloat16, float16"):
        open_store(tmp_path / "store", codec="zip")
    assert not (tmp_path / "store").exists()


def test_what_keeps_every_bit():
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    kept = {name: [get_codec(name).lossless(dtype) for dtype in dtypes] for name in codec_names()}
    assert kept.pop("native") == kept.pop("float32") == [True, True, True]
    assert kept.pop("bfloat16") == [False, True, False]
    assert kept.pop("float16") == [False, False, True]
    assert {name for name, found in kept.items() if any(found)} == set(), "a codec of one's own says so itself"


@pytest.mark.parametrize("still", [False, True])
def test_an_entry_knows_whether_it_is_what_was_computed(tmp_path, still):
    """Not in another dtype than it was computed in, nor where its keys were turned."""
    store = open_store(tmp_path, codec="float32")
    keys = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16).unbind()
    store.put(key(1), ChunkCache(keys, keys, 0, still))
    with store.open(key(1)) as reader:
        assert [reader.lossless(dtype) for dtype in (torch.bfloat16, torch.float32)] == [not still, False]


class Int8(Codec):
    """Per-row scales: parts of two dtypes, as codecs to come will have them."""

    name = "int8-test"
    parts = ("k.q", "k.scale", "v.q", "v.scale")

    def encode(self, keys, values):
        encoded = {}
        for name, tensor in (("k", keys), ("v", values)):
            scale = tensor.abs().amax(-1, keepdim=True).float() / 127
            encoded[f"{name}.q"] = (tensor / scale).round().to(torch.int8)
            encoded[f"{name}.scale"] = scale
        return encoded

    def decode(self, parts, dtype):
        keys, values = (parts[f"{n}.q"] * parts[f"{n}.scale"] for n in "kv")
        return keys.to(dtype or torch.float32), values.to(dtype or torch.float32)


def test_a_codec_of_several_dtypes_fits(make):
    store = make(Int8())
    # An odd number of int8 values a layer: the scales of the next layer begin at an odd byte of the file.
    keys, values = torch.randn(3, 3, 5, 7).unbind(), torch.randn(3, 3, 5, 7).unbind()
    store.put(key(1), ChunkCache(keys, values, 0))
    with store.open(key(1)) as reader:
        for index in range(3):
            out = torch.empty(2, 3, 5, 7)
            reader.read_into(index, out[0], out[1])
            for got, direct, want in zip(out, reader.layer(index), (keys[index], values[index]), strict=True):
                assert torch.equal(got, direct)
                assert ((got - want).abs() <= want.abs().amax(-1, keepdim=True) / 250).all()


def test_entries_of_a_codec_of_ones_own_are_read_by_stores_of_others(tmp_path):
    class Halved(Int8):
        name = "halved-test"

    open_store(tmp_path, codec=Halved()).put(key(1), ONES)
    assert "halved-test" in codec_names()
    with open_store(tmp_path, codec="float32").open(key(1)) as reader:
        assert reader.codec == "halved-test"
        assert torch.equal(reader.layer(0)[0], ONES.keys[0])


def test_names_of_kvblends_codecs_are_taken(tmp_path):
    class Native(Int8):
        name = "native"

    before = get_codec("native")
    with pytest.raises(ConfigError, match="another codec of the name"):
        open_store(tmp_path / "store", codec=Native())
    assert get_codec("native") is before
    again = register_codec(Int8())
    assert register_codec(Int8()) is not again is not get_codec("int8-test")


@pytest.mark.parametrize(
    ("name", "parts"), [("", ("k",)), ("a,b", ("k",)), ("odd", ()), ("odd", ("",)), ("odd", ("k", "k"))]
)
def test_names_that_cannot_stand_in_an_entry(tmp_path, name, parts):
    codec = Int8()
    codec.name, codec.parts = name, parts
    with pytest.raises(ConfigError, match="name"):
        open_store(tmp_path / "store", codec=codec)
    assert not (tmp_path / "store").exists()
    assert name not in codec_names()


@pytest.mark.parametrize(
    "made",
    [
        {"k.q": torch.zeros(1, 2, 3)},
        {name: torch.zeros(6) for name in Int8.parts},
        {name: torch.zeros(1, 2, 3, dtype=torch.complex64) for name in Int8.parts},
        {name: torch.zeros(1, 3, 2).transpose(1, 2) for name in Int8.parts},
    ],
)
def test_a_codec_that_does_not_make_what_it_says(make, made):
    class Wrong(Int8):
        name = "wrong-test"

        def encode(self, keys, values):
            return made

    store = make(Wrong())
    with pytest.raises(StoreError, match="'wrong-test' does not make what it says"):
        store.put(key(1), ONES)
    assert store.stats() == (0, 0)


def test_a_codec_that_decodes_to_something_else(make):
    class Longer(Int8):
        name = "longer-test"

        def decode(self, parts, dtype):
            return (torch.zeros(1, 9, 3, dtype=dtype),) * 2

    store = make(Longer())
    store.put(key(1), ONES)
    with store.open(key(1)) as reader, pytest.raises(EntryDamagedError, match=r"shape \[1, 9, 3\] for 2 tokens"):
        reader.layer(0)
