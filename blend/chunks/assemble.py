"""Concatenate: from open store entries to one cache whose keys stand at the prompt's positions, filled as layers are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.correction import Added, KVCorrection, position_features
from blend.chunks.loader import LayerLoader, LayerSource, StagedChunk, StagedLayer
from blend.errors import EntryDamagedError
from blend.model.cache import BlendedCache, BlendedLayer
from blend.model.rope import Rotation, moves
from blend.store.base import ChunkStore
from blend.store.codec import require_shapes
from blend.store.reader import ChunkReader
from blend.timing import Stopwatch
from blend.types import ChunkCache, ChunkKey, PromptLayout, Span

if TYPE_CHECKING:
    from blend.model.admission import LayerRotation
    from blend.model.row_decoder import RowDecoder
    from blend_kernels import Deltas


class Expected(NamedTuple):
    """A chunk cache as it must be: under which key, how many tokens, and the position of the first when it was computed."""

    key: ChunkKey
    tokens: int
    start: int


class OpenChunks(NamedTuple):
    """One reader for each chunk asked for, or None for a miss; and one line for every entry that was refused."""

    readers: tuple[ChunkReader | None, ...]
    problems: tuple[str, ...]


def open_chunks(
    store: ChunkStore, wanted: Sequence[Expected], layers: int, refused: Mapping[ChunkKey, str] | None = None
) -> OpenChunks:
    """Open these entries. A damaged one becomes a miss and a line in `problems`; so does one whose place is not as expected.

    Layers are verified when they are read. layers: of the decoder. refused: entries known to be damaged already, with the line
    that says so. Raises `StoreError` when the store cannot be read: that is an outage, not a miss.
    """
    known, asked = refused or {}, [one for one in wanted if one.key not in (refused or {})]
    found = iter(zip(asked, store.open_many([one.key for one in asked]), strict=True))
    readers: list[ChunkReader | None] = []
    problems: dict[ChunkKey, str] = {}
    for one in wanted:
        reader = EntryDamagedError(known[one.key]) if one.key in known else _fitting(*next(found), layers)
        if isinstance(reader, EntryDamagedError):
            problems[one.key] = str(reader)
        readers.append(None if isinstance(reader, EntryDamagedError) else reader)
    return OpenChunks(tuple(readers), tuple(problems.values()))


def _fitting(
    wanted: Expected, reader: ChunkReader | EntryDamagedError | None, layers: int
) -> ChunkReader | EntryDamagedError | None:
    """What was opened; an error when it stands for another place, or another number of tokens or layers."""
    if reader is None or isinstance(reader, EntryDamagedError):
        return reader
    found, needed = (reader.tokens, reader.layers, reader.start), (wanted.tokens, layers, wanted.start)
    if found == needed:
        return reader
    reader.close()
    return EntryDamagedError(
        f"store entry {wanted.key.digest[:16]} must be computed again: it holds {found[0]} tokens in {found[1]} layers from "
        f"position {found[2]}, not {needed}"
    )


class HeldChunk:
    """A chunk cache in memory as a `LayerSource`."""

    def __init__(self, cache: ChunkCache) -> None:
        self.tokens, self.layers, self.start, self.still = cache.tokens, cache.layers, cache.start, cache.still
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
    """A cache with the prefix in place and the stored chunks on their way; use it in a `with`, inside which all are needed.

    prefix: its KV. readers: an open entry for each chunk of the prompt, or None; they are closed at the end. cache: an
    empty one to fill; by default the decoder's own. corrections: for each chunk what is to be added to it, or None. watch:
    waiting for the store counts as its stage "load", putting in place as "reposition"; not on a GPU, where both happen beside
    other work.
    Its cache: keys stand at the prompt's positions; a layer is filled when it is first used, and what of it is not what was
    written raises `EntryDamagedError` there. Rows of missing chunks and of the suffix are left unwritten. added: what each
    correction added, filled with the layers.
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
        self._stretches, self.added = _stretches(layout, readers, corrections or (None,) * len(readers), self._device)
        base = layout.context.start
        chunks = [
            StagedChunk(reader, Span(span.start - base, span.stop - base))
            for reader, span in zip(readers, layout.chunk_spans, strict=True)
            if reader is not None
        ]
        self._base = base
        self._loader = LayerLoader(chunks, layout.context.length, decoder.rotations, decoder.dtype, self._device)
        self._next = 0
        for index, layer in enumerate(self.cache.layers):
            layer.write_run(0, prefix.keys[index][None], prefix.values[index][None])
            layer.length = layout.rows
            layer.on_use = partial(self._fill, index)
        self._stream = _side_stream(self._device)

    def __enter__(self) -> Assembly:
        self._loader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.cache.settle()
        finally:
            self._loader.close()

    def _fill(self, index: int) -> None:
        """Put a layer in place; those before it first, because they are read in order."""
        for earlier in self.cache.layers[self._next : index]:
            earlier.settle()
        self._next = index + 1
        if not self._stretches:
            return
        with self._stage("load"):
            staged = self._loader.take(index)
        with self._stage("reposition"), torch.inference_mode():
            used = self._put(index, staged)
        self._loader.hand_back(index, used)

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self._watch.stage(name) if self._watch is not None else nullcontext()

    def _put(self, index: int, staged: StagedLayer) -> torch.cuda.Event | None:
        """Into the cache; on a GPU beside its other work, which waits for it in turn."""
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
        done.cache.settle()
    return done


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own for what is put in place, which begins when the cache's buffers are there."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


class _Shift(NamedTuple):
    """A chunk's rows in the prompt, and by how much all of them move; None: each to its position, from none at all."""

    span: Span
    by: int | None

    def moved(self, there: torch.Tensor) -> torch.Tensor:
        """By how much each row moves, `[rows]`; there: the positions of the rows."""
        return there if self.by is None else there.new_full((self.span.length,), self.by)


class _Stretch:
    """Neighbouring chunks of a prompt to which the same is added."""

    def __init__(self, shifts: Sequence[_Shift], device: torch.device) -> None:
        self.span = Span(shifts[0].span.start, shifts[-1].span.stop)
        self._shifts = [
            (span, moves(torch.arange(*span, device=device)) if delta is None else delta) for span, delta in shifts
        ]

    def put(self, layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, index: int, base: int) -> None:
        """Write the layer's KV at its positions; base: the prompt's row that is the first of `staged`."""
        for span, delta in self._shifts:
            for turn, states, buffer in _parts(layer, staged, rotation, span, base):
                _move(turn, states, delta, buffer)


class _CorrectedStretch(_Stretch):
    """Chunks to which a KV correction adds; added: what it adds to the prompt, taken down layer by layer."""

    def __init__(self, layout: PromptLayout, shifts: Sequence[_Shift], added: Added) -> None:
        super().__init__(shifts, added.rows.device)
        there = torch.arange(*self.span, device=added.rows.device)
        rows = torch.split(there, [shift.span.length for shift in shifts])
        moved = torch.cat([shift.moved(mine) for shift, mine in zip(shifts, rows, strict=True)])
        # What has no position needs none taken out; where that holds of all, nothing turns twice.
        self._back = None if torch.equal(moved, there) else moves(moved - there)
        self._there, self._added = moves(there), added
        self._features = position_features(layout, there, added.map.before, added.map.length)

    def put(self, layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, index: int, base: int) -> None:
        """Take positions out, add what the correction predicts, and turn to the prompt's positions."""
        part = self._added.map.layers[index]
        if part is None:
            super().put(layer, staged, rotation, index, base)
            return
        parts = _parts(layer, staged, rotation, self.span, base)
        keys, values = (_still(turn, states, self._back)[0] for turn, states, _ in parts)
        self._added.parts[index].append(part.add(keys, values, self._features))
        for (turn, _, buffer), states in zip(parts, (keys, values), strict=True):
            turn.apply(states[None], self._there, out=buffer)


def _still(turn: Rotation, states: torch.Tensor, back: Deltas | None) -> torch.Tensor:
    """Positions taken out, fp32; of states that have none the same tensor, if it is fp32 already."""
    if turn.inv_freq is None or back is None:
        return states.float()
    return turn.apply(states, back, out=torch.empty(states.shape, dtype=torch.float32, device=states.device))


def _parts(
    layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, span: Span, base: int
) -> list[tuple[Rotation, torch.Tensor, torch.Tensor]]:
    """Of the keys, then the values, at these rows: how they turn, as stored, where they go; `[1, kv_heads, rows, head_dim]`."""
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


def _stretches(
    layout: PromptLayout,
    readers: Sequence[LayerSource | None],
    corrections: Sequence[KVCorrection | None],
    device: torch.device,
) -> tuple[list[_Stretch], tuple[Added, ...]]:
    """The chunks that are there, neighbours with the same correction together; and what every correction will have added."""
    groups: list[tuple[KVCorrection | None, list[_Shift]]] = []
    for reader, span, correction in zip(readers, layout.chunk_spans, corrections, strict=True):
        if reader is None or not span.length:
            continue
        shift = _Shift(span, None if reader.still else span.start - reader.start)
        if groups and groups[-1][0] is correction and groups[-1][1][-1].span.stop == span.start:
            groups[-1][1].append(shift)
        else:
            groups.append((correction, [shift]))
    added: dict[int, Added] = {}
    for correction in {id(one): one for one, _ in groups if one is not None}.values():
        rows = [torch.arange(*span, device=device) for one, shifts in groups if one is correction for span, _ in shifts]
        added[id(correction)] = Added(correction, torch.cat(rows))
    stretches = [
        _Stretch(shifts, device) if one is None else _CorrectedStretch(layout, shifts, added[id(one)])
        for one, shifts in groups
    ]
    return stretches, tuple(added.values())
