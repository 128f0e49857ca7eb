"""Concatenate: from open store entries to one cache whose keys stand at the prompt's positions, filled as layers are needed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from blend.chunks.correction import KVCorrection
from blend.chunks.loader import LayerLoader, LayerSource, StagedChunk, StagedLayer
from blend.chunks.stretches import stretches_of
from blend.model.cache import BlendedCache
from blend.store.codecs.base import require_shapes
from blend.timing import Stopwatch
from blend.types import ChunkCache, PromptLayout, Span

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder


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
    written raises `EntryDamagedError` there. Rows of missing chunks and of the suffix are left unwritten. An exception inside
    the `with` gives its memory back. added: what each correction added, filled with the layers.
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
            layer.on_use = partial(self._fill, index) if self._stretches else None
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
            else:  # another attempt may follow, and two caches are more than a prompt is given
                self.cache.free()
        finally:
            self._loader.close()

    def _fill(self, index: int) -> None:
        """Put a layer in place; those before it first, because they are read in order."""
        for earlier in self.cache.layers[self._next : index]:
            earlier.settle()
        self._next = index + 1
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
