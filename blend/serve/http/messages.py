"""POST /v1/messages: Anthropic's Messages API. Nothing is kept: each request brings the whole conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Literal, get_args
from uuid import uuid4

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from blend.serve.events import Event, Finished, Output, Started
from blend.serve.forms.tool_calls import is_object
from blend.serve.http.bodies import UNSUPPORTED, Body, CarriedBody, EndUser, MaxTokens, Name, Stops, read_body
from blend.serve.http.chat import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ConversationBody,
    FunctionName,
    last_question,
    only_tools,
    tools_of,
)
from blend.serve.http.errors import ApiError, Json, json_response, missing, wrong
from blend.serve.http.parts import Content, Written, note_of_unread, part_of, require_text
from blend.serve.http.replies import Reply, answer, check_of, figures_of
from blend.serve.http.state import AppState, admitted, client_of, state_of
from blend.serve.http.to_requests import ModelNames, requests_of
from blend.serve.prompts.build import build_prompt
from blend.serve.request import Function, Mark, Message, ToolCall
from blend.serve.turns import Slices
from blend.text import json_text

_TTL_S = {"5m": 300.0, "1h": 3600.0}
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_CHOICES = {"any": "required", "tool": "function"}
# The session that Claude Code writes behind its user, in its older and newer versions.
_SESSION = re.compile(r'(?<=.)_session_[0-9a-f-]{36}$|(?<="session_id":")[0-9a-f-]{36}(?="}$)')

_NAMES_SOMEBODY = re.compile(r'^[^{]|:"[^"]')  # and not an object in which every value is empty


async def create(request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await answer(request, MessagesBody, MessagesReply)


async def count(request: HttpRequest) -> Response:
    """Count the tokens of a conversation's prompt."""
    state = state_of(request)
    tenant = admitted(request)
    with state.bodies.receiving(request) as received:
        counting = _counted(await received.body(), state, tenant)
        return json_response(await state.questions.run(client_of(request), counting))


def _counted(raw: bytes, state: AppState, tenant: str) -> Slices[Json]:
    service = state.require_service()
    body = read_body(raw, CountBody)
    yield
    [request] = requests_of(body, ModelNames.of(service, tenant), state.limits)
    prompt = build_prompt(service.tenant(tenant), request)
    return {"input_tokens": prompt.layout.rows}


class CacheControl(CarriedBody):
    """A mark behind text that is to be kept. ttl: from its last use on."""

    carried = "cache_control"
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


BlockType = Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]


def _blocks(value: Any) -> Any:
    """Blocks of the types that a turn knows. Others, of documents, pictures and a provider's own tools, become text."""
    if not isinstance(value, list):
        return [{"type": "text", "text": value}] if isinstance(value, str) else value
    blocks: list[Any] = []
    for number, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in get_args(BlockType):
            marked = block.get("cache_control")
            blocks.append({"type": "text", "text": part_of(block, number), "cache_control": marked})
        else:
            blocks.append(block)
    return blocks


class BlockBody(CarriedBody):
    """A block of a message."""

    carried = "content"
    ignored = ("signature", "data", "is_error", "citations", "caller")  # clients send blocks back as they came
    type: BlockType
    text: Written | None = None
    thinking: str | None = None
    id: Name = ""
    name: FunctionName | None = None
    input: Json = {}
    tool_use_id: Name | None = None
    content: Written = Content("")
    cache_control: CacheControl | None = None

    @property
    def written(self) -> Content:
        """What it says: the text of a block of text, or of a tool's result."""
        return self.content if self.type == "tool_result" else self.text or Content("")


_REQUIRED = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}
"""What each type of block must have."""
_OF_ROLES = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""The types of blocks in each role's messages."""


class TurnBody(Body):
    """A message: a text, or blocks. Agents put instructions of the system between the turns, too."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[BlockBody], BeforeValidator(_blocks)]


_of_client = partial(only_tools, kinds=(None, "custom"))


class ClientTool(CarriedBody):
    """A tool that the client runs."""

    carried = "tools"
    ignored = ("type", "eager_input_streaming")
    strict: bool = False
    name: FunctionName
    description: str = ""
    input_schema: Json
    cache_control: CacheControl | None = None


class ClientChoice(Body):
    """Whether the model may or must call, or the tool that it must call."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: FunctionName = ""
    disable_parallel_tool_use: bool = False


class ThinkingBody(Body):
    """Whether the model thinks first."""

    ignored = ("budget_tokens", "display")
    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = "disabled"


def user_without_session(name: str) -> str:
    """An agent's `user_id` without its session, so that its sessions share what the server learns."""
    without_session = _SESSION.sub("", name)
    return without_session if _NAMES_SOMEBODY.search(without_session) else name


class MetadataBody(CarriedBody):
    """The application's end user."""

    carried = "metadata"
    user_id: EndUser = ""


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is made. effort: of thoughts, if the model thinks."""

    ignored = ("task_budget",)  # a hint to the model, which none here reads
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] = "medium"


class CountBody(ConversationBody):
    """POST /v1/messages/count_tokens."""

    unsupported = {
        **{name: UNSUPPORTED[name] for name in ("store", "functions")},
        **dict.fromkeys(("n", "stop", "logit_bias", "container")),
        "mcp_servers": [],
    }
    ignored = (
        *(
            "service_tier",
            "context_management",
            "inference_geo",
            "speed",
            "diagnostics",
            "betas",
            "compaction",
            "thread",
        ),
        *("billing_policy", "fallback_credit_token", "fallbacks", "user_profile_id", "workspace_id"),
    )
    messages: Annotated[list[TurnBody], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Annotated[list[BlockBody], BeforeValidator(_blocks)] = []
    cache_control: CacheControl | None = None  # of the whole prompt
    stop: Annotated[Stops, Field(alias="stop_sequences")] = []
    tools: Annotated[list[ClientTool], BeforeValidator(_of_client), Field(max_length=MOST_TOOLS)] = []
    tool_choice: ClientChoice = ClientChoice()
    thinking: ThinkingBody = ThinkingBody()
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # its earlier place
    metadata: MetadataBody = MetadataBody()

    @property
    def end_user(self) -> str:
        """The application's end user, or the one that an agent names."""
        return super().end_user or user_without_session(self.metadata.user_id)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The text to keep, in the messages of `prompts`."""
        return (*super().marks, *self.cache_marks)

    @property
    def cache_marks(self) -> tuple[Mark, ...]:
        """The last `cache_control` of each time, in order; those before it keep no more."""
        places = dict[str, tuple[int, int]]()  # the turn, and blocks up to the mark
        for tool in self.tools:
            if tool.cache_control is not None:
                places[tool.cache_control.ttl] = (0, len(self.system))
        for number, turn in enumerate(self._turns):
            for blocks, block in enumerate(turn.content, 1):
                if block.cache_control is not None:
                    places[block.cache_control.ttl] = (number, blocks)
        marks = [self._mark(_TTL_S[ttl], *place) for ttl, place in sorted(places.items(), key=itemgetter(1))]
        whole = [Mark(_TTL_S[self.cache_control.ttl])] if self.cache_control is not None else []
        return (*marks, *whole)

    def _mark(self, seconds: float, number: int, blocks: int) -> Mark:
        """A mark behind so many blocks of a turn."""
        *before, turn = self._turns[: number + 1]
        cut = turn.model_copy(update={"content": turn.content[:blocks]})
        written = _written([*before, cut])
        return Mark(seconds, len(written) - 1, len(written[-1].content))

    @property
    def _turns(self) -> list[TurnBody]:
        """The messages, behind the system's instructions if there are any."""
        system = TurnBody.model_construct(role="system", content=self.system)
        return [system, *self.messages] if any(block.written.text for block in self.system) else self.messages

    def prompts(self) -> list[Json]:
        """The prompt as fields of `Request`. Raises `ApiError`."""
        for index, block in enumerate(self.system):
            _check(f"system[{index}]", block, "system")
        for number, turn in enumerate(self.messages):
            for index, block in enumerate(turn.content):
                _check(f"messages[{number}].content[{index}]", block, turn.role)
        if turn.role == "assistant":
            raise wrong(f"messages[{number}]", "an answer that has begun is not continued; end with another message")
        choice = self.tool_choice
        kind = _CHOICES.get(choice.type, choice.type)
        named = choice.name if kind == "function" else ""
        offered = [Function(tool.name, tool.description, tool.input_schema, tool.strict) for tool in self.tools]
        wanted = "xhigh" if self.output_config.effort == "max" else self.output_config.effort
        effort = "none" if self.thinking.type == "disabled" else wanted
        tools = tools_of(offered, kind, named, parallel=not choice.disable_parallel_tool_use)
        form = self.output_config.format or self.output_format
        schema = form.schema_ if form is not None else None
        return self.conversation(_written(self._turns), tools, effort, schema, self._unread())

    def _unread(self) -> tuple[str, ...]:
        """A note of what stands in the conversation as its name. Raises `ApiError` if the user asks about it now."""
        for number in last_question([turn.role for turn in self.messages]):
            blocks = enumerate(self.messages[number].content)
            require_text(
                {
                    f"messages[{number}].content[{index}]": block.written
                    for index, block in blocks
                    if block.type == "text"
                }
            )
        turns = [self.system, *(turn.content for turn in self.messages)]
        return note_of_unread(block.written for blocks in turns for block in blocks)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: MaxTokens


def _written(turns: Sequence[TurnBody]) -> list[Message]:
    """The conversation up to some turn: results of tools are messages of their own."""
    return [
        message for turn in turns for message in (_of_assistant(turn) if turn.role == "assistant" else _of_user(turn))
    ]


def _check(place: str, block: BlockBody, role: str) -> None:
    if block.type not in _OF_ROLES[role]:
        raise wrong(place, f"no message of the role {role} has a block of the type {block.type}")
    name = _REQUIRED.get(block.type)
    if name is not None and getattr(block, name) is None:
        raise missing(f"{place}.{name}")


def _of_user(turn: TurnBody) -> list[Message]:
    """The user's message, or the system's; results of tools before it."""
    results = [
        Message("tool", block.written.text, (), block.tool_use_id or "")
        for block in turn.content
        if block.type == "tool_result"
    ]
    texts = [block.written.text for block in turn.content if block.type != "tool_result"]
    return [*results, Message(turn.role, "\n".join(texts))] if texts or not results else results


def _of_assistant(turn: TurnBody) -> list[Message]:
    calls = [
        ToolCall(block.id or _identifier("toolu"), block.name or "", json_text(block.input))
        for block in turn.content
        if block.type == "tool_use"
    ]
    thoughts = "".join(block.thinking or "" for block in turn.content)
    texts = [block.written.text for block in turn.content if block.type == "text"]
    text = "\n".join(filter(None, texts))  # a stream may have begun with an empty block
    return [Message("assistant", text, tuple(calls), thoughts=thoughts)]


class MessagesReply(Reply):
    """Replies of /v1/messages: an answer as blocks, which grow by events in a stream.

    A message that begins before its prompt is computed says what the prompt cost, and what came from where, at its end.
    """

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, body: MessagesBody, model: str) -> None:
        super().__init__()
        self._document = {
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
        self._begun = self._begun_early = False

    def failed(self, failure: ApiError) -> Json:
        """The event that ends a stream early."""
        return failure.anthropic_document

    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""
        self._count(event)
        if isinstance(event, Started):
            self._document["kvblend"] = figures_of(event)
            if not self._begun:
                yield self._begin()
        elif isinstance(event, Output):
            if event.text:
                yield from self._says("thinking" if event.thoughts else "text", event.text)
            for call in event.calls:
                yield from self._calls(call)
        elif isinstance(event, Finished) and event.last:
            yield from self._closed()
            yield from self._ends(event)

    def _begin(self) -> Json:
        self._begun = True
        self._document["usage"] = self._usage
        return {"type": "message_start", "message": self._document}

    def empty_chunks(self) -> Iterator[Json]:
        """The message begins, or its open block says nothing; without one, a text without a word begins."""
        if not self._begun:
            self._begun_early = True
            yield self._begin()
        else:
            yield from self._says(self._block["type"] if self._block is not None else "text", "")

    def _ends(self, event: Finished) -> Iterator[Json]:
        document = self._document
        if event.check is not None:
            document["kvblend"]["check"] = check_of(event.check)
        called = any(block["type"] == "tool_use" for block in document["content"])
        reason = "stop_sequence" if event.stop else _STOP_REASONS.get(event.reason, "end_turn")
        ended = {"stop_reason": "tool_use" if called else reason, "stop_sequence": event.stop or None}
        document |= {**ended, "usage": self._usage}
        figures = {"kvblend": document["kvblend"]} if self._begun_early else {}
        yield {"type": "message_delta", "delta": ended, "usage": self._usage, **figures}
        yield {"type": "message_stop"}

    def _says(self, kind: str, text: str) -> Iterator[Json]:
        """Add text or thoughts; opens their block if it is not open."""
        if self._block is None or self._block["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._opened({"type": kind, kind: "", **signature})
        assert self._block is not None
        self._block[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _calls(self, call: ToolCall) -> Iterator[Json]:
        block: Json = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield from self._opened(block)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if is_object(call.arguments):
            block["input"] = json.loads(call.arguments)
        yield from self._closed()

    def _opened(self, block: Json) -> Iterator[Json]:
        yield from self._closed()
        self._block = block
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _closed(self) -> Iterator[Json]:
        """Close the open block, if there is one."""
        if self._block is not None:
            yield {"type": "content_block_stop", "index": self._index}
            self._document["content"].append(self._block)
            self._block = None

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self._document["content"])

    @property
    def _usage(self) -> Json:
        """In this endpoint's fields: rows from memory are read from the cache; with a mark, the others are written to it."""
        used = super()._usage
        cached = used["prompt_tokens_details"]["cached_tokens"]
        computed = used["prompt_tokens"] - cached
        written = computed if self._marks else 0
        lasting = written if self._marks and self._marks[-1].seconds > _TTL_S["5m"] else 0
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_creation": {"ephemeral_5m_input_tokens": written - lasting, "ephemeral_1h_input_tokens": lasting},
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
        }


def _identifier(kind: str) -> str:
    return f"{kind}_{uuid4().hex[:24]}"
