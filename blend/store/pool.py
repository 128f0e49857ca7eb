"""Chunk caches in the memory of this process, decoded once and ready to be placed into prompts.

A cache comes in, verified, when the first prompt that reads it has read all of it; later prompts look it up. The pool is
bounded by bytes. It drops the least recently used caches first, but none that a running prompt uses. On a machine with a GPU
its memory is page-locked, so that kernels read it in place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError
from blend.store.arena import Arena
from blend.store.gpu import GpuTier
from blend.store.ready import ReadyChunk

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from blend.layout import Tokens
    from blend.types import ChunkKey


class MemoryStats(NamedTuple):
    """Caches that prompts found in memory and did not, that were evicted since the pool was made, and what it holds now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    nbytes: int
    budget_bytes: int


@dataclass(eq=False)
class Lease:
    """What a prompt uses. forgotten: entries that were replaced or deleted since it was taken, by store and address."""

    chunks: frozenset[ReadyChunk]
    forgotten: set[tuple[object, ChunkKey]] = field(default_factory=set)


@dataclass
class _Tables:
    """The caches of one store. by_address: all of them. current: those that need no look at the store, by their tokens."""

    generation: str = ""
    current: dict[str, dict[Tokens, ReadyChunk]] = field(default_factory=dict)
    by_address: dict[ChunkKey, ReadyChunk] = field(default_factory=dict)


class ChunkPool:
    """Ready chunks of one store or of several. Threads may share it.

    Args:
        budget_bytes: most bytes of memory; None: as many as there are.
        gpu_budget_bytes: most bytes of GPU memory for the most recently used chunks; None: a share of what is free.

    Attributes:
        gpu: the tier on the GPU, once a model there uses the pool.

    Raises:
        ConfigError: the budget is not positive.

    """

    def __init__(self, budget_bytes: int | None = None, gpu_budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes <= 0:
            raise ConfigError(f"{budget_bytes} bytes of memory for chunk caches; it must be a positive number")
        self.budget_bytes = budget_bytes
        self._gpu_budget_bytes = gpu_budget_bytes
        self.gpu: GpuTier | None = None
        self._arena: Arena | None = None
        self._lock = threading.Lock()
        self._tables: defaultdict[object, _Tables] = defaultdict(_Tables)
        self._order: OrderedDict[ReadyChunk, object] = OrderedDict()  # least recently used first; of which store
        self._leases: set[Lease] = set()
        self._touched: dict[ReadyChunk, None] = {}
        self._nbytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    def use_gpu(self, device: torch.device) -> None:
        """Lock the pages of the pool, and keep the most recently used chunks on this GPU as well."""
        import torch

        with self._lock:
            if self.gpu is not None:
                return
            self.gpu = GpuTier.on(device, self._gpu_budget_bytes)
            if self.budget_bytes is not None:
                memory = torch.empty(self.budget_bytes, dtype=torch.uint8, pin_memory=True)
                self._arena = Arena(memory)

    def page_locked(self, nbytes: int) -> Tensor:
        """Page-locked memory for a chunk, uint8 `[nbytes]`: out of the pool's own, for which others may have to go."""
        import torch

        piece: Tensor | None = None
        with self._lock:
            if self._arena is not None and self.budget_bytes is not None:
                piece = self._arena.take(nbytes)
                if piece is None:
                    self._evict(self.budget_bytes - nbytes)
                    piece = self._arena.take(nbytes)
        if piece is None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return piece

    @property
    def stats(self) -> MemoryStats:
        """The figures at this moment."""
        with self._lock:
            counts = (self._hits, self._misses, self._evictions)
            return MemoryStats(*counts, len(self._order), self._nbytes, self.budget_bytes or 0)

    def table(self, store: object, namespace: str, generation: str) -> dict[Tokens, ReadyChunk]:
        """The chunks of a namespace that are as the store has them in this generation, by their tokens."""
        with self._lock:
            tables = self._tables[store]
            if tables.generation != generation:
                tables.current = {}
                tables.generation = generation
            return tables.current.setdefault(namespace, {})

    def checked(self, store: object, address: ChunkKey, beginning: bytes) -> ReadyChunk | None:
        """A chunk from before the store changed, if its entry still begins so; it is looked up again from now on."""
        with self._lock:
            tables = self._tables[store]
            chunk = tables.by_address.get(address)
            if chunk is None:
                return None
            if chunk.beginning != beginning:
                self._drop(chunk)
                return None
            tables.current.setdefault(address.namespace, {})[chunk.key.chunk] = chunk
            return chunk

    def keep(self, store: object, chunk: ReadyChunk, *, generation: str, lease: Lease) -> None:
        """Hold a chunk whose layers are all there.

        Not if it is larger than the budget, or if it was replaced or deleted since it was opened.

        Args:
            store: where it is from.
            chunk: the chunk.
            generation: of the store, when its prompt looked it up.
            lease: of its prompt, taken before it was opened.

        """
        with self._lock:
            tables = self._tables[store]
            is_too_large = self.budget_bytes is not None and chunk.nbytes > self.budget_bytes
            is_outdated = (store, chunk.address) in lease.forgotten
            if is_too_large or is_outdated or tables.generation != generation:
                return
            older = tables.by_address.get(chunk.address)
            if older is not None:
                self._drop(older)
            tables.by_address[chunk.address] = chunk
            tables.current.setdefault(chunk.address.namespace, {})[chunk.key.chunk] = chunk
            self._order[chunk] = store
            self._nbytes += chunk.nbytes
            self._evict(self.budget_bytes)

    def lease(self, chunks: Iterable[ReadyChunk]) -> Lease:
        """Keep these chunks until the lease is released, and count them as used now."""
        lease = Lease(frozenset(chunks))
        with self._lock:
            pooled = [*filter(self._order.__contains__, lease.chunks)]
            deque(map(self._order.move_to_end, pooled), maxlen=0)  # without a Python call for each chunk
            self._touched |= dict.fromkeys(pooled)
            self._leases.add(lease)
            return lease

    def release(self, lease: Lease) -> None:
        """The prompt is done with its chunks."""
        with self._lock:
            self._leases.discard(lease)
            self._evict(self.budget_bytes)

    def count(self, hits: int, misses: int) -> None:
        """A prompt used so many chunks that were in memory, and so many that were read."""
        with self._lock:
            self._hits += hits
            self._misses += misses

    def touched(self, store: object) -> list[ChunkKey]:
        """Where the store keeps the chunks that were used since the last call: its own order of use must follow."""
        with self._lock:
            used = [chunk for chunk in self._touched if self._order.get(chunk) is store]
            for chunk in used:
                del self._touched[chunk]
        return [chunk.address for chunk in used]

    def forget(self, store: object, address: ChunkKey) -> None:
        """Hold nothing of this entry, which was replaced or deleted."""
        with self._lock:
            for lease in self._leases:
                lease.forgotten.add((store, address))
            chunk = self._tables[store].by_address.get(address)
            if chunk is not None:
                self._drop(chunk)

    def _evict(self, most: int | None) -> None:
        """Drop chunks that no prompt uses until the others take at most so many bytes."""
        if most is None or self._nbytes <= most:
            return
        used = frozenset[ReadyChunk]().union(*(lease.chunks for lease in self._leases))
        for chunk in [chunk for chunk in self._order if chunk not in used]:
            if self._nbytes <= most:
                return
            self._evictions += 1
            self._drop(chunk)

    def _drop(self, chunk: ReadyChunk) -> None:
        store = self._order.pop(chunk, None)
        if store is None:
            return
        self._touched.pop(chunk, None)
        self._nbytes -= chunk.nbytes
        tables = self._tables[store]
        del tables.by_address[chunk.address]
        tables.current.get(chunk.address.namespace, {}).pop(chunk.key.chunk, None)
