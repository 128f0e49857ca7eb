"""The torch path where its cutting into blocks matters: hundreds of rows, long runs, both layouts of the cache."""

import pytest
import torch

from blend_kernels import selective_attention
from tests.kernels.dense import close, dense_attention

KEYS = 900
PATTERNS = {
    "scattered": lambda: torch.randperm(KEYS)[:150].sort().values,
    "all": lambda: torch.arange(KEYS),
    "suffix": lambda: torch.arange(KEYS - 64, KEYS),
    "chunk starts": lambda: torch.arange(KEYS)[torch.arange(KEYS) % 120 < 16],
    "long run inside": lambda: torch.cat([torch.tensor([3, 50]), torch.arange(200, 500), torch.tensor([640, 899])]),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("keys", [1100, 2051])
def test_few_rows_on_many_threads_cut_the_keys(rows, keys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    q, k, v = (
        torch.randn(1, 6, rows, 16),
        *(torch.randn(1, keys + 50, 2, 16).transpose(1, 2)[:, :, :keys] for _ in "kv"),
    )
    positions = torch.arange(keys - rows, keys)
    out, lse = selective_attention(q, k, v, positions, return_lse=True)
    expected = dense_attention(q, k, v, positions)
    close(out, expected.out)
    close(lse, expected.lse)


RULES = [{}, {"window": 100}, {"window": 700}, {"softcap": 5.0}, {"mode": "bottom-right"}]


@pytest.mark.parametrize(
    ("pattern", "rule", "keys_first"),
    [
        *((pattern, rule, True) for pattern in ("chunk starts", "long run inside") for rule in RULES),
        *((pattern, rule, False) for pattern in PATTERNS for rule in RULES[:2]),
    ],
    ids=str,
)
def test_patterns(pattern, rule, keys_first):
    positions = PATTERNS[pattern]()
    q = torch.randn(2, 6, len(positions), 16)
    shape = (2, KEYS, 2, 16) if keys_first else (2, 2, KEYS, 16)
    k, v = (torch.randn(shape).transpose(1, 2) if keys_first else torch.randn(shape) for _ in range(2))
    out, lse = selective_attention(q, k, v, positions, return_lse=True, **rule)
    expected = dense_attention(q, k, v, positions, **rule)
    close(out, expected.out)
    close(lse, expected.lse)
