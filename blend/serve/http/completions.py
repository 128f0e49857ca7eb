"""POST /v1/chat/completions and /v1/completions: from the body to a whole answer or a stream of server-sent events."""

from __future__ import annotations

import codecs
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from blend.limits import finite, json_text
from blend.serve.events import Check, Event, Failed, Finished, Output, Started, Token, TopToken
from blend.serve.http.bodies import ChatBody, CommonBody, CompletionBody, StreamOptions
from blend.serve.http.errors import GONE, ApiError, json_response
from blend.serve.http.requests import admitted, entry_of, state_of
from blend.serve.http.submission import EventChannel, failure_in, submit
from blend.serve.http.tracing import LogEntry
from blend.serve.request import ToolCall

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


async def answer(
    request: HttpRequest,
    kind: type[BodyT],
    make_reply: Callable[[BodyT, str], Reply],
) -> Response:
    """Answer a request whose body is of this kind. make_reply: called with a body and the model's name."""
    state = state_of(request)
    tenant = admitted(request)
    service = state.require_service()
    body, channel = await submit(request, kind, service, tenant)
    try:
        reply = make_reply(body, service.model)
        if body.stream:
            # The response starts with the first event: before it, a failure can still set the HTTP status.
            first = await channel.next(state.limits.keep_alive_s)
            if first is not None and (failure := failure_in(first)):
                raise failure
            return EventStream(channel, _parts(channel, first, reply, entry_of(request), state.limits.keep_alive_s))
        collected = await channel.collect()
    except BaseException:
        channel.close()
        raise
    channel.close()
    return json_response(reply.whole(*collected))


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
    channel: EventChannel,
    event: Event | None,
    reply: Reply,
    entry: LogEntry,
    keep_alive_s: float,
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

    def __init__(self) -> None:
        self._started = list[Started]()
        self._tokens = self._thought = 0  # of all answers so far; how many of them are thoughts

    @abstractmethod
    def whole(
        self,
        started: Sequence[Started],
        outputs: Sequence[Output],
        ends: Sequence[Finished],
    ) -> Json:
        """All answers in one piece. started: of the prompts in order. ends: of the answers in order."""

    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""
        if isinstance(event, Started):
            self._started.append(event)
            yield from self._at_start(event)
        elif isinstance(event, Output):
            self._count(event)
            yield from self._at_output(event)
        elif isinstance(event, Finished):
            yield from self._at_end(event)

    @abstractmethod
    def _at_start(self, event: Started) -> Iterator[Json]: ...

    @abstractmethod
    def _at_output(self, event: Output) -> Iterator[Json]: ...

    @abstractmethod
    def _at_end(self, event: Finished) -> Iterator[Json]: ...

    def _count(self, output: Output) -> None:
        self._tokens += len(output.tokens)
        self._thought += len(output.tokens) * output.thoughts

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
        super().__init__()
        identifier = f"{self.prefix}-{uuid4().hex}"
        self._common = {"id": identifier, "created": int(time.time()), "model": body.model or model}
        self.logprobs = body.wanted_logprobs is not None
        self._answers = body.n or 1  # to each prompt
        self._options = body.stream_options or StreamOptions()
        self._prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
        self._calls = Counter[int]()  # of each answer so far

    def whole(
        self,
        started: Sequence[Started],
        outputs: Sequence[Output],
        ends: Sequence[Finished],
    ) -> Json:
        """All answers in one piece. started: of the prompts in order. ends: of the answers in order."""
        self._started += started
        for output in outputs:
            self._count(output)
        choices = list[Json]()
        for end in ends:
            answer_outputs = [output for output in outputs if output.answer == end.answer]
            choices.append(self._choice(answer_outputs, end))
        whole = {**self._head(self.whole_object, choices), "usage": self._usage}
        for prompt in started:
            place = whole if self._prompts == 1 else choices[prompt.answer]
            place["kvblend"] = figures_of(prompt)
        for end in ends:
            if end.check is not None:
                whole["kvblend"]["check"] = check_of(end.check)
        return whole

    def _choice(self, outputs: Sequence[Output], end: Finished) -> Json:
        """One answer. outputs: its own."""
        thoughts = "".join(output.text for output in outputs if output.thoughts)
        outputs = [output for output in outputs if not output.thoughts]
        text = "".join(output.text for output in outputs)
        tokens = [token for output in outputs for token in output.tokens]
        calls = [call for output in outputs for call in output.calls]
        reason = self._reason(end, len(calls))
        logprobs = self._logprobs_of(tokens, end.answer)
        content = self._content(text, calls, thoughts)
        return {"index": end.answer, **content, "finish_reason": reason, "logprobs": logprobs}

    def _at_start(self, event: Started) -> Iterator[Json]:
        for index in range(self._answers):
            extra = {} if index else {"kvblend": figures_of(event)}
            yield {**self._chunk(event.answer + index, self._piece("", first=True)), **extra}

    def _at_output(self, event: Output) -> Iterator[Json]:
        if event.thoughts and event.text:
            yield self._chunk(event.answer, {"delta": {"reasoning": event.text}})
        elif not event.thoughts and (event.text or event.calls or self.logprobs):
            piece = self._called(event) if event.calls else self._piece(event.text)
            logprobs = self._logprobs_of(event.tokens, event.answer)
            yield self._chunk(event.answer, {**piece, "logprobs": logprobs})

    def _at_end(self, event: Finished) -> Iterator[Json]:
        if event.check is None:
            reason = self._reason(event, self._calls[event.answer])
            yield self._chunk(event.answer, {**self._piece(None), "finish_reason": reason})
        else:
            unused = {"usage": None} if self._options.include_usage else {}
            check = {"check": check_of(event.check)}
            yield {**self._head(self.chunk_object, []), **unused, "kvblend": check}
        if event.last and self._options.include_usage:
            yield {**self._head(self.chunk_object, []), "usage": self._usage}

    def _chunk(self, index: int, choice: Json) -> Json:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        chunk = self._head(self.chunk_object, [choice])
        if self._options.include_usage:
            chunk["usage"] = self._usage if self._options.continuous_usage_stats else None
        return chunk

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {**self._common, "object": kind, "choices": choices}

    def _logprobs_of(self, tokens: Sequence[Token], index: int) -> Json | None:
        return self._logprobs(tokens, index) if self.logprobs else None

    def _called(self, output: Output) -> Json:
        """The part of a stream's chunk that holds the calls."""
        begin = self._calls[output.answer]
        self._calls[output.answer] += len(output.calls)
        calls = [{"index": index, **call_of(call)} for index, call in enumerate(output.calls, begin)]
        return {"delta": {"tool_calls": calls}}

    @staticmethod
    def _reason(finished: Finished, calls: int) -> str:
        return "tool_calls" if calls and finished.reason == "stop" else finished.reason

    @abstractmethod
    def _content(
        self,
        text: str,
        calls: Sequence[ToolCall],
        thoughts: str,
    ) -> Json: ...

    @abstractmethod
    def _piece(self, text: str | None, *, first: bool = False) -> Json: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[Token], index: int) -> Json: ...


class ChatReply(CompletionReply):
    """Replies of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _content(self, text: str, calls: Sequence[ToolCall], thoughts: str) -> Json:
        called = {"tool_calls": [call_of(call) for call in calls]} if calls else {}
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

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

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
    return [{**_logprob(token), "top_logprobs": list(map(_logprob, token.top))} for token in tokens]


def _logprob(token: Token | TopToken) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


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


def _top(token: Token) -> dict[str, float]:
    """The log-probabilities of the likeliest tokens and of the chosen one, by their text."""
    choices: tuple[Token | TopToken, ...] = (*token.top, token)
    return {choice.text: _finite(choice.logprob) for choice in choices}


def _finite(logprob: float | None) -> float:
    logprob = logprob or 0.0
    return logprob if math.isfinite(logprob) else _LEAST
