"""Prometheus metrics of prompts, chunk caches and answers.

Names are vLLM's where it has the metric, behind `kvblend_`. Any thread updates counters and histograms; gauges are read
from the engine when Prometheus scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from blend.serve.types import BLENDED_BEFORE, IN_MEMORY, EndReason, EngineStats, Started
from blend.store.backend import MemoryStats, TierHits

if TYPE_CHECKING:
    from blend.store import ChunkStore


class StoreFigures(NamedTuple):
    """Counts of all stores together.

    memory: of the memory tier that they share; None without one. hits: by tier of shared stores; None without one.
    evictions: from stores with a budget.
    """

    memory: MemoryStats | None = None
    hits: TierHits | None = None
    evictions: int = 0

    @classmethod
    def of(cls, stores: Sequence[ChunkStore]) -> StoreFigures:
        """Sum up these stores."""
        hits = [store.tier_hits for store in stores if store.tier_hits is not None]
        memory = next((store.memory for store in stores if store.memory is not None), None)
        together = TierHits(*map(sum, zip(*hits, strict=True))) if hits else None
        return cls(memory, together, sum(store.evictions for store in stores))


class TierMetrics(Collector):
    """Hits and evictions by tier."""

    def __init__(self) -> None:
        self.hits = 0  # in the store, without a memory tier
        self.stores = StoreFigures()
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """The current values."""
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


CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The media type of `PromptMetrics.page`."""
WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160, 640)
"""Buckets in seconds, for what comes before an answer."""
_MOST_REASONS = 32  # bounds the label


class PromptMetrics:
    """Metrics of prompts and chunk caches, in a registry of their own, whoever decodes the answers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._queue = self.histogram("request_queue_time_seconds", "From arrival to when work on it began.", WAITS)
        self._running = self.gauge("num_requests_running", "Answers that are being computed.")
        self._waiting = self.gauge("num_requests_waiting", "Prompts that wait for room.")
        self._kv = self.gauge("kv_cache_usage_perc", "Share of the KV memory that is reserved; 1 is all of it.")
        self._prefixes = self.gauge("prefix_bytes", "KV of how earlier prompts began, in memory.")
        self._chunks = self.gauge("chunk_memory_bytes", "Chunk caches in memory, those in use included.")
        self._encoding = self.gauge("num_chunk_caches_waiting", "Chunk caches that are still to be computed.")
        self._prompt = self.counter("prompt_tokens", "Tokens of prompts.")
        self._computed = self.counter("rows_recomputed", "Rows of prompts that were computed in every layer.")
        self._rows = self.counter("rows_prompt", "Rows of prompts.")
        self._reused = self.counter("prefix_rows_reused", "Rows taken over from earlier prompts that begin alike.")
        self._tiers = TierMetrics()
        self.registry.register(self._tiers)
        ProcessCollector(registry=self.registry)
        self._misses = self.counter("chunk_misses", "Chunks that had to be computed.")
        self._loaded = self.counter("bytes_loaded", "Bytes of chunk caches read.")
        self._damaged = self.counter("damaged_entries", "Entries of the store that were found damaged.")
        self._blended = self.counter("prompts_blended", "Prompts that were blended.")
        self._fallbacks = self.counter("fallbacks", "Prompts for which nothing was blended, by why.", "reason")
        self._errors = self.counter("errors", "Requests that failed, by kind of error.", "kind")
        self._reasons: set[str] = set()

    def prefilled(self, started: Started) -> None:
        """Count a prompt that is prefilled, or left to `handover`'s owner."""
        figures = started.figures
        self._queue.observe(figures.waited_s)
        self._prompt.inc(figures.rows)
        self._rows.inc(figures.rows)
        self._computed.inc(figures.rows_computed)
        self._reused.inc(figures.rows_reused)
        self._tiers.hits += figures.hits
        self._misses.inc(figures.chunks - figures.hits)
        self._loaded.inc(figures.bytes_loaded)
        self._damaged.inc(len(started.problems))
        if figures.reason:
            self.fell_back(figures.reason)
        elif figures.method == "blend":
            self._blended.inc()

    def fell_back(self, reason: str) -> None:
        """Count a prompt that was not blended, by reason, unless its KV was in memory."""
        if reason not in (IN_MEMORY, BLENDED_BEFORE):
            self._fallbacks.labels(self._bounded(reason)).inc()

    def refused(self, kind: str) -> None:
        """Count a failed request by its error code."""
        self._errors.labels(kind).inc()

    def page(self, stats: EngineStats | None = None, stores: StoreFigures | None = None) -> bytes:
        """All metrics in Prometheus' text format. stats: of the engine, if there is one yet."""
        stores = stores or StoreFigures()
        self._tiers.stores, self._tiers.stats = stores, stats
        if stats is not None:
            self._running.set(stats.running)
            self._waiting.set(stats.waiting)
            self._kv.set(stats.kv_bytes / max(1, stats.kv_budget))
            self._prefixes.set(stats.prefix_bytes)
            self._encoding.set(stats.encoding)
        self._chunks.set(0 if stores.memory is None else stores.memory.nbytes)
        return generate_latest(self.registry)

    def _bounded(self, reason: str) -> str:
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"

    def counter(self, name: str, words: str, *labels: str) -> Counter:
        """A new counter; scrapes show it as `NAME_total`."""
        return Counter(f"kvblend_{name}", words, labels, registry=self.registry)

    def gauge(self, name: str, words: str) -> Gauge:
        """A new gauge."""
        return Gauge(f"kvblend_{name}", words, registry=self.registry)

    def histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        """A new histogram."""
        return Histogram(f"kvblend_{name}", words, registry=self.registry, buckets=buckets)


_GAP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics(PromptMetrics):
    """The metrics of `blend serve`."""

    def __init__(self) -> None:
        super().__init__()
        self._ttft = self.histogram("time_to_first_token_seconds", "From arrival to the first token.", WAITS)
        self._gap = self.histogram("inter_token_latency_seconds", "Between two tokens of one answer.", _GAP)
        self._whole = self.histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self._generated = self.counter("generation_tokens", "Tokens of answers.")
        self._success = self.counter("request_success", "Answers that ended, by how.", "finished_reason")
        self._http = self.counter("http_requests", "Requests by route and status.", "path", "status")

    def started(self, started: Started, seconds: float) -> None:
        """The first token came so many seconds after the request."""
        self._ttft.observe(seconds)
        self.prefilled(started)

    def gap(self, seconds: float) -> None:
        """A token came so many seconds after the one before it."""
        self._gap.observe(seconds)

    def finished(self, reason: EndReason, tokens: int, seconds: float) -> None:
        """An answer ended so many seconds after its request."""
        self._generated.inc(tokens)
        self._success.labels(reason).inc()
        self._whole.observe(seconds)

    def responded(self, route: str, status: int) -> None:
        """Count a response. route: the application's pattern, never the client's path."""
        self._http.labels(route, str(status)).inc()
