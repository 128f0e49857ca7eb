"""What a store has for a prompt, place by place: ordinary text has nothing, and a place may hold a part of a chunk only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from blend.chunks.loader import LayerSource
from blend.chunks.open_library import OpenLibrary
from blend.types import PromptLayout

_Any = TypeVar("_Any")
NEAR = 64  # tokens more or fewer before the first chunk than its caches have; chosen, not measured


class Opener(Protocol):
    """`ChunkLibrary.open` or `open_sound`."""

    def __call__(self, chunks: Sequence[tuple[int, ...]], *, contextual: bool, isolated_first: bool) -> OpenLibrary:
        """See there."""


class PartOfChunk:
    """Some rows of a chunk's cache as a `LayerSource`: `tokens` of them from `first` on."""

    def __init__(self, whole: LayerSource, first: int, tokens: int) -> None:
        self.tokens, self.layers, self.start, self.still = tokens, whole.layers, whole.start + first, whole.still
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
    """An opened store, and for each place of the prompt what it has there.

    first: whether the first chunk stands where a prompt's first chunk does, right behind a prefix like that of its cache.
    first_exact: whether its KV is exact there, but for what its codec lost. readers: None for ordinary text and for misses.
    """

    opened: OpenLibrary
    first: bool
    first_exact: bool
    readers: tuple[LayerSource | None, ...]
    places: tuple[int | None, ...]

    @property
    def hits(self) -> tuple[bool, ...]:
        """Whether the store gave what stands there."""
        return tuple(reader is not None for reader in self.readers)

    def spread(self, of_chunks: Sequence[_Any]) -> tuple[_Any | None, ...]:
        """What is known of each opened chunk, place by place."""
        return tuple(None if number is None else of_chunks[number] for number in self.places)

    def close(self) -> None:
        """Close all entries."""
        self.opened.close()


def place(layout: PromptLayout, opener: Opener, *, contextual: bool) -> Placed:
    """Open the best stored cache for every place of a prompt that may have one."""
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
