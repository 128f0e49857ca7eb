"""Open the chunk caches of one prompt: by a look-up where they are ready in memory, else from the store.

Entries that are only in the store are read, verified and decoded in threads, layer by layer and ahead of the forward pass, into
the memory in which they stay if a pool keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blend.chunks.library import ChunkLibrary
from blend.chunks.loader import LayerLoader
from blend.errors import EntryDamagedError
from blend.layout import PlaceOrigin, PromptLayout, Tokens
from blend.model import cpu
from blend.store.pool import ChunkPool, Lease
from blend.store.reader import damaged
from blend.store.ready import ReadyChunk
from blend.types import CacheKey, CacheKind, ChunkCache, ChunkKey, dtype_name
from blend_kernels import ChunkKV

if TYPE_CHECKING:
    from blend.model.row_decoder import RowDecoder
    from blend.store.reader import ChunkReader


NEAR = 64  # tokens more or fewer before the first chunk than its caches have; chosen, not measured


class OpenChunks:
    """The caches of a prompt's places; close it, or use it in a `with`. No place has one until they are looked up.

    Args:
        decoder: the model that they are for.
        layout: the prompt.
        contextual: whether contextual caches are used.
        refused: entries that are known to be damaged, and why.

    Attributes:
        chunks: the cache used at each place, or None.
        stored: those of them that came out of the store.
        problems: a line for every refused entry.
        missing: caches that should have been used, each once.
        first_place: the first place that has a cache, or should have one.
        first_in_place: whether the first stored chunk stands right behind a prefix as long as its cache's.
        loader: reads those that are not in memory yet.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        layout: PromptLayout,
        *,
        contextual: bool = True,
        refused: Mapping[ChunkKey, str] = MappingProxyType({}),
    ) -> None:
        self.decoder = decoder
        self._layout = layout
        self._refused = refused
        self._contextual = contextual
        places = range(len(layout.places))
        self.first_place = next((place for place in places if layout.stored[place] is not None), None)
        self.first_in_place = False
        if self.first_place is not None:
            moved = layout.bounds[self.first_place] - len(layout.kept_behind)
            self.first_in_place = abs(moved) <= NEAR
        self.stored: tuple[ReadyChunk | None, ...] = (None,) * len(places)
        self.chunks: tuple[ReadyChunk | None, ...] = self.stored
        self._problems: dict[str, None] = {}
        self._missing: dict[CacheKey, None] = {}
        self._readers: list[ChunkReader] = []
        self._pool: ChunkPool | None = None
        self._leases: list[Lease] = []
        self.loader = LayerLoader(len(decoder.rotations))

    def open(self, library: ChunkLibrary) -> None:
        """Look the caches up, in memory and then in the store. Raises `StoreError`."""
        self._library = library
        self._pool = library.store.pool
        contextual = self._contextual and library.contextual is not None
        if self._pool is not None:
            self._leases.append(self._pool.lease(()))  # before the entries are opened
        tables = library.tables()
        table = tables[CacheKind.CONTEXTUAL if contextual else CacheKind.ISOLATED]
        stored = self._layout.stored
        chunks = [None if tokens is None else table.get(tokens) for tokens in stored]
        alone = self.first_place if self.first_in_place or self._layout.exact_first else None
        if alone is not None:
            chunks[alone] = tables[CacheKind.ISOLATED].get(stored[alone])  # type: ignore[arg-type]
        unopened: dict[int, CacheKey] = {}
        for place, tokens in enumerate(stored):
            if tokens is not None and chunks[place] is None:
                unopened[place] = library.best(tokens, contextual=contextual and place != alone)
        opened = self._opened(unopened.values()) if unopened else {}
        for place, key in unopened.items():
            chunks[place] = opened[key]
        self.stored = self.chunks = tuple(chunks)
        if self._pool is not None:
            self._leases.append(self._pool.lease(filter(None, chunks)))

    def _opened(self, keys: Iterable[CacheKey]) -> dict[CacheKey, ReadyChunk | None]:
        """The caches under these keys, as the store has them; the isolated one where the contextual one is missing."""
        chunks = self._of_store(keys)
        lacking = [key for key, chunk in chunks.items() if chunk is None]
        self._missing |= dict.fromkeys(lacking)
        isolated = [CacheKey(key.chunk, CacheKind.ISOLATED) for key in lacking if key.kind is CacheKind.CONTEXTUAL]
        replacements = self._of_store(isolated)
        for key in lacking:
            chunks[key] = replacements.get(CacheKey(key.chunk, CacheKind.ISOLATED))
        lost = [key.chunk for key in lacking if chunks[key] is None]
        self._missing |= dict.fromkeys(self._library.variants(lost, contextual=self._contextual))
        return chunks

    def _of_store(self, keys: Iterable[CacheKey]) -> dict[CacheKey, ReadyChunk | None]:
        """The caches under these keys, out of memory or the store; entries that are damaged or unfitting are refused."""
        library = self._library
        tables = library.tables()
        chunks = {key: tables[key.kind].get(key.chunk) for key in keys}
        addresses = {key: library.key(key) for key, chunk in chunks.items() if chunk is None}
        readable = [key for key, address in addresses.items() if address not in self._refused]
        problems = [self._refused[address] for address in addresses.values() if address in self._refused]
        self._problems |= dict.fromkeys(problems)
        readers = library.store.open_many([addresses[key] for key in readable])
        entries: dict[CacheKey, ChunkReader] = {}
        for key, reader in zip(readable, readers, strict=True):
            if isinstance(reader, EntryDamagedError):
                self._problems[str(reader)] = None
            elif reader is not None:
                entries[key] = reader
        self._readers += entries.values()
        for key, reader in entries.items():
            try:
                chunks[key] = self._entry(key, addresses[key], reader)
            except EntryDamagedError as error:
                self._problems[str(error)] = None
        return chunks

    def _entry(self, key: CacheKey, address: ChunkKey, reader: ChunkReader) -> ReadyChunk:
        """The chunk of an open entry, to be read. Raises `EntryDamagedError` for one that must not be used."""
        library = self._library
        if wrong := _mismatch(library, key, reader):
            raise damaged(address, wrong)
        store = library.store
        chunk = None if self._pool is None else self._pool.checked(store, address, reader.beginning)
        if chunk is not None:
            return chunk
        decoder = self.decoder
        shape = decoder.chunk_shape(reader.packing)
        try:
            nbytes = shape.nbytes(reader.tokens, reader.groups)
            kv = ChunkKV(shape, reader.tokens, memory_of(nbytes, decoder.device, self._pool), reader.groups)
        except ValueError as error:
            raise damaged(address, str(error)) from None
        chunk = ReadyChunk(
            key,
            address,
            kv,
            start=reader.start,
            unrotated=reader.unrotated,
            lead=reader.lead,
            lossless=reader.lossless(decoder.dtype),
            beginning=reader.beginning,
            nbytes=nbytes,
            operators=[()] * reader.layers if reader.has_operators else [],
        )
        self.loader.readers[chunk] = reader
        return chunk

    def take_moved(self, rows: ChunkCache) -> None:
        """Use an earlier prompt's rows at the prompt's `MOVED` places."""
        earlier = of_cache(rows, self.decoder)
        pairs = zip(self._layout.places, self.stored, strict=True)
        self.chunks = tuple(earlier if place.origin is PlaceOrigin.MOVED else chunk for place, chunk in pairs)

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for every refused entry."""
        return tuple(self._problems)

    @property
    def missing(self) -> tuple[CacheKey, ...]:
        """Caches that should have been used, each once."""
        return tuple(self._missing)

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
        return self._layout.exact_first and first is not None and first.key.kind is CacheKind.ISOLATED

    @property
    def first_lossless(self) -> bool:
        """Whether the first chunk's KV, if present, lost no bit in the store."""
        same = self.decoder.kept_as == dtype_name(self.decoder.dtype)
        return self.first is None or (same and self.first.lossless)

    def lacks(self, corrections: Sequence[object]) -> bool:
        """Whether a chunk that needs a KV correction has none, as after `--quick`. corrections: of each place."""
        needs_none = self.first_place if self.first_in_place or self.first_exact else None
        pairs = enumerate(zip(self.stored, corrections, strict=False))
        return any(chunk and correction is None for index, (chunk, correction) in pairs if index != needs_none)

    def lead_lengths(self) -> list[int]:
        """How many first rows of each of the prompt's places are in the lead of its chunk."""
        pairs = zip(self._layout.places, self.chunks, strict=True)
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
        """Let the pool keep what was read, once all of it is there."""
        if self._pool is None:
            return
        self.loader.wait_for_all()
        for chunk in self.loader.readers:
            self._pool.keep(self._library.store, chunk, generation=self._library.generation, lease=self._leases[0])

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
            for reader in self._readers:
                reader.close()
            if self._pool is not None:
                for lease in self._leases:
                    self._pool.release(lease)

    def __enter__(self) -> OpenChunks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_chunks(
    library: ChunkLibrary, layout: PromptLayout, *, contextual: bool = True, sound: bool = False
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
        opened = OpenChunks(library.decoder, layout, contextual=contextual, refused=refused)
        try:
            opened.open(library)
            unsound = opened.loader.read_all() if sound else {}
        except BaseException:
            opened.close()
            raise
        if not unsound:
            return opened
        opened.close()
        refused |= {chunk.address: why for chunk, why in unsound.items()}


def _mismatch(library: ChunkLibrary, key: CacheKey, reader: ChunkReader) -> str:
    """Why an entry is not the one of this key: another position, or another number of tokens, layers or bytes."""
    actual = (reader.tokens, reader.layers, reader.start)
    needed = (len(key.chunk), len(library.decoder.rotations), library.start(key))
    most = library.most_bytes(key)
    if actual != needed:
        return f"it holds {actual[0]} tokens in {actual[1]} layers from position {actual[2]}, not {needed}"
    if reader.stored_bytes > most:
        return f"it takes {reader.stored_bytes:,} bytes, one of {len(key.chunk)} tokens at most {most:,}"
    return ""


def caches_of(library: ChunkLibrary, chunks: Sequence[Tokens], *, contextual: bool) -> list[ChunkCache]:
    """The best cache for every chunk of a prompt; missing ones are computed, and not stored."""
    layout = PromptLayout.of_chunks(library.prefix, chunks, ())
    with open_chunks(library, layout, contextual=contextual, sound=True) as opened:
        dtype = library.decoder.dtype
        stored = [chunk.cache(dtype) if chunk else None for chunk in opened.chunks]
    computed = dict(library.computed(opened.missing))
    keys = [library.best(chunk, contextual=contextual and place > 0) for place, chunk in enumerate(chunks)]
    caches = [computed.get(key, cache) for key, cache in zip(keys, stored, strict=True)]
    return [cache for cache in caches if cache is not None]


def memory_of(nbytes: int, device: torch.device, pool: ChunkPool | None = None) -> Tensor:
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
