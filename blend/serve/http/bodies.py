"""Checks the bodies of requests: OpenAI's fields, and our own under `kvblend`. null counts as absent.

Types are strict: "1" is not a number. Error messages are pydantic's.

The rule for fields, which `Body` and `CarriedBody` keep for all protocols:

- What changes the answer is honoured, or refused by name. A value that asks for nothing is no refusal (`unsupported`).
- What cannot change it has no effect (`ignored`).
- Unknown fields of a request are refused, as they may be misspelled. Unknown fields of a history and of a tool's description
  are another server's: they have no effect, and the log names each once.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from blend.ranges import NUMBERS
from blend.sampling import LOGIT_BIAS, RANGES
from blend.serve.failures import LOG
from blend.serve.http.errors import ApiError, Json, refuse
from blend.serve.request import Edits, Mark
from blend.text import is_corpus_name, shown

END_USER = ("safety_identifier", "user")
"""Fields that name the application's end user; the first one given counts."""
IGNORED = (
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "client_metadata",
)
"""Fields on which nothing depends."""
UNSUPPORTED: Mapping[str, Any] = {
    **dict.fromkeys(("audio", "moderation", "prediction", "web_search_options")),
    "functions": [],
    "echo": False,
    "store": False,
    "function_call": "none",
    "modalities": ["text"],
    "suffix": "",
    "min_tokens": 0,  # this and what follows are vLLM's
    "skip_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
}
"""Unsupported fields, each with the value that asks for nothing, besides null."""
LONGEST_NAME = 512
DAY_S = 86_400
_MOST_STOPS = 32
_MOST_PROMPTS = 16
_MOST_DOCUMENTS = 64
_MOST_TEXTS = 2048  # to embed
_MOST_BIASES = 1024
_LONGEST_PLACE = 100  # characters of a path in a message
_UNSUPPORTED = "unsupported_parameter"
_LOGGED_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,60}")  # the log holds no text of prompts
_MOST_NOTED = 100
_noted = set[str]()
_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter", _UNSUPPORTED: _UNSUPPORTED}
"""Codes of mistakes that are no invalid values, by pydantic's types of errors."""


class Body(BaseModel):
    """Known fields only, with strict types. unsupported, ignored: as `UNSUPPORTED` and `IGNORED`.

    carried: what it is called in the log, if unknown fields have no effect; see `CarriedBody`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    unsupported: ClassVar[Mapping[str, Any]] = {}
    ignored: ClassVar[Sequence[str]] = ()
    carried: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: field for name, field in value.items() if field is not None and name not in cls.ignored}
        if cls.carried:
            for name in given.keys() - cls.unsupported.keys() - cls.names():
                del given[name]
                if info.context is not None:
                    info.context.add(f"{cls.carried}.{name}")
        for name in given.keys() & cls.unsupported.keys():
            field = given.pop(name)
            neutral = cls.unsupported[name]
            if type(field) is not type(neutral) or field != neutral:
                raise PydanticCustomError(_UNSUPPORTED, "{value}", {"name": name, "value": shown(field)})
        return given

    @classmethod
    @cache
    def names(cls) -> frozenset[str]:
        """The names of its fields in a request."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


class CarriedBody(Body):
    """What clients carry along as another server gave it: a part of a history, or the description of a tool.

    Unknown fields have no effect. Each kind of such a body says what the log calls it.
    """

    carried = "part"


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


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and any(isinstance(text, int | list) for text in texts):
        raise ValueError("give texts, not token ids (LangChain: check_embedding_ctx_length=False)")
    if isinstance(texts, list) and not all(texts):
        raise ValueError("an empty text has no embedding")
    return texts


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


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
CarriedName = Annotated[str, Field(max_length=LONGEST_NAME)]
"""One that a history may hold empty."""
Stop = Annotated[str, Field(max_length=LONGEST_NAME)]
Stops = Annotated[list[Stop], BeforeValidator(_stops), Field(max_length=_MOST_STOPS)]
EndUser = Annotated[str, Field(max_length=LONGEST_NAME)]
MaxTokens = Annotated[int, _within("max_tokens")]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, _between(*LOGIT_BIAS)]
Logprobs = Annotated[int, _within("logprobs")]


class DocumentBody(Body):
    """A document: its text, optionally with the client's id; or the id of one in the corpus.

    A string is the text. Cohere's {"data": ...} holds the text, or title and text, which may be called snippet.
    """

    id: Name = ""
    title: str = ""
    text: str | None = None

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


class UploadedBody(DocumentBody):
    """A document that is added."""

    text: str


class UploadBody(Body):
    """POST /v1/documents, as JSON."""

    documents: Annotated[list[UploadedBody], Field(min_length=1)]
    corpus: str | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings. model: the embedder's name, or one of `ModelNames`."""

    ignored = (*IGNORED, *END_USER)
    input: Annotated[list[str], BeforeValidator(_texts), Field(min_length=1, max_length=_MOST_TEXTS)]
    model: Name = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


class RetrieveBody(Body):
    """Retrieve chunks of a corpus for the question."""

    top_k: Annotated[int, _between(*NUMBERS["top_k"][:2])] = 0
    corpus: str | None = None


class OwnBody(Body):
    """The field `kvblend`.

    corpus: of documents that are named by ids, and of pasted text. ttl: seconds for which the prompt's text is kept. session:
    keeps it for a day behind its last use, or until the session is deleted.
    """

    corpus: str | None = None
    retrieve: RetrieveBody | None = None
    method: Literal["blend", "full"] = "blend"
    cold: bool = False
    edits: Edits = "checked"
    priority: Annotated[int, _between(-1000, 1000)] = 0
    deadline_s: Annotated[float, Field(gt=0, le=DAY_S)] | None = None
    quality: Annotated[float, _between(*NUMBERS["quality"][:2])] | None = None
    ttl: Annotated[float, _between(1, DAY_S)] = 0.0
    session: Annotated[str, AfterValidator(session_name)] = ""
    trace: bool = False
    verify: bool = False


class StreamOptions(Body):
    """Extras of a stream."""

    ignored = ("include_obfuscation",)  # padding of chunks
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, the usage so far in every chunk


class CommonBody(Body):
    """The fields that all questions share.

    model: by default the decoder itself. max_tokens: 0 for the server's default. asks: the field that holds the prompt.
    """

    unsupported = UNSUPPORTED
    ignored: ClassVar[Sequence[str]] = IGNORED
    asks: ClassVar[str] = "messages"
    model: Name = ""
    max_tokens: MaxTokens = 0
    n: Annotated[int, _within("n")] = 1
    best_of: int = 1
    temperature: Annotated[float, _within("temperature")] = 0.0
    top_p: Annotated[float, _within("top_p")] = 1.0
    top_k: Annotated[int, _within("top_k")] = 0  # this and the next two are vLLM's and llama.cpp's
    min_p: Annotated[float, _within("min_p")] = 0.0
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _within("frequency_penalty")] = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=_MOST_BIASES)] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = []
    ignore_eos: bool = False  # vLLM's, for measuring
    safety_identifier: EndUser = ""
    user: EndUser = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    documents: Annotated[list[DocumentBody], Field(max_length=_MOST_DOCUMENTS)] = []
    kvblend: OwnBody = OwnBody()

    @abstractmethod
    def prompts(self) -> list[Json]:
        """The prompts, each as fields of `Request`. Raises `ApiError`."""

    @property
    def longest(self) -> int:
        """Most tokens of an answer; 0 for the server's default. Raises `ApiError`."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token; None gives no log-probabilities. Raises `ApiError`."""
        return None

    @property
    def end_user(self) -> str:
        """Whom the application asks for, or ""."""
        return self.safety_identifier or self.user

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The text to keep, in the messages of `prompts`."""
        seconds = self.kvblend.ttl or (DAY_S if self.kvblend.session else 0)
        return (Mark(seconds),) if seconds else ()


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    asks = "prompt"
    prompt: Annotated[list[str | tuple[int, ...]], BeforeValidator(_prompts)]
    logprobs: Logprobs | None = None

    def prompts(self) -> list[Json]:
        """The prompts, each as fields of `Request`."""
        return [{"prompt": prompt} for prompt in self.prompt]

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token; None gives no log-probabilities."""
        return self.logprobs


BodyT = TypeVar("BodyT", bound=Body)


def read_body(raw: bytes, kind: type[BodyT]) -> BodyT:
    """A checked body. Raises `ApiError`."""
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error) if str(error).isascii() else "not UTF-8 text"
        raise refuse(f"the body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise refuse("the body is not a JSON object", code="invalid_json")
    unknown = set[str]()
    try:
        return kind.model_validate(values, context=unknown)
    except ValidationError as error:
        raise _mistake(error) from None
    finally:
        _note_unknown(unknown)


def _note_unknown(names: set[str]) -> None:
    """Log the names of fields without effect, each once: clients repeat them in every request."""
    for name in names - _noted:
        if _LOGGED_NAME.fullmatch(name) and len(_noted) < _MOST_NOTED:
            _noted.add(name)
            LOG.info("field without effect", extra={"field": name})


def _mistake(error: ValidationError) -> ApiError:
    """The error for the first mistake, with its place in the body."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind = first["type"]
    place = (*first["loc"], first["ctx"]["name"]) if kind == _UNSUPPORTED else first["loc"]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    param = "".join(parts).removeprefix(".")
    if len(param) > _LONGEST_PLACE:
        param = f"{param[:_LONGEST_PLACE]}..."
    words = f"{param}: {first['msg'].removeprefix('Value error, ')}"
    if kind == _UNSUPPORTED:
        words = f"{param} = {first['msg']} is not supported; leave it out"
    if kind == "model_type":  # pydantic's message would name our class
        words = f"{param}: Input should be an object"
    return refuse(words, param, _CODES.get(kind, "invalid_value"))
