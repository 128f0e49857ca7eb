"""Attention in bfloat16 by plain products: only inputs, weights and outputs are rounded, however large the scores."""

import pytest
import torch

from blend_kernels import attention_bfloat16
from blend_kernels.attention_bfloat16 import attend_bfloat16, pays_off
from tests.kernels.dense import dense_attention
from tests.kernels.test_selective_attention import attention, make, scattered

SHAPES = {  # rows, keys: less than a block, several blocks, a last block of one row, all rows
    "few": (17, 63),
    "blocks": (150, 400),
    "one left": (65, 300),
    "all": (130, 130),
}


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "keys"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("times", "scale", "batch", "value_dim"), [(1, 0.125, 1, 64), (6, 0.09, 1, 48), (6, 0.125, 2, 64)]
)
def test_equals_dense_attention_up_to_rounding(rows, keys, times, scale, batch, value_dim):
    shape = {"batch": batch, "rows": rows, "keys": keys, "dim": 64, "value_dim": value_dim}
    q, k, v = make(torch.device("cpu"), dtype=torch.bfloat16, **shape)
    q, k, positions = q * times, k * times, scattered(rows, keys, torch.device("cpu"))
    out, lse = attend_bfloat16(q, k, v, positions, scale)
    expected = dense_attention(q, k, v, positions, scale=scale)
    assert error(out, expected.out) < 2**-8  # outputs and weights are rounded by up to 2^-9 each
    torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=3 * 2**-9)  # three roundings of a weight


@pytest.mark.parametrize("fast", [False, True])
def test_it_is_used_where_the_processor_multiplies_fast_and_there_is_enough_to_do(monkeypatch, fast):
    monkeypatch.setattr(attention_bfloat16, "multiplies_fast", lambda: fast)
    q, k, v = make(torch.device("cpu"), dtype=torch.bfloat16, rows=300, keys=1000, dim=64)
    positions = scattered(300, 1000, torch.device("cpu"))
    assert error(attention(q, k, v, positions)[0], dense_attention(q, k, v, positions).out) < 2**-8
    assert pays_off(q, k) is fast
    assert not pays_off(q[:, :, :1], k)
    assert not pays_off(q.float(), k.float())
