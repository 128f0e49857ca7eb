"""A torch without the private op of fused attention on CPUs computes the same."""

import pytest
import torch

from blend_kernels import attention_plain, selective_attention
from tests.kernels.dense import close, dense_attention

RULES = {"plain": {}, "window": {"window": 9}, "scaled": {"scale": 0.3}}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("rows", [1, 40, 120])
def test_the_op_gone_changes_no_result(monkeypatch, rows, rule):
    q = torch.randn(1, 4, rows, 32)
    k, v = torch.randn(2, 1, 2, 120, 32).unbind()
    positions = torch.randperm(120)[:rows].sort().values
    fused = selective_attention(q, k, v, positions, return_lse=True, **rule)

    class Aten:
        def __getattr__(self, name):
            if name == "_scaled_dot_product_flash_attention_for_cpu":
                raise AttributeError(name)
            return getattr(torch.ops.aten_of_before, name)

    monkeypatch.setattr(torch.ops, "aten_of_before", torch.ops.aten, raising=False)
    monkeypatch.setattr(torch.ops, "aten", Aten())
    assert not hasattr(torch.ops.aten, attention_plain.FUSED)
    without = selective_attention(q, k, v, positions, return_lse=True, **rule)
    expected = dense_attention(q, k, v, positions, **rule)
    for got in (fused, without):
        close(got[0], expected.out)
        close(got[1], expected.lse, q.dtype)
