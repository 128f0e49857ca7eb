import pytest
import torch

from blend_kernels import Positions, attention_mass, selective_attention
from tests.kernels.dense import DEVICE, close, dense_attention


def make(device, heads=4, kv_heads=2, dim=32, value_dim=None, keys=63, rows=17, batch=1, dtype=torch.float32):
    """q as a decoder has it, k and v as views of a bigger buffer whose unused end holds NaN."""
    q = torch.randn(batch, rows, heads, dim, dtype=dtype, device=device).transpose(1, 2)
    k, v = (
        torch.full((batch, kv_heads, keys + 9, d), float("nan"), dtype=dtype, device=device)[:, :, :keys]
        for d in (dim, value_dim or dim)
    )
    return q, k.normal_(), v.normal_()


def scattered(rows, keys, device):
    return torch.randperm(keys)[:rows].sort().values.to(device)


def attention(q, k, v, positions, **options):
    return selective_attention(q, k, v, Positions(positions), **options)


def check(q, k, v, positions, backend=None, **rule):
    """Against dense attention."""
    out, lse = attention(q, k, v, positions, backend=backend, **rule)
    expected = dense_attention(q, k, v, positions, **rule)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    assert out.transpose(1, 2).is_contiguous()
    close(out, expected.out)
    close(lse, expected.lse, q.dtype)


SHAPES = [
    *({"rows": min(rows, keys), "keys": keys} for rows in (1, 17, 63) for keys in (1, 17, 63, 129)),
    *({"rows": rows, "keys": keys, "dim": 16} for rows in (63, 129) for keys in (129, 200)),
    *({"heads": heads, "kv_heads": kv, "dim": 16, "rows": 9} for heads, kv in ((3, 3), (14, 2), (5, 1), (32, 8))),
    *({"dim": dim, "rows": 7} for dim in (32, 64, 80, 96, 112, 128, 256)),
    *({"dim": dim, "value_dim": value, "rows": 7} for dim, value in ((192, 128), (48, 16), (16, 80))),
    *({"dtype": dtype, "rows": 30, "keys": 129} for dtype in (torch.float16, torch.bfloat16)),
    {"batch": 2},
]
RULES = [
    *({"window": window} for window in (1, 5, 40, 1000)),
    *({"softcap": 3.0}, {"scale": 0.7}, {"softcap": 2.0, "window": 9}),
    {"window": 20, "sinks": torch.linspace(-2, 1, 8, device=DEVICE)[::2]},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, backend, device, poisoned):
    check(*make(device, **shape), scattered(shape.get("rows", 17), shape.get("keys", 63), device), backend)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules(rule, backend, device):
    check(*make(device, keys=129, rows=40), scattered(40, 129, device), backend, **rule)


def test_repeated_positions_of_any_stride(backend, device):
    repeated = torch.tensor([3, 0, 3, 0, 3, 0, 40, 0], device=device)[::2]
    check(*make(device, rows=4), repeated, backend)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_int32_positions(softcap, backend, device):
    q, k, v = make(device, keys=129, rows=40)
    positions = scattered(40, 129, device)
    check(q, k, v, positions.int(), backend, window=30, softcap=softcap)
    masses = [attention_mass(q, k, Positions(rows), backend=backend) for rows in (positions, positions.int())]
    assert torch.equal(*masses)


def test_keys_are_plain_causal_attention_of_torch(backend, device):
    q, k, v = make(device, heads=4, kv_heads=4, keys=63, rows=63)
    out, _ = attention(q, k, v, torch.arange(63, device=device), backend=backend)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_keys_that_no_row_sees_are_never_read(window, backend, device):
    q, k, v = make(device)
    k[:, :, 41:], v[:, :, 41:] = float("nan"), float("nan")
    if window is not None:
        k[:, :, :20], v[:, :, :20] = float("nan"), float("nan")
    out, _ = attention(q, k, v, torch.arange(24, 41, device=device), window=window, backend=backend)
    assert out.isfinite().all()


def test_runs_are_bit_equal_and_inputs_untouched(backend, device):
    q, k, v = make(device, keys=129)
    before = [x.clone() for x in (q, k, v)]
    positions = scattered(17, 129, device)
    first, _ = attention(q, k, v, positions, backend=backend)
    assert torch.equal(first, attention(q, k, v, positions, backend=backend)[0])
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_the_last_of_positions():
    positions = Positions(torch.tensor([3, 5, 8]))
    assert positions.last(3) is positions
    assert positions.last(2).ends == [5, 8]
    assert positions.last(2) is positions.last(2)


def test_no_rows(backend, device):
    q, k, v = make(device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert attention(q[:, :, :0], k, v, empty, backend=backend)[0].shape == (1, 4, 0, 32)


# Half precision with scores far from zero: they are products of fp32 accuracy, so only inputs and outputs are rounded.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "value_dim", "times", "softcap"),
    [(128, 128, 4, None), (128, 128, 4, 50.0), (192, 128, 4, None), (48, 80, 4, 9.0), (192, 128, 40, None)],
)
def test_large_scores(dtype, dim, value_dim, times, softcap, backend, device):
    """The largest reach 40 * 40 * 192 = 307,200; the range of fp16 ends at 65,504."""
    q, k, v = make(device, dtype=dtype, dim=dim, value_dim=value_dim)
    q, k, positions = times * q, times * k, scattered(17, 63, device)
    out, lse = attention(q, k, v, positions, softcap=softcap, backend=backend)
    expected = dense_attention(q, k, v, positions, softcap=softcap)
    close(out, expected.out)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=2e-3)
