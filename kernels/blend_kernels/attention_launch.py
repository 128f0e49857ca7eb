"""Launches the attention kernels: tile, split of the keys, descriptors, shapes, strides, grid.

The public op has checked the arguments.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blend_kernels.attention_kernel import attend_tile, combine_splits
from blend_kernels.checks import Rule, Work
from blend_kernels.tiles import MOST_LINES, Kind, Machine, Shape, Tile, best_tile, chunks, split_count

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


def attend_values(work: Work, want_lse: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the latter is unset unless wanted."""
    tile = choose_tile(work)
    out, lse = launch_attention(work, tile, splits_of(work, tile), want_lse)
    assert out is not None
    return out, out.new_empty(0) if lse is None else lse


def attend_scores(work: Work) -> Tensor:
    """The log-sum-exp alone, without a product with the values."""
    work = work._replace(v=None)
    tile = choose_tile(work)
    _, lse = launch_attention(work, tile, splits_of(work, tile), True)
    assert lse is not None
    return lse


def launch_attention(work: Work, tile: Tile, splits: int, want_lse: bool) -> tuple[Tensor | None, Tensor | None]:
    """Run the kernel with this tile and keys cut into `splits`. Writes output and log-sum-exp as requested."""
    q = work.q
    out = None if work.v is None else work.empty_out()
    lse = work.empty_lse() if want_lse or work.v is None else None
    if splits == 1:
        only_out = None if out is None else out[None]
        only_lse = None if lse is None else lse[None]
        _launch(work, tile, 1, only_out, only_lse)
        return out, lse
    part_lse = torch.empty(splits, *q.shape[:3], dtype=torch.float32, device=q.device)
    part = None if out is None else torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
    _launch(work._replace(sinks=None), tile, splits, part, part_lse)
    combine_parts(work, part, part_lse, out, lse)
    return out, lse


def _launch(
    work: Work,
    tile: Tile,
    splits: int,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    q = work.q
    k = work.k
    v = work.values
    rule = work.rule
    batch, _, rows, dim = q.shape
    _, kv_heads, keys, _ = k.shape
    tma = tile.tma and takes_tma(k) and takes_tma(v)
    k_descriptor = key_descriptor(k, tile.keys) if tma else None
    v_descriptor = key_descriptor(v, tile.keys) if tma else None
    key_chunks = chunks(dim)
    value_chunks = chunks(work.value_dim)
    scale, cap = softmax_scales(rule)
    # any tensor stands in the place of one that there is not
    positions = q if work.positions is None else work.positions.contiguous()
    position_stride = rows if positions.ndim == 2 else 0
    sinks = q if work.sinks is None else work.sinks.contiguous()
    out_strides = (0, 0, 0, 0) if out is None else out.stride()[:4]
    lse_strides = (0, 0, 0) if lse is None else lse.stride()[:3]
    attend_tile[(row_tiles(work, tile) * batch * kv_heads, splits)](
        q, k, v, k_descriptor, v_descriptor, positions, sinks, q if out is None else out, q if lse is None else lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], position_stride, *out_strides, *lse_strides,
        rows, keys, batch, kv_heads, rule.window or 0, scale, cap,
        GROUP=work.group, HEAD_DIM=dim, VALUE_DIM=work.value_dim, M=tile.rows, N=tile.keys, RAGGED=tile.ragged,
        D0=key_chunks.first, D1=key_chunks.second, V0=value_chunks.first, V1=value_chunks.second,
        EXACT=rule.mode == "exact", WINDOWED=rule.window is not None, CAPPED=rule.softcap is not None,
        SINKS=work.sinks is not None, VALUES=out is not None, LSE=lse is not None, SPLIT=splits > 1, TMA=tma,
        PRECISION=precision(q.dtype), num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip


def combine_parts(
    work: Work,
    part: Tensor | None,
    part_lse: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Merge the partial outputs of split keys, and their log-sum-exp, into `out` and `lse`."""
    splits, batch, heads, rows = part_lse.shape
    splits_padded = power_of_two(splits)
    width = max(16, power_of_two(work.value_dim))
    # any tensor stands in the place of one that there is not
    sinks = part_lse if work.sinks is None else work.sinks.contiguous()
    combine_splits[(batch * heads * rows,)](
        part_lse if part is None else part, part_lse, sinks,
        part_lse if out is None else out, part_lse if lse is None else lse, rows, heads, splits,
        VALUE_DIM=work.value_dim, V=width, S=splits_padded, AT_ONCE=min(splits_padded, _MERGED_AT_ONCE // width),
        SINKS=work.sinks is not None, VALUES=out is not None, LSE=lse is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def row_tiles(work: Work, tile: Tile) -> int:
    """Tiles of folded rows per batch entry and KV head."""
    return -(-work.q.shape[2] * work.group // tile.rows)


def splits_of(work: Work, tile: Tile) -> int:
    """Into how many parts the keys are cut, so that few rows still fill the GPU."""
    programs = row_tiles(work, tile) * work.q.shape[0] * work.k.shape[1]
    keys = work.k.shape[2]
    if work.rule.window is not None and work.q.shape[2] == 1:
        keys = min(keys, work.rule.window)
    return split_count(programs, keys, tile, multiprocessors(work.q.device))


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on a CPU, where the interpreter runs programs in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_tile(work: Work) -> Tile:
    """The tile that `python -m blend_kernels.tune` found fastest for this kind of work here, else the best guess."""
    return best_tile(machine(work.q.device), kind_of(work))


def kind_of(work: Work) -> Kind:
    """The kind of work of a call; folded rows count in powers of two."""
    q = work.q
    lines = min(MOST_LINES, power_of_two(q.shape[2] * work.group))
    tma = takes_tma(work.k) and takes_tma(work.values)
    shape = Shape(q.dtype, q.shape[3], work.value_dim, lines, work.rule.window is not None, tma)
    return Kind(shape, work.group, work.rule.softcap is not None)


@cache
def machine(device: torch.device) -> Machine:
    """The GPU's name, its major compute capability and Triton's version; a CPU interprets tiles of compute capability 8."""
    import triton

    if device.type != "cuda":
        return Machine(device.type, 8, triton.__version__)
    major = torch.cuda.get_device_capability(device)[0]
    return Machine(torch.cuda.get_device_name(device), major, triton.__version__)


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
