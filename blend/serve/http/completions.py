"""POST /v1/chat/completions and /v1/completions: from the body to a whole answer or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import codecs
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from anyio import to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from blend.errors import ContextLengthError
from blend.limits import json_text
from blend.serve.failures import log_error
from blend.serve.http.bodies import (
    CORPUS_CODES,
    ChatBody,
    CommonBody,
    CompletionBody,
    ModelNames,
    StreamOptions,
    read_body,
    requests_of,
)
from blend.serve.http.errors import GONE, ApiError, ended_early, failure_of, json_response
from blend.serve.http.requests import AppState, admitted, entry_of, state_of
from blend.serve.http.tracing import LogEntry
from blend.serve.types import (
    Check,
    Event,
    Failed,
    Finished,
    OnEvent,
    Output,
    QueueFullError,
    Started,
    Token,
    ToolCall,
    TopToken,
)

if TYPE_CHECKING:
    from blend.serve.service import Service


BodyT = TypeVar("BodyT", bound=CommonBody)
Json = dict[str, Any]
_Characters = codecs.getincrementaldecoder("utf-8")
_LEAST = -9999.0  # OpenAI's value for a probability of 0; JSON has no infinity
_KEEP_ALIVE = b": keep-alive\n\n"


async def chat(request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await answer(request, ChatBody, ChatReply)


async def text(request: HttpRequest) -> Response:
    """Continue a text."""
    return await answer(request, CompletionBody, TextReply)


async def answer(request: HttpRequest, kind: type[BodyT], make_reply: Callable[[BodyT, str], Reply]) -> Response:
    """Answer a request whose body is of this kind. make_reply: called with a body and the model's name."""
    state, tenant = state_of(request), admitted(request)
    service = state.require_service()
    body, channel = await _accept(request, kind, service, tenant)
    try:
        reply = make_reply(body, service.model)
        if body.stream:
            # The response starts with the first event: before it, a failure can still set the HTTP status.
            first = await channel.next(state.limits.keep_alive_s)
            if first is not None and (failure := failure_in(first)):
                raise failure
            return EventStream(channel, _parts(channel, first, reply, entry_of(request), state.limits.keep_alive_s))
        found = await channel.collect()
    except BaseException:
        channel.close()
        raise
    channel.close()
    return json_response(reply.whole(*found))


async def _accept(request: HttpRequest, kind: type[BodyT], service: Service, tenant: str) -> tuple[BodyT, EventChannel]:
    """Receive a question and submit it. Its body counts towards the budget until it is a prompt."""
    state = state_of(request)
    with state.bodies.receiving(request, state.limits.body_bytes, state.limits.body_s) as received:
        raw = await received.body()
        channel = EventChannel(request)
        submit = partial(_submit, raw, kind, service, state, tenant, channel)
        try:
            async with state.share(tenant):
                return await to_thread.run_sync(submit, limiter=state.questions), channel
        except BaseException:
            channel.close()
            raise


def _submit(
    raw: bytes, kind: type[BodyT], service: Service, state: AppState, tenant: str, channel: EventChannel
) -> BodyT:
    """Parse, check and submit, in a worker thread: all of it may take a while."""
    state.require_service()  # the body may have taken a while
    channel.require()
    body = read_body(raw, kind, state.limits)
    try:
        requests = requests_of(
            body.completion(), ModelNames(service.model, tenant, service.corpora(tenant)), state.limits
        )
    except ApiError as error:
        if error.code in CORPUS_CODES:  # which corpora exist is unknown while the store is unreachable
            service.require_store(tenant)
        raise
    joined = JoinedPrompts(len(requests), requests[0].sampling.n, channel.send)
    try:
        for number, one in enumerate(requests):
            request = replace(one, arrived=channel.begun, cancelled=channel.cancelled)
            service.submit(request, partial(joined.send, number), partial(channel.require, request.deadline_s))
    except QueueFullError:
        state.require_service()  # it may be closed, not full
        raise
    except ContextLengthError as error:
        failure = failure_of(error)
        failure.param = kind.asks
        raise failure from error
    channel.accepted()
    return body


class JoinedPrompts:
    """Joins the events of several prompts into those of one request. Threads may share it.

    prompts: how many. answers: to each; answer i to prompt p becomes answer `p * answers + i`. The first failure ends all.
    """

    def __init__(self, prompts: int, answers: int, send: OnEvent) -> None:
        self._going, self._answers, self._send = prompts, answers, send
        self._lock = threading.Lock()

    def send(self, prompt: int, event: Event) -> None:
        """Pass on an event of this prompt."""
        with self._lock:
            if not self._going:
                return
            if not isinstance(event, Failed):
                event = event._replace(answer=prompt * self._answers + event.answer)
            if failure_in(event):
                self._going = 0
            elif isinstance(event, Finished) and event.last:
                self._going -= 1
                event = event._replace(last=not self._going)
            self._send(event)


class EventChannel:
    """Carries the events of one request from the engine's threads to the event loop; a disconnect cancels the request.

    request: HTTP's, with its body already read. cancelled: of the service's request. `send` and `accepted` are for other
    threads; the rest is for the event loop.
    """

    def __init__(self, request: HttpRequest) -> None:
        self._request, self._entry = request, entry_of(request)
        self._metrics, self._tracing = state_of(request).metrics, state_of(request).tracing
        self.begun = time.monotonic()  # when the request came
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._started = list[Started]()
        self._tokens = Counter[int]()  # of each running answer
        self._token_at: dict[int, float] = {}
        self._watch = asyncio.create_task(self._until_disconnected(request.receive))

    def send(self, event: Event) -> None:
        """Pass an event on."""
        self._count(event)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def require(self, deadline_s: float | None = None) -> None:
        """Raise `ApiError` if the client has left or the deadline has passed."""
        if self.cancelled.is_set():
            raise ended_early("cancelled")
        if deadline_s is not None and time.monotonic() - self.begun > deadline_s:
            raise ended_early("deadline")

    def accepted(self) -> None:
        """Note that the service has accepted the request."""
        self._entry.accepted = time.monotonic()

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event, `Finished("cancelled")` when the client has left; None if none comes in `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def collect(self) -> tuple[list[Started], list[Output], list[Finished]]:
        """All answers, whole. Raises `ApiError` if they failed."""
        outputs, ends, going = list[Output](), dict[int, Finished](), True
        while going:
            event = await self._queue.get()
            if failure := failure_in(event):
                raise failure
            if isinstance(event, Output):
                outputs.append(event)
            elif isinstance(event, Finished):
                ends[event.answer], going = event, not event.last
        started = sorted(self._started, key=lambda one: one.answer)
        return started, outputs, [end for _, end in sorted(ends.items())]

    def close(self) -> None:
        """Cancel what has not been answered, and export the request's spans. Later calls do nothing."""
        self.cancelled.set()
        self._watch.cancel()
        if self._tracing is not None:
            entry = self._entry
            entry.outcome = entry.outcome or ("cancelled" if entry.accepted else "refused")
            entry.ended = entry.ended or time.monotonic()
            self._tracing.record(entry, self._request.headers)
            self._tracing = None

    async def _until_disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(Finished("cancelled"))
        self.cancelled.set()

    def _count(self, event: Event) -> None:
        now, entry = time.monotonic(), self._entry
        seconds = now - self.begun
        if isinstance(event, Started):
            if not self._started:
                entry.first, entry.ttft_s, entry.figures = now, seconds, event.figures
            self._started.append(event)
            self._metrics.started(event, seconds)
        elif isinstance(event, Output):
            for token in event.tokens:
                if event.answer in self._token_at:
                    self._metrics.gap(token.at - self._token_at[event.answer])
                self._token_at[event.answer] = token.at
            entry.tokens += len(event.tokens)
            self._tokens[event.answer] += len(event.tokens)
        elif isinstance(event, Finished):
            entry.outcome, entry.ended = event.reason, now
            if event.check is not None:
                self._metrics.checked(event.check)
                return
            tokens = self._tokens.total() if event.last else self._tokens.pop(event.answer)
            self._metrics.finished(event.reason, tokens, seconds)
        else:
            entry.outcome, entry.ended = "failed", now
            if failure_of(event.error).status >= 500:
                log_error(event.error, entry.id)


def failure_in(event: Event) -> ApiError | None:
    """The error for the client if this event ends an answer early; else None."""
    if isinstance(event, Failed):
        return failure_of(event.error)
    if isinstance(event, Finished) and event.reason not in ("stop", "length"):
        return ended_early(event.reason)
    return None


class EventStream(StreamingResponse):
    """An answer as server-sent events. The channel watches for a disconnect, also before the stream begins."""

    def __init__(self, channel: EventChannel, parts: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(parts, headers=headers, media_type="text/event-stream")
        self._channel = channel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends or the client leaves."""
        try:
            await self.stream_response(send)
        finally:
            self._channel.close()


async def _parts(
    channel: EventChannel, event: Event | None, reply: Reply, entry: LogEntry, keep_alive_s: float
) -> AsyncIterator[bytes]:
    """The bytes of the answer from this event on; None means that no event came for `keep_alive_s`."""
    while not (isinstance(event, Failed) or (isinstance(event, Finished) and event.last)):
        if event is None:
            yield _KEEP_ALIVE
        else:
            for chunk in reply.chunks(event):
                yield reply.encoded(chunk)
        event = await channel.next(keep_alive_s)
    channel.close()  # now, so that its spans are there when the client has the last byte
    if failure := failure_in(event):
        entry.failed(failure.status, failure.code)
        if failure.status == GONE:
            return
        yield reply.encoded(reply.failed(failure))
    else:
        for chunk in reply.chunks(event):
            yield reply.encoded(chunk)
    yield reply.end


def event_data(document: Json) -> bytes:
    """A server-sent event without a name."""
    return f"data: {json_text(document, allow_nan=False)}\n\n".encode()


class Reply(ABC):
    """The answers to one request as JSON, whole or in chunks. end: the last bytes of a stream."""

    end = b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, started: Sequence[Started], outputs: Sequence[Output], ends: Sequence[Finished]) -> Json:
        """All answers in one piece. started: of the prompts in order. ends: of the answers in order."""

    @abstractmethod
    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""

    def encoded(self, chunk: Json) -> bytes:
        """A chunk as it is sent."""
        return event_data(chunk)

    def failed(self, failure: ApiError) -> Json:
        """The last chunk of an answer that fails."""
        return failure.document


class CompletionReply(Reply):
    """Replies of the two endpoints of completions."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: ChatBody | CompletionBody, model: str) -> None:
        identifier = f"{self.prefix}-{uuid4().hex}"
        self._common = {"id": identifier, "created": int(time.time()), "model": body.model or model}
        self.logprobs = body.wanted_logprobs is not None
        self._answers = body.n or 1  # to each prompt
        self._options = body.stream_options or StreamOptions()
        self._prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
        self._started = list[Started]()
        self._count = self._thought = 0  # tokens of all answers so far; how many of them are thoughts
        self._calls = Counter[int]()  # of each answer so far

    def whole(self, started: Sequence[Started], outputs: Sequence[Output], ends: Sequence[Finished]) -> Json:
        """All answers in one piece. started: of the prompts in order. ends: of the answers in order."""
        choices = [self._choice([one for one in outputs if one.answer == end.answer], end) for end in ends]
        thought = sum(len(one.tokens) for one in outputs if one.thoughts)
        used = usage(started, sum(len(one.tokens) for one in outputs), thought)
        whole = {**self._head(self.whole_object, choices), "usage": used}
        for one in started:
            (whole if self._prompts == 1 else choices[one.answer])["kvblend"] = figures_of(one)
        for end in ends:
            if end.check is not None:
                whole["kvblend"]["check"] = check_of(end.check)
        return whole

    def _choice(self, outputs: Sequence[Output], end: Finished) -> Json:
        """One answer. outputs: its own."""
        thoughts = "".join(one.text for one in outputs if one.thoughts)
        outputs = [one for one in outputs if not one.thoughts]
        text, tokens = "".join(one.text for one in outputs), [token for one in outputs for token in one.tokens]
        calls = [call for one in outputs for call in one.calls]
        reason, logprobs = self._reason(end, len(calls)), self._tokens(tokens, end.answer)
        content = self._content(text, calls, thoughts)
        return {"index": end.answer, **content, "finish_reason": reason, "logprobs": logprobs}

    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""
        if isinstance(event, Started):
            self._started.append(event)
            for index in range(self._answers):
                more = {} if index else {"kvblend": figures_of(event)}
                yield {**self._chunk(event.answer + index, self._piece("", first=True)), **more}
        elif isinstance(event, Output):
            self._count += len(event.tokens)
            if event.thoughts:
                self._thought += len(event.tokens)
                if event.text:
                    yield self._chunk(event.answer, {"delta": {"reasoning": event.text}})
            elif event.text or event.calls or self.logprobs:
                piece = self._called(event) if event.calls else self._piece(event.text)
                yield self._chunk(event.answer, {**piece, "logprobs": self._tokens(event.tokens, event.answer)})
        elif isinstance(event, Finished):
            if event.check is None:
                reason = self._reason(event, self._calls[event.answer])
                yield self._chunk(event.answer, {**self._piece(None), "finish_reason": reason})
            else:
                unused = {"usage": None} if self._options.include_usage else {}
                yield {**self._head(self.chunk_object, []), **unused, "kvblend": {"check": check_of(event.check)}}
            if event.last and self._options.include_usage:
                used = usage(self._started, self._count, self._thought)
                yield {**self._common, "object": self.chunk_object, "choices": [], "usage": used}

    def _chunk(self, index: int, choice: Json) -> Json:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        chunk = self._head(self.chunk_object, [choice])
        if self._options.include_usage:
            every = self._options.continuous_usage_stats
            chunk["usage"] = usage(self._started, self._count, self._thought) if every else None
        return chunk

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {**self._common, "object": kind, "choices": choices}

    def _tokens(self, tokens: Sequence[Token], index: int) -> Json | None:
        return self._logprobs(tokens, index) if self.logprobs else None

    def _called(self, output: Output) -> Json:
        """The part of a stream's chunk that holds the calls."""
        begin = self._calls[output.answer]
        self._calls[output.answer] += len(output.calls)
        return {"delta": {"tool_calls": [{"index": n, **call_of(one)} for n, one in enumerate(output.calls, begin)]}}

    @staticmethod
    def _reason(finished: Finished, calls: int) -> str:
        return "tool_calls" if calls and finished.reason == "stop" else finished.reason

    @abstractmethod
    def _content(self, text: str, calls: Sequence[ToolCall], thoughts: str) -> Json: ...

    @abstractmethod
    def _piece(self, text: str | None, *, first: bool = False) -> Json: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[Token], index: int) -> Json: ...


class ChatReply(CompletionReply):
    """Replies of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, text: str, calls: Sequence[ToolCall], thoughts: str) -> Json:
        called = {"tool_calls": [call_of(one) for one in calls]} if calls else {}
        thought = {"reasoning": thoughts} if thoughts else {}
        content = None if calls and not text else text
        return {"message": {"role": "assistant", "content": content, "refusal": None, **thought, **called}}

    def _piece(self, text: str | None, *, first: bool = False) -> Json:
        role = {"role": "assistant"} if first else {}
        return {"delta": role if text is None else {**role, "content": text}}

    def _logprobs(self, tokens: Sequence[Token], index: int) -> Json:
        return {"content": logprobs_of(tokens), "refusal": None}


class TextReply(CompletionReply):
    """Replies of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, model: str) -> None:
        super().__init__(body, model)
        answers = self._answers * self._prompts
        self._offsets = [0] * answers  # characters of each answer so far
        self._decoders = [_Characters("replace") for _ in range(answers)]  # bytes of an incomplete one

    def _content(self, text: str, calls: Sequence[ToolCall], thoughts: str) -> Json:
        return {"text": text}

    def _piece(self, text: str | None, *, first: bool = False) -> Json:
        return {"text": text or ""}

    def _logprobs(self, tokens: Sequence[Token], index: int) -> Json:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(token.raw))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def call_of(call: ToolCall) -> Json:
    """A call in OpenAI's fields."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_of(tokens: Sequence[Token]) -> list[Json]:
    """Tokens with their log-probabilities and alternatives, in OpenAI's fields."""
    return [{**_logprob(token), "top_logprobs": [_logprob(one) for one in token.top]} for token in tokens]


def _logprob(token: Token | TopToken) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def usage(started: Sequence[Started], completion_tokens: int, thought: int = 0) -> Json:
    """Tokens of prompts and answers. thought: how many of the answers' tokens are thoughts."""
    rows = sum(one.figures.rows for one in started)
    return {
        "prompt_tokens": rows,
        "completion_tokens": completion_tokens,
        "total_tokens": rows + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.figures.cached_tokens for one in started)},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def figures_of(started: Started) -> Json:
    """The field `kvblend` of a reply: sources, figures, and the trace if requested."""
    figures = {**started.figures._asdict(), "stages": dict(started.figures.stages)}
    found: Json = {"sources": [source._asdict() for source in started.sources], "figures": figures}
    if started.trace:
        found["trace"] = [token._asdict() for token in started.trace]
    return _plain(found)  # type: ignore[no-any-return]


def check_of(check: Check) -> Json:
    """A check as replies show it."""
    return {**check._asdict(), "calls": [call_of(one) for one in check.calls]}


def _top(token: Token) -> dict[str, float]:
    """The log-probabilities of the likeliest tokens and of the chosen one, by their text."""
    return {one.text: _finite(one.logprob) for one in token.top} | {token.text: _finite(token.logprob)}


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
