"""Place a prompt's stored chunks into its cache, layer by layer: move keys to their positions, add the correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from blend.chunks.correction import KVCorrection
from blend.chunks.encode import put_states
from blend.chunks.gain import ChunkRows, PromptGain
from blend.chunks.loader import LayerLoader
from blend.chunks.opened import of_cache
from blend.errors import EntryDamagedError
from blend.layout import PromptLayout
from blend.model.cache import BlendedCache, LayerRotation
from blend.model.passes import OnLayer, nothing
from blend.model.recurrent import LeftOut
from blend.stopwatch import Stopwatch
from blend.store.ready import ReadyChunk
from blend.types import ChunkCache
from blend_kernels import PlacingTable, place_layer

if TYPE_CHECKING:
    from blend.model.row_decoder import RowDecoder


# Layers that a GPU places ahead of the one that is needed next, so that it always has one to place.
_AHEAD = 1
# Layers that one launch places.
_TOGETHER = 2


class Placement:
    """Chunks of one shape in a prompt, and what corrections add to them.

    Args:
        decoder: the model.
        layout: the prompt.
        rows: those of the chunks.
        chunks: the cache of each.
        corrections: what is added to each, or None.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        layout: PromptLayout,
        rows: ChunkRows,
        chunks: Sequence[ReadyChunk],
        corrections: Sequence[KVCorrection | None],
    ) -> None:
        self._backend = decoder.placing
        start = np.fromiter(map(attrgetter("start"), chunks), np.int64, len(chunks))
        absolute = np.fromiter(map(attrgetter("unrotated"), chunks), bool, len(chunks))
        kvs = list(map(attrgetter("near"), chunks))
        moved = rows.at - start - rows.first
        self.table = PlacingTable(kvs, rows.first, rows.at, rows.rows, moved, absolute, decoder.device)
        positions = torch.from_numpy(rows.each(rows.at))
        self._positions = positions.to(decoder.device, non_blocking=True)
        self.gains: list[PromptGain] = []
        for correction in dict.fromkeys(filter(None, corrections)):
            corrected = [index for index, added in enumerate(corrections) if added is correction]
            added_to = [chunks[index] for index in corrected]
            rows_added_to = rows.only(np.array(corrected, np.int64))
            gain = PromptGain(decoder, layout, correction, added_to, rows_added_to, self.table.total_rows)
            self.gains.append(gain)

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The places of these positions among the rows of the table, and whether they are there at all."""
        last = self._positions.shape[0] - 1
        at = torch.searchsorted(self._positions, rows).clamp_max(last)
        return at, self._positions[at] == rows

    def place(self, start: int, stop: int, cache: BlendedCache, rotation: LayerRotation) -> None:
        """Write layers `start ... stop - 1`, which are alike."""
        gains = [gain for each in self.gains if (gain := each.layers(start, stop)) is not None]
        gain = sum(gains[1:], gains[0]) if gains else None
        kv = cache.together(start, stop)
        if stop - start == 1:
            gain = None if gain is None else gain[0]
            kv = (kv[0][0], kv[1][0])
        place_layer(self.table, start, *kv, rotation.keys, rotation.values, gain=gain, backend=self._backend)


class Assembly:
    """The placing of a prompt's stored chunks into its cache: `await_layer` waits until a layer is there.

    Use it in a `with`: reading starts there, every layer is in place at its end, and an error frees the cache's memory. The
    prefix is in place from the start. Rows of missing chunks and of the suffix stay unwritten.

    Args:
        decoder: the model.
        layout: the prompt.
        prefix: KV of the prompt's first rows.
        chunks: the cache of each place, or None.
        loader: reads those that are not in memory yet.
        cache: an empty one.
        corrections: what to add to each place, or None.
        watch: counts waiting for the store as "load" and placing as "reposition". Not on a GPU, where both overlap with other
            work.

    Attributes:
        on_placed: called with each layer once it is placed.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        layout: PromptLayout,
        prefix: ChunkCache,
        chunks: Sequence[ReadyChunk | None],
        loader: LayerLoader,
        cache: BlendedCache,
        corrections: Sequence[KVCorrection | None] = (),
        watch: Stopwatch | None = None,
    ) -> None:
        self._decoder = decoder
        self._device = decoder.device
        self._layout = layout
        self.cache = cache
        self._watch = watch if self._device.type == "cpu" else None
        self._chunks = chunks
        self._loader = loader
        self.placements = _placements(decoder, layout, chunks, corrections)
        put_states(decoder, prefix, self.cache)
        self.cache.begin(prefix.keys, prefix.values, layout.rows)
        self._depth = len(self.cache.layers)
        self._next = 0 if self.placements else self._depth
        self._side = _SideStream(self._device) if self._device.type == "cuda" else None
        self.on_placed: OnLayer = nothing

    @property
    def gains(self) -> list[PromptGain]:
        """What corrections add."""
        return [gain for placement in self.placements for gain in placement.gains]

    def __enter__(self) -> Assembly:
        self._loader.start()
        self._submit(_AHEAD)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.finish()
            self.on_placed = nothing  # it often leads back here
            return
        self.on_placed = nothing
        if self._side is not None:
            self._side.wait()
        self.cache.free()  # another attempt may follow, and a prompt gets memory for one cache

    @property
    def pending(self) -> range:
        """The layers that are not in place yet."""
        return range(self._next, self._depth)

    def await_layer(self, layer: int) -> None:
        """Wait until this layer and those before it are read, and put them in place.

        Raises `EntryDamagedError` when an entry is not what was written, `StoreError` when the store cannot be read.
        """
        while self._next <= layer:
            index = self._next
            self._next += 1
            self._await(index)

    def finish(self) -> None:
        """Put all layers in place."""
        self.await_layer(self._depth - 1)
        for gain in self.gains:
            gain.keep()

    @torch.inference_mode()
    def _await(self, index: int) -> None:
        with self._stage("load"):
            self._loader.wait(index)
        self._take_operators(index)
        with self._stage("reposition"):
            if self._side is None:
                self._place(index, index + 1)
            else:
                self._submit(index + 1 + _AHEAD)
                self._side.await_layer(index)
        self.on_placed(index)

    def _submit(self, stop: int) -> None:
        """Have a GPU place those layers before this one that are read."""
        if self._side is None or not self.placements:
            return
        read = self._depth if self._loader.is_complete else self._next
        while (start := self._side.submitted) < min(stop, read):
            end = start + 1
            while end < min(read, start + _TOGETHER) and self._are_alike(start, end):
                end += 1
            self._side.submit(partial(self._place, start, end), end - start)

    def _are_alike(self, layer: int, later: int) -> bool:
        """Whether these layers can be placed by one launch."""
        rotations = self._decoder.rotations
        if not self.cache.is_whole or rotations[layer].kind != rotations[later].kind:
            return False
        return all((layer in gain.maps.number) == (later in gain.maps.number) for gain in self.gains)

    @torch.inference_mode()
    def _place(self, start: int, stop: int) -> None:
        for placement in self.placements:
            placement.place(start, stop, self.cache, self._decoder.rotations[start])

    def _take_operators(self, index: int) -> None:
        """Tell a recurrent layer what the rows behind the chunks' leads do to its state."""
        recurrent = self._decoder.recurrent.get(index)
        if recurrent is None:
            return
        places = zip(self._layout.places, self._layout.chunk_spans, self._chunks, strict=True)
        for place, span, chunk in places:
            if chunk is None or not span.length or chunk.lead >= chunk.tokens:
                continue
            try:
                operator = recurrent.operator(chunk.operators[index])
            except ValueError as error:
                raise EntryDamagedError(f"layer {index} of a store entry: {error}") from None
            start = span.start + chunk.lead - place.first
            self.cache.carried(index).add(LeftOut(start, span.stop, operator))

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self._watch.stage(name) if self._watch is not None else nullcontext()


def _placements(
    decoder: RowDecoder,
    layout: PromptLayout,
    chunks: Sequence[ReadyChunk | None],
    corrections: Sequence[KVCorrection | None],
) -> list[Placement]:
    """One for each packing among the chunks that are there."""
    bounds = layout.bounds
    pairs = enumerate(chunks)
    used = [(index, chunk) for index, chunk in pairs if chunk is not None and bounds[index + 1] > bounds[index]]
    placements = []
    for packing in sorted({chunk.kv.shape.packing for _, chunk in used}):
        placed = [(index, chunk) for index, chunk in used if chunk.kv.shape.packing == packing]
        places = np.array([index for index, _ in placed], np.int64)
        rows = ChunkRows.of(layout, places)
        added = [corrections[index] if corrections else None for index, _ in placed]
        placements.append(Placement(decoder, layout, rows, [chunk for _, chunk in placed], added))
    return placements


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all prompts: what one of them allocates there, the next one uses again."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _SideStream:
    """A CUDA stream on which layers are placed in order, beside the passes; a pass waits for its own layer alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._placed: list[torch.cuda.Event] = []

    @property
    def submitted(self) -> int:
        """How many layers were submitted."""
        return len(self._placed)

    def submit(self, place: Callable[[], None], layers: int) -> None:
        """Place the next layers; the host does not wait."""
        with torch.cuda.stream(self._stream):
            place()
            self._placed += [self._stream.record_event()] * layers

    def await_layer(self, layer: int) -> None:
        """Let the work that is submitted from now on wait for a layer."""
        torch.cuda.current_stream(self._device).wait_event(self._placed[layer])

    def wait(self) -> None:
        """Wait until the device has placed everything of this prompt."""
        for event in self._placed[-1:]:
            event.synchronize()


def assemble(
    decoder: RowDecoder,
    layout: PromptLayout,
    prefix: ChunkCache,
    chunks: Sequence[ReadyChunk | ChunkCache | None],
    corrections: Sequence[KVCorrection | None] = (),
) -> Assembly:
    """An `Assembly` with everything in place. chunks: of each place its cache, all layers of it in memory."""
    ready = [of_cache(chunk, decoder) if isinstance(chunk, ChunkCache) else chunk for chunk in chunks]
    loader = LayerLoader(len(decoder.rotations))
    cache = decoder.new_cache(layout.rows)
    with Assembly(decoder, layout, prefix, ready, loader, cache, corrections) as assembly:
        pass
    return assembly
