"""What a blended prefill gets: a prompt, and what its `Blender` has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from blend.chunks.correction import StoredCorrections
from blend.config import StateMode
from blend.types import ChunkCache, PromptLayout, Stopwatch

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.model.cache import BlendedCache
    from blend.model.row_decoder import RowDecoder
    from blend.prefill.estimators import Estimators
    from blend.types import Tokens


MostRows = int | Callable[[], int]
"""Most rows of a piece, or a function that says so before each piece."""
NewCache = Callable[[int], "BlendedCache"]
"""An empty cache for a prompt, with room for so many rows."""


class MovedRows(NamedTuple):
    """Rows of an earlier prompt, of which a prompt's `MOVED` places are parts; None without such places.

    edited: tokens that one of the two prompts has in front of moved rows and the other lacks, for each moved row.
    """

    cache: ChunkCache | None = None
    edited: float = 0.0


NOTHING_MOVED = MovedRows()


@dataclass(frozen=True)
class PromptInputs:
    """A prompt to prefill, the same in every attempt.

    Attributes:
        layout: the prompt.
        beginning: KV of its first rows.
        new_cache: makes the cache that the rows are written to.
        watch: a stopwatch that runs since the query arrived.
        most_rows: rows of a pass at most; None runs all at once and does not interleave with other prompts.
        needs_hit: whether to give up where the store holds none of its chunks.
        moved: the rows of its `MOVED` places.

    """

    layout: PromptLayout
    beginning: ChunkCache
    new_cache: Callable[[], BlendedCache]
    watch: Stopwatch
    most_rows: MostRows | None = None
    needs_hit: bool = False
    moved: MovedRows = NOTHING_MOVED

    @property
    def uses_store(self) -> bool:
        """Whether a place has a stored cache, or should have one."""
        return self.layout.stored.count(None) < len(self.layout.stored)


class BlenderParts(Protocol):
    """What an attempt uses of a `Blender`; see there."""

    uncorrected_ratio: float
    corrections: StoredCorrections
    estimators: Estimators

    @property
    def decoder(self) -> RowDecoder:
        """Whose prompts are prefilled."""

    @property
    def states(self) -> StateMode:
        """What recurrent layers carry over stored chunks."""

    def library(self, prefix: Tokens) -> ChunkLibrary:
        """The caches behind a prefix."""
