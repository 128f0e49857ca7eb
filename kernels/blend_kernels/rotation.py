"""The public op `rotate_keys`, its plain-torch twin, and the check that input and output do not overlap."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import FLOATS, WHOLE, Layout, check_contiguous, check_dtype_and_device, require

# One term of a distance in bytes: `step * n` for a whole n from `low` to `high`.
_Term = tuple[int, int, int]


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of a overlaps an element of b. Interleaved views, such as other tokens of a cache, do not.

    An element of b is `distance + sum of step * n` bytes after one of a, with n bounded by the sizes of the dimensions of
    that stride. They overlap if that sum can be zero.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    lows: defaultdict[int, int] = defaultdict(int)
    highs: defaultdict[int, int] = defaultdict(int)
    for size, stride in zip(a.shape, a.stride(), strict=True):
        lows[stride * a.itemsize] -= size - 1
    for size, stride in zip(b.shape, b.stride(), strict=True):
        highs[stride * b.itemsize] += size - 1
    lows[1] -= a.itemsize - 1
    highs[1] += b.itemsize - 1
    steps = sorted({*lows, *highs} - {0}, reverse=True)
    terms = [(step, lows[step], highs[step]) for step in steps]
    return _can_be_zero(b.data_ptr() - a.data_ptr(), terms)


def _can_be_zero(distance: int, terms: list[_Term]) -> bool:
    if not terms:
        return distance == 0
    (step, low, high), *smaller = terms
    # what the smaller steps can still add bounds this one from both sides: one or two values in buffers of nested strides
    least = sum(size * lowest for size, lowest, _ in smaller)
    most = sum(size * highest for size, _, highest in smaller)
    first = max(low, -((distance + most) // step))
    last = min(high, -(distance + least) // step)
    return any(_can_be_zero(distance + step * n, smaller) for n in range(first, last + 1))


class Deltas:
    """How many positions each token moves, int64 or int32 `[tokens]`.

    Calls with the same object share its tables of cos and sin, because the layers of a cache all move alike and making
    the tables costs more than the rotation itself. Do not change the numbers meanwhile.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._tables: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def tables(self, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of each token's angles, `[tokens, pairs]`."""
        key = (inv_freq.data_ptr(), dtype)
        if key not in self._tables:  # with the frequencies, so that their address stays taken
            self._tables[key] = (inv_freq, *_cos_sin(self.values, inv_freq, dtype))
        return self._tables[key][1:]


@torch.no_grad()
def rotate_keys_plain(
    k: Tensor,
    delta: int | Deltas,
    inv_freq: Tensor,
    layout: Layout,
    out: Tensor,
) -> None:
    """Write k, rotated by `delta * inv_freq`, to `out`; arguments are checked."""
    compute = torch.promote_types(out.dtype, torch.float32)
    states = k.to(compute)
    if isinstance(delta, Deltas):
        cos, sin = delta.tables(inv_freq, compute)
    else:
        cos, sin = _cos_sin(delta, inv_freq, compute)
    first, second = layout.split(states)
    to_first, to_second = layout.split(out)
    turned_first = torch.mul(first, cos).addcmul_(second, sin, value=-1)
    turned_second = torch.mul(second, cos).addcmul_(first, sin)
    to_first.copy_(turned_first)
    to_second.copy_(turned_second)
    for source, target in zip(layout.still(states), layout.still(out), strict=True):
        target.copy_(source)


def _cos_sin(delta: int | Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin, `[pairs]` or `[tokens, pairs]`: angles in fp64, and once per run of equal deltas."""
    freq = inv_freq.double()
    if isinstance(delta, int):
        angles = freq * delta
        return angles.cos().to(dtype), angles.sin().to(dtype)
    distinct, run_of_token = torch.unique_consecutive(delta, return_inverse=True)
    angles = distinct[:, None].double() * freq
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    return cos[run_of_token], sin[run_of_token]


def rotate_keys(
    k: Tensor,
    delta: int | Tensor | Deltas,
    inv_freq: Tensor,
    *,
    interleaved: bool = False,
    rotary_offset: int = 0,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Move rotary keys by `delta` positions while copying them: R(p + delta) = R(delta) R(p) (RoFormer, 2021).

    Never writes k. Angles are exact to fp32 at any distance; products are fp32. A factor of the model on cos and sin is
    part of k already and is not applied again.

    Args:
        k: `[..., kv_heads, tokens, head_dim]`, three or four dimensions, any strides with a contiguous last dimension; floating
            point.
        delta: one int, or int64 / int32 `[tokens]` for several chunks in one call; a `Deltas` if many calls share it. For
            unrotated keys it is the position itself.
        inv_freq: `[pairs]`, radians per position, at least fp32, on any device. Dimensions `rotary_offset` to
            `rotary_offset + 2 * pairs - 1` rotate; the others are copied.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (i, i + pairs).
        rotary_offset: the first dimension that rotates.
        out: of k's shape, floating point, such as a slice of the blended cache; by default a new tensor in k's dtype.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        `out`.

    Raises:
        ValueError: wrong shapes, dtypes or devices, or an out that shares memory with itself or with k. Rotating in place would
            rotate again on the next use. Other tokens of the same buffer are fine.
    """
    layout = Layout(_pairs(inv_freq), rotary_offset, interleaved)
    _check_states(k, layout)
    steps = delta.values if isinstance(delta, Deltas) else delta
    _check_steps(steps, k)
    if out is None:
        out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _check_out(out, k)
    check_contiguous(k=k, out=out)
    inv_freq = inv_freq.to(k.device)
    if choose_backend(backend, k, out) == "triton":
        from blend_kernels.rotation_kernel import launch_rotation

        launch_rotation(k, steps, inv_freq, layout, out)
    else:
        deltas = Deltas(delta) if isinstance(delta, Tensor) else delta
        rotate_keys_plain(k, deltas, inv_freq, layout, out)
    return out


def _pairs(inv_freq: Tensor) -> int:
    require(
        inv_freq.ndim == 1 and inv_freq.shape[0] > 0 and inv_freq.dtype in (torch.float32, torch.float64),
        f"inv_freq must be [rotary_dim / 2] in fp32 or fp64 (half precision loses whole turns), got {_shape(inv_freq)}",
    )
    require(not inv_freq.is_meta, "inv_freq is on meta, where there are no numbers")
    return int(inv_freq.shape[0])


def _check_states(k: Tensor, layout: Layout) -> None:
    require(k.ndim in (3, 4), f"k must be [batch, kv_heads, tokens, head_dim] or without batch, got {list(k.shape)}")
    require(k.dtype in FLOATS, f"k must be floating point, got {k.dtype}")
    stop = layout.offset + 2 * layout.pairs
    require(
        layout.offset >= 0 and stop <= k.shape[-1],
        f"dimensions {layout.offset} to {stop} should turn, but head_dim is {k.shape[-1]}",
    )


def _check_steps(steps: int | Tensor, k: Tensor) -> None:
    if isinstance(steps, int):
        return
    tokens = k.shape[-2]
    require(
        isinstance(steps, Tensor) and tuple(steps.shape) == (tokens,),
        f"delta must be an int or an integer tensor [{tokens}], one per token, got {_shape(steps)}",
    )
    check_dtype_and_device("delta", steps, k, WHOLE)


def _check_out(out: Tensor, k: Tensor) -> None:
    require(out.shape == k.shape, f"out must have the shape of k, {list(k.shape)}, got {list(out.shape)}")
    require(out.dtype in FLOATS, f"out must be floating point, got {out.dtype}")
    require(out.device == k.device, f"out is on {out.device}, k on {k.device}; copy k there first")
    dimensions = zip(out.stride(), out.shape, strict=True)
    repeated = any(stride == 0 and size > 1 for stride, size in dimensions)
    require(not repeated, "out has elements that share memory (a dimension of stride 0); give one of its own")
    require(not share_memory(k, out), "out shares memory with k; turning in place is refused")


def _shape(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
