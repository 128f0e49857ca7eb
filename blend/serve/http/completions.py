"""POST /v1/chat/completions and /v1/completions, in OpenAI's protocol."""

from __future__ import annotations

import codecs
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from blend.serve.events import Event, Finished, Output, Started, Token, TopToken
from blend.serve.http.bodies import CompletionBody, StreamOptions
from blend.serve.http.chat import ChatBody
from blend.serve.http.errors import Json
from blend.serve.http.replies import Reply, answer, call_of, check_of, figures_of, finite_logprob, logprobs_of
from blend.serve.request import ToolCall

_characters = codecs.getincrementaldecoder("utf-8")


async def chat(request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await answer(request, ChatBody, ChatReply)


async def text(request: HttpRequest) -> Response:
    """Continue a text."""
    return await answer(request, CompletionBody, TextReply)


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
        self._begun = set[int]()  # answers with a chunk
        self._ended = set[int]()

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
                yield {**self._empty_chunk(event.answer + index), **extra}
        elif isinstance(event, Output):
            yield from self._at_output(event)
        elif isinstance(event, Finished):
            yield from self._at_end(event)

    def empty_chunks(self) -> Iterator[Json]:
        """The first answer that goes on says nothing. None does while a check is waited for."""
        going = self._begun - self._ended if self._begun else {0}
        if going:
            yield self._empty_chunk(min(going))

    def _empty_chunk(self, index: int) -> Json:
        chunk = self._chunk(index, self._piece("", first=index not in self._begun))
        self._begun.add(index)
        return chunk

    def _at_output(self, event: Output) -> Iterator[Json]:
        if event.thoughts and event.text:
            yield self._chunk(event.answer, {"delta": {"reasoning": event.text}})
        elif not event.thoughts and (event.text or event.calls or self._with_logprobs):
            piece = self._called(event) if event.calls else self._piece(event.text)
            logprobs = self._logprobs_of(event.tokens, event.answer)
            yield self._chunk(event.answer, {**piece, "logprobs": logprobs})

    def _at_end(self, event: Finished) -> Iterator[Json]:
        if event.check is None:
            self._ended.add(event.answer)
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
            "token_logprobs": [finite_logprob(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: Token) -> dict[str, float]:
    """The log-probabilities of the likeliest tokens and of the chosen one, by their text."""
    choices: tuple[Token | TopToken, ...] = (*token.top, token)
    return {choice.text: finite_logprob(choice.logprob) for choice in choices}
