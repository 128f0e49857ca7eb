"""POST /v1/chat/completions and /v1/completions: from the body to a whole answer or a stream of server-sent events."""

from __future__ import annotations

import codecs
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from blend.limits import finite, json_text
from blend.serve.events import Check, Event, Finished, Output, Started, Token, TopToken
from blend.serve.http.bodies import CommonBody, CompletionBody, StreamOptions
from blend.serve.http.chat import ChatBody
from blend.serve.http.errors import ApiError, Json, json_response
from blend.serve.http.requests import entry_of, state_of
from blend.serve.http.submission import EventChannel, failure_in, is_last, submit
from blend.serve.request import ToolCall

BodyT = TypeVar("BodyT", bound=CommonBody)
_characters = codecs.getincrementaldecoder("utf-8")
_LEAST = -9999.0  # OpenAI's value for a probability of 0; JSON has no infinity
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def chat(request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await answer(request, ChatBody, ChatReply)


async def text(request: HttpRequest) -> Response:
    """Continue a text."""
    return await answer(request, CompletionBody, TextReply)


async def answer(request: HttpRequest, kind: type[BodyT], make_reply: Callable[[BodyT, str], Reply]) -> Response:
    """Answer a request whose body is of this kind. make_reply: called with a body and the model's name."""
    state = state_of(request)
    body, channel = await submit(request, kind)
    try:
        reply = make_reply(body, state.require_service().model)
        if body.stream:
            # The response starts with the first event: before it, a failure can still set the HTTP status.
            first = await channel.next(state.limits.keep_alive_s)
            if first is not None and (failure := failure_in(first)):
                raise failure
            return EventStream(request, channel, first, reply)
        events = await channel.collect()
    except BaseException:
        channel.close()
        raise
    channel.close()
    return json_response(reply.whole(events))


class EventStream(StreamingResponse):
    """An answer as server-sent events, from this one on; None means that none came for `keep_alive_s`.

    The channel watches for a disconnect, also before the stream begins.
    """

    def __init__(self, request: HttpRequest, channel: EventChannel, first: Event | None, reply: Reply) -> None:
        super().__init__(self._parts(first), headers=_HEADERS, media_type="text/event-stream")
        self._entry = entry_of(request)
        self._keep_alive_s = state_of(request).limits.keep_alive_s
        self._channel = channel
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends or the client leaves."""
        try:
            await self.stream_response(send)
        finally:
            self._channel.close()

    async def _parts(self, event: Event | None) -> AsyncIterator[bytes]:
        reply = self._reply
        going = True
        while going:
            if event is None:
                yield _KEEP_ALIVE
            else:
                going = not is_last(event)
                if not going:
                    self._channel.close()  # now, so that its spans are there when the client has the last byte
                if failure := failure_in(event):
                    self._entry.failed(failure.status, failure.code)
                    yield reply.encoded(reply.failed(failure))
                else:
                    for chunk in reply.chunks(event):
                        yield reply.encoded(chunk)
            if going:
                event = await self._channel.next(self._keep_alive_s)
        yield reply.end


class Reply(ABC):
    """The answers to one request as JSON, whole or in chunks. end: the last bytes of a stream."""

    end = b""
    _document: Json  # an answer that grows; `ChatReply` has several

    def __init__(self) -> None:
        self._started = list[Started]()
        self._tokens = self._thought = 0  # of all answers so far; how many of them are thoughts

    def whole(self, events: Sequence[Event]) -> Json:
        """All answers in one piece."""
        for event in events:
            deque(self.chunks(event), 0)
        return self._document

    @abstractmethod
    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""

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


class ChatReply(Reply):
    """Replies of /v1/chat/completions."""

    end = b"data: [DONE]\n\n"
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody | CompletionBody, model: str) -> None:
        super().__init__()
        identifier = f"{self.prefix}-{uuid4().hex}"
        self._common = {"id": identifier, "created": int(time.time()), "model": body.model or model}
        self._with_logprobs = body.wanted_logprobs is not None
        self._answers = body.n  # to each prompt
        self._options = body.stream_options or StreamOptions()
        self._calls = Counter[int]()  # of each answer so far

    def whole(self, events: Sequence[Event]) -> Json:
        """All answers in one piece."""
        outputs = defaultdict[int, list[Output]](list)
        ends = dict[int, Finished]()
        for event in events:
            self._count(event)
            if isinstance(event, Output):
                outputs[event.answer].append(event)
            elif isinstance(event, Finished):
                ends[event.answer] = event
        choices = [self._choice(outputs[index], ends[index]) for index in sorted(ends)]
        whole = {**self._head(self.whole_object, choices), "usage": self._usage}
        for prompt in self._started:
            place = whole if len(self._started) == 1 else choices[prompt.answer]
            place["kvblend"] = figures_of(prompt)
        for end in ends.values():
            if end.check is not None:
                whole["kvblend"]["check"] = check_of(end.check)
        return whole

    def _choice(self, outputs: Sequence[Output], end: Finished) -> Json:
        """One answer. outputs: its own."""
        thoughts = "".join(output.text for output in outputs if output.thoughts)
        spoken = [output for output in outputs if not output.thoughts]
        calls = [call for output in spoken for call in output.calls]
        content = self._content("".join(output.text for output in spoken), calls, thoughts)
        logprobs = self._logprobs_of([token for output in spoken for token in output.tokens], end.answer)
        reason = self._reason(end, len(calls))
        return {"index": end.answer, **content, "finish_reason": reason, "logprobs": logprobs}

    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""
        self._count(event)
        if isinstance(event, Started):
            for index in range(self._answers):
                extra = {} if index else {"kvblend": figures_of(event)}
                yield {**self._chunk(event.answer + index, self._piece("", first=True)), **extra}
        elif isinstance(event, Output):
            yield from self._at_output(event)
        elif isinstance(event, Finished):
            yield from self._at_end(event)

    def _at_output(self, event: Output) -> Iterator[Json]:
        if event.thoughts and event.text:
            yield self._chunk(event.answer, {"delta": {"reasoning": event.text}})
        elif not event.thoughts and (event.text or event.calls or self._with_logprobs):
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
        return self._logprobs(tokens, index) if self._with_logprobs else None

    def _called(self, output: Output) -> Json:
        """The part of a stream's chunk that holds the calls."""
        begin = self._calls[output.answer]
        self._calls[output.answer] += len(output.calls)
        calls = [{"index": index, **call_of(call)} for index, call in enumerate(output.calls, begin)]
        return {"delta": {"tool_calls": calls}}

    @staticmethod
    def _reason(finished: Finished, calls: int) -> str:
        return "tool_calls" if calls and finished.reason == "stop" else finished.reason

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


class TextReply(ChatReply):
    """Replies of /v1/completions."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, model: str) -> None:
        super().__init__(body, model)
        self._offsets = Counter[int]()  # characters of each answer so far
        self._decoders = defaultdict[int, Any](lambda: _characters("replace"))  # bytes of an incomplete one

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
