"""POST /v1/messages: Anthropic's Messages API. Nothing is kept: each request brings the whole conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from blend.limits import json_text, shown
from blend.serve.events import Event, Finished, Output, Started
from blend.serve.forms.tool_calls import is_object
from blend.serve.http.bodies import UNSUPPORTED, ChatBody, CommonBody, EndUser, MaxTokens, Stop, read_body
from blend.serve.http.chat import (
    MOST_TOOLS,
    Body,
    FunctionBody,
    FunctionName,
    MessageBody,
    Name,
    NamedFunction,
    TemplateArguments,
    ToolBody,
    ToolCallBody,
    ToolChoice,
)
from blend.serve.http.completions import Json, Reply, answer, check_of, event_data, figures_of
from blend.serve.http.errors import ApiError, anthropic_error, json_response, refuse
from blend.serve.http.questions import ModelNames, requests_of
from blend.serve.http.requests import AppState, admitted, client_of, state_of
from blend.serve.prompts.build import build_prompt
from blend.serve.request import Mark, ToolCall
from blend.serve.turns import Slices

_SHORT_TTL_S = 300.0
_LONG_TTL_S = 3600.0
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
# The session that Claude Code writes behind its user, in its older and newer versions.
_SESSION = re.compile(r'(?<=.)_session_[0-9a-f-]{36}$|(?<="session_id":")[0-9a-f-]{36}(?="}$)')


async def create(request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await answer(request, MessagesBody, MessagesReply)


async def count(request: HttpRequest) -> Response:
    """Count the tokens of a conversation's prompt."""
    state = state_of(request)
    tenant = admitted(request)
    with state.bodies.receiving(request, state.limits.body_bytes, state.limits.body_s) as received:
        counting = _counted(await received.body(), state, tenant)
        return json_response(await state.questions.run(client_of(request, tenant), counting))


def _counted(raw: bytes, state: AppState, tenant: str) -> Slices[Json]:
    service = state.require_service()
    body = read_body(raw, CountBody, state.limits)
    yield
    [request] = requests_of(body.completion(), ModelNames.of(service, tenant), state.limits)
    prompt = build_prompt(service.tenant(tenant), request, lambda: None)
    return {"input_tokens": prompt.layout.rows}


class CacheControl(Body):
    """A mark behind text that is to be kept. ttl: from its last use on."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        """Its time."""
        return _LONG_TTL_S if self.ttl == "1h" else _SHORT_TTL_S


class SourceBody(Body):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


def _joined(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _text(value: Any) -> Any:
    """Text, or the lines of text blocks."""
    if not isinstance(value, list):
        return value
    for number, block in enumerate(value):
        if not (isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)):
            raise ValueError(f"block {number} is {shown(block)}; only blocks of the type 'text' are supported here")
    return "\n".join(block["text"] for block in value)


Text = Annotated[str, BeforeValidator(_text)]


def _text_blocks(value: Any) -> Any:
    _text(value)  # its error says what is wrong
    return _blocks(value)


class BlockBody(Body):
    """A block of a message. signature, data: of thoughts, which clients send back as they came."""

    type: Literal["text", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    source: SourceBody | None = None
    title: str | None = None
    context: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: Name | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    citations: Any = None
    caller: Any = None

    @property
    def words(self) -> str:
        """The text of a block of text or of a document, which begins with its title."""
        if self.source is None:
            return self.text or ""
        return "\n\n".join(filter(None, (self.title, self.context, self.source.data)))


_REQUIRED = {
    "text": "text",
    "document": "source",
    "thinking": "thinking",
    "tool_use": "name",
    "tool_result": "tool_use_id",
}
"""What each type of block must have."""
_OF_ROLES = {
    "system": ("text",),
    "user": ("text", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""The types of blocks in each role's messages."""


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TurnBody(Body):
    """A message: a text, or blocks. Agents put instructions of the system between the turns, too."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[BlockBody], BeforeValidator(_blocks)]


def _custom(value: Any) -> Any:
    for tool in value if isinstance(value, list) else ():
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            raise ValueError(f"{shown(tool['type'])} is not supported; only tools with an input_schema are")
    return value


class ClientTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None


class ClientChoice(Body):
    """Whether the model may or must call, or the tool that it must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def openai(self) -> ToolChoice:
        """In OpenAI's words."""
        if self.type == "tool":
            named = NamedFunction(name=self.name) if self.name else None
            return ToolChoice(type="function", function=named)
        return ToolChoice(type="required" if self.type == "any" else self.type)


class ThinkingBody(Body):
    """Whether the model thinks first. budget_tokens: has no effect."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class MetadataBody(Body):
    """The application's end user."""

    user_id: EndUser | None = None

    @property
    def user(self) -> str | None:
        """The end user without a session, so that the sessions of an agent share what the server learns."""
        return _SESSION.sub("", self.user_id) if self.user_id is not None else None


class CountBody(CommonBody):
    """POST /v1/messages/count_tokens."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: UNSUPPORTED[name] for name in ("store", "functions")},
        **dict.fromkeys(("n", "stop", "logit_bias", "container"), (None,)),
        "mcp_servers": (None, []),
    }
    ignored: ClassVar[Sequence[str]] = ("service_tier", "context_management", "inference_geo", "output_config", "speed")
    messages: Annotated[list[TurnBody], Field(min_length=1)]
    system: Annotated[list[TextBlock], BeforeValidator(_text_blocks)] | None = None
    cache_control: CacheControl | None = None  # of the whole prompt
    stop_sequences: list[Stop] | None = None
    tools: Annotated[list[ClientTool], BeforeValidator(_custom), Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ClientChoice | None = None
    thinking: ThinkingBody | None = None
    metadata: MetadataBody | None = None
    chat_template_kwargs: TemplateArguments | None = None  # vLLM's

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The text to keep, in the messages of the `completion`."""
        return (*super().marks, *self.cache_marks)

    @property
    def cache_marks(self) -> tuple[Mark, ...]:
        """The last `cache_control` of each time, in order; those before it keep no more."""
        system = self.system or ()
        places = dict[float, tuple[int, int]]()  # message, -1 for the system's, and blocks up to the mark
        for tool in self.tools or ():
            if tool.cache_control is not None:
                places[tool.cache_control.seconds] = (-1, len(system))
        contents: list[Sequence[TextBlock | BlockBody]] = [system, *(message.content for message in self.messages)]
        for number, content in enumerate(contents, -1):
            for count, block in enumerate(content, 1):
                if block.cache_control is not None:
                    places[block.cache_control.seconds] = (number, count)
        marks = [self._mark(seconds, *place) for seconds, place in sorted(places.items(), key=itemgetter(1))]
        whole = [Mark(self.cache_control.seconds)] if self.cache_control is not None else []
        return (*marks, *whole)

    def _mark(self, seconds: float, number: int, count: int) -> Mark:
        """A mark behind so many blocks of a message."""
        if number < 0:
            return Mark(seconds, 0, len(_joined((self.system or ())[:count])))
        before = bool(self._system) + sum(len(_written(message)) for message in self.messages[:number])
        message = self.messages[number]
        written = _written(message.model_copy(update={"content": message.content[:count]}))
        return Mark(seconds, before + len(written) - 1, len(written[-1].content or ""))

    @property
    def _system(self) -> str:
        return _joined(self.system or ())

    def completion(self) -> ChatBody:
        """The same question to /v1/chat/completions. Raises `ApiError`."""
        common = {name: getattr(self, name) for name in CommonBody.model_fields}
        user = self.metadata.user if self.metadata is not None else None
        choice = self.tool_choice
        tools = [
            ToolBody(
                type="function",
                function=FunctionBody(name=tool.name, description=tool.description, parameters=tool.input_schema),
            )
            for tool in self.tools or ()
        ]
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return ChatBody.model_construct(
            **{**common, "stop": self.stop_sequences, "user": common["user"] or user},
            messages=_conversation(self._system, self.messages),
            tools=tools or None,
            tool_choice=choice.openai if choice is not None else None,
            parallel_tool_calls=not choice.disable_parallel_tool_use if choice is not None else None,
            reasoning_effort="medium" if thinks else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: MaxTokens


def _conversation(system: str, messages: Sequence[TurnBody]) -> list[MessageBody]:
    """The conversation in OpenAI's words: results of tools are messages of their own."""
    conversation = [MessageBody(role="system", content=system)] if system else []
    for number, message in enumerate(messages):
        place = f"messages[{number}].content"
        for index, block in enumerate(message.content):
            _check(f"{place}[{index}]", block, message.role)
        conversation += _written(message)
    if messages[-1].role == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise refuse(f"{last}: an answer that has begun is not continued; end with another message", last)
    return conversation


def _written(message: TurnBody) -> list[MessageBody]:
    return _of_assistant(message) if message.role == "assistant" else _of_user(message)


def _check(place: str, block: BlockBody, role: str) -> None:
    if block.type not in _OF_ROLES[role]:
        raise refuse(f"{place}: no message of the role {role} has a block of the type {block.type}", place)
    name = _REQUIRED.get(block.type)
    if name is not None and getattr(block, name) is None:
        raise refuse(f"{place}.{name} is missing", f"{place}.{name}", "missing_required_parameter")


def _of_user(message: TurnBody) -> list[MessageBody]:
    """The user's message, or the system's; results of tools before it."""
    results = [
        MessageBody(role="tool", content=block.content or "", tool_call_id=block.tool_use_id)
        for block in message.content
        if block.type == "tool_result"
    ]
    texts = [block.words for block in message.content if block.type != "tool_result"]
    return [*results, MessageBody(role=message.role, content="\n".join(texts))] if texts or not results else results


def _of_assistant(message: TurnBody) -> list[MessageBody]:
    calls = [
        ToolCallBody.model_validate(
            {"id": block.id or _identifier("toolu"), "function": {"name": block.name, "arguments": _arguments(block)}}
        )
        for block in message.content
        if block.type == "tool_use"
    ]
    thoughts = "".join(block.thinking or "" for block in message.content)
    text = "\n".join(block.text or "" for block in message.content if block.type == "text")
    return [MessageBody(role="assistant", content=text, reasoning=thoughts or None, tool_calls=calls or None)]


def _arguments(block: BlockBody) -> str:
    return json_text(block.input or {})


class MessagesReply(Reply):
    """Replies of /v1/messages: an answer as blocks, which grow by events in a stream."""

    end = b""

    def __init__(self, body: MessagesBody, model: str) -> None:
        super().__init__()
        self._message: Json = {
            "id": _identifier("msg"),
            "type": "message",
            "role": "assistant",
            "model": body.model or model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._marks = body.cache_marks
        self._block: Json | None = None  # the open one

    def whole(
        self,
        started: Sequence[Started],
        outputs: Sequence[Output],
        ends: Sequence[Finished],
    ) -> Json:
        """The answer in one piece."""
        events: list[Event] = [*started, *outputs, *ends]
        for event in events:
            for _ in self.chunks(event):
                pass
        return {**self._message, "usage": self._usage}

    def encoded(self, chunk: Json) -> bytes:
        """An event with its name."""
        return f"event: {chunk['type']}\n".encode() + event_data(chunk)

    def failed(self, failure: ApiError) -> Json:
        """The event that ends a stream early."""
        return anthropic_error(failure)

    def _at_start(self, event: Started) -> Iterator[Json]:
        self._message["kvblend"] = figures_of(event)
        yield {"type": "message_start", "message": {**self._message, "usage": self._usage}}

    def _at_output(self, event: Output) -> Iterator[Json]:
        if event.text:
            kind = "thinking" if event.thoughts else "text"
            yield from self._opened(kind)
            assert self._block is not None
            self._block[kind] += event.text
            yield self._delta({"type": f"{kind}_delta", kind: event.text})
        for call in event.calls:
            yield from self._called(call)

    def _at_end(self, event: Finished) -> Iterator[Json]:
        if not event.last:
            return
        yield from self._closed()
        if event.check is not None:
            self._message["kvblend"] = {**self._message["kvblend"], "check": check_of(event.check)}
        called = any(block["type"] == "tool_use" for block in self._message["content"])
        reason = "stop_sequence" if event.stop else _STOP_REASONS.get(event.reason, "end_turn")
        ended = {"stop_reason": "tool_use" if called else reason, "stop_sequence": event.stop or None}
        self._message |= ended
        yield {"type": "message_delta", "delta": ended, "usage": self._usage}
        yield {"type": "message_stop"}

    def _called(self, call: ToolCall) -> Iterator[Json]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield from self._opened("tool_use", block)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        assert self._block is not None
        self._block["input"] = json.loads(call.arguments) if is_object(call.arguments) else {}
        yield from self._closed()

    def _opened(self, kind: str, block: Json | None = None) -> Iterator[Json]:
        """Open a block of this type, unless one is open."""
        if self._block is not None and self._block["type"] == kind:
            return
        yield from self._closed()
        signature = {"signature": ""} if kind == "thinking" else {}
        self._block = block or {"type": kind, kind: "", **signature}
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(self._block)}

    def _closed(self) -> Iterator[Json]:
        """Close the open block, if there is one."""
        if self._block is not None:
            index = self._index
            self._message["content"] = [*self._message["content"], self._block]
            self._block = None
            yield {"type": "content_block_stop", "index": index}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self._message["content"])

    @property
    def _usage(self) -> Json:
        """In this endpoint's fields: rows from memory are read from the cache; with a mark, the others are written to it."""
        used = super()._usage
        cached = used["prompt_tokens_details"]["cached_tokens"]
        computed = used["prompt_tokens"] - cached
        written = computed if self._marks else 0
        lasting = bool(self._marks) and self._marks[-1].seconds > _SHORT_TTL_S
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if lasting else written,
                "ephemeral_1h_input_tokens": written if lasting else 0,
            },
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
        }


def _identifier(kind: str) -> str:
    return f"{kind}_{uuid4().hex[:24]}"
