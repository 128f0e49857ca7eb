"""The public `attention_mass`."""

from __future__ import annotations

import torch

from .attention_plain import Rule
from .backend import Backend, choose_backend
from .checks import Mode, check_positions, check_queries_and_keys, check_rule
from .mass_plain import attention_mass_plain


def attention_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    *,
    mode: Mode = "exact",
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    per_head: bool = False,
    check: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """How much attention each key receives: softmax weights summed over the given rows, and over heads unless `per_head`.

    Arguments as in `selective_attention`. Returns fp32 `[batch, keys]`, or `[batch, heads, keys]`; the sum over keys is
    rows (times heads). The rows x keys weights are never in memory as a whole. Raises ValueError as
    `selective_attention` does.
    """
    check_queries_and_keys(q, k)
    check_rule(mode, window, softcap, q.shape[2], k.shape[2])
    check_positions(positions, q.shape[0], q.shape[2], k.shape[2], q, check or not q.is_cuda)
    rule = Rule(mode, window, softcap, q.shape[3] ** -0.5 if scale is None else scale)
    choose_backend(q, backend)
    mass = attention_mass_plain(q, k, positions, rule)
    return mass if per_head else mass.sum(1)
