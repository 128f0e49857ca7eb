"""Placing of stored chunks against float64, against `rotate_keys` and the codecs bit by bit, and what it may not touch."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from blend.store.codecs import get_codec
from blend_kernels import ChunkKV, ChunkShape, Deltas, LayerShape, PlacingTable, Turn, place_layer, rotate_keys
from tests.kernels.dense import dense_rotation

BF16, FP32 = torch.bfloat16, torch.float32
NONE = LayerShape(0, 0, 0, 0)


def frequencies(pairs, device):
    return (10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)).to(device)


class Model(NamedTuple):
    """Layers, and how keys and values of each turn: pairs, interleaved, offset."""

    layers: tuple[LayerShape, ...]
    keys: tuple[int, bool, int] | None
    values: tuple[int, bool, int] | None = None

    def turns(self, device):
        return [None if turn is None else Turn(frequencies(turn[0], device), *turn[1:]) for turn in self[1:]]


MODELS = {
    "halves 8": Model((LayerShape(2, 8, 2, 8),) * 2, (4, False, 0)),
    "halves 64": Model((LayerShape(2, 64, 2, 64), NONE, LayerShape(1, 64, 1, 64)), (32, False, 0)),
    "halves 80": Model((LayerShape(1, 80, 1, 80),), (40, False, 0)),
    "halves 128": Model((LayerShape(2, 128, 2, 128),), (64, False, 0)),
    "pairs 96": Model((LayerShape(1, 96, 2, 64),), (48, True, 0)),
    "quarter 64": Model((LayerShape(3, 64, 3, 64),), (8, False, 0)),
    "middle 48": Model((LayerShape(2, 48, 2, 8),), (6, True, 10)),
    "latent": Model((LayerShape(1, 192, 1, 128), LayerShape(2, 96, 1, 64)), (32, False, 32)),
    "latent in values": Model((LayerShape(1, 80, 1, 96),), None, (16, True, 64)),
    "no turn": Model((LayerShape(2, 64, 1, 24),), None),
    "odd": Model((LayerShape(3, 5, 2, 7), LayerShape(2, 3, 1, 1)), (1, False, 1)),
    "keys alone": Model((LayerShape(2, 64, 0, 0),), (32, False, 0)),
}  # fmt: skip


class Places(NamedTuple):
    """Which chunk, its first row, the prompt's row, how many rows, the move, and whether keys have no positions."""

    chunk: tuple[int, ...]
    first: tuple[int, ...]
    at: tuple[int, ...]
    rows: tuple[int, ...]
    moved: tuple[int, ...]
    absolute: tuple[bool, ...]

    def table(self, chunks, device, *shape):
        columns = [np.array(column, dtype=np.int64) for column in self[1:5]]
        still = np.array(self.absolute)
        return PlacingTable([chunks[i] for i in self.chunk], *columns, still, torch.device(device), *shape)


TOKENS = (111, 1, 63, 16)
MIXED = "parts, twice, with gaps, in any order"
SETS = {
    "whole, side by side": Places(
        (0, 1, 2, 3), (0,) * 4, (9, 120, 121, 184), (111, 1, 63, 16), (9, -3, 100_000, 0), (False,) * 4
    ),
    "without positions": Places((2, 0), (0, 0), (5, 68), (63, 111), (0, 0), (True, True)),
    MIXED: Places(
        (0, 2, 0, 3, 0), (0, 40, 70, 3, 50), (90, 3, 60, 0, 201), (34, 20, 30, 0, 61), (5, -17, 0, 1, 77),
        (False, True, True, False, False),
    ),
}  # fmt: skip
CAPACITY = 270


def make_chunk(shape, tokens, device="cpu", where="host", offset=64):
    """A chunk of random keys and values in memory between NaNs, and those of each layer as a codec decodes them, fp32."""
    states = [
        [torch.randn(heads, tokens, dim) + torch.arange(dim) / 4 for heads, dim in (layer[:2], layer[2:])]
        for layer in shape.layers
    ]
    if shape.packing == "plain":
        parts = [{"k": keys.to(shape.dtype), "v": values.to(shape.dtype)} for keys, values in states]
        decoded = [(part["k"].float(), part["v"].float()) for part in parts]
        groups = 1
    else:
        codec = get_codec(shape.packing)
        parts = [codec.encode(*layer) for layer in states]
        decoded = [codec.decode(part, torch.float32) for part in parts]
        groups = parts[0]["k.s"].shape[1] // 2
    nbytes = shape.nbytes(tokens, groups)
    whole = torch.full((offset + nbytes + 64,), 255, dtype=torch.uint8, device="cpu" if where == "host" else device)
    if device == "cuda" and where == "host":
        whole = whole.pin_memory()
    chunk = ChunkKV(shape, tokens, whole[offset : offset + nbytes], groups)
    names = {"k": chunk.keys, "v": chunk.values, "k.s": chunk.key_scales, "v.s": chunk.value_scales}
    for index, part in enumerate(parts):
        for name, tensor in part.items():
            assert names[name][index].shape == tensor.shape
            names[name][index].copy_(tensor)
    return chunk, decoded


def make_chunks(shape, device="cpu", where="host", offset=64):
    made = [make_chunk(shape, tokens, device, where, offset) for tokens in TOKENS]
    return [chunk for chunk, _ in made], [decoded for _, decoded in made]


def make_caches(layer, dtype, device):
    """Caches full of NaN, and copies to compare with; keys have rows of neighbouring heads side by side."""
    keys = torch.full((CAPACITY, layer.key_heads, layer.key_dim), torch.nan, dtype=dtype, device=device).transpose(0, 1)
    values = torch.full((layer.value_heads, CAPACITY, layer.value_dim), torch.nan, dtype=dtype, device=device)
    return keys, values


def positions_of(places):
    """How far each row moves, and its row in the prompt, in the order of the table."""
    at, rows, moved = (np.array(column) for column in (places.at, places.rows, places.moved))
    place = np.repeat(np.arange(len(rows)), rows)
    local = np.arange(rows.sum()) - (np.cumsum(rows) - rows)[place]
    position = at[place] + local
    deltas = np.where(np.array(places.absolute)[place], position, moved[place])
    return torch.from_numpy(deltas), torch.from_numpy(position)


def taken(decoded, index, part, places):
    """The keys (part 0) or values (1) of a layer that the places use, in the order of the table."""
    columns = zip(places.chunk, places.first, places.rows, strict=True)
    return torch.cat([decoded[chunk][index][part][:, first : first + rows] for chunk, first, rows in columns], 1)


def expected(states, turn, places, gain=None):
    """Rows in float64: decoded states, moved, and the gain at its position."""
    gain = torch.zeros_like(states) if gain is None else gain.double()
    if turn is None:
        return states.double() + gain
    deltas, positions = (rows[:, None] * turn.inv_freq.cpu() for rows in positions_of(places))
    how = (turn.interleaved, turn.offset)
    return dense_rotation(states, deltas, *how) + dense_rotation(gain, positions, *how)


def check(model, places, packing, device, backend, *, gain_dtype=None, where="host", offset=64):
    """Place every layer, and compare all rows of the cache."""
    shape = ChunkShape(model.layers, FP32, packing)
    chunks, decoded = make_chunks(shape, device, where, offset)
    table = places.table(chunks, device)
    turns, (_, position) = model.turns(device), positions_of(places)
    for index, layer in enumerate(model.layers):
        caches = make_caches(layer, FP32, device)
        gain = torch.randn(sum(places.rows), layer.width, device=device).to(gain_dtype) if gain_dtype else None
        place_layer(table, index, *caches, *turns, gain=gain, backend=backend)
        for part, cache, turn in zip((0, 1), caches, turns, strict=True):
            if cache.numel() == 0:
                continue
            added = None
            if gain is not None:
                mine = gain.cpu().split((layer.key_width, layer.value_width), 1)[part]
                added = mine.unflatten(1, layer[2 * part : 2 * part + 2]).transpose(0, 1)
            wanted = expected(taken(decoded, index, part, places), turn, places, added)
            cache = cache.cpu()
            torch.testing.assert_close(cache[:, position].double(), wanted, rtol=2e-6, atol=2e-5)
            cache[:, position] = torch.nan
            assert cache.isnan().all(), "rows that no place covers are left alone"


FEW = ("halves 64", "pairs 96", "latent in values", "odd")
CASES = [*((name, "plain") for name in MODELS), *zip(FEW, ("int8", "int4") * 2, strict=True)]


@pytest.mark.parametrize(("name", "packing"), CASES)
def test_every_layout_with_a_gain(name, packing, backend, device, poisoned):
    check(MODELS[name], SETS[MIXED], packing, device, backend, gain_dtype=FP32)


@pytest.mark.parametrize(
    ("packing", "gain_dtype"), [("plain", None), ("plain", FP32), ("plain", BF16), ("int8", FP32), ("int4", None)]
)
@pytest.mark.parametrize("places", SETS)
def test_every_set_of_places(packing, places, gain_dtype, backend, device, poisoned):
    check(MODELS["middle 48"], SETS[places], packing, device, backend, gain_dtype=gain_dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of two kinds needs a GPU")
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("packing", ["plain", "int8", "int4"])
def test_page_locked_memory_and_a_gpu_as_sources(where, packing, backend, device, poisoned):
    for places in SETS.values():
        check(MODELS["halves 128"], places, packing, device, backend, where=where, gain_dtype=FP32)


@pytest.mark.parametrize("packing", ["plain", "int8", "int4"])
def test_memory_that_is_barely_aligned(packing, backend, device, poisoned):
    check(MODELS["halves 64"], SETS["without positions"], packing, device, backend, offset=4)


def assert_same(found, wanted, device, backend, turn):
    """Every bit where rows are only copied, and in plain torch. Elsewhere a kernel's sines differ a little from torch's."""
    if turn is None if backend == "triton" else device == "cpu":
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    else:
        step = max(2 * torch.finfo(wanted.dtype).eps, 2e-5)
        torch.testing.assert_close(found, wanted, rtol=step, atol=step, equal_nan=True)


COPIED = [
    *((name, "plain", BF16, "whole, side by side") for name in MODELS),
    *((name, "plain", BF16, MIXED) for name in FEW),
    *((name, packing, BF16, MIXED) for name in ("halves 64", "latent in values") for packing in ("int8", "int4")),
    *(("middle 48", packing, FP32, MIXED) for packing in ("int8", "int4")),
]


@pytest.mark.parametrize(("name", "packing", "dtype", "places"), COPIED)
def test_rows_equal_those_of_the_codec_turned_by_rotate_keys(name, packing, dtype, places, backend, device, poisoned):
    """Also signs of zeros, infinities and the payload of a NaN in what is only copied."""
    model, places = MODELS[name], SETS[places]
    chunks, decoded = make_chunks(ChunkShape(model.layers, BF16, packing), device)
    if packing == "plain":
        decoded = [list(zip(chunk.keys, chunk.values, strict=True)) for chunk in chunks]
        for values in (values for chunk in chunks for values in chunk.values):
            if values.shape[2] > 2 and model.values is None and values.numel():
                values.view(torch.int16)[0, 0, :3] = torch.tensor([-32768, 0x7F80, 0x7FA1], dtype=torch.int16)
    table, turns = places.table(chunks, device), model.turns(device)
    deltas, position = (each.to(device) for each in positions_of(places))
    for index, layer in enumerate(model.layers):
        caches = make_caches(layer, dtype, device)
        place_layer(table, index, *caches, *turns, backend=backend)
        for part, cache, turn in zip((0, 1), caches, turns, strict=True):
            states = taken(decoded, index, part, places).to(device)
            if turn is not None and cache.numel():
                wanted = rotate_keys(states, Deltas(deltas), turn, torch.empty_like(states, dtype=dtype))
            elif (backend, device, dtype, states.dtype) == ("triton", "cpu", BF16, FP32):
                # The interpreter cuts bf16 off where GPUs round to nearest.
                wanted = states.view(torch.int32).bitwise_and(-65536).view(FP32).to(BF16)
            else:
                wanted = states.to(dtype)
            assert_same(cache[:, position], wanted, device, backend, turn)


def test_wider_chunks_round_once(backend, device, poisoned):
    """fp32 chunks in a cache of fp16."""
    layer = LayerShape(1, 64, 1, 64)
    chunks, decoded = make_chunks(ChunkShape((layer,), FP32), device)
    places, turn = SETS["whole, side by side"], Turn(frequencies(32, device))
    keys, values = make_caches(layer, torch.float16, device)
    place_layer(places.table(chunks, device), 0, keys, values, turn, None, backend=backend)
    wanted = expected(taken(decoded, 0, 0, places), turn, places)
    rows = keys.cpu()[:, positions_of(places)[1]].double()
    assert ((rows - wanted).abs() <= wanted.abs() * 2**-11 + 1e-5).all()


@pytest.mark.parametrize(("programs", "packing"), [(1, "plain"), (5, "plain"), (5, "int4"), (10_000, "plain")])
def test_any_number_of_programs_gives_the_same(programs, packing, device, monkeypatch, poisoned):
    for name in ("HOST_PROGRAMS", "_PROGRAMS_PER_MULTIPROCESSOR"):
        monkeypatch.setattr(f"blend_kernels.placing_launch.{name}", programs)
    check(MODELS["latent"], SETS[MIXED], packing, device, "triton")


def test_layers_may_be_placed_in_inference_mode_and_outside(device):
    model, places = MODELS["halves 8"], SETS[MIXED]
    chunks, _ = make_chunks(ChunkShape(model.layers, BF16), device)
    table, turns = places.table(chunks, device), model.turns(device)
    caches = make_caches(model.layers[0], BF16, device)
    with torch.inference_mode():
        place_layer(table, 0, *caches, *turns, backend="torch")
    place_layer(table, 1, *caches, *turns, backend="torch")


def test_a_chunk_on_its_device_is_itself_and_elsewhere_a_copy():
    chunk, _ = make_chunk(ChunkShape((LayerShape(2, 8, 2, 8),), BF16, "int8"), 9)
    assert chunk.to("cpu") is chunk
    copy = chunk.to("meta")
    assert copy.keys[0].is_meta
    assert (copy.tokens, copy.groups, copy.keys[0].shape) == (9, chunk.groups, chunk.keys[0].shape)


def test_a_plain_chunk_is_one_tensor():
    shape = ChunkShape((LayerShape(2, 8, 2, 8),) * 3, BF16)
    chunk = ChunkKV(shape, 5, torch.zeros(shape.nbytes(5), dtype=torch.uint8))
    whole = chunk.memory.view(BF16).view(3, 2, 2, 5, 8)
    whole.copy_(torch.arange(whole.numel()).view(whole.shape) % 97)
    for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        assert torch.equal(keys, whole[layer, 0])
        assert torch.equal(values, whole[layer, 1])
        assert keys.is_contiguous()


@pytest.mark.parametrize("packing", ["plain", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 63])
def test_the_parts_of_a_chunk_fill_its_memory_and_do_not_overlap(packing, tokens):
    shape = ChunkShape((LayerShape(2, 8, 2, 6), NONE, LayerShape(1, 10, 3, 4)), BF16, packing)
    groups = min(3, tokens)
    chunk = ChunkKV(shape, tokens, torch.zeros(shape.nbytes(tokens, groups), dtype=torch.uint8), groups)
    views = (*chunk.keys, *chunk.values, *chunk.key_scales, *chunk.value_scales)
    for view in views:
        if view.numel():
            view.view(torch.uint8).add_(1)
    assert chunk.memory.max() == 1
    padding = -sum(layer[0] * layer[1] + layer[2] * layer[3] for layer in shape.layers) * tokens // 2 % 16
    assert chunk.memory.eq(0).sum() < 16 if packing != "int4" else chunk.memory.eq(0).sum() == padding


def test_layers_of_one_shape_are_placed_at_once_as_heads_of_one(device):
    chunks, _ = make_chunks(ChunkShape((LayerShape(1, 41, 0, 0),) * 5, FP32), device)
    one_by_one, at_once = torch.full((2, 5, CAPACITY, 41), torch.nan, device=device)
    nothing = at_once.new_empty((0, CAPACITY, 0))
    table = SETS[MIXED].table(chunks, device)
    for layer, into in enumerate(one_by_one):
        place_layer(table, layer, into[None], nothing, None, None, backend="triton")
    table = SETS[MIXED].table(chunks, device, ChunkShape((LayerShape(5, 41, 0, 0),), FP32))
    place_layer(table, 0, at_once, nothing, None, None, backend="triton")
    assert torch.equal(one_by_one.nan_to_num(7), at_once.nan_to_num(7))
    assert at_once.isfinite().any()


@pytest.mark.parametrize(("packing", "with_gain"), [("plain", True), ("int8", False), ("int4", True)])
def test_several_layers_at_once_equal_one_after_another(packing, with_gain, backend, device, poisoned):
    layer = LayerShape(2, 16, 2, 16)
    model, places = Model((layer,) * 3, (8, False, 0)), SETS[MIXED]
    chunks, _ = make_chunks(ChunkShape(model.layers, BF16, packing), device)
    table, turns = places.table(chunks, device), model.turns(device)
    gain = torch.randn(2, table.total_rows, layer.width, device=device) if with_gain else None
    whole = torch.full((6, 2, CAPACITY, 16), float("nan"), dtype=BF16, device=device)
    keys, values = whole[2::2], whole[3::2]
    place_layer(table, 1, keys, values, *turns, gain=gain, backend=backend)
    for number in range(2):
        alone = make_caches(layer, BF16, device)
        added = None if gain is None else gain[number]
        place_layer(table, 1 + number, *alone, *turns, gain=added, backend=backend)
        for cache, wanted in zip((keys[number], values[number]), alone, strict=True):
            assert torch.equal(cache.nan_to_num(7), wanted.nan_to_num(7))
