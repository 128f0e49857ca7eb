import pytest
import torch

from blend_kernels import decode_attention, selective_attention
from tests.kernels.dense import close, dense_attention
from tests.kernels.test_selective_attention import make

SHAPES = [
    *({"keys": keys} for keys in (1, 63, 600)),
    *({"heads": heads, "kv_heads": kv, "dim": 16} for heads, kv in ((3, 3), (14, 2), (5, 1))),
    *({"dtype": dtype, "keys": 129} for dtype in (torch.float16, torch.bfloat16)),
    {"dim": 48, "value_dim": 16},
    {"heads": 32, "kv_heads": 1, "dim": 8, "keys": 8200, "dtype": torch.bfloat16},  # enough pairs for plain products
    {"batch": 2},
]


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        *((shape, rule) for shape in SHAPES for rule in ({}, {"window": 40})),
        *(({"keys": 600}, rule) for rule in ({"window": 1}, {"window": 10_000}, {"scale": 0.7})),
    ],
    ids=str,
)
def test_a_row_sees_all_keys(shape, rule, device, poisoned):
    q, k, v = make(device, rows=1, **shape)
    last = torch.tensor([k.shape[2] - 1], device=device)
    out = decode_attention(q, k, v, **rule)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    close(out, dense_attention(q, k, v, last, **rule).out)
    assert torch.equal(out, selective_attention(q, k, v, last, **rule))


@pytest.mark.parametrize("rule", [{}, {"window": 40}], ids=str)
def test_the_kernel_needs_no_positions(rule, device, poisoned):
    q, k, v = make(device, rows=1, keys=600, heads=14, dim=16)
    out = decode_attention(q, k, v, backend="triton", **rule)
    last = torch.tensor([599], device=device)
    close(out, dense_attention(q, k, v, last, **rule).out)
