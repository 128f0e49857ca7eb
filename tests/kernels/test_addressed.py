"""Attention over caches whose addresses stand in a table, and writes into them, against dense float64 attention."""

from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest
import torch

from blend_kernels import CacheAddresses, CacheShape, LayerBuffers, attend_rows, mass_rows, write_rows
from blend_kernels import addressed_kernel as kernels
from tests.kernels.dense import DEVICE, close, dense_attention
from tests.kernels.test_plain_attention import READS, Dispatched

LAYERS = 2
LAYER = 1
CAPACITIES = (70, 130, 33)
NAN = float("nan")


def make_cache(capacity, device, kv_heads=2, dim=32, value_dim=None, dtype=torch.float32):
    widths = (dim, value_dim or dim)
    return [
        LayerBuffers(*(torch.randn(1, kv_heads, capacity, width, dtype=dtype, device=device) for width in widths))
        for _ in range(LAYERS)
    ]


def make_caches(device, capacities=CAPACITIES, dtype=torch.float32, kv_heads=2, dim=32, value_dim=None):
    """Addresses of caches in the first of four requests, and the caches."""
    shape = CacheShape(kv_heads, dim, value_dim or dim)
    addresses = CacheAddresses(4, [shape] * LAYERS, torch.device(device), dtype)
    caches = [make_cache(capacity, device, kv_heads, dim, value_dim, dtype) for capacity in capacities]
    addresses.assign(caches)
    return addresses, caches


def padded(rows, bucket):
    """Positions or requests, -1 for the rows at the end that take no part."""
    return torch.nn.functional.pad(rows, (0, bucket - rows.shape[0]), value=-1)


def make_queries(rows, device, heads=4, dim=32, dtype=torch.float32):
    return torch.randn(1, rows, heads, dim, dtype=dtype, device=device).transpose(1, 2)


def poison(caches, positions, request_of_row):
    """NaN in all layers behind the last position of each request, and everywhere in other layers."""
    for request, cache in enumerate(caches):
        row_positions = positions[(request_of_row == request) & (positions >= 0)]
        length = int(row_positions.max()) + 1 if row_positions.numel() else 0
        for layer, (keys, values) in enumerate(cache):
            start = length if layer == LAYER else 0
            keys[:, :, start:] = NAN
            values[:, :, start:] = NAN


def expected_rows(caches, q, positions, request_of_row, **rule):
    """Dense attention of each request's rows over its own cache; zeros for padded rows."""
    value_dim = caches[0][LAYER].values.shape[3]
    out = torch.zeros(*q.shape[:3], value_dim, dtype=torch.float64, device=q.device)
    for request, cache in enumerate(caches):
        rows = ((request_of_row == request) & (positions >= 0)).nonzero()[:, 0]
        if rows.numel():
            length = int(positions[rows].max()) + 1
            visible = [states[:, :, :length] for states in cache[LAYER]]
            out[:, :, rows] = dense_attention(q[:, :, rows], *visible, positions[rows], **rule).out
    return out


def attend(addresses, q, positions, request_of_row, backend="triton", splits=None, **options):
    """Both results; with `splits` the keys are cut into so many parts, however few they are."""
    with pytest.MonkeyPatch.context() as patching:
        if splits is not None:
            patching.setattr(kernels, "split_count", lambda *_: splits)
        return attend_rows(addresses, LAYER, q, positions, request_of_row, most_keys=256, backend=backend, **options)


def check(addresses, caches, q, positions, request_of_row, backend, splits=None, **rule):
    expected = expected_rows(caches, q, positions, request_of_row, **rule)
    poison(caches, positions, request_of_row)
    out, _ = attend(addresses, q, positions, request_of_row, backend, splits, **rule)
    assert out.dtype == q.dtype
    assert out.transpose(1, 2).is_contiguous()
    close(out, expected)
    assert not out[:, :, positions < 0].any()


def decoding_rows(device):
    """Next tokens of three prompts, and two padded rows."""
    positions = torch.tensor([69, -1, 5, 129, -1], device=device)
    request_of_row = torch.tensor([0, 0, 2, 1, -1], device=device)
    return positions, request_of_row


def scattered_rows(device, rows=13, bucket=18, request=1, keys=130):
    """Scattered rows of one prompt, and padded ones."""
    picks = torch.randperm(keys)[:rows].sort().values
    positions = padded(picks, bucket).to(device)
    request_of_row = padded(torch.full((rows,), request), bucket).to(device)
    return positions, request_of_row


ROWS = {"decoding": decoding_rows, "scattered": scattered_rows}


def make(kind, device, heads=4, dim=32, dtype=torch.float32, **shape):
    """Caches, queries of rows over them, and where these rows stand."""
    addresses, caches = make_caches(device, dim=dim, dtype=dtype, **shape)
    positions, request_of_row = ROWS[kind](device)
    return addresses, caches, make_queries(len(positions), device, heads, dim, dtype), positions, request_of_row


SHAPES = [
    *({"heads": 2 * group, "dim": 16} for group in (1, 7, 8)),
    *({"heads": 8, "dim": dim} for dim in (8, 64, 80, 128)),
    *({"heads": 2, "dim": dim, "value_dim": value} for dim, value in ((192, 128), (48, 16), (16, 80))),
    *({"heads": 8, "dtype": dtype} for dtype in (torch.float16, torch.bfloat16)),
    *({"heads": heads, "kv_heads": kv_heads, "dim": 16} for heads, kv_heads in ((3, 3), (20, 1))),
]
RULES = [
    {},
    *({"window": window} for window in (1, 40, 1000)),
    {"scale": 0.7},
    {"softcap": 2.0, "window": 9},
    {"window": 20, "sinks": torch.linspace(-2, 1, 4, device=DEVICE)},
]


@pytest.mark.parametrize(("kind", "splits"), [("decoding", 3), ("scattered", 1)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, kind, splits, backend, device, poisoned):
    check(*make(kind, device, **shape), backend, splits)


# More parts than there are keys to share: sixteen for every rule, and as many as there may be for some.
PARTS = [("decoding", 1), ("scattered", 3), ("decoding", 16)]
MOST_PARTS = [
    ({}, "decoding", 128),
    ({"window": 20, "sinks": torch.linspace(-2, 1, 4, device=DEVICE)}, "decoding", 128),
]


@pytest.mark.parametrize(
    ("rule", "kind", "splits"), [*((rule, *parts) for rule in RULES for parts in PARTS), *MOST_PARTS], ids=str
)
def test_rules_and_parts(rule, kind, splits, backend, device, poisoned):
    check(*make(kind, device), backend, splits, **rule)


def test_rows_of_one_prompt_in_any_order(backend, device):
    addresses, caches, q, positions, request_of_row = make("scattered", device)
    shuffled = torch.randperm(18, device=device)
    check(addresses, caches, q, positions[shuffled], request_of_row[shuffled], backend, splits=2)


@pytest.mark.parametrize("kind", ROWS)
def test_int32_rows_of_any_stride(kind, backend, device):
    addresses, caches, q, positions, request_of_row = make(kind, device)
    narrow = [torch.stack((rows, rows + 1), 1).int()[:, 0] for rows in (positions, request_of_row)]
    fresh = make_cache(len(positions), device)[0]
    expected = written(caches, *fresh, positions, request_of_row)
    write_rows(addresses, LAYER, *fresh, *narrow, backend=backend)
    assert all_equal(caches, expected)
    out, _ = attend(addresses, q, *narrow, backend)
    assert torch.equal(out, attend(addresses, q, positions, request_of_row, backend)[0])


def test_mass_of_int32_rows_of_any_stride(backend, device):
    addresses, _ = make_caches(device)
    positions = padded(torch.arange(40, 53), 18).to(device)
    narrow = torch.stack((positions, positions + 1), 1).int()[:, 0]
    q = make_queries(18, device)
    _, lse = attend(addresses, q, positions, torch.zeros_like(positions), backend)
    options = {"most_keys": 64, "backend": backend}
    expected = mass_rows(addresses, LAYER, q, positions, lse, **options)
    assert torch.equal(mass_rows(addresses, LAYER, q, narrow, lse, **options), expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_before_every_window_are_never_read(splits, backend, device):
    addresses, caches = make_caches(device)
    for states in caches[1][LAYER]:
        states[:, :, :80] = NAN
    positions = torch.arange(95, 113, device=device)
    request_of_row = torch.ones(18, dtype=torch.int64, device=device)
    out, _ = attend(addresses, make_queries(18, device), positions, request_of_row, backend, splits, window=16)
    assert out.isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "request_of_all"), [(4, -1), (18, 0)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_padded_rows_alone_are_zeros_and_give_no_mass(
    rows, request_of_all, splits, with_sinks, backend, device, poisoned
):
    addresses, _ = make_caches(device)
    nowhere = torch.full((rows,), -1, device=device)
    request_of_row = torch.full_like(nowhere, request_of_all)
    sinks = torch.randn(4, device=device) if with_sinks else None
    q = torch.full_like(make_queries(rows, device), NAN)
    out, lse = attend(addresses, q, nowhere, request_of_row, backend, splits, sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
    assert not mass_rows(addresses, LAYER, q, nowhere, lse, most_keys=70, backend=backend).any()


@pytest.mark.parametrize(
    ("shape", "rule", "peak"),
    [
        *(({}, rule, False) for rule in RULES),
        *((shape, {}, True) for shape in ({}, {"dim": 80}, {"dim": 192}, {"dtype": torch.bfloat16})),
        ({}, RULES[-1], True),
    ],
    ids=str,
)
def test_attention_that_keys_receive(shape, rule, peak, backend, device, poisoned):
    addresses, caches = make_caches(device, **shape)
    positions = padded(torch.tensor([0, *range(41, 63)]), 64).to(device)
    first = torch.zeros_like(positions)
    q = make_queries(64, device, **shape)
    visible = [states[:, :, :63] for states in caches[0][LAYER]]
    weights = dense_attention(q[:, :, :23], *visible, positions[:23], **rule).weights[0]
    poison(caches, positions, first)
    _, lse = attend(addresses, q, positions, first, backend, **rule)
    options = {name: value for name, value in rule.items() if name != "sinks"}
    masses = mass_rows(addresses, LAYER, q, positions, lse, most_keys=300, peak=peak, backend=backend, **options)
    kinds = torch.stack((weights.amax(1), weights[:, -1]) if peak else (weights.sum(1),))
    close(masses[..., :63], kinds, shape.get("dtype", torch.float32))
    assert masses.shape == (1 + peak, 4, 300)
    assert not masses[..., 63:].any()


def copies(caches):
    return [[LayerBuffers(*map(torch.clone, layer)) for layer in cache] for cache in caches]


def written(caches, keys, values, positions, request_of_row):
    """The caches with these rows in them."""
    expected = copies(caches)
    for row, (position, request) in enumerate(zip(positions.tolist(), request_of_row.tolist(), strict=True)):
        if position >= 0:
            expected[request][LAYER].keys[:, :, position] = keys[:, :, row]
            expected[request][LAYER].values[:, :, position] = values[:, :, row]
    return expected


def all_equal(caches, expected):
    states = [(x, y) for pair in zip(caches, expected, strict=True) for x, y in zip(*pair, strict=True)]
    return all(torch.equal(x, y) for layers in states for x, y in zip(*layers, strict=True))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    "shape", [{"dim": 80, "value_dim": 16}, {"kv_heads": 9, "dim": 256}, {"dtype": torch.bfloat16}], ids=str
)
def test_written_rows(shape, kind, backend, device):
    addresses, caches, _, positions, request_of_row = make(kind, device, **shape)
    fresh = make_cache(len(positions), device, **shape)[0]
    keys, values = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in fresh)
    expected = written(caches, keys, values, positions, request_of_row)
    write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend=backend)
    assert all_equal(caches, expected)


class Replay:
    """A CUDA graph of a call; on a CPU the call's launches, repeated with the very same arguments."""

    def __init__(self, call, device):
        if device == "cuda":
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.output = call()
            self.run = graph.replay
            return
        self.launches = []
        from blend_kernels.attention_kernel import merge_parts

        with ExitStack() as stack:
            for kernel in (kernels.write_row, kernels.attend_addressed, merge_parts):
                stack.enter_context(patch.object(kernel, "run", partial(self._record, kernel.run)))
            self.output = call()
        self.run = lambda: [launch() for launch in self.launches]

    def _record(self, run, *args, **kwargs):
        self.launches.append(partial(run, *args, **kwargs))
        return run(*args, **kwargs)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("splits", [1, 3])
def test_one_capture_serves_other_rows_and_other_caches(splits, kind, device, poisoned):
    addresses, caches, q, positions, request_of_row = make(kind, device)
    keys, values = torch.randn(2, 1, 2, len(positions), 32, device=device)

    def step():
        write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend="triton")
        return attend(addresses, q, positions, request_of_row, splits=splits)[0]

    replay = Replay(step, device)
    for capacities in ((90, 110, 40), (71, 130, 34)):
        caches = [make_cache(capacity, device) for capacity in capacities]
        addresses.assign(caches)
        scattered, _ = scattered_rows(device, keys=capacities[1])
        positions.copy_(torch.tensor([32, -1, -1, 99, 7]) if kind == "decoding" else scattered)
        if kind == "decoding":
            positions[4] = -1  # of no request
        for tensor in (q, keys, values):
            tensor.normal_()
        expected = written(caches, keys, values, positions, request_of_row)
        replay.run()
        assert all_equal(caches, expected)
        close(replay.output, expected_rows(caches, q, positions, request_of_row))


@pytest.mark.parametrize("kind", ROWS)
def test_the_host_reads_no_device_value(kind, device):
    addresses, _, q, positions, request_of_row = make(kind, device)
    keys, values = torch.randn(2, 1, 2, len(positions), 32, device=device)
    with Dispatched() as dispatched:
        write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend="triton")
        _, lse = attend(addresses, q, positions, request_of_row, splits=2)
        mass_rows(addresses, LAYER, q, positions, lse, most_keys=64, backend="triton")
    assert not {*dispatched.names} & {*READS}


def test_the_table_is_copied_only_when_caches_change(device):
    addresses, caches = make_caches(device)
    with patch.object(torch.Tensor, "copy_", side_effect=AssertionError("copied")):
        addresses.assign(caches)
        addresses.assign(caches[:1])
        with pytest.raises(AssertionError, match="copied"):
            addresses.assign([make_cache(80, device)])


def test_no_rows(backend, device):
    addresses, caches = make_caches(device)
    untouched = copies(caches)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    fresh = torch.empty(1, 2, 0, 32, device=device)
    write_rows(addresses, LAYER, fresh, fresh, nothing, nothing, backend=backend)
    assert all_equal(caches, untouched)
    q = make_queries(0, device)
    out, lse = attend(addresses, q, nothing, nothing, backend)
    assert (out.shape, lse.shape) == ((1, 4, 0, 32), (1, 4, 0))
    masses = mass_rows(addresses, LAYER, q, nothing, lse, most_keys=70, peak=True, backend=backend)
    assert torch.equal(masses, torch.zeros(2, 4, 70, device=device))


def test_a_cache_that_takes_the_place_of_another(backend, device):
    addresses, caches, q, positions, request_of_row = make("decoding", device)
    before, _ = attend(addresses, q, positions, request_of_row, backend)
    replaced = [make_cache(80, device), *caches[1:]]
    addresses.assign(replaced[:1])
    out, _ = attend(addresses, q, positions, request_of_row, backend)
    close(out, expected_rows(replaced, q, positions, request_of_row))
    assert not torch.equal(out[:, :, 0], before[:, :, 0])


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rule", "other"), [({}, 2), ({"softcap": 3.0, "window": 20}, 2), ({}, 3)], ids=str)
def test_rows_of_two_prompts_in_one_tile_are_nan_rather_than_wrong(rule, other, splits, with_sinks, device, poisoned):
    """Rows 0 to 2 are of request 1 and stand last; all others are of request 2, or of 3, which has no cache."""
    addresses, caches = make_caches(device)
    row = torch.arange(32, device=device)
    positions = torch.where(row < 3, row + 60, row)
    request_of_row = torch.where(row < 3, 1, other)
    rule = {**rule, "sinks": torch.randn(4, device=device) if with_sinks else None}
    q = make_queries(32, device)
    expected = expected_rows(caches, q, positions, request_of_row, **rule)
    poison(caches, positions, request_of_row)
    out, lse = attend(addresses, q, positions, request_of_row, splits=splits, **rule)
    assert out[:, :, :3].isnan().all()
    assert lse[:, :, :3].isnan().all()
    close(out[:, :, 3:], expected[:, :, 3:])


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_without_a_cache_or_past_its_capacity(splits, device, poisoned):
    addresses, caches = make_caches(device)
    positions = torch.tensor([3, 3, 3, 3, 33], device=device)
    request_of_row = torch.tensor([3, 3, 4, -1, 2], device=device)
    keys, values = torch.randn(2, 1, 2, 5, 32, device=device)
    untouched = copies(caches)
    write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend="triton")
    assert all_equal(caches, untouched)
    q = make_queries(5, device)
    out, _ = attend(addresses, q, positions, request_of_row, splits=splits)
    close(out, expected_rows(caches, q, positions.clamp(max=32), request_of_row))


def test_layers_of_different_shapes(backend, device):
    shapes = (CacheShape(2, 32, 32), CacheShape(1, 16, 16))
    addresses = CacheAddresses(1, shapes, torch.device(device), torch.float32)
    layers = [
        LayerBuffers(*torch.randn(2, 1, shape.kv_heads, 40, shape.head_dim, device=device).unbind()) for shape in shapes
    ]
    addresses.assign([layers])
    positions = torch.tensor([39], device=device)
    request_of_row = torch.zeros(1, dtype=torch.int64, device=device)
    for layer, shape in enumerate(shapes):
        q = make_queries(1, device, dim=shape.head_dim)
        out, _ = attend_rows(addresses, layer, q, positions, request_of_row, most_keys=64, backend=backend)
        close(out, dense_attention(q, *layers[layer], positions).out)
