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

from blend.serve.events import BLENDED_BEFORE, IN_MEMORY, Audit, Check, EndReason, EngineStats, Started
from blend.store.backend import TierHits
from blend.store.pool import MemoryStats

if TYPE_CHECKING:
    from blend.store import ChunkStore

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The media type of `Metrics.page`."""
_MOST_REASONS = 32  # bounds the label
# Buckets in seconds: before an answer, between two tokens, and of a whole answer.
_WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_KL = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_HISTOGRAMS = {
    "request_queue_time_seconds": ("From arrival to when work on it began.", _WAITS),
    "time_to_first_token_seconds": ("From arrival to the first token.", _WAITS),
    "inter_token_latency_seconds": ("Between two tokens of one answer.", _GAP),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _WHOLE),
    "audit_kl": ("KL of audited answers to full recompute, nats a token.", _KL),
    "expected_kl": ("Estimates of blended prompts' KL, nats a token.", _KL),
}
_GAUGES = {
    "num_requests_running": "Requests that are being computed, each with all its answers.",
    "num_requests_waiting": "Prompts that wait for room.",
    "kv_cache_usage_perc": "Share of the KV memory that is reserved; 1 is all of it.",
    "prefix_bytes": "KV of how earlier prompts began, in memory.",
    "chunk_memory_bytes": "Chunk caches in memory, those in use included.",
    "num_chunk_caches_waiting": "Chunk caches that are still to be computed.",
    "promise_kept": "Whether audits agree with the quality that is asked for: 0 if it is not kept.",
    "promised_kl": "KL of audited answers with a requested quality: mean, 95 % interval, target.",
    "promised_flips": "Share of flips of audited answers with a requested quality: mean, 95 % interval, target.",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "rows_prompt": "Rows of prompts.",
    "rows_recomputed": "Rows of prompts that were computed in every layer.",
    "prefix_rows_reused": "Rows taken over from earlier prompts that begin alike.",
    "rows_moved": "Rows of earlier prompts' text at other places; some of these were computed.",
    "rows_shared": "Rows of text that requests in flight brought together, from caches that one of them computed.",
    "rows_ahead": "Rows of such caches that requests computed, apart from their prompts.",
    "chunk_misses": "Chunks that had to be computed.",
    "bytes_loaded": "Bytes of chunk caches read.",
    "damaged_entries": "Entries of the store that were found damaged.",
    "prompts_blended": "Prompts that were blended.",
    "generation_tokens": "Tokens of answers.",
    "audited_answers": "Answers compared with full recompute in idle time.",
    "audit_flips": "Audited answers of which full recompute says something else.",
    "fallbacks": "Prompts for which nothing was blended, by why.",
    "not_reused_tokens": "Tokens of prompts that were computed though text might be reused, by why.",
    "errors": "Requests that failed, by kind of error.",
    "request_success": "Answers that ended, by how.",
    "checks": "Answers compared with full recompute on request.",
    "http_requests": "Requests by route and status.",
}
_LABELS = {
    "promise_kept": ["tenant", "corpus"],
    "promised_kl": ["tenant", "corpus", "bound"],
    "promised_flips": ["tenant", "corpus", "bound"],
    "fallbacks": ["reason"],
    "not_reused_tokens": ["reason"],
    "errors": ["kind"],
    "request_success": ["finished_reason"],
    "checks": ["result"],
    "http_requests": ["path", "status"],
}


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
        registry = CollectorRegistry()
        self.registry = registry
        self._hits = 0
        self._prefix_evictions = 0
        self._stores = StoreFigures()
        self._reasons: set[str] = set()
        self._histograms = {
            name: Histogram(f"kvblend_{name}", words, registry=registry, buckets=buckets)
            for name, (words, buckets) in _HISTOGRAMS.items()
        }
        self._gauges = {
            name: Gauge(f"kvblend_{name}", words, _LABELS.get(name, ()), registry=registry)
            for name, words in _GAUGES.items()
        }
        self._counters = {
            name: Counter(f"kvblend_{name}", words, _LABELS.get(name, ()), registry=registry)
            for name, words in _COUNTERS.items()
        }
        registry.register(self)
        ProcessCollector(registry=registry)

    def started(self, started: Started, seconds: float) -> None:
        """The first token came so many seconds after the request."""
        figures = started.figures
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._histograms["request_queue_time_seconds"].observe(figures.waited_s)
        if figures.quality is not None:
            self._histograms["expected_kl"].observe(figures.quality["kl"] or 0.0)
        is_whole = figures.reason in ("", IN_MEMORY, BLENDED_BEFORE)
        counts = {
            "prompt_tokens": figures.rows,
            "rows_prompt": figures.rows,
            "rows_recomputed": figures.rows_computed,
            "prefix_rows_reused": figures.rows_reused,
            "rows_moved": figures.rows_moved,
            "rows_shared": figures.rows_shared,
            "rows_ahead": figures.rows_ahead,
            "chunk_misses": figures.chunks - figures.hits,
            "bytes_loaded": figures.bytes_loaded,
            "damaged_entries": len(started.problems),
            "prompts_blended": not figures.reason and figures.method == "blend",
        }
        for name, count in counts.items():
            self._counters[name].inc(count)
        self._hits += figures.hits
        for part in figures.not_reused:
            self._count("not_reused_tokens", part.reason, by=part.tokens)
        if not is_whole:
            self._count("fallbacks", self._bounded(figures.reason))

    def gap(self, seconds: float) -> None:
        """A token came so many seconds after the one before it."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def finished(self, reason: EndReason, tokens: int, seconds: float) -> None:
        """An answer ended so many seconds after its request."""
        self._counters["generation_tokens"].inc(tokens)
        self._count("request_success", reason)
        self._histograms["e2e_request_latency_seconds"].observe(seconds)

    def checked(self, check: Check) -> None:
        """An answer was compared with full recompute, because the request wanted that."""
        self._count("checks", {True: "verified", False: "different", None: "not compared"}[check.verified])

    def audited(self, audit: Audit) -> None:
        """An answer was audited."""
        self._counters["audited_answers"].inc()
        self._counters["audit_flips"].inc(audit.flipped)
        if audit.kl is not None:
            self._histograms["audit_kl"].observe(audit.kl)
        if audit.promise is None:
            return
        corpus = (audit.tenant, audit.corpus)
        self._gauges["promise_kept"].labels(*corpus).set(audit.promise.kept)
        for name, figure in audit.promise.figures.items():
            for bound in ("mean", "low", "high", "target"):
                self._gauges[f"promised_{name}"].labels(*corpus, bound).set(getattr(figure, bound))

    def refused(self, kind: str) -> None:
        """Count a failed request by its error code."""
        self._count("errors", kind)

    def responded(self, route: str, status: int) -> None:
        """Count a response. route: the application's pattern, never the client's path."""
        self._count("http_requests", route, str(status))

    def page(self, stats: EngineStats | None = None, stores: StoreFigures | None = None) -> bytes:
        """All metrics in Prometheus' text format. stats: of the engine, if there is one yet."""
        self._stores = stores or StoreFigures()
        gauges: dict[str, float] = {"chunk_memory_bytes": self._stores.memory.nbytes if self._stores.memory else 0}
        if stats is not None:
            gauges |= {
                "num_requests_running": stats.running,
                "num_requests_waiting": stats.waiting,
                "kv_cache_usage_perc": stats.kv_bytes / max(1, stats.kv_budget),
                "prefix_bytes": stats.prefix_bytes,
                "num_chunk_caches_waiting": stats.encoding,
            }
            self._prefix_evictions = stats.prefix_evictions
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Hits and evictions by tier."""
        memory, lookups, evictions = self._stores
        hits = {"store": memory.misses, "memory": memory.hits} if memory else {"store": self._hits, "memory": 0}
        yield _by_tier("chunk_hits", "Chunks whose cache was there, by where.", hits)
        evicted = {"memory": memory.evictions if memory else 0, "store": evictions, "prefixes": self._prefix_evictions}
        yield _by_tier("evictions", "What had to go for want of room: chunk caches, or how prompts begin.", evicted)
        if lookups is not None:
            where = {"disk": lookups.local, "hot": lookups.hot, "far": lookups.far, "none": lookups.missing}
            words = "Entries looked for in the tiers of a shared store, by where they were."
            yield _by_tier("store_lookups", words, where)
            words = "Bytes that came from other machines."
            yield CounterMetricFamily("kvblend_store_fetched_bytes", words, lookups.fetched_bytes)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counters[name].labels(*labels).inc(by)

    def _bounded(self, reason: str) -> str:
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"


def _by_tier(name: str, words: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvblend_{name}", words, labels=["tier"])
    for tier, count in counts.items():
        family.add_metric([tier], count)
    return family
