"""The chunk caches behind one prefix: where the store keeps them, which of them a chunk should have, and computing them.

A chunk can have two caches. Its *isolated* cache is computed right behind the prefix; it is exact for the first chunk of a
prompt. Its *contextual* cache is computed behind the prefix and a surrogate context: a few chunks of the corpus, the same for
all. Most of what a chunk's KV gains from earlier text does not depend on that text (docs/study.md), so the contextual cache is
closer to full recompute in every other place.

Text that requests bring has one cache instead, taken out of the prompt that brought it: nothing more is computed for it, and it
is at least as close as a corrected contextual cache (docs/study.md), because it has read a real prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from blend.chunks.encode import ChunkEncoder, beyond, without_positions
from blend.chunks.opened import OpenChunks, open_chunks
from blend.chunks.surrogate import read_surrogate
from blend.config import BATCH_TOKENS
from blend.store.base import ChunkStore
from blend.store.format import LONGEST
from blend.types import (
    CacheKey,
    CacheKind,
    ChunkCache,
    ChunkKey,
    Place,
    PlaceOrigin,
    Progress,
    PromptLayout,
    Tokens,
    no_progress,
)

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder
    from blend.store.pool import ReadyChunk


_LARGEST_VALUE, _LARGEST_GROUP = 8, 64  # bytes; tokens that a codec keeps together


class ChunkLibrary:
    """The caches of chunks behind one prefix, with the surrogate context that the store holds at this moment.

    Args:
        prefix: token ids in front of every chunk.
        batch_tokens: see `ChunkEncoder`.
        corpus: the corpus of the surrogate context (`blend.corpora`).
        before: the library that this one replaces; unchanged parts are shared.
        generation: the store's, when all of this was read; by default asked for now.

    Attributes:
        isolated, contextual: the encoders of both kinds of caches; the latter is None without a surrogate context.
        surrogate: the chunks of the surrogate context.
        decided: whether the store holds a choice of it, even of none.
        problems: a line for one that must not be used.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        store: ChunkStore,
        prefix: Tokens,
        batch_tokens: int = BATCH_TOKENS,
        *,
        corpus: str = "",
        before: ChunkLibrary | None = None,
        isolated: ChunkEncoder | None = None,
        generation: str | None = None,
    ) -> None:
        self.decoder, self.store, self.prefix, self.corpus = decoder, store, prefix, corpus
        self._batch_tokens = batch_tokens
        self._from_prompts = replace(decoder.identity(()), from_prompts=True)
        self._described: set[str] = before._described if before else set()
        self.isolated: ChunkEncoder = isolated or (before.isolated if before else self._encoder(prefix))
        # Read first: a write during the other reads then shows as a change.
        self.generation = store.generation if generation is None else generation
        self.decided, self.surrogate, self.problems = read_surrogate(
            store, self.isolated.identity.surrogate_name, decoder.vocabulary
        )
        same = before is not None and before.surrogate == self.surrogate
        self.contextual: ChunkEncoder | None = before.contextual if before and same else self._contextual()

    def _contextual(self) -> ChunkEncoder | None:
        if not self.surrogate:
            return None
        return self._encoder((*self.prefix, *chain(*self.surrogate)))

    def _encoder(self, prefix: Tokens) -> ChunkEncoder:
        return ChunkEncoder(self.decoder, prefix, self._batch_tokens, corpus=self.corpus)

    def renewed(self) -> ChunkLibrary:
        """The library itself, or a new one if any process has changed the store since."""
        now = self.store.generation
        return self if now == self.generation else self.reread(now)

    def reread(self, generation: str | None = None) -> ChunkLibrary:
        """A new library, as the store is now; inside `ChunkStore.writing` it stays current."""
        return ChunkLibrary(
            self.decoder,
            self.store,
            self.prefix,
            self._batch_tokens,
            corpus=self.corpus,
            before=self,
            generation=generation,
        )

    def encoder(self, kind: CacheKind) -> ChunkEncoder:
        """The encoder of isolated or contextual caches; the former if there is no surrogate context."""
        return (self.contextual if kind is CacheKind.CONTEXTUAL else None) or self.isolated

    def start(self, key: CacheKey) -> int:
        """The position of the first token of this cache."""
        return 0 if key.kind is CacheKind.FROM_PROMPT else len(self.encoder(key.kind).prefix_tokens)

    def variants(self, chunks: Sequence[Tokens], *, contextual: bool = True) -> list[CacheKey]:
        """Every cache that these chunks should have, each once: the isolated ones, then the contextual ones if wanted."""
        distinct = list(dict.fromkeys(chunks))
        behind = [chunk for chunk in distinct if contextual and self._has_contextual(chunk)]
        isolated = [CacheKey(chunk, CacheKind.ISOLATED) for chunk in distinct]
        return [*isolated, *(CacheKey(chunk, CacheKind.CONTEXTUAL) for chunk in behind)]

    def _has_contextual(self, chunk: Tokens) -> bool:
        """Whether a chunk has a contextual cache: not those of the surrogate context, nor those too long behind it."""
        if self.contextual is None or chunk in self.surrogate:
            return False
        context = self.decoder.context_length
        return context is None or len(self.contextual.prefix_tokens) + len(chunk) <= context

    def missing(self, chunks: Sequence[Tokens]) -> list[CacheKey]:
        """The caches of these chunks that the store does not hold."""
        return self.missing_of(self.variants(chunks))

    def missing_of(self, variants: Sequence[CacheKey]) -> list[CacheKey]:
        """Which of these caches the store does not hold."""
        held = self.store.held(map(self.key, variants))
        return [one for one in variants if self.key(one) not in held]

    def key(self, key: CacheKey) -> ChunkKey:
        """Where the store keeps this cache."""
        if key.kind is CacheKind.FROM_PROMPT:
            return self._from_prompts.key(key.chunk)
        return self.encoder(key.kind).identity.key(key.chunk)

    def wanted(self, layout: PromptLayout) -> list[CacheKey]:
        """Every cache that the places of a prompt should have, each once."""
        corpus = [chunk for place in layout.places if place.origin is PlaceOrigin.CORPUS and (chunk := place.stored)]
        brought = [chunk for place in layout.places if place.origin is PlaceOrigin.REQUEST and (chunk := place.stored)]
        return [*self.variants(corpus), *(CacheKey(chunk, CacheKind.FROM_PROMPT) for chunk in dict.fromkeys(brought))]

    def compute(self, variants: Sequence[CacheKey], progress: Progress = no_progress) -> int:
        """Compute these caches and store each at once; the number of their tokens.

        progress: of the stage "encode", in tokens.
        Raises `StoreError` when the store cannot be written.
        """
        total = sum(len(one.chunk) for one in variants)
        progress("encode", 0, total)
        for _ in self.computed(variants, on_tokens=lambda tokens: progress("encode", tokens, total)):
            pass
        progress("encode", total, total)
        return total

    def computed(
        self,
        variants: Sequence[CacheKey],
        kept: Container[CacheKey] | None = None,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[tuple[CacheKey, ChunkCache]]:
        """Yield each cache once computed, and stored if it is one of `kept`; None stores all."""
        before = 0
        for kind in (CacheKind.ISOLATED, CacheKind.CONTEXTUAL):
            keys = [key for key in variants if (key.kind is CacheKind.CONTEXTUAL) == (kind is CacheKind.CONTEXTUAL)]
            for index, cache in self.encoder(kind).encode([key.chunk for key in keys], beyond(before, on_tokens)):
                if kept is None or keys[index] in kept:
                    self.keep(keys[index], cache)
                yield keys[index], cache
            before += sum(len(key.chunk) for key in keys)

    def keep(self, key: CacheKey, cache: ChunkCache) -> None:
        """Store a cache in the form that the store's codec asks for. Raises `StoreError`."""
        from_prompt = key.kind is CacheKind.FROM_PROMPT
        if (self.store.codec.unrotated or from_prompt) and not cache.unrotated:
            cache = without_positions(cache, self.decoder.rotations)
        address = self.key(key)
        self.store.put(address, self._from_prompt_form(cache) if from_prompt else cache)
        if address.namespace not in self._described:
            self.store.describe_new(address.namespace, self.words(key.kind))
            self._described.add(address.namespace)

    def _from_prompt_form(self, cache: ChunkCache) -> ChunkCache:
        """A cache without positions as the store keeps it: in the decoder's dtype, unless a codec of few bits follows."""
        dtype = torch.float32 if self.store.codec.unrotated else self.decoder.dtype
        keys, values = (tuple(part.to(dtype) for part in kind) for kind in (cache.keys, cache.values))
        return ChunkCache(keys, values, start=0, unrotated=True)

    def words(self, kind: CacheKind) -> dict[str, str]:
        """A description of these caches, for the store."""
        words = {"model": self.decoder.name, "dtype": self.decoder.kept_as}
        if kind is CacheKind.FROM_PROMPT:
            return {**words, "contextual": "prompts"}
        words["prefix_tokens"] = str(len(self.prefix))
        return {**words, "contextual": "surrogate context"} if kind is CacheKind.CONTEXTUAL else words

    def keys(self, chunks: Sequence[Tokens]) -> set[ChunkKey]:
        """Where the store keeps the caches of these chunks."""
        return set(map(self.key, self.variants(chunks)))

    def most_bytes(self, key: CacheKey) -> int:
        """Most bytes of its entry: 8-byte values, whole groups of tokens, the longest header."""
        values = sum(layer.width for layer in self.decoder.rotations)
        operators = sum(layer.operator_bytes for layer in self.decoder.recurrent.values())
        return (len(key.chunk) + _LARGEST_GROUP) * values * _LARGEST_VALUE + operators + LONGEST

    def open(self, layout: PromptLayout, *, contextual: bool = True, sound: bool = False) -> OpenChunks:
        """The best cache for every place of a prompt; see `open_chunks`."""
        return open_chunks(self, layout, contextual=contextual, sound=sound)

    def read_ahead(self, layout: PromptLayout) -> None:
        """Announce that the caches of a prompt will be read soon; see `ChunkStore.prefetch`."""
        keys = self.wanted(layout)
        self.store.prefetch(map(self.key, keys), max(map(self.most_bytes, keys), default=0))

    def tables(self) -> Mapping[CacheKind, Mapping[Tokens, ReadyChunk]]:
        """The chunks that are ready in memory, of each kind of cache by their tokens."""
        pool, store = self.store.pool, self.store
        if pool is None:
            return _NO_TABLES
        spaces = {kind: self.encoder(kind).identity.namespace for kind in (CacheKind.ISOLATED, CacheKind.CONTEXTUAL)}
        spaces[CacheKind.FROM_PROMPT] = self._from_prompts.namespace
        return {kind: pool.table(store, space, self.generation) for kind, space in spaces.items()}

    def best(self, place: Place, *, contextual: bool) -> CacheKey | None:
        """The cache that serves a place behind other text; None for ordinary text."""
        chunk = place.stored
        if chunk is None:
            return None
        if place.origin is PlaceOrigin.REQUEST:
            return CacheKey(chunk, CacheKind.FROM_PROMPT)
        in_context = contextual and self._has_contextual(chunk)
        return CacheKey(chunk, CacheKind.CONTEXTUAL if in_context else CacheKind.ISOLATED)

    def caches(self, chunks: Sequence[Tokens], *, contextual: bool) -> list[ChunkCache]:
        """The best cache for every chunk of a prompt; missing ones are computed, and stored if they belong there."""
        layout = PromptLayout.of_chunks(self.prefix, chunks, ())
        with self.open(layout, contextual=contextual, sound=True) as opened:
            stored = [chunk.cache(self.decoder.dtype) if chunk else None for chunk in opened.chunks]
        computed = dict(self.computed(opened.missing, self.variants(chunks)))
        keys = [self.best(place, contextual=contextual and index > 0) for index, place in enumerate(layout.places)]
        best = [computed.get(key, cache) if key else None for key, cache in zip(keys, stored, strict=True)]
        return [cache for cache in best if cache is not None]


_NO_TABLES: Mapping[CacheKind, Mapping[Tokens, ReadyChunk]] = {kind: {} for kind in CacheKind}
