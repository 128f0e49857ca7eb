"""Arguments that do not fit are refused in words, by every public function."""

import numpy as np
import pytest
import torch

from blend_kernels import (
    CacheAddresses,
    CacheShape,
    ChunkKV,
    ChunkShape,
    Deltas,
    LayerBuffers,
    LayerShape,
    PlacingTable,
    Positions,
    Turn,
    attend_rows,
    attention_mass,
    decode_attention,
    mass_rows,
    place_layer,
    rms_norm,
    rotate_keys,
    selective_attention,
    silu_mul,
    write_rows,
)
from tests.kernels.test_addressed import LAYER, attend, decoding_rows, make_cache, make_caches, make_queries
from tests.kernels.test_placing import BF16, make_chunk

Q, K, V = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
ROWS = torch.tensor([0, 2, 3, 7, 8])
META = torch.device("meta")


def refused(message):
    return pytest.raises(ValueError, match=message)


ATTENTION = [
    ({"q": Q[0]}, r"q must be \[batch, heads, rows, head_dim\]"),
    ({"k": K[0]}, r"k must be \[batch, kv_heads, keys, head_dim\]"),
    ({"k": K[..., :8]}, "head_dim 8, q has 1 and 16"),
    ({"k": K.repeat(2, 1, 1, 1), "v": V.repeat(2, 1, 1, 1)}, "k has batch 2"),
    ({"q": torch.randn(1, 3, 5, 16)}, "3 query heads are no multiple of 2 kv heads"),
    ({"k": K[:, :0], "v": V[:, :0]}, "no multiple of 0 kv heads"),
    ({"k": K[:, :, :0], "v": V[:, :, :0]}, "k has no keys"),
    ({"q": Q.long()}, "q must be float32"),
    ({"k": K.half(), "v": V.half()}, "k must be float32, got torch.float16"),
    ({"k": K.to(META), "v": V.to(META)}, "k must be on cpu like the others, got meta"),
    ({"q": torch.randn(1, 4, 16, 5).mT}, "last dimension of q must be contiguous"),
    ({"k": torch.randn(1, 2, 16, 9).mT}, "last dimension of k must be contiguous"),
    ({"window": 0}, "window must be"),
    ({"window": 2.5}, "window must be"),
    ({"scale": -1.0}, "scale must be"),
    ({"scale": float("nan")}, "scale must be"),
]
OF_VALUES = [
    ({"v": V[:, :, :8]}, "v must be"),
    ({"v": V[0]}, "v must be"),
    ({"v": V.half()}, "v must be float32"),
    ({"v": V.to(META)}, "v must be on cpu"),
    ({"v": torch.randn(1, 2, 16, 9).mT}, "last dimension of v must be contiguous"),
]
OF_ROWS = [
    ({"positions": Positions(ROWS[:4])}, r"positions must be \[5\], got \[4\]"),
    ({"positions": Positions(ROWS[None])}, "positions must be"),
    ({"positions": ROWS}, r"positions must be Positions\(tensor\)"),
    ({"positions": Positions(ROWS.float())}, "positions must be int64 or int32"),
    ({"positions": Positions(ROWS.to(META))}, "positions must be on cpu"),
    ({"positions": Positions(ROWS.flip(0))}, "positions must be sorted"),
    ({"positions": Positions(ROWS + 1)}, r"\[0, 9\), got 1 to 9"),
    ({"positions": Positions(ROWS - 1)}, r"\[0, 9\), got -1 to 7"),
    ({"softcap": 0.0}, "softcap must be"),
    ({"sinks": torch.zeros(2)}, r"sinks must be \[4\]"),
    ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks must be float32"),
    ({"sinks": torch.zeros(4, device=META)}, "sinks must be on cpu"),
    ({"backend": "cuda"}, "backend must be None, 'triton' or 'torch', got 'cuda'"),
]
OF_LSE = [
    ({"lse": torch.zeros(1, 5, 4)}, r"lse must be \[1, 4, 5\], got \[1, 5, 4\]"),
    ({"lse": torch.zeros(1, 4, 5, dtype=torch.float64)}, "lse must be float32"),
    ({"lse": torch.zeros(1, 4, 5, device=META)}, "lse must be on cpu"),
]


@pytest.mark.parametrize(("changed", "message"), [*ATTENTION, *OF_VALUES, *OF_ROWS])
def test_selective_attention(changed, message):
    with refused(message):
        selective_attention(**{"q": Q, "k": K, "v": V, "positions": Positions(ROWS), **changed})


@pytest.mark.parametrize(("changed", "message"), [*ATTENTION, *OF_ROWS, *OF_LSE])
def test_attention_mass(changed, message):
    arguments = {name: value for name, value in changed.items() if name != "v"}
    with refused(message):
        attention_mass(**{"q": Q, "k": K, "positions": Positions(ROWS), **arguments})


@pytest.mark.parametrize(("changed", "message"), [*ATTENTION, *OF_VALUES, ({"q": Q}, "q must have one row, got 5")])
def test_decode_attention(changed, message):
    with refused(message):
        decode_attention(**{"q": Q[:, :, :1], "k": K, "v": V, **changed})


def test_what_is_barely_right():
    """One number less would be refused."""
    positions = Positions(ROWS)
    selective_attention(Q, K, V, positions, window=1, softcap=0.5, scale=0.01)
    selective_attention(Q, K, V, Positions(torch.tensor([0, 0, 8, 8, 8])))
    narrow = torch.randn(1, 2, 9, 6)[..., ::3]
    with refused("last dimension of v must be contiguous"):
        selective_attention(Q, K, narrow, positions)
    selective_attention(Q, K, narrow[..., :1], positions)  # one number has any stride
    one_key = torch.randn(1, 2, 1, 32)[..., ::2]
    with refused("last dimension of k must be contiguous"):
        decode_attention(Q[:, :, :1], one_key, one_key)


def test_what_triton_cannot_compute(monkeypatch):
    positions = Positions(ROWS)
    with refused("no float64"):
        selective_attention(Q.double(), K.double(), V.double(), positions, backend="triton")
    with refused("no float64"):
        silu_mul(Q.double(), Q.double(), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with refused("needs CUDA tensors, or TRITON_INTERPRET=1"):
        selective_attention(Q, K, V, positions, backend="triton")


def test_heads_wider_than_the_kernels_go_to_torch():
    q, k = torch.randn(1, 2, 5, 320), torch.randn(1, 2, 9, 320)
    positions = Positions(ROWS)
    assert selective_attention(q, k, k, positions)[0].shape == q.shape
    with refused("up to 256 dimensions"):
        selective_attention(q, k, k, positions, backend="triton")
    with refused("up to 256 dimensions"):
        attention_mass(q, k, positions, backend="triton")


def test_kernels_read_no_number_unless_the_switch_asks_for_it(monkeypatch, device):
    """Rows past the keys see all keys, where nothing refuses them."""
    q, k, v = Q.to(device), K.to(device), V.to(device)
    far = Positions((ROWS + 1).to(device))
    assert selective_attention(q, k, v, far, backend="triton")[0].isfinite().all()
    monkeypatch.setenv("KVBLEND_KERNEL_CHECKS", "1")
    with refused(r"\[0, 9\)"):
        selective_attention(q, k, v, far, backend="triton")
    with refused(r"\[0, 9\)"):
        attention_mass(q, k, far, backend="triton")


KEY_TURN = Turn(torch.ones(8))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": K[0, 0, 0]}, r"k must be \[\.\.\., tokens, head_dim\]"),
        ({"k": K.to(torch.int8)}, "k must be float32"),
        ({"delta": Deltas(ROWS)}, r"delta must be \[9\], got \[5\]"),
        ({"delta": Deltas(torch.ones(9))}, "delta must be int64 or int32"),
        ({"delta": Deltas(torch.ones(9, dtype=torch.int64, device=META))}, "delta must be on cpu"),
        ({"turn": Turn(torch.ones(8).half())}, r"inv_freq must be \[pairs\] in float32 or float64"),
        ({"turn": Turn(torch.ones(1, 8))}, r"inv_freq must be \[pairs\]"),
        ({"turn": Turn(torch.ones(9))}, "dimensions 0 to 18 should turn, but head_dim is 16"),
        ({"turn": KEY_TURN._replace(offset=4)}, "dimensions 4 to 20"),
        ({"turn": KEY_TURN._replace(offset=-2)}, "dimensions -2 to 14"),
        ({"out": K[:, :, :4]}, r"out must be \[1, 2, 9, 16\]"),
        ({"out": K.to(torch.int8)}, "out must be float32"),
        ({"out": torch.empty_like(K, device=META)}, "out must be on cpu"),
        ({"out": K}, "out shares memory with k"),
        ({"k": K[:, :, :6], "delta": Deltas(ROWS[[0, 1, 2, 3, 4, 4]]), "out": K[:, :, 3:]}, "shares memory with k"),
        ({"out": torch.zeros(1, 1, 9, 16).expand(K.shape)}, "stride 0"),
    ],
)
def test_rotate_keys(changed, message):
    before = K.clone()
    with refused(message):
        rotate_keys(**{"k": K, "delta": Deltas(torch.full((9,), 3)), "turn": KEY_TURN, **changed})
    assert torch.equal(K, before)


def test_keys_rotate_to_other_tokens_of_their_cache():
    cache = torch.randn(1, 8, 2, 16).transpose(1, 2)
    keys, target = cache[:, :, :4], cache[:, :, 4:]
    delta = Deltas(torch.full((4,), 3))
    expected = rotate_keys(keys, delta, KEY_TURN)
    assert torch.equal(rotate_keys(keys, delta, KEY_TURN, target), expected)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(8), r"weight must be \[16\], got \[8\]"),
        (torch.ones(1, 16), r"weight must be \[16\]"),
        (torch.ones(16).half(), "weight must be float32"),
        (torch.ones(16, device=META), "weight must be on cpu"),
    ],
)
def test_norm(weight, message):
    with refused(message):
        rms_norm(Q, weight, 1e-6)


def test_norm_of_whole_numbers():
    with refused("x must be float32"):
        rms_norm(Q.long(), torch.ones(16), 1e-6)
    with refused("backend must be"):
        rms_norm(Q, torch.ones(16), 1e-6, backend="cuda")


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (Q, Q[:, :1], "up must be"),
        (Q, Q.half(), "up must be float32"),
        (Q, Q.to(META), "up must be on cpu"),
        (Q.long(), Q.long(), "gate must be float32"),
    ],
)
def test_gate(gate, up, message):
    with refused(message):
        silu_mul(gate, up)


SHAPE = ChunkShape((LayerShape(2, 8, 2, 8), LayerShape(2, 8, 2, 8), LayerShape(1, 8, 2, 8)), BF16)


def small_table(**changed):
    chunk, _ = make_chunk(SHAPE, 9)
    columns = {"first": [0, 2], "at": [0, 9], "rows": [9, 4], "moved": [0, 0], "absolute": [False, False], **changed}
    return PlacingTable([chunk, chunk], **{name: np.array(column) for name, column in columns.items()}, device="cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first": [0, 6]}, "place 1 uses rows that its chunk does not have"),
        ({"first": [-1, 0]}, "place 0 uses rows"),
        ({"rows": [9, -1]}, "place 1 uses rows"),
        ({"at": [-1, 9]}, "begins before it"),
        ({"at": [0, 8]}, "two places overlap"),
        ({"at": [3, 0]}, "two places overlap"),
        ({"moved": [0]}, r"moved must be int64 \[2\], one for each place, got int64 \[1\]"),
        ({"rows": [9.0, 4.0]}, r"rows must be int64 \[2\]"),
        ({"absolute": [0, 1]}, r"absolute must be bool \[2\]"),
    ],
)
def test_tables_of_places(changed, message):
    with refused(message):
        small_table(**changed)


def test_chunks_of_one_table_have_one_shape():
    zeros, starts, rows = np.array([0, 0]), np.array([0, 9]), np.array([9, 9])
    equal, wide = ChunkShape(SHAPE.layers, BF16), ChunkShape((LayerShape(2, 16, 2, 8),), BF16)

    def table(*shapes):
        chunks = [make_chunk(shape, 9)[0] for shape in shapes]
        return PlacingTable(chunks, zeros, starts, rows, zeros, zeros > 0, torch.device("cpu"))

    assert table(SHAPE, equal).total_rows == 18
    with refused("must have one ChunkShape"):
        table(SHAPE, wide)
    with refused("at least one chunk"):
        PlacingTable([], zeros[:0], zeros[:0], zeros[:0], zeros[:0], zeros[:0] > 0, torch.device("cpu"))


KEYS = torch.empty(2, 20, 8, dtype=BF16)
TURN = Turn(torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": -1}, r"layer must lie in \[0, 3\), got -1"),
        ({"layer": 3}, r"layer must lie in \[0, 3\), got 3"),
        ({"keys": KEYS[:1]}, r"keys must be \[2, capacity, 8\]"),
        ({"keys": KEYS[0]}, r"keys must be \[2, capacity, 8\]"),
        ({"values": KEYS[..., :4]}, r"values must be \[2, capacity, 8\]"),
        ({"values": KEYS[None]}, r"values must be \[2, 20, 8\], got \[1, 2, 20, 8\]"),
        ({"keys": KEYS[:, :12]}, "keys has 12 rows, the table goes up to row 13"),
        ({"keys": KEYS.long()}, "keys must be float32"),
        ({"values": KEYS.float()}, "values must be bfloat16"),
        ({"values": KEYS.to(META)}, "values is on meta, the table on cpu"),
        ({"keys": KEYS[:1].expand(2, 20, 8)}, "share memory"),
        ({"keys": torch.empty(2, 8, 20, dtype=BF16).mT}, "must be contiguous"),
        ({"key_turn": Turn(torch.ones(5))}, "how keys turn: dimensions 0 to 10 should turn, but head_dim is 8"),
        ({"key_turn": Turn(torch.ones(4, dtype=BF16))}, "in float32 or float64"),
        ({"value_turn": TURN._replace(offset=-1)}, "how values turn: dimensions -1 to 7"),
        ({"gain": torch.zeros(13, 31)}, r"gain must be \[13, 32\]"),
        ({"gain": torch.zeros(13, 32).long()}, "gain must be float32"),
        ({"gain": torch.zeros(13, 32, device=META)}, "gain must be on cpu"),
        ({"gain": torch.zeros(32, 13).T}, "last dimension of gain must be contiguous"),
        ({"keys": KEYS.expand(3, 2, 20, 8).clone(), "values": KEYS.expand(3, 2, 20, 8).clone()}, "3 layers from layer 0"),
        ({"layer": 1, "keys": KEYS.expand(3, 2, 20, 8).clone(), "values": KEYS.expand(3, 2, 20, 8).clone()}, "3 layers"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)  # fmt: skip
def test_placing(changed, message):
    arguments = {"layer": 0, "keys": KEYS, "values": KEYS.clone(), "key_turn": TURN, "value_turn": None, **changed}
    with refused(message):
        place_layer(small_table(), **arguments)


def test_caches_of_no_width_may_have_any_shape():
    chunk, _ = make_chunk(ChunkShape((LayerShape(2, 8, 0, 0),), BF16), 9)
    zero = np.zeros(1, np.int64)
    table = PlacingTable([chunk], zero, zero, zero + 9, zero, zero > 0, torch.device("cpu"))
    keys = torch.zeros(1, 2, 9, 8, dtype=BF16)
    place_layer(table, 0, keys, torch.empty(0), None, None)
    assert torch.equal(keys[0], chunk.keys[0])


@pytest.mark.parametrize(
    ("memory", "tokens", "groups", "message"),
    [
        (torch.zeros(10, dtype=torch.uint8), 9, 1, r"takes contiguous uint8 \[576\], got torch.uint8 \[10\]"),
        (torch.zeros(576, dtype=torch.int8), 9, 1, "contiguous uint8"),
        (torch.zeros(1152, dtype=torch.uint8)[::2], 9, 1, "contiguous uint8"),
        (torch.zeros(577, dtype=torch.uint8)[1:], 9, 1, "start at a multiple of 2 bytes"),
        (torch.zeros(0, dtype=torch.uint8), 0, 1, "at least one token"),
        (torch.zeros(576, dtype=torch.uint8), 9, 10, "1 to 9 groups"),
    ],
)
def test_memory_of_a_chunk(memory, tokens, groups, message):
    with refused(message):
        ChunkKV(ChunkShape((LayerShape(2, 8, 2, 8),), BF16), tokens, memory, groups)


def refused_caches():
    (keys, values), second = make_cache(40, "cpu")
    unaligned = torch.randn(2 * 40 * 32 + 1)[1:].view(1, 2, 40, 32)
    return [
        ([(keys, values)], "a cache of 2 layers is needed, got 1"),
        ([(keys[:, :, :39].contiguous(), values), second], r"values of layer 0 must be \[1, 2, 39, 32\]"),
        ([second, (keys[0], values)], "keys of layer 1 must be"),
        ([second, (keys, values.half())], "values of layer 1 must be float32"),
        ([second, (keys, values.to(META))], "values of layer 1 must be on cpu"),
        ([(keys[:, :, :20], values[:, :, :20]), second], "keys of layer 0 must be a whole contiguous buffer"),
        ([(unaligned, values), second], "keys of layer 0 must start at a multiple of 16 bytes"),
        ([tuple(layer) for layer in make_cache(40, "cpu", dim=16)], r"must be \[1, 2, 40, 32\], got \[1, 2, 40, 16\]"),
    ]


@pytest.mark.parametrize(
    ("cache", "message"), refused_caches(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_caches(cache, message):
    addresses, _ = make_caches("cpu", capacities=(50,))
    before = addresses.table.clone()
    with refused(message):
        addresses.assign([[LayerBuffers(*layer) for layer in cache]])
    assert torch.equal(addresses.table, before)


def test_more_caches_than_addresses():
    addresses = CacheAddresses(1, [CacheShape(2, 32, 32)] * 2, torch.device("cpu"), torch.float32)
    with refused("addresses for 1 caches, got 2"):
        addresses.assign([make_cache(40, "cpu"), make_cache(40, "cpu")])


OF_ADDRESSED_QUERIES = [
    ({"layer": 2}, r"layer must lie in \[0, 2\), got 2"),
    ({"layer": -1}, r"layer must lie in \[0, 2\), got -1"),
    ({"q": torch.randn(1, 4, 5, 16)}, r"q must be \[1, heads, rows, 32\]"),
    ({"q": torch.randn(2, 4, 5, 32)}, "q must be"),
    ({"q": torch.randn(1, 3, 5, 32)}, "3 query heads are no multiple of 2"),
    ({"q": torch.randn(1, 4, 5, 32).half()}, "q must be float32"),
    ({"q": torch.randn(1, 4, 32, 5).mT}, "must be contiguous"),
    ({"positions": torch.zeros(4, dtype=torch.int64)}, r"positions must be \[5\]"),
    ({"positions": torch.zeros(5)}, "positions must be int64 or int32"),
    ({"window": 0}, "window must be"),
    ({"softcap": 0.0}, "softcap must be"),
    ({"scale": -1.0}, "scale must be"),
    ({"most_keys": 0}, "most_keys must be at least 1"),
    ({"backend": "cuda"}, "backend must be"),
]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *OF_ADDRESSED_QUERIES,
        ({"request_of_row": torch.zeros(5, dtype=torch.int64, device=META)}, "request_of_row must be on cpu"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[4\]"),
    ],
)
def test_attention_over_addresses(changed, message):
    addresses, _ = make_caches("cpu")
    positions, request_of_row = decoding_rows("cpu")
    rows = {"q": make_queries(5, "cpu"), "positions": positions, "request_of_row": request_of_row}
    with refused(message):
        attend_rows(addresses, **{"layer": LAYER, **rows, "most_keys": 256, **changed})


ASCENDING = torch.tensor([3, 5, 60, -1, -1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *OF_ADDRESSED_QUERIES,
        ({"lse": torch.zeros(4, 5)}, r"lse must be \[1, 4, 5\]"),
        ({"positions": ASCENDING.flip(0)}, "sorted in ascending order, padded rows at the end"),
        ({"positions": torch.tensor([3, 60, 5, -1, -1])}, "sorted in ascending order"),
        ({"positions": ASCENDING + 10}, r"positions of request 0 must lie in \[0, 70\), got 70"),
        ({"most_keys": 60}, r"positions must lie in \[0, 60\), the keys of the result, got 60"),
    ],
)
def test_mass_over_addresses(changed, message):
    addresses, _ = make_caches("cpu")
    rows = {"q": make_queries(5, "cpu"), "positions": ASCENDING, "lse": torch.zeros(1, 4, 5)}
    with refused(message):
        mass_rows(addresses, **{"layer": LAYER, **rows, "most_keys": 256, **changed})


FRESH = torch.randn(1, 2, 5, 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": 2}, r"layer must lie in \[0, 2\)"),
        ({"keys": torch.randn(1, 2, 4, 32)}, r"keys must be \[1, 2, 5, 32\]"),
        ({"values": torch.randn(1, 2, 5, 16)}, r"values must be \[1, 2, 5, 32\]"),
        ({"keys": FRESH.half()}, "keys must be float32"),
        ({"values": FRESH.to(META)}, "values must be on cpu"),
        ({"values": torch.randn(1, 2, 32, 5).mT}, "must be contiguous"),
        ({"positions": torch.zeros(5)}, "positions must be int64 or int32"),
        ({"request_of_row": torch.zeros(4, dtype=torch.int64)}, r"request_of_row must be \[5\]"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_writes(changed, message):
    addresses, _ = make_caches("cpu")
    positions, request_of_row = decoding_rows("cpu")
    rows = {"keys": FRESH, "values": FRESH, "positions": positions, "request_of_row": request_of_row}
    with refused(message):
        write_rows(addresses, **{"layer": LAYER, **rows, **changed})


NOWHERE = [
    ([69, -1, 5, 130, -1], [0, 0, 2, 1, -1], r"positions of request 1 must lie in \[0, 130\), got 130"),
    ([69, -1, 5, 9, -1], [0, 0, 2, 3, -1], "request 3 has no cache"),
    ([0, -1, 5, 9, -1], [3, 0, 2, 0, -1], "request 3 has no cache"),
    ([69, -1, 5, 9, -1], [0, 0, 2, 4, -1], "request 4 has no cache"),
    ([69, -1, 5, 9, -1], [0, 0, -1, 1, -1], "request -1 has no cache"),
]


@pytest.mark.parametrize("by_switch", [False, True])
@pytest.mark.parametrize(("positions", "request_of_row", "message"), NOWHERE)
def test_rows_without_a_place(positions, request_of_row, message, by_switch, monkeypatch, device):
    """Plain torch refuses them, and the switch has them refused before a kernel runs."""
    if by_switch:
        monkeypatch.setenv("KVBLEND_KERNEL_CHECKS", "1")
    elif device != "cpu":
        pytest.skip("plain torch reads such caches on a CPU alone")
    backend = "triton" if by_switch else "torch"
    addresses, caches = make_caches(device)
    before = [states.clone() for cache in caches for layer in cache for states in layer]
    rows = (torch.tensor(positions, device=device), torch.tensor(request_of_row, device=device))
    fresh = FRESH.to(device)
    with refused(message):
        write_rows(addresses, LAYER, fresh, fresh, *rows, backend=backend)
    with refused(message):
        attend(addresses, make_queries(5, device), *rows, backend)
    after = [states for cache in caches for layer in cache for states in layer]
    assert all(map(torch.equal, before, after))


def test_many_rows_of_several_prompts():
    addresses, _ = make_caches("cpu")
    positions = torch.arange(17)
    with refused("more than 16 rows must be of one request, got 2"):
        attend(addresses, make_queries(17, "cpu"), positions, (positions < 3).long(), "torch")
    with refused("got 2"):  # position 0 counts, too
        attend(addresses, make_queries(17, "cpu"), positions, (positions < 1).long(), "torch")
    padded = torch.where(positions < 3, -1, positions)  # a padded row is of no request
    attend(addresses, make_queries(17, "cpu"), padded, (positions < 3).long(), "torch")
    attend(addresses, make_queries(16, "cpu"), positions[:16], (positions < 3).long()[:16], "torch")
