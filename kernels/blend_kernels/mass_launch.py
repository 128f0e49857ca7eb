"""Launches `attention_mass`: the attention kernel without values for the log-sum-exp, then one program per block of keys."""

from __future__ import annotations

import torch

from blend_kernels.attention_launch import launch_attention, precision, softmax_scales, split_count
from blend_kernels.checks import Reduce
from blend_kernels.mass_kernel import mass_tile
from blend_kernels.tiles import Tile, chunks
from blend_kernels.work import Work

_ROWS, _KEYS = 64, 64


def launch_mass(work: Work, tile: Tile, per_head: bool, reduce: Reduce) -> torch.Tensor:
    """Weights joined over rows, fp32 `[batch, heads, keys]`, or `[batch, kv_heads, keys]` summed over each group."""
    _, lse = launch_attention(work._replace(v=None), tile, split_count(work, tile), True)
    assert lse is not None
    return mass_from_lse(work, lse, per_head, reduce)


def mass_from_lse(work: Work, lse: torch.Tensor, per_head: bool, reduce: Reduce = "sum") -> torch.Tensor:
    """The second pass alone."""
    q, k, rule = work.q, work.k, work.rule
    batch, heads, rows, dim = q.shape
    programs = heads if per_head or reduce == "max" else k.shape[1]  # the peaks of a group's heads are summed
    mass = torch.empty(batch, programs, k.shape[2], dtype=torch.float32, device=q.device)
    positions = work.positions.contiguous().expand(batch, rows)
    scale, cap = softmax_scales(rule)
    first = chunks(dim)
    small = 16 if q.dtype == torch.float32 or dim > 128 else _ROWS
    mass_tile[(-(-k.shape[2] // _KEYS), programs, batch)](
        q, k, lse, positions, mass, *q.stride()[:3], *k.stride()[:3], *lse.stride()[:2], positions.stride(0),
        *mass.stride()[:2], rows, k.shape[2], rule.window or 0, scale, cap,
        GROUP=heads // programs, SHARE=programs // k.shape[1], HEAD_DIM=dim, M=small, N=_KEYS, D0=first.first,
        D1=first.second, EXACT=rule.mode == "exact", WINDOWED=rule.window is not None, CAPPED=rule.softcap is not None,
        PEAK=reduce == "max", PRECISION=precision(q.dtype), num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    return mass
