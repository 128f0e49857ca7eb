"""POST /v1/chat/completions and /v1/completions: from the body to a whole answer or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import codecs
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import uuid4

from anyio import to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blend.limits import json_text
from blend.serve.failures import log_error
from blend.serve.http.bodies import (
    CORPUS_CODES,
    ChatBody,
    CompletionBody,
    ModelNames,
    StreamOptions,
    read_body,
    request_of,
)
from blend.serve.http.errors import GONE, ApiError, Failure, ended_early, failure_of, json_response
from blend.serve.http.log import LogEntry, entry_of
from blend.serve.http.state import AppState, admitted, limited, receive_all, state_of
from blend.serve.http.tracing import RequestTrace
from blend.serve.metrics import Metrics
from blend.serve.types import Event, Failed, Finished, Handle, Output, QueueFullError, Started, Token

if TYPE_CHECKING:
    from blend.serve.service import Service


Body = ChatBody | CompletionBody
Json = dict[str, Any]
_Characters = codecs.getincrementaldecoder("utf-8")
_LEAST = -9999.0  # OpenAI's value for a probability of 0; JSON has no infinity
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


async def chat(request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await _answer(request, ChatBody)


async def text(request: HttpRequest) -> Response:
    """Continue a text."""
    return await _answer(request, CompletionBody)


async def _answer(request: HttpRequest, kind: type[Body]) -> Response:
    state, tenant, entry = state_of(request), admitted(request), entry_of(request)
    service = state.require_service()
    body, channel = await _accept(request, kind, service, tenant)
    try:
        reply_kind = ChatReply if isinstance(body, ChatBody) else TextReply
        reply = reply_kind(body.model or service.model, logprobs=body.wanted_logprobs is not None)
        if body.stream:
            return await _stream(body, channel, reply, state, entry)
        found = await channel.collect()
    except BaseException:
        channel.close()
        raise
    channel.close()
    if isinstance(found, Failure):
        raise ApiError(found)
    return json_response(reply.whole(*found))


async def _accept(request: HttpRequest, kind: type[Body], service: Service, tenant: str) -> tuple[Body, EventChannel]:
    """Receive a question and submit it. Its body counts towards the budget until it is a prompt."""
    state, entry = state_of(request), entry_of(request)
    with limited(request, state.limits.body_bytes, state.limits.body_s, state.bodies) as receive:
        raw = await receive_all(receive)
        trace = state.tracing.begin(entry.id, request.headers, entry.begun) if state.tracing else None
        channel = EventChannel(request.receive, state.metrics, entry, trace)
        submit = partial(_submit, raw, kind, service, state, tenant, channel)
        try:
            async with state.share(tenant):
                return await to_thread.run_sync(submit, limiter=state.questions), channel
        except BaseException:
            channel.close()
            raise


def _submit(
    raw: bytes, kind: type[Body], service: Service, state: AppState, tenant: str, channel: EventChannel
) -> Body:
    """Parse, check and submit, in a worker thread: all of it may take a while."""
    state.require_service()  # the body may have taken a while
    channel.require()
    body = read_body(raw, kind, state.limits)
    try:
        request = request_of(body, ModelNames(service.model, tenant, service.corpora(tenant)), state.limits)
    except ApiError as error:
        if error.failure.code in CORPUS_CODES:  # which corpora exist is unknown while the store is unreachable
            service.require_store(tenant)
        raise
    request = replace(request, arrived=channel.begun)
    try:
        channel.accepted(service.submit(request, channel.send, partial(channel.require, request.deadline_s)))
    except QueueFullError:
        state.require_service()  # it may be closed, not full
        raise
    return body


async def _stream(body: Body, channel: EventChannel, reply: Reply, state: AppState, entry: LogEntry) -> Response:
    """Start a stream with its first event: until then a failure still has a status of its own."""
    first = await channel.next(state.limits.keep_alive_s)
    if first is not None and (failure := failure_in(first)):
        raise ApiError(failure)
    options = body.stream_options or StreamOptions()
    usage: Literal["last", "every"] | None = None
    if options.include_usage:
        usage = "every" if options.continuous_usage_stats else "last"
    return EventStream(channel, first, reply, entry, keep_alive_s=state.limits.keep_alive_s, usage=usage)


class Disconnected(NamedTuple):
    """The client has closed the connection."""


class EventChannel:
    """Carries the events of one request from the engine's threads to the event loop; a disconnect cancels the request.

    receive: of the connection, its body read. `send` and `accepted` are for other threads; the rest is for the event loop.
    """

    def __init__(self, receive: Receive, metrics: Metrics, entry: LogEntry, trace: RequestTrace | None = None) -> None:
        self._loop, self._metrics, self._entry, self._trace = asyncio.get_running_loop(), metrics, entry, trace
        self.begun = time.monotonic()  # when the request came
        self._queue: asyncio.Queue[Event | Disconnected] = asyncio.Queue()
        self._handle: Handle | None = None
        self._tokens, self._token_at = 0, 0.0
        self._left = False
        self._watch = asyncio.create_task(self._until_disconnected(receive))

    def send(self, event: Event) -> None:
        """Pass an event on."""
        self._count(event)
        if self._trace is not None:
            self._trace.on_event(event)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def require(self, deadline_s: float | None = None) -> None:
        """Raise `ApiError` if the client has left or the deadline has passed."""
        if self._left:
            raise ApiError(ended_early("cancelled"))
        if deadline_s is not None and time.monotonic() - self.begun > deadline_s:
            raise ApiError(ended_early("deadline"))

    def accepted(self, handle: Handle) -> None:
        """The service has accepted the request."""
        self._handle = handle
        if self._trace is not None:
            self._trace.accepted()
        if self._left:
            handle.cancel()

    async def next(self, seconds: float | None = None) -> Event | Disconnected | None:
        """The next event; None if none comes for so long."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def collect(self) -> tuple[Started, list[Output], Finished] | Failure:
        """All events of an answer, or why it failed."""
        started, outputs = None, []
        while True:
            event = await self.next()
            assert event is not None
            if failure := failure_in(event):
                return failure
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Output):
                outputs.append(event)
            elif isinstance(event, Finished):
                assert started is not None
                return started, outputs, event

    def close(self) -> None:
        """Cancel what has not been answered."""
        self._left = True
        if self._trace is not None:
            self._trace.end("cancelled" if self._handle is not None else "refused")
        self._watch.cancel()
        if self._handle is not None:
            self._handle.cancel()

    async def _until_disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._queue.put_nowait(Disconnected())
        if self._handle is not None:
            self._handle.cancel()

    def _count(self, event: Event) -> None:
        seconds = time.monotonic() - self.begun
        if isinstance(event, Started):
            self._entry.ttft_s, self._entry.rows = seconds, event.figures.rows
            self._metrics.started(event, seconds)
        elif isinstance(event, Output):
            for token in event.tokens:
                if self._tokens:
                    self._metrics.gap(token.at - self._token_at)
                self._tokens, self._token_at = self._tokens + 1, token.at
        elif isinstance(event, Finished):
            self._metrics.finished(event.reason, self._tokens, seconds)
        elif failure_of(event.error).status >= 500:
            log_error(event.error, self._entry.id)


def failure_in(event: Event | Disconnected) -> Failure | None:
    """What the client is told if this event ends an answer early; else None."""
    if isinstance(event, Disconnected):
        return ended_early("cancelled")
    if isinstance(event, Failed):
        return failure_of(event.error)
    if isinstance(event, Finished) and event.reason not in ("stop", "length"):
        return ended_early(event.reason)
    return None


class EventStream(Response):
    """An answer as server-sent events.

    Args:
        first: the event that has come already, None if none did for `keep_alive_s`.
        usage: "last" gives it in the last chunk, "every" in all of them.

    """

    media_type = "text/event-stream"

    def __init__(
        self,
        channel: EventChannel,
        first: Event | Disconnected | None,
        reply: Reply,
        entry: LogEntry,
        *,
        keep_alive_s: float,
        usage: Literal["last", "every"] | None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._channel, self._first, self._reply, self._entry = channel, first, reply, entry
        self._keep_alive_s, self._usage = keep_alive_s, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends or the client leaves."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            self._channel.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        event, started, tokens = self._first, None, 0
        while not isinstance(event, Finished | Failed | Disconnected):
            if event is None:
                yield _KEEP_ALIVE
            elif isinstance(event, Started):
                started = event
                yield self._part(self._reply.opening(event), started)
            else:
                tokens += len(event.tokens)
                if event.text or self._reply.logprobs:
                    yield self._part(self._reply.output(event), started, tokens)
            event = await self._channel.next(self._keep_alive_s)
        for part in self._ending(started, event, tokens):
            yield part

    def _ending(self, started: Started | None, event: Finished | Failed | Disconnected, tokens: int) -> list[bytes]:
        if failure := failure_in(event):
            self._entry.failed(failure)
            return [] if failure.status == GONE else [_data(failure.document), _DONE]
        assert isinstance(event, Finished)
        parts = [self._part(self._reply.ending(event), started, tokens)]
        if self._usage and started is not None:
            parts.append(_data(self._reply.last(started, tokens)))
        return [*parts, _DONE]

    def _part(self, chunk: Json, started: Started | None, tokens: int = 0) -> bytes:
        """A chunk; tokens: of the answer so far."""
        if self._usage:
            chunk["usage"] = usage(started, tokens) if self._usage == "every" and started is not None else None
        return _data(chunk)


def _data(document: Json) -> bytes:
    return f"data: {json_text(document, allow_nan=False)}\n\n".encode()


class Reply(ABC):
    """One answer as JSON. model: as the client named it. logprobs: whether the client wants them."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self._common = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}
        self.logprobs = logprobs
        self._offset, self._decoder = 0, _Characters("replace")  # characters so far; bytes of an incomplete one

    def whole(self, started: Started, outputs: Sequence[Output], finished: Finished) -> Json:
        """The answer in one piece."""
        text, tokens = "".join(one.text for one in outputs), [token for one in outputs for token in one.tokens]
        choice = {**self._content(text), "finish_reason": finished.reason, "logprobs": self._tokens(tokens)}
        return {
            **self._head(self.whole_object, choice),
            "usage": usage(started, len(tokens)),
            "kvblend": figures_of(started),
        }

    def opening(self, started: Started) -> Json:
        """The first chunk."""
        return {**self._chunk(self._piece("", first=True)), "kvblend": figures_of(started)}

    def output(self, output: Output) -> Json:
        """A chunk with more of the text."""
        return self._chunk({**self._piece(output.text), "logprobs": self._tokens(output.tokens)})

    def ending(self, finished: Finished) -> Json:
        """The chunk with the reason of the end."""
        return self._chunk({**self._piece(None), "finish_reason": finished.reason})

    def last(self, started: Started, tokens: int) -> Json:
        """The chunk with the usage and no choice."""
        return {**self._common, "object": self.chunk_object, "choices": [], "usage": usage(started, tokens)}

    def _chunk(self, choice: Json) -> Json:
        return self._head(self.chunk_object, {"logprobs": None, "finish_reason": None, **choice})

    def _head(self, kind: str, choice: Json) -> Json:
        return {**self._common, "object": kind, "choices": [{"index": 0, **choice}]}

    def _tokens(self, tokens: Sequence[Token]) -> Json | None:
        return self._logprobs(tokens) if self.logprobs else None

    @abstractmethod
    def _content(self, text: str) -> Json: ...

    @abstractmethod
    def _piece(self, text: str | None, *, first: bool = False) -> Json: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[Token]) -> Json: ...


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str | None, *, first: bool = False) -> Json:
        role = {"role": "assistant"} if first else {}
        return {"delta": role if text is None else {**role, "content": text}}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        content = [
            {
                "token": token.text,
                "logprob": _finite(token.logprob),
                "bytes": list(token.raw),
                "top_logprobs": [
                    {"token": one.text, "logprob": _finite(one.logprob), "bytes": list(one.raw)} for one in token.top
                ],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class TextReply(Reply):
    """Of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _content(self, text: str) -> Json:
        return {"text": text}

    def _piece(self, text: str | None, *, first: bool = False) -> Json:
        return {"text": text or ""}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{one.text: _finite(one.logprob) for one in token.top} for token in tokens],
            "text_offset": offsets,
        }


def usage(started: Started, completion_tokens: int) -> Json:
    """Tokens of prompt and answer."""
    figures = started.figures
    return {
        "prompt_tokens": figures.rows,
        "completion_tokens": completion_tokens,
        "total_tokens": figures.rows + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": figures.cached_tokens},
    }


def figures_of(started: Started) -> Json:
    """The field `kvblend` of a reply: sources, figures, and the trace if requested."""
    figures = {**started.figures._asdict(), "stages": dict(started.figures.stages)}
    found: Json = {"sources": [source._asdict() for source in started.sources], "figures": figures}
    if started.trace:
        found["trace"] = [token._asdict() for token in started.trace]
    return _plain(found)  # type: ignore[no-any-return]


def _finite(logprob: float | None) -> float:
    logprob = logprob or 0.0
    return logprob if math.isfinite(logprob) else _LEAST


def _plain(value: Any) -> Any:
    """JSON has neither infinities nor NaN; they become null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
