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
        rule: mode, window, softcap, scale and sinks, as in `selective_attention`.
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

    def output(self) -> Tensor:
        """Attention's output, `[batch, heads, rows, value_dim]` over memory `[batch, rows, heads, value_dim]`."""
        out: Tensor = selective_attention(self.query, self.key, self.value, self.rows, **self.rule)
        return out

    def output_and_lse(self) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of each row, fp32 `[batch, heads, rows]`."""
        output: tuple[Tensor, Tensor] = selective_attention(
            self.query,
            self.key,
            self.value,
            self.rows,
            **self.rule,
            return_lse=True,
        )
        return output

    def mass(self, *, per_head: bool = False) -> Tensor:
        """The sum of the attention that each key receives from all rows, fp32 `[batch, (heads,) keys]`."""
        mass: Tensor = self._mass(per_head=per_head)
        return mass

    def peak_and_last(self) -> tuple[Tensor, Tensor]:
        """The largest attention that each key receives from a row, and that from the last row, fp32 `[batch, heads, keys]`."""
        peak, last = self._mass(per_head=True, reduce="max", with_last=True)
        return peak, last

    def _mass(self, **options: Any) -> Any:
        return attention_mass(self.query, self.key, self.rows, **self.rule, lse=self.lse, **options)
