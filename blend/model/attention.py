"""The attention of scattered rows inside a HuggingFace decoder.

`row_attention` has the signature of transformers' `AttentionInterface`. The running pass is found through a context variable,
because not every architecture passes keyword arguments of the forward pass on to its attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from blend.config import MaskMode
from blend.errors import UnsupportedModelError
from blend.model.rows import current_pass
from blend_kernels import attention_mass, selective_attention

# Arguments of other attention kinds that would change the result; a model that passes one of them is refused.
_UNSUPPORTED = ("position_bias", "alibi", "block_mask", "head_mask")


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention as the model asks for it.

    query `[batch, heads, rows, head_dim]`, key and value `[batch, kv_heads, keys, head_dim]`; row r sees keys up to
    `positions[r]`, and with a window only the last `window` of them. sinks: `[heads]`, logits that take part of the
    attention and give nothing.
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
        """What the rows get, `[batch, heads, rows, value_dim]` over memory `[batch, rows, heads, value_dim]`."""
        out: torch.Tensor = selective_attention(self.query, self.key, self.value, self.positions, **self._rule)
        return out

    def mass(self, *, per_head: bool = False, reduce: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """Attention that each key receives from all rows, fp32 `[batch, keys]`, or `[batch, heads, keys]`.

        reduce: over rows; with "max" the most that a single one of them gives.
        """
        return attention_mass(
            self.query,
            self.key,
            self.positions,
            **self._rule,
            per_head=per_head,
            reduce=reduce,
        )


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the running pass's rows `[batch, heads, rows, head_dim]` over what the cache gave, request by request.

    Returns `[batch, rows, heads, value_dim]` and no weights, as transformers expects.
    """
    forward = current_pass()
    if attention_mask is not None or any(others.get(name) is not None for name in _UNSUPPORTED):
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a mask or bias of its own to attention, which blended prefill cannot reproduce; "
            "use full prefill for this model"
        )
    layer = int(getattr(module, "layer_idx", -1))
    out = []
    parts = zip(forward.requests, forward.runs, forward.spans(), forward.held(key, value), strict=True)
    for request, run, span, (keys, values) in parts:
        call = AttentionCall(
            layer,
            query[:, :, span],
            keys,
            values,
            run.positions,
            forward.mask,
            sliding_window,
            softcap,
            scaling,
            s_aux,
        )
        if request.observe is not None:
            request.observe(call)
        out.append(call.output().transpose(1, 2))
    return torch.cat(out, dim=1) if len(out) > 1 else out[0].contiguous(), None
