"""POST /v1/responses: OpenAI's newer form of a conversation. Nothing is kept: each request brings the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, get_args
from uuid import uuid4

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from blend.serve.events import Event, Finished, Output, Started, Token
from blend.serve.forms.tool_calls import is_object
from blend.serve.http.bodies import UNSUPPORTED, Body, CarriedBody, Logprobs, MaxTokens, Name
from blend.serve.http.chat import (
    MOST_MESSAGES,
    MOST_TOOLS,
    NO_VERBOSITY,
    Arguments,
    ConversationBody,
    Effort,
    FunctionBody,
    FunctionName,
    ToolChoice,
    Verbosity,
    last_question,
    only_tools,
    schema_of,
    tools_of,
)
from blend.serve.http.errors import ApiError, Json, missing, refuse
from blend.serve.http.parts import Content, Written, note_of_unread, part_of, require_text
from blend.serve.http.replies import Reply, answer, check_of, figures_of, logprobs_of
from blend.serve.request import FieldError, Message, ToolCall
from blend.text import json_text

_LOGPROBS = "message.output_text.logprobs"


async def create(request: HttpRequest) -> Response:
    """Answer a conversation."""
    try:
        return await answer(request, ResponsesBody, ResponsesReply)
    except FieldError as error:
        words, param = (_renamed(text) for text in (str(error), error.param))
        raise refuse(words, param) from None


def _renamed(text: str) -> str:
    """An error's message or place, with this endpoint's names of fields."""
    return text.replace("response_format.json_schema", "text.format").replace("].function", "]")


_CUSTOM = {"custom_tool_call": "function_call", "custom_tool_call_output": "function_call_output"}
_NOT_KEPT = ("item_reference", "compaction")  # what they stand for is at another server
ItemType = Literal["message", "reasoning", "function_call", "function_call_output"]


def _items(value: Any) -> Any:
    """Items of the types that a conversation knows. A provider's own calls become text of the assistant."""
    if not isinstance(value, list):
        return [{"role": "user", "content": value}] if isinstance(value, str) else value
    items: list[Any] = []
    for number, item in enumerate(value):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind in _CUSTOM:
            called = {"arguments": json_text({"input": item["input"]})} if "input" in item else {}
            items.append({**item, "type": _CUSTOM[kind], **called})
        elif isinstance(kind, str) and kind not in (*get_args(ItemType), *_NOT_KEPT):
            items.append({"role": "assistant", "content": part_of(item, number)})
        else:
            items.append(item)
    return items


class ItemBody(CarriedBody):
    """One item of a conversation: a message, thoughts, a call, or its result."""

    carried = "input"
    ignored = ("id", "status", "summary", "encrypted_content", "phase", "input")  # clients send answers back with them
    type: ItemType = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Written | None = None
    call_id: Name | None = None
    name: FunctionName | None = None
    arguments: Arguments | None = None
    output: Written | None = None


_FIELDS = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""What each type of item must have."""


_of_client = partial(only_tools, kinds=("function",))


class FlatFunction(FunctionBody):
    """A function, without the object around it."""

    type: Literal["function"]


class FlatChoice(ToolChoice):
    """A choice of tools, without an object around the function's name."""

    function: None = None
    name: FunctionName = ""


class TextFormat(Body):
    """The form of the answer, with the schema in it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name = "answer"
    description: str = ""
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool = False


class TextBody(Body):
    """The field `text`."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Verbosity = "medium"


class ReasoningBody(Body):
    """The field `reasoning`."""

    ignored = ("summary", "generate_summary")  # replies hold the thoughts themselves
    effort: Effort | None = None


Included = Literal[
    "message.output_text.logprobs",
    # The rest is of what no reply here has.
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
]


class ResponsesBody(ConversationBody):
    """POST /v1/responses."""

    unsupported = {
        **{name: UNSUPPORTED[name] for name in ("store", "prediction", "modalities", "audio", "moderation")},
        **dict.fromkeys(("conversation", "max_tool_calls", "previous_response_id", "prompt")),
        "n": 1,
        "background": False,
        "context_management": [],
        "truncation": "disabled",
    }
    asks = "input"
    input: Annotated[list[ItemBody], BeforeValidator(_items), Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[FlatFunction], BeforeValidator(_of_client), Field(max_length=MOST_TOOLS)] = []
    tool_choice: FlatChoice = FlatChoice()
    parallel_tool_calls: bool = True
    text: TextBody = TextBody()
    include: list[Included] = []
    top_logprobs: Logprobs = 0
    reasoning: ReasoningBody = ReasoningBody()

    @property
    def longest(self) -> int:
        """Most tokens of an answer; 0 for the server's default."""
        return self.max_output_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token; None gives no log-probabilities. Raises `ApiError`."""
        if _LOGPROBS in self.include:
            return self.top_logprobs
        if self.top_logprobs:
            raise refuse(f"top_logprobs needs include to name {_LOGPROBS}", "top_logprobs")
        return None

    def prompts(self) -> list[Json]:
        """The prompt as fields of `Request`. Raises `ApiError`."""
        choice = self.tool_choice
        offered = [tool.offered for tool in self.tools]
        form = self.text.format
        return self.conversation(
            self._messages(),
            tools_of(offered, choice.type, choice.name, parallel=self.parallel_tool_calls),
            self.reasoning.effort or "none",
            schema_of(form.type, form.schema_, "text.format.schema"),
            self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        """What has no effect. Raises `ApiError` if the user asks now about what the model cannot read."""
        contents = [item.content or Content("") for item in self.input]
        question = last_question([item.role or "assistant" for item in self.input])
        require_text({f"input[{number}].content": contents[number] for number in question})
        outputs = [item.output for item in self.input if item.output is not None]
        without_effect = (NO_VERBOSITY,) if self.text.verbosity != "medium" else ()
        return (*note_of_unread([*contents, *outputs]), *without_effect)

    def _messages(self) -> list[Message]:
        """The conversation. Calls join the assistant's message before them, thoughts the one behind them."""
        messages = [Message("system", self.instructions)] if self.instructions else []
        thoughts = ""
        for number, item in enumerate(self.input):
            for name in _FIELDS[item.type]:
                if getattr(item, name) is None:
                    raise missing(f"input[{number}].{name}")
            content = item.content.text if item.content is not None else ""
            if item.type == "reasoning":
                thoughts = content
                continue
            if item.type == "message":
                role = "system" if item.role == "developer" else item.role or "user"
                messages.append(Message(role, content, thoughts=thoughts if role == "assistant" else ""))
            elif item.type == "function_call_output":
                messages.append(Message("tool", item.output.text if item.output else "", (), item.call_id or ""))
            else:
                if not messages or messages[-1].role != "assistant":
                    messages.append(Message("assistant", "", thoughts=thoughts))
                call = ToolCall(item.call_id or "", item.name or "", item.arguments or "")
                messages[-1] = messages[-1]._replace(tool_calls=(*messages[-1].tool_calls, call))
            thoughts = ""
        return messages


class ResponsesReply(Reply):
    """Replies of /v1/responses: an answer as items, which grow by events in a stream."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        super().__init__()
        choice = body.tool_choice
        optional = {"description": None, "parameters": None, "strict": None}
        self._document = {
            "id": _identifier("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model or model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _given(body.text.format)},
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "tool_choice": _given(choice) if choice.name else choice.type,
            "tools": [{**optional, **_given(tool)} for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._number = 0  # of events so far
        self._item: Json | None = None  # the open message or thoughts
        self._with_logprobs = body.wanted_logprobs is not None

    def chunks(self, event: Event) -> Iterator[Json]:
        """The chunks for an event of an answer that does not fail."""
        self._count(event)
        if isinstance(event, Started):
            self._document["kvblend"] = figures_of(event)
            if not self._number:
                yield from self.empty_chunks()
        elif isinstance(event, Output):
            if event.thoughts and event.text:
                yield from self._thinks(event.text)
            elif not event.thoughts and (event.text or (self._with_logprobs and not event.calls)):
                yield from self._says(event.text, event.tokens)
            for call in event.calls:
                yield from self._calls(call)
        elif isinstance(event, Finished) and event.last:
            yield from self._ends(event)

    def empty_chunks(self) -> Iterator[Json]:
        """The response is being made."""
        if not self._number:
            yield self._event("created", response=self._document)
        yield self._event("in_progress", response=self._document)

    def _ends(self, event: Finished) -> Iterator[Json]:
        if event.check is not None:
            self._document["kvblend"]["check"] = check_of(event.check)
        if not self._document["output"] and self._item is None:
            yield from self._says("", ())
        status = "completed"
        if event.reason == "length":
            status = "incomplete"
            self._document["incomplete_details"] = {"reason": "max_output_tokens"}
        yield from self._closed(status)
        yield self._ended(status)

    def _thinks(self, text: str) -> Iterator[Json]:
        """Add thoughts; opens their item if it is not open."""
        if self._item is None:
            part = {"type": "reasoning_text", "text": ""}
            yield from self._opened({"type": "reasoning", "summary": []}, part)
        self._part["text"] += text
        yield self._event("reasoning_text.delta", **self._place, delta=text)

    def _says(self, text: str, tokens: tuple[Token, ...]) -> Iterator[Json]:
        """Add text; opens a message if none is open."""
        if self._item is None or self._item["type"] == "reasoning":
            yield from self._closed()
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._opened({"type": "message", "role": "assistant"}, part)
            yield self._event("content_part.added", **self._place, part=part)
        logprobs = logprobs_of(tokens) if self._with_logprobs else []
        if text or logprobs:
            self._part["text"] += text
            self._part["logprobs"] += logprobs
            yield self._event("output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def _opened(self, item: Json, part: Json) -> Iterator[Json]:
        self._part = part
        self._item = {"id": _identifier(_PREFIXES[item["type"]]), **item, "status": "in_progress", "content": []}
        yield self._event("output_item.added", output_index=self._index, item=self._item)

    def _closed(self, status: str = "completed") -> Iterator[Json]:
        """End the open item, if there is one."""
        item = self._item
        if item is None:
            return
        part = self._part
        if item["type"] == "reasoning":
            yield self._event("reasoning_text.done", **self._place, text=part["text"])
        else:
            yield self._event("output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
            yield self._event("content_part.done", **self._place, part=part)
        yield self._item_ended({**item, "status": status, "content": [part]})
        self._item = None

    def _calls(self, call: ToolCall) -> Iterator[Json]:
        yield from self._closed()
        identifier = _identifier("fc")
        names = {"call_id": call.id, "name": call.name}
        item = {"id": identifier, "type": "function_call", **names, "arguments": "", "status": "in_progress"}
        place = {"item_id": identifier, "output_index": self._index}
        yield self._event("output_item.added", output_index=self._index, item=item)
        yield self._event("function_call_arguments.delta", **place, delta=call.arguments)
        complete = {"name": call.name, "arguments": call.arguments}
        yield self._event("function_call_arguments.done", **place, **complete)
        status = "completed" if is_object(call.arguments) else "incomplete"
        yield self._item_ended({**item, **complete, "status": status})

    def _item_ended(self, item: Json) -> Json:
        event = self._event("output_item.done", output_index=self._index, item=item)
        self._document["output"].append(item)
        return event

    def failed(self, failure: ApiError) -> Json:
        """The event that ends a stream early."""
        self._document["error"] = {"code": failure.code, "message": failure.message}
        return self._ended("failed")

    def _ended(self, status: str) -> Json:
        self._document["status"] = status
        if self._started:
            self._document["usage"] = self._usage
        return self._event(status, response=self._document)

    @property
    def _usage(self) -> Json:
        """In this endpoint's fields."""
        used = super()._usage
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }

    @property
    def _index(self) -> int:
        return len(self._document["output"])

    @property
    def _place(self) -> Json:
        """Of the open item's part."""
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return event


_PREFIXES = {"reasoning": "rs", "message": "msg"}


def _given(body: Body) -> Json:
    """The fields of a body that the client sent."""
    return body.model_dump(by_alias=True, exclude_unset=True)


def _identifier(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
