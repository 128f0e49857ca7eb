"""Prometheus metrics of prompts, chunk caches and answers.

Names are vLLM's where it has the metric, behind `kvblend_`. Any thread updates counters and histograms; gauges are read
from the engine when Prometheus scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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

from blend.serve.events import BLENDED_BEFORE, IN_MEMORY, Audit, Check, EndReason, EngineStats, Started
from blend.store.backend import TierHits
from blend.store.pool import MemoryStats

if TYPE_CHECKING:
    from blend.store import ChunkStore

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The media type of `Metrics.page`."""
# Buckets in seconds: before an answer, between two tokens, and of a whole answer.
_WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_KL = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_MOST_REASONS = 32  # bounds the label


class StoreFigures(NamedTuple):
    """Counts of all stores together.

    Attributes:
        memory: the memory tier that they share.
        hits: hits by tier of shared stores.
        evictions: evictions from stores with a budget.

    """

    memory: MemoryStats | None = None
    hits: TierHits | None = None
    evictions: int = 0

    @classmethod
    def of(cls, stores: Sequence[ChunkStore]) -> StoreFigures:
        """Sum up these stores."""
        hits = [store.backend.tier_hits for store in stores if store.backend.tier_hits is not None]
        memory = next((store.memory for store in stores if store.memory is not None), None)
        together = TierHits(*map(sum, zip(*hits, strict=True))) if hits else None
        return cls(memory, together, sum(store.backend.evictions for store in stores))


class Metrics(Collector):
    """The metrics of `blend serve`, in their own registry; as a collector it adds the tiers' own counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._hits = 0
        self._prefix_evictions = 0
        self._stores = StoreFigures()
        self._reasons: set[str] = set()
        gauge = partial(_made, Gauge, self.registry)
        counter = partial(_made, Counter, self.registry)
        histogram = partial(_made, Histogram, self.registry)
        self._queue = histogram("request_queue_time_seconds", "From arrival to when work on it began.", buckets=_WAITS)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", buckets=_WAITS)
        self._gap = histogram("inter_token_latency_seconds", "Between two tokens of one answer.", buckets=_GAP)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", buckets=_WHOLE)
        self._running = gauge("num_requests_running", "Requests that are being computed, each with all its answers.")
        self._waiting = gauge("num_requests_waiting", "Prompts that wait for room.")
        self._kv = gauge("kv_cache_usage_perc", "Share of the KV memory that is reserved; 1 is all of it.")
        self._prefixes = gauge("prefix_bytes", "KV of how earlier prompts began, in memory.")
        self._chunks = gauge("chunk_memory_bytes", "Chunk caches in memory, those in use included.")
        self._encoding = gauge("num_chunk_caches_waiting", "Chunk caches that are still to be computed.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._rows = counter("rows_prompt", "Rows of prompts.")
        self._computed = counter("rows_recomputed", "Rows of prompts that were computed in every layer.")
        self._reused = counter("prefix_rows_reused", "Rows taken over from earlier prompts that begin alike.")
        self._moved = counter(
            "rows_moved", "Rows of earlier prompts' text at other places; some of these were computed."
        )
        self._misses = counter("chunk_misses", "Chunks that had to be computed.")
        self._loaded = counter("bytes_loaded", "Bytes of chunk caches read.")
        self._damaged = counter("damaged_entries", "Entries of the store that were found damaged.")
        self._blended = counter("prompts_blended", "Prompts that were blended.")
        self._fallbacks = counter("fallbacks", "Prompts for which nothing was blended, by why.", labelnames=["reason"])
        words = "Tokens of prompts that were computed though text might be reused, by why."
        self._not_reused = counter("not_reused_tokens", words, labelnames=["reason"])
        self._errors = counter("errors", "Requests that failed, by kind of error.", labelnames=["kind"])
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._success = counter("request_success", "Answers that ended, by how.", labelnames=["finished_reason"])
        self._checks = counter("checks", "Answers compared with full recompute on request.", labelnames=["result"])
        self._audited = counter("audited_answers", "Answers compared with full recompute in idle time.")
        self._flipped = counter("audit_flips", "Audited answers of which full recompute says something else.")
        self._kl = histogram("audit_kl", "KL of audited answers to full recompute, nats a token.", buckets=_KL)
        corpus = ["tenant", "corpus"]
        words = "Whether audits agree with the quality that is asked for: 0 if it is not kept."
        self._kept = gauge("promise_kept", words, labelnames=corpus)
        words = "of audited answers with a requested quality: mean, 95 % interval, target."
        self._kl_bounds = gauge("promised_kl", f"KL {words}", labelnames=[*corpus, "bound"])
        self._flip_bounds = gauge("promised_flips", f"Share of flips {words}", labelnames=[*corpus, "bound"])
        self._expected = histogram("expected_kl", "Estimates of blended prompts' KL, nats a token.", buckets=_KL)
        self._http = counter("http_requests", "Requests by route and status.", labelnames=["path", "status"])
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def started(self, started: Started, seconds: float) -> None:
        """The first token came so many seconds after the request."""
        figures = started.figures
        self._ttft.observe(seconds)
        self._queue.observe(figures.waited_s)
        self._prompt.inc(figures.rows)
        self._rows.inc(figures.rows)
        self._computed.inc(figures.rows_computed)
        self._reused.inc(figures.rows_reused)
        self._moved.inc(figures.rows_moved)
        self._hits += figures.hits
        self._misses.inc(figures.chunks - figures.hits)
        self._loaded.inc(figures.bytes_loaded)
        self._damaged.inc(len(started.problems))
        for part in figures.not_reused:
            self._not_reused.labels(part.reason).inc(part.tokens)
        if figures.quality is not None:
            self._expected.observe(figures.quality["kl"] or 0.0)
        if figures.reason not in ("", IN_MEMORY, BLENDED_BEFORE):
            self._fallbacks.labels(self._bounded(figures.reason)).inc()
        elif not figures.reason and figures.method == "blend":
            self._blended.inc()

    def gap(self, seconds: float) -> None:
        """A token came so many seconds after the one before it."""
        self._gap.observe(seconds)

    def finished(self, reason: EndReason, tokens: int, seconds: float) -> None:
        """An answer ended so many seconds after its request."""
        self._generated.inc(tokens)
        self._success.labels(reason).inc()
        self._whole.observe(seconds)

    def checked(self, check: Check) -> None:
        """An answer was compared with full recompute, because the request wanted that."""
        result = {True: "verified", False: "different", None: "not compared"}[check.verified]
        self._checks.labels(result).inc()

    def audited(self, audit: Audit) -> None:
        """An answer was audited."""
        self._audited.inc()
        self._flipped.inc(audit.flipped)
        self._kl.observe(audit.kl)
        if audit.promise is not None:
            where = audit.tenant, audit.corpus
            self._kept.labels(*where).set(audit.promise.kept)
            for gauge, bounds in ((self._kl_bounds, audit.promise.kl), (self._flip_bounds, audit.promise.flips)):
                for name in ("mean", "low", "high", "target") if bounds else ():
                    gauge.labels(*where, name).set(getattr(bounds, name))

    def refused(self, kind: str) -> None:
        """Count a failed request by its error code."""
        self._errors.labels(kind).inc()

    def responded(self, route: str, status: int) -> None:
        """Count a response. route: the application's pattern, never the client's path."""
        self._http.labels(route, str(status)).inc()

    def page(self, stats: EngineStats | None = None, stores: StoreFigures | None = None) -> bytes:
        """All metrics in Prometheus' text format. stats: of the engine, if there is one yet."""
        self._stores = stores or StoreFigures()
        self._chunks.set(self._stores.memory.nbytes if self._stores.memory else 0)
        if stats is not None:
            self._running.set(stats.running)
            self._waiting.set(stats.waiting)
            self._kv.set(stats.kv_bytes / max(1, stats.kv_budget))
            self._prefixes.set(stats.prefix_bytes)
            self._encoding.set(stats.encoding)
            self._prefix_evictions = stats.prefix_evictions
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Hits and evictions by tier."""
        memory, lookups, evictions = self._stores
        hits = {"store": memory.misses, "memory": memory.hits} if memory else {"store": self._hits, "memory": 0}
        yield _by_tier("chunk_hits", "Chunks whose cache was there, by where.", hits)
        evicted = {"memory": memory.evictions if memory else 0, "store": evictions, "prefixes": self._prefix_evictions}
        yield _by_tier("evictions", "What had to go for want of room: chunk caches, or how prompts begin.", evicted)
        if lookups is not None:
            where = {
                "disk": lookups.local,
                "hot": lookups.hot,
                "far": lookups.far,
                "none": lookups.missing,
            }
            yield _by_tier(
                "store_lookups", "Entries looked for in the tiers of a shared store, by where they were.", where
            )
            words = "Bytes that came from other machines."
            yield CounterMetricFamily("kvblend_store_fetched_bytes", words, lookups.fetched_bytes)

    def _bounded(self, reason: str) -> str:
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"


_Kind = TypeVar("_Kind", Gauge, Counter, Histogram)


def _made(kind: type[_Kind], registry: CollectorRegistry, name: str, words: str, **options: Any) -> _Kind:
    return kind(f"kvblend_{name}", words, registry=registry, **options)


def _by_tier(name: str, words: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvblend_{name}", words, labels=["tier"])
    for tier, count in counts.items():
        family.add_metric([tier], count)
    return family
