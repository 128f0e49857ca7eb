"""The public op `rotate_keys`, its plain-torch twin, and the check that input and output do not overlap."""

from __future__ import annotations

from collections import defaultdict

import torch

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import FLOATS, WHOLE, Layout, check_beside, check_contiguous, require

# One term of a distance in bytes: `step * n` for a whole n from `low` to `high`.
_Term = tuple[int, int, int]


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of a overlaps an element of b. Interleaved views, such as other tokens of a cache, do not.

    An element of b is `distance + sum of step * n` bytes after one of a, with n bounded by the sizes of the dimensions of
    that stride. They overlap if that sum can be zero.
    """
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
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
    return _can_be_zero(b.data_ptr() - a.data_ptr(), [(step, lows[step], highs[step]) for step in steps])


def _can_be_zero(distance: int, terms: list[_Term]) -> bool:
    if not terms:
        return distance == 0
    (step, low, high), *rest = terms
    # what the smaller steps can still add bounds this one from both sides: one or two values in buffers of nested strides
    least, most = (sum(term[0] * term[side] for term in rest) for side in (1, 2))
    first, last = max(low, -((distance + most) // step)), min(high, -(distance + least) // step)
    return any(_can_be_zero(distance + step * n, rest) for n in range(first, last + 1))


class Deltas:
    """How many positions each token moves, int64 or int32 `[tokens]`.

    Calls with the same object share its tables of cos and sin, because the layers of a cache all move alike and making
    the tables costs more than the rotation itself. Do not change the numbers meanwhile.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._made: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def tables(self, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of each token's angles, `[tokens, pairs]`."""
        key = (inv_freq.data_ptr(), dtype)
        if key not in self._made:  # with the frequencies, so that their address stays taken
            self._made[key] = (inv_freq, *_tables(self.values, inv_freq, dtype))
        return self._made[key][1:]


@torch.no_grad()
def rotate_keys_plain(
    k: torch.Tensor,
    delta: int | Deltas,
    inv_freq: torch.Tensor,
    layout: Layout,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write k, dequantised and rotated by `delta * inv_freq`, to `out`; arguments are checked."""
    compute = torch.promote_types(out.dtype, torch.float32)
    states = k.to(compute) if scale is None else k.to(compute) * scale.to(compute)
    cos, sin = delta.tables(inv_freq, compute) if isinstance(delta, Deltas) else _tables(delta, inv_freq, compute)
    (first, second), (to_first, to_second) = layout.split(states), layout.split(out)
    to_first.copy_(torch.mul(first, cos).addcmul_(second, sin, value=-1))
    to_second.copy_(torch.mul(second, cos).addcmul_(first, sin))
    for source, target in zip(layout.still(states), layout.still(out), strict=True):
        target.copy_(source)


def _tables(delta: int | torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin, `[pairs]` or `[tokens, pairs]`: angles in fp64, and once per run of equal deltas."""
    freq = inv_freq.double()
    if isinstance(delta, int):
        angles = freq * delta
        return angles.cos().to(dtype), angles.sin().to(dtype)
    values, which = torch.unique_consecutive(delta, return_inverse=True)
    angles = values[:, None].double() * freq
    return angles.cos().to(dtype)[which], angles.sin().to(dtype)[which]


QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def rotate_keys(
    k: torch.Tensor,
    delta: int | torch.Tensor | Deltas,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
    rotary_offset: int = 0,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Move rotary keys by `delta` positions while copying them: R(p + delta) = R(delta) R(p) (RoFormer, 2021).

    Never writes k. Angles are exact to fp32 at any distance; products are fp32. A factor of the model on cos and sin is
    part of k already and is not applied again.

    Args:
        k: `[..., kv_heads, tokens, head_dim]`, three or four dimensions, any strides with a contiguous last dimension; floating
            point, or int8 / fp8 with a `scale`.
        delta: one int, or int64 / int32 `[tokens]` for several chunks in one call; a `Deltas` if many calls share it. For
            unrotated keys it is the position itself.
        inv_freq: `[pairs]`, radians per position, at least fp32, on any device. Dimensions `rotary_offset` to
            `rotary_offset + 2 * pairs - 1` rotate; the others are copied.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (i, i + pairs).
        rotary_offset: the first dimension that rotates.
        scale: floating point, multiplies k before the rotation; any shape that broadcasts to k's (`[tokens, 1]`,
            `[kv_heads, 1, 1]`).
        out: of k's shape, floating point, such as a slice of the blended cache; by default a new tensor in k's dtype (fp32
            for a quantised k).
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        `out`.

    Raises:
        ValueError: wrong shapes, dtypes or devices, or an out that shares memory with itself or with k. Rotating in place would
            rotate again on the next use. Other tokens of the same buffer are fine.
    """
    layout = Layout(_pairs(inv_freq), rotary_offset, interleaved)
    _check_states(k, layout, scale)
    steps = delta.values if isinstance(delta, Deltas) else delta
    require(
        isinstance(steps, int) or (isinstance(steps, torch.Tensor) and tuple(steps.shape) == (k.shape[-2],)),
        f"delta must be an int or an integer tensor [{k.shape[-2]}], one per token, got {_shape(steps)}",
    )
    if isinstance(steps, torch.Tensor):
        check_beside("delta", steps, k, WHOLE)
    if out is None:
        out = torch.empty(k.shape, dtype=torch.float32 if k.dtype in QUANTISED else k.dtype, device=k.device)
    _check_out(out, k)
    check_contiguous(k=k, out=out)
    inv_freq = inv_freq.to(k.device)
    if choose_rotation_backend(k, out, backend) == "triton":
        from blend_kernels.rotation_kernel import launch_rotation

        launch_rotation(k, steps, inv_freq, layout, scale, out)
    else:
        turns = Deltas(delta) if isinstance(delta, torch.Tensor) else delta
        rotate_keys_plain(k, turns, inv_freq, layout, scale, out)
    return out


def choose_rotation_backend(k: torch.Tensor, out: torch.Tensor, asked: Backend | None) -> Backend:
    """As `choose_backend`, but fp8 on GPUs below compute capability 8.9 uses torch."""
    old = k.is_cuda and torch.cuda.get_device_capability(k.device) < (8, 9)
    beyond = k.dtype.itemsize == 1 and k.dtype != torch.int8 and old
    return "torch" if asked is None and beyond else choose_backend(asked, k, out)


def _pairs(inv_freq: torch.Tensor) -> int:
    require(
        inv_freq.ndim == 1 and inv_freq.shape[0] > 0 and inv_freq.dtype in (torch.float32, torch.float64),
        f"inv_freq must be [rotary_dim / 2] in fp32 or fp64 (half precision loses whole turns), got {_shape(inv_freq)}",
    )
    require(not inv_freq.is_meta, "inv_freq is on meta, where there are no numbers")
    return int(inv_freq.shape[0])


def _check_states(k: torch.Tensor, layout: Layout, scale: torch.Tensor | None) -> None:
    require(k.ndim in (3, 4), f"k must be [batch, kv_heads, tokens, head_dim] or without batch, got {list(k.shape)}")
    require(k.dtype in FLOATS or k.dtype in QUANTISED, f"k must be floating point or int8, got {k.dtype}")
    require(k.dtype in FLOATS or scale is not None, f"k is {k.dtype}: give the scale that dequantises it")
    stop = layout.offset + 2 * layout.pairs
    require(
        layout.offset >= 0 and stop <= k.shape[-1],
        f"dimensions {layout.offset} to {stop} should turn, but head_dim is {k.shape[-1]}",
    )
    if scale is not None:
        fits = scale.ndim <= k.ndim and all(
            s in (1, n) for s, n in zip(reversed(scale.shape), reversed(k.shape), strict=False)
        )
        require(fits, f"scale {list(scale.shape)} does not broadcast to k {list(k.shape)}")
        check_beside("scale", scale, k, FLOATS)


def _check_out(out: torch.Tensor, k: torch.Tensor) -> None:
    require(out.shape == k.shape, f"out must have the shape of k, {list(k.shape)}, got {list(out.shape)}")
    require(out.dtype in FLOATS, f"out must be floating point, got {out.dtype}")
    require(out.device == k.device, f"out is on {out.device}, k on {k.device}; copy k there first")
    repeated = any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True))
    require(not repeated, "out has elements that share memory (a dimension of stride 0); give one of its own")
    require(not share_memory(k, out), "out shares memory with k; turning in place is refused")


def _shape(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
