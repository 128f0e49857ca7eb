"""Launches the attention kernel: tile, parts of the keys, descriptors, shapes, strides, grid."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blend_kernels.attention_kernel import attend_tile, merge_parts
from blend_kernels.tiles import Shape, Tile, best_tile, chunks, split_count
from blend_kernels.work import Rule, Work, empty_results

LOG2E = 1.4426950408889634
# Elements of partial outputs that a program of the merge loads at once: 64 registers of each of its 128 threads.
_MERGED_AT_ONCE = 8192


def takes_tma(x: Tensor) -> bool:
    """Whether TMA can load tiles of `[batch, kv_heads, keys, dim]` as a matrix with a row per key slot.

    Row `batch * (s_b / s_n) + head * (s_h / s_n) + key` is that key, so strides must be multiples of the key's. TMA
    requires 16-byte alignment, and a power of two as width.
    """
    batch, heads, _, dim = x.shape
    batch_stride, head_stride, step, _ = x.stride()
    if step < dim or dim < 16 or dim & (dim - 1):
        return False
    if (batch > 1 and batch_stride % step) or (heads > 1 and head_stride % step):
        return False
    return x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0


def key_descriptor(x: Tensor, keys: int) -> Any:
    """Descriptor of tiles of so many keys, at most 256, for a tensor that `takes_tma`."""
    batch, heads, n_keys, dim = x.shape
    batch_stride, head_stride, step, _ = x.stride()
    rows = (batch - 1) * batch_stride // step + (heads - 1) * head_stride // step + n_keys
    return TensorDescriptor(x, [rows, dim], [step, 1], [keys, dim])


def attend_tiles(work: Work) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    q = work.q
    lines = q.shape[2] * work.group
    tma = takes_tma(work.k) and takes_tma(work.v)
    window = work.rule.window
    shape = Shape(q.dtype, q.shape[3], work.value_dim, lines, window is not None, tma)
    tile = best_tile(capability(q.device), shape)
    programs = row_tiles(work, tile) * q.shape[0] * work.k.shape[1]
    keys = work.k.shape[2]
    if window is not None and q.shape[2] == 1:
        keys = min(keys, window)
    splits = split_count(programs, keys, multiprocessors(q.device))
    return launch_attention(work, tile, splits)


def launch_attention(work: Work, tile: Tile, splits: int) -> tuple[Tensor, Tensor]:
    """Run the kernel with this tile and keys cut into `splits`."""

    def launch(sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
        _launch(work._replace(sinks=sinks), tile, splits, out, lse)

    return in_parts(launch, splits, work.q, work.value_dim, work.sinks)


def in_parts(
    launch: Callable[[Tensor | None, Tensor, Tensor], None],
    splits: int,
    q: Tensor,
    value_dim: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of an attention, merged where the keys are cut into parts.

    launch: gets sinks, or None in parts, and the tensors for outputs and log-sum-exps, `[(splits, )batch, rows, heads(, dim)]`.
    """
    out, lse = empty_results(q, value_dim)
    if splits == 1:
        launch(sinks, out, lse)
        return out, lse
    batch, heads, rows, _ = q.shape
    parts = q.new_empty(splits, batch, rows, heads, value_dim, dtype=torch.float32)
    part_lse = q.new_empty(splits, batch, rows, heads, dtype=torch.float32)
    launch(None, parts, part_lse)
    splits_padded = power_of_two(splits)
    width = max(16, power_of_two(value_dim))
    merge_parts[(batch * rows * heads,)](
        parts,
        part_lse,
        q if sinks is None else sinks.contiguous(),
        out,
        lse,
        heads,
        splits,
        VALUE_DIM=value_dim,
        V=width,
        S=splits_padded,
        AT_ONCE=min(splits_padded, _MERGED_AT_ONCE // width),
        SINKS=sinks is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out, lse


def _launch(work: Work, tile: Tile, splits: int, out: Tensor, lse: Tensor) -> None:
    q = work.q
    k = work.k
    v = work.v
    rule = work.rule
    batch, _, rows, _ = q.shape
    _, kv_heads, keys, _ = k.shape
    tma = tile.tma and takes_tma(k) and takes_tma(v)
    k_descriptor = key_descriptor(k, tile.keys) if tma else None
    v_descriptor = key_descriptor(v, tile.keys) if tma else None
    # any tensor stands in the place of one that there is not
    sinks = q if work.sinks is None else work.sinks.contiguous()
    attend_tile[(row_tiles(work, tile) * batch * kv_heads, splits)](
        q,
        k,
        v,
        k_descriptor,
        v_descriptor,
        work.positions.values.contiguous(),
        sinks,
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        rows,
        keys,
        batch,
        kv_heads,
        rule.window or 0,
        *softmax_scales(rule),
        **constants(q, work.group, rule, tile),
        **value_constants(work.value_dim, tile),
        SINKS=work.sinks is not None,
        SPLIT=splits > 1,
        TMA=tma,
    )


def constants(q: Tensor, group: int, rule: Rule, tile: Tile) -> dict[str, Any]:
    """What the kernels know of queries and keys when they are compiled."""
    dim = q.shape[3]
    key_chunks = chunks(dim)
    return {
        "GROUP": group,
        "HEAD_DIM": dim,
        "M": tile.rows,
        "N": tile.keys,
        "D0": key_chunks.first,
        "D1": key_chunks.second,
        "WINDOWED": rule.window is not None,
        "CAPPED": rule.softcap is not None,
        "PRECISION": precision(q.dtype),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }


def value_constants(value_dim: int, tile: Tile) -> dict[str, int]:
    """What kernels that read values know of them when they are compiled."""
    value_chunks = chunks(value_dim)
    return {"VALUE_DIM": value_dim, "V0": value_chunks.first, "V1": value_chunks.second, "RAGGED": tile.ragged}


def row_tiles(work: Work, tile: Tile) -> int:
    """Tiles of folded rows per batch entry and KV head."""
    return -(-work.q.shape[2] * work.group // tile.rows)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on a CPU, where the interpreter runs programs in turn."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: torch.device) -> int:
    """The GPU's major compute capability; a CPU interprets tiles of compute capability 8."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8


def softmax_scales(rule: Rule) -> tuple[float, float]:
    """The kernel's `scale` and `cap`, in units of log 2: see `attend_keys`."""
    if rule.softcap is None:
        return rule.scale * LOG2E, 0.0
    return 2.0 * rule.scale / rule.softcap * LOG2E, rule.softcap * LOG2E


def precision(dtype: torch.dtype) -> str:
    """Precision of matrix products: fp32 runs as three tf32 products, which keeps 21 bits."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    return "tf32x3" if dtype == torch.float32 else "ieee"


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
