"""The attention kernel with tiles and splits that the choice by size would not reach on small inputs."""

import pytest
import torch

from blend_kernels.attention_launch import launch_attention
from blend_kernels.checks import Rule, Work
from blend_kernels.tiles import Tile
from tests.kernels.dense import close, dense_attention
from tests.kernels.test_selective_attention import make, scattered

RULES = [Rule("exact", None, None, 0.2), Rule("exact", 30, None, 0.2), Rule("bottom-right", 50, 4.0, 0.2)]


def run(device, tile, splits, rule, sinks=None, dtype=torch.float32, keys=129, rows=33):
    q, k, v = make(device, keys=keys, rows=rows, dtype=dtype)
    positions = scattered(rows, keys, device)
    out, lse = launch_attention(Work(q, k, v, positions, rule, sinks), tile, splits, True)
    expected = dense_attention(q, k, v, positions, *rule, sinks)
    close(out, expected.out)
    close(lse, expected.lse, dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("tile", "splits"),
    [
        (Tile(16, 16, 4, 1), 1),
        (Tile(64, 16, 4, 1), 1),
        (Tile(16, 64, 4, 1), 1),
        (Tile(32, 16, 4, 1), 2),
        (Tile(32, 16, 4, 1), 7),
        (Tile(16, 128, 4, 1), 1),
    ],
)
def test_tiles_and_splits(device, tile, splits, rule, poisoned):
    run(device, tile, splits, rule, sinks=None if splits == 1 else torch.randn(4, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_descriptors(device, dtype):
    run(device, Tile(32, 16, 4, 1, tma=True), 1, RULES[1], dtype=dtype)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_log_sum_exp_alone_over_splits(with_sinks, device):
    q, k, v = make(device, keys=129)
    positions, sinks = scattered(17, 129, device), torch.randn(4, device=device) if with_sinks else None
    out, lse = launch_attention(Work(q, k, None, positions, RULES[0], sinks), Tile(16, 16, 4, 1), 3, True)
    assert out is None
    close(lse, dense_attention(q, k, v, positions, scale=0.2, sinks=sinks).lse)
