"""Checks the bodies of requests: OpenAI's fields, and our own under `kvblend`. null counts as absent.

Types are strict: "1" is not a number. Error messages are pydantic's. Fields of OpenAI's protocol that cannot change an
answer are ignored. Those that the server does not support are refused by name, unless their value asks for nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import from_json

from blend.limits import NUMBERS, is_corpus_name, shown
from blend.sampling import LOGIT_BIAS, RANGES
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
)
from blend.serve.http.errors import ApiError, refuse
from blend.serve.limits import RequestLimits
from blend.serve.prompts.chat_template import DIRECT
from blend.serve.request import GivenDocument, Mark

END_USER = ("safety_identifier", "user")
"""Fields that name the application's end user; the first one given counts."""
IGNORED = ("metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention")
"""Fields on which nothing depends."""
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
DAY_S = 86_400
_MOST_STOPS = 32
_MOST_PROMPTS = 16
_MOST_TEXTS = 2048  # to embed
_MOST_BIASES = 1024
_LONGEST_PLACE = 100  # characters of a path in a message


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
    for prompt in several:
        if not (isinstance(prompt, str) or _are_ids(prompt)):
            raise ValueError("give text, a list of token ids, or a list of such prompts")
        if isinstance(prompt, list) and (len(prompt) < 2 or min(prompt) < 0):
            raise ValueError("give at least two token ids, from 0 on")
    return [tuple(prompt) if isinstance(prompt, list) else prompt for prompt in several]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _between(low: float, high: float) -> Any:
    return Field(ge=low, le=high)


def _within(name: str) -> Any:
    """Within the range that `Sampling` has under this name."""
    return _between(*RANGES[name])


def session_name(name: str) -> str:
    """The name of a session. Raises `ValueError` for what cannot name one."""
    if not is_corpus_name(name):
        raise ValueError(
            f"{shown(name)} cannot name a session: use up to 64 lower-case letters, digits, dashes and underscores, a letter "
            "or digit first"
        )
    return name


Stop = Annotated[str, Field(max_length=LONGEST_NAME)]
EndUser = Annotated[str, Field(max_length=LONGEST_NAME)]
MaxTokens = Annotated[int, _within("max_tokens")]
TopK = Annotated[int, _between(*NUMBERS["top_k"][:2])]
Session = Annotated[str, AfterValidator(session_name)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, _between(*LOGIT_BIAS)]
Logprobs = Annotated[int, _within("logprobs")]


class DocumentBody(Body):
    """A document: its text, optionally with the client's id; or the id of one in the corpus.

    A string is the text. Cohere's {"data": ...} holds the text, or title and text, which may be called snippet.
    """

    id: Name | None = None
    title: str | None = None
    text: str | None = None

    @property
    def given(self) -> GivenDocument:
        """For the service."""
        return GivenDocument(self.text or "", self.title or "", self.id or "")

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"text": value}
        if not isinstance(value, dict) or "data" not in value:
            return value
        outside = {name: content for name, content in value.items() if name != "data"}
        data = {"text": value["data"]} if isinstance(value["data"], str) else value["data"]
        if not isinstance(data, dict):
            raise ValueError('data is no object; give one, such as {"title": "...", "text": "..."}')
        if "snippet" in data and "text" not in data:
            data = {"text" if name == "snippet" else name: content for name, content in data.items()}
        if twice := sorted(data.keys() & outside.keys()):
            raise ValueError(f"{twice[0]} stands in data and outside; give it once")
        return {**outside, **data}


class UploadBody(Body):
    """POST /v1/documents, as JSON."""

    documents: Annotated[list[DocumentBody], Field(min_length=1)]
    corpus: str | None = None


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and any(isinstance(text, int | list) for text in texts):
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
    """The field `kvblend`.

    corpus: of documents that are named by ids, and of pasted text. ttl: seconds for which the prompt's text is kept. session:
    keeps it for a day behind its last use, or until the session is deleted.
    """

    corpus: str | None = None
    retrieve: RetrieveBody | None = None
    method: Literal["blend", "full"] | None = None
    cold: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    quality: Annotated[float, _between(*NUMBERS["quality"][:2])] | None = None
    ttl: Annotated[float, _between(1, DAY_S)] | None = None
    session: Session | None = None
    trace: bool | None = None
    verify: bool | None = None


class StreamOptions(Body):
    """Extras of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, the usage so far in every chunk


class CommonBody(Body):
    """The fields that all questions share.

    model: by default the decoder itself. unsupported, ignored: as `UNSUPPORTED` and `IGNORED`. asks: the field that holds the
    prompt.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    ignored: ClassVar[Sequence[str]] = IGNORED
    asks: ClassVar[str] = "messages"
    model: Name | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[int, _within("n")] | None = None
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, _within("top_k")] | None = None  # this and the next two are vLLM's and llama.cpp's
    min_p: Annotated[float, _within("min_p")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=_MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Stop], BeforeValidator(_stops), Field(max_length=_MOST_STOPS)] | None = None
    ignore_eos: bool | None = None  # vLLM's, for measuring
    safety_identifier: EndUser | None = None
    user: EndUser | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    documents: list[DocumentBody] | None = None
    kvblend: OwnBody | None = None

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The text to keep, in the messages of the `completion`."""
        options = self.kvblend or OwnBody()
        seconds = options.ttl or (DAY_S if options.session else 0)
        return (Mark(seconds),) if seconds else ()

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


def read_body(raw: bytes, kind: type[QuestionT], limits: RequestLimits) -> QuestionT:
    """A checked body of a question. Raises `ApiError`."""
    values = _json(raw)
    if values.get("best_of") is not None and values["best_of"] == values.get("n"):
        del values["best_of"]  # all answers that are computed are sent
    values = without_unsupported(values, kind.unsupported)
    for name in kind.ignored:
        values.pop(name, None)
    bounds = {"messages": limits.messages, "input": limits.messages, "documents": limits.documents}
    for name, most in bounds.items():
        items = values.get(name)
        if isinstance(items, list) and len(items) > most:
            message = f"{len(items):,} {name} are more than {most:,}, all that a request may bring; send fewer"
            raise refuse(message, name)
    if isinstance(messages := values.get("messages"), list):
        values["messages"] = [_message(number, message) for number, message in enumerate(messages)]
    return _validated(values, kind)


def read_upload(raw: bytes) -> UploadBody:
    """A checked body with documents. Raises `ApiError`."""
    body = _validated(_json(raw), UploadBody)
    for number, document in enumerate(body.documents):
        if document.text is None:
            place = f"documents[{number}].text"
            raise refuse(f"{place} is missing", place, "missing_required_parameter")
    return body


def read_embedding(raw: bytes) -> EmbeddingBody:
    """A checked body with texts to embed. Raises `ApiError`."""
    values = _json(raw)
    for name in (*IGNORED, *END_USER):
        values.pop(name, None)
    return _validated(values, EmbeddingBody)


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
    supported = {}
    for name, value in values.items():
        if name not in unsupported:
            supported[name] = value
            continue
        neutral = [default for default in unsupported[name] if isinstance(default, bool) == isinstance(value, bool)]
        if value not in neutral:
            field = f"{where}{name}"
            raise refuse(f"{field} = {shown(value)} is not supported; leave it out", field, "unsupported_parameter")
    return supported


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
    if len(param) > _LONGEST_PLACE:
        param = f"{param[:_LONGEST_PLACE]}..."
    if first["type"] == "model_type":  # pydantic's message would name our class
        return refuse(f"{param}: Input should be an object", param)
    codes = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
    words = first["msg"].removeprefix("Value error, ")
    return refuse(f"{param}: {words}", param, codes.get(first["type"], "invalid_value"))
