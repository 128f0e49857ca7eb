"""The chunk caches behind one prefix: find, load and compute them, and choose the surrogate context.

A chunk can have two caches. Its *isolated* cache is computed right behind the prefix; it is exact for the first chunk of a
prompt. Its *contextual* cache is computed behind the prefix and a surrogate context: a few chunks of the corpus, the same for
all. Most of what a chunk's KV gains from earlier text does not depend on that text (docs/study.md), so the contextual cache is
closer to full recompute in every other place.

Text that requests bring has one cache instead, taken *in place* out of the prompt that brought it: nothing more is computed for
it, and it is at least as close as a corrected contextual cache (docs/study.md), because it has read a real prompt.

The surrogate context is chosen once, stored as a small artifact, and verified before use. `with_surrogate` to
`without_surrogate` change it while no other process writes to the store, and return the library as the store has it afterwards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.encode import ChunkEncoder, beyond, without_positions
from blend.config import BATCH_TOKENS
from blend.errors import EntryDamagedError, PromptError
from blend.model.precision import dtype_name
from blend.store.base import ChunkStore
from blend.store.format import LONGEST
from blend.store.reader import ChunkReader
from blend.types import ChunkCache, ChunkKey, Progress, PromptLayout, no_progress

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder


Tokens = tuple[int, ...]
NEAR = 64  # tokens more or fewer before the first chunk than its caches have; chosen, not measured


class Variant(NamedTuple):
    """One cache of a chunk: isolated, contextual, or taken in place out of a prompt."""

    chunk: Tokens
    contextual: bool
    in_place: bool = False


class OpenLibrary(NamedTuple):
    """A store's entries for the places of a prompt; only headers are read so far.

    Attributes:
        decoder: the decoder that they are for.
        used: the cache used at each place, None for ordinary text.
        readers: its open entry, or None.
        problems: a line for every refused entry.
        missing: caches that should have been used, each once.
        near: whether the first stored chunk stands right behind a prefix as long as its cache's.
        exact: whether its isolated cache is exact there.

    """

    decoder: RowDecoder
    used: tuple[Variant | None, ...]
    readers: tuple[ChunkReader | None, ...]
    problems: tuple[str, ...]
    missing: tuple[Variant, ...]
    near: bool
    exact: bool

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which places come out of the store."""
        return tuple(reader is not None for reader in self.readers)

    @property
    def first(self) -> int | None:
        """The first place that has a stored cache, or should have."""
        return next((place for place, one in enumerate(self.used) if one is not None), None)

    @property
    def first_exact(self) -> bool:
        """Whether the first chunk is there as its isolated cache, which is exact up to its codec."""
        first = self.used[self.first] if self.first is not None and self.hits[self.first] else None
        return self.exact and first is not None and not first.contextual

    @property
    def first_lossless(self) -> bool:
        """Whether the first chunk's KV, if present, lost no bit in the store."""
        reader = None if self.first is None else self.readers[self.first]
        same = self.decoder.kept_as == dtype_name(self.decoder.dtype)
        return reader is None or (same and reader.lossless(self.decoder.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the KV and operators of all chunks present, each once, in the decoder's dtype."""
        found = {one for one, hit in zip(self.used, self.hits, strict=True) if one and hit}
        width = sum(layer.width for layer in self.decoder.rotations)
        operators = sum(layer.operator_bytes for layer in self.decoder.recurrent.values())
        return sum(len(one.chunk) * width * self.decoder.dtype.itemsize + operators for one in found)

    def close(self) -> None:
        """Close all entries."""
        for reader in filter(None, self.readers):
            reader.close()


def read_cache(reader: ChunkReader, decoder: RowDecoder) -> ChunkCache:
    """All layers of an entry, in the decoder's dtype. Raises `EntryDamagedError`."""
    pairs = []
    for index, layer in enumerate(decoder.rotations):
        shapes = (layer.key_shape, layer.value_shape)
        pairs.append([torch.empty((heads, reader.tokens, width), dtype=decoder.dtype) for heads, width in shapes])
        reader.read_into(index, *pairs[-1])
    operators = tuple(map(reader.operator, range(reader.layers))) if decoder.recurrent else ()
    keys, values = tuple(k for k, _ in pairs), tuple(v for _, v in pairs)
    return ChunkCache(keys, values, reader.start, reader.unrotated, reader.lead, operators)


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
        self._in_place = replace(decoder.identity(()), in_place=True)
        self._described: set[str] = before._described if before else set()
        self.isolated: ChunkEncoder = isolated or (before.isolated if before else self._encoder(prefix))
        # Read first: a write during the other reads then shows as a change.
        self.generation = store.generation if generation is None else generation
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
        if variant.in_place:
            return self._in_place.key(variant.chunk)
        return self.encoder(contextual=variant.contextual).identity.key(variant.chunk)

    def wanted(self, layout: PromptLayout) -> list[Variant]:
        """Every cache that the places of a prompt should have, each once."""
        stored = [(place, chunk) for place, chunk in enumerate(layout.stored) if chunk is not None]
        brought = dict.fromkeys(chunk for place, chunk in stored if place in layout.learned)
        known = self.variants([chunk for place, chunk in stored if place not in layout.learned])
        return [*known, *(Variant(chunk, contextual=False, in_place=True) for chunk in brought)]

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
        rotate_back, key = (self.store.codec.unrotated or one.in_place) and not cache.unrotated, self.key(one)
        cache = without_positions(cache, self.decoder.rotations) if rotate_back else cache
        self.store.put(key, self._in_place_form(cache) if one.in_place else cache)
        if key.namespace not in self._described:
            self.store.describe_new(key.namespace, self._words(one))
            self._described.add(key.namespace)

    def _in_place_form(self, cache: ChunkCache) -> ChunkCache:
        """A cache without positions as the store keeps it: in the decoder's dtype, unless a codec of few bits follows."""
        dtype = torch.float32 if self.store.codec.unrotated else self.decoder.dtype
        keys, values = (tuple(part.to(dtype) for part in kind) for kind in (cache.keys, cache.values))
        return ChunkCache(keys, values, start=0, unrotated=True)

    def _words(self, one: Variant) -> dict[str, str]:
        if one.in_place:
            return {"model": self.decoder.name, "dtype": self.decoder.kept_as, "contextual": "prompts"}
        return self.words(contextual=one.contextual)

    def words(self, *, contextual: bool) -> dict[str, str]:
        """A description of these caches, for the store."""
        words = {"model": self.decoder.name, "dtype": self.decoder.kept_as, "prefix_tokens": str(len(self.prefix))}
        return {**words, "contextual": "surrogate context"} if contextual else words

    def keys(self, chunks: Sequence[Tokens]) -> set[ChunkKey]:
        """Where the store keeps the caches of these chunks."""
        return set(map(self.key, self.variants(chunks)))

    def open(self, layout: PromptLayout, *, contextual: bool = True, sound: bool = False) -> OpenLibrary:
        """Open the best stored cache for every place of a prompt: the isolated one for the first chunk, others contextual.

        A first chunk far from where its isolated cache is exact gets a contextual one too. Where a contextual cache is missing
        or damaged, the isolated one takes its place. Places of `layout.learned` have the cache taken in place, or none. Damaged
        and unexpected entries are misses. Layers are verified when they are read, or now if `sound`. Close what is returned.
        Raises `StoreError` when the store cannot be read: an outage is no miss.
        """
        refused: dict[ChunkKey, str] = {}
        while True:  # the replacement of a damaged entry may be damaged itself
            opened = self._open_all(layout, contextual, refused)
            found = self._damaged(opened) if sound else {}
            if not found:
                return opened
            opened.close()
            refused |= found

    def _open_all(self, layout: PromptLayout, contextual: bool, refused: Mapping[ChunkKey, str]) -> OpenLibrary:
        starts = [
            span.start for span, chunk in zip(layout.chunk_spans, layout.stored, strict=True) if chunk is not None
        ]
        near = bool(starts) and abs(starts[0] - len(layout.kept_behind)) <= NEAR
        used: list[Variant | None] = [
            None if chunk is None else self._best(chunk, contextual, in_place=place in layout.learned)
            for place, chunk in enumerate(layout.stored)
        ]
        first = next((place for place, one in enumerate(used) if one), None)
        if first is not None and (near or layout.exact_first):
            used[first] = used[first]._replace(contextual=False)  # type: ignore[union-attr]
        readers, problems = self._open_these(used, refused)
        # Place by place: of one cache at two places the second may be evicted between the two.
        lacking = [one if reader is None else None for one, reader in zip(used, readers, strict=True)]
        missing = dict.fromkeys(one for one in lacking if one and not one.in_place)
        spare = [one._replace(contextual=False) if one and one.contextual else None for one in lacking]
        others, more = self._open_these(spare, refused)
        readers = [reader or other for reader, other in zip(readers, others, strict=True)]
        used = [other or one for other, one in zip(spare, used, strict=True)]
        lost = [one for one, reader in zip(used, readers, strict=True) if one and reader is None]
        unknown = [one.chunk for one in lost if not one.in_place]
        missing |= dict.fromkeys(one for one in self.variants(unknown) if contextual or not one.contextual)
        lines = tuple(dict.fromkeys((*problems, *more)))
        return OpenLibrary(self.decoder, tuple(used), tuple(readers), lines, tuple(missing), near, layout.exact_first)

    def _damaged(self, opened: OpenLibrary) -> dict[ChunkKey, str]:
        """Read everything, which does not count as a use; a line for every damaged entry, by key."""
        found: dict[ChunkKey, str] = {}
        for reader, one in zip(opened.readers, opened.used, strict=True):
            if reader is None or one is None:
                continue
            reader.counts = False
            try:
                read_cache(reader, self.decoder)
            except EntryDamagedError as error:
                found[self.key(one)] = str(error)
        return found

    def _best(self, chunk: Tokens, contextual: bool, *, in_place: bool = False) -> Variant:
        return Variant(chunk, contextual and not in_place and self._has_contextual(chunk), in_place)

    def _open_these(
        self, variants: Sequence[Variant | None], refused: Mapping[ChunkKey, str]
    ) -> tuple[list[ChunkReader | None], list[str]]:
        """A reader for each cache, and a line for every entry that is refused: known to be damaged, or unfitting."""
        keys = [one and self.key(one) for one in variants]
        found = iter(self.store.open_many([key for key in keys if key is not None and key not in refused]))
        readers: list[ChunkReader | None] = []
        problems: list[str] = []
        for one, key in zip(variants, keys, strict=True):
            reader = None
            if one is not None and key is not None:
                reader = EntryDamagedError(refused[key]) if key in refused else self._checked(one, next(found))
            if isinstance(reader, EntryDamagedError):
                problems.append(str(reader))
                reader = None
            readers.append(reader)
        return readers, problems

    def _checked(
        self, one: Variant, reader: ChunkReader | EntryDamagedError | None
    ) -> ChunkReader | EntryDamagedError | None:
        """The reader; an error if it has another position or another number of tokens, layers or bytes."""
        if reader is None or isinstance(reader, EntryDamagedError):
            return reader
        before = () if one.in_place else self.encoder(contextual=one.contextual).prefix_tokens
        start, most = len(before), self._most_bytes(one)
        found, needed = (
            (reader.tokens, reader.layers, reader.start),
            (len(one.chunk), len(self.decoder.rotations), start),
        )
        if found == needed and reader.stored_bytes <= most:
            return reader
        reader.close()
        if found == needed:
            why = f"it takes {reader.stored_bytes:,} bytes, one of {len(one.chunk)} tokens at most {most:,}"
        else:
            why = f"it holds {found[0]} tokens in {found[1]} layers from position {found[2]}, not {needed}"
        return EntryDamagedError(f"store entry {self.key(one).digest[:16]} must be computed again: {why}")

    def _most_bytes(self, variant: Variant) -> int:
        """Most bytes of its entry: 8-byte values, whole groups of tokens, the longest header."""
        values = sum(layer.width for layer in self.decoder.rotations)
        operators = sum(layer.operator_bytes for layer in self.decoder.recurrent.values())
        return (len(variant.chunk) + _LARGEST_GROUP) * values * _LARGEST_VALUE + operators + LONGEST

    def read_ahead(self, layout: PromptLayout) -> None:
        """Announce that the caches of a prompt will be read soon; see `ChunkStore.prefetch`."""
        variants = self.wanted(layout)
        self.store.prefetch(map(self.key, variants), max(map(self._most_bytes, variants), default=0))

    def caches(self, chunks: Sequence[Tokens], *, contextual: bool) -> list[ChunkCache]:
        """The best cache for every chunk of a prompt; missing ones are computed, and stored if they belong there."""
        opened = self.open(PromptLayout(self.prefix, tuple(chunks), ()), contextual=contextual, sound=True)
        try:
            held = [None if reader is None else read_cache(reader, self.decoder) for reader in opened.readers]
        finally:
            opened.close()
        computed = dict(self._computed(opened.missing, self.variants(chunks)))
        best = [self._best(chunk, contextual and place > 0) for place, chunk in enumerate(chunks)]
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
    """Take these tokens as the surrogate context, and remove caches made behind another, except `keep`.

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
    """Have no surrogate context, and remove caches made behind one, except `keep`.

    Raises `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        _forget_contextual(now, keep)
        return _decide(now, ())


def _forget_contextual(library: ChunkLibrary, keep: KeysInUse) -> None:
    """Remove caches made behind the surrogate context, and its description if no other corpus uses it."""
    if library.contextual is None:
        return
    store, namespace = library.store, library.contextual.identity.namespace
    store.prune(keep(), namespace)
    store.delete_artifact(library.contextual.identity.correction_name)
    if not any(store.keys(namespace)):
        store.undescribe(namespace)


def _decide(library: ChunkLibrary, chosen: tuple[Tokens, ...]) -> ChunkLibrary:
    content = json.dumps({"chunks": chosen}).encode()
    library.store.write_artifact(library.isolated.identity.surrogate_name, content)
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
    """decided: whether the store holds a choice, even of none. chunks: their token ids. problems: why one is not used."""

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


def _parsed(content: bytes, vocabulary: int) -> tuple[Tokens, ...]:
    try:
        chunks = tuple(tuple(chunk) for chunk in json.loads(content)["chunks"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is no list of chunks") from None
    if not all(chunk and all(type(t) is int and 0 <= t < vocabulary for t in chunk) for chunk in chunks):
        raise ValueError(f"it has tokens that a vocabulary of {vocabulary} does not")
    return chunks
