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
    Shape = tuple[int, ...]

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

    def decode_into(
        self,
        parts: Parts,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Decode into tensors of any floating-point dtype, strides and device.

        Raises ValueError, and writes nothing, when the parts are not what `encode` makes of tensors of these shapes.
        """
        decoded = self.decode(parts, None)
        require_shapes([tuple(states.shape) for states in decoded], (keys, values))
        for source, out in zip(decoded, (keys, values), strict=True):
            out.copy_(source)


def require_shapes(shapes: list[Shape], outs: KeysAndValues) -> None:
    """Raise ValueError unless keys and values have the shapes of their destinations: a plain copy would broadcast."""
    needed = [tuple(out.shape) for out in outs]
    if shapes != needed:
        raise ValueError(f"it has shapes {_in_words(shapes)}, needed are {_in_words(needed)}")


def _in_words(shapes: list[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


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
        """Into new tensors, float32 without a dtype."""
        import torch

        keys_shape, values_shape = self._shapes(parts)
        keys = torch.empty(keys_shape, dtype=dtype or torch.float32)
        values = torch.empty(values_shape, dtype=dtype or torch.float32)
        self.decode_into(parts, keys, values)
        return keys, values

    def decode_into(
        self,
        parts: Parts,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Straight into float32 on the CPU; anything else by way of a layer of float32, where nothing more is rounded."""
        require_shapes(self._shapes(parts), (keys, values))
        for out, (name, scales) in zip((keys, values), _PAIRS, strict=True):
            self._decode_into(parts[name], parts[scales], out)

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
        step, numbers = self._clipped(grouped - centre, extent)
        for _ in range(self.fits):
            centre, step, numbers = self._fitted(grouped, centre, step, numbers)
        scales = torch.cat((centre, step), dim=1)
        scales = scales.squeeze(2).bfloat16()
        if not scales.isfinite().all():
            raise StoreError(
                f"a value is not finite, or too large for the codec {self.name}: use bfloat16 or float32 for this model"
            )
        packed = self._pack(numbers.flatten(1, 2)[:, :tokens])
        return packed.cpu(), scales.cpu()

    def _clipped(self, states: Tensor, extent: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and numbers of centred states, `[kv_heads, groups, tokens, head_dim]`."""
        step, numbers = self._tried(states, extent)
        for clip in self.clips:
            clipped = self._tried(states, extent * clip)
            is_less = _error(states, *clipped) < _error(states, step, numbers)
            step, numbers = _where(is_less, clipped, (step, numbers))
        return step, numbers

    def _fitted(
        self,
        states: Tensor,
        centre: Tensor,
        step: Tensor,
        numbers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Centres, steps and numbers: the line through the states over their numbers, and the numbers next to it."""
        mean_number = numbers.mean(2, keepdim=True)
        mean_state = states.mean(2, keepdim=True)
        apart = numbers - mean_number
        spread = apart.square().sum(2, keepdim=True)
        product = ((states - mean_state) * apart).sum(2, keepdim=True)
        slope = product / spread.clamp_min(_LEAST_STEP)
        new_step = _rounded(slope.clamp_min(_LEAST_STEP))
        new_centre = _rounded(mean_state - new_step * mean_number)
        new_numbers = self._nearest((states - new_centre) / new_step)
        new_error = _error(states - new_centre, new_step, new_numbers)
        is_less = new_error < _error(states - centre, step, numbers)
        return _where(is_less, (new_centre, new_step, new_numbers), (centre, step, numbers))

    def _tried(self, states: Tensor, extent: Tensor) -> tuple[Tensor, Tensor]:
        # A little more than it takes, so that rounding to bfloat16 leaves nothing beyond the last step.
        step = extent * ((1 + 2**-8) / self.most)
        step = _rounded(step.clamp_min(_LEAST_STEP))
        return step, self._nearest(states / step)

    def _shapes(self, parts: Parts) -> list[Shape]:
        """Shapes of keys and values. Raises ValueError when the parts do not belong together."""
        import torch

        shapes: list[Shape] = []
        for name, scales_name in _PAIRS:
            packed = parts[name]
            scales = parts[scales_name]
            if packed.dtype != getattr(torch, self.packed) or scales.dtype != torch.bfloat16:
                raise ValueError(f"codec {self.name!r} does not write {packed.dtype} with {scales.dtype}")
            heads, rows, width = scales.shape
            tokens = self._tokens(packed, width)
            count, odd = divmod(rows, 2)
            is_possible = not odd and 0 < count <= tokens and packed.shape[0] == heads
            if not is_possible or _groups(tokens, count)[0] != count:
                raise ValueError(f"{rows} rows of scales do not go with {tokens} tokens in {packed.shape[0]} heads")
            shapes.append((heads, tokens, width))
        return shapes

    def _decode_into(
        self,
        packed: Tensor,
        scales: Tensor,
        out: Tensor,
    ) -> None:
        import torch

        heads, tokens, width = out.shape
        is_float32 = out.dtype == torch.float32 and out.device.type == "cpu"
        is_direct = is_float32 and out.stride()[1:] == (width, 1)
        target = out if is_direct else torch.empty(out.shape)
        self._unpack(packed, target)
        count = scales.shape[1] // 2
        scales = scales.float().unsqueeze(2)
        centre = scales[:, :count]
        step = scales[:, count:]
        if self.zero:
            centre = torch.sub(centre, step, alpha=self.zero)
        size = _groups(tokens, count)[1]
        whole = tokens // size
        if whole:
            rows = target[:, : whole * size].view(heads, whole, size, width)
            torch.addcmul(centre[:, :whole], rows, step[:, :whole], out=rows)
        if whole < count:
            rows = target[:, whole * size :]
            torch.addcmul(centre[:, whole], rows, step[:, whole], out=rows)
        if not is_direct:
            out.copy_(target)


def _rounded(scales: Tensor) -> Tensor:
    """Centres or steps as they are stored."""
    return scales.bfloat16().float()


def _where(
    condition: Tensor,
    new: tuple[Tensor, ...],
    old: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """The new values where the condition holds, else the old ones."""
    import torch

    pairs = zip(new, old, strict=True)
    return tuple(torch.where(condition, *pair) for pair in pairs)


def _error(states: Tensor, step: Tensor, numbers: Tensor) -> Tensor:
    """Squared error of each group and channel, `[kv_heads, groups, 1, head_dim]`."""
    errors = numbers * step - states
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

        heads, tokens, width = numbers.shape
        numbers = (numbers + self.zero).to(torch.uint8)
        flat = numbers.flatten(1)
        packed = flat.new_zeros(heads, 1, _bytes(tokens, width))
        half = packed.shape[2]
        upper = flat[:, half:] << 4
        packed[:, 0, : flat.shape[1]] = flat[:, :half]
        packed[:, 0, : upper.shape[1]] |= upper
        return packed

    def _tokens(self, packed: Tensor, width: int) -> int:
        half = packed.shape[2]
        tokens = half if width < 2 else 2 * half // width
        if packed.shape[1] != 1 or half != _bytes(tokens, width):
            raise ValueError(f"{half} bytes a head do not go with scales of {width}")
        return tokens

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        import torch

        flat = out.flatten(1)
        pairs = packed.squeeze(1).numpy()
        half = min(pairs.shape[1], flat.shape[1])
        upper = pairs[:, : flat.shape[1] - half]
        flat[:, :half] = torch.from_numpy(pairs[:, :half] & 15)
        flat[:, half:] = torch.from_numpy(upper >> 4)


def _bytes(tokens: int, width: int) -> int:
    """Bytes that a head takes."""
    return tokens if width < 2 else -(-tokens * width // 2)


_BUILT_IN: tuple[Codec, ...] = (
    CastCodec("native"),
    CastCodec("float32"),
    CastCodec("bfloat16"),
    CastCodec("float16"),
    Int8Codec(),
    Int4Codec(),
)
_CODECS: dict[str, Codec] = {codec.name: codec for codec in _BUILT_IN}


def register_codec(codec: Codec) -> Codec:
    """Make a codec known in this process; returns it. In a process without it, its entries are damaged.

    Raises `ConfigError` for a name that belongs to another class of codecs, and for names that cannot stand in an entry.
    """
    names = (codec.name, *codec.parts)
    if not codec.parts or not all(map(_NAME.fullmatch, names)):
        raise ConfigError(
            f"the codec {codec.name!r:.80} needs a name, and parts with names, of letters, digits, dots, dashes, underscores"
        )
    if len(set(codec.parts)) < len(codec.parts):
        raise ConfigError(f"the codec {codec.name!r} has two parts of one name: {', '.join(codec.parts)}")
    is_built_in = any(codec.name == built_in.name for built_in in _BUILT_IN)
    if is_built_in or _class_name(_CODECS.get(codec.name, codec)) != _class_name(codec):
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
