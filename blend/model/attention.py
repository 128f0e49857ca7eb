"""One layer's attention as the model calls it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from blend.config import MaskMode
from blend_kernels import Positions, attention_mass, selective_attention


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention as the model calls it.

    Row r sees keys up to `positions[r]`, of those the last `window` if there is a window.

    Attributes:
        query: `[batch, heads, rows, head_dim]`.
        key, value: `[batch, kv_heads, keys, head_dim]`.
        sinks: `[heads]`, logits that take attention only.
        shared: the positions as all layers of the pass share them.
        lse: the log-sum-exp of each row, if it is known.

    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    mask: MaskMode
    window: int | None
    softcap: float | None
    scale: float | None
    sinks: torch.Tensor | None = None
    shared: Positions | None = None
    lse: torch.Tensor | None = None

    def of_last_rows(self, count: int) -> AttentionCall:
        """The same of the last rows alone."""
        first = self.positions.shape[0] - count
        if first == 0:
            return self
        return replace(
            self,
            query=self.query[:, :, first:],
            positions=self.positions[first:],
            shared=None if self.shared is None else self.shared.last(count),
            lse=None if self.lse is None else self.lse[:, :, first:],
        )

    @property
    def _rows(self) -> torch.Tensor | Positions:
        return self.positions if self.shared is None else self.shared

    @property
    def _rule(self) -> dict[str, Any]:
        return {
            "mode": self.mask,
            "window": self.window,
            "softcap": self.softcap,
            "scale": self.scale,
            "sinks": self.sinks,
        }

    def output(self) -> torch.Tensor:
        """Attention's output, `[batch, heads, rows, value_dim]` over memory `[batch, rows, heads, value_dim]`."""
        out: torch.Tensor = selective_attention(self.query, self.key, self.value, self._rows, **self._rule)
        return out

    def output_and_lse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the log-sum-exp of each row, fp32 `[batch, heads, rows]`."""
        output: tuple[torch.Tensor, torch.Tensor] = selective_attention(
            self.query,
            self.key,
            self.value,
            self._rows,
            **self._rule,
            return_lse=True,
        )
        return output

    def mass(self, *, per_head: bool = False) -> torch.Tensor:
        """The sum of the attention that each key receives from all rows, fp32 `[batch, (heads,) keys]`."""
        mass: torch.Tensor = attention_mass(
            self.query,
            self.key,
            self._rows,
            **self._rule,
            lse=self.lse,
            per_head=per_head,
        )
        return mass

    def peak_and_last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest attention that each key receives from a row, and that from the last row, fp32 `[batch, heads, keys]`."""
        masses: tuple[torch.Tensor, torch.Tensor] = attention_mass(
            self.query,
            self.key,
            self._rows,
            **self._rule,
            lse=self.lse,
            per_head=True,
            reduce="max",
            with_last=True,
        )
        return masses
