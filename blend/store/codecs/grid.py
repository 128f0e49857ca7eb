"""Numbers on a grid of few bits, with a centre and a step for each channel and group of tokens.

    x ~ centre + step * number,    -most <= number <= most

Keys differ by channel far more than by token (KIVI, Liu et al. 2024, section 3), and once their positions are taken out
(KVQuant, Hooper et al. 2024, section 3.2) a channel's bias is one number, which its centre takes up. Measured here values gain
by the same treatment (docs/codecs.md), so there is one for both.

Centre and step are bfloat16, which has the range of float32, and numbers are made for them as they are stored: what they lose
by rounding costs a little range and no precision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.store.codecs.base import Codec, require_shapes

if TYPE_CHECKING:
    import torch


_LEAST_STEP = 1e-30  # of channels that are constant: theirs is centre + 0
_PAIRS = (("k", "k.s"), ("v", "v.s"))


class Grid(ABC):
    """Which numbers there are and how they are kept. dtype: of what `pack` makes, in torch.

    most: the largest number. zero: `unpack` writes number + zero, which saves it a pass over the numbers.
    """

    dtype: str
    most: float
    zero: float = 0.0

    @abstractmethod
    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of the grid next to these, float32, none beyond `most`; these may be overwritten."""

    @abstractmethod
    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of the grid, float32 `[kv_heads, tokens, head_dim]`, as a contiguous tensor of three dimensions."""

    def tokens(self, packed: torch.Tensor, width: int) -> int:
        """How many tokens of heads of that width were packed. Raises ValueError when it is not what `pack` makes."""
        if packed.shape[2] != width:
            raise ValueError(f"{packed.shape[2]} numbers a head do not go with scales of {width}")
        return packed.shape[1]

    @abstractmethod
    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Write into float32 `[kv_heads, tokens, head_dim]`, each head's rows contiguous."""


class GridCodec(Codec):
    """group: about how many tokens share a centre and a step; fewer than half as many never have their own.

    clips: shares of a group's extent that its steps may span instead of all of it; the few numbers beyond go to the edge.
    fits: how often centre and step are then fitted to the numbers by least squares, and the numbers to them. Both where the
    squared error is less, group by group and channel by channel.
    """

    parts = ("k", "k.s", "v", "v.s")
    unrotated = True

    def __init__(self, name: str, grid: Grid, group: int, clips: tuple[float, ...] = (), fits: int = 0) -> None:
        self.name, self._grid, self._group, self._clips, self._fits = name, grid, group, clips, fits

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Numbers, and under ".s" the centres and then the steps of all groups, bfloat16 `[kv_heads, 2 * groups, head_dim]`.

        Raises `StoreError` for values that are not finite, or so large that their differences are not.
        """
        encoded = {}
        for states, (name, scales) in zip((keys, values), _PAIRS, strict=True):
            encoded[name], encoded[scales] = self._encoded(states)
        return encoded

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Into new tensors, float32 without a dtype."""
        import torch

        keys, values = (torch.empty(shape, dtype=dtype or torch.float32) for shape in self._shapes(parts))
        self.decode_into(parts, keys, values)
        return keys, values

    def decode_into(self, parts: Mapping[str, torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Straight into float32 on the CPU; anything else by way of a layer of float32, where nothing more is rounded."""
        require_shapes(self._shapes(parts), (keys, values))
        for out, (name, scales) in zip((keys, values), _PAIRS, strict=True):
            self._decode_into(parts[name], parts[scales], out)

    def _encoded(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        # A GPU makes the numbers of what it holds: a thread would take far longer for them than a GPU for the KV itself. Other
        # devices lack some of the types.
        states = states.detach().to(states.device if states.is_cuda else "cpu", torch.float32)
        tokens = states.shape[1]
        count, size = _groups(tokens, max(1, round(tokens / self._group)))
        lacking = count * size - tokens
        filled = torch.cat((states, states[:, -1:].expand(-1, lacking, -1)), dim=1) if lacking else states.contiguous()
        grouped = filled.view(
            filled.shape[0], count, size, filled.shape[2]
        )  # [kv_heads, groups, tokens of a group, head_dim]
        low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
        centre = ((low + high) / 2).bfloat16().float()
        extent = torch.maximum(high - centre, centre - low)
        step, numbers = self._clipped(grouped - centre, extent)
        for _ in range(self._fits):
            centre, step, numbers = self._fitted(grouped, centre, step, numbers)
        scales = torch.cat((centre, step), dim=1).squeeze(2).bfloat16()
        if not scales.isfinite().all():
            raise StoreError(
                f"a value is not finite, or too large for the codec {self.name}: use bfloat16 or float32 for this model"
            )
        return self._grid.pack(numbers.flatten(1, 2)[:, :tokens]).cpu(), scales.cpu()

    def _clipped(self, states: torch.Tensor, extent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps and numbers of centred states, `[kv_heads, groups, tokens, head_dim]`."""
        step, numbers = self._tried(states, extent)
        for clip in self._clips:
            other = self._tried(states, extent * clip)
            step, numbers = _better(_error(states, *other) < _error(states, step, numbers), other, (step, numbers))
        return step, numbers

    def _fitted(
        self, states: torch.Tensor, centre: torch.Tensor, step: torch.Tensor, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Centres, steps and numbers: the line through the states over their numbers, and the numbers next to it."""
        number, state = numbers.mean(2, keepdim=True), states.mean(2, keepdim=True)
        apart = numbers - number
        spread = apart.square().sum(2, keepdim=True).clamp_min(_LEAST_STEP)
        slope = ((states - state) * apart).sum(2, keepdim=True) / spread
        fitted_step = slope.clamp_min(_LEAST_STEP).bfloat16().float()
        fitted = (state - fitted_step * number).bfloat16().float()
        other = fitted, fitted_step, self._grid.nearest((states - fitted) / fitted_step)
        less = _error(states - fitted, *other[1:]) < _error(states - centre, step, numbers)
        return _better(less, other, (centre, step, numbers))

    def _tried(self, states: torch.Tensor, extent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A little more than it takes, so that rounding to bfloat16 leaves nothing beyond the last step.
        step = (extent * ((1 + 2**-8) / self._grid.most)).clamp_min(_LEAST_STEP).bfloat16().float()
        return step, self._grid.nearest(states / step)

    def _shapes(self, parts: Mapping[str, torch.Tensor]) -> list[tuple[int, ...]]:
        """Of keys and values. Raises ValueError when the parts do not belong together."""
        return list(self._described(parts))

    def _described(self, parts: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, ...]]:
        import torch

        for name, scales in _PAIRS:
            packed, (heads, rows, width) = parts[name], parts[scales].shape
            if packed.dtype != getattr(torch, self._grid.dtype) or parts[scales].dtype != torch.bfloat16:
                raise ValueError(f"codec {self.name!r} does not write {packed.dtype} with {parts[scales].dtype}")
            tokens = self._grid.tokens(packed, width)
            count = rows // 2
            if packed.shape[0] != heads or rows % 2 or not 0 < count <= tokens or _groups(tokens, count)[0] != count:
                raise ValueError(f"{rows} rows of scales do not go with {tokens} tokens in {packed.shape[0]} heads")
            yield heads, tokens, width

    def _decode_into(self, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        direct = out.dtype == torch.float32 and out.device.type == "cpu" and out.stride()[1:] == (out.shape[2], 1)
        target = out if direct else torch.empty(out.shape)
        self._grid.unpack(packed, target)
        count = scales.shape[1] // 2
        wide = scales.float().unsqueeze(2)
        centre, step = wide[:, :count], wide[:, count:]
        if self._grid.zero:
            centre = torch.sub(centre, step, alpha=self._grid.zero)
        size = _groups(out.shape[1], count)[1]
        whole = out.shape[1] // size
        if whole:
            rows = target[:, : whole * size].view(out.shape[0], whole, size, out.shape[2])
            torch.addcmul(centre[:, :whole], rows, step[:, :whole], out=rows)
        if whole < count:
            rows = target[:, whole * size :]
            torch.addcmul(centre[:, whole], rows, step[:, whole], out=rows)
        if not direct:
            out.copy_(target)


def _better(
    where: torch.Tensor, these: tuple[torch.Tensor, ...], else_those: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.where(where, one, other) for one, other in zip(these, else_those, strict=True))


def _error(states: torch.Tensor, step: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Of each group and channel, `[kv_heads, groups, 1, head_dim]`."""
    return (numbers * step - states).square_().sum(2, keepdim=True)


def _groups(tokens: int, count: int) -> tuple[int, int]:
    """How many groups of how many tokens there are, the last of what is left, where there are to be about `count`."""
    size = -(-tokens // count)
    return -(-tokens // size), size


class _Bytes(Grid):
    dtype = "int8"
    most = 127.0

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round_().clamp_(-self.most, self.most)

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        return numbers.to(torch.int8).contiguous()

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(packed)


INT8 = GridCodec("int8", _Bytes(), group=256)


class _Nibbles(Grid):
    """A head's numbers in a row, the first half of them in the lower halves of the bytes, the second half in the upper ones.

    Heads of one number or none have a byte a token, so that their tokens can be told.
    """

    dtype = "uint8"
    most = 7.5
    zero = 7.5

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.sub_(0.5).round_().clamp_(-8, 7).add_(0.5)

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        heads, tokens, width = numbers.shape
        flat = (numbers + self.zero).to(torch.uint8).flatten(1)
        packed = flat.new_zeros(heads, 1, _bytes(tokens, width))
        half = packed.shape[2]
        packed[:, 0, : flat.shape[1]] = flat[:, :half]
        packed[:, 0, : max(0, flat.shape[1] - half)] |= flat[:, half:] << 4
        return packed

    def tokens(self, packed: torch.Tensor, width: int) -> int:
        half = packed.shape[2]
        tokens = half if width < 2 else 2 * half // width
        if packed.shape[1] != 1 or half != _bytes(tokens, width):
            raise ValueError(f"{half} bytes a head do not go with scales of {width}")
        return tokens

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        flat, both = out.flatten(1), packed.squeeze(1).numpy()
        half = min(both.shape[1], flat.shape[1])
        flat[:, :half] = torch.from_numpy(both[:, :half] & 15)
        flat[:, half:] = torch.from_numpy(both[:, : flat.shape[1] - half] >> 4)


def _bytes(tokens: int, width: int) -> int:
    """Of a head."""
    return tokens if width < 2 else -(-tokens * width // 2)


INT4 = GridCodec("int4", _Nibbles(), group=48, clips=(0.9, 0.75), fits=3)
