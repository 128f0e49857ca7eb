"""The chunk caches behind one prefix: where the store keeps them, which of them a chunk should have, and computing them.

A chunk can have two caches. Its *isolated* cache is computed right behind the prefix; it is exact for the first chunk of a
prompt. Its *contextual* cache is computed behind the prefix and a surrogate context: a few chunks of the corpus, the same for
all. Most of what a chunk's KV gains from earlier text does not depend on that text (docs/study.md), so the contextual cache is
closer to full recompute in every other place.

Both are functions of the model, the tokens in front and the chunk's tokens. No prompt in which a chunk stands changes them, so
no neighbouring text can change what later prompts read from its caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blend.chunks.encode import ChunkEncoder, without_positions
from blend.config import BATCH_TOKENS
from blend.errors import EntryDamagedError
from blend.layout import PromptLayout, Tokens, lead_of
from blend.stopwatch import Progress, no_progress
from blend.store.backend import cache_name
from blend.store.base import ChunkStore
from blend.store.format import LONGEST, encode_entry
from blend.store.seal import Seal
from blend.types import CacheKey, CacheKind, ChunkCache, ChunkKey

if TYPE_CHECKING:
    from blend.model.row_decoder import RowDecoder
    from blend.store.ready import ReadyChunk


_LARGEST_VALUE = 8  # bytes
_LARGEST_GROUP = 64  # tokens that a codec keeps together


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
        self.decoder = decoder
        self.store = store
        self.prefix = prefix
        self.corpus = corpus
        self._batch_tokens = batch_tokens
        self._described: set[str] = before._described if before else set()
        self._entry_bytes: dict[tuple[int, int, str], int] = before._entry_bytes if before else {}
        self.isolated: ChunkEncoder = isolated or (before.isolated if before else self._encoder(prefix))
        # Read first: a write during the other reads then shows as a change.
        self.generation = store.generation if generation is None else generation
        self.surrogate: tuple[Tokens, ...] = ()
        self.problems: tuple[str, ...] = ()
        content = None
        try:
            content = store.read_artifact(self.isolated.identity.surrogate_name)
            if content is not None:
                self.surrogate = _parsed(content, decoder.vocabulary)
        except (EntryDamagedError, ValueError) as error:
            content = None
            self.problems = (f"the surrogate context cannot be used: {error}",)
        self.decided = content is not None
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
        return len(self.encoder(key.kind).prefix_tokens)

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
        stored = self.store.held(map(self.key, variants))
        return [key for key in variants if self.key(key) not in stored]

    def restore(self, missing: Sequence[CacheKey], progress: Progress = no_progress) -> list[CacheKey]:
        """Copy these back to the store's far place from its nearer tiers; returns those that have to be computed.

        progress: of the stage "restore", in caches.
        Raises `StoreError` when the store cannot be written.
        """
        if not missing or len(self.store.backend.tiers) == 1:
            return list(missing)
        lost: list[CacheKey] = []
        for number, key in enumerate(missing, start=1):
            if not self.store.restore(self.key(key)):
                lost.append(key)
            progress("restore", number, len(missing))
        return lost

    def key(self, key: CacheKey) -> ChunkKey:
        """Where the store keeps this cache."""
        return self.encoder(key.kind).identity.key(key.chunk)

    def wanted(self, layout: PromptLayout) -> list[CacheKey]:
        """Every cache that the places of a prompt should have, each once."""
        return self.variants([chunk for chunk in layout.stored if chunk is not None])

    def bring(self, layout: PromptLayout) -> None:
        """Bring the caches that a prompt will read to this machine. Raises `StoreError`."""
        tables = self.tables()
        chunks = [chunk for chunk in layout.stored if chunk is not None]
        keys = [CacheKey(chunk, CacheKind.ISOLATED) for chunk in chunks[:1]]
        keys += [self.best(chunk, contextual=self.contextual is not None) for chunk in chunks]
        distant = [self.key(key) for key in dict.fromkeys(keys) if key.chunk not in tables[key.kind]]
        self.store.backend.bring([cache_name(key) for key in distant])

    def compute(self, variants: Sequence[CacheKey], progress: Progress = no_progress) -> int:
        """Compute these caches and store each at once; the number of their tokens.

        progress: of the stage "encode", in tokens.
        Raises `StoreError` when the store cannot be written.
        """
        tokens = 0
        total = sum(len(key.chunk) for key in variants)
        progress("encode", 0, total)
        for key, cache in self.computed(variants):
            self.keep(key, cache)
            tokens += len(key.chunk)
            progress("encode", tokens, total)
        return total

    def computed(self, variants: Sequence[CacheKey]) -> Iterator[tuple[CacheKey, ChunkCache]]:
        """Yield each cache once computed. Nothing is stored."""
        for kind in CacheKind:
            keys = [key for key in variants if key.kind is kind]
            for index, cache in self.encoder(kind).encode([key.chunk for key in keys]):
                yield keys[index], cache

    def keep(self, key: CacheKey, cache: ChunkCache) -> None:
        """Store a cache in the form that the store's codec asks for. Raises `StoreError`."""
        if self.store.codec.unrotated and not cache.unrotated:
            cache = without_positions(cache, self.decoder.rotations)
        address = self.key(key)
        self.store.put(address, cache)
        if address.namespace not in self._described:
            self.store.describe_new(address.namespace, self.words(key.kind))
            self._described.add(address.namespace)

    def words(self, kind: CacheKind) -> dict[str, str]:
        """A description of these caches, for the store."""
        words = {
            "model": self.decoder.name,
            "weights": self.isolated.identity.model[:16],
            "dtype": self.decoder.kept_as,
            "prefix_tokens": str(len(self.prefix)),
        }
        if kind is CacheKind.CONTEXTUAL:
            words["contextual"] = "surrogate context"
        return words

    def keys(self, chunks: Sequence[Tokens]) -> set[ChunkKey]:
        """Where the store keeps the caches of these chunks."""
        return set(map(self.key, self.variants(chunks)))

    def entry_bytes(self, key: CacheKey) -> int:
        """Bytes of its entry, which depend on shapes alone."""
        tokens = len(key.chunk)
        start = self.start(key)
        codec = self.store.codec
        size = (tokens, start, codec.name)
        if size not in self._entry_bytes:
            empty = self._empty(tokens, start, unrotated=codec.unrotated)
            entry = encode_entry(self.key(key), empty, codec, Seal(None))
            self._entry_bytes[size] = entry.nbytes
        return self._entry_bytes[size]

    def _empty(self, tokens: int, start: int, *, unrotated: bool) -> ChunkCache:
        """A cache of so many tokens, all zeros."""
        layers = self.decoder.rotations
        recurrent = self.decoder.recurrent
        dtype = getattr(torch, self.decoder.kept_as)
        kv_dtype = torch.float32 if unrotated else dtype  # taking positions out makes float32

        def zeros(heads: int, dim: int) -> Tensor:
            return torch.zeros(heads, tokens, dim, dtype=kv_dtype)

        keys = tuple(zeros(*layer.key_shape) for layer in layers)
        values = tuple(zeros(*layer.value_shape) for layer in layers)
        lead = 0
        operators: tuple[tuple[Tensor, ...], ...] = ()
        if recurrent:
            lead = lead_of(tokens)
            empty: list[tuple[Tensor, ...]] = [()] * len(layers)
            if lead < tokens:
                for index, state in recurrent.items():
                    empty[index] = state.empty_operator(dtype)
            operators = tuple(empty)
        return ChunkCache(keys, values, start, unrotated=unrotated, lead=lead, operators=operators)

    def most_bytes(self, key: CacheKey) -> int:
        """Most bytes of its entry: 8-byte values, whole groups of tokens, the longest header."""
        values = sum(layer.width for layer in self.decoder.rotations)
        operators = sum(layer.operator_bytes for layer in self.decoder.recurrent.values())
        return (len(key.chunk) + _LARGEST_GROUP) * values * _LARGEST_VALUE + operators + LONGEST

    def tables(self) -> Mapping[CacheKind, Mapping[Tokens, ReadyChunk]]:
        """The chunks that are ready in memory, of each kind of cache by their tokens."""
        if self.store.pool is None:
            return _NO_TABLES
        tables = {}
        for kind in CacheKind:
            namespace = self.encoder(kind).identity.namespace
            tables[kind] = self.store.pool.table(self.store, namespace, self.generation)
        return tables

    def best(self, chunk: Tokens, *, contextual: bool) -> CacheKey:
        """The cache that serves a chunk behind other text."""
        in_context = contextual and self._has_contextual(chunk)
        return CacheKey(chunk, CacheKind.CONTEXTUAL if in_context else CacheKind.ISOLATED)


_NO_TABLES: Mapping[CacheKind, Mapping[Tokens, ReadyChunk]] = {kind: {} for kind in CacheKind}


def _parsed(content: bytes, vocabulary: int) -> tuple[Tokens, ...]:
    try:
        chunks = tuple(tuple(chunk) for chunk in json.loads(content)["chunks"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is no list of chunks") from None
    tokens = list(chain(*chunks))
    are_known = all(type(token) is int and 0 <= token < vocabulary for token in tokens)
    if not (all(chunks) and are_known):
        raise ValueError(f"it has tokens that a vocabulary of {vocabulary} does not")
    return chunks
