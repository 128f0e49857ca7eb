import pytest
import torch

from blend_kernels import selective_attention
from tests.kernels.dense import close, dense_attention


def make(device, heads=4, kv_heads=2, dim=32, value_dim=None, keys=63, rows=17, batch=1, dtype=torch.float32):
    """q as a decoder has it, k and v as views of a bigger buffer whose unused end holds NaN."""
    q = torch.randn(batch, rows, heads, dim, dtype=dtype, device=device).transpose(1, 2)
    k, v = (
        torch.full((batch, kv_heads, keys + 9, d), float("nan"), dtype=dtype, device=device)[:, :, :keys]
        for d in (dim, value_dim or dim)
    )
    return q, k.normal_(), v.normal_()


def scattered(rows, keys, device, batch=None):
    picks = [torch.randperm(keys)[:rows].sort().values for _ in range(batch or 1)]
    return (torch.stack(picks) if batch else picks[0]).to(device)


def check(q, k, v, positions, backend, **rule):
    out, lse = selective_attention(q, k, v, positions, backend=backend, return_lse=True, **rule)
    expected = dense_attention(q, k, v, positions, **rule)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
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
    *({"window": window, "mode": mode} for window in (1, 5, 40, 1000) for mode in ("exact", "bottom-right")),
    *({"softcap": 3.0}, {"scale": 0.7}, {"softcap": 2.0, "window": 9, "mode": "bottom-right"}),
    {"window": 20, "sinks": torch.linspace(-2, 1, 4)},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, backend, device, poisoned):
    positions = scattered(shape.get("rows", 17), shape.get("keys", 63), device, shape.get("batch"))
    check(*make(device, **shape), positions, backend)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules(rule, backend, device):
    given = {name: value.to(device) if name == "sinks" else value for name, value in rule.items()}
    check(*make(device, keys=129, rows=40), scattered(40, 129, device), backend, **given)


def test_repeated_positions(backend, device):
    check(*make(device, rows=4), torch.tensor([3, 3, 3, 40], device=device), backend)


def test_int32_positions(backend, device):
    check(*make(device), scattered(17, 63, device).int(), backend)


def test_positions_and_sinks_of_any_stride(backend, device):
    positions, sinks = scattered(17, 63, device), torch.randn(4, device=device)
    spaced, column = positions.repeat_interleave(2)[::2], torch.stack([positions, positions + 1], 1)[:, 0]
    for strided in (spaced, column):
        check(*make(device), strided, backend, sinks=torch.stack([sinks, sinks + 1], 1)[:, 0])
    of_each = scattered(17, 63, device, batch=2).T.contiguous().T
    assert not of_each.is_contiguous()
    check(*make(device, batch=2), of_each, backend)


@pytest.mark.parametrize("mode", ["exact", "bottom-right"])
def test_all_rows_are_plain_causal_attention(mode, backend, device):
    q, k, v = make(device, rows=129, keys=129, dim=16)
    out = selective_attention(q, k, v, torch.arange(129, device=device), mode=mode, backend=backend)
    causal = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, causal, rtol=0, atol=1e-5)


def test_contiguous_suffix_is_bottom_right_alignment(backend, device):
    q, k, v = make(device, rows=20, keys=129)
    suffix = torch.arange(109, 129, device=device)
    exact = selective_attention(q, k, v, suffix, backend=backend)
    assert torch.equal(exact, selective_attention(q, k, v, suffix, mode="bottom-right", backend=backend))


def test_keys_after_the_last_row_are_never_read(backend, device):
    q, k, v = make(device)
    k[:, :, 41:], v[:, :, 41:] = float("nan"), float("nan")
    positions = torch.arange(24, 41, device=device)
    assert selective_attention(q, k, v, positions, backend=backend).isfinite().all()


def test_keys_before_every_window_are_never_read(backend, device):
    q, k, v = make(device)
    k[:, :, :20], v[:, :, :20] = float("nan"), float("nan")
    positions = torch.arange(24, 41, device=device)
    assert selective_attention(q, k, v, positions, window=5, backend=backend).isfinite().all()


def test_runs_are_bit_equal_and_inputs_untouched(backend, device):
    q, k, v = make(device, keys=129)
    before = [x.clone() for x in (q, k, v)]
    positions = scattered(17, 129, device)
    first = selective_attention(q, k, v, positions, backend=backend)
    assert torch.equal(first, selective_attention(q, k, v, positions, backend=backend))
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_no_rows(backend, device):
    q, k, v = make(device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert selective_attention(q[:, :, :0], k, v, empty, backend=backend).shape == (1, 4, 0, 32)


def test_output_is_laid_out_for_the_decoder(backend, device):
    q, k, v = make(device)
    out = selective_attention(q, k, v, scattered(17, 63, device), backend=backend)
    assert out.transpose(1, 2).is_contiguous()


def test_no_batch(backend, device):
    q, k, v = (x[:0] for x in make(device))
    for positions in (scattered(17, 63, device), scattered(17, 63, device, batch=1)[:0]):
        assert selective_attention(q, k, v, positions, backend=backend).shape == (0, 4, 17, 32)
