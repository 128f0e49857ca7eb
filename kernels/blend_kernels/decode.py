"""The public `decode_attention`."""

from __future__ import annotations

from torch import Tensor

from blend_kernels.attention import attend
from blend_kernels.attention_bfloat16 import pays_off
from blend_kernels.attention_plain import attend_every_key, fuses
from blend_kernels.backend import Backend, choose_attention_backend
from blend_kernels.checks import Rule, Work


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of one row that sees all keys, as in a step of decoding.

    It equals `selective_attention` of a row at the last key's position. It checks nothing and needs no positions: in a step
    of decoding on a CPU, that op's checks take as long as the attention itself.

    Args:
        q: `[batch, heads, 1, head_dim]`.
        k: `[batch, kv_heads, keys, head_dim]`; heads is a multiple of kv_heads.
        v: `[batch, kv_heads, keys, value_dim]`.
        window: the row sees so many keys at the end; None for all.
        scale: of the scores; by default `head_dim ** -0.5`.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        `[batch, heads, 1, value_dim]` in q's dtype.

    Raises:
        ValueError: a backend that cannot compute this.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if backend != "triton" and fuses(q, k, v) and not pays_off(q, k):
        if window is not None:
            k = k[:, :, -window:]
            v = v[:, :, -window:]
        out, _ = attend_every_key(q, k, v, scale)
        return out.flatten(1, 2)
    # the bottom right of rows x keys is the last key's position
    work = Work(q, k, v, None, Rule("bottom-right", window, None, scale))
    backend = choose_attention_backend(backend, q, work.value_dim)
    out, _ = attend(work, False, backend)
    return out
