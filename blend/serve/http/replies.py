"""Replies of the service as OpenAI's objects and chunks."""

from __future__ import annotations

import asyncio
import codecs
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blend.serve.failures import log_error
from blend.serve.http.errors import GONE, ApiError, Failure, ended_early, failure_of
from blend.serve.http.log import LogEntry
from blend.serve.http.tracing import RequestTrace
from blend.serve.metrics import Metrics
from blend.serve.types import Closed, Delta, Handle, Opened, Refused, Reply, TokenText
from blend.visible import json_text

Document = dict[str, Any]
_Characters = codecs.getincrementaldecoder("utf-8")
_LEAST = -9999.0  # what OpenAI gives where a probability is 0; JSON has no infinity


class Answer(ABC):
    """One answer in the words of a protocol. model: as the client named it. logprobs: whether it wants them."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self._common = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs
        self._offset, self._decoder = 0, _Characters("replace")  # characters told so far; bytes that are none yet

    def whole(self, opened: Opened, deltas: Sequence[Delta], closed: Closed) -> Document:
        """The answer in one piece."""
        text, tokens = "".join(one.text for one in deltas), [token for one in deltas for token in one.tokens]
        choice = {**self._content(text), **self._end(closed), "logprobs": self._tokens(tokens)}
        return {
            **self._head(self.whole_object, choice),
            "usage": usage(opened, closed.completion_tokens),
            "kvblend": own(opened),
        }

    def opening(self, opened: Opened) -> Document:
        """The first chunk."""
        return {**self._chunk(self._piece("", first=True)), "kvblend": own(opened)}

    def delta(self, delta: Delta) -> Document:
        """More of the text."""
        return self._chunk({**self._piece(delta.text), "logprobs": self._tokens(delta.tokens)})

    def ending(self, closed: Closed) -> Document:
        """Why it ends."""
        return self._chunk({**self._piece(None), **self._end(closed)})

    def last(self, opened: Opened, closed: Closed) -> Document:
        """The chunk that has the usage and no choice."""
        return {
            **self._common,
            "object": self.chunk_object,
            "choices": [],
            "usage": usage(opened, closed.completion_tokens),
        }

    def _chunk(self, choice: Document) -> Document:
        return self._head(self.chunk_object, {"logprobs": None, "finish_reason": None, **choice})

    def _head(self, kind: str, choice: Document) -> Document:
        return {**self._common, "object": kind, "choices": [{"index": 0, **choice}]}

    def _end(self, closed: Closed) -> Document:
        return {"finish_reason": closed.reason}

    def _tokens(self, tokens: Sequence[TokenText]) -> Document | None:
        return self._told(tokens) if self._logprobs else None

    @abstractmethod
    def _content(self, text: str) -> Document: ...

    @abstractmethod
    def _piece(self, text: str | None, *, first: bool = False) -> Document: ...

    @abstractmethod
    def _told(self, tokens: Sequence[TokenText]) -> Document: ...


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, text: str) -> Document:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str | None, *, first: bool = False) -> Document:
        role = {"role": "assistant"} if first else {}
        return {"delta": role if text is None else {**role, "content": text}}

    def _told(self, tokens: Sequence[TokenText]) -> Document:
        return {"content": [_token(token) for token in tokens], "refusal": None}


class TextAnswer(Answer):
    """Of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _content(self, text: str) -> Document:
        return {"text": text}

    def _piece(self, text: str | None, *, first: bool = False) -> Document:
        return {"text": text or ""}

    def _told(self, tokens: Sequence[TokenText]) -> Document:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{text: _finite(logprob) for text, _, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }


def usage(opened: Opened, completion_tokens: int) -> Document:
    """Tokens of prompt and answer."""
    return {
        "prompt_tokens": opened.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": opened.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": opened.cached_tokens},
    }


def own(opened: Opened) -> Document:
    """What only this server tells: the sources, what the prefill cost, the prompt's tokens where they were asked for."""
    figures = {**opened.figures._asdict(), "stages": dict(opened.figures.stages)}
    told: Document = {"sources": [source._asdict() for source in opened.sources], "figures": figures}
    if opened.trace:
        told["trace"] = [token._asdict() for token in opened.trace]
    return _plain(told)  # type: ignore[no-any-return]


def _token(token: TokenText) -> Document:
    top = [{"token": text, "logprob": _finite(logprob), "bytes": list(raw)} for text, raw, logprob in token.top]
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw), "top_logprobs": top}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def _plain(value: Any) -> Any:
    """JSON has neither infinities nor NaN; they become null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- From the engine's threads to the event loop, and on to the client as server-sent events.


_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class Gone(NamedTuple):
    """The client has left."""


class Conversation:
    """The replies to one question on their way to one client; who leaves is not answered further.

    receive: of the connection, its body read. trace: where spans are made. Made in the event loop; `reply` and `took` are for
    other threads.
    """

    def __init__(self, receive: Receive, metrics: Metrics, entry: LogEntry, trace: RequestTrace | None = None) -> None:
        self._trace = trace
        self._loop, self._metrics, self._entry = asyncio.get_running_loop(), metrics, entry
        self.begun = time.monotonic()  # when the request came
        self._queue: asyncio.Queue[Reply | Gone] = asyncio.Queue()
        self._handle: Handle | None = None
        self._left = False
        self._watch = asyncio.create_task(self._until_gone(receive))

    def reply(self, reply: Reply) -> None:
        """Hand a reply on."""
        self._count(reply)
        if self._trace is not None:
            self._trace.reply(reply)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, reply)

    def require(self, deadline_s: float | None = None) -> None:
        """Raise `ApiError` where the client has left, or the first token can no longer come in time."""
        if self._left:
            raise ApiError(ended_early("cancelled"))
        if deadline_s is not None and time.monotonic() - self.begun > deadline_s:
            raise ApiError(ended_early("deadline"))

    def took(self, handle: Handle) -> None:
        """The service took the question in."""
        self._handle = handle
        if self._trace is not None:
            self._trace.took()
        if self._left:
            handle.cancel()

    async def next(self, seconds: float | None = None) -> Reply | Gone | None:
        """The next reply; None if none comes for so long."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None

    def close(self) -> None:
        """Give up what has not been answered."""
        self._left = True
        if self._trace is not None:
            self._trace.end("cancelled" if self._handle is not None else "refused")
        self._watch.cancel()
        if self._handle is not None:
            self._handle.cancel()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._queue.put_nowait(Gone())
        if self._handle is not None:
            self._handle.cancel()

    def _count(self, reply: Reply) -> None:
        seconds = time.monotonic() - self.begun
        if isinstance(reply, Opened):
            self._entry.ttft_s, self._entry.rows = seconds, reply.figures.rows
            self._metrics.opened(reply, seconds)
        elif isinstance(reply, Delta):
            self._metrics.gaps(reply.gaps)
        elif isinstance(reply, Closed):
            self._metrics.gaps(reply.gaps)
            self._metrics.closed(reply.reason, reply.completion_tokens, seconds)
        elif isinstance(reply, Refused) and failure_of(reply.error).status >= 500:
            log_error(reply.error, self._entry.id)


def failed(reply: Reply | Gone) -> Failure | None:
    """What a client is told of a reply that ends an answer before its end; None for every other."""
    if isinstance(reply, Gone):
        return ended_early("cancelled")
    if isinstance(reply, Refused):
        return failure_of(reply.error)
    return ended_early(reply.reason) if isinstance(reply, Closed) and reply.reason not in ("stop", "length") else None


class EventStream(Response):
    """An answer as server-sent events.

    Args:
        first: the reply that has come already, None if none did for `keep_alive_s`.
        usage: "last" gives it in the last chunk, "every" in all of them.

    """

    media_type = "text/event-stream"

    def __init__(
        self,
        conversation: Conversation,
        first: Reply | Gone | None,
        answer: Answer,
        entry: LogEntry,
        *,
        keep_alive_s: float,
        usage: Literal["last", "every"] | None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._conversation, self._first, self._answer, self._entry = conversation, first, answer, entry
        self._keep_alive_s, self._usage = keep_alive_s, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends or the client leaves."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._events():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            self._conversation.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        reply, opened, tokens = self._first, None, 0
        while not isinstance(reply, Closed | Refused | Gone):
            if reply is None:
                yield _KEEP_ALIVE
            elif isinstance(reply, Opened):
                opened = reply
                yield self._event(self._answer.opening(reply), opened)
            else:
                tokens += len(reply.gaps) + (not tokens)  # the answer's first token has no gap
                yield self._event(self._answer.delta(reply), opened, tokens)
            reply = await self._conversation.next(self._keep_alive_s)
        for part in self._ending(opened, reply):
            yield part

    def _ending(self, opened: Opened | None, reply: Closed | Refused | Gone) -> list[bytes]:
        if failure := failed(reply):
            self._entry.failed(failure)
            return [] if failure.status == GONE else [_event(failure.document), _DONE]
        assert isinstance(reply, Closed)
        parts = [self._event(self._answer.ending(reply), opened, reply.completion_tokens)]
        if self._usage and opened is not None:
            parts.append(_event(self._answer.last(opened, reply)))
        return [*parts, _DONE]

    def _event(self, chunk: dict[str, Any], opened: Opened | None, tokens: int = 0) -> bytes:
        """A chunk of the answer, of which so many tokens have come."""
        if self._usage:
            chunk["usage"] = usage(opened, tokens) if self._usage == "every" and opened is not None else None
        return _event(chunk)


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json_text(document, allow_nan=False)}\n\n".encode()


async def collected(conversation: Conversation) -> tuple[Opened, list[Delta], Closed] | Failure:
    """A whole answer, or why there is none."""
    opened, deltas = None, []
    while True:
        reply = await conversation.next()
        assert reply is not None
        if failure := failed(reply):
            return failure
        if isinstance(reply, Opened):
            opened = reply
        elif isinstance(reply, Delta):
            deltas.append(reply)
        elif isinstance(reply, Closed):
            assert opened is not None
            return opened, deltas, reply
