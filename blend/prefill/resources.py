"""What a blended prefill gets: a prompt, the decoder and the store, and what is kept of them in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from blend.chunks.correction import StoredCorrections
from blend.chunks.encode import ChunkEncoder
from blend.chunks.library import ChunkLibrary
from blend.config import StateMode
from blend.errors import EntryDamagedError
from blend.layout import PromptLayout, Tokens
from blend.quality import Estimator, Judge, Quality, Target
from blend.stopwatch import Stopwatch
from blend.store.base import ChunkStore
from blend.types import ChunkCache
from blend.verified import checked_states, may_blend

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder
    from blend.model.row_decoder import RowDecoder

    DecoderT_co = TypeVar("DecoderT_co", bound=RowDecoder, default=Decoder, covariant=True)
else:
    from typing import TypeVar

    DecoderT_co = TypeVar("DecoderT_co", covariant=True)


MOST_PREFIXES = 16  # whose libraries and KV are kept in memory: every user may have another prefix
_MOST_TARGETS = 64  # qualities that are remembered: requests may name any

MostRows = int | Callable[[], int]
"""Most rows of a piece, or a function that says so before each piece."""
NewCache = Callable[[int], "BlendedCache"]
"""An empty cache for a prompt, with room for so many rows."""


class MovedRows(NamedTuple):
    """Rows of an earlier prompt, of which a prompt's `MOVED` places are parts; None without such places.

    Attributes:
        cache: the rows.
        edited: tokens that one of the two prompts has in front of moved rows and the other lacks, for each moved row.
        sound: which rows of `cache` may be used, bool `[rows]`; the others are computed. No more of them is then recomputed.
            None: all, and a share of them is recomputed, by `edited`.

    """

    cache: ChunkCache | None = None
    edited: float = 0.0
    sound: NDArray[np.bool_] | None = None


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


class Estimators(Protocol):
    """Gives the judge of a prompt."""

    def target(self, library: ChunkLibrary, quality: Quality) -> Judge | None:
        """The judge for this quality; None if nothing can be promised."""


class StoredEstimators:
    """The estimators of one store, in memory while they are current. Threads may share it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._lock = Lock()
        self._targets: LRUCache[tuple[str, Quality, str], Target | None] = LRUCache(_MOST_TARGETS)

    def target(self, library: ChunkLibrary, quality: Quality) -> Target | None:
        """The target for this quality; None if there is no estimator, or it is damaged."""
        name = library.isolated.identity.quality_name
        key = (name, quality, library.generation)
        with self._lock:
            if key not in self._targets:
                self._targets[key] = self._read(name, quality)
            return self._targets[key]

    def _read(self, name: str, quality: Quality) -> Target | None:
        try:
            content = self._store.read_artifact(name)
            if content is None:
                return None
            return Target.of(quality, Estimator.from_bytes(content))
        except (EntryDamagedError, ValueError, TypeError, KeyError):
            return None


class BlenderParts(Generic[DecoderT_co]):
    """The decoder, the store, and what is kept in memory of both; see `Blender`."""

    def __init__(self, decoder: DecoderT_co, store: ChunkStore, corpus: str, uncorrected_ratio: float) -> None:
        self.decoder = decoder
        self.store = store
        self.corpus = corpus
        self.uncorrected_ratio = uncorrected_ratio
        self.corrections = StoredCorrections(decoder, store)
        self.estimators: Estimators = StoredEstimators(store)
        self._lock = Lock()
        self._encoders: LRUCache[Tokens, ChunkEncoder] = LRUCache(MOST_PREFIXES)
        self._libraries: LRUCache[Tokens, ChunkLibrary] = LRUCache(MOST_PREFIXES)
        if store.pool is not None and decoder.device.type == "cuda":
            store.pool.use_gpu(decoder.device)

    @cached_property
    def trusted(self) -> bool:
        """Whether this model's prompts may be blended by default; see `may_blend`. Looked up once."""
        return may_blend(self.decoder)

    @cached_property
    def states(self) -> StateMode:
        """What recurrent layers carry over stored chunks by default; see `checked_states`. Looked up once."""
        return checked_states(self.decoder)

    def encoder(self, prefix: Tokens) -> ChunkEncoder:
        """The encoder of isolated caches behind this prefix. It needs no store, and works during an outage."""
        with self._lock:
            if prefix not in self._encoders:
                self._encoders[prefix] = ChunkEncoder(self.decoder, prefix, corpus=self.corpus)
            return self._encoders[prefix]

    def library(self, prefix: Tokens) -> ChunkLibrary:
        """The caches of chunks behind this prefix, as the store is now."""
        encoder = self.encoder(prefix)
        with self._lock:
            library = self._libraries.get(prefix)
        if library is None or library.isolated is not encoder:
            library = ChunkLibrary(self.decoder, self.store, prefix, corpus=self.corpus, isolated=encoder)
        else:
            library = library.renewed()
        with self._lock:
            self._libraries[prefix] = library
        return library

    def follow_weights(self) -> None:
        """Forget what was computed with weights that the decoder no longer has."""
        model = self.decoder.identity(()).model
        with self._lock:
            for prefix, encoder in list(self._encoders.items()):
                if encoder.identity.model != model:
                    del self._encoders[prefix]
