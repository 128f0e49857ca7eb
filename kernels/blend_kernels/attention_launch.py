"""Launches the attention kernels: shapes, strides, grid, split of the keys. Arguments are checked by the public op."""

from __future__ import annotations

import os
from typing import Any

import torch

from blend_kernels.attention_kernel import attend_tile
from blend_kernels.checks import Packed, Rule
from blend_kernels.combine_kernel import combine_splits
from blend_kernels.descriptors import key_descriptor
from blend_kernels.tiles import Tile, chunks
from blend_kernels.work import Work, join_sinks

LOG2E = 1.4426950408889634
_MOST_SPLITS = 64
# Keys of one split at least: below this the merge costs more than the split saves.
_LEAST_SPLIT = 256


def launch_attention(
    work: Work, tile: Tile, splits: int, want_lse: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run the kernel with this tile, keys cut into `splits`; output and log-sum-exp where asked."""
    q = work.q
    out = None if work.v is None else work.empty_out()
    lse = work.empty_lse() if want_lse or work.v is None else None
    if splits == 1:
        _launch(work, tile, 1, None if out is None else out[None], None if lse is None else lse[None])
        return out, lse
    part_lse = torch.empty(splits, *q.shape[:3], dtype=torch.float32, device=q.device)
    part = None if out is None else torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
    _launch(work._replace(sinks=None), tile, splits, part, part_lse)
    if out is None or part is None:
        return None, join_sinks(torch.logsumexp(part_lse, 0), work.sinks)
    _combine(work, part, part_lse, out, lse)
    return out, lse


def row_tiles(work: Work, tile: Tile) -> int:
    """Tiles of folded rows per batch entry and KV head; packed requests may each need one more."""
    extra = 0 if work.packed is None else work.packed.rows.shape[0] - 1
    return -(-work.q.shape[2] * work.group // tile.rows) + extra


def split_count(work: Work, tile: Tile) -> int:
    """Into how many parts the keys are cut so that few rows still fill the GPU; 1 when rows alone do."""
    programs = row_tiles(work, tile) * work.q.shape[0] * work.k.shape[1]
    wanted = 2 * multiprocessors(work.q.device)
    if 2 * programs > wanted:
        return 1
    return max(1, min(_MOST_SPLITS, wanted // programs, _keys_of_a_tile(work) // _LEAST_SPLIT))


def _keys_of_a_tile(work: Work) -> int:
    """About how many keys a tile sees, from shapes alone: the window bounds it only where each request has one row."""
    requests = 1 if work.packed is None else work.packed.rows.shape[0] - 1
    keys = work.k.shape[2] // requests
    return keys if work.rule.window is None or work.q.shape[2] > requests else min(keys, work.rule.window)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on a CPU, where the interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launch(work: Work, tile: Tile, splits: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    q, k, v, rule = work.q, work.k, work.k if work.v is None else work.v, work.rule
    batch, _, rows, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    k_desc, v_desc = (key_descriptor(x, tile) for x in (k, v))
    tma = k_desc is not None and v_desc is not None
    positions = work.positions.contiguous().expand(batch, rows)
    first, values = chunks(dim), chunks(work.value_dim)
    target, into = q if out is None else out, q if lse is None else lse
    sinks = q if work.sinks is None else work.sinks.contiguous()
    packed = Packed(q, q) if work.packed is None else Packed(*(lengths.contiguous() for lengths in work.packed))
    requests = 0 if work.packed is None else packed.rows.shape[0] - 1
    scale, cap = softmax_scales(rule)
    attend_tile[(row_tiles(work, tile) * batch * kv_heads, splits)](
        q, k, v, k_desc if tma else None, v_desc if tma else None, positions, sinks, packed.rows, packed.keys, target, into,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], positions.stride(0),
        *(target.stride()[:4] if out is not None else (0, 0, 0, 0)),
        *(into.stride()[:3] if lse is not None else (0, 0, 0)),
        rows, keys, batch, kv_heads, requests, rule.window or 0, scale, cap,
        GROUP=work.group, HEAD_DIM=dim, VALUE_DIM=work.value_dim, M=tile.rows, N=tile.keys,
        D0=first.first, D1=first.second, V0=values.first, V1=values.second, R=_power_of_two(requests),
        EXACT=rule.mode == "exact", WINDOWED=rule.window is not None, CAPPED=rule.softcap is not None,
        SINKS=work.sinks is not None, VALUES=out is not None, LSE=lse is not None, SPLIT=splits > 1, TMA=tma,
        PRECISION=precision(q.dtype), num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip


def softmax_scales(rule: Rule) -> tuple[float, float]:
    """The kernel's `scale` and `cap`, in units of log 2: see `attend_keys`."""
    if rule.softcap is None:
        return rule.scale * LOG2E, 0.0
    return 2.0 * rule.scale / rule.softcap * LOG2E, rule.softcap * LOG2E


def precision(dtype: torch.dtype) -> str:
    """Matrix products of fp32 run as three tf32 products, which keeps 21 bits; of half precision as they are."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _power_of_two(n: int) -> int:
    return 0 if n == 0 else 1 << (n - 1).bit_length()


def _combine(
    work: Work, part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    batch, heads, rows, dim = out.shape
    into: Any = out if lse is None else lse
    sinks = out if work.sinks is None else work.sinks.contiguous()
    combine_splits[(rows, batch * heads)](
        part, part_lse, sinks, out, into,
        *part.stride()[:4], *part_lse.stride()[:3], *out.stride()[:3],
        *(into.stride()[:2] if lse is not None else (0, 0)), heads, part.shape[0],
        VALUE_DIM=dim, V=max(16, _power_of_two(dim)), S=max(2, _power_of_two(part.shape[0])),
        SINKS=work.sinks is not None, LSE=lse is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
