"""The chunk caches behind one prefix: find, load and compute them, and choose the surrogate context.

A chunk can have two caches. Its *isolated* cache is computed right behind the prefix; it is exact for the first chunk of a
prompt. Its *contextual* cache is computed behind the prefix and a surrogate context: a few chunks of the corpus, the same for
all. Most of what a chunk's KV gains from earlier text does not depend on that text (docs/study.md), so the contextual cache is
closer to full recompute in every other place.

The surrogate context is chosen once, stored as a small artifact, and verified before use. `with_surrogate` to
`without_surrogate` change it while no other process writes to the store, and return the library as the store has it afterwards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.encode import ChunkEncoder, beyond, without_positions
from blend.config import BATCH_TOKENS
from blend.errors import EntryDamagedError, PromptError
from blend.store.base import ChunkStore
from blend.store.format import LONGEST
from blend.store.reader import ChunkReader
from blend.types import ChunkCache, ChunkKey, Progress, no_progress

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder


class Expected(NamedTuple):
    """What an entry must be: its key, tokens, position of the first token, and most bytes, which a header could understate."""

    key: ChunkKey
    tokens: int
    start: int
    most_bytes: int


class OpenChunks(NamedTuple):
    """A reader for each chunk, or None for a miss; a line for every entry that was refused."""

    readers: tuple[ChunkReader | None, ...]
    problems: tuple[str, ...]


def open_chunks(
    store: ChunkStore, entries: Sequence[Expected], layers: int, refused: Mapping[ChunkKey, str] | None = None
) -> OpenChunks:
    """Open these entries. A damaged or unexpected one becomes a miss and a line in `problems`.

    Layers are verified when they are read. layers: of the decoder. refused: entries known to be damaged, with the line that
    says so. Raises `StoreError` when the store cannot be read: an outage is not a miss.
    """
    known, unrefused = refused or {}, [one for one in entries if one.key not in (refused or {})]
    found = iter(zip(unrefused, store.open_many([one.key for one in unrefused]), strict=True))
    readers: list[ChunkReader | None] = []
    problems: dict[ChunkKey, str] = {}
    for one in entries:
        reader = EntryDamagedError(known[one.key]) if one.key in known else _checked(*next(found), layers)
        if isinstance(reader, EntryDamagedError):
            problems[one.key] = str(reader)
        readers.append(None if isinstance(reader, EntryDamagedError) else reader)
    return OpenChunks(tuple(readers), tuple(problems.values()))


def _checked(
    expected: Expected, reader: ChunkReader | EntryDamagedError | None, layers: int
) -> ChunkReader | EntryDamagedError | None:
    """The reader; an error if it has another position or another number of tokens, layers or bytes."""
    if reader is None or isinstance(reader, EntryDamagedError):
        return reader
    found, needed = (reader.tokens, reader.layers, reader.start), (expected.tokens, layers, expected.start)
    if found == needed and reader.stored_bytes <= expected.most_bytes:
        return reader
    reader.close()
    if found == needed:
        return EntryDamagedError(
            f"store entry {expected.key.digest[:16]} must be computed again: it takes {reader.stored_bytes:,} bytes, one of "
            f"{expected.tokens} tokens at most {expected.most_bytes:,}"
        )
    return EntryDamagedError(
        f"store entry {expected.key.digest[:16]} must be computed again: it holds {found[0]} tokens in {found[1]} layers from "
        f"position {found[2]}, not {needed}"
    )


Tokens = tuple[int, ...]


class Variant(NamedTuple):
    """One cache of a chunk: isolated or contextual."""

    chunk: Tokens
    contextual: bool


class OpenLibrary(NamedTuple):
    """A store's entries for the chunks of a prompt; only headers are read so far.

    library: where they came from. used: the cache used for each chunk. readers: its open entry, or None. problems: a line for
    every refused entry. missing: caches that should have been used, each once.
    """

    library: ChunkLibrary
    used: tuple[Variant, ...]
    readers: tuple[ChunkReader | None, ...]
    problems: tuple[str, ...]
    missing: tuple[Variant, ...]

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which chunks are in the store."""
        return tuple(reader is not None for reader in self.readers)

    @property
    def pairs(self) -> list[tuple[Variant, bool]]:
        """The cache used for each chunk, and whether it is there."""
        return list(zip(self.used, self.hits, strict=True))

    @property
    def first_exact(self) -> bool:
        """Whether the first chunk is there as its isolated cache, which is exact up to its codec."""
        return any((hit and not one.contextual) for one, hit in self.pairs[:1])

    @property
    def first_lossless(self) -> bool:
        """Whether the first chunk's KV, if present, lost no bit in the store."""
        return all(reader is None or reader.lossless(self.library.decoder.dtype) for reader in self.readers[:1])

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of all chunks present, each once, in the decoder's dtype."""
        decoder = self.library.decoder
        rows = sum(len(one.chunk) for one, hit in dict(self.pairs).items() if hit)
        return rows * sum(layer.width for layer in decoder.rotations) * decoder.dtype.itemsize

    def damaged(self) -> dict[ChunkKey, str]:
        """Read everything; a line for every damaged entry, by key."""
        found: dict[ChunkKey, str] = {}
        for reader, one in zip(self.readers, self.used, strict=True):
            try:
                if reader is not None:
                    read_cache(reader, self.library.decoder)
            except EntryDamagedError as error:
                found[self.library.key(one)] = str(error)
        return found

    def close(self) -> None:
        """Close all entries."""
        for reader in self.readers:
            if reader is not None:
                reader.close()


def read_cache(reader: ChunkReader, decoder: RowDecoder) -> ChunkCache:
    """All layers of an entry, in the decoder's dtype. Raises `EntryDamagedError`."""
    pairs = [_read_layer(reader, index, decoder) for index in range(reader.layers)]
    return ChunkCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), reader.start, reader.unrotated)


def _read_layer(reader: ChunkReader, index: int, decoder: RowDecoder) -> tuple[torch.Tensor, torch.Tensor]:
    shape = decoder.rotations[index]
    keys, values = (
        torch.empty((heads, reader.tokens, width), dtype=decoder.dtype)
        for heads, width in (shape.key_shape, shape.value_shape)
    )
    reader.read_into(index, keys, values)
    return keys, values


_LARGEST_VALUE, _LARGEST_GROUP = 8, 64  # bytes; tokens that a codec keeps together


class ChunkLibrary:
    """The caches of chunks behind one prefix, with the surrogate context that the store holds at this moment.

    Args:
        decoder: computes caches.
        store: keeps them.
        prefix: token ids in front of every chunk.
        batch_tokens: see `ChunkEncoder`.
        corpus: whose surrogate context it is (`blend.corpora`).
        before: the library that this one replaces; what did not change is shared.

    Attributes:
        isolated: the encoder of isolated caches.
        contextual: the encoder of contextual caches; None without a surrogate context.
        surrogate: the chunks of the surrogate context.
        decided: whether the store holds a choice of it, even of none.
        problems: a line for a surrogate context that must not be used.
        generation: the store's, when all of this was read.

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
    ) -> None:
        self.decoder, self.store, self.prefix, self.corpus = decoder, store, prefix, corpus
        self._batch_tokens = batch_tokens
        self._described: set[str] = before._described if before else set()
        self.isolated: ChunkEncoder = before.isolated if before else self._encoder(prefix)
        self.generation = store.generation  # asked first: what is written while the rest is read shows as a change
        found = read_surrogate(store, self.isolated.identity.surrogate_name, decoder.vocabulary)
        self.decided, self.surrogate, self.problems = found
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
        return self if self.store.generation == self.generation else self.reread()

    def reread(self) -> ChunkLibrary:
        """A new library, as the store is now; inside `ChunkStore.writing` it stays current."""
        return ChunkLibrary(self.decoder, self.store, self.prefix, self._batch_tokens, corpus=self.corpus, before=self)

    def encoder(self, *, contextual: bool) -> ChunkEncoder:
        """The encoder of isolated or contextual caches; the former if there is no surrogate context."""
        return (self.contextual if contextual else None) or self.isolated

    def variants(self, chunks: Sequence[Tokens], *, contextual: bool = True) -> list[Variant]:
        """Every cache that these chunks should have, each once: the isolated ones, then the contextual ones if wanted."""
        distinct = list(dict.fromkeys(chunks))
        behind = [chunk for chunk in distinct if contextual and self._has_contextual(chunk)]
        return [
            *(Variant(chunk, contextual=False) for chunk in distinct),
            *(Variant(c, contextual=True) for c in behind),
        ]

    def _has_contextual(self, chunk: Tokens) -> bool:
        """Whether a chunk has a contextual cache: not those of the surrogate context, nor those too long behind it."""
        if self.contextual is None or chunk in self.surrogate:
            return False
        context = self.decoder.context_length
        return context is None or len(self.contextual.prefix_tokens) + len(chunk) <= context

    def missing(self, chunks: Sequence[Tokens]) -> list[Variant]:
        """The caches of these chunks that the store does not hold."""
        return self.missing_of(self.variants(chunks))

    def missing_of(self, variants: Sequence[Variant]) -> list[Variant]:
        """Which of these caches the store does not hold."""
        held = self.store.held(map(self.key, variants))
        return [one for one in variants if self.key(one) not in held]

    def key(self, variant: Variant) -> ChunkKey:
        """Where the store keeps this cache."""
        return self.encoder(contextual=variant.contextual).identity.key(variant.chunk)

    def compute(self, variants: Sequence[Variant], progress: Progress = no_progress) -> int:
        """Compute these caches and store each at once; the number of their tokens.

        progress: of the stage "encode", in tokens.
        Raises `StoreError` when the store cannot be written.
        """
        total = sum(len(one.chunk) for one in variants)
        progress("encode", 0, total)
        for _ in self._computed(variants, on_tokens=lambda tokens: progress("encode", tokens, total)):
            pass
        progress("encode", total, total)
        return total

    def _computed(
        self,
        variants: Sequence[Variant],
        kept: Container[Variant] | None = None,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[tuple[Variant, ChunkCache]]:
        """Yield each cache once computed, and stored if it is one of `kept`; None stores all."""
        before = 0
        for contextual in (False, True):
            encoder = self.encoder(contextual=contextual)
            mine = [one for one in variants if one.contextual == contextual]
            for index, cache in encoder.encode([one.chunk for one in mine], beyond(before, on_tokens)):
                if kept is None or mine[index] in kept:
                    self.keep(mine[index], cache)
                yield mine[index], cache
            before += sum(len(one.chunk) for one in mine)

    def keep(self, one: Variant, cache: ChunkCache) -> None:
        """Store a cache in the form that the store's codec asks for. Raises `StoreError`."""
        rotate_back, key = self.store.codec.unrotated and not cache.unrotated, self.key(one)
        self.store.put(key, without_positions(cache, self.decoder.rotations) if rotate_back else cache)
        if key.namespace not in self._described:
            self.store.describe_new(key.namespace, self.words(contextual=one.contextual))
            self._described.add(key.namespace)

    def words(self, *, contextual: bool) -> dict[str, str]:
        """A description of these caches, for the store."""
        dtype = str(self.decoder.dtype).removeprefix("torch.")
        words = {"model": self.decoder.name, "dtype": dtype, "prefix_tokens": str(len(self.prefix))}
        return {**words, "contextual": "surrogate context"} if contextual else words

    def keys(self, chunks: Sequence[Tokens]) -> set[ChunkKey]:
        """Where the store keeps the caches of these chunks."""
        return set(map(self.key, self.variants(chunks)))

    def open(
        self,
        chunks: Sequence[Tokens],
        *,
        contextual: bool = True,
        isolated_first: bool = True,
        refused: Mapping[ChunkKey, str] | None = None,
    ) -> OpenLibrary:
        """The best stored cache for every chunk of a prompt, in order: isolated for the first, contextual for the others.

        Without `isolated_first` the first chunk's is contextual too. Where a contextual one is missing or damaged, the isolated
        one takes its place. contextual: whether to use contextual caches. refused: see
        `open_chunks`. Close what is returned; layers are verified when they are read.
        """
        best = self._best(chunks, contextual=contextual, isolated_first=isolated_first)
        readers, problems = self._open(best, refused)
        missing = dict.fromkeys(one for one, reader in zip(best, readers, strict=True) if reader is None)
        places = [place for place, one in enumerate(best) if one in missing and one.contextual]
        spare, more = self._open([Variant(best[place].chunk, contextual=False) for place in places], refused)
        for place, reader in zip(places, spare, strict=True):
            readers[place] = reader
        used = [Variant(one.chunk, contextual=False) if one in missing else one for one in best]
        unknown = [one.chunk for one, reader in zip(used, readers, strict=True) if reader is None]
        missing |= dict.fromkeys(one for one in self.variants(unknown) if contextual or not one.contextual)
        lines = dict.fromkeys((*problems, *more))
        return OpenLibrary(self, tuple(used), tuple(readers), tuple(lines), tuple(missing))

    def open_sound(
        self, chunks: Sequence[Tokens], *, contextual: bool = True, isolated_first: bool = True
    ) -> OpenLibrary:
        """`open`, with every layer read and verified. It does not count as a use of the entries."""
        refused: dict[ChunkKey, str] = {}
        while True:  # what takes the place of a damaged entry may be damaged itself
            opened = self.open(chunks, contextual=contextual, isolated_first=isolated_first, refused=refused)
            for reader in filter(None, opened.readers):
                reader.counts = False
            found = opened.damaged()
            if not found:
                return opened
            opened.close()
            refused |= found

    def _best(self, chunks: Sequence[Tokens], *, contextual: bool, isolated_first: bool = True) -> list[Variant]:
        return [
            Variant(chunk, contextual and not (isolated_first and place == 0) and self._has_contextual(chunk))
            for place, chunk in enumerate(chunks)
        ]

    def _open(
        self, variants: Sequence[Variant], refused: Mapping[ChunkKey, str] | None
    ) -> tuple[list[ChunkReader | None], tuple[str, ...]]:
        expected = [self._expected(one) for one in variants]
        found = open_chunks(self.store, expected, len(self.decoder.layers), refused)
        return list(found.readers), found.problems

    def _expected(self, variant: Variant) -> Expected:
        start = len(self.encoder(contextual=variant.contextual).prefix_tokens)
        return Expected(self.key(variant), len(variant.chunk), start, self._most_bytes(variant))

    def _most_bytes(self, variant: Variant) -> int:
        """Most bytes of its entry: 8-byte values, whole groups of tokens, the longest header."""
        values = sum(layer.width for layer in self.decoder.rotations)
        return (len(variant.chunk) + _LARGEST_GROUP) * values * _LARGEST_VALUE + LONGEST

    def read_ahead(self, chunks: Sequence[Tokens]) -> None:
        """Announce that the caches of these chunks will be read soon; see `ChunkStore.prefetch`."""
        variants = self.variants(chunks)
        self.store.prefetch(map(self.key, variants), max(map(self._most_bytes, variants), default=0))

    def caches(self, chunks: Sequence[Tokens], *, contextual: bool) -> list[ChunkCache]:
        """The best cache for every chunk of a prompt; missing ones are computed, and stored if they belong there."""
        best, opened = self._best(chunks, contextual=contextual), self.open_sound(chunks, contextual=contextual)
        try:
            held = [None if reader is None else read_cache(reader, self.decoder) for reader in opened.readers]
        finally:
            opened.close()
        computed = dict(self._computed(opened.missing, self.variants(chunks)))
        return [cache for one, mine in zip(best, held, strict=True) if (cache := computed.get(one, mine)) is not None]


LARGEST_SHARE = 8  # one chunk in so many may be in the surrogate context: those have no contextual cache


KeysInUse = Callable[[], "Collection[ChunkKey]"]
"""Says which caches others use and must not be removed; called only before a removal."""


def no_keys() -> Collection[ChunkKey]:
    """No cache is used elsewhere."""
    return ()


def with_surrogate(library: ChunkLibrary, chunks: Sequence[Tokens], tokens: int) -> ChunkLibrary:
    """Choose some of these chunks, at most `tokens` tokens, as the surrogate context, unless there is one.

    The choice stays, because contextual caches are useful only behind it. Raises `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        if now.surrogate or not (chosen := choose(_fitting(now, chunks, tokens), tokens, len(chunks))):
            return now
        return _decide(now, chosen)


def with_given_surrogate(library: ChunkLibrary, tokens: Tokens, keep: KeysInUse = no_keys) -> ChunkLibrary:
    """Take these tokens as the surrogate context, and remove what was made behind another, except `keep`.

    Contextual caches have read the surrogate context, so it must be text that every user may read. Raises `PromptError` if it
    is empty or too long for the model, `StoreError` when the store cannot be written.
    """
    if not tokens:
        raise PromptError("the surrogate text is empty; give a paragraph or more")
    library.decoder.check_length(len(library.prefix) + len(tokens) + 1)
    with library.store.writing():
        now = library.reread()
        if now.surrogate == (tokens,):
            return now
        _forget_contextual(now, keep)
        return _decide(now, (tokens,))


def without_surrogate(library: ChunkLibrary, keep: KeysInUse = no_keys) -> ChunkLibrary:
    """Have no surrogate context, and remove what was made behind one, except `keep`.

    Raises `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        _forget_contextual(now, keep)
        return _decide(now, ())


def _forget_contextual(library: ChunkLibrary, keep: KeysInUse) -> None:
    """Remove what was made behind the surrogate context, and its description if no other corpus uses it."""
    if library.contextual is None:
        return
    store, namespace = library.store, library.contextual.identity.namespace
    store.prune(keep(), namespace)
    store.delete_artifact(library.contextual.identity.correction_name)
    if not any(store.keys(namespace)):
        store.undescribe(namespace)


def _decide(library: ChunkLibrary, chosen: tuple[Tokens, ...]) -> ChunkLibrary:
    write_surrogate(library.store, library.isolated.identity.surrogate_name, chosen)
    return library.reread()


def _fitting(library: ChunkLibrary, chunks: Sequence[Tokens], tokens: int) -> list[Tokens]:
    """Distinct chunks that leave room for the longest chunk in the model's context."""
    longest, context = max(map(len, chunks), default=0), library.decoder.context_length
    room = tokens if context is None else min(tokens, context - len(library.prefix) - longest)
    return [chunk for chunk in dict.fromkeys(chunks) if 0 < len(chunk) <= room]


def choose(chunks: Sequence[Tokens], tokens: int, corpus: int) -> tuple[Tokens, ...]:
    """Chunks in random order, the same for the same ones, as many as `tokens` and the size of the corpus allow."""
    chosen: list[Tokens] = []
    for chunk in random.Random(0).sample(chunks, len(chunks)):
        if sum(map(len, chosen)) + len(chunk) <= tokens and len(chosen) < corpus // LARGEST_SHARE:
            chosen.append(chunk)
    return tuple(chosen)


class StoredSurrogate(NamedTuple):
    """decided: whether the store holds a choice, of none too. chunks: their token ids. problems: why one is not used."""

    decided: bool
    chunks: tuple[Tokens, ...] = ()
    problems: tuple[str, ...] = ()


def read_surrogate(store: ChunkStore, name: str, vocabulary: int) -> StoredSurrogate:
    """Read the surrogate context of this name; a damaged one, or ids outside the vocabulary, count as absent."""
    try:
        content = store.read_artifact(name)
        if content is None:
            return StoredSurrogate(decided=False)
        return StoredSurrogate(True, _parsed(content, vocabulary))
    except (EntryDamagedError, ValueError) as error:
        return StoredSurrogate(False, (), (f"the surrogate context cannot be used: {error}",))


def write_surrogate(store: ChunkStore, name: str, chunks: Sequence[Tokens]) -> None:
    """Store this choice under this name. Raises `StoreError` when the store cannot be written."""
    store.write_artifact(name, json.dumps({"chunks": chunks}).encode())


def _parsed(content: bytes, vocabulary: int) -> tuple[Tokens, ...]:
    try:
        chunks = tuple(tuple(chunk) for chunk in json.loads(content)["chunks"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is no list of chunks") from None
    if not all(chunk and all(type(t) is int and 0 <= t < vocabulary for t in chunk) for chunk in chunks):
        raise ValueError(f"it has tokens that a vocabulary of {vocabulary} does not")
    return chunks
