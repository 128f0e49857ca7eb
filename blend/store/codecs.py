"""Codecs: how a layer's keys and values become named tensors, and back. Those that come with kvblend, and one's own.

A store reads and writes whatever parts a codec names. Every entry names its codec, so a store may hold entries of several.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from blend.errors import ConfigError, StoreError

if TYPE_CHECKING:
    import torch

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
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Contiguous CPU tensors of three dimensions under `parts`, which share no memory with the arguments.

        keys, values: `[kv_heads, tokens, head_dim]` each, on any device.
        Raises `StoreError` when the values do not fit into the encoding.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `dtype`, each `[kv_heads, tokens, head_dim]`; they may share memory with `parts`.

        Without a dtype, in the floating-point dtype that is cheapest to make: the caller copies them elsewhere. Raises
        ValueError when the parts are not what `encode` makes.
        """

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether `decode` gives back every bit of keys and values that `encode` got in `dtype`."""
        return False

    def decode_into(self, parts: Mapping[str, torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Decode into tensors of any floating-point dtype, strides and device.

        Raises ValueError, and writes nothing, when the parts are not what `encode` makes of tensors of these shapes.
        """
        decoded = self.decode(parts, None)
        require_shapes([tuple(one.shape) for one in decoded], (keys, values))
        for source, out in zip(decoded, (keys, values), strict=True):
            out.copy_(source)


def require_shapes(found: list[tuple[int, ...]], outs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raise ValueError unless keys and values have the shapes of their destinations: a plain copy would broadcast."""
    needed = [tuple(out.shape) for out in outs]
    if found != needed:
        shown = [", ".join(str(list(shape)) for shape in shapes) for shapes in (found, needed)]
        raise ValueError(f"it has shapes {shown[0]}, needed are {shown[1]}")


class CastCodec(Codec):
    """name: of the dtype in torch, or "native" for whatever dtype comes."""

    parts = ("k", "v")

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both tensors rounded to the nearest value of the dtype; raises `StoreError` where one exceeds its range."""
        return {"k": self._cast(keys), "v": self._cast(values)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors widened or rounded to `dtype`; no copy without one, or when they have it already."""
        for part in parts.values():
            kept = str(part.dtype).removeprefix("torch.")
            if self.name not in ("native", kept) or not part.dtype.is_floating_point:
                raise ValueError(f"codec {self.name!r} does not write {part.dtype}")
        keys, values = parts["k"], parts["v"]
        return (keys, values) if dtype is None else (keys.to(dtype), values.to(dtype))

    def lossless(self, dtype: torch.dtype) -> bool:
        """Where the dtype that is written holds every value of `dtype`."""
        import torch

        kept = dtype if self.name == "native" else getattr(torch, self.name)
        return bool(torch.promote_types(dtype, kept) == kept)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        dtype = tensor.dtype if self.name == "native" else getattr(torch, self.name)
        cast = torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())
        if dtype == torch.float16 != tensor.dtype and not torch.equal(cast.isinf(), tensor.detach().cpu().isinf()):
            raise StoreError("a value exceeds the range of float16; use the codec bfloat16 or float32 for this model")
        return cast


class GridCodec(Codec):
    """Numbers on a grid of few bits, with a centre and a step for each channel and group of tokens.

        x ~ centre + step * number,    -most <= number <= most

    Keys differ by channel far more than by token (KIVI, Liu et al. 2024, section 3), and once their positions are taken out
    (KVQuant, Hooper et al. 2024, section 3.2) a channel's bias is one number, which its centre takes up. Measured here values
    gain by the same treatment (docs/codecs.md), so there is one for both. Centre and step are bfloat16, which has the range of
    float32, and numbers are made for them as they are stored.

    most: the largest number. zero: `_unpack` writes number + zero, which saves it a pass. packed: dtype of what `_pack` makes.
    group: about how many tokens share a centre and a step; fewer than half as many never have their own. clips: shares of a
    group's extent that its steps may span instead of all of it; the few numbers beyond go to the edge. fits: how often centre
    and step are then fitted to the numbers by least squares, and the numbers to them. Both where the squared error is less,
    group by group and channel by channel.
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
    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of the grid next to these, float32, none beyond `most`; these may be overwritten."""

    @abstractmethod
    def _pack(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of the grid, float32 `[kv_heads, tokens, head_dim]`, as a contiguous tensor of three dimensions."""

    @abstractmethod
    def _tokens(self, packed: torch.Tensor, width: int) -> int:
        """How many tokens of heads of that width were packed. Raises ValueError when it is not what `_pack` makes."""

    @abstractmethod
    def _unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Write into float32 `[kv_heads, tokens, head_dim]`, each head's rows contiguous."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Numbers, and under ".s" the centres and then the steps of all groups, bfloat16 `[kv_heads, 2 * groups, head_dim]`."""
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
        count, size = _groups(tokens, max(1, round(tokens / self.group)))
        lacking = count * size - tokens
        filled = torch.cat((states, states[:, -1:].expand(-1, lacking, -1)), dim=1) if lacking else states.contiguous()
        # [kv_heads, groups, tokens of a group, head_dim]
        grouped = filled.view(filled.shape[0], count, size, filled.shape[2])
        low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
        centre = ((low + high) / 2).bfloat16().float()
        extent = torch.maximum(high - centre, centre - low)
        step, numbers = self._clipped(grouped - centre, extent)
        for _ in range(self.fits):
            centre, step, numbers = self._fitted(grouped, centre, step, numbers)
        scales = torch.cat((centre, step), dim=1).squeeze(2).bfloat16()
        if not scales.isfinite().all():
            raise StoreError(
                f"a value is not finite, or too large for the codec {self.name}: use bfloat16 or float32 for this model"
            )
        return self._pack(numbers.flatten(1, 2)[:, :tokens]).cpu(), scales.cpu()

    def _clipped(self, states: torch.Tensor, extent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps and numbers of centred states, `[kv_heads, groups, tokens, head_dim]`."""
        step, numbers = self._tried(states, extent)
        for clip in self.clips:
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
        other = fitted, fitted_step, self._nearest((states - fitted) / fitted_step)
        less = _error(states - fitted, *other[1:]) < _error(states - centre, step, numbers)
        return _better(less, other, (centre, step, numbers))

    def _tried(self, states: torch.Tensor, extent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A little more than it takes, so that rounding to bfloat16 leaves nothing beyond the last step.
        step = (extent * ((1 + 2**-8) / self.most)).clamp_min(_LEAST_STEP).bfloat16().float()
        return step, self._nearest(states / step)

    def _shapes(self, parts: Mapping[str, torch.Tensor]) -> list[tuple[int, ...]]:
        """Of keys and values. Raises ValueError when the parts do not belong together."""
        import torch

        found: list[tuple[int, ...]] = []
        for name, scales in _PAIRS:
            packed, (heads, rows, width) = parts[name], parts[scales].shape
            if packed.dtype != getattr(torch, self.packed) or parts[scales].dtype != torch.bfloat16:
                raise ValueError(f"codec {self.name!r} does not write {packed.dtype} with {parts[scales].dtype}")
            tokens = self._tokens(packed, width)
            count = rows // 2
            if packed.shape[0] != heads or rows % 2 or not 0 < count <= tokens or _groups(tokens, count)[0] != count:
                raise ValueError(f"{rows} rows of scales do not go with {tokens} tokens in {packed.shape[0]} heads")
            found.append((heads, tokens, width))
        return found

    def _decode_into(self, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        direct = out.dtype == torch.float32 and out.device.type == "cpu" and out.stride()[1:] == (out.shape[2], 1)
        target = out if direct else torch.empty(out.shape)
        self._unpack(packed, target)
        count = scales.shape[1] // 2
        wide = scales.float().unsqueeze(2)
        centre, step = wide[:, :count], wide[:, count:]
        if self.zero:
            centre = torch.sub(centre, step, alpha=self.zero)
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


class Int8Codec(GridCodec):
    """Bytes."""

    name, packed, most, group = "int8", "int8", 127.0, 256

    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round_().clamp_(-self.most, self.most)

    def _pack(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        return numbers.to(torch.int8).contiguous()

    def _tokens(self, packed: torch.Tensor, width: int) -> int:
        if packed.shape[2] != width:
            raise ValueError(f"{packed.shape[2]} numbers a head do not go with scales of {width}")
        return packed.shape[1]

    def _unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(packed)


class Int4Codec(GridCodec):
    """A head's numbers in a row, the first half of them in the lower halves of the bytes, the second half in the upper ones.

    A head of width 0 or 1 takes one byte a token, so that the number of tokens can be read from the size.
    """

    name, packed, most, zero = "int4", "uint8", 7.5, 7.5
    group, clips, fits = 48, (0.9, 0.75), 3

    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.sub_(0.5).round_().clamp_(-8, 7).add_(0.5)

    def _pack(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        heads, tokens, width = numbers.shape
        flat = (numbers + self.zero).to(torch.uint8).flatten(1)
        packed = flat.new_zeros(heads, 1, _bytes(tokens, width))
        half = packed.shape[2]
        packed[:, 0, : flat.shape[1]] = flat[:, :half]
        packed[:, 0, : max(0, flat.shape[1] - half)] |= flat[:, half:] << 4
        return packed

    def _tokens(self, packed: torch.Tensor, width: int) -> int:
        half = packed.shape[2]
        tokens = half if width < 2 else 2 * half // width
        if packed.shape[1] != 1 or half != _bytes(tokens, width):
            raise ValueError(f"{half} bytes a head do not go with scales of {width}")
        return tokens

    def _unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        flat, both = out.flatten(1), packed.squeeze(1).numpy()
        half = min(both.shape[1], flat.shape[1])
        flat[:, :half] = torch.from_numpy(both[:, :half] & 15)
        flat[:, half:] = torch.from_numpy(both[:, : flat.shape[1] - half] >> 4)


def _bytes(tokens: int, width: int) -> int:
    """Of a head."""
    return tokens if width < 2 else -(-tokens * width // 2)


_BUILT_IN: tuple[Codec, ...] = (*map(CastCodec, ("native", "float32", "bfloat16", "float16")), Int8Codec(), Int4Codec())
_CODECS: dict[str, Codec] = {codec.name: codec for codec in _BUILT_IN}


def register_codec(codec: Codec) -> Codec:
    """Make a codec known in this process; returns it. In a process without it, its entries are damaged.

    Raises `ConfigError` for a name that belongs to another class of codecs, and for names that cannot stand in an entry.
    """
    if not _NAME.fullmatch(codec.name) or not codec.parts or not all(map(_NAME.fullmatch, codec.parts)):
        raise ConfigError(
            f"the codec {codec.name!r:.80} needs a name, and parts with names, of letters, digits, dots, dashes, underscores"
        )
    if len(set(codec.parts)) < len(codec.parts):
        raise ConfigError(f"the codec {codec.name!r} has two parts of one name: {', '.join(codec.parts)}")
    built_in = any(codec.name == one.name for one in _BUILT_IN)
    if built_in or _class_name(_CODECS.get(codec.name, codec)) != _class_name(codec):
        raise ConfigError(f"there is another codec of the name {codec.name!r}; give yours a name of its own")
    _CODECS[codec.name] = codec
    return codec


def _class_name(codec: Codec) -> str:
    """The same for a class that was defined once more, as in a notebook."""
    return f"{type(codec).__module__}.{type(codec).__qualname__}"


def codec_names() -> tuple[str, ...]:
    """Every name that `get_codec` knows."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of that name; raises `ConfigError` that lists the choices."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(_CODECS)}") from None
