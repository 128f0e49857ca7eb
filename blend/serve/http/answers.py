"""Replies of the service as OpenAI's objects and chunks."""

from __future__ import annotations

import codecs
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from blend.serve.request import Closed, Delta, Opened, TokenText

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
