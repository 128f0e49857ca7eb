"""The blended cache: stored KV and fresh rows in one preallocated buffer per layer, behind transformers' `Cache`.

A rotary key is stored as R(p) k. Moving it from p to p' multiplies by R(p' - p) (RoFormer, Su et al. 2021, eq. 14-16). Models
differ in which dimensions rotate, in which pairs and at which frequencies (`Turn`). A factor on cos and sin (YaRN's
attention scaling) is part of the stored key and is never applied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import signature
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from blend.model import cpu
from blend.model.recurrent import Carried
from blend_kernels import Positions, Turn

KV = tuple[Tensor, Tensor]


def cache_argument(model: Any) -> str:
    """The name of the cache argument of the model's `forward`: "cache", or "past_key_values" before transformers 5.24."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def output_cache(output: Any) -> Any:
    """The cache in a model's output, whichever name this version of transformers uses."""
    return output.get("cache" if "cache" in output else "past_key_values")


class Run:
    """Sorted positions of rows on the device, and what the host knows of them without reading them.

    Args:
        positions: int64 `[rows]`.
        start: the first position, if they are consecutive. They are then written as a slice, several times faster than by
            index.
        stop: no position is at or above it.
        ends: whether the last position is `stop - 1`.

    """

    def __init__(self, positions: Tensor, start: int | None, stop: int, *, ends: bool = True) -> None:
        self.positions = positions
        self.rows = positions.shape[0]
        self.start = start
        self.stop = stop
        self.ends = ends

    @cached_property
    def shared(self) -> Positions:
        """The positions as the layers of a pass share them."""
        return Positions(self.positions)

    @classmethod
    def read(cls, positions: Tensor) -> Run:
        """The run of positions of which nothing is known: they are read, for which a GPU must be waited for."""
        return cls._between(positions, int(positions[0]), int(positions[-1]))

    @classmethod
    def _between(cls, positions: Tensor, first: int, last: int) -> Run:
        is_consecutive = last + 1 - first == positions.shape[0]
        return cls(positions, first if is_consecutive else None, last + 1)

    @classmethod
    def consecutive(cls, start: int, stop: int, device: torch.device) -> Run:
        """The rows from `start` to `stop - 1`."""
        return cls(torch.arange(start, stop, device=device), start, stop)

    @classmethod
    def on_host(cls, positions: NDArray[np.int64], device: torch.device) -> Run:
        """Positions that are known on the host."""
        on_device = torch.from_numpy(positions).to(device, non_blocking=True)
        if not len(positions):
            return cls(on_device, 0, 0)
        return cls._between(on_device, int(positions[0]), int(positions[-1]))

    def pieces(self, most: int | Callable[[], int] | None) -> Iterator[Run]:
        """The rows in ascending pieces. most: rows of a piece, or a function that says so before each piece; None for all."""
        first = 0
        while first < self.rows:
            size = most() if callable(most) else most
            stop = self.rows if size is None else min(self.rows, first + size)
            yield self._part(first, stop)
            first = stop

    def _part(self, first: int, stop: int) -> Run:
        if first == 0 and stop == self.rows:
            return self
        positions = self.positions[first:stop]
        if self.start is not None:
            return Run(positions, self.start + first, self.start + stop)
        return Run(positions, None, self.stop, ends=self.ends and stop == self.rows)

    def write(self, buffer: Tensor, states: Tensor) -> None:
        """Write `states` `[batch, kv_heads, rows, head_dim]` into the buffer of a whole prompt at these rows."""
        if self.start is not None:
            buffer[:, :, self.start : self.start + self.rows] = states
        else:
            buffer.index_copy_(2, self.positions, states.to(buffer.dtype))


ALIGNMENT = 16  # bytes that kernels read at once


class BlendedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one layer in buffers of `capacity` rows, of which the first `length` are in use.

    Buffers are `[batch, kv_heads, capacity, head_dim]`, allocated at the first write. `update` appends, as decoding through
    transformers does; `write_rows` and `write_run` write anywhere.
    carried: the state of a recurrent layer.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self.carried = Carried()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate both buffers for states `[batch, kv_heads, any, head_dim]`."""
        self.take(self.new_buffer(key_states), self.new_buffer(value_states))

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Use these buffers."""
        self.dtype = keys.dtype
        self.device = keys.device
        self.keys = keys
        self.values = values
        self.is_initialized = True

    def blank(self, rows: Tensor) -> None:
        """Zero the KV at these positions."""
        if self.is_initialized and rows.shape[0]:
            self.keys.index_fill_(2, rows, 0)
            self.values.index_fill_(2, rows, 0)

    def new_buffer(self, states: Tensor) -> Tensor:
        """An uninitialised buffer of `capacity` rows for states `[batch, kv_heads, any, head_dim]`."""
        batch, heads, _, dim = states.shape
        return cpu.empty((batch, heads, self.capacity, dim), states.dtype, states.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        """Append KV `[batch, kv_heads, rows, head_dim]`. Returns views of all `length` rows."""
        self.reserve(self.length + key_states.shape[2])
        self.write_run(self.length, key_states, value_states)
        return self.view()

    def write_rows(self, run: Run, keys: Tensor, values: Tensor) -> KV:
        """Write KV `[batch, kv_heads, rows, head_dim]` at the rows of `run`. Returns views of all `length` rows."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        run.write(self.keys, keys)
        run.write(self.values, values)
        self.length = max(self.length, run.stop)
        return self.view()

    def view(self) -> KV:
        """Writable views of the rows in use, `[batch, kv_heads, length, head_dim]`."""
        rows = slice(self.length)
        return self.keys[:, :, rows], self.values[:, :, rows]

    def write_run(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Write stored KV `[batch, kv_heads, n, head_dim]` at rows `start ... start + n - 1`."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        stop = start + keys.shape[2]
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        self.length = max(self.length, stop)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows; buffers that grow do so by at least half."""
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, self.capacity + self.capacity // 2)
        if self.is_initialized:
            keys, values = self.view()
            self.lazy_initialization(keys, values)
            self.keys[:, :, : self.length] = keys
            self.values[:, :, : self.length] = values

    def free(self) -> None:
        """Free the buffers."""
        self.length = 0
        self.is_initialized = False
        self.keys = self.values = torch.empty(0)
        self.carried.free()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will see, and their offset (always 0)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Rows in use."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum: the buffers grow."""
        return -1


class BlendedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A `transformers.Cache` that starts as stored KV, takes fresh rows anywhere, then grows by decoding.

    layers: number of decoder layers. capacity: rows to reserve for prompt and decoding; growing past it copies once.
    restarts: rows at which recurrent layers start anew -> how many first rows their state is then of.
    """

    layer: ClassVar[type[BlendedLayer]] = BlendedLayer

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[self.layer(capacity) for _ in range(layers)])
        self._whole: Tensor | None = None  # keys and values of all layers in turn, while a prefill fills them
        self.restarts: Mapping[int, int] = {}

    def begin(self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: int) -> None:
        """Write the first rows of each layer, `[kv_heads, n, head_dim]`, and count `rows` rows as in use.

        Buffers of one shape are one piece of memory, so that a GPU has one allocation and one copy.
        """
        parts = [part for kv in zip(keys, values, strict=True) for part in kv]
        heads, count, dim = parts[0].shape
        layer_bytes = heads * self.layers[0].capacity * dim * parts[0].itemsize
        is_uniform = len({part.shape for part in parts}) == 1 and layer_bytes % ALIGNMENT == 0
        if is_uniform and not any(layer.is_initialized for layer in self.layers):
            states = torch.stack(parts)
            self._whole = self.layers[0].new_buffer(states)
            self._whole[:, :, :count] = states
            buffers = iter(torch.split(self._whole, 1))
            for layer in self.layers:
                layer.take(next(buffers), next(buffers))
        else:
            for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
                layer.write_run(0, layer_keys[None], layer_values[None])
        for layer in self.layers:
            layer.length = rows

    @property
    def is_whole(self) -> bool:
        """Whether all layers are one piece of memory."""
        return self._whole is not None

    def together(self, start: int, stop: int) -> KV:
        """The buffers of some layers, `[layers, kv_heads, capacity, head_dim]`; of more than one only if they are whole."""
        if self._whole is None or stop - start == 1:
            layer = self.layers[start]
            return layer.keys, layer.values
        states = self._whole[2 * start : 2 * stop]
        return states[0::2], states[1::2]

    def gather(self, layers: Sequence[int], rows: Tensor) -> list[KV]:
        """Copies of these rows of some layers, `[1, kv_heads, rows, head_dim]` each. One launch on a GPU if they are whole."""
        if self._whole is None or not self._whole.is_cuda:
            views = map(self.view, layers)
            return [(keys.index_select(2, rows), values.index_select(2, rows)) for keys, values in views]
        states = torch.split(self._whole.index_select(2, rows), 1)
        return [(states[2 * layer], states[2 * layer + 1]) for layer in layers]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows in every layer; a buffer that grows does so by at least half."""
        for layer in self.layers:
            layer.reserve(capacity)

    def blank(self, rows: Tensor) -> None:
        """Zero the KV at these positions in every layer."""
        for layer in self.layers:
            layer.blank(rows)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Rows in use, of one layer or of the longest."""
        if layer_idx is not None:
            return super().get_seq_length(layer_idx)  # type: ignore[no-any-return]
        longest: int = max(layer.length for layer in self.layers)
        return longest

    def carried(self, layer: int) -> Carried:
        """The recurrent state of one layer along this prompt."""
        return self.layers[layer].carried  # type: ignore[no-any-return]

    def states(self, rows: int) -> tuple[tuple[Tensor, ...], ...] | None:
        """Each layer's recurrent state behind the first rows, as `ChunkCache.states`; None if a layer does not keep it."""
        states = [layer.carried.at(rows) for layer in self.layers]
        pairs = zip(self.layers, states, strict=True)
        if any(layer.carried.used and state is None for layer, state in pairs):
            return None
        if not any(states):
            return ()
        return tuple(() if state is None else state.tensors for state in states)

    def resumable(self, rows: int) -> int:
        """The most rows, at most `rows`, behind which every recurrent layer has its state; `rows` without such layers."""
        recurrent = [layer.carried for layer in self.layers if layer.carried.used]
        return min((carried.latest(rows) for carried in recurrent), default=rows)

    def count_rows(self, rows: int) -> None:
        """Count the first rows in layers without KV, which no `update` counts."""
        for layer in self.layers:
            if layer.is_initialized and layer.keys.shape[1] == 0:
                layer.length = max(layer.length, rows)

    def mark(self) -> None:
        """Keep the recurrent states behind the last rows that ran: `truncate` can return to them."""
        for layer in self.layers:
            layer.carried.mark()

    def restart(self, rows: Sequence[int], behind: int) -> None:
        """Let recurrent layers start anew at these rows, in the state behind the first `behind` rows."""
        self.restarts = dict.fromkeys((behind, *rows), behind) if rows else {}
        for layer in self.layers:
            layer.carried.keep(behind)

    def settle(self) -> None:
        """All rows of the prompt are there: `mark` them, and free the operators of rows that were left out."""
        self.mark()
        self._whole = None
        for layer in self.layers:
            layer.carried.forget_left_out()

    def view(self, layer: int) -> KV:
        """Writable views of one layer's rows in use, `[batch, kv_heads, length, head_dim]`."""
        return self.layers[layer].view()  # type: ignore[no-any-return]

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows of every layer."""
        for layer in self.layers:
            layer.length = min(layer.length, length)
            layer.carried.truncate(length)

    def free(self) -> None:
        """Free its memory now, even if the object is still referenced. It must not be read any more."""
        self._whole = None
        for layer in self.layers:
            layer.free()

    def clone(self, room: int = 0) -> BlendedCache:
        """An independent copy of the rows in use, with capacity for `room` more."""
        copy = BlendedCache(len(self.layers), self.get_seq_length() + room)
        for layer, layer_copy in zip(self.layers, copy.layers, strict=True):
            layer_copy.write_run(0, *layer.view())
            layer_copy.carried = layer.carried.copy()
        return copy


class LayerRotation(NamedTuple):
    """How one layer's cached keys and values rotate with position (values only where a cache keeps MLA's rotary part there).

    keys, values: None if they do not depend on position. key_shape, value_shape: heads and head dimension.
    """

    keys: Turn | None
    values: Turn | None
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for layers that are alike."""
        alike = []
        for turn in (self.keys, self.values):
            alike.append(turn and (id(turn.inv_freq), turn.layout))
        return *alike, self.key_shape, self.value_shape

    @property
    def width(self) -> int:
        """Numbers in one row of keys and values; 0 for a layer without KV."""
        return prod(self.key_shape) + prod(self.value_shape)


NO_KV = LayerRotation(None, None, (0, 0), (0, 0))
