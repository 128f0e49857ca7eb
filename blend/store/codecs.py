"""Codecs: how a layer's keys and values become named tensors, and back. Those that come with kvblend, and one's own.

A store reads and writes whatever parts a codec names. Every entry names its codec, so a store may hold entries of several.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from blend.errors import ConfigError, StoreError
from blend.types import dtype_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Parts = Mapping[str, Tensor]
    KeysAndValues = tuple[Tensor, Tensor]
    Grid = tuple[Tensor, Tensor, Tensor]  # centres, steps and numbers

_LEAST_STEP = 1e-30  # of channels that are constant: theirs is centre + 0
_PAIRS = (("k", "k.s"), ("v", "v.s"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Codec(ABC):
    """Encodes one layer; stateless, so one instance serves every thread.

    name: what entries call it. parts: names of the tensors that `encode` makes, always all of them. unrotated: whether keys
    come with positions taken out (`ChunkCache.unrotated`), because they encode better so; it has to encode others as well.
    """

    name: str
    parts: tuple[str, ...]
    unrotated: bool = False

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Contiguous CPU tensors of three dimensions under `parts`, which share no memory with the arguments.

        keys, values: `[kv_heads, tokens, head_dim]` each, on any device.
        Raises `StoreError` when the values do not fit into the encoding.
        """

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype | None) -> KeysAndValues:
        """Keys and values in `dtype`, each `[kv_heads, tokens, head_dim]`; they may share memory with `parts`.

        Without a dtype, in the floating-point dtype that is cheapest to make: the caller copies them elsewhere. Raises
        ValueError when the parts are not what `encode` makes.
        """

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether `decode` gives back every bit of keys and values that `encode` got in `dtype`."""
        return False


class CastCodec(Codec):
    """name: of the dtype in torch, or "native" for whatever dtype comes."""

    parts = ("k", "v")

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Both tensors rounded to the nearest value of the dtype; raises `StoreError` where one exceeds its range."""
        return {"k": self._cast(keys), "v": self._cast(values)}

    def decode(self, parts: Parts, dtype: torch.dtype | None) -> KeysAndValues:
        """Both tensors widened or rounded to `dtype`; no copy without one, or when they have it already."""
        for part in parts.values():
            if self.name not in ("native", dtype_name(part.dtype)) or not part.dtype.is_floating_point:
                raise ValueError(f"codec {self.name!r} does not write {part.dtype}")
        keys, values = parts["k"], parts["v"]
        if dtype is None:
            return keys, values
        return keys.to(dtype), values.to(dtype)

    def lossless(self, dtype: torch.dtype) -> bool:
        """Where the dtype that is written holds every value of `dtype`."""
        import torch

        written = dtype if self.name == "native" else getattr(torch, self.name)
        return bool(torch.promote_types(dtype, written) == written)

    def _cast(self, tensor: Tensor) -> Tensor:
        import torch

        dtype = tensor.dtype if self.name == "native" else getattr(torch, self.name)
        tensor = tensor.detach()
        cast = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        may_overflow = dtype == torch.float16 != tensor.dtype
        if may_overflow and not torch.equal(cast.isinf(), tensor.cpu().isinf()):
            raise StoreError("a value exceeds the range of float16; use the codec bfloat16 or float32 for this model")
        return cast


class GridCodec(Codec):
    """Numbers on a grid of few bits, with a centre and a step for each channel and group of tokens.

        x ~ centre + step * number,    -most <= number <= most

    Keys differ by channel far more than by token (KIVI, Liu et al. 2024, section 3), and once their positions are taken out
    (KVQuant, Hooper et al. 2024, section 3.2) a channel's bias is one number, which its centre takes up. Measured here values
    gain by the same treatment (docs/codecs.md), so there is one for both. Centre and step are bfloat16, which has the range of
    float32, and numbers are made for them as they are stored.

    `clips` and `fits` apply where the squared error is less, group by group and channel by channel.

    Attributes:
        packed: dtype of what `_pack` makes.
        most: the largest number.
        zero: `_unpack` writes number + zero, which saves it a pass.
        group: about how many tokens share a centre and a step; fewer than half as many never have their own.
        clips: shares of a group's extent that its steps may span instead of all of it; the few numbers beyond go to the edge.
        fits: how often centre and step are then fitted to the numbers by least squares, and the numbers to them.

    """

    parts = ("k", "k.s", "v", "v.s")
    unrotated = True
    packed: str
    most: float
    zero: float = 0.0
    group: int
    clips: tuple[float, ...] = ()
    fits: int = 0

    @abstractmethod
    def _nearest(self, numbers: Tensor) -> Tensor:
        """The numbers of the grid next to these, float32, none beyond `most`; these may be overwritten."""

    @abstractmethod
    def _pack(self, numbers: Tensor) -> Tensor:
        """Numbers of the grid, float32 `[kv_heads, tokens, head_dim]`, as a contiguous tensor of three dimensions."""

    @abstractmethod
    def _tokens(self, packed: Tensor, width: int) -> int:
        """How many tokens of heads of that width were packed. Raises ValueError when it is not what `_pack` makes."""

    @abstractmethod
    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write into float32 `[kv_heads, tokens, head_dim]`, each head's rows contiguous."""

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Numbers, and under ".s" the centres and then the steps of all groups, bfloat16 `[kv_heads, 2 * groups, head_dim]`."""
        encoded = {}
        for states, (name, scales) in zip((keys, values), _PAIRS, strict=True):
            encoded[name], encoded[scales] = self._encoded(states)
        return encoded

    def decode(self, parts: Parts, dtype: torch.dtype | None) -> KeysAndValues:
        """Into new tensors, float32 without a dtype; other dtypes by way of float32, where nothing more is rounded."""
        import torch

        keys, values = (self._decoded(parts[name], parts[scales]) for name, scales in _PAIRS)
        return keys.to(dtype or torch.float32), values.to(dtype or torch.float32)

    def _encoded(self, states: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        # A GPU makes the numbers of what it holds: a thread would take far longer for them than a GPU for the KV itself. Other
        # devices lack some of the types.
        device = states.device if states.is_cuda else "cpu"
        states = states.detach().to(device, torch.float32)
        heads, tokens, width = states.shape
        count, size = _groups(tokens, max(1, round(tokens / self.group)))
        missing = count * size - tokens
        padding = states[:, -1:].expand(-1, missing, -1)
        padded = torch.cat((states, padding), dim=1)
        # [kv_heads, groups, tokens of a group, head_dim]
        grouped = padded.view(heads, count, size, width)
        low = grouped.amin(2, keepdim=True)
        high = grouped.amax(2, keepdim=True)
        centre = _rounded((low + high) / 2)
        extent = torch.maximum(high - centre, centre - low)
        grid = self._grid(grouped, centre, extent)
        for clip in self.clips:
            grid = _better(grouped, self._grid(grouped, centre, extent * clip), grid)
        for _ in range(self.fits):
            grid = _better(grouped, self._fitted(grouped, grid), grid)
        centre, step, numbers = grid
        scales = torch.cat((centre, step), dim=1)
        scales = scales.squeeze(2).bfloat16()
        if not scales.isfinite().all():
            raise StoreError(
                f"a value is not finite, or too large for the codec {self.name}: use bfloat16 or float32 for this model"
            )
        packed = self._pack(numbers.flatten(1, 2)[:, :tokens])
        return packed.cpu(), scales.cpu()

    def _grid(self, states: Tensor, centre: Tensor, extent: Tensor) -> Grid:
        """The grid over so much of the states' extent, `[kv_heads, groups, tokens, head_dim]`."""
        # A little more than it takes, so that rounding to bfloat16 leaves nothing beyond the last step.
        step = extent * ((1 + 2**-8) / self.most)
        step = _rounded(step.clamp_min(_LEAST_STEP))
        return centre, step, self._nearest((states - centre) / step)

    def _fitted(self, states: Tensor, grid: Grid) -> Grid:
        """The line through the states over their numbers, and the numbers next to it."""
        numbers = grid[2]
        mean_number = numbers.mean(2, keepdim=True)
        mean_state = states.mean(2, keepdim=True)
        apart = numbers - mean_number
        spread = apart.square().sum(2, keepdim=True)
        product = ((states - mean_state) * apart).sum(2, keepdim=True)
        slope = product / spread.clamp_min(_LEAST_STEP)
        step = _rounded(slope.clamp_min(_LEAST_STEP))
        centre = _rounded(mean_state - step * mean_number)
        return centre, step, self._nearest((states - centre) / step)

    def _decoded(self, packed: Tensor, scales: Tensor) -> Tensor:
        """Float32 `[kv_heads, tokens, head_dim]`. Raises ValueError when the parts do not belong together."""
        import torch

        if packed.dtype != getattr(torch, self.packed) or scales.dtype != torch.bfloat16:
            raise ValueError(f"codec {self.name!r} does not write {packed.dtype} with {scales.dtype}")
        heads, rows, width = scales.shape
        tokens = self._tokens(packed, width)
        count, odd = divmod(rows, 2)
        is_possible = not odd and 0 < count <= tokens and packed.shape[0] == heads
        if not is_possible or _groups(tokens, count)[0] != count:
            raise ValueError(f"{rows} rows of scales do not go with {tokens} tokens in {packed.shape[0]} heads")
        states = torch.empty(heads, tokens, width)
        self._unpack(packed, states)
        scales = scales.float().unsqueeze(2)
        centre = scales[:, :count]
        step = scales[:, count:]
        if self.zero:
            centre = torch.sub(centre, step, alpha=self.zero)
        size = _groups(tokens, count)[1]
        whole = tokens // size
        if whole:
            grouped = states[:, : whole * size].view(heads, whole, size, width)
            torch.addcmul(centre[:, :whole], grouped, step[:, :whole], out=grouped)
        if whole < count:
            last = states[:, whole * size :]
            torch.addcmul(centre[:, whole], last, step[:, whole], out=last)
        return states


def _rounded(scales: Tensor) -> Tensor:
    """Centres or steps as they are stored."""
    return scales.bfloat16().float()


def _better(states: Tensor, new: Grid, old: Grid) -> Grid:
    """For each group and channel the grid whose squared error is less, the old one where both are as good."""
    import torch

    is_less = _error(states, *new) < _error(states, *old)
    centre, step, numbers = (torch.where(is_less, *pair) for pair in zip(new, old, strict=True))
    return centre, step, numbers


def _error(states: Tensor, centre: Tensor, step: Tensor, numbers: Tensor) -> Tensor:
    """Squared error of each group and channel, `[kv_heads, groups, 1, head_dim]`."""
    errors = numbers * step - (states - centre)
    return errors.square_().sum(2, keepdim=True)


def _groups(tokens: int, count: int) -> tuple[int, int]:
    """How many groups of how many tokens there are, the last of what is left, where there are to be about `count`."""
    size = -(-tokens // count)
    return -(-tokens // size), size


class Int8Codec(GridCodec):
    """Bytes."""

    name = "int8"
    packed = "int8"
    most = 127.0
    group = 256

    def _nearest(self, numbers: Tensor) -> Tensor:
        return numbers.round_().clamp_(-self.most, self.most)

    def _pack(self, numbers: Tensor) -> Tensor:
        import torch

        return numbers.to(torch.int8).contiguous()

    def _tokens(self, packed: Tensor, width: int) -> int:
        if packed.shape[2] != width:
            raise ValueError(f"{packed.shape[2]} numbers a head do not go with scales of {width}")
        return packed.shape[1]

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(packed)


class Int4Codec(GridCodec):
    """A head's numbers in a row, the first half of them in the lower halves of the bytes, the second half in the upper ones.

    A head of width 0 or 1 takes one byte a token, so that the number of tokens can be read from the size.
    """

    name = "int4"
    packed = "uint8"
    most = 7.5
    zero = 7.5
    group = 48
    clips = (0.9, 0.75)
    fits = 3

    def _nearest(self, numbers: Tensor) -> Tensor:
        whole = numbers.sub_(0.5).round_()
        return whole.clamp_(-8, 7).add_(0.5)

    def _pack(self, numbers: Tensor) -> Tensor:
        import torch
        from torch.nn.functional import pad

        _, tokens, width = numbers.shape
        half = _bytes(tokens, width)
        flat = (numbers + self.zero).to(torch.uint8).flatten(1)
        flat = pad(flat, (0, 2 * half - flat.shape[1]))
        packed = flat[:, :half] | flat[:, half:] << 4
        return packed.unsqueeze(1)

    def _tokens(self, packed: Tensor, width: int) -> int:
        half = packed.shape[2]
        tokens = half if width < 2 else 2 * half // width
        if packed.shape[1] != 1 or half != _bytes(tokens, width):
            raise ValueError(f"{half} bytes a head do not go with scales of {width}")
        return tokens

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        import torch

        flat = out.flatten(1)
        pairs = packed.squeeze(1).numpy()  # whose shifts are faster
        numbers = torch.cat((torch.from_numpy(pairs & 15), torch.from_numpy(pairs >> 4)), dim=1)
        flat.copy_(numbers[:, : flat.shape[1]])


def _bytes(tokens: int, width: int) -> int:
    """Bytes that a head takes."""
    return tokens if width < 2 else -(-tokens * width // 2)


_CODECS: dict[str, Codec] = {name: CastCodec(name) for name in ("native", "float32", "bfloat16", "float16")}
_CODECS |= {"int8": Int8Codec(), "int4": Int4Codec()}
_BUILT_IN = tuple(_CODECS)


def register_codec(codec: Codec) -> Codec:
    """Make a codec known in this process; returns it. In a process without it, its entries are damaged.

    Raises `ConfigError` for the name of a codec of kvblend, and for names that cannot stand in an entry.
    """
    names = (codec.name, *codec.parts)
    if not codec.parts or len({*codec.parts}) < len(codec.parts) or not all(map(_NAME.fullmatch, names)):
        raise ConfigError(
            f"the codec {codec.name!r:.80} needs a name, and parts with others, of letters, digits, dots, dashes, underscores"
        )
    if codec.name in _BUILT_IN:
        raise ConfigError(f"there is another codec of the name {codec.name!r}; give yours a name of its own")
    _CODECS[codec.name] = codec
    return codec


def codec_names() -> tuple[str, ...]:
    """Every name that `get_codec` knows."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of that name; raises `ConfigError` that lists the choices."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(_CODECS)}") from None
