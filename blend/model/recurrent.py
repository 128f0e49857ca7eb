"""The state of recurrent layers: what they carry from row to row, and how a stored chunk's rows change it.

The state after some rows is affine in the state before them: `S_out = A S_in + C`, where A and C depend on the rows alone. A is
a matrix a head for the gated delta rule (Yang et al. 2025, "Gated Delta Networks"), a number a head or an entry for state space
layers (Dao and Gu 2024, "Transformers are SSMs"). Short convolutions carry their last inputs. So the rows of a stored chunk are
one `Operator`, applied in constant time behind whatever stands before it. `Kind`s say how A acts; `find_kind` measures which
one a layer is. `Carried` is one layer's state along one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from blend.errors import PromptError, UnsupportedModelError

Shape = tuple[int, ...]
Tensors = tuple[Tensor, ...]


class State(NamedTuple):
    """What a layer carries to the next row.

    conv: last inputs of its short convolutions, `[batch, channels, kernel]` each. recurrent: `[batch, *shape]`, or None.
    """

    conv: Tensors
    recurrent: Tensor | None

    @classmethod
    def of(cls, layer: LinearAttentionLayer) -> State:
        """The state that a layer of a transformers cache holds."""
        inputs = [layer.conv_states[index] for index in range(layer.number_of_states)]
        conv = tuple(part for part in inputs if part is not None)
        return cls(conv, layer.recurrent_states[0])

    def layer(self) -> LinearAttentionLayer:
        """A layer of a transformers cache that holds a copy of it; mixers write to theirs."""
        layer = LinearAttentionLayer(number_of_states=max(1, len(self.conv)))
        for index, part in enumerate(self.conv):
            layer.update_conv_state(part, index)
        if self.recurrent is not None:
            layer.update_recurrent_state(self.recurrent)
        return layer

    @property
    def tensors(self) -> Tensors:
        """All of it."""
        return self.conv if self.recurrent is None else (*self.conv, self.recurrent)

    def repeated(self, recurrent: Tensor) -> State:
        """These recurrent states `[batch, *shape]`, each with the inputs of this one's convolutions."""
        batch = recurrent.shape[0]
        conv = tuple(part.expand(batch, *part.shape[1:]) for part in self.conv)
        return State(conv, recurrent)

    @property
    def batch(self) -> int:
        """How many sequences it is of."""
        return self.tensors[-1].shape[0]


@dataclass(frozen=True)
class Decay:
    """Every entry of the state decays by its own factor, or by one factor a head (Mamba, Mamba-2)."""

    a_head: bool

    def probes(self, shape: Shape) -> Tensor:
        """Ones."""
        return torch.ones((1, *shape))

    def factor(self, responses: Tensor) -> Tensor:
        """What is left of the ones."""
        decayed = responses[0]
        if not self.a_head:
            return decayed
        shape = self.factor_shape(tuple(decayed.shape))
        return decayed.flatten(1)[:, :1].reshape(shape)

    def apply(self, factor: Tensor, state: Tensor) -> Tensor:
        """The product, entry by entry."""
        return factor * state

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """The product."""
        return first * second

    def factor_shape(self, shape: Shape) -> Shape:
        """One number a head, or the state's."""
        if not self.a_head:
            return shape
        heads, *sizes = shape
        return (heads, *[1] * len(sizes))


@dataclass(frozen=True)
class Transform:
    """A matrix acts on each head's state `[rows, columns]`, from the left, or from the right on its transpose (delta rule)."""

    right: bool

    def _turned(self, state: Tensor) -> Tensor:
        return state.transpose(-1, -2) if self.right else state

    def probes(self, shape: Shape) -> Tensor:
        """The identity, in as many states as its columns need."""
        state = torch.empty(shape, device="meta")
        *heads, height, width = self._turned(state).shape
        count = -(-height // width)
        identity = torch.eye(height, count * width)
        columns = identity.reshape(height, count, width).transpose(0, 1)
        one_head = columns.reshape(count, *[1] * len(heads), height, width)
        return self._turned(one_head.expand(count, *heads, height, width))

    def factor(self, responses: Tensor) -> Tensor:
        """The columns together."""
        turned = self._turned(responses)
        height = turned.shape[-2]
        columns = torch.cat(tuple(turned), dim=-1)
        return columns[..., :height]

    def apply(self, factor: Tensor, state: Tensor) -> Tensor:
        """The product of matrices."""
        return self._turned(factor @ self._turned(state))

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """The product, the later factor to the left."""
        return second @ first

    def factor_shape(self, shape: Shape) -> Shape:
        """Square matrices."""
        *heads, height, width = shape
        return (*heads, width, width) if self.right else (*heads, height, height)


Kind = Decay | Transform
"""How the rows of a layer act on its recurrent state: which factor A is, and what it does.

    probes          states `[probes, *shape]` whose responses show the factor
    factor          the factor, from what rows make of the probes without the constant, `[probes, *shape]`
    apply           `A S` for states `[..., *shape]`
    joined          the factor of rows with the factor `first`, then rows with the factor `second`
    factor_shape    the shape of the factor for states of this shape
"""
KINDS: tuple[Kind, ...] = (Decay(a_head=True), Decay(a_head=False), Transform(right=False), Transform(right=True))
"""All kinds, the cheapest first."""


class Affine(NamedTuple):
    """`A S + C` of a recurrent state; tensors without batch."""

    kind: Kind
    factor: Tensor
    constant: Tensor

    def apply(self, state: Tensor) -> Tensor:
        """The state behind the rows, from the state before them."""
        return self.kind.apply(self.factor, state) + self.constant


class Operator(NamedTuple):
    """What a run of rows makes of the state before it, and the inputs that its convolutions end with.

    affine: None for a layer that has only convolutions.
    """

    conv: Tensors
    affine: Affine | None

    def then(self, state: State) -> State:
        """The state behind the rows, from the state before them."""
        if self.affine is None or state.recurrent is None:
            return State(self.conv, state.recurrent)
        return State(self.conv, self.affine.apply(state.recurrent))

    def followed_by(self, later: Operator) -> Operator:
        """The operator of these rows and of those right behind them."""
        if self.affine is None or later.affine is None:
            return later
        kind, factor, constant = self.affine
        joined = kind.joined(factor, later.affine.factor)
        return Operator(later.conv, Affine(kind, joined, later.affine.apply(constant)))

    @property
    def tensors(self) -> Tensors:
        """All of it; `LayerState.operator` takes it back."""
        if self.affine is None:
            return self.conv
        return (*self.conv, self.affine.factor, self.affine.constant)


class LeftOut(NamedTuple):
    """Rows `start` to `stop - 1` of a prompt that a pass may leave out, and what they do to the state."""

    start: int
    stop: int
    operator: Operator


@dataclass(frozen=True)
class LayerState:
    """How one layer's state looks.

    Attributes:
        mixer: the module that carries it.
        kind: None for a layer that has only convolutions.
        conv, recurrent: shapes without batch.
        dtypes: of the tensors of `State`.

    """

    mixer: torch.nn.Module
    kind: Kind | None
    conv: tuple[Shape, ...]
    recurrent: Shape
    dtypes: tuple[torch.dtype, ...]

    @property
    def state_shapes(self) -> tuple[Shape, ...]:
        """Shapes of `State.tensors`."""
        conv = tuple((1, *shape) for shape in self.conv)
        return conv if self.kind is None else (*conv, (1, *self.recurrent))

    @property
    def operator_shapes(self) -> tuple[Shape, ...]:
        """Shapes of `Operator.tensors`."""
        conv = tuple((1, *shape) for shape in self.conv)
        if self.kind is None:
            return conv
        return (*conv, self.kind.factor_shape(self.recurrent), self.recurrent)

    def empty_operator(self, dtype: torch.dtype) -> Tensors:
        """The tensors of an operator as a store keeps them, all zeros: convolutions in this dtype, the others in float32."""
        tensors = []
        for index, shape in enumerate(self.operator_shapes):
            part_dtype = dtype if index < len(self.conv) else torch.float32
            tensors.append(torch.zeros(prod(shape), dtype=part_dtype))
        return tuple(tensors)

    @property
    def operator_bytes(self) -> int:
        """Bytes of an operator."""
        pairs = zip(self.operator_shapes, self._operator_dtypes, strict=False)
        return sum(prod(shape) * dtype.itemsize for shape, dtype in pairs)

    @property
    def _operator_dtypes(self) -> tuple[torch.dtype, ...]:
        return (*self.dtypes, self.dtypes[-1])  # the last one's twice: of factor and constant

    def state(self, tensors: Sequence[Tensor]) -> State:
        """The state with these `State.tensors`, in any shape."""
        conv, recurrent = self._shaped(tensors, self.state_shapes)
        return State(conv, recurrent[0] if recurrent else None)

    def operator(self, tensors: Sequence[Tensor]) -> Operator:
        """The operator with these `Operator.tensors`, in any shape. Raises `ValueError` for a wrong number of values."""
        conv, affine = self._shaped(tensors, self.operator_shapes)
        return Operator(conv, None if self.kind is None else Affine(self.kind, *affine))

    def _shaped(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> tuple[Tensors, Tensors]:
        """Those of convolutions and the others, in these shapes and the layer's dtypes, on the device of its mixer."""
        if [part.numel() for part in tensors] != [*map(prod, shapes)]:
            raise ValueError("the states of a recurrent layer have other shapes than the model's")
        device = next(self.mixer.parameters()).device
        triples = zip(tensors, shapes, self._operator_dtypes, strict=False)
        parts = [part.reshape(shape).to(device, dtype) for part, shape, dtype in triples]
        count = len(self.conv)
        return tuple(parts[:count]), tuple(parts[count:])

    def starts(self, state: State) -> State:
        """A batch of states before rows whose operator is wanted: this one, zeros, and the kind's probes."""
        if self.kind is None or state.recurrent is None:
            return state
        real = state.recurrent
        probes = self.kind.probes(self.recurrent).to(real)
        return state.repeated(torch.cat((real, torch.zeros_like(real), probes)))

    def ends(self, ends: State) -> tuple[State, Operator]:
        """The state behind the rows, and their operator, from what such a batch became."""
        conv = tuple(part[:1].clone() for part in ends.conv)
        if self.kind is None or ends.recurrent is None:
            return State(conv, ends.recurrent), Operator(conv, None)
        real = ends.recurrent[:1].clone()
        constant = ends.recurrent[1].clone()
        factor = self.kind.factor(ends.recurrent[2:] - constant)
        affine = Affine(self.kind, factor.clone(), constant)
        return State(conv, real), Operator(conv, affine)


def find_kind(run: Callable[[Tensor], Tensor], example: Tensor) -> Kind | None:
    """The kind of a layer: the first one that predicts what its rows make of a random state. None if no kind does.

    Differences are relative to the largest response of each head. The states are large, so that a head that forgets fast still
    shows how.

    Args:
        run: what a few rows make of states `[batch, *shape]`.
        example: a state `[1, *shape]`.

    Raises:
        UnsupportedModelError: the rows ignore the state.

    """
    generator = torch.Generator().manual_seed(0)
    typical = example.float().abs().mean()
    scale = _LARGE * float(typical.clamp_min(1e-3))
    numbers = torch.randn(example.shape, generator=generator)
    random = (numbers * scale).to(example)
    kinds = KINDS if example.ndim > 3 else KINDS[:2]
    for kind in kinds:
        probes = kind.probes(tuple(example.shape[1:])) * scale
        probes = probes.to(example)
        ends = run(torch.cat((torch.zeros_like(random), random, probes)))
        response = ends[1] - ends[0]
        factor = kind.factor(ends[2:] - ends[0]) / scale
        error = _largest(kind.apply(factor, random[0]) - response)
        size = _largest(response)
        rounding = _largest(_ROUNDING * ends.abs().amax(0))
        if (size <= rounding).all():
            raise UnsupportedModelError("a recurrent layer does not continue from a given state over several rows")
        if (error <= _TOLERANCE * size + rounding).all():
            return kind
    return None


def _largest(states: Tensor) -> Tensor:
    """The largest magnitude in each head, `[heads]`."""
    return states.abs().flatten(1).amax(1)


_LARGE = 1e3
_ROUNDING = 1e-6
_TOLERANCE = 1e-4  # small: what a decay loses in one row, a chunk loses hundreds of times


class Carried:
    """One layer's state along one prompt: where it is known, and the rows over which it can be carried on."""

    def __init__(self) -> None:
        self._known: dict[int, State] = {}
        self._marked: set[int] = set()
        self._left_out: dict[int, LeftOut] = {}

    @property
    def used(self) -> bool:
        """Whether the layer is recurrent: whether it has a state anywhere."""
        return bool(self._known)

    def put(self, rows: int, state: State) -> None:
        """The state behind the first `rows` rows. Forgets states further on, and all but two and the marked ones before."""
        earlier = {at for at in self._known if at < rows}
        remembered = earlier & self._marked
        if earlier:
            remembered.add(max(earlier))
        states = {at: self._known[at] for at in sorted(remembered)}
        self._known = states | {rows: state}

    def mark(self) -> None:
        """Keep the last state, so that `before` and `truncate` can return to it."""
        if self._known:
            self._marked.add(max(self._known))

    def keep(self, rows: int) -> None:
        """Keep the state behind the first `rows` rows once it is known, as `mark` does."""
        self._marked.add(rows)

    def add(self, rows: LeftOut) -> None:
        """Rows that passes may leave out."""
        self._left_out[rows.start] = rows

    def before(self, row: int) -> State | None:
        """The state in front of a row; None for the first. Raises `PromptError` where it is not known and cannot be made."""
        if row == 0:
            return None
        starts = sorted((at for at in self._known if at <= row), reverse=True)
        for at in starts:
            state = self._known[at]
            while at < row and (left_out := self._left_out.get(at)) is not None and left_out.stop <= row:
                state = left_out.operator.then(state)
                at = left_out.stop
            if at == row:
                return state
        raise PromptError(f"a recurrent layer has no state in front of row {row}: all rows before it must run, too")

    def at(self, rows: int) -> State | None:
        """The state behind the first `rows` rows, if it is kept."""
        return self._known.get(rows)

    def latest(self, rows: int) -> int:
        """The most rows, at most `rows`, behind which the state is kept; 0 for none."""
        return max((at for at in self._known if at <= rows), default=0)

    def truncate(self, length: int) -> None:
        """Forget states behind the first `length` rows."""
        self._known = {at: state for at, state in self._known.items() if at <= length}

    def forget_left_out(self) -> None:
        """Free the operators, once all rows that need them have run."""
        self._left_out.clear()

    def copy(self) -> Carried:
        """An independent copy; states are never written to, so they are shared."""
        copy = Carried()
        copy._known = dict(self._known)
        copy._marked = set(self._marked)
        copy._left_out = dict(self._left_out)
        return copy

    def free(self) -> None:
        """Free everything."""
        self._known.clear()
        self._left_out.clear()
