"""One attention call as a value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blend_kernels.positions import Positions


class Rule(NamedTuple):
    """The options of an attention besides its tensors, as in `selective_attention`."""

    window: int | None
    softcap: float | None
    scale: float


class Work(NamedTuple):
    """One call of `selective_attention`.

    Attributes:
        q: `[batch, heads, rows, head_dim]`.
        k: `[batch, kv_heads, keys, head_dim]`.
        v: `[batch, kv_heads, keys, value_dim]`.
        positions: of the rows.
        rule: the options.
        sinks: `[heads]`, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    rule: Rule
    sinks: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def value_dim(self) -> int:
        """Last dimension of v."""
        return self.v.shape[3]

    def empty_masses(self, peak: bool) -> Tensor:
        """Empty fp32 `[kinds, batch, heads, keys]`; see `attention_mass`."""
        batch, heads, _, _ = self.q.shape
        shape = (1 + peak, batch, heads, self.k.shape[2])
        return self.q.new_empty(shape, dtype=torch.float32)


def empty_results(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Empty output `[batch, heads, rows, value_dim]` in q's dtype, and fp32 log-sum-exp `[batch, heads, rows]`.

    In memory, rows come before heads.
    """
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, value_dim)
    lse = q.new_empty(batch, rows, heads, dtype=torch.float32)
    return out.transpose(1, 2), lse.transpose(1, 2)


def join_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """Log-sum-exp `[batch, heads, rows]` with one more logit per head in the denominator."""
    sinks = sinks.to(lse.dtype)
    return torch.logaddexp(lse, sinks[None, :, None])
