"""The bodies of requests: what OpenAI's clients send, and our own fields beside it.

Numbers are numbers and texts are texts: nothing is taken for another kind. A field that holds null is one that is not there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from blend.corpora import in_words
from blend.limits import NUMBERS, shown
from blend.serve.http.errors import ApiError, refuse
from blend.serve.limits import RequestLimits
from blend.serve.types import AnswerRequest, GivenDocument, Message, Sampling

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


# --- A request's body as JSON, and the fields of OpenAI's protocol that are known and not supported.


_NOTHING: tuple[Any, ...] = (None,)
IGNORED = (
    *("user", "safety_identifier", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    "parallel_tool_calls",
)
"""Fields for bookkeeping, caches and tools elsewhere: no answer depends on them, whatever they hold."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": _NOTHING,
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "prediction": _NOTHING,
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),  # tools are refused themselves
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": _NOTHING,
}
"""Each with the values that ask for nothing."""
IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": _NOTHING,
    "function_call": _NOTHING,
    "name": _NOTHING,
    "refusal": _NOTHING,
    "tool_calls": (None, []),
    "tool_call_id": _NOTHING,
}
"""The same in a message: what clients send along with an earlier answer."""


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises `ApiError`."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error) if str(error).isascii() else "not UTF-8 text"
        raise refuse(f"the body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise refuse("the body is not a JSON object", code="invalid_json")
    return body


def without(values: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], where: str = "") -> dict[str, Any]:
    """What is left of an object's fields when those that ask for nothing are gone. Raises `ApiError` for one that asks."""
    kept = {}
    for name, value in values.items():
        if name not in unsupported:
            kept[name] = value
        elif not any(_same(value, neutral) for neutral in unsupported[name]):
            found = f"{where}{name}"
            raise refuse(f"{found} = {shown(value)} is not supported; leave it out", found, "unsupported_parameter")
    return kept


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


# --- What is wrong with a body, in one line of the server's own: where, what, and what to send instead.


EXAMPLES: Mapping[type[BaseModel], str] = {
    MessageBody: '{"role": "user", "content": "..."}',
    DocumentBody: '{"title": "...", "text": "..."}, a text, or {"id": "..."}',
    RetrieveBody: '{"top_k": 8}, or {} for as many chunks as usual',
    OwnBody: '{"retrieve": {"top_k": 8}}',
    StreamOptions: '{"include_usage": true}',
}
"""Of each object that may stand in a body."""
_OF_CLASS = {kind.__name__: example for kind, example in EXAMPLES.items()}

Context = Mapping[str, Any]
_WORDS: Mapping[str, Callable[[Context], str]] = {
    "bool_type": lambda _: "is neither true nor false; give one of them",
    "dict_type": lambda _: 'is no object; give texts under names, such as {"name": "text"}',
    "finite_number": lambda _: "is not finite; give a number",
    "float_type": lambda _: "is no number; give one, without quotes",
    "greater_than": lambda context: f"is too small; give more than {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"is too small; give {_number(context['ge'])} or more",
    "int_type": lambda _: "is no whole number; give one, without quotes",
    "less_than": lambda context: f"is too large; give less than {_number(context['lt'])}",
    "less_than_equal": lambda context: f"is too large; give {_number(context['le'])} or less",
    "list_type": lambda _: "is no list; give one, as [...]",
    "literal_error": lambda context: f"is not supported; give {_choices(context['expected'])}",
    "model_type": lambda context: f"is no object; give one, such as {_OF_CLASS[context['class_name']]}",
    "string_too_long": lambda context: f"is longer than {_number(context['max_length'])} characters; shorten it",
    "string_too_short": lambda _: "is empty; give a text",
    "string_type": lambda _: 'is no text; give one, as "..."',
    "string_unicode": lambda _: "is not Unicode text; leave out what is none",
    "too_long": lambda context: f"has more than {_number(context['max_length'])} entries; leave some out",
    "too_short": lambda _: "is empty; give one entry at least",
    "value_error": lambda context: str(context["error"]),
}
"""What pydantic may find by its name for it; `value_error` is ours."""


def mistake(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by its place in it."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        return refuse(f"unknown field {param}; leave it out", param, "unknown_parameter")
    if first["type"] == "missing":
        return refuse(f"{param} is missing", param, "missing_required_parameter")
    words = _WORDS.get(first["type"], _otherwise)(first.get("ctx", {}))
    separator = ": " if first["type"] == "value_error" else " "
    return refuse(f"{param}{separator}{words}", param)


def _otherwise(context: Context) -> str:
    return "cannot be taken as it is; leave it out, or see docs/serving.md"


def _place(location: tuple[int | str, ...]) -> str:
    """messages[0].content: as a path, at most as long as a line."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    text = "".join(parts).removeprefix(".")
    return text if len(text) <= 100 else f"{text[:100]}..."


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _choices(expected: str) -> str:
    """As JSON has them."""
    return expected.replace("'", '"').replace("False", "false")


# --- From the body of a request to what the service is asked.


_CORPUS = "+corpus"
_NO_MODEL, _NO_CORPUS = "model_not_found", "corpus_not_found"
OF_A_CORPUS = (_NO_MODEL, _NO_CORPUS)  # codes of refusals that another corpus would mend
BodyT = TypeVar("BodyT", bound=Common)


class Offered(NamedTuple):
    """What there is to be asked: the name of the model, the tenant and its corpora."""

    model: str
    tenant: str
    corpora: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of models that a request may carry: the model, and the model with a corpus that it retrieves from."""
        return (self.model, *(f"{self.model}{_CORPUS}{name and ':'}{name}" for name in self.corpora))


def read_body(raw: bytes, kind: type[BodyT], limits: RequestLimits) -> BodyT:
    """A checked body. Raises `ApiError` for whatever is wrong with it."""
    values = without(body_of(raw), UNSUPPORTED)
    for name in IGNORED:
        values.pop(name, None)
    own = values.get("kvblend")
    for name, holder, most in (
        ("messages", values, limits.messages),
        ("documents", values, limits.documents),
        ("documents", own if isinstance(own, dict) else {}, limits.documents),
    ):
        if isinstance(held := holder.get(name), list) and len(held) > most:
            raise refuse(f"{len(held):,} {name} are more than {most:,}, all that a request may bring; send fewer", name)
    if isinstance(messages := values.get("messages"), list):
        values["messages"] = [_message(number, one) for number, one in enumerate(messages)]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise mistake(error) from None


def _message(number: int, message: Any) -> Any:
    return without(message, IN_MESSAGES, f"messages[{number}].") if isinstance(message, dict) else message


def request_of(body: ChatBody | CompletionBody, offered: Offered, limits: RequestLimits) -> AnswerRequest:
    """The question in words of no protocol. Raises `ApiError`, or `ConfigError` for a sampling that is none."""
    _check_together(body)
    own = body.kvblend or OwnBody()
    documents = body.documents or own.documents or []
    top_k, corpus = _retrieval(body.model or offered.model, own, offered, limits.top_k)
    if isinstance(body, CompletionBody):
        _check_no_passages(body, own, retrieving=top_k is not None)
    sampling = Sampling(
        max_tokens=body.most_tokens or limits.answer_tokens,
        temperature=Sampling.temperature if body.temperature is None else body.temperature,
        top_p=Sampling.top_p if body.top_p is None else body.top_p,
        seed=body.seed,
        logprobs=body.wanted_logprobs,
        ignore_eos=bool(body.ignore_eos),
    )
    return AnswerRequest(
        messages=_messages(body),
        prompt=body.prompt if isinstance(body, CompletionBody) else None,
        tenant=offered.tenant,
        documents=tuple(_document(number, one) for number, one in enumerate(documents)),
        top_k=top_k,
        corpus=corpus,
        sampling=sampling,
        stop=tuple(body.stop or ()),
        method=own.method or "blend",
        cold=bool(own.cold),
        priority=_priority(own, offered.tenant),
        deadline_s=own.deadline_s,
        trace=bool(own.trace),
    )


def _priority(own: OwnBody, tenant: str) -> int:
    """ApiKeys share a server: one may stand back, and none may push ahead of all others."""
    if tenant and own.priority is not None and own.priority < 0:
        message = "a key with a tenant may not be more urgent than others; give a priority of 0 or more"
        raise refuse(message, "kvblend.priority", "forbidden", 403)
    return own.priority or 0


def _check_together(body: ChatBody | CompletionBody) -> None:
    """Fields that say something together only, or contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options is for streams; set stream to true or leave it out", "stream_options")
    if body.documents and body.kvblend and body.kvblend.documents:
        raise refuse("documents stand in two places; give them in one", "kvblend.documents")
    if not isinstance(body, ChatBody):
        return
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refuse("max_tokens and max_completion_tokens differ; give one", "max_tokens")


def _check_no_passages(body: CompletionBody, own: OwnBody, *, retrieving: bool) -> None:
    """A prompt that is to be continued has no place for documents: what brings some is refused by its name."""
    brought = {"documents": body.documents, "kvblend.documents": own.documents, "kvblend.retrieve": own.retrieve}
    for name, found in (*brought.items(), ("model", retrieving)):
        if found:
            raise refuse(
                f"{name} brings documents, and a completion has no place for them; ask /v1/chat/completions", name
            )


def _messages(body: ChatBody | CompletionBody) -> tuple[Message, ...]:
    if isinstance(body, CompletionBody):
        return ()
    return tuple(Message("system" if one.role == "developer" else one.role, one.content) for one in body.messages)


def uploads_of(raw: bytes) -> UploadBody:
    """The documents in a body. Raises `ApiError` for whatever is wrong with it."""
    try:
        body = UploadBody.model_validate(body_of(raw))
    except ValidationError as error:
        raise mistake(error) from None
    for number, one in enumerate(body.documents):
        if one.text is None:
            raise refuse(
                f"documents[{number}].text is missing", f"documents[{number}].text", "missing_required_parameter"
            )
    return body


def _document(number: int, document: DocumentBody) -> GivenDocument:
    place = f"documents[{number}]"
    if document.text is None and document.id is None:
        raise refuse(f"{place} needs a text, or the id of a document that is known", place)
    if document.text is not None and not document.text.strip():
        raise refuse(f"{place}.text is empty; give a text, or leave the document out", f"{place}.text")
    if document.text is None and document.title is not None:
        raise refuse(f"{place} is known by its id and has its title there; leave title out", f"{place}.title")
    return GivenDocument(document.text or "", document.title or "", document.id or "")


def _retrieval(model: str, own: OwnBody, offered: Offered, usual: int) -> tuple[int | None, str]:
    """How many chunks to retrieve, None for none, and which corpus is asked: by the model's name and by our fields."""
    if model not in offered.names:
        raise refuse(
            f"the model {shown(model)} does not exist; there are: {', '.join(offered.names)}",
            *("model", _NO_MODEL, 404),
        )
    named = model.removeprefix(offered.model)
    told = {
        "model": named.removeprefix(_CORPUS).removeprefix(":") if named else None,
        "kvblend.corpus": own.corpus,
        "kvblend.retrieve.corpus": own.retrieve.corpus if own.retrieve else None,
    }
    names = {field: name for field, name in told.items() if name is not None}
    field, corpus = next(iter(names.items()), ("kvblend.retrieve.corpus", ""))
    for other, name in names.items():
        if name != corpus:
            raise refuse(f"{other} names another corpus than {field}", other)
    if (names or own.retrieve) and corpus not in offered.corpora:
        held = ", ".join(map(in_words, offered.corpora))
        if not held:
            raise refuse("no document is indexed yet: add some, or ask without retrieval", field, _NO_CORPUS)
        lacking = f"no corpus {shown(corpus)}" if corpus else "no corpus without a name"
        raise refuse(f"there is {lacking}; there are: {held}", field, _NO_CORPUS)
    if own.retrieve is None:
        return (usual if named else None), corpus
    return own.retrieve.top_k or usual, corpus
