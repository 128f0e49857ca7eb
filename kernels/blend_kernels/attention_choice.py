"""Chooses tile and split for an attention call, then launches it."""

from __future__ import annotations

from functools import cache

import torch

from blend_kernels.attention_launch import launch_attention, split_count
from blend_kernels.descriptors import key_descriptor
from blend_kernels.tiles import Shape, Tile, candidates
from blend_kernels.tuning import choose
from blend_kernels.work import Work

# Tuning a call with fewer multiply-adds than this would cost more than it ever saves.
_LEAST_TO_TUNE = 1 << 34
# Triton's compiler passes fail with a bare RuntimeError of these words; any other RuntimeError is an error of the call.
_PASS_FAILED = "PassManager::run failed"


def attend_values(work: Work, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, which holds nothing unless it is wanted."""
    tile = choose_tile(work)
    out, lse = launch_attention(work, tile, split_count(work, tile), want_lse)
    assert out is not None
    return out, out.new_empty(0) if lse is None else lse


def choose_tile(work: Work) -> Tile:
    """The tile that was fastest for this kind of work on this machine, or the best guess for small work."""
    q, k = work.q, work.k
    tma = all(key_descriptor(x, Tile(128, 64, 4, 2, True)) is not None for x in (k, work.v) if x is not None)
    shape = Shape(q.dtype, q.shape[3], work.value_dim, q.shape[2] * work.group, work.rule.window is not None, tma)
    if q.device.type != "cuda":
        return candidates(8, shape)[0]
    tiles = candidates(_machine(q.device)[1], shape)
    heavy = q.shape[:3].numel() * k.shape[2] * (shape.dim + shape.value_dim) >= _LEAST_TO_TUNE
    if not heavy or torch.cuda.is_current_stream_capturing():
        return tiles[0]
    return choose(_kind(work, shape, tiles[0]), tiles, lambda tile: _seconds(work, tile))


def _kind(work: Work, shape: Shape, tile: Tile) -> str:
    """What calls have in common that share a measured choice: the machine, and every option that changes the kernel's work."""
    lines = min(128, 1 << (shape.lines - 1).bit_length())
    parts = "split" if split_count(work, tile) > 1 else "whole"
    returns = "scores" if work.v is None else "values"
    options = (work.group, work.rule.softcap is not None, returns, parts)
    return "/".join(map(str, (*_machine(work.q.device), *shape._replace(lines=lines), *options)))


@cache
def _machine(device: torch.device) -> tuple[str, int, str]:
    import triton

    major = torch.cuda.get_device_capability(device)[0]
    return torch.cuda.get_device_name(device), major, triton.__version__


def _seconds(work: Work, tile: Tile) -> float:
    """Best of three runs after one that compiles; infinity for a tile that does not compile or that the GPU cannot hold."""
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
