"""POST /v1/responses: OpenAI's newer form of a conversation. Nothing is kept: each request brings the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from blend.limits import shown
from blend.serve.events import Event, Finished, Output, Started, Token
from blend.serve.forms.tool_calls import is_object
from blend.serve.http.bodies import UNSUPPORTED, ChatBody, CommonBody, Logprobs, MaxTokens
from blend.serve.http.chat import (
    MOST_TOOLS,
    Arguments,
    Body,
    Effort,
    FunctionBody,
    FunctionName,
    JsonSchema,
    MessageBody,
    Name,
    NamedFunction,
    ResponseFormat,
    TemplateArguments,
    ToolBody,
    ToolCallBody,
    ToolChoice,
)
from blend.serve.http.completions import Json, Reply, answer, check_of, event_data, figures_of, logprobs_of
from blend.serve.http.errors import ApiError, refuse
from blend.serve.request import FieldError, ToolCall

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **{name: UNSUPPORTED[name] for name in ("store", "prediction", "modalities", "audio")},
    **dict.fromkeys(("conversation", "max_tool_calls", "previous_response_id", "prompt"), (None,)),
    **dict.fromkeys(("best_of", "n"), (None, 1)),
    "background": (None, False),
    "truncation": (None, "disabled"),
}
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


def _texts(value: Any) -> Any:
    """Text, or the lines of text parts."""
    if not isinstance(value, list):
        return value
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") not in ("input_text", "output_text", "reasoning_text"):
            raise ValueError(f"part {number} is {shown(part)}; only input_text and output_text are supported")
    return "\n".join(part["text"] for part in value)


def _functions(value: Any) -> Any:
    for tool in value if isinstance(value, list) else ():
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise ValueError(f"{shown(tool.get('type'))} is not supported; only tools of the type 'function' are")
    return value


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ItemBody(Body):
    """One item of a conversation: a message, thoughts, a call, or its result.

    id, status, summary, encrypted_content: clients send answers back with them.
    """

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[str | None, BeforeValidator(_texts)] = None
    call_id: Name | None = None
    name: FunctionName | None = None
    arguments: Arguments | None = None
    output: Annotated[str | None, BeforeValidator(_texts)] = None
    id: Name | None = None
    status: Name | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


_FIELDS = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""What each type of item must have."""


class FlatFunction(FunctionBody):
    """A function, without the object around it."""

    type: Literal["function"]


class FlatChoice(ToolChoice):
    """A choice of tools, without an object around the function's name."""

    function: None = None
    name: FunctionName | None = None


class TextFormat(Body):
    """The form of the answer, with the schema in it."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextBody(Body):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningBody(Body):
    """The field `reasoning`. summary: has no effect, as replies hold the thoughts themselves."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(CommonBody):
    """POST /v1/responses."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED
    asks: ClassVar[str] = "input"
    input: Annotated[list[ItemBody], BeforeValidator(_items), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[FlatFunction], BeforeValidator(_functions), Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Logprobs | None = None
    reasoning: ReasoningBody | None = None
    chat_template_kwargs: TemplateArguments | None = None  # vLLM's

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are wanted."""
        return _LOGPROBS in (self.include or ())

    def completion(self) -> ChatBody:
        """The same question to /v1/chat/completions. Raises `ApiError`."""
        if self.top_logprobs and not self.logprobs:
            raise refuse(f"top_logprobs needs include to name {_LOGPROBS}", "top_logprobs")
        common = {name: getattr(self, name) for name in CommonBody.model_fields}
        choice = self.tool_choice
        form = self.text.format if self.text is not None else None
        tools = [ToolBody(type="function", function=function) for function in self.tools or ()]
        tool_choice = None
        if choice is not None:
            named = NamedFunction(name=choice.name) if choice.name else None
            tool_choice = ToolChoice(type=choice.type, function=named)
        return ChatBody.model_construct(
            **{**common, "max_tokens": self.max_output_tokens or self.max_tokens},
            messages=_messages(self.instructions, self.input),
            tools=tools or None,
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_form(form) if form is not None else None,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _form(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise refuse("text.format.schema is missing", "text.format.schema", "missing_required_parameter")
    schema = JsonSchema.model_validate({"name": form.name or "answer", "schema": form.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _messages(instructions: str | None, items: Sequence[ItemBody]) -> list[MessageBody]:
    """The conversation. Calls join the assistant's message before them, thoughts the one behind them."""
    messages = [MessageBody(role="system", content=instructions)] if instructions else []
    thoughts: str | None = None
    for number, item in enumerate(items):
        for name in _FIELDS[item.type]:
            if getattr(item, name) is None:
                place = f"input[{number}].{name}"
                raise refuse(f"{place} is missing", place, "missing_required_parameter")
        if item.type == "reasoning":
            thoughts = item.content
            continue
        assistant = item.role == "assistant" or item.type == "function_call"
        reasoning = thoughts if assistant else None
        thoughts = None
        if item.type == "message":
            message = {"role": item.role, "content": item.content, "reasoning": reasoning}
            messages.append(MessageBody.model_validate(message))
        elif item.type == "function_call_output":
            messages.append(MessageBody(role="tool", content=item.output, tool_call_id=item.call_id))
        else:
            if not messages or messages[-1].role != "assistant":
                messages.append(MessageBody(role="assistant", reasoning=reasoning))
            function = {"name": item.name, "arguments": item.arguments}
            call = ToolCallBody.model_validate({"id": item.call_id, "function": function})
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
    return messages


class ResponsesReply(Reply):
    """Replies of /v1/responses: an answer as items, which grow by events in a stream."""

    end = b""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        super().__init__()
        optional = {"description": None, "parameters": None, "strict": None}
        tools = [{**optional, **_given(tool)} for tool in body.tools or ()]
        tool_choice: str | Json = "auto"
        if body.tool_choice is not None:
            tool_choice = _given(body.tool_choice) if body.tool_choice.name else body.tool_choice.type
        effort = body.reasoning.effort if body.reasoning is not None else None
        form = body.text.format if body.text is not None else None
        self._response: Json = {
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature or 0.0,
            "text": {"format": _given(form) if form is not None else {"type": "text"}},
            "reasoning": {"effort": effort, "summary": None},
            "tool_choice": tool_choice,
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._number = 0  # of events so far
        self._item: Json | None = None  # the open message or thoughts
        self._wants_logprobs = body.logprobs

    def whole(
        self,
        started: Sequence[Started],
        outputs: Sequence[Output],
        ends: Sequence[Finished],
    ) -> Json:
        """The answer in one piece, as in the last event of a stream."""
        events: list[Event] = [*started, *outputs, *ends]
        *_, last = (chunk for event in events for chunk in self.chunks(event))
        return dict(last["response"])

    def encoded(self, chunk: Json) -> bytes:
        """An event with its name."""
        return f"event: {chunk['type']}\n".encode() + event_data(chunk)

    def failed(self, failure: ApiError) -> Json:
        """The event that ends a stream early."""
        self._response["error"] = {"code": failure.code, "message": failure.message}
        return self._ended("failed")

    def _at_start(self, event: Started) -> Iterator[Json]:
        self._response["kvblend"] = figures_of(event)
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))

    def _at_output(self, event: Output) -> Iterator[Json]:
        if event.thoughts:
            yield from self._thinks(event.text)
        elif event.text or (self._wants_logprobs and not event.calls):
            yield from self._said(event.text, event.tokens)
        for call in event.calls:
            yield from self._open_item_ended()
            yield from self._called(call)

    def _at_end(self, event: Finished) -> Iterator[Json]:
        if not event.last:
            return
        if event.check is not None:
            self._response["kvblend"] = {**self._response["kvblend"], "check": check_of(event.check)}
        if not self._response["output"] and self._item is None:
            yield from self._said("")
        status = "completed"
        if event.reason == "length":
            status = "incomplete"
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield from self._open_item_ended(status)
        yield self._ended(status)

    def _thinks(self, text: str) -> Iterator[Json]:
        """Add thoughts; opens their item if it is not open."""
        if self._item is None and text:
            self._item = {
                "id": _identifier("rs"),
                "type": "reasoning",
                "summary": [],
                "status": "in_progress",
            }
            self._text = ""
            yield self._event("response.output_item.added", **self._place, item={**self._item, "content": []})
        if text:
            self._text += text
            yield self._event("response.reasoning_text.delta", **self._part, delta=text)

    def _said(self, text: str, tokens: Sequence[Token] = ()) -> Iterator[Json]:
        """Add text; opens a message if none is open."""
        if self._item is not None and self._item["type"] == "reasoning":
            yield from self._open_item_ended()
        if self._item is None:
            self._item = {"id": _identifier("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
            self._text = ""
            self._logprobs = list[Json]()
            yield self._event("response.output_item.added", **self._place, item={**self._item, "content": []})
            yield self._event("response.content_part.added", **self._part, part=_part("", []))
        logprobs = logprobs_of(tokens) if self._wants_logprobs else []
        if text or logprobs:
            self._text += text
            self._logprobs += logprobs
            yield self._event("response.output_text.delta", **self._part, delta=text, logprobs=logprobs)

    def _open_item_ended(self, status: str = "completed") -> Iterator[Json]:
        """End the open item, if there is one."""
        if self._item is None:
            return
        if self._item["type"] == "reasoning":
            part: Json = {"type": "reasoning_text", "text": self._text}
            yield self._event("response.reasoning_text.done", **self._part, text=self._text)
        else:
            part = _part(self._text, self._logprobs)
            yield self._event("response.output_text.done", **self._part, text=self._text, logprobs=self._logprobs)
            yield self._event("response.content_part.done", **self._part, part=part)
        yield from self._item_ended({**self._item, "status": status, "content": [part]})
        self._item = None

    def _called(self, call: ToolCall) -> Iterator[Json]:
        identifier = _identifier("fc")
        names = {"call_id": call.id, "name": call.name}
        item = {"id": identifier, "type": "function_call", **names, "arguments": "", "status": "in_progress"}
        place = {"item_id": identifier, **self._place}
        yield self._event("response.output_item.added", **self._place, item=item)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        complete = {"name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **place, **complete)
        status = "completed" if is_object(call.arguments) else "incomplete"
        yield from self._item_ended({**item, **complete, "status": status})

    def _item_ended(self, item: Json) -> Iterator[Json]:
        yield self._event("response.output_item.done", **self._place, item=item)
        self._response["output"] = [*self._response["output"], item]

    def _ended(self, status: str) -> Json:
        self._response["status"] = status
        if self._started:
            self._response["usage"] = self._usage
        return self._event(f"response.{status}", response=dict(self._response))

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
    def _place(self) -> Json:
        return {"output_index": len(self._response["output"])}

    @property
    def _part(self) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], **self._place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _part(text: str, logprobs: Sequence[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _given(body: Body) -> Json:
    """The fields of a body that the client sent."""
    return body.model_dump(by_alias=True, exclude_unset=True)


def _identifier(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
