"""Checks the arguments of the ops, and holds them as values: one attention call (`Work`), one key layout (`Layout`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

Mode = Literal["exact", "bottom-right"]
Reduce = Literal["sum", "max"]


class Packed(NamedTuple):
    """Cumulative lengths of packed requests, `[requests + 1]`, int32 or int64, from 0 to all rows and all keys."""

    rows: torch.Tensor
    keys: torch.Tensor

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """Rows and keys of each request; waits for lengths on a GPU."""
        cuts = zip(self.rows.tolist(), self.keys.tolist(), strict=True)
        for (row, key), (row_stop, key_stop) in pairwise(cuts):
            yield slice(row, row_stop), slice(key, key_stop)


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


def check_beside(name: str, tensor: torch.Tensor, like: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Require one of the dtypes, on the device of `like`."""
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    require(tensor.dtype in dtypes, f"{name} must be {kinds}, got {tensor.dtype}")
    require(
        tensor.device == like.device,
        f"{name} must be on {like.device} like the others, got {tensor.device}; move once, outside the layers",
    )


def check_queries_and_keys(q: torch.Tensor, k: torch.Tensor) -> None:
    """Require `[batch, heads, rows, head_dim]` and `[batch, kv_heads, keys, head_dim]`."""
    require(q.ndim == 4, f"q must be [batch, heads, rows, head_dim], got {list(q.shape)}")
    require(k.ndim == 4, f"k must be [batch, kv_heads, keys, head_dim], got {list(k.shape)}")
    batch, heads, _, dim = q.shape
    require(k.shape[0] == batch, f"k has batch {k.shape[0]}, q has {batch}; they must be equal")
    require(k.shape[3] == dim, f"k has head_dim {k.shape[3]}, q has {dim}; they must be equal")
    require(k.shape[1] > 0 and heads % k.shape[1] == 0, f"{heads} query heads are no multiple of {k.shape[1]} kv heads")
    require(k.shape[2] > 0, "k has no keys; every row must see at least its own key")
    require(q.dtype in FLOATS, f"q must be floating point, got {q.dtype}")
    _same_kind(k, "k", q)
    check_contiguous(q=q, k=k)


def check_values(v: torch.Tensor, k: torch.Tensor) -> None:
    """Require `[batch, kv_heads, keys, value_dim]`, with the dtype and device of k."""
    require(
        v.ndim == 4 and v.shape[:3] == k.shape[:3],
        f"v must be [batch, kv_heads, keys, value_dim] = {[*k.shape[:3], 'any']}, got {list(v.shape)}",
    )
    _same_kind(v, "v", k)
    check_contiguous(v=v)


def check_rule(
    mode: Mode, window: int | None, softcap: float | None, scale: float | None, q: torch.Tensor, k: torch.Tensor
) -> Rule:
    """The rule for q and k, with the default scale filled in."""
    rows, keys = q.shape[2], k.shape[2]
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
    return Rule(mode, window, softcap, float(q.shape[3] ** -0.5 if scale is None else scale))


def check_positions(
    positions: torch.Tensor, batch: int, rows: int, keys: int, like: torch.Tensor, values: bool
) -> None:
    """Require `[rows]` or `[batch, rows]` integers on the device of `like`; with `values` also sorted and inside the keys."""
    require(
        tuple(positions.shape) in ((rows,), (batch, rows)),
        f"positions must be [{rows}] or [{batch}, {rows}] (one per row of q), got {list(positions.shape)}",
    )
    check_beside("positions", positions, like, WHOLE)
    if values and positions.numel():
        low, high = int(positions[..., 0].min()), int(positions[..., -1].max())
        require(low >= 0 and high < keys, f"positions must lie in [0, {keys}), got {low} to {high}")
        require(
            _ascending(positions), "positions must be sorted in ascending order; sort them together with the rows of q"
        )


def check_packed(
    cu_rows: torch.Tensor | None, cu_keys: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, values: bool
) -> Packed | None:
    """Require both or neither, and batch 1; with `values` also ascending, from 0 to the number of rows and of keys."""
    if cu_rows is None and cu_keys is None:
        return None
    if cu_rows is None or cu_keys is None:
        raise ValueError("cu_rows and cu_keys go together: give both or neither")
    require(q.shape[0] == 1, f"packed requests lie one after the other in batch 1, got batch {q.shape[0]}")
    for name, lengths, total in (("cu_rows", cu_rows, q.shape[2]), ("cu_keys", cu_keys, k.shape[2])):
        require(
            lengths.ndim == 1 and lengths.shape == cu_rows.shape and lengths.shape[0] >= 2,
            f"{name} must be [requests + 1], got {list(lengths.shape)} next to cu_rows {list(cu_rows.shape)}",
        )
        check_beside(name, lengths, q, WHOLE)
        ascending = not values or (int(lengths[0]) == 0 and int(lengths[-1]) == total and _ascending(lengths))
        require(ascending, f"{name} must ascend from 0 to {total}, the length of the packed axis")
    return Packed(cu_rows, cu_keys)


def check_requests(packed: Packed, positions: torch.Tensor, mode: Mode, like: torch.Tensor) -> None:
    """Require sorted positions inside the own keys for every packed request, and rows <= keys in mode bottom-right."""
    for i, (rows, keys) in enumerate(packed.spans()):
        n_rows, n_keys = rows.stop - rows.start, keys.stop - keys.start
        require(
            n_rows == 0 or n_keys > 0, f"packed request {i} has {n_rows} rows and no keys; every row must see a key"
        )
        require(
            mode == "exact" or n_rows <= n_keys,
            f"mode 'bottom-right' needs at least as many keys as rows, got {n_keys} keys for {n_rows} rows "
            f"in packed request {i}; use mode 'exact'",
        )
        check_positions(positions[..., rows], 1, n_rows, n_keys, like, values=True)


def check_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    """Require `[heads]`, floating point, on the device of q."""
    if sinks is not None:
        require(sinks.shape == (q.shape[1],), f"sinks must be [{q.shape[1]}], one per query head")
        check_beside("sinks", sinks, q, FLOATS)


def check_contiguous(**tensors: torch.Tensor) -> None:
    """Require a contiguous last dimension, which every implementation reads at once."""
    for name, tensor in tensors.items():
        require(
            tensor.stride(-1) == 1 or tensor.shape[-1] <= 1,
            f"the last dimension of {name} must be contiguous, its stride is {tensor.stride(-1)}; call .contiguous()",
        )


def _ascending(numbers: torch.Tensor) -> bool:
    return bool((numbers[..., 1:] >= numbers[..., :-1]).all())


def _same_kind(tensor: torch.Tensor, name: str, like: torch.Tensor) -> None:
    require(
        tensor.dtype == like.dtype,
        f"{name} is {tensor.dtype}, q is {like.dtype}; convert one of them first",
    )
    require(tensor.device == like.device, f"{name} is on {tensor.device}, q on {like.device}; move one of them first")


class Work(NamedTuple):
    """Checked arguments of one call, as in `selective_attention`; v is None if only the log-sum-exp is wanted."""

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


class Layout(NamedTuple):
    """The rotating dimensions of a key: `2 * pairs` from `offset` on. Pairs are neighbours if interleaved, else halves."""

    pairs: int
    offset: int
    interleaved: bool

    def split(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and the second members of all pairs, `[..., pairs]`."""
        turned = states[..., self.offset : self.offset + 2 * self.pairs]
        if self.interleaved:
            return turned[..., 0::2], turned[..., 1::2]
        return turned[..., : self.pairs], turned[..., self.pairs :]

    def still(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the dimensions before and after the rotating ones."""
        return states[..., : self.offset], states[..., self.offset + 2 * self.pairs :]
