"""Bodies of requests, received within limits and checked: OpenAI's fields, and our own under `kvblend`. null counts as absent.

Types are strict: "1" is not a number. Error messages are pydantic's. Fields of OpenAI's protocol that cannot change an
answer
are ignored. Those that the server does not support are refused by name, unless their value asks for nothing.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest
from starlette.types import Message as AsgiMessage
from starlette.types import Receive

from blend.corpora import in_words
from blend.limits import NUMBERS, shown
from blend.serve.http.chat import (
    LONGEST_NAME,
    MOST_TOOLS,
    Body,
    Effort,
    MessageBody,
    Name,
    ResponseFormat,
    TemplateArguments,
    ToolBody,
    ToolChoice,
    messages_of,
    schema_of,
    tools_of,
)
from blend.serve.http.errors import ApiError, refuse, unavailable
from blend.serve.limits import RequestLimits
from blend.serve.text import DIRECT
from blend.serve.types import MOST_ANSWERS, GivenDocument, Request, Sampling

IGNORED = ("user", "safety_identifier", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention")
"""Fields on which no answer depends."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "prediction", "web_search_options"), (None,)),
    "best_of": (None, 1),
    "functions": (None, []),
    **dict.fromkeys(("echo", "store"), (None, False)),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "verbosity": (None, "medium"),
}
"""Unsupported fields, each with the values that ask for nothing."""
UNSUPPORTED_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    **dict.fromkeys(("audio", "function_call", "refusal"), (None,)),
}
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of a body and of `Sampling` with the same meaning."""
CORPUS = "+corpus"
"""Behind a model's name; the name of a corpus may follow."""
NO_MODEL, _NO_CORPUS = "model_not_found", "corpus_not_found"
CORPUS_CODES = (NO_MODEL, _NO_CORPUS)
"""Codes of refusals that depend on which corpora exist."""
_MOST_STOPS = 32
_MOST_PROMPTS = 16
_MOST_TEXTS = 2048  # to embed
_MOST_BIASES = 1024
_MOST_LOGPROBS = 20
_LONGEST_PLACE = 100  # characters of a path in a message
_DRAIN_FACTOR = 4  # times the limit: a client reads its refusal only after it has sent everything
_DRAIN_S = 5.0
_FREE = 1 << 16  # bytes of each body that the budget does not count: ordinary questions always pass


@dataclass
class BodyBudget:
    """Memory for the bodies of all requests. most: bytes. Used by the event loop alone."""

    most: int
    held: int = 0

    @contextmanager
    def receiving(self, request: HttpRequest, most: int, seconds: float) -> Iterator[HttpRequest]:
        """The request with a body of at most `most` bytes, which must arrive in so many seconds.

        Reading it raises `ApiError` beyond these limits, and when the budget is exhausted. The end of the context returns the
        bytes to the budget.
        """
        until = asyncio.get_running_loop().time() + seconds
        announced = request.headers.get("content-length", "")
        over = announced.isascii() and announced.isdigit() and len(announced) < 20 and int(announced) > most
        taken = counted = 0

        async def receive() -> AsgiMessage:
            nonlocal taken, counted
            try:
                async with asyncio.timeout_at(until):
                    message = await request.receive()
            except TimeoutError:
                raise refuse("the body did not come in time", None, "timeout", 408) from None
            taken += len(message.get("body", b""))
            if over or taken > most:
                if message.get("more_body", False):
                    await _drain(request.receive, most * _DRAIN_FACTOR)
                words = f"the body is larger than {most:,} bytes, all that a request may bring"
                raise refuse(words, None, "body_too_large", 413)
            more = max(0, taken - _FREE) - counted
            if more and self.held + more > self.most:
                raise unavailable("the server is receiving too many large requests; try again later", retry_s=5.0)
            self.held += more
            counted += more
            return message

        try:
            yield HttpRequest(request.scope, receive)
        finally:
            self.held -= counted


async def _drain(receive: Receive, most: int) -> None:
    """Discard the rest of a body, up to `most` bytes and for a few seconds."""
    seen, more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while more and seen < most:
                message = await receive()
                seen += len(message.get("body", b""))
                more = message.get("more_body", False)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and "" in stops:
        raise ValueError("an empty text would end every answer at once")
    return stops


def _prompts(value: Any) -> Any:
    """A list of prompts, each a text or a tuple of token ids."""
    several = value if isinstance(value, list) and not _are_ids(value) else [value]
    if not 0 < len(several) <= _MOST_PROMPTS:
        raise ValueError(f"give 1 to {_MOST_PROMPTS} prompts; {len(several):,} were given")
    for one in several:
        if not (isinstance(one, str) or _are_ids(one)):
            raise ValueError("give text, a list of token ids, or a list of such prompts")
        if isinstance(one, list) and (len(one) < 2 or min(one) < 0):
            raise ValueError("give at least two token ids, from 0 on")
    return [tuple(one) if isinstance(one, list) else one for one in several]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


Stop = Annotated[str, Field(max_length=LONGEST_NAME)]
MaxTokens = Annotated[int, Field(ge=1, le=int(NUMBERS["max_new_tokens"].high))]
TopK = Annotated[int, Field(ge=int(NUMBERS["top_k"].low), le=int(NUMBERS["top_k"].high))]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Logprobs = Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)]


class DocumentBody(Body):
    """A document: its text, optionally with the client's id; or the id of one in the corpus.

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


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and any(isinstance(one, int | list) for one in texts):
        raise ValueError("give texts, not token ids (LangChain: check_embedding_ctx_length=False)")
    if isinstance(texts, list) and not all(texts):
        raise ValueError("an empty text has no embedding")
    return texts


class EmbeddingBody(Body):
    """POST /v1/embeddings. model: the embedder's name, or one of `ModelNames`."""

    input: Annotated[list[str], BeforeValidator(_texts), Field(min_length=1, max_length=_MOST_TEXTS)]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class RetrieveBody(Body):
    """Retrieve chunks of a corpus for the question."""

    top_k: TopK | None = None
    corpus: str | None = None


class OwnBody(Body):
    """The field `kvblend`. corpus: of documents that are named by ids, and of pasted text."""

    corpus: str | None = None
    retrieve: RetrieveBody | None = None
    method: Literal["blend", "full"] | None = None
    cold: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    quality: Annotated[float, Field(ge=NUMBERS["quality"].low, le=NUMBERS["quality"].high)] | None = None
    trace: bool | None = None
    verify: bool | None = None


class StreamOptions(Body):
    """Extras of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, the usage so far in every chunk


class CommonBody(Body):
    """The fields that all questions share.

    model: by default the decoder itself. unsupported: as `UNSUPPORTED`. asks: the field that holds the prompt.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    asks: ClassVar[str] = "messages"
    model: Name | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10**9)] | None = None  # this and the next two are vLLM's and llama.cpp's
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=_MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Stop], BeforeValidator(_stops), Field(max_length=_MOST_STOPS)] | None = None
    ignore_eos: bool | None = None  # vLLM's, for measuring
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    documents: list[DocumentBody] | None = None
    kvblend: OwnBody | None = None

    @abstractmethod
    def completion(self) -> ChatBody | CompletionBody:
        """The same question to an endpoint of completions. Raises `ApiError`."""


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateArguments | None = None  # vLLM's

    def completion(self) -> ChatBody:
        """Itself."""
        return self

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        thinks = self.reasoning_effort not in (None, "none")
        effort = {"enable_thinking": True, "reasoning_effort": self.reasoning_effort} if thinks else {}
        return {**DIRECT, **effort, **(self.chat_template_kwargs or {})}

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token; None gives no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    asks: ClassVar[str] = "prompt"
    prompt: Annotated[list[str | tuple[int, ...]], BeforeValidator(_prompts)]
    logprobs: Logprobs | None = None

    def completion(self) -> CompletionBody:
        """Itself."""
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token; None gives no log-probabilities."""
        return self.logprobs


BodyT = TypeVar("BodyT", bound=Body)
QuestionT = TypeVar("QuestionT", bound=CommonBody)


class ModelNames(NamedTuple):
    """The names that a request may use: the model, and the corpora of its tenant."""

    model: str
    tenant: str
    corpora: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The model, and the model with each corpus to retrieve from."""
        return (self.model, *(f"{self.model}{CORPUS}{name and ':'}{name}" for name in self.corpora))

    def corpus_of(self, name: str) -> str | None:
        """The corpus that one of the `names` names; None for the model alone."""
        suffix = name.removeprefix(self.model)
        return suffix.removeprefix(CORPUS).removeprefix(":") if suffix else None


def read_body(raw: bytes, kind: type[QuestionT], limits: RequestLimits) -> QuestionT:
    """A checked body of a question. Raises `ApiError`."""
    values = _json(raw)
    if values.get("best_of") is not None and values["best_of"] == values.get("n"):
        del values["best_of"]  # all answers that are computed are sent
    values = without_unsupported(values, kind.unsupported)
    for name in IGNORED:
        values.pop(name, None)
    for name, most in (("messages", limits.messages), ("input", limits.messages), ("documents", limits.documents)):
        if isinstance(held := values.get(name), list) and len(held) > most:
            raise refuse(f"{len(held):,} {name} are more than {most:,}, all that a request may bring; send fewer", name)
    if isinstance(messages := values.get("messages"), list):
        values["messages"] = [_message(number, one) for number, one in enumerate(messages)]
    return _validated(values, kind)


def read_upload(raw: bytes) -> UploadBody:
    """A checked body with documents. Raises `ApiError`."""
    body = _validated(_json(raw), UploadBody)
    for number, one in enumerate(body.documents):
        if one.text is None:
            place = f"documents[{number}].text"
            raise refuse(f"{place} is missing", place, "missing_required_parameter")
    return body


def read_embedding(raw: bytes) -> EmbeddingBody:
    """A checked body with texts to embed. Raises `ApiError`."""
    return _validated({name: value for name, value in _json(raw).items() if name not in IGNORED}, EmbeddingBody)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error) if str(error).isascii() else "not UTF-8 text"
        raise refuse(f"the body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise refuse("the body is not a JSON object", code="invalid_json")
    return body


def without_unsupported(
    values: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], where: str = ""
) -> dict[str, Any]:
    """The fields without unsupported ones that ask for nothing. Raises `ApiError` if one of these asks for something."""
    kept = {}
    for name, value in values.items():
        if name not in unsupported:
            kept[name] = value
        elif not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in unsupported[name]):
            found = f"{where}{name}"
            raise refuse(f"{found} = {shown(value)} is not supported; leave it out", found, "unsupported_parameter")
    return kept


def _message(number: int, message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return without_unsupported(message, UNSUPPORTED_IN_MESSAGES, f"messages[{number}].")


def _validated(values: dict[str, Any], kind: type[BodyT]) -> BodyT:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _mistake(error) from None


def _mistake(error: ValidationError) -> ApiError:
    """The error for the first mistake, with its place in the body."""
    first = error.errors(include_url=False, include_input=False)[0]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
    param = "".join(parts).removeprefix(".")
    param = param if len(param) <= _LONGEST_PLACE else f"{param[:_LONGEST_PLACE]}..."
    if first["type"] == "model_type":  # pydantic's message would name our class
        return refuse(f"{param}: Input should be an object", param)
    codes = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
    words = first["msg"].removeprefix("Value error, ")
    return refuse(f"{param}: {words}", param, codes.get(first["type"], "invalid_value"))


def requests_of(body: ChatBody | CompletionBody, names: ModelNames, limits: RequestLimits) -> list[Request]:
    """One request for each prompt. Raises as `request_of` does."""
    request = request_of(body, names, limits)
    prompts = body.prompt if isinstance(body, CompletionBody) else [None]
    return [replace(request, prompt=one, stopped=set()) for one in prompts]


def request_of(body: ChatBody | CompletionBody, names: ModelNames, limits: RequestLimits) -> Request:
    """The request for the service, of the first prompt. Raises `ApiError`, or `ConfigError` for invalid sampling."""
    _check_combinations(body)
    own = body.kvblend or OwnBody()
    top_k, corpus = _retrieval(body.model or names.model, own, names, limits.top_k)
    if isinstance(body, CompletionBody):
        # A completion has no place for documents.
        for name, found in (
            ("documents", body.documents),
            ("kvblend.retrieve", own.retrieve),
            ("model", top_k is not None),
        ):
            if found:
                raise refuse(f"{name} brings documents to a completion; ask /v1/chat/completions", name)
    if names.tenant and (own.priority or 0) < 0:
        message = "a key with a tenant may not be more urgent than others; give a priority of 0 or more"
        raise refuse(message, "kvblend.priority", "forbidden", 403)
    max_tokens = body.max_completion_tokens if isinstance(body, ChatBody) else None
    given = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    sampling = Sampling(
        max_tokens=max_tokens or body.max_tokens or limits.answer_tokens,
        logprobs=body.wanted_logprobs,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        **given,
    )
    return Request(
        messages=messages_of(body.messages) if isinstance(body, ChatBody) else (),
        prompt=body.prompt[0] if isinstance(body, CompletionBody) else None,
        tools=tools_of(body.tools, body.tool_choice, body.parallel_tool_calls) if isinstance(body, ChatBody) else None,
        schema=schema_of(body.response_format) if isinstance(body, ChatBody) else None,
        tenant=names.tenant,
        documents=tuple(_document(number, one) for number, one in enumerate(body.documents or ())),
        top_k=top_k,
        corpus=corpus,
        sampling=sampling,
        stop=tuple(body.stop or ()),
        method=own.method or "blend",
        cold=bool(own.cold),
        priority=own.priority or 0,
        deadline_s=own.deadline_s,
        quality=own.quality,
        trace=bool(own.trace),
        verify=bool(own.verify),
        template=body.template if isinstance(body, ChatBody) else None,
    )


def _check_combinations(body: ChatBody | CompletionBody) -> None:
    """Refuse fields that contradict each other, and fields that need a missing one."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options is for streams; set stream to true or leave it out", "stream_options")
    several = (body.n or 1) > 1 or (isinstance(body, CompletionBody) and len(body.prompt) > 1)
    if several and body.kvblend is not None and body.kvblend.verify:
        raise refuse("one answer to one prompt can be verified; ask them one by one", "kvblend.verify")
    if not isinstance(body, ChatBody):
        return
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refuse("max_tokens and max_completion_tokens differ; give one", "max_tokens")


def _document(number: int, document: DocumentBody) -> GivenDocument:
    place = f"documents[{number}]"
    if document.text is None and document.id is None:
        raise refuse(f"{place} needs a text, or the id of a document that is known", place)
    if document.text is not None and not document.text.strip():
        raise refuse(f"{place}.text is empty; give a text, or leave the document out", f"{place}.text")
    if document.text is None and document.title is not None:
        raise refuse(f"{place} is known by its id and has its title there; leave title out", f"{place}.title")
    return GivenDocument(document.text or "", document.title or "", document.id or "")


def _retrieval(model: str, own: OwnBody, names: ModelNames, default_k: int) -> tuple[int | None, str]:
    """How many chunks to retrieve (None for none) and the corpus, from the model's name and the field `kvblend`."""
    if model not in names.names:
        message = f"the model {shown(model)} does not exist; there are: {', '.join(names.names)}"
        raise refuse(message, "model", NO_MODEL, 404)
    given = {
        "model": names.corpus_of(model),
        "kvblend.corpus": own.corpus,
        "kvblend.retrieve.corpus": own.retrieve.corpus if own.retrieve else None,
    }
    named = {field: name for field, name in given.items() if name is not None}
    field, corpus = next(iter(named.items()), ("kvblend.retrieve.corpus", ""))
    for other, name in named.items():
        if name != corpus:
            raise refuse(f"{other} names another corpus than {field}", other)
    if (named or own.retrieve) and corpus not in names.corpora:
        known = ", ".join(map(in_words, names.corpora))
        if not known:
            raise refuse("no document is indexed yet: add some, or ask without retrieval", field, _NO_CORPUS)
        missing = f"no corpus {shown(corpus)}" if corpus else "no corpus without a name"
        raise refuse(f"there is {missing}; there are: {known}", field, _NO_CORPUS)
    if own.retrieve is None:
        return (None if given["model"] is None else default_k), corpus
    return own.retrieve.top_k or default_k, corpus
