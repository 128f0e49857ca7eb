"""The bodies of requests: what OpenAI's clients send, and our own fields beside it.

Numbers are numbers and texts are texts: nothing is taken for another kind. A field that holds null is one that is not there.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from blend.limits import NUMBERS, shown

_LONGEST_NAME = 512
_MOST_STOPS = 4
_MOST_LOGPROBS = 20


def _content(value: Any) -> Any:
    """Text, or the texts of parts, a line between them."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {number} is {_kind(part, kind)}; only parts of the type 'text' are supported")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f'part {number} is not {{"type": "text", "text": "..."}}')
        texts.append(part["text"])
    return "\n".join(texts)


def _kind(part: Any, kind: Any) -> str:
    return f"of the type {shown(kind)}" if isinstance(part, dict) else f"{shown(part)}"


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and "" in stops:
        raise ValueError("an empty text would end every answer at once")
    return stops


def _prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) != 1:
        raise ValueError("give one prompt a request, as text")
    return value[0] if isinstance(value, list) else value


Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
Text = Annotated[str, BeforeValidator(_content)]
Stops = Annotated[
    list[Annotated[str, Field(max_length=_LONGEST_NAME)]], BeforeValidator(_stops), Field(max_length=_MOST_STOPS)
]
Tokens = Annotated[int, Field(ge=1, le=int(NUMBERS["max_new_tokens"].high))]
TopK = Annotated[int, Field(ge=int(NUMBERS["top_k"].low), le=int(NUMBERS["top_k"].high))]


class Body(BaseModel):
    """No field but those that are named, of no kind but their own."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class MessageBody(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class DocumentBody(Body):
    """A document that comes with the question: its text, maybe with an id of the client's, or the id of one that is known.

    A string is the text. Cohere's {"data": ...} holds the text, or title and text, which may be called snippet.
    """

    id: Name | None = None
    title: str | None = None
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"text": value}
        if not isinstance(value, dict) or "data" not in value:
            return value
        rest = {name: one for name, one in value.items() if name != "data"}
        data = {"text": value["data"]} if isinstance(value["data"], str) else value["data"]
        if not isinstance(data, dict):
            raise ValueError('data is no object; give one, such as {"title": "...", "text": "..."}')
        if "snippet" in data and "text" not in data:
            data = {"text" if name == "snippet" else name: one for name, one in data.items()}
        if twice := sorted(data.keys() & rest.keys()):
            raise ValueError(f"{twice[0]} stands in data and outside; give it once")
        return {**rest, **data}


class UploadBody(Body):
    """POST /v1/documents, as JSON."""

    documents: Annotated[list[DocumentBody], Field(min_length=1)]
    corpus: str | None = None


class RetrieveBody(Body):
    """Chunks of a corpus to be retrieved for the question."""

    top_k: TopK | None = None
    corpus: str | None = None


class OwnBody(Body):
    """What only this server understands. corpus: of the documents that are named by their ids, and of pasted text."""

    corpus: str | None = None
    documents: list[DocumentBody] | None = None
    retrieve: RetrieveBody | None = None
    method: Literal["blend", "full"] | None = None
    cold: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    trace: bool | None = None


class StreamOptions(Body):
    """What a stream shows beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, the usage so far in every chunk


class Common(Body):
    """What both kinds of completions take. model: the decoder itself where there is none."""

    model: Name | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None  # vLLM's: an answer of a given length, for measuring
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    documents: list[DocumentBody] | None = None
    kvblend: OwnBody | None = None

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """How many alternatives come with each token; None for no log-probabilities."""

    @property
    def most_tokens(self) -> int | None:
        """Of the answer, where it says."""
        return self.max_tokens


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """See `Common`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The newer name counts."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: Annotated[str, BeforeValidator(_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """See `Common`."""
        return self.logprobs
