"""Replies of all protocols: from a body to a whole answer or a stream of server-sent events, and the fields that they share."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from blend.serve.events import Check, Event, Output, Started, Token, TopToken
from blend.serve.http.bodies import CommonBody
from blend.serve.http.errors import ApiError, Json, closing, json_response
from blend.serve.http.state import state_of
from blend.serve.http.submission import EventChannel, failure_in, is_last, submit
from blend.serve.http.tracing import entry_of
from blend.serve.request import ToolCall
from blend.text import finite, json_parts, json_text

BodyT = TypeVar("BodyT", bound=CommonBody)
_MOST_ENTRIES = 2_000  # that a reply is made of in the event loop: some ms
_LEAST = -9999.0  # OpenAI's value for a probability of 0; JSON has no infinity
_HEAD_S = 1.0  # in which a failure can still set the status of a stream
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def answer(request: HttpRequest, kind: type[BodyT], make_reply: Callable[[BodyT, str], Reply]) -> Response:
    """Answer a request whose body is of this kind. make_reply: called with a body and the model's name."""
    state = state_of(request)
    body, channel = await submit(request, kind)
    try:
        reply = make_reply(body, state.require_service().model)
        if body.stream:
            # Before the first event a failure can still set the HTTP status. But clients and proxies wait minutes for a head.
            first = await channel.next(min(_HEAD_S, state.limits.keep_alive_s))
            if first is not None and (failure := failure_in(first)):
                raise failure
            return EventStream(request, channel, first, reply)
        events = await channel.collect()
    except BaseException:
        channel.close()
        raise
    channel.close()
    if _entries(events) < _MOST_ENTRIES:
        return json_response(reply.whole(events))
    return await run_in_threadpool(_long_response, reply, events)


def _entries(events: Sequence[Event]) -> int:
    """How many tokens and alternatives a reply may have."""
    tokens = (token for event in events if isinstance(event, Output) for token in event.tokens)
    return sum(1 + len(token.top) for token in tokens)


def _long_response(reply: Reply, events: Sequence[Event]) -> Response:
    """A whole reply, made beside the event loop in pieces, so that no other stream waits for it."""
    document = "".join(json_parts(reply.whole(events), allow_nan=False))
    return Response(document, media_type="application/json")


class EventStream(StreamingResponse):
    """An answer as server-sent events, from this one on; None means that none has come yet.

    While nothing else is sent, pings are, so that no client and no proxy takes the connection for dead. Some clients count only
    events that are part of an answer: now and then they get one that says nothing. The channel watches for a disconnect, also
    before the stream begins.
    """

    def __init__(self, request: HttpRequest, channel: EventChannel, first: Event | None, reply: Reply) -> None:
        super().__init__(self._parts(first), headers=_HEADERS, media_type="text/event-stream")
        self._entry = entry_of(request)
        self._limits = state_of(request).limits
        self._channel = channel
        self._reply = reply
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends, the client leaves, or the server has no more time to shut down."""
        try:
            await self.stream_response(send)
        except CancelledError:
            if not self._begun:
                raise
            await send({"type": "http.response.body", "body": self._failed(closing()) + self._reply.end})
        finally:
            self._channel.close()

    async def _parts(self, event: Event | None) -> AsyncIterator[bytes]:
        keep_alive_s = self._limits.keep_alive_s
        going = self._begun = True
        now = time.monotonic()
        sent_at = now if event is not None else now - keep_alive_s
        answered_at = now
        while going:
            parts = list[bytes]()
            if event is not None:
                going = not is_last(event)
                if not going:
                    self._channel.close()  # now, so that its spans are there when the client has the last byte
                parts = self._at(event)
            now = time.monotonic()
            if going and not parts and now - answered_at >= self._limits.event_s:
                parts = [self._reply.encoded(chunk) for chunk in self._reply.empty_chunks()]
            if parts:
                answered_at = sent_at = now
            elif going and now - sent_at >= keep_alive_s:
                parts = [self._reply.ping]
                sent_at = now
            for part in parts:
                yield part
            if going:
                event = await self._channel.next(max(0.0, sent_at + keep_alive_s - time.monotonic()))
        yield self._reply.end

    def _at(self, event: Event) -> list[bytes]:
        """What an event adds to the stream; nothing while a call is being written."""
        if failure := failure_in(event):
            return [self._failed(failure)]
        return [self._reply.encoded(chunk) for chunk in self._reply.chunks(event)]

    def _failed(self, failure: ApiError) -> bytes:
        """The last event of a stream that fails."""
        self._entry.failed(failure.status, failure.code)
        return self._reply.encoded(self._reply.failed(failure))


class Reply(ABC):
    """The answers to one request as JSON, whole or in chunks.

    Attributes:
        end: the last bytes of a stream.
        ping: what a silent stream sends; clients ignore it.

    """

    end = b""
    ping = b": ping\n\n"
    _document: Json  # an answer that grows; `ChatReply` has several

    def __init__(self) -> None:
        self._started = list[Started]()
        self._tokens = self._thought = 0  # of all answers so far; how many of them are thoughts

    def whole(self, events: Sequence[Event]) -> Json:
        """All answers in one piece."""
        for event in events:
            for _chunk in self.chunks(event):
                pass  # the document grows with each
        return self._document

    @abstractmethod
    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""

    @abstractmethod
    def empty_chunks(self) -> Iterator[Json]:
        """Chunks that say nothing, but are part of an answer, and begin it if nothing has. Never behind the last event."""

    def _count(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started.append(event)
        elif isinstance(event, Output):
            self._tokens += len(event.tokens)
            self._thought += len(event.tokens) * event.thoughts

    @property
    def _usage(self) -> Json:
        """Tokens of prompts and answers so far."""
        figures = [prompt.figures for prompt in self._started]
        rows = sum(prompt.rows for prompt in figures)
        return {
            "prompt_tokens": rows,
            "completion_tokens": self._tokens,
            "total_tokens": rows + self._tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in figures)},
            "completion_tokens_details": {"reasoning_tokens": self._thought},
        }

    def encoded(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event, which has its type for a name."""
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        return f"{name}data: {json_text(chunk, allow_nan=False)}\n\n".encode()

    def failed(self, failure: ApiError) -> Json:
        """The last chunk of an answer that fails."""
        return failure.document


def call_of(call: ToolCall) -> Json:
    """A call in OpenAI's fields."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_of(tokens: Sequence[Token]) -> list[Json]:
    """Tokens with their log-probabilities and alternatives, in OpenAI's fields."""
    return [{**_logprob(token), "top_logprobs": list(map(_logprob, token.top))} for token in tokens]


def _logprob(token: Token | TopToken) -> Json:
    return {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.raw)}


def figures_of(started: Started) -> Json:
    """The field `kvblend` of a reply: sources, figures, and the trace if requested."""
    pinned = started.figures.kept
    figures = {
        **started.figures._asdict(),
        "stages": dict(started.figures.stages),
        "not_reused": [part._asdict() for part in started.figures.not_reused],
        "kept": pinned._asdict() if pinned is not None else None,
    }
    reply: Json = {"sources": [source._asdict() for source in started.sources], "figures": figures}
    if started.trace:
        reply["trace"] = [token._asdict() for token in started.trace]
    return finite(reply)  # type: ignore[no-any-return]


def check_of(check: Check) -> Json:
    """A check as replies show it."""
    return {**check._asdict(), "calls": [call_of(call) for call in check.calls]}


def finite_logprob(logprob: float | None) -> float:
    """A log-probability as JSON can say it: OpenAI's value stands for a probability of 0."""
    logprob = logprob or 0.0
    return logprob if math.isfinite(logprob) else _LEAST
