"""Open the chunk caches of one prompt: by a look-up where they are ready in memory, else from the store.

Entries that are only in the store are read, verified and decoded in threads, layer by layer and ahead of the forward pass, into
the memory in which they stay if a pool keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blend.chunks.library import ChunkLibrary
from blend.chunks.loader import LayerLoader
from blend.errors import EntryDamagedError
from blend.model import cpu
from blend.store.pool import ChunkPool
from blend.store.ready import ReadyChunk
from blend.types import CacheKey, CacheKind, ChunkCache, ChunkKey, Place, PlaceOrigin, PromptLayout, Tokens, dtype_name
from blend_kernels import ChunkKV

if TYPE_CHECKING:
    from blend.model.row_decoder import RowDecoder
    from blend.store.reader import ChunkReader


NEAR = 64  # tokens more or fewer before the first chunk than its caches have; chosen, not measured


class OpenChunks:
    """The caches of a prompt's places; close it, or use it in a `with`.

    Args:
        decoder: the model that they are for.
        chunks: the cache used at each place, or None.
        readers: the open entries of those that are not in memory yet.
        problems: a line for every refused entry.
        missing: caches that should have been used, each once.
        first_place: the first place that has a cache, or should have one.
        near: whether the first stored chunk stands right behind a prefix as long as its cache's.
        exact: whether its isolated cache is exact there.
        library: where they come from; None if there is none.
        lease: of the pool, taken before the entries were opened.

    Attributes:
        chunks: the cache used at each place, or None.
        stored: those of them that came out of the store.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        chunks: Sequence[ReadyChunk | None],
        readers: Mapping[ReadyChunk, ChunkReader],
        problems: Sequence[str] = (),
        missing: Iterable[CacheKey] = (),
        *,
        first_place: int | None = None,
        near: bool = False,
        exact: bool = False,
        library: ChunkLibrary | None = None,
        lease: int = 0,
    ) -> None:
        self.decoder = decoder
        self.library = library
        self.stored = tuple(chunks)
        self.chunks = self.stored
        self.problems = tuple(problems)
        self.missing = tuple(missing)
        self.first_place = first_place
        self.near = near
        self.exact = exact
        self.loader = LayerLoader(readers, len(decoder.rotations))
        pool = self._pool = library.store.pool if library else None
        self._leases = [lease, pool.lease(filter(None, self.stored))] if pool is not None else []

    def with_moved(self, layout: PromptLayout, rows: ChunkCache | None) -> OpenChunks:
        """Itself, with an earlier prompt's rows, if there are any, at the prompt's `MOVED` places."""
        if rows is not None:
            earlier = of_cache(rows, self.decoder)
            pairs = zip(layout.places, self.stored, strict=True)
            self.chunks = tuple(earlier if place.origin is PlaceOrigin.MOVED else chunk for place, chunk in pairs)
        return self

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which places have a cache."""
        return tuple([chunk is not None for chunk in self.chunks])

    @property
    def first(self) -> ReadyChunk | None:
        """The cache of the first place that has one, or should have one."""
        return self.stored[self.first_place] if self.first_place is not None else None

    @property
    def first_exact(self) -> bool:
        """Whether the first chunk is there as its isolated cache, which is exact up to its codec."""
        first = self.first
        return self.exact and first is not None and first.key.kind is not CacheKind.CONTEXTUAL

    @property
    def first_lossless(self) -> bool:
        """Whether the first chunk's KV, if present, lost no bit in the store."""
        same = self.decoder.kept_as == dtype_name(self.decoder.dtype)
        return self.first is None or (same and self.first.lossless)

    def lacks(self, corrections: Sequence[object]) -> bool:
        """Whether a chunk that needs a KV correction has none, as after `--quick`. corrections: of each place."""
        needs_none = self.first_place if self.near or self.first_exact else None
        pairs = enumerate(zip(self.stored, corrections, strict=False))
        return any(chunk and correction is None for index, (chunk, correction) in pairs if index != needs_none)

    def lead_lengths(self, places: Sequence[Place]) -> list[int]:
        """How many first rows of each of the prompt's places are in the lead of its chunk."""
        pairs = zip(places, self.chunks, strict=True)
        return [0 if chunk is None else chunk.lead - place.first for place, chunk in pairs]

    @property
    def nbytes(self) -> int:
        """Bytes of the KV and operators of all chunks out of the store, each once, in the decoder's dtype."""
        width = sum(layer.width for layer in self.decoder.rotations)
        operators = sum(layer.operator_bytes for layer in self.decoder.recurrent.values())
        distinct = {*filter(None, self.stored)}
        tokens = sum([chunk.tokens for chunk in distinct])
        return tokens * width * self.decoder.dtype.itemsize + operators * len(distinct)

    def keep(self) -> None:
        """Let the pool keep what was read to its end."""
        if self._pool is None or self.library is None:
            return
        store = self.library.store
        generation = self.library.generation
        for chunk in self.loader.complete:
            self._pool.keep(store, chunk, generation=generation, lease=self._leases[0])

    def count(self) -> None:
        """Count what a prompt used, in memory or read for it, and have it nearer for the next one."""
        if self._pool is None:
            return
        used = [*filter(None, self.stored)]
        read = len(self.loader.readers)
        self._pool.count(len(used) - read, read)
        if self._pool.gpu is not None:
            self._pool.gpu.bring(used)

    def close(self) -> None:
        """Stop reading, close all entries, and let go of the chunks."""
        try:
            self.loader.close()
        finally:
            if self._pool is not None:
                for lease in self._leases:
                    self._pool.release(lease)

    def __enter__(self) -> OpenChunks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_chunks(
    library: ChunkLibrary,
    layout: PromptLayout,
    *,
    contextual: bool = True,
    sound: bool = False,
) -> OpenChunks:
    """The best cache for every place of a prompt: the isolated one for the first chunk, contextual ones for the others.

    A first chunk far from where its isolated cache is exact gets a contextual one too. Where a contextual cache is missing or
    damaged, the isolated one takes its place. Damaged and unexpected entries are misses.

    Args:
        library: the caches behind the prompt's prefix.
        layout: the prompt.
        contextual: whether contextual caches are used.
        sound: read and verify everything now, instead of layer by layer when a pass needs it.

    Returns:
        What was found; close it.

    Raises:
        StoreError: the store cannot be read. An outage is no miss.

    """
    refused: dict[ChunkKey, str] = {}
    while True:  # the replacement of a damaged entry may be damaged itself
        opened = _Opening(library, layout, refused, contextual=contextual).opened()
        damaged = _damaged(opened) if sound else {}
        if not damaged:
            return opened
        opened.close()
        refused |= damaged


def caches_of(
    library: ChunkLibrary,
    chunks: Sequence[Tokens],
    *,
    contextual: bool,
) -> list[ChunkCache]:
    """The best cache for every chunk of a prompt; missing ones are computed, and not stored."""
    layout = PromptLayout.of_chunks(library.prefix, chunks, ())
    with open_chunks(library, layout, contextual=contextual, sound=True) as opened:
        dtype = library.decoder.dtype
        stored = [chunk.cache(dtype) if chunk else None for chunk in opened.chunks]
    computed = dict(library.computed(opened.missing, kept=()))
    caches = []
    for index, place in enumerate(layout.places):
        key = library.best(place, contextual=contextual and index > 0)
        cache = computed.get(key, stored[index]) if key else None
        if cache is not None:
            caches.append(cache)
    return caches


def _damaged(opened: OpenChunks) -> dict[ChunkKey, str]:
    """Read everything; a line for every damaged entry, by its address."""
    try:
        damaged = opened.loader.read_all()
        return {chunk.address: why for chunk, why in damaged.items()}
    except BaseException:
        opened.close()
        raise


class _Opening:
    """One attempt to open a prompt's caches. refused: entries that are known to be damaged, and why."""

    def __init__(
        self,
        library: ChunkLibrary,
        layout: PromptLayout,
        refused: Mapping[ChunkKey, str],
        *,
        contextual: bool,
    ) -> None:
        self._library = library
        self._layout = layout
        self._refused = refused
        self._contextual = contextual and library.contextual is not None
        self._first: int | None = None
        self._near = False
        for index, chunk in enumerate(layout.stored):
            if chunk is not None:
                self._first = index
                moved = layout.bounds[index] - len(layout.kept_behind)
                self._near = abs(moved) <= NEAR
                break
        self._tables = library.tables()
        self._readers: dict[ReadyChunk, ChunkReader] = {}
        self._problems: dict[str, None] = {}
        self._missing: dict[CacheKey, None] = {}
        pool = self._pool = library.store.pool
        self._lease = pool.lease(()) if pool is not None else 0

    def opened(self) -> OpenChunks:
        """What is found. Raises `StoreError`, and leaves nothing open."""
        chunks = self._ready()
        stored = self._layout.stored
        lacking = [index for index, chunk in enumerate(chunks) if chunk is None and stored[index] is not None]
        if lacking:
            try:
                for index, chunk in zip(lacking, self._from_store(lacking), strict=True):
                    chunks[index] = chunk
            except BaseException:
                for reader in self._readers.values():
                    reader.close()
                if self._pool is not None:
                    self._pool.release(self._lease)
                raise
        return OpenChunks(
            self._library.decoder,
            chunks,
            self._readers,
            tuple(self._problems),
            tuple(self._missing),
            first_place=self._first,
            near=self._near,
            exact=self._layout.exact_first,
            library=self._library,
            lease=self._lease,
        )

    @property
    def _takes_isolated_first(self) -> bool:
        """Whether the first place takes an isolated cache."""
        return self._near or self._layout.exact_first

    def _ready(self) -> list[ReadyChunk | None]:
        """The caches that are ready in memory, by one look-up a place."""
        kind = CacheKind.CONTEXTUAL if self._contextual else CacheKind.ISOLATED
        table = self._tables[kind]
        stored = self._layout.stored
        chunks = [None if tokens is None else table.get(tokens) for tokens in stored]
        first = self._first
        if first is not None and self._takes_isolated_first:
            chunks[first] = self._tables[CacheKind.ISOLATED].get(stored[first])  # type: ignore[arg-type]
        return chunks

    def _from_store(self, places: Sequence[int]) -> list[ReadyChunk | None]:
        """The caches of these places, as the store has them."""
        keys = [self._wanted(place) for place in places]
        chunks = self._opened_keys(keys)
        lacking = [key for key in keys if chunks[key] is None]
        self._missing |= dict.fromkeys(lacking)
        contextual = [key for key in lacking if key.kind is CacheKind.CONTEXTUAL]
        spare = {key: CacheKey(key.chunk, CacheKind.ISOLATED) for key in contextual}
        replacements = self._opened_keys(list(spare.values()))
        for key, isolated in spare.items():
            chunks[key] = replacements[isolated]
        lost = [key.chunk for key in keys if chunks[key] is None]
        variants = self._library.variants(lost, contextual=self._contextual)
        self._missing |= dict.fromkeys(variants)
        return [chunks[key] for key in keys]

    def _wanted(self, place: int) -> CacheKey:
        text = self._layout.places[place]
        key = self._library.best(text, contextual=self._contextual)
        assert key is not None
        if place == self._first and self._takes_isolated_first:
            return CacheKey(key.chunk, CacheKind.ISOLATED)
        return key

    def _opened_keys(self, keys: Sequence[CacheKey]) -> dict[CacheKey, ReadyChunk | None]:
        """The caches under these keys, out of memory or the store; entries that are damaged or unfitting are refused."""
        tables = self._tables
        chunks: dict[CacheKey, ReadyChunk | None] = {}
        chunks |= {key: tables[key.kind].get(key.chunk) for key in keys}
        lacking = [key for key, chunk in chunks.items() if chunk is None]
        addresses = {key: self._library.key(key) for key in lacking}
        for address in addresses.values():
            if address in self._refused:
                self._problems[self._refused[address]] = None
        readable = [key for key, address in addresses.items() if address not in self._refused]
        readers = self._library.store.open_many([addresses[key] for key in readable])
        for key, reader in zip(readable, readers, strict=True):
            if reader is None:
                continue
            try:
                chunks[key] = self._entry(key, addresses[key], reader)
            except EntryDamagedError as error:
                self._problems[str(error)] = None
        return chunks

    def _entry(
        self,
        key: CacheKey,
        address: ChunkKey,
        reader: ChunkReader | EntryDamagedError,
    ) -> ReadyChunk:
        """The chunk of an open entry, to be read. Raises `EntryDamagedError` for one that must not be used."""
        if isinstance(reader, EntryDamagedError):
            raise reader
        try:
            self._check(key, address, reader)
            pool = self._pool
            store = self._library.store
            chunk = pool.checked(store, address, reader.beginning) if pool is not None else None
            if chunk is not None:
                reader.close()
                return chunk
            chunk, is_whole = self._chunk(key, address, reader)
        except BaseException:
            reader.close()
            raise
        if is_whole and pool is not None:
            pool.keep(store, chunk, generation=self._library.generation, lease=self._lease)
            reader.close()
        else:
            self._readers[chunk] = reader
        return chunk

    def _check(
        self,
        key: CacheKey,
        address: ChunkKey,
        reader: ChunkReader,
    ) -> None:
        """Refuse an entry with another position or another number of tokens, layers or bytes."""
        library = self._library
        most = library.most_bytes(key)
        actual = (reader.tokens, reader.layers, reader.start)
        depth = len(library.decoder.rotations)
        needed = (len(key.chunk), depth, library.start(key))
        if actual != needed:
            why = f"it holds {actual[0]} tokens in {actual[1]} layers from position {actual[2]}, not {needed}"
        elif reader.stored_bytes > most:
            why = f"it takes {reader.stored_bytes:,} bytes, one of {len(key.chunk)} tokens at most {most:,}"
        else:
            return
        raise EntryDamagedError(f"store entry {address.digest[:16]} must be computed again: {why}")

    def _chunk(
        self,
        key: CacheKey,
        address: ChunkKey,
        reader: ChunkReader,
    ) -> tuple[ReadyChunk, bool]:
        """A chunk for an entry, and whether its layers are there already, because they are used where the store has them."""
        decoder = self._library.decoder
        shape = decoder.chunk_shape(reader.packing)
        on_cpu = decoder.device.type == "cpu"
        window = reader.whole(decoder.dtype) if on_cpu else None
        try:
            nbytes = shape.nbytes(reader.tokens, reader.groups)
            if window is None:
                memory = memory_of(nbytes, decoder.device, self._library.store.pool)
            else:
                memory = torch.frombuffer(window, dtype=torch.uint8)
            kv = ChunkKV(shape, reader.tokens, memory, reader.groups)
        except ValueError as error:
            why = f"store entry {address.digest[:16]} must be computed again: {error}"
            raise EntryDamagedError(why) from None
        chunk = ReadyChunk(
            key,
            address,
            kv,
            start=reader.start,
            unrotated=reader.unrotated,
            lead=reader.lead,
            lossless=reader.lossless(decoder.dtype),
            beginning=reader.beginning,
            nbytes=0 if window is not None else nbytes,
            operators=[()] * reader.layers if reader.has_operators else [],
        )
        return chunk, window is not None


def memory_of(
    nbytes: int,
    device: torch.device,
    pool: ChunkPool | None = None,
) -> Tensor:
    """Memory for a chunk, uint8; page-locked where a GPU reads it."""
    if device.type != "cuda":
        return cpu.empty((nbytes,), torch.uint8, device)
    if pool is not None:
        return pool.page_locked(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def of_cache(cache: ChunkCache, decoder: RowDecoder) -> ReadyChunk:
    """A chunk whose KV is in memory already, in no store."""
    shape = decoder.chunk_shape("plain")
    nbytes = shape.nbytes(cache.tokens)
    device = cache.keys[0].device
    if device.type == "cuda":
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    else:
        memory = memory_of(nbytes, decoder.device)
    kv = ChunkKV(shape, cache.tokens, memory)
    for index in range(cache.layers):
        kv.keys[index].copy_(cache.keys[index])
        kv.values[index].copy_(cache.values[index])
    return ReadyChunk(
        CacheKey((), CacheKind.ISOLATED),
        ChunkKey("", ""),
        kv,
        start=cache.start,
        unrotated=cache.unrotated,
        lead=cache.lead,
        operators=list(cache.operators),
    )
