"""What operators watch of stores: where chunk caches were found, and what had to go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from blend.store.backend import MemoryStats, TierHits

if TYPE_CHECKING:
    from blend.serve.types import EngineStats
    from blend.store import ChunkStore


class StoreFigures(NamedTuple):
    """What stores say of themselves.

    memory: of the tier of chunk caches in memory, which they share; None without one. hits: in the tiers of shared stores, all
    stores together; None where none is shared. evictions: caches that went for want of room in a store.
    """

    memory: MemoryStats | None = None
    hits: TierHits | None = None
    evictions: int = 0

    @classmethod
    def of(cls, stores: Sequence[ChunkStore]) -> StoreFigures:
        """Those of these stores."""
        hits = [store.tier_hits for store in stores if store.tier_hits is not None]
        memory = next((store.memory for store in stores if store.memory is not None), None)
        together = TierHits(*map(sum, zip(*hits, strict=True))) if hits else None
        return cls(memory, together, sum(store.evictions for store in stores))


class TierCounts(Collector):
    """Hits by where the caches were, and evictions. A tier of memory counts for itself, and what went past it."""

    def __init__(self) -> None:
        self.hits = 0  # of a store without such a tier
        self.stores = StoreFigures()
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """As they are now."""
        memory, found, evictions = self.stores
        store, held = (self.hits, 0) if memory is None else (memory.misses, memory.hits)
        yield _counted("chunk_hits", "Chunks whose cache was there, by where.", {"store": store, "memory": held})
        gone = {"memory": 0 if memory is None else memory.evictions, "store": evictions}
        gone["prefixes"] = 0 if self.stats is None else self.stats.prefix_evictions
        yield _counted("evictions", "What had to go for want of room: chunk caches, or how prompts begin.", gone)
        if found is not None:
            where = {"disk": found.local, "hot": found.hot, "far": found.far, "none": found.missing}
            yield _counted(
                "store_lookups", "Entries looked for in the tiers of a shared store, by where they were.", where
            )
            yield CounterMetricFamily(
                "kvblend_store_fetched_bytes", "Bytes that came from other machines.", found.fetched_bytes
            )


def _counted(name: str, words: str, counts: Mapping[str, int]) -> Metric:
    found = CounterMetricFamily(f"kvblend_{name}", words, labels=["tier"])
    for tier, count in counts.items():
        found.add_metric([tier], count)
    return found
