"""Put a prompt's stored chunks into one KV cache: load layer by layer, move keys to the prompt's positions, add the correction.

`place` opens the stored cache of every place in the prompt. `LayerLoader` reads, verifies and decodes the layers in threads,
ahead of the forward pass, into a few buffers used in turn. `Assembly` takes each layer when the forward pass reaches it and
writes it into the prompt's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from blend.chunks.correction import Added, KVCorrection, position_features
from blend.chunks.library import OpenLibrary
from blend.model.cache import BlendedCache, BlendedLayer, Deltas, LayerRotation, Rotation
from blend.model.cpu import use_one_thread
from blend.store.codecs import require_shapes
from blend.types import ChunkCache, PromptLayout, Span, Stopwatch

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder


_Shapes = tuple[tuple[int, int], tuple[int, int]]
AHEAD = 3  # layers in memory beside the cache, one of them being put in place
THREADS = 2


class LayerSource(Protocol):
    """A chunk cache that is read by layers, such as a `blend.store.ChunkReader`; its attributes: see there."""

    tokens: int
    layers: int
    start: int
    unrotated: bool

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        """Copy one layer, verified, into two `[kv_heads, tokens, head_dim]` tensors."""

    def close(self) -> None:
        """Release what is held; idempotent."""


class StagedLayer(NamedTuple):
    """One layer of all chunks as stored, `[kv_heads, rows, head_dim]` each; rows that are not read hold anything."""

    keys: torch.Tensor
    values: torch.Tensor


class StagedChunk(NamedTuple):
    """A chunk's cache, and at which rows of a `StagedLayer` it belongs."""

    reader: LayerSource
    span: Span


class LayerLoader:
    """Reads every layer of these chunks once, in order, in threads. Close it, or use it in a `with`.

    The threads only read, verify and decode; on a CPU they leave the cores to the model.

    rows: of a `StagedLayer`. shapes: of each layer's keys and values. device: where the rows go in the end; for a GPU the
    buffers are page-locked.
    """

    def __init__(
        self,
        chunks: Sequence[StagedChunk],
        rows: int,
        shapes: Sequence[LayerRotation],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._chunks, self._rows, self._dtype = chunks, rows, dtype
        self._shapes = [(layer.key_shape, layer.value_shape) for layer in shapes]
        self._pinned = device.type == "cuda"
        self._buffers: dict[tuple[int, _Shapes], StagedLayer] = {}
        self._busy: list[torch.cuda.Event | None] = [None] * AHEAD
        self._turn = threading.Condition()
        self._free = AHEAD  # layers below this one may be read
        self._done = [0] * len(shapes)  # threads that have read the layer
        self._failed: BaseException | None = None
        self._shares = 0  # of the chunks, each read by a thread
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> LayerLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start reading. Raises RuntimeError, with nothing left running, if the system has no more threads."""
        shares = [self._chunks[i::THREADS] for i in range(min(THREADS, len(self._chunks)))]
        self._shares = len(shares)
        try:
            for i, share in enumerate(shares):
                thread = threading.Thread(target=self._read, args=(share,), name=f"kvblend-loader-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close()
            raise

    def take(self, layer: int) -> StagedLayer:
        """The layer, waited for. It may be written to, and is valid until `hand_back`.

        Raises `EntryDamagedError` when a chunk is not what was written, `StoreError` when the store cannot be read.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._failed or self._done[layer] == self._shares)
            if self._failed is not None:
                raise self._failed
        return self._buffer(layer)

    def hand_back(self, layer: int, used: torch.cuda.Event | None = None) -> None:
        """Release the buffer of `layer`; on a GPU after the event `used`."""
        with self._turn:
            self._busy[layer % AHEAD] = used
            self._free = max(self._free, layer + 1 + AHEAD)
            self._turn.notify_all()

    def close(self) -> None:
        """Stop reading, and close the entries."""
        with self._turn:
            self._failed = self._failed or RuntimeError("the loader is closed")
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()
        for chunk in self._chunks:
            chunk.reader.close()

    def _read(self, chunks: Sequence[StagedChunk]) -> None:
        try:
            # Each thread would get helpers of its own for its copies. GNU's OpenMP counts them, and with more threads than
            # cores it puts those that wait to sleep at once: the model's own too, and passes take two to three times as long.
            use_one_thread()
            with torch.inference_mode():
                for layer in range(len(self._shapes)):
                    if not self._wait(layer):
                        return
                    keys, values = self._buffer(layer)
                    for reader, span in chunks:
                        reader.read_into(layer, keys[:, span.start : span.stop], values[:, span.start : span.stop])
                    with self._turn:
                        self._done[layer] += 1
                        self._turn.notify_all()
        except BaseException as error:  # the pass that waits for this layer raises it
            with self._turn:
                self._failed = self._failed or error
                self._turn.notify_all()

    def _wait(self, layer: int) -> bool:
        """Wait for the layer's buffer; whether to go on."""
        with self._turn:
            self._turn.wait_for(lambda: self._failed or layer < self._free)
            if self._failed is not None:
                return False
            used = self._busy[layer % AHEAD]
        if used is not None:
            used.synchronize()
        return True

    def _buffer(self, layer: int) -> StagedLayer:
        """The buffer of a layer; layers of one shape share it if they are `AHEAD` apart."""
        shape = self._shapes[layer]
        with self._turn:
            if (layer % AHEAD, shape) not in self._buffers:
                self._buffers[layer % AHEAD, shape] = StagedLayer(*(self._empty(*part) for part in shape))
            return self._buffers[layer % AHEAD, shape]

    def _empty(self, heads: int, width: int) -> torch.Tensor:
        with torch.inference_mode():
            return torch.empty((heads, self._rows, width), dtype=self._dtype, pin_memory=self._pinned)


_Any = TypeVar("_Any")
NEAR = 64  # tokens more or fewer before the first chunk than its caches have; chosen, not measured


class Opener(Protocol):
    """`ChunkLibrary.open` or `open_sound`."""

    def __call__(self, chunks: Sequence[tuple[int, ...]], *, contextual: bool, isolated_first: bool) -> OpenLibrary:
        """See there."""


class PartOfChunk:
    """Some rows of a chunk's cache as a `LayerSource`: `tokens` of them from `first` on."""

    def __init__(self, whole: LayerSource, first: int, tokens: int) -> None:
        self.tokens, self.layers, self.start, self.unrotated = (
            tokens,
            whole.layers,
            whole.start + first,
            whole.unrotated,
        )
        self._whole, self._rows = whole, slice(first, first + tokens)

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        """Read the whole layer, and copy the rows."""
        outs = (keys_out, values_out)
        keys, values = (out.new_empty((out.shape[0], self._whole.tokens, out.shape[2])) for out in outs)
        self._whole.read_into(index, keys, values)
        keys_out.copy_(keys[:, self._rows])
        values_out.copy_(values[:, self._rows])

    def close(self) -> None:
        """Close the whole."""
        self._whole.close()


class Placed(NamedTuple):
    """The store's entries for each place of a prompt.

    first: whether the first chunk stands right behind a prefix as long as its cache's. first_exact: whether its KV is exact
    there, up to its codec. readers: None for ordinary text and misses. places: the number of each place's opened chunk.
    """

    opened: OpenLibrary
    first: bool
    first_exact: bool
    readers: tuple[LayerSource | None, ...]
    places: tuple[int | None, ...]

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which places come out of the store."""
        return tuple(reader is not None for reader in self.readers)

    def spread(self, of_chunks: Sequence[_Any]) -> tuple[_Any | None, ...]:
        """Values of opened chunks, place by place."""
        return tuple(None if number is None else of_chunks[number] for number in self.places)

    def close(self) -> None:
        """Close all entries."""
        self.opened.close()


def place(layout: PromptLayout, opener: Opener, *, contextual: bool) -> Placed:
    """Open the best stored cache for every place of a prompt that can have one."""
    stored = layout.stored
    numbers = iter(range(len(stored)))
    places = tuple(None if chunk is None else next(numbers) for chunk in stored)
    spans = [span for span, chunk in zip(layout.chunk_spans, stored, strict=True) if chunk is not None]
    near = bool(spans) and abs(spans[0].start - len(layout.kept_behind)) <= NEAR
    opened = opener(
        [chunk for chunk in stored if chunk is not None],
        contextual=contextual,
        isolated_first=near or layout.exact_first,
    )
    readers = [
        None if number is None else _part(layout, where, opened.readers[number]) for where, number in enumerate(places)
    ]
    return Placed(opened, near, layout.exact_first and opened.first_exact, tuple(readers), places)


def _part(layout: PromptLayout, where: int, reader: LayerSource | None) -> LayerSource | None:
    if reader is None or where not in layout.parts:
        return reader
    return PartOfChunk(reader, layout.parts[where].first, len(layout.chunks[where]))


class _Shift(NamedTuple):
    """A chunk's rows in the prompt, and how far they move; None for unrotated rows, which turn to their positions."""

    span: Span
    by: int | None

    def moved(self, there: torch.Tensor) -> torch.Tensor:
        """How far each row moves, `[rows]`; there: the positions of the rows."""
        return there if self.by is None else there.new_full((self.span.length,), self.by)


class Stretch:
    """Neighbouring chunks of a prompt without a correction."""

    def __init__(self, shifts: Sequence[_Shift], device: torch.device) -> None:
        self.span = Span(shifts[0].span.start, shifts[-1].span.stop)
        self._shifts = [
            (span, Deltas(torch.arange(*span, device=device)) if delta is None else delta) for span, delta in shifts
        ]

    def put(self, layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, index: int, base: int) -> None:
        """Write the layer's KV at its positions; base: the prompt's row that is the first of `staged`."""
        for span, delta in self._shifts:
            for turn, states, buffer in _parts(layer, staged, rotation, span, base):
                _move(turn, states, delta, buffer)


class CorrectedStretch(Stretch):
    """Neighbouring chunks with a KV correction; added: records what it adds."""

    def __init__(self, layout: PromptLayout, shifts: Sequence[_Shift], added: Added) -> None:
        super().__init__(shifts, added.rows.device)
        there = torch.arange(*self.span, device=added.rows.device)
        rows = torch.split(there, [shift.span.length for shift in shifts])
        moved = torch.cat([shift.moved(mine) for shift, mine in zip(shifts, rows, strict=True)])
        # What has no position needs none taken out; where that holds of all, nothing turns twice.
        self._back = None if torch.equal(moved, there) else Deltas(moved - there)
        self._there, self._added = Deltas(there), added
        self._features = position_features(layout, there, added.map.before, added.map.length)

    def put(self, layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, index: int, base: int) -> None:
        """Take positions out, add the correction, and rotate to the prompt's positions."""
        part = self._added.map.layers[index]
        if part is None:
            super().put(layer, staged, rotation, index, base)
            return
        parts = _parts(layer, staged, rotation, self.span, base)
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
    layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, span: Span, base: int
) -> list[tuple[Rotation, torch.Tensor, torch.Tensor]]:
    """For keys, then values: rotation, stored states, target; `[1, kv_heads, rows, head_dim]`."""
    here, there = slice(span.start - base, span.stop - base), slice(*span)
    return [
        (rotation.keys, staged.keys[None, :, here], layer.keys[:, :, there]),
        (rotation.values, staged.values[None, :, here], layer.values[:, :, there]),
    ]


def _move(turn: Rotation, states: torch.Tensor, delta: int | Deltas, out: torch.Tensor) -> None:
    if isinstance(delta, int) and delta == 0:
        out.copy_(states)
    else:
        turn.apply(states, delta, out=out)


def stretches_of(
    layout: PromptLayout,
    readers: Sequence[LayerSource | None],
    corrections: Sequence[KVCorrection | None],
    device: torch.device,
) -> tuple[list[Stretch], tuple[Added, ...]]:
    """Group the chunks that are there by correction and neighbourhood; and the record of each correction."""
    groups: list[tuple[KVCorrection | None, list[_Shift]]] = []
    for reader, span, correction in zip(readers, layout.chunk_spans, corrections, strict=True):
        if reader is None or not span.length:
            continue
        shift = _Shift(span, None if reader.unrotated else span.start - reader.start)
        if groups and groups[-1][0] is correction and groups[-1][1][-1].span.stop == span.start:
            groups[-1][1].append(shift)
        else:
            groups.append((correction, [shift]))
    added: dict[int, Added] = {}
    for correction in {id(one): one for one, _ in groups if one is not None}.values():
        rows = [torch.arange(*span, device=device) for one, shifts in groups if one is correction for span, _ in shifts]
        added[id(correction)] = Added(correction, torch.cat(rows))
    stretches = [
        Stretch(shifts, device) if one is None else CorrectedStretch(layout, shifts, added[id(one)])
        for one, shifts in groups
    ]
    return stretches, tuple(added.values())


class HeldChunk:
    """A chunk cache in memory as a `LayerSource`."""

    def __init__(self, cache: ChunkCache) -> None:
        self.tokens, self.layers, self.start, self.unrotated = cache.tokens, cache.layers, cache.start, cache.unrotated
        self._cache = cache

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        """One copy each."""
        held, outs = (self._cache.keys[index], self._cache.values[index]), (keys_out, values_out)
        require_shapes([tuple(one.shape) for one in held], outs)
        for states, out in zip(held, outs, strict=True):
            out.copy_(states)

    def close(self) -> None:
        """Nothing."""


class Assembly:
    """The loading of a prompt's stored chunks into its cache: threads read ahead, `await_layer` puts layers in place.

    Use it in a `with`: reading starts there, every layer is in place at its end, and an error frees the cache's memory. The
    prefix is in place from the start, and keys stand at the prompt's positions. Rows of missing chunks and of the suffix stay
    unwritten.

    Args:
        decoder: whose cache it is.
        layout: the prompt.
        prefix: KV of the prompt's first rows.
        readers: an open entry for each chunk, or None; closed at the end.
        cache: an empty cache to fill; by default the decoder's own.
        corrections: what to add to each chunk, or None.
        watch: counts waiting for the store as "load", and putting in place as "reposition"; not on a GPU, where both overlap
            with other work.

    Attributes:
        cache: the prompt's cache.
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
        self._stretches, self.added = stretches_of(layout, readers, corrections or (None,) * len(readers), self._device)
        self._base = layout.context.start
        chunks = [
            StagedChunk(reader, Span(span.start - self._base, span.stop - self._base))
            for reader, span in zip(readers, layout.chunk_spans, strict=True)
            if reader is not None
        ]
        self._loader = LayerLoader(chunks, layout.context.length, decoder.rotations, decoder.dtype, self._device)
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

        Raises:
            EntryDamagedError: an entry is not what was written.
            StoreError: the store cannot be read.

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
        with self._stage("reposition"), torch.inference_mode():
            used = self._put(index, staged)
        self._loader.hand_back(index, used)

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self._watch.stage(name) if self._watch is not None else nullcontext()

    def _put(self, index: int, staged: StagedLayer) -> torch.cuda.Event | None:
        """Write a layer into the cache; on a GPU in a side stream, which later work waits for."""
        layer, rotation = self.cache.layers[index], self._decoder.rotations[index]
        if self._stream is None:
            for stretch in self._stretches:
                stretch.put(layer, staged, rotation, index, self._base)
            return None
        now = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = StagedLayer(*(states.to(self._device, non_blocking=True) for states in staged))
            used: torch.cuda.Event = self._stream.record_event()
            for stretch in self._stretches:
                stretch.put(layer, moved, rotation, index, self._base)
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
