"""Launches the attention kernels: tile, split of the keys, descriptors, shapes, strides, grid.

The public op has checked the arguments.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from blend_kernels.attention_kernel import attend_tile, combine_splits
from blend_kernels.checks import Packed, Rule, Work, join_sinks
from blend_kernels.tiles import Shape, Tile, candidates, choose, chunks


def key_descriptor(x: torch.Tensor, tile: Tile) -> Any:
    """Descriptor of `[batch, kv_heads, keys, dim]` as a matrix with a row per key slot, or None if TMA cannot be used.

    Row `batch * (s_b / s_n) + head * (s_h / s_n) + key` is that key, so strides must be multiples of the key's. TMA
    requires 16-byte alignment, at most 256 rows per tile, and a power of two as width.
    """
    batch, heads, keys, dim = x.shape
    step = x.stride(2)
    outer = x.stride(0) * (batch > 1), x.stride(1) * (heads > 1)
    aligned = x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0
    if not tile.tma or not aligned or step < dim or any(s % step for s in outer) or dim & (dim - 1) or dim < 16:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = (batch - 1) * outer[0] // step + (heads - 1) * outer[1] // step + keys
    return TensorDescriptor(x, [rows, dim], [step, 1], [tile.keys, dim])


LOG2E = 1.4426950408889634
_MOST_SPLITS = 64
# Keys of one split at least: below this the merge costs more than the split saves.
_LEAST_SPLIT = 256


def launch_attention(
    work: Work, tile: Tile, splits: int, want_lse: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run the kernel with this tile and keys cut into `splits`. Writes output and log-sum-exp as requested."""
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
    combine_parts(work, part, part_lse, out, lse)
    return out, lse


def row_tiles(work: Work, tile: Tile) -> int:
    """Tiles of folded rows per batch entry and KV head; packed requests may each need one more."""
    extra = 0 if work.packed is None else work.packed.rows.shape[0] - 1
    return -(-work.q.shape[2] * work.group // tile.rows) + extra


def split_count(work: Work, tile: Tile) -> int:
    """Number of parts into which keys are cut so that few rows still fill the GPU; 1 if rows alone do."""
    programs = row_tiles(work, tile) * work.q.shape[0] * work.k.shape[1]
    wanted = 2 * multiprocessors(work.q.device)
    if 2 * programs > wanted:
        return 1
    return max(1, min(_MOST_SPLITS, wanted // programs, _keys_of_a_tile(work) // _LEAST_SPLIT))


def _keys_of_a_tile(work: Work) -> int:
    """About how many keys a tile sees, from shapes alone. A window bounds it only if each request has one row."""
    requests = 1 if work.packed is None else work.packed.rows.shape[0] - 1
    keys = work.k.shape[2] // requests
    return keys if work.rule.window is None or work.q.shape[2] > requests else min(keys, work.rule.window)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on a CPU, where the interpreter runs programs in turn."""
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
    """Precision of matrix products: fp32 runs as three tf32 products, which keeps 21 bits."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _power_of_two(n: int) -> int:
    return 0 if n == 0 else 1 << (n - 1).bit_length()


def combine_parts(
    work: Work, part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Merge the partial outputs of split keys, and their log-sum-exp, into `out` and `lse`."""
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


# Tuning a call with fewer multiply-adds than this would cost more than it ever saves.
_LEAST_TO_TUNE = 1 << 34
# Triton's compiler passes fail with a bare RuntimeError of these words; any other RuntimeError is an error of the call.
_PASS_FAILED = "PassManager::run failed"


def attend_values(work: Work, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; the latter is unset unless wanted."""
    tile = choose_tile(work)
    out, lse = launch_attention(work, tile, split_count(work, tile), want_lse)
    assert out is not None
    return out, out.new_empty(0) if lse is None else lse


def choose_tile(work: Work) -> Tile:
    """The measured fastest tile for this kind of work on this machine, or the best guess for small work."""
    q, k = work.q, work.k
    tma = all(key_descriptor(x, Tile(128, 64, 4, 2, True)) is not None for x in (k, work.v) if x is not None)
    shape = Shape(q.dtype, q.shape[3], work.value_dim, q.shape[2] * work.group, work.rule.window is not None, tma)
    if q.device.type != "cuda":
        return candidates(8, shape)[0]
    tiles = candidates(machine(q.device)[1], shape)
    heavy = q.shape[:3].numel() * k.shape[2] * (shape.dim + shape.value_dim) >= _LEAST_TO_TUNE
    if not heavy or torch.cuda.is_current_stream_capturing():
        return tiles[0]
    return choose(_kind(work, shape, tiles[0]), tiles, lambda tile: measured_seconds(work, tile))


def _kind(work: Work, shape: Shape, tile: Tile) -> str:
    """The key of a measured choice: the machine, and every option that changes the kernel's work."""
    lines = min(128, 1 << (shape.lines - 1).bit_length())
    parts = "split" if split_count(work, tile) > 1 else "whole"
    returns = "scores" if work.v is None else "values"
    options = (work.group, work.rule.softcap is not None, returns, parts)
    return "/".join(map(str, (*machine(work.q.device), *shape._replace(lines=lines), *options)))


@cache
def machine(device: torch.device) -> tuple[str, int, str]:
    """The GPU's name, its major compute capability and Triton's version."""
    import triton

    major = torch.cuda.get_device_capability(device)[0]
    return torch.cuda.get_device_name(device), major, triton.__version__


def measured_seconds(work: Work, tile: Tile) -> float:
    """Best of three runs after one that compiles; infinity for a tile that fails to compile or to fit on the GPU."""
    from triton.errors import TritonError

    try:
        launch_attention(work, tile, split_count(work, tile), False)
    except TritonError:
        return float("inf")
    except RuntimeError as error:
        if _PASS_FAILED not in str(error):
            raise
        return float("inf")
    times: list[float] = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        launch_attention(work, tile, split_count(work, tile), False)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return min(times)
