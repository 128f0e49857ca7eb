"""Open the chunk caches of one prompt: by a look-up where they are ready in memory, else from the store.

Entries that are only in the store are read, verified and decoded in threads, layer by layer and ahead of the forward pass, into
the memory in which they stay if a pool keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from blend.errors import EntryDamagedError
from blend.model import cpu
from blend.model.precision import dtype_name
from blend.store.pool import ChunkPool, ReadyChunk, parts_of
from blend.types import CacheKey, CacheKind, ChunkCache, ChunkKey, PlaceOrigin, PromptLayout
from blend_kernels import ChunkKV

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.model.decoder import RowDecoder
    from blend.store.reader import ChunkReader


NEAR = 64  # tokens more or fewer before the first chunk than its caches have; chosen, not measured
THREADS = 2


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
        self.decoder, self.library = decoder, library
        self.chunks = tuple(chunks)
        self.problems, self.missing = tuple(problems), tuple(missing)
        self.first_place, self.near, self.exact = first_place, near, exact
        self.loader = LayerLoader(readers, len(decoder.rotations))
        pool = self._pool = library.store.pool if library else None
        self._leases = [lease, pool.lease(filter(None, self.chunks))] if pool is not None else []

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which places have a cache."""
        return tuple([chunk is not None for chunk in self.chunks])

    @property
    def first(self) -> ReadyChunk | None:
        """The cache of the first place that has one, or should have one."""
        return self.chunks[self.first_place] if self.first_place is not None else None

    @property
    def first_exact(self) -> bool:
        """Whether the first chunk is there as its isolated cache, which is exact up to its codec."""
        return self.exact and self.first is not None and self.first.key.kind is not CacheKind.CONTEXTUAL

    @property
    def first_lossless(self) -> bool:
        """Whether the first chunk's KV, if present, lost no bit in the store."""
        same = self.decoder.kept_as == dtype_name(self.decoder.dtype)
        return self.first is None or (same and self.first.lossless)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV and operators of all chunks present, each once, in the decoder's dtype."""
        width = sum(layer.width for layer in self.decoder.rotations)
        operators = sum(layer.operator_bytes for layer in self.decoder.recurrent.values())
        distinct = {*filter(None, self.chunks)}
        return sum([chunk.tokens for chunk in distinct]) * width * self.decoder.dtype.itemsize + operators * len(
            distinct
        )

    def keep(self) -> None:
        """Let the pool keep what was read to its end."""
        if self._pool is not None and self.library is not None:
            for chunk in self.loader.complete:
                generation, lease = self.library.generation, self._leases[0]
                self._pool.keep(self.library.store, chunk, generation=generation, lease=lease)

    def count(self) -> None:
        """Count what a prompt used, in memory or read for it, and have it nearer for the next one."""
        if self._pool is not None:
            used, read = [*filter(None, self.chunks)], len(self.loader.readers)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LayerLoader:
    """Reads every layer of these chunks once, in order, in threads.

    The threads only read, verify and decode; on a CPU they leave the cores to the model.

    Args:
        readers: open entries, and the memory that they are read into.
        layers: how many the decoder has.

    """

    def __init__(self, readers: Mapping[ReadyChunk, ChunkReader], layers: int) -> None:
        self.readers, self._layers = readers, layers
        self._reading: list[list[Future[None]]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._complete = not readers

    def start(self) -> None:
        """Start reading. Raises RuntimeError, with nothing left running, if the system has no more threads."""
        if self._complete or self._reading:
            return
        # One thread a worker: else OpenMP starts a team for each. With more threads than cores it puts waiting threads to
        # sleep at once, the model's too, and forward passes take two to three times as long.
        self._threads = ThreadPoolExecutor(THREADS, "kvblend-loader", initializer=cpu.use_one_thread)
        pairs = list(self.readers.items())
        shares = [pairs[number::THREADS] for number in range(min(THREADS, len(pairs)))]
        try:
            for layer in range(self._layers):
                self._reading.append([self._threads.submit(self._read, layer, share) for share in shares])
        except RuntimeError:
            self.close()
            raise

    @property
    def is_done(self) -> bool:
        """Whether every layer is there."""
        return self._complete

    def wait(self, layer: int) -> None:
        """Wait until a layer is there.

        Raises `EntryDamagedError` when an entry is not what was written, `StoreError` when the store cannot be read.
        """
        if self._complete:
            return
        for share in self._reading[layer]:
            share.result()

    def read_all(self) -> dict[ReadyChunk, str]:
        """Read every layer in this thread; a line for every chunk whose entry is damaged. Raises `StoreError` as `wait`."""
        damaged: dict[ReadyChunk, str] = {}
        for chunk, reader in self.readers.items():
            try:
                for layer in range(self._layers):
                    self._read(layer, [(chunk, reader)])
            except EntryDamagedError as error:
                damaged[chunk] = str(error)
        self._complete = not damaged
        return damaged

    @property
    def complete(self) -> list[ReadyChunk]:
        """The chunks, if all of their layers were read."""
        ended = [share for shares in self._reading for share in shares]
        whole = self._complete or all(share.done() and not share.exception() for share in ended)
        return [*self.readers] if whole and (ended or self._complete) else []

    def close(self) -> None:
        """Stop reading, and close the entries."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for reader in self.readers.values():
            reader.close()

    @torch.inference_mode()
    def _read(self, layer: int, share: Iterable[tuple[ReadyChunk, ChunkReader]]) -> None:
        for chunk, reader in share:
            kv = chunk.kv
            if kv.shape.packing != "plain":
                reader.read_parts(layer, parts_of(kv, layer))
            elif kv.keys[layer].numel() or kv.values[layer].numel():
                reader.read_into(layer, kv.keys[layer], kv.values[layer])
            if reader.has_operators:
                chunk.operators[layer] = reader.operator(layer)


def open_chunks(
    library: ChunkLibrary, layout: PromptLayout, *, contextual: bool = True, sound: bool = False
) -> OpenChunks:
    """The best cache for every place of a prompt: the isolated one for the first chunk, contextual ones for the others.

    A first chunk far from where its isolated cache is exact gets a contextual one too. Where a contextual cache is missing or
    damaged, the isolated one takes its place. Text that requests brought has the cache taken out of a prompt, or none. Damaged
    and unexpected entries are misses.

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


def _damaged(opened: OpenChunks) -> dict[ChunkKey, str]:
    """Read everything; a line for every damaged entry, by its address."""
    try:
        return {chunk.address: why for chunk, why in opened.loader.read_all().items()}
    except BaseException:
        opened.close()
        raise


class _Opening:
    """One attempt to open a prompt's caches. refused: entries that are known to be damaged, and why."""

    def __init__(
        self, library: ChunkLibrary, layout: PromptLayout, refused: Mapping[ChunkKey, str], *, contextual: bool
    ) -> None:
        self._library, self._layout, self._refused = library, layout, refused
        self._contextual = contextual and library.contextual is not None
        stored = layout.stored
        self._first = next((index for index, chunk in enumerate(stored) if chunk is not None), None)
        ahead = 0 if self._first is None else layout.bounds[self._first] - len(layout.kept_behind)
        self._near = self._first is not None and abs(ahead) <= NEAR
        self._tables = library.tables()
        self._readers: dict[ReadyChunk, ChunkReader] = {}
        self._problems: dict[str, None] = {}
        self._missing: dict[CacheKey, None] = {}
        pool = self._pool = library.store.pool
        self._lease = pool.lease(()) if pool is not None else 0

    def opened(self) -> OpenChunks:
        """What is found. Raises `StoreError`, and leaves nothing open."""
        chunks = self._ready()
        lacking = [
            index
            for index, (wanted, chunk) in enumerate(zip(self._layout.stored, chunks, strict=True))
            if wanted is not None and chunk is None
        ]
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
        corpus = self._tables[CacheKind.CONTEXTUAL if self._contextual else CacheKind.ISOLATED]
        prompts, request = self._tables[CacheKind.FROM_PROMPT], PlaceOrigin.REQUEST
        pairs = zip(self._layout.places, self._layout.stored, strict=True)
        chunks = [
            None if chunk is None else (prompts if place.origin is request else corpus).get(chunk)
            for place, chunk in pairs
        ]
        first = self._first
        if first is not None and self._takes_isolated_first and self._layout.places[first].origin is not request:
            chunks[first] = self._tables[CacheKind.ISOLATED].get(self._layout.stored[first])  # type: ignore[arg-type]
        return chunks

    def _from_store(self, places: Sequence[int]) -> list[ReadyChunk | None]:
        """The caches of these places, as the store has them."""
        keys = [self._wanted(place) for place in places]
        chunks = self._opened_keys(keys)
        lacking = [key for key in keys if chunks[key] is None]
        self._missing |= dict.fromkeys(key for key in lacking if key.kind is not CacheKind.FROM_PROMPT)
        spare = {key: CacheKey(key.chunk, CacheKind.ISOLATED) for key in lacking if key.kind is CacheKind.CONTEXTUAL}
        replaced = self._opened_keys(list(spare.values()))
        found = [chunks[key] or (replaced[spare[key]] if key in spare else None) for key in keys]
        lost = [key.chunk for key, chunk in zip(keys, found, strict=True) if chunk is None and key in self._missing]
        self._missing |= dict.fromkeys(self._library.variants(lost, contextual=self._contextual))
        return found

    def _wanted(self, place: int) -> CacheKey:
        key = self._library.best(self._layout.places[place], contextual=self._contextual)
        assert key is not None
        if place == self._first and self._takes_isolated_first and key.kind is not CacheKind.FROM_PROMPT:
            return CacheKey(key.chunk, CacheKind.ISOLATED)
        return key

    def _opened_keys(self, keys: Sequence[CacheKey]) -> dict[CacheKey, ReadyChunk | None]:
        """The caches under these keys, out of memory or the store; entries that are damaged or unfitting are refused."""
        chunks: dict[CacheKey, ReadyChunk | None] = {key: self._tables[key.kind].get(key.chunk) for key in keys}
        lacking = [key for key, chunk in chunks.items() if chunk is None]
        addresses = {key: self._library.key(key) for key in lacking}
        asked = [key for key in lacking if addresses[key] not in self._refused]
        self._problems |= dict.fromkeys(self._refused[addresses[key]] for key in lacking if key not in asked)
        readers = self._library.store.open_many([addresses[key] for key in asked])
        for key, reader in zip(asked, readers, strict=True):
            try:
                chunks[key] = None if reader is None else self._entry(key, addresses[key], reader)
            except EntryDamagedError as error:
                self._problems[str(error)] = None
        return chunks

    def _entry(self, key: CacheKey, address: ChunkKey, reader: ChunkReader | EntryDamagedError) -> ReadyChunk:
        """The chunk of an open entry, to be read. Raises `EntryDamagedError` for one that must not be used."""
        if isinstance(reader, EntryDamagedError):
            raise reader
        try:
            self._check(key, address, reader)
            pool, store = self._pool, self._library.store
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

    def _check(self, key: CacheKey, address: ChunkKey, reader: ChunkReader) -> None:
        """Refuse an entry with another position or another number of tokens, layers or bytes."""
        library = self._library
        most = library.most_bytes(key)
        kept = (reader.tokens, reader.layers, reader.start)
        needed = (len(key.chunk), len(library.decoder.rotations), library.start(key))
        if kept != needed:
            why = f"it holds {kept[0]} tokens in {kept[1]} layers from position {kept[2]}, not {needed}"
        elif reader.stored_bytes > most:
            why = f"it takes {reader.stored_bytes:,} bytes, one of {len(key.chunk)} tokens at most {most:,}"
        else:
            return
        raise EntryDamagedError(f"store entry {address.digest[:16]} must be computed again: {why}")

    def _chunk(self, key: CacheKey, address: ChunkKey, reader: ChunkReader) -> tuple[ReadyChunk, bool]:
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
        )
        if reader.has_operators:
            chunk.operators = [()] * reader.layers
        return chunk, window is not None


def memory_of(nbytes: int, device: torch.device, pool: ChunkPool | None = None) -> torch.Tensor:
    """Memory for a chunk, uint8; page-locked where a GPU reads it."""
    if device.type != "cuda":
        return cpu.empty((nbytes,), torch.uint8, device)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if pool is None else pool.page_locked(nbytes)


def of_cache(cache: ChunkCache, decoder: RowDecoder) -> ReadyChunk:
    """A chunk whose KV is in memory already, in no store."""
    shape = decoder.chunk_shape("plain")
    kv = ChunkKV(shape, cache.tokens, memory_of(shape.nbytes(cache.tokens), decoder.device))
    for index in range(cache.layers):
        kv.keys[index].copy_(cache.keys[index])
        kv.values[index].copy_(cache.values[index])
    chunk = ReadyChunk(
        CacheKey((), CacheKind.ISOLATED),
        ChunkKey("", ""),
        kv,
        start=cache.start,
        unrotated=cache.unrotated,
        lead=cache.lead,
    )
    chunk.operators = list(cache.operators)
    return chunk
