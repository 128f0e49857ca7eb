"""The public `attention_mass`."""

from __future__ import annotations

import torch

from blend_kernels.backend import Backend, choose_attention_backend
from blend_kernels.checks import Mode, Reduce, check_positions, check_queries_and_keys, check_rule, check_sinks, require
from blend_kernels.mass_plain import attention_mass_plain
from blend_kernels.work import Work


def attention_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    *,
    mode: Mode = "exact",
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    per_head: bool = False,
    reduce: Reduce = "sum",
    check: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """How much attention each key receives: softmax weights summed over the given rows, and over heads unless `per_head`.

    reduce: "max" takes the largest weight that any of the rows gives a key, in each head, in place of their sum.

    Arguments as in `selective_attention`. Returns fp32 `[batch, keys]`, or `[batch, heads, keys]`; the sum over keys is
    rows (times heads), less what the sinks take. The rows x keys weights are never in memory as a whole. Raises ValueError as
    `selective_attention` does.
    """
    check_queries_and_keys(q, k)
    rule = check_rule(mode, window, softcap, scale, q, k)
    check_positions(positions, q.shape[0], q.shape[2], k.shape[2], q, check or not q.is_cuda)
    check_sinks(sinks, q)
    require(reduce in ("sum", "max"), f"reduce must be 'sum' or 'max', got {reduce!r}")
    work = Work(q, k, None, positions, rule, sinks)
    if q.numel() == 0:
        mass = torch.zeros(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
    elif choose_attention_backend(work, backend) == "triton":
        from blend_kernels.attention_choice import choose_tile
        from blend_kernels.mass_launch import launch_mass

        mass = launch_mass(work, choose_tile(work), per_head, reduce)
    else:
        mass = attention_mass_plain(work, reduce)
    return mass if per_head else mass.sum(1)
