"""OpenTelemetry spans of requests. Imports nothing unless an endpoint is configured.

A request has one span with up to five children: receive (read, validate, retrieve, tokenise), queue, load, prefill, decode.
Loading and prefill alternate by layer; each is shown as its sum. Attributes hold no text of prompts or answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from blend.serve.types import Event, Figures, Finished, Output, Started

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AttributeValue

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NAMES = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
_LOADING = ("load", "reposition")
_COUNTS = ("rows", "rows_computed", "rows_reused", "rows_inexact", "hits", "chunks", "missing", "bytes_loaded")


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether these environment variables name an endpoint."""
    return any(environment.get(name) for name in ENDPOINTS) and environment.get("OTEL_SDK_DISABLED", "") != "true"


def is_installed() -> bool:
    """Whether the extra `[otel]` is installed."""
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.exporter.otlp.proto.http") is not None


def exporting(environment: Mapping[str, str]) -> Tracing:
    """Tracing that exports to the endpoint of the environment, in batches."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Tracing(BatchSpanProcessor(OTLPSpanExporter()), named=any(environment.get(name) for name in _NAMES))


class Tracing:
    """Makes spans for a processor. named: the environment sets the service's name."""

    def __init__(self, processor: SpanProcessor, *, named: bool = False) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({} if named else {"service.name": "kvblend"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("kvblend")

    def begin(self, request: str, headers: Mapping[str, str], begun: float) -> RequestTrace:
        """Start the trace of a request that arrived at `begun` by `time.monotonic`; `traceparent` continues another trace."""
        return RequestTrace(self, request, headers, begun)

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


class RequestTrace:
    """The trace of one request; makes its spans when it ends. Thread-safe."""

    def __init__(self, tracing: Tracing, request: str, headers: Mapping[str, str], begun: float) -> None:
        self._tracing, self._request, self._headers, self._begun = tracing, request, headers, begun
        self._offset = time.time_ns() - time.monotonic_ns()
        self._taken, self._first, self._tokens = 0.0, 0.0, 0
        self._figures: Figures | None = None
        self._ended = threading.Lock()

    def accepted(self) -> None:
        """The service accepted the request."""
        self._taken = time.monotonic()

    def on_event(self, event: Event) -> None:
        """Note an event of the service."""
        if isinstance(event, Started):
            self._first, self._figures = time.monotonic(), event.figures
        elif isinstance(event, Output):
            self._tokens += len(event.tokens)
        else:
            self.end(event.reason if isinstance(event, Finished) else "failed")

    def end(self, outcome: str) -> None:
        """End the trace; later calls do nothing."""
        if not self._ended.acquire(blocking=False):
            return
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, above = time.monotonic(), TraceContextTextMapPropagator().extract(self._headers)
        attributes: dict[str, AttributeValue] = {"kvblend.request": self._request, "kvblend.outcome": outcome}
        attributes |= {"kvblend.completion_tokens": self._tokens, **self._figure_attributes()}
        tracer = self._tracing.tracer
        whole = tracer.start_span("request", above, attributes=attributes, start_time=self._at(self._begun))
        inside, begin = set_span_in_context(whole), self._begun
        for name, end in self._parts(now):
            stop = min(max(begin, end), now)
            tracer.start_span(name, inside, start_time=self._at(begin)).end(self._at(stop))
            begin = stop
        whole.end(self._at(now))

    def _parts(self, now: float) -> list[tuple[str, float]]:
        """The child spans, each with its end."""
        if self._figures is None:
            return [("receive", self._taken), ("queue", now)] if self._taken else [("receive", now)]
        figures, received = self._figures, self._first - self._figures.ttft_s + self._figures.stages.get("prepare", 0.0)
        queue = received + figures.waited_s
        load = queue + sum(figures.stages.get(stage, 0.0) for stage in _LOADING)
        return [("receive", received), ("queue", queue), ("load", load), ("prefill", self._first), ("decode", now)]

    def _figure_attributes(self) -> dict[str, AttributeValue]:
        if (figures := self._figures) is None:
            return {}
        return {f"kvblend.{name}": getattr(figures, name) for name in ("method", "reason", *_COUNTS)}

    def _at(self, seconds: float) -> int:
        """Wall clock, nanoseconds."""
        return self._offset + round(seconds * 1e9)
