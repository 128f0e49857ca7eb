"""One attention call as a value: what every implementation of the attention ops takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from blend_kernels.checks import Packed, Rule


class Work(NamedTuple):
    """Checked arguments of one call, as in `selective_attention`; v is None when only the log-sum-exp is wanted."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    positions: torch.Tensor
    rule: Rule
    sinks: torch.Tensor | None = None
    packed: Packed | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def value_dim(self) -> int:
        """Last dimension of v, or of k without v."""
        return (self.k if self.v is None else self.v).shape[3]

    def empty_out(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Empty `[batch, heads, rows, value_dim]` over memory `[batch, rows, heads, value_dim]`."""
        batch, heads, rows, _ = self.q.shape
        return self.q.new_empty(batch, rows, heads, self.value_dim, dtype=dtype).transpose(1, 2)

    def empty_lse(self) -> torch.Tensor:
        """Empty fp32 `[batch, heads, rows]`."""
        return torch.empty(self.q.shape[:3], dtype=torch.float32, device=self.q.device)


def join_sinks(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Log-sum-exp `[batch, heads, rows]` with one more logit per head in the denominator."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
