"""Attention over caches whose addresses stand in a table, and writes into them, against dense float64 attention."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blend_kernels.addressed import attend_rows, mass_rows, write_rows
from blend_kernels.cache_addresses import CacheAddresses
from tests.kernels.dense import close, dense_attention

LAYERS = 2
LAYER = 1
CAPACITIES = (70, 130, 33)
NAN = float("nan")


def make_cache(capacity, device, kv_heads=2, dim=32, value_dim=None, dtype=torch.float32):
    """Random keys and values of every layer."""
    keys, values = (
        [torch.randn(1, kv_heads, capacity, width, dtype=dtype, device=device) for _ in range(LAYERS)]
        for width in (dim, value_dim or dim)
    )
    return keys, values


def make_caches(device, capacities=CAPACITIES, requests=4, dtype=torch.float32, **shape):
    """Addresses of caches in the first requests, and the caches."""
    addresses = CacheAddresses(requests, LAYERS, device, dtype)
    caches = [make_cache(capacity, device, dtype=dtype, **shape) for capacity in capacities]
    for request, cache in enumerate(caches):
        addresses.assign(request, *cache)
    addresses.upload()
    return addresses, caches


def padded(rows, bucket):
    """Positions or requests, -1 for the rows at the end that take no part."""
    return torch.nn.functional.pad(rows, (0, bucket - rows.shape[0]), value=-1)


def make_queries(rows, device, heads=4, dim=32, dtype=torch.float32):
    """Queries as a decoder has them."""
    return torch.randn(1, rows, heads, dim, dtype=dtype, device=device).transpose(1, 2)


def poison(caches, positions, request_of_row):
    """NaN in all layers behind the last position of each request, and everywhere in other layers."""
    for request, (keys, values) in enumerate(caches):
        row_positions = positions[(request_of_row == request) & (positions >= 0)]
        length = int(row_positions.max()) + 1 if row_positions.numel() else 0
        for layer in range(LAYERS):
            start = length if layer == LAYER else 0
            keys[layer][:, :, start:] = NAN
            values[layer][:, :, start:] = NAN


def expected_rows(caches, q, positions, request_of_row, value_dim, **rule):
    """Dense attention of each request's rows over its own cache; zeros for padded rows."""
    out = torch.zeros(*q.shape[:3], value_dim, dtype=torch.float64, device=q.device)
    for request, (keys, values) in enumerate(caches):
        rows = ((request_of_row == request) & (positions >= 0)).nonzero()[:, 0]
        if rows.numel():
            length = int(positions[rows].max()) + 1
            visible_keys = keys[LAYER][:, :, :length]
            visible_values = values[LAYER][:, :, :length]
            out[:, :, rows] = dense_attention(q[:, :, rows], visible_keys, visible_values, positions[rows], **rule).out
    return out


def attend(addresses, q, positions, request_of_row, backend="triton", most_keys=256, **options):
    return attend_rows(addresses, LAYER, q, positions, request_of_row, most_keys=most_keys, backend=backend, **options)


def check(addresses, caches, q, positions, request_of_row, backend, splits=None, most_keys=256, **rule):
    value_dim = caches[0][1][LAYER].shape[3]
    expected = expected_rows(caches, q, positions, request_of_row, value_dim, **rule)
    poison(caches, positions, request_of_row)
    out = attend(addresses, q, positions, request_of_row, splits=splits, most_keys=most_keys, backend=backend, **rule)
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
SHAPES = [
    *({"heads": 2 * group, "dim": 16} for group in (1, 4, 7, 8)),
    *({"heads": 8, "dim": dim} for dim in (8, 64, 80, 128)),
    *({"heads": 2, "dim": dim, "value_dim": value} for dim, value in ((192, 128), (48, 16), (16, 80))),
    *({"heads": 8, "dtype": dtype} for dtype in (torch.float16, torch.bfloat16)),
    *({"heads": heads, "kv_heads": kv_heads, "dim": 16} for heads, kv_heads in ((3, 3), (20, 1))),
]
WRITTEN_SHAPES = [{"dim": 80, "value_dim": 16}, {"kv_heads": 9, "dim": 256}, {"dtype": torch.bfloat16}]
RULES = [
    {},
    *({"window": window} for window in (1, 5, 40, 1000)),
    {"softcap": 3.0},
    {"scale": 0.7},
    {"softcap": 2.0, "window": 9},
    {"window": 20, "sinks": torch.linspace(-2, 1, 4)},
]


@pytest.mark.parametrize(("kind", "splits"), [("decoding", 3), ("scattered", 1)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, kind, splits, backend, device, poisoned):
    buffer_shape = {name: value for name, value in shape.items() if name != "heads"}
    addresses, caches = make_caches(device, **buffer_shape)
    positions, request_of_row = ROWS[kind](device)
    query_shape = {name: shape[name] for name in ("heads", "dim", "dtype") if name in shape}
    q = make_queries(positions.shape[0], device, **query_shape)
    check(addresses, caches, q, positions, request_of_row, backend, splits)


@pytest.mark.parametrize(("kind", "splits"), [("decoding", 1), ("scattered", 3)])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules(rule, kind, splits, backend, device, poisoned):
    options = {name: value.to(device) if name == "sinks" else value for name, value in rule.items()}
    addresses, caches = make_caches(device)
    positions, request_of_row = ROWS[kind](device)
    q = make_queries(positions.shape[0], device)
    check(addresses, caches, q, positions, request_of_row, backend, splits, **options)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("splits", [None, 2, 11])
def test_any_number_of_parts(splits, kind, backend, device, poisoned):
    addresses, caches = make_caches(device, dim=16)
    positions, request_of_row = ROWS[kind](device)
    q = make_queries(positions.shape[0], device, dim=16)
    check(addresses, caches, q, positions, request_of_row, backend, splits, most_keys=100_000)


def test_as_many_parts_as_there_may_be(backend, device, poisoned):
    addresses, caches = make_caches(device, kv_heads=1, dim=16)
    positions = torch.tensor([129], device=device)
    request_of_row = torch.ones(1, dtype=torch.int64, device=device)
    q = make_queries(1, device, heads=1, dim=16)
    check(addresses, caches, q, positions, request_of_row, backend, splits=1000, most_keys=100_000)


def test_rows_of_one_prompt_in_any_order(backend, device):
    addresses, caches = make_caches(device)
    positions, request_of_row = scattered_rows(device)
    shuffled = torch.randperm(18, device=device)
    q = make_queries(18, device)
    check(addresses, caches, q, positions[shuffled], request_of_row[shuffled], backend, splits=2)


def test_int32_rows_of_any_stride(backend, device):
    addresses, caches = make_caches(device)
    positions, request_of_row = (rows.int().repeat_interleave(2)[::2] for rows in decoding_rows(device))
    check(addresses, caches, make_queries(5, device), positions, request_of_row, backend)


def test_keys_before_every_window_are_never_read(backend, device):
    addresses, caches = make_caches(device)
    keys, values = caches[1]
    keys[LAYER][:, :, :80] = NAN
    values[LAYER][:, :, :80] = NAN
    positions = torch.arange(95, 113, device=device)
    request_of_row = torch.ones(18, dtype=torch.int64, device=device)
    q = make_queries(18, device)
    for splits in (1, 2):
        out = attend(addresses, q, positions, request_of_row, window=16, splits=splits, most_keys=200, backend=backend)
        assert out.isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", [4, 18])
def test_padded_rows_alone_are_zeros_even_with_sinks(rows, splits, backend, device, poisoned):
    addresses, _ = make_caches(device)
    nowhere = torch.full((rows,), -1, device=device)
    sinks = torch.randn(4, device=device)
    q = torch.full_like(make_queries(rows, device), NAN)
    for some_sinks in (None, sinks):
        out = attend(addresses, q, nowhere, nowhere, sinks=some_sinks, splits=splits, most_keys=200, backend=backend)
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    ("shape", "rule", "reduce"),
    [
        *(({}, rule, "sum") for rule in RULES),
        *((shape, {}, "max") for shape in ({}, {"dim": 80}, {"dim": 192}, {"dtype": torch.bfloat16})),
        ({}, RULES[-1], "max"),
    ],
    ids=str,
)
def test_attention_that_keys_receive(shape, rule, reduce, backend, device, poisoned):
    options = {name: value.to(device) if name == "sinks" else value for name, value in rule.items()}
    addresses, caches = make_caches(device, **shape)
    keys, values = caches[0]
    positions = padded(torch.arange(40, 63), 64).to(device)
    first = torch.zeros_like(positions)
    q = make_queries(64, device, **shape)
    weights = dense_attention(
        q[:, :, :23], keys[LAYER][:, :, :63], values[LAYER][:, :, :63], positions[:23], **options
    ).weights[0]
    poison(caches, positions, first)
    _, lse = attend(addresses, q, positions, first, backend, return_lse=True, **options)
    options.pop("sinks", None)
    both = mass_rows(
        addresses, LAYER, q, positions, lse, most_keys=300, reduce=reduce, with_last=True, backend=backend, **options
    )
    assert both.shape == (2, 4, 300)
    dtype = shape.get("dtype", torch.float32)
    close(both[0, :, :63], weights.sum(1) if reduce == "sum" else weights.amax(1), dtype)
    close(both[1, :, :63], weights[:, -1], dtype)
    assert not both[:, :, 63:].any()


def test_keys_that_padded_rows_alone_read_receive_nothing(backend, device, poisoned):
    addresses, _ = make_caches(device)
    nowhere = torch.full((18,), -1, device=device)
    q = make_queries(18, device)
    _, lse = attend(addresses, q, nowhere, torch.zeros_like(nowhere), backend, return_lse=True)
    assert not mass_rows(addresses, LAYER, q, nowhere, lse, most_keys=70, backend=backend).any()


def test_no_rows(backend, device):
    addresses, _ = make_caches(device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    out = attend(addresses, make_queries(0, device), nothing, nothing, most_keys=200, backend=backend)
    assert out.shape == (1, 4, 0, 32)
    write_rows(addresses, LAYER, out[:, :2], out[:, :2], nothing, nothing, backend=backend)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("shape", WRITTEN_SHAPES, ids=str)
def test_writes_change_the_given_rows_alone(shape, kind, backend, device):
    addresses, caches = make_caches(device, **shape)
    positions, request_of_row = ROWS[kind](device)
    rows = positions.shape[0]
    keys, values = (
        buffers[0][:, :, :rows].transpose(1, 2).contiguous() for buffers in make_cache(rows, device, **shape)
    )
    expected = [[[buffer.clone() for buffer in buffers] for buffers in cache] for cache in caches]
    for row, (position, request) in enumerate(zip(positions.tolist(), request_of_row.tolist(), strict=True)):
        if position >= 0:
            expected[request][0][LAYER][:, :, position] = keys[:, row]
            expected[request][1][LAYER][:, :, position] = values[:, row]
    strided = keys.transpose(1, 2), values.transpose(1, 2)
    write_rows(addresses, LAYER, *strided, positions, request_of_row, backend=backend)
    for cache, expected_cache in zip(caches, expected, strict=True):
        for buffers, expected_buffers in zip(cache, expected_cache, strict=True):
            assert all(map(torch.equal, buffers, expected_buffers))


def kernels():
    from blend_kernels.addressed_kernel import attend_addressed, merge_splits, write_row

    return write_row, attend_addressed, merge_splits


class Replay:
    """A CUDA graph of a call; on a CPU the call's launches, repeated with the very same arguments."""

    def __init__(self, call: Callable[[], torch.Tensor], device: str) -> None:
        if device == "cuda":
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.output = call()
            self.run = graph.replay
            return
        self.launches: list[Callable[[], None]] = []
        with ExitStack() as stack:
            for kernel in kernels():
                stack.enter_context(patch.object(kernel, "run", partial(self._record, kernel.run)))
            self.output = call()
        self.run = lambda: [launch() for launch in self.launches]

    def _record(self, run, *args, **kwargs):
        self.launches.append(partial(run, *args, **kwargs))
        return run(*args, **kwargs)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("splits", [1, 3])
def test_one_capture_serves_other_rows_and_other_caches(splits, kind, device, poisoned):
    addresses, caches = make_caches(device)
    positions, request_of_row = ROWS[kind](device)
    rows = positions.shape[0]
    q = make_queries(rows, device)
    keys, values = torch.randn(2, 1, 2, rows, 32, device=device)

    def step():
        write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend="triton")
        return attend(addresses, q, positions, request_of_row, splits=splits)

    replay = Replay(step, device)
    for capacities in ((90, 110, 40), (71, 130, 34)):
        caches = [make_cache(capacity, device) for capacity in capacities]
        for request, cache in enumerate(caches):
            addresses.assign(request, *cache)
        addresses.upload()
        scattered, _ = scattered_rows(device, keys=capacities[1])
        positions.copy_(torch.tensor([32, -1, -1, 99, 7]) if kind == "decoding" else scattered)
        for tensor in (q, keys, values):
            tensor.normal_()
        replay.run()
        for row, (position, request) in enumerate(zip(positions.tolist(), request_of_row.tolist(), strict=True)):
            if position >= 0 and request >= 0:
                assert torch.equal(caches[request][0][LAYER][:, :, position], keys[:, :, row])
                assert torch.equal(caches[request][1][LAYER][:, :, position], values[:, :, row])
        close(replay.output, expected_rows(caches, q, positions, request_of_row, 32))


class Operations(TorchDispatchMode):
    """Notes torch's operations and the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else ()
        self.notes.append((func.name(), shape))
        return result

    @property
    def reads(self):
        words = ("_local_scalar_dense", "nonzero", "unique", "masked", "is_nonzero", "equal")
        return [name for name, _ in self.notes if any(word in name for word in words)]


def host_work(addresses, positions, request_of_row, backend):
    """Torch's operations around the launches, and the launches' grids."""
    rows = positions.shape[0]
    q = make_queries(rows, addresses.table.device)
    keys, values = torch.randn(2, 1, 2, rows, 32, device=addresses.table.device)
    grids = []
    with ExitStack() as stack:
        for kernel in kernels():
            stack.enter_context(patch.object(kernel, "run", lambda *_, grid, **__: grids.append(grid)))
        mode = stack.enter_context(Operations())
        write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend=backend)
        attend(addresses, q, positions, request_of_row, splits=2, backend=backend)
    return mode, grids


@pytest.mark.parametrize("kind", ROWS)
def test_the_host_reads_no_device_value(kind, device):
    addresses, _ = make_caches(device)
    positions, request_of_row = ROWS[kind](device)
    nowhere = torch.full_like(positions, -1)
    operations, grids = host_work(addresses, positions, request_of_row, "triton")
    assert operations.notes
    assert not operations.reads
    operations_nowhere, grids_nowhere = host_work(addresses, nowhere, nowhere, "triton")
    assert operations.notes == operations_nowhere.notes
    assert grids == grids_nowhere
    assert len(grids) == 3
    assert host_work(addresses, positions, request_of_row, "torch")[0].reads


def test_changes_are_visible_from_the_next_upload_on(backend, device):
    addresses, caches = make_caches(device)
    positions, request_of_row = decoding_rows(device)
    q = make_queries(5, device)
    attend_again = partial(attend, addresses, q, positions, request_of_row, backend)
    before = expected_rows(caches, q, positions, request_of_row, 32)
    new_cache = make_cache(80, device)
    addresses.assign(0, *new_cache)
    close(attend_again(), before)
    addresses.upload()
    close(attend_again(), expected_rows([new_cache, *caches[1:]], q, positions, request_of_row, 32))


def test_no_cache_is_kept_alive(device):
    addresses, caches = make_caches(device)
    buffer = ref(caches.pop(1)[0][LAYER])
    assert buffer() is None
    with pytest.raises(ValueError, match="request 1 has no cache"):
        addresses.buffers(1, LAYER)


def test_the_same_buffers_are_not_uploaded_again(device):
    addresses, caches = make_caches(device)
    with patch.object(torch.Tensor, "copy_", side_effect=AssertionError("uploaded")):
        for request, cache in enumerate(caches):
            addresses.assign(request, *cache)
        addresses.upload()
    addresses.assign(0, *make_cache(80, device))
    with (
        pytest.raises(AssertionError, match="uploaded"),
        patch.object(torch.Tensor, "copy_", side_effect=AssertionError("uploaded")),
    ):
        addresses.upload()


def test_rows_without_a_cache(device, poisoned):
    addresses, caches = make_caches(device)
    every_buffer = [buffer for cache in caches for buffers in cache for buffer in buffers]
    untouched = [buffer.clone() for buffer in every_buffer]
    positions = torch.tensor([3, 3, 3, 3], device=device)
    request_of_row = torch.tensor([3, 3, 4, -1], device=device)
    keys, values = torch.randn(2, 1, 2, 4, 32, device=device)
    write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend="triton")
    assert all(map(torch.equal, untouched, every_buffer))
    for splits in (1, 2):
        out = attend(addresses, make_queries(4, device), positions, request_of_row, splits=splits)
        assert torch.equal(out, torch.zeros_like(out))
    for request in (3, 4, -1):
        with pytest.raises(ValueError, match="request"):
            write_rows(
                addresses,
                LAYER,
                keys[:, :, :1],
                values[:, :, :1],
                positions[:1],
                torch.tensor([request], device=device),
                backend="torch",
            )


def test_rows_past_the_capacity(device):
    addresses, caches = make_caches(device)
    inside = [buffer.clone() for buffers in caches[2] for buffer in buffers]
    positions = torch.tensor([33], device=device)
    request_of_row = torch.tensor([2], device=device)
    keys, values = torch.randn(2, 1, 2, 1, 32, device=device)
    q = make_queries(1, device)
    write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend="triton")
    assert all(map(torch.equal, inside, [buffer for buffers in caches[2] for buffer in buffers]))
    out = attend(addresses, q, positions, request_of_row, most_keys=64)
    close(out, expected_rows(caches, q, positions - 1, request_of_row, 32))
    with pytest.raises(ValueError, match=r"\[0, 33\), got 33"):
        write_rows(addresses, LAYER, keys, values, positions, request_of_row, backend="torch")
    with pytest.raises(ValueError, match=r"\[0, 33\), got 33"):
        attend(addresses, q, positions, request_of_row, most_keys=64, backend="torch")


@pytest.mark.parametrize("splits", [1, 3])
def test_two_prompts_in_one_tile_are_nan_rather_than_wrong(splits, device, poisoned):
    addresses, caches = make_caches(device)
    positions = torch.arange(32, device=device)
    request_of_row = (positions < 3).long()
    q = make_queries(32, device)
    expected = expected_rows(caches, q, positions, request_of_row, 32)
    out = attend(addresses, q, positions, request_of_row, splits=splits)
    mixed = out.isnan()
    assert mixed.any()
    close(torch.where(mixed, expected, out.double()).float(), expected)
    close(attend(addresses, q, positions, request_of_row, backend="torch"), expected)


def test_layers_of_different_shapes_and_without_kv(backend, device):
    addresses = CacheAddresses(1, 3, device, torch.float32)
    shapes = ((2, 32), (0, 0), (1, 16))
    buffers = [torch.randn(1, heads, 40, dim, device=device) for heads, dim in shapes]
    values = [buffer.clone() for buffer in buffers]
    addresses.assign(0, buffers, values)
    addresses.upload()
    positions = torch.tensor([39], device=device)
    request_of_row = torch.zeros(1, dtype=torch.int64, device=device)
    for layer in (0, 2):
        q = make_queries(1, device, dim=shapes[layer][1])
        out = attend_rows(addresses, layer, q, positions, request_of_row, most_keys=64, backend=backend)
        close(out, dense_attention(q, buffers[layer], values[layer], positions).out)


def test_wide_heads_go_to_torch(device):
    addresses, caches = make_caches(device, dim=320)
    positions, request_of_row = decoding_rows(device)
    q = make_queries(5, device, dim=320)
    expected = expected_rows(caches, q, positions, request_of_row, 320)
    close(attend(addresses, q, positions, request_of_row, backend=None), expected)
    with pytest.raises(ValueError, match="up to 256"):
        attend(addresses, q, positions, request_of_row)
