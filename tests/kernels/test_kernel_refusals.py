"""Arguments that do not fit are refused in words, by every kernel's function."""

import numpy as np
import pytest
import torch

from blend_kernels import (
    ChunkKV,
    ChunkShape,
    LayerShape,
    PlacingTable,
    Turn,
    attention_mass,
    kv_deviation,
    place_layer,
    rotate_keys,
    selective_attention,
)
from blend_kernels.addressed import write_rows
from blend_kernels.cache_addresses import CacheAddresses
from tests.kernels.test_addressed import LAYER, LAYERS, attend, decoding_rows, make_cache, make_caches, make_queries
from tests.kernels.test_placing import BF16, make_chunk

Q, K, V = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
ROWS = torch.tensor([0, 2, 3, 7, 8])
FREQ = torch.ones(8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Q[0]}, "q must be"),
        ({"k": K[0]}, "k must be"),
        ({"k": K[..., :8]}, "head_dim 8, q has 16"),
        ({"k": K.repeat(2, 1, 1, 1), "v": V.repeat(2, 1, 1, 1)}, "batch 2, q has 1"),
        ({"q": torch.randn(1, 3, 5, 16)}, "3 query heads are no multiple of 2"),
        ({"v": V[:, :, :8]}, "v must be"),
        ({"v": V.half()}, "v is torch.float16"),
        ({"k": K.half(), "v": V.half()}, "k is torch.float16"),
        ({"q": Q.long()}, "q must be floating point"),
        ({"k": K[:, :, :0], "v": V[:, :, :0]}, "no keys"),
        ({"k": torch.randn(1, 2, 16, 9).mT}, "must be contiguous"),
        ({"positions": ROWS[:4]}, "positions must be"),
        ({"positions": ROWS.float()}, "positions must be int64"),
        ({"positions": ROWS.flip(0)}, "sorted"),
        ({"positions": ROWS + 1}, r"\[0, 9\)"),
        ({"positions": ROWS - 1}, r"\[0, 9\)"),
        ({"positions": torch.zeros(2, 5, dtype=torch.int64)}, "positions must be"),
        ({"mode": "causal"}, "mode must be"),
        ({"window": 0}, "window must be"),
        ({"window": 2.5}, "window must be"),
        ({"softcap": 0.0}, "softcap must be"),
        ({"scale": -1.0}, "scale must be"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks must be float32"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks must be on cpu"),
        ({"k": K.to("meta"), "v": V.to("meta")}, "k is on meta"),
        ({"v": V.to("meta")}, "v is on meta"),
        ({"positions": ROWS.to("meta")}, "positions must be on cpu"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_selective_attention(changed, message):
    arguments = {"q": Q, "k": K, "v": V, "positions": ROWS, **changed}
    with pytest.raises(ValueError, match=message):
        selective_attention(**arguments)


def test_more_rows_than_keys_at_the_bottom_right():
    with pytest.raises(ValueError, match="at least as many keys as rows"):
        selective_attention(Q, K[:, :, :3], V[:, :, :3], torch.zeros(5, dtype=torch.int64), mode="bottom-right")


def test_triton_without_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        selective_attention(Q, K, V, ROWS, backend="triton")


def test_triton_takes_no_float64():
    with pytest.raises(ValueError, match="no float64"):
        selective_attention(Q.double(), K.double(), V.double(), ROWS, backend="triton")
    with pytest.raises(ValueError, match="no float64"):
        rotate_keys(K, 3, FREQ, out=K.double(), backend="triton")
    with pytest.raises(ValueError, match="no float64"):
        kv_deviation(None, None, V, V.double(), backend="triton")


def test_heads_wider_than_the_kernels_go_to_torch():
    q, k = torch.randn(1, 2, 5, 320), torch.randn(1, 2, 9, 320)
    assert selective_attention(q, k, k, ROWS).shape == q.shape
    with pytest.raises(ValueError, match="up to 256"):
        selective_attention(q, k, k, ROWS, backend="triton")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": ROWS.flip(0)}, "sorted"),
        ({"lse": torch.zeros(1, 5, 4)}, r"lse must be \[batch, heads, rows\] = \[1, 4, 5\], got \[1, 5, 4\]"),
        ({"lse": torch.zeros(1, 4, 5, dtype=torch.float64)}, "lse must be float32"),
        ({"lse": torch.zeros(1, 4, 5, device="meta")}, "lse must be on cpu"),
        ({"reduce": "mean"}, "reduce must be 'sum' or 'max', got 'mean'"),
    ],
)
def test_attention_mass(changed, message):
    with pytest.raises(ValueError, match=message):
        attention_mass(**{"q": Q, "k": K, "positions": ROWS, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": K[0, 0]}, "k must be"),
        ({"k": K.to(torch.int8)}, "k must be floating point"),
        ({"delta": ROWS}, "delta must be"),
        ({"delta": torch.ones(9)}, "delta must be"),
        ({"delta": torch.ones(9, dtype=torch.int64, device="meta")}, "delta must be on cpu"),
        ({"delta": 1.5}, "delta must be"),
        ({"inv_freq": FREQ.half()}, "inv_freq must be"),
        ({"inv_freq": FREQ.to("meta")}, "inv_freq is on meta"),
        ({"inv_freq": FREQ.repeat(2)}, "should turn, but head_dim is 16"),
        ({"rotary_offset": 4}, "dimensions 4 to 20"),
        ({"rotary_offset": -2}, "dimensions -2 to 14"),
        ({"out": K[:, :, :4]}, "shape of k"),
        ({"out": K.to(torch.int8)}, "out must be floating point"),
        ({"out": K}, "turning in place is refused"),
        ({"k": K[:, :, :6], "out": K[:, :, 3:]}, "shares memory with k"),
        ({"out": torch.zeros(1, 1, 9, 16).expand(K.shape)}, "stride 0"),
    ],
)
def test_rotate_keys(changed, message):
    arguments = {"k": K, "delta": 3, "inv_freq": FREQ, **changed}
    with pytest.raises(ValueError, match=message):
        rotate_keys(**arguments)


@pytest.mark.parametrize(
    ("pair", "rule", "message"),
    [
        ((K, K), {"norm": "max"}, "norm must be"),
        ((K, K), {"parts": "q"}, "parts must be"),
        ((K, None), {"parts": "k"}, "are needed"),
        ((K, K[:, :, :3]), {"parts": "k"}, "must both be"),
        ((K.long(), K), {"parts": "k"}, "floating point"),
        ((K, K), {"parts": "kv"}, "same batch and rows"),
        ((K.to("meta"), K), {"parts": "k"}, "k_new is on meta"),
        ((K[:, :, :4].to("meta"), K[:, :, :4].to("meta")), {"parts": "kv"}, "same device, got meta, cpu"),
    ],
)
def test_kv_deviation(pair, rule, message):
    with pytest.raises(ValueError, match=message):
        kv_deviation(*pair, V[:, :, :4], V[:, :, :4], **rule)


ONE = ChunkShape((LayerShape(2, 8, 2, 8),), BF16)


def small_table(**changed):
    shape = changed.pop("shape", ONE)
    chunk, _ = make_chunk(shape, 9)
    columns = {"first": [0, 2], "at": [0, 9], "rows": [9, 4], "moved": [0, 0], **changed}
    arrays = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    return PlacingTable([chunk, chunk], **arrays, absolute=np.zeros(2, dtype=bool), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first": [0, 6]}, "place 1 uses rows that its chunk does not have"),
        ({"first": [-1, 0]}, "place 0 uses rows"),
        ({"rows": [9, -1]}, "place 1 uses rows"),
        ({"at": [-1, 9]}, "place 0 starts at row -1"),
        ({"at": [0, 8]}, "overlap"),
        ({"at": [3, 0]}, "overlap"),
        ({"moved": [0]}, r"moved must be int64 \[2\]"),
    ],
)
def test_tables_of_places(changed, message):
    with pytest.raises(ValueError, match=message):
        small_table(**changed)


def test_chunks_of_one_table_have_one_shape():
    columns = [np.array(column, dtype=np.int64) for column in ([0, 0], [0, 9], [9, 9], [0, 0])]
    wide = ChunkShape((LayerShape(2, 16, 2, 8),), BF16)
    chunks = [make_chunk(shape, 9)[0] for shape in (ONE, wide)]
    with pytest.raises(ValueError, match="one ChunkShape"):
        PlacingTable(chunks, *columns, np.zeros(2, dtype=bool), torch.device("cpu"))


KEYS = torch.empty(2, 20, 8, dtype=BF16)


TURN = Turn(torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": KEYS[:1]}, r"keys must be \[2, capacity, 8\]"),
        ({"values": KEYS[..., :4]}, r"values must be \[2, capacity, 8\]"),
        ({"keys": KEYS[:, :12]}, "keys has 12 rows, the table goes up to row 13"),
        ({"keys": KEYS.long()}, "keys must be floating point"),
        ({"values": KEYS.to("meta")}, "values is on meta"),
        ({"keys": KEYS[:1].expand(2, 20, 8)}, "share memory"),
        ({"keys": torch.empty(2, 8, 20, dtype=BF16).mT}, "must be contiguous"),
        ({"key_turn": Turn(torch.ones(5, dtype=torch.float64))}, "dimensions 0 to 10 should turn, but head_dim is 8"),
        ({"key_turn": Turn(torch.ones(4, dtype=BF16))}, "fp32 or fp64"),
        ({"value_turn": TURN._replace(offset=-1)}, "value_turn: dimensions -1 to 7"),
        ({"gain": torch.zeros(13, 31)}, r"gain must be \[13, 32\]"),
        ({"gain": torch.zeros(13, 32).long()}, "gain must be float32"),
        ({"gain": torch.zeros(32, 13).T}, "last dimension of gain must be contiguous"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_placing(changed, message):
    arguments = {"keys": KEYS, "values": KEYS, "key_turn": TURN, "value_turn": None, **changed}
    with pytest.raises(ValueError, match=message):
        place_layer(small_table(), 0, **arguments)


@pytest.mark.parametrize(
    ("memory", "tokens", "groups", "message"),
    [
        (torch.zeros(10, dtype=torch.uint8), 9, 1, r"contiguous uint8 \[576\]"),
        (torch.zeros(576, dtype=torch.int8), 9, 1, "uint8"),
        (torch.zeros(577, dtype=torch.uint8)[1:], 9, 1, "multiple of 2 bytes"),
        (torch.zeros(0, dtype=torch.uint8), 0, 1, "at least one token"),
        (torch.zeros(576, dtype=torch.uint8), 9, 10, "1 to 9 groups"),
    ],
)
def test_memory_of_a_chunk(memory, tokens, groups, message):
    with pytest.raises(ValueError, match=message):
        ChunkKV(ONE, tokens, memory, groups)


def refused_caches():
    keys, values = make_cache(40, "cpu")
    unaligned = torch.randn(2 * 40 * 32 + 1)[1:].view(1, 2, 40, 32)
    return [
        ((keys[:1], values), "cache of 2 layers is needed"),
        ((keys, values[:1]), "cache of 2 layers is needed"),
        (([keys[0], keys[1][:, :, :39].contiguous()], values), "values of layer 1 must be"),
        (([keys[0], keys[1][0]], values), "keys of layer 1 must be"),
        ((keys, [values[0], values[1].half()]), "values of layer 1 must be float32"),
        ((keys, [values[0], values[1].to("meta")]), "must be on cpu"),
        (([keys[0][:, :, :20], keys[1]], [values[0][:, :, :20], values[1]]), "keys of layer 0 must be a whole"),
        (([unaligned, keys[1]], values), "multiple of 16 bytes"),
        (make_cache(40, "cpu", dim=16), "heads and dimensions differ"),
    ]


@pytest.mark.parametrize(
    ("cache", "message"), refused_caches(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_caches(cache, message):
    addresses, _ = make_caches("cpu", capacities=(50,))
    with pytest.raises(ValueError, match=message):
        addresses.assign(0, *cache)


def test_requests_and_layers():
    addresses = CacheAddresses(2, LAYERS, "cpu", torch.float32)
    cache = make_cache(40, "cpu")
    for request in (-1, 2):
        with pytest.raises(ValueError, match=r"request must lie in \[0, 2\)"):
            addresses.assign(request, *cache)
    with pytest.raises(ValueError, match="assign a cache first"):
        addresses.shape(0)
    with pytest.raises(ValueError, match=r"layer must lie in \[0, 2\)"):
        addresses.shape(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.randn(1, 4, 5, 16)}, r"q must be \[1, heads, rows, 32\]"),
        ({"q": torch.randn(2, 4, 5, 32)}, "q must be"),
        ({"q": torch.randn(1, 3, 5, 32)}, "3 query heads are no multiple of 2"),
        ({"q": torch.randn(1, 4, 5, 32).half()}, "q must be float32"),
        ({"q": torch.randn(1, 4, 32, 5).mT}, "must be contiguous"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, r"positions must be \[5\]"),
        ({"positions": torch.zeros(5)}, "positions must be int64"),
        ({"request_of_row": torch.zeros(5, dtype=torch.int64, device="meta")}, "request_of_row must be on cpu"),
        ({"window": 0}, "window must be"),
        ({"softcap": 0.0}, "softcap must be"),
        ({"scale": -1.0}, "scale must be"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"splits": 0}, "splits must be at least 1"),
        ({"most_keys": 0}, "most_keys must be at least 1"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_attention_over_addresses(changes, message):
    addresses, _ = make_caches("cpu")
    positions, request_of_row = decoding_rows("cpu")
    rows = {"q": make_queries(5, "cpu"), "positions": positions, "request_of_row": request_of_row}
    with pytest.raises(ValueError, match=message):
        attend(addresses, **{**rows, "most_keys": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.randn(1, 2, 4, 32)}, r"keys must be \[1, 2, 5, 32\]"),
        ({"values": torch.randn(1, 2, 5, 16)}, r"values must be \[1, 2, 5, 32\]"),
        ({"keys": torch.randn(1, 2, 5, 32).half()}, "keys must be float32"),
        ({"values": torch.randn(1, 2, 32, 5).mT}, "must be contiguous"),
        ({"positions": torch.zeros(5)}, "positions must be int64"),
        ({"request_of_row": torch.zeros(4, dtype=torch.int64)}, r"request_of_row must be \[5\]"),
    ],
)
def test_writes(changes, message):
    addresses, _ = make_caches("cpu")
    positions, request_of_row = decoding_rows("cpu")
    keys, values = torch.randn(2, 1, 2, 5, 32)
    rows = {"keys": keys, "values": values, "positions": positions, "request_of_row": request_of_row}
    with pytest.raises(ValueError, match=message):
        write_rows(addresses, LAYER, **{**rows, **changes})
