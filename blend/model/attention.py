"""One layer's attention as the model calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from blend_kernels import Positions, attention_mass, selective_attention


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention as the model calls it.

    Row r sees keys up to `positions[r]`, of those the last `window` if there is a window.

    Attributes:
        query: `[batch, heads, rows, head_dim]`.
        key, value: `[batch, kv_heads, keys, head_dim]`.
        rows: the positions of the rows, as all layers of the pass share them.
        rule: window, softcap, scale and sinks, as in `selective_attention`.
        lse: the log-sum-exp of each row, if it is known.

    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    rows: Positions
    rule: Mapping[str, Any]
    lse: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """The positions of the rows, int64 `[rows]`."""
        return self.rows.values

    def of_last_rows(self, count: int) -> AttentionCall:
        """The same of the last rows alone."""
        first = self.query.shape[2] - count
        if first == 0:
            return self
        query = self.query[:, :, first:]
        lse = None if self.lse is None else self.lse[:, :, first:]
        return replace(self, query=query, rows=self.rows.last(count), lse=lse)

    def attend(self) -> tuple[Tensor, Tensor]:
        """The output `[batch, heads, rows, value_dim]`, and the log-sum-exp of each row, fp32 `[batch, heads, rows]`."""
        return selective_attention(self.query, self.key, self.value, self.rows, **self.rule)

    def masses(self, *, peak: bool = False) -> Tensor:
        """What each key receives, fp32 `[kinds, batch, heads, keys]`: from all rows together, or with `peak` from one at most.

        With `peak` also, as a second kind, from the last row.
        """
        return attention_mass(self.query, self.key, self.rows, **self.rule, lse=self.lse, peak=peak)
