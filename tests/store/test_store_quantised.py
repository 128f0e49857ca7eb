"""Codecs of few bits: what comes back is within the bound of each, whatever its shape; what they cannot keep they refuse."""

import pytest
import torch
from forging import forge
from reading import key, read

from blend.errors import EntryDamagedError, StoreError
from blend.store import get_codec, open_store
from blend.types import ChunkCache

CODECS = ("int8", "int4")


# heads, tokens, width of keys, width of values: single tokens, odd ones, MLA's latent beside its rotary part, many groups.
SHAPES = [(1, 1, 1, 1), (2, 1, 7, 5), (3, 5, 7, 2), (1, 7, 1, 0), (1, 33, 40, 8), (2, 97, 6, 16), (1, 700, 3, 3)]
# Largest error of a number, as a share of what its channel spans in the chunk.
BOUNDS = {"int8": 1 / 500, "int4": 0.19}
# Mean squared error, as a share of a channel's variance: what 254 and 15 numbers give of normal ones.
NOISE = {"int8": 1e-4, "int4": 1.2e-2}


def drawn(heads, tokens, width, seed=0):
    """Channels of very different biases and sizes, as keys have them."""
    source = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, max(1, width))[:width]
    biases = torch.randn(heads, 1, width, generator=source) * 10 * sizes
    return torch.randn(heads, tokens, width, generator=source) * sizes + biases


def cache_of(heads, tokens, keys, values, layers=2):
    pairs = [(drawn(heads, tokens, keys, n), drawn(heads, tokens, values, n + 9)) for n in range(layers)]
    return ChunkCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), 3)


def most(codec, states):
    """The largest error that a codec may make, channel by channel; centres are rounded to eight bits."""
    spans = states.amax(1, keepdim=True) - states.amin(1, keepdim=True)
    return BOUNDS[codec] * (spans + states.abs().amax(1, keepdim=True) * 2**-7) + 1e-20


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_what_comes_back_is_within_the_bound(make, codec, shape):
    store, put, (heads, tokens, *widths) = make(codec), cache_of(*shape), shape
    store.put(key(1), put)
    with store.open(key(1)) as reader:
        assert (reader.codec, reader.tokens, reader.layers, reader.start) == (codec, tokens, 2, 3)
        for index in reversed(range(2)):
            for got, want in zip(reader.layer(index), (put.keys[index], put.values[index]), strict=True):
                assert got.shape == want.shape
                assert ((got - want).abs() <= most(codec, want)).all()
        across = [torch.full((tokens, width, heads), float("nan")).permute(2, 0, 1) for width in widths]
        reader.read_into(1, *across)
        assert all(torch.equal(one, want) for one, want in zip(across, reader.layer(1), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_makes_the_same_numbers(codec, shape):
    put = cache_of(*shape)
    for keys, values in zip(put.keys, put.values, strict=True):
        here = get_codec(codec).encode(keys, values)
        there = get_codec(codec).encode(keys.cuda(), values.cuda())
        for name, part in here.items():
            assert there[name].device.type == "cpu"
            # Sums of errors are taken in another order: a channel may have another of two steps that are as good.
            assert (there[name].view(torch.uint8) == part.view(torch.uint8)).float().mean() > 0.98 or part.numel() < 99


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", CODECS)
def test_the_dtype_that_was_put_in_comes_back(make, codec, dtype):
    store = make(codec)
    put = ChunkCache((drawn(2, 20, 6).to(dtype),), (drawn(2, 20, 4).to(dtype),), 0)
    store.put(key(1), put)
    keys, values = store.open(key(1)).layer(0)
    assert keys.dtype == values.dtype == dtype
    exact = put.keys[0].float()
    assert ((keys.float() - exact).abs() <= 1.01 * most(codec, exact) + exact.abs() * 2**-7).all()


@pytest.mark.parametrize("codec", CODECS)
def test_noise_is_what_the_bits_give(codec):
    states = drawn(2, 256, 64)
    keys, values = get_codec(codec).decode(get_codec(codec).encode(states, states), None)
    for got in (keys, values):
        left = (got - states).square().mean(1) / states.var(1)
        assert left.mean() < NOISE[codec]


@pytest.mark.parametrize("codec", CODECS)
def test_extremes_that_are_kept(codec):
    """Constant channels, tiny ones, huge ones, one token far from all others."""
    states = torch.full((1, 60, 5), 1234.567)
    states[..., 1] = 0
    states[..., 2] = torch.linspace(-1e-25, 1e-25, 60)
    states[..., 3] = torch.linspace(-1e36, 1e36, 60)
    states[0, 31, 4] = 1e6
    got, _ = get_codec(codec).decode(get_codec(codec).encode(states, states), None)
    assert (got[..., 0] - 1234.567).abs().max() < 1.3
    assert (got[..., 1].abs() < 1e-29).all()
    assert ((got - states).abs() <= most(codec, states)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_refused_with_the_remedy(make, codec):
    store = make(codec)
    for value in (float("nan"), float("inf"), -float("inf")):
        for part in range(2):
            states = [torch.zeros(2, 9, 4), torch.zeros(2, 9, 4)]
            states[part][1, 3, 2] = value
            with pytest.raises(StoreError, match=f"codec {codec}: use bfloat16 or float32"):
                store.put(key(1), ChunkCache((states[0],), (states[1],), 0))
    assert store.stats() == (0, 0)


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.52), ("int4", 0.30)])
def test_the_whole_file_keeps_its_size(tmp_path, codec, share):
    shape = {"heads": 2, "tokens": 256, "keys": 64, "values": 64, "layers": 24}
    sizes = []
    for name in (codec, "bfloat16"):
        store = open_store(tmp_path / name, codec=name)
        store.put(key(1), cache_of(**shape))
        sizes.append(store.stats().nbytes)
    assert sizes[0] < share * sizes[1]


def half_the_scales(header, _data):
    header["000.k.s"]["shape"][1] //= 2
    header["000.k.s"]["shape"][0] *= 2


def exchanged(header, _data):
    header["000.k"]["shape"][1:] = reversed(header["000.k"]["shape"][1:])


def other_dtype(header, _data):
    header["000.k.s"]["dtype"] = "I16"


@pytest.mark.parametrize("change", [half_the_scales, exchanged, other_dtype])
@pytest.mark.parametrize("codec", CODECS)
def test_parts_that_do_not_go_together_are_refused(tmp_path, codec, change):
    """Forged: every checksum holds and every byte is described."""
    store = open_store(tmp_path, codec=codec)
    store.put(key(1), cache_of(2, 12, 6, 4))
    (path,) = (tmp_path / "objects").rglob("*.safetensors")
    path.write_bytes(forge(path.read_bytes(), change))
    with pytest.raises(EntryDamagedError, match="must be computed again"):
        read(store, key(1))


@pytest.mark.parametrize(
    ("codec", "packed", "scales"),
    [
        ("int4", (1, 1, 4), (1, 2, 3)),  # three bytes would be two tokens
        ("int4", (1, 2, 3), (1, 2, 3)),
        ("int4", (1, 1, 3), (1, 0, 3)),
        ("int8", (1, 2, 3), (1, 0, 3)),
        ("int8", (1, 2, 4), (1, 2, 3)),
    ],
)
def test_shapes_that_no_codec_makes_are_refused(codec, packed, scales):
    numbers = torch.zeros(packed, dtype=torch.uint8 if codec == "int4" else torch.int8)
    of_groups = torch.zeros(scales, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="go with"):
        get_codec(codec).decode({"k": numbers, "k.s": of_groups, "v": numbers, "v.s": of_groups}, None)
