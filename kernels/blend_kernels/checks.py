"""What every op refuses, with the line that says what was expected. Shapes always; values only where they are cheap to read."""

from __future__ import annotations

from typing import Literal

import torch

Mode = Literal["exact", "bottom-right"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_queries_and_keys(q: torch.Tensor, k: torch.Tensor) -> None:
    """`[batch, heads, rows, head_dim]` against `[batch, kv_heads, keys, head_dim]`."""
    require(q.ndim == 4, f"q must be [batch, heads, rows, head_dim], got {list(q.shape)}")
    require(k.ndim == 4, f"k must be [batch, kv_heads, keys, head_dim], got {list(k.shape)}")
    batch, heads, _, dim = q.shape
    require(k.shape[0] == batch, f"k has batch {k.shape[0]}, q has {batch}; they must be equal")
    require(k.shape[3] == dim, f"k has head_dim {k.shape[3]}, q has {dim}; they must be equal")
    require(k.shape[1] > 0 and heads % k.shape[1] == 0, f"{heads} query heads are no multiple of {k.shape[1]} kv heads")
    require(k.shape[2] > 0, "k has no keys; every row must see at least its own key")
    require(q.dtype in FLOATS, f"q must be floating point, got {q.dtype}")
    _same_kind(k, "k", q)


def check_values(v: torch.Tensor, k: torch.Tensor) -> None:
    """`[batch, kv_heads, keys, value_dim]`, of the dtype and device of k."""
    require(
        v.ndim == 4 and v.shape[:3] == k.shape[:3],
        f"v must be [batch, kv_heads, keys, value_dim] = {[*k.shape[:3], 'any']}, got {list(v.shape)}",
    )
    _same_kind(v, "v", k)


def check_rule(mode: str, window: int | None, softcap: float | None, rows: int, keys: int) -> None:
    """The mask's rule, apart from the positions."""
    require(mode in ("exact", "bottom-right"), f"mode must be 'exact' or 'bottom-right', got {mode!r}")
    require(window is None or window >= 1, f"window must be None or at least 1, got {window}")
    require(softcap is None or softcap > 0, f"softcap must be None or positive, got {softcap}")
    require(
        mode == "exact" or rows <= keys,
        f"mode 'bottom-right' needs at least as many keys as rows, got {keys} keys for {rows} rows; use mode 'exact'",
    )


def check_positions(
    positions: torch.Tensor, batch: int, rows: int, keys: int, like: torch.Tensor, values: bool
) -> None:
    """`[rows]` or `[batch, rows]` integers next to `like`; with `values` also sorted and inside the keys."""
    require(
        tuple(positions.shape) in ((rows,), (batch, rows)),
        f"positions must be [{rows}] or [{batch}, {rows}] (one per row of q), got {list(positions.shape)}",
    )
    require(positions.dtype in (torch.int64, torch.int32), f"positions must be int64 or int32, got {positions.dtype}")
    require(
        positions.device == like.device,
        f"positions are on {positions.device}, q on {like.device}; move them once, outside the layers",
    )
    if values and rows:
        low, high = int(positions[..., 0].min()), int(positions[..., -1].max())
        require(low >= 0 and high < keys, f"positions must lie in [0, {keys}), got {low} to {high}")
        sorted_rows = rows == 1 or bool((positions[..., 1:] >= positions[..., :-1]).all())
        require(sorted_rows, "positions must be sorted in ascending order; sort them together with the rows of q")


def _same_kind(tensor: torch.Tensor, name: str, like: torch.Tensor) -> None:
    require(
        tensor.dtype == like.dtype,
        f"{name} is {tensor.dtype}, q is {like.dtype}; convert one of them first",
    )
    require(tensor.device == like.device, f"{name} is on {tensor.device}, q on {like.device}; move one of them first")
