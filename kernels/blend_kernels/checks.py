"""Checks the arguments of the ops, and holds them as values: one attention call (`Work`), one key layout (`Layout`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blend_kernels.positions import Positions

Mode = Literal["exact", "bottom-right"]
Reduce = Literal["sum", "max"]


class Rule(NamedTuple):
    """The options of an attention besides its tensors."""

    mode: Mode
    window: int | None
    softcap: float | None
    scale: float


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int64, torch.int32)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_dtype_and_device(name: str, tensor: Tensor, like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Require one of the dtypes, on the device of `like`."""
    if tensor.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {kinds}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(
            f"{name} must be on {like.device} like the others, got {tensor.device}; move once, outside the layers"
        )


def check_queries_and_keys(q: Tensor, k: Tensor) -> None:
    """Require `[batch, heads, rows, head_dim]` and `[batch, kv_heads, keys, head_dim]`."""
    # messages are made when one is needed: this runs in every layer
    if q.ndim != 4:
        raise ValueError(f"q must be [batch, heads, rows, head_dim], got {list(q.shape)}")
    if k.ndim != 4:
        raise ValueError(f"k must be [batch, kv_heads, keys, head_dim], got {list(k.shape)}")
    batch, heads, _, dim = q.shape
    key_batch, kv_heads, keys, key_dim = k.shape
    if key_batch != batch:
        raise ValueError(f"k has batch {key_batch}, q has {batch}; they must be equal")
    if key_dim != dim:
        raise ValueError(f"k has head_dim {key_dim}, q has {dim}; they must be equal")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} kv heads")
    if keys == 0:
        raise ValueError("k has no keys; every row must see at least its own key")
    if q.dtype not in FLOATS:
        raise ValueError(f"q must be floating point, got {q.dtype}")
    _same_kind(k, "k", q)
    check_contiguous(q=q, k=k)


def check_values(v: Tensor, k: Tensor) -> None:
    """Require `[batch, kv_heads, keys, value_dim]`, with the dtype and device of k."""
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        shape = [*k.shape[:3], "any"]
        raise ValueError(f"v must be [batch, kv_heads, keys, value_dim] = {shape}, got {list(v.shape)}")
    _same_kind(v, "v", k)
    check_contiguous(v=v)


def check_rule(
    mode: Mode,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    q: Tensor,
    k: Tensor,
) -> Rule:
    """The rule for q and k, with the default scale filled in."""
    rows = q.shape[2]
    keys = k.shape[2]
    require(mode in ("exact", "bottom-right"), f"mode must be 'exact' or 'bottom-right', got {mode!r}")
    require(
        window is None or (isinstance(window, int) and window >= 1),
        f"window must be None or a whole number of at least 1, got {window}",
    )
    require(softcap is None or softcap > 0, f"softcap must be None or positive, got {softcap}")
    require(
        mode == "exact" or rows <= keys,
        f"mode 'bottom-right' needs at least as many keys as rows, got {keys} keys for {rows} rows; use mode 'exact'",
    )
    require(scale is None or scale > 0, f"scale must be None or positive, got {scale}")
    if scale is None:
        scale = q.shape[3] ** -0.5
    return Rule(mode, window, softcap, float(scale))


def check_positions(positions: Tensor | Positions, q: Tensor, k: Tensor) -> tuple[Tensor, Positions | None]:
    """Require `[rows]` or `[batch, rows]` integers on the device of q; on a CPU also sorted and inside the keys.

    Reading them on a GPU would stall the stream once a layer.

    Returns:
        The numbers, and the object that calls share, if there is one; its order is checked once.
    """
    batch, _, rows, _ = q.shape
    keys = k.shape[2]
    readable = q.device.type == "cpu"
    if isinstance(positions, Positions):
        require(tuple(positions.values.shape) == (rows,), f"positions must be [{rows}], one for each row of q")
        if readable and rows:
            require(positions.ascend, "positions must be sorted in ascending order and not negative")
            require(positions.ends[-1] < keys, f"positions must lie in [0, {keys}), got {positions.ends[-1]}")
        return positions.values, positions
    require(
        tuple(positions.shape) in ((rows,), (batch, rows)),
        f"positions must be [{rows}] or [{batch}, {rows}] (one per row of q), got {list(positions.shape)}",
    )
    check_dtype_and_device("positions", positions, q, WHOLE)
    if readable and positions.numel():
        low = int(positions[..., 0].min())
        high = int(positions[..., -1].max())
        require(low >= 0 and high < keys, f"positions must lie in [0, {keys}), got {low} to {high}")
        ascend = bool((positions[..., 1:] >= positions[..., :-1]).all())
        require(ascend, "positions must be sorted in ascending order; sort them together with the rows of q")
    return positions, None


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Require `[heads]`, floating point, on the device of q."""
    if sinks is not None:
        require(sinks.shape == (q.shape[1],), f"sinks must be [{q.shape[1]}], one per query head")
        check_dtype_and_device("sinks", sinks, q, FLOATS)


def check_lse(lse: Tensor | None, q: Tensor) -> None:
    """Require fp32 `[batch, heads, rows]` on the device of q."""
    if lse is not None:
        rows = list(q.shape[:3])
        require(list(lse.shape) == rows, f"lse must be [batch, heads, rows] = {rows}, got {list(lse.shape)}")
        check_dtype_and_device("lse", lse, q, (torch.float32,))


def check_contiguous(**tensors: Tensor) -> None:
    """Require a contiguous last dimension, which every implementation reads at once."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"the last dimension of {name} must be contiguous, its stride is {tensor.stride(-1)}; "
                "call .contiguous()"
            )


def _same_kind(
    tensor: Tensor,
    name: str,
    like: Tensor,
) -> None:
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, q is {like.dtype}; convert one of them first")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {like.device}; move one of them first")


class Work(NamedTuple):
    """Checked arguments of one call, as in `selective_attention`.

    Attributes:
        v: None if only the log-sum-exp is wanted.
        positions: may be None in mode "bottom-right", which does not read them.
        shared: the positions, if other calls share them.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    positions: Tensor | None
    rule: Rule
    sinks: Tensor | None = None
    shared: Positions | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def value_dim(self) -> int:
        """Last dimension of v, or of k without v."""
        return self.values.shape[3]

    @property
    def values(self) -> Tensor:
        """The values, or the keys in their place where there are none."""
        return self.k if self.v is None else self.v

    def empty_out(self) -> Tensor:
        """Empty `[batch, heads, rows, value_dim]` over memory `[batch, rows, heads, value_dim]`."""
        batch, heads, rows, _ = self.q.shape
        return self.q.new_empty(batch, rows, heads, self.value_dim).transpose(1, 2)

    def empty_lse(self) -> Tensor:
        """Empty fp32 `[batch, heads, rows]`."""
        return torch.empty(self.q.shape[:3], dtype=torch.float32, device=self.q.device)

    def empty_masses(self, with_last: bool) -> Tensor:
        """Empty fp32 `[1, batch, heads, keys]`, or `[2, ...]` with room for the last row."""
        kinds = 2 if with_last else 1
        batch, heads, _, _ = self.q.shape
        keys = self.k.shape[2]
        return torch.empty(kinds, batch, heads, keys, dtype=torch.float32, device=self.q.device)


def join_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Log-sum-exp `[batch, heads, rows]` with one more logit per head in the denominator."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])


class Layout(NamedTuple):
    """The rotating dimensions of a key: `2 * pairs` from `offset` on. Pairs are neighbours if interleaved, else halves."""

    pairs: int
    offset: int
    interleaved: bool

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second members of all pairs, `[..., pairs]`."""
        rotating = states[..., self.offset : self.offset + 2 * self.pairs]
        if self.interleaved:
            return rotating[..., 0::2], rotating[..., 1::2]
        return rotating[..., : self.pairs], rotating[..., self.pairs :]

    def still(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the dimensions before and after the rotating ones."""
        return states[..., : self.offset], states[..., self.offset + 2 * self.pairs :]
