"""Put a prompt's stored chunks into one KV cache: load layer by layer, move keys to the prompt's positions, add the correction.

`LayerLoader` reads, verifies and decodes the layers in threads, ahead of the forward pass, into a few buffers used in turn.
`Assembly` takes each layer when the forward pass reaches it and writes it into the prompt's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.correction import Added, KVCorrection, position_features
from blend.chunks.encode import put_states
from blend.errors import EntryDamagedError
from blend.model.cache import KV, BlendedCache, BlendedLayer, Deltas, LayerRotation, Rotation
from blend.model.cpu import use_one_thread
from blend.model.recurrent import LayerState, LeftOut
from blend.store.reader import ChunkReader
from blend.types import ChunkCache, PromptLayout, Span, Stopwatch

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder


_Shapes = tuple[tuple[int, int], tuple[int, int]]
AHEAD = 3  # layers in memory beside the cache, one of them being put in place
THREADS = 2


LayerSource = ChunkReader | ChunkCache
"""What layers are read from: an open entry of the store, or a cache in memory."""


class StagedChunk(NamedTuple):
    """A chunk's cache, and where its rows from `first` on belong in a buffer."""

    reader: LayerSource
    span: Span
    first: int

    def read(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Read one layer into buffers `[kv_heads, rows, head_dim]`."""
        outs = [part[:, self.span.start : self.span.stop] for part in (keys, values)]
        tokens = self.reader.tokens
        if self.span.length == tokens:
            self.reader.read_into(index, *outs)
            return
        whole = [out.new_empty((out.shape[0], tokens, out.shape[2])) for out in outs]
        self.reader.read_into(index, *whole)
        for out, states in zip(outs, whole, strict=True):
            out.copy_(states[:, self.first : self.first + self.span.length])

    def left_out(self, index: int, layer: LayerState, base: int) -> LeftOut:
        """What the rows behind the lead do to a recurrent layer's state; base: the prompt's row that is the buffer's first."""
        try:
            operator = layer.operator(self.reader.operator(index))
        except ValueError as error:
            raise EntryDamagedError(f"layer {index} of a store entry: {error}") from None
        start = self.span.start + self.reader.lead - self.first
        return LeftOut(base + start, base + self.span.stop, operator)


class LayerLoader:
    """Reads every layer of these chunks once, in order, in threads; close it.

    The threads only read, verify and decode; on a CPU they leave the cores to the model.

    Args:
        rows: rows of a buffer; the content of rows that no chunk covers is undefined.
        shapes: shapes of each layer's keys and values.
        device: where the rows go in the end; for a GPU the buffers are page-locked.
        recurrent: see `RowDecoder`.
        base: the prompt's row that is the first of the buffers.

    Attributes:
        left_out: of each recurrent layer that was read, the rows that passes may leave out.

    """

    def __init__(
        self,
        chunks: Sequence[StagedChunk],
        rows: int,
        shapes: Sequence[LayerRotation],
        dtype: torch.dtype,
        device: torch.device,
        recurrent: Mapping[int, LayerState] | None = None,
        base: int = 0,
    ) -> None:
        self._chunks, self._rows, self._dtype = chunks, rows, dtype
        self._recurrent, self._base = recurrent or {}, base
        self.left_out: dict[int, list[LeftOut]] = {index: [] for index in self._recurrent}
        self._shapes = [(layer.key_shape, layer.value_shape) for layer in shapes]
        self._pinned = device.type == "cuda"
        self._buffers: dict[tuple[int, _Shapes], KV] = {}
        self._allocating = threading.Lock()
        self._reading: dict[int, list[Future[None]]] = {}
        # One thread a worker: else OpenMP starts a team for each. With more threads than cores it puts waiting threads to
        # sleep at once, the model's too, and forward passes take two to three times as long.
        self._threads = ThreadPoolExecutor(THREADS, "kvblend-loader", initializer=use_one_thread)

    def start(self) -> None:
        """Start reading. Raises RuntimeError, with nothing left running, if the system has no more threads."""
        try:
            for layer in range(min(AHEAD, len(self._shapes))):
                self._submit(layer, None)
        except RuntimeError:
            self.close()
            raise

    def take(self, layer: int) -> KV:
        """The layer, `[kv_heads, rows, head_dim]` each, waited for. It may be written to, and is valid until `hand_back`.

        Raises `EntryDamagedError` when a chunk is not what was written, `StoreError` when the store cannot be read.
        """
        for share in self._reading.pop(layer):
            share.result()
        return self._buffer(layer)

    def hand_back(self, layer: int, used: torch.cuda.Event | None = None) -> None:
        """Release the buffer of `layer`; on a GPU after the event `used`."""
        if layer + AHEAD < len(self._shapes):
            self._submit(layer + AHEAD, used)

    def close(self) -> None:
        """Stop reading, and close the entries."""
        self._threads.shutdown(cancel_futures=True)
        for chunk in self._chunks:
            chunk.reader.close()

    def _submit(self, layer: int, used: torch.cuda.Event | None) -> None:
        shares = [self._chunks[i::THREADS] for i in range(min(THREADS, len(self._chunks)))]
        self._reading[layer] = [self._threads.submit(self._read, layer, share, used) for share in shares]

    @torch.inference_mode()
    def _read(self, layer: int, chunks: Sequence[StagedChunk], used: torch.cuda.Event | None) -> None:
        if used is not None:
            used.synchronize()
        keys, values = self._buffer(layer)
        for chunk in chunks:
            if keys.numel() or values.numel():
                chunk.read(layer, keys, values)
            if layer in self._recurrent and chunk.reader.lead < chunk.reader.tokens:
                self.left_out[layer].append(chunk.left_out(layer, self._recurrent[layer], self._base))

    def _buffer(self, layer: int) -> KV:
        """The buffer of a layer; layers of one shape share it if they are `AHEAD` apart."""
        keys, values = self._shapes[layer]
        with self._allocating:
            found = self._buffers.get((layer % AHEAD, (keys, values)))
            if found is None:
                found = self._buffers[layer % AHEAD, (keys, values)] = self._empty(*keys), self._empty(*values)
            return found

    @torch.inference_mode()
    def _empty(self, heads: int, width: int) -> torch.Tensor:
        return torch.empty((heads, self._rows, width), dtype=self._dtype, pin_memory=self._pinned)


class _Shift(NamedTuple):
    """A chunk's rows in the prompt, and how far they move; None for unrotated rows, which turn to their positions."""

    span: Span
    by: int | None

    def moved(self, there: torch.Tensor) -> torch.Tensor:
        """How far each row moves, `[rows]`; there: the positions of the rows."""
        return there if self.by is None else there.new_full((self.span.length,), self.by)


class Stretch:
    """Neighbouring chunks of a prompt that share their KV correction. added: records what that adds; None without one."""

    def __init__(
        self, layout: PromptLayout, shifts: Sequence[_Shift], added: Added | None, device: torch.device
    ) -> None:
        self.span, self._added = Span(shifts[0].span.start, shifts[-1].span.stop), added
        rows = [torch.arange(*shift.span, device=device) for shift in shifts]
        there = torch.cat(rows)
        moved = torch.cat([shift.moved(mine) for shift, mine in zip(shifts, rows, strict=True)])
        self._moved = Deltas(moved)
        if added is not None:
            # Unrotated rows need no rotation back; if all rows are unrotated, nothing rotates twice.
            self._back = None if torch.equal(moved, there) else Deltas(moved - there)
            self._there = Deltas(there)
            self._features = position_features(layout, there, added.map.before, added.map.length)

    def put(self, index: int, layer: BlendedLayer, staged: KV, rotation: LayerRotation, base: int) -> None:
        """Write a layer's KV at its positions, with its correction; base: the prompt's row that is the first of `staged`."""
        parts = _parts(layer, staged, rotation, self.span, base)
        part = None if self._added is None else self._added.map.layers[index]
        if self._added is None or part is None:
            for turn, states, buffer in parts:
                turn.apply(states, self._moved, out=buffer)
            return
        keys, values = (_unrotated(turn, states, self._back)[0] for turn, states, _ in parts)
        self._added.parts[index].append(part.add(keys, values, self._features))
        for (turn, _, buffer), states in zip(parts, (keys, values), strict=True):
            turn.apply(states[None], self._there, out=buffer)


def _unrotated(turn: Rotation, states: torch.Tensor, back: Deltas | None) -> torch.Tensor:
    """States without positions, fp32; the same tensor if nothing changes."""
    if turn.inv_freq is None or back is None:
        return states.float()
    return turn.apply(states, back, out=torch.empty(states.shape, dtype=torch.float32, device=states.device))


def _parts(
    layer: BlendedLayer, staged: KV, rotation: LayerRotation, span: Span, base: int
) -> list[tuple[Rotation, torch.Tensor, torch.Tensor]]:
    """For keys, then values: rotation, stored states, target; `[1, kv_heads, rows, head_dim]`."""
    here, there = slice(span.start - base, span.stop - base), slice(*span)
    return [
        (rotation.keys, staged[0][None, :, here], layer.keys[:, :, there]),
        (rotation.values, staged[1][None, :, here], layer.values[:, :, there]),
    ]


def stretches_of(
    layout: PromptLayout,
    chunks: Mapping[int, StagedChunk],
    corrections: Sequence[KVCorrection | None],
    device: torch.device,
) -> tuple[list[Stretch], tuple[Added, ...]]:
    """Group the chunks that are there by correction and neighbourhood; and the record of each correction."""
    groups: list[tuple[KVCorrection | None, list[_Shift]]] = []
    for place, span in enumerate(layout.chunk_spans):
        if place not in chunks or not span.length:
            continue
        reader, _, first = chunks[place]
        shift = _Shift(span, None if reader.unrotated else span.start - reader.start - first)
        correction = corrections[place] if corrections else None
        if groups and groups[-1][0] is correction and groups[-1][1][-1].span.stop == span.start:
            groups[-1][1].append(shift)
        else:
            groups.append((correction, [shift]))
    added: dict[int, Added] = {}
    for correction in {id(one): one for one, _ in groups if one is not None}.values():
        rows = [torch.arange(*span, device=device) for one, shifts in groups if one is correction for span, _ in shifts]
        added[id(correction)] = Added(correction, torch.cat(rows))
    return [Stretch(layout, shifts, added.get(id(one)), device) for one, shifts in groups], tuple(added.values())


class Assembly:
    """The loading of a prompt's stored chunks into its cache: threads read ahead, `await_layer` puts layers in place.

    Use it in a `with`: reading starts there, every layer is in place at its end, and an error frees the cache's memory. The
    prefix is in place from the start. Rows of missing chunks and of the suffix stay unwritten.

    Args:
        prefix: KV of the prompt's first rows.
        readers: the entry of each place, or None; closed at the end.
        cache: an empty one; by default the decoder's own.
        corrections: what to add to each place, or None.
        watch: counts waiting for the store as "load" and putting in place as "reposition". Not on a GPU, where both overlap
            with other work.

    Attributes:
        added: what each correction added, filled layer by layer.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        layout: PromptLayout,
        prefix: ChunkCache,
        readers: Sequence[LayerSource | None],
        cache: BlendedCache | None = None,
        corrections: Sequence[KVCorrection | None] = (),
        watch: Stopwatch | None = None,
    ) -> None:
        self._decoder, self._device = decoder, decoder.device
        self.cache = decoder.new_cache(layout.rows) if cache is None else cache
        self._watch = watch if self._device.type == "cpu" else None
        self._base = base = layout.context.start
        chunks = {
            place: StagedChunk(reader, Span(span.start - base, span.stop - base), layout.first_row(place))
            for place, (reader, span) in enumerate(zip(readers, layout.chunk_spans, strict=True))
            if reader is not None
        }
        self._stretches, self.added = stretches_of(layout, chunks, corrections, self._device)
        staged = list(chunks.values())
        self._loader = LayerLoader(
            staged, layout.context.length, decoder.rotations, decoder.dtype, self._device, decoder.recurrent, base
        )
        put_states(decoder, prefix, self.cache)
        for index, layer in enumerate(self.cache.layers):
            layer.write_run(0, prefix.keys[index][None], prefix.values[index][None])
            layer.length = layout.rows
        self._depth = len(self.cache.layers)
        self._next = 0 if self._stretches else self._depth
        self._stream = _side_stream(self._device)

    def __enter__(self) -> Assembly:
        self._loader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
            else:  # another attempt may follow, and a prompt gets memory for one cache
                self.cache.free()
        finally:
            self._loader.close()

    @property
    def pending(self) -> range:
        """The layers that are not in place yet."""
        return range(self._next, self._depth)

    def await_layer(self, layer: int) -> None:
        """Wait until this layer and those before it are read, and put them in place.

        Raises `EntryDamagedError` when an entry is not what was written, `StoreError` when the store cannot be read.
        """
        while self._next <= layer:
            self._next += 1
            self._fill(self._next - 1)

    def finish(self) -> None:
        """Put all layers in place."""
        self.await_layer(self._depth - 1)

    def _fill(self, index: int) -> None:
        with self._stage("load"):
            staged = self._loader.take(index)
        for rows in self._loader.left_out.pop(index, ()):
            self.cache.carried(index).add(rows)
        with self._stage("reposition"), torch.inference_mode():
            used = self._put(index, staged)
        self._loader.hand_back(index, used)

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self._watch.stage(name) if self._watch is not None else nullcontext()

    def _put(self, index: int, staged: KV) -> torch.cuda.Event | None:
        """Write a layer into the cache; on a GPU in a side stream, which later work waits for."""
        layer, rotation = self.cache.layers[index], self._decoder.rotations[index]
        if self._stream is None:
            for stretch in self._stretches:
                stretch.put(index, layer, staged, rotation, self._base)
            return None
        now = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = (staged[0].to(self._device, non_blocking=True), staged[1].to(self._device, non_blocking=True))
            used: torch.cuda.Event = self._stream.record_event()
            for stretch in self._stretches:
                stretch.put(index, layer, moved, rotation, self._base)
        now.wait_stream(self._stream)
        for hidden in (hidden for added in self.added for hidden in added.parts[index]):
            hidden.record_stream(now)
        return used


def assemble(
    decoder: RowDecoder,
    layout: PromptLayout,
    prefix: ChunkCache,
    readers: Sequence[LayerSource | None],
    corrections: Sequence[KVCorrection | None] = (),
) -> Assembly:
    """An `Assembly` with everything in place."""
    with Assembly(decoder, layout, prefix, readers, None, corrections) as done:
        pass
    return done


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A CUDA stream for putting KV in place; it starts when the cache's buffers exist."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
