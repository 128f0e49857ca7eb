"""Conversations, tools and the form of answers in bodies of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from blend.limits import json_text, shown
from blend.serve.forms.tool_calls import FUNCTION_NAME, is_object
from blend.serve.http.errors import refuse
from blend.serve.request import Function, Message, ToolCall, Tools

LONGEST_NAME = 512
MOST_TOOLS = 128
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME.pattern)]
RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs", "self"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
        *("return_dict", "return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)
"""Arguments of chat templates, and of transformers' function that applies them, that the server sets itself."""
_LONGEST_ARGUMENTS = 16_384  # characters of all arguments of a template, as JSON


class Body(BaseModel):
    """Known fields only, with strict types. Unknown fields that are null are ignored: some clients send them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None or name in cls.model_fields}


def _content(value: Any) -> Any:
    """Text, or the lines of text parts."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"part {number} is {shown(part)}; only parts of the type 'text' are supported")
        fields = {name for name, field in part.items() if field is not None}
        if fields != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f'part {number} is not {{"type": "text", "text": "..."}}')
        texts.append(part["text"])
    return "\n".join(texts)


def _arguments(value: Any) -> Any:
    value = value or "{}"
    if not is_object(value):
        raise ValueError("give the JSON text of an object, such as '{}'")
    return value


def _template_arguments(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if reserved := sorted(name for name in value if name in RESERVED or name.endswith("_token")):
        raise ValueError(f"{reserved[0]} is the server's own; leave it out")
    if len(json_text(value)) > _LONGEST_ARGUMENTS:
        raise ValueError(f"give at most {_LONGEST_ARGUMENTS:,} characters")
    return value


Arguments = Annotated[str, BeforeValidator(_arguments)]
TemplateArguments = Annotated[dict[str, Any], BeforeValidator(_template_arguments)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class CalledBody(Body):
    """Name and arguments of a call."""

    name: FunctionName
    arguments: Arguments


class ToolCallBody(Body):
    """A call in an assistant's message. index: clients leave it there when they put streamed calls together."""

    id: Name
    type: Literal["function"] | None = None
    function: CalledBody
    index: int | None = None


class MessageBody(Body):
    """One message of a conversation. reasoning, reasoning_content: vLLM's new and its old name of the thoughts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: Name | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionBody(Body):
    """A function that the model may call. parameters: a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """A function by its name."""

    name: FunctionName


class ToolChoice(Body):
    """Whether the model may or must call, or the function that it must call; a text is the type."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class JsonSchema(Body):
    """A schema with its name. strict: without effect, as all schemas are followed."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def messages_of(messages: Sequence[MessageBody]) -> tuple[Message, ...]:
    """The conversation. A tool's message without a name gets that of the function that was called."""
    called = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    return tuple(_said(f"messages[{number}]", message, called) for number, message in enumerate(messages))


def _said(place: str, message: MessageBody, called: Mapping[str, str]) -> Message:
    """A message. called: functions by the ids of their calls."""
    calls = message.tool_calls or ()
    answered = message.tool_call_id or ""
    if calls and message.role != "assistant":
        raise refuse(f"{place}.tool_calls: only an assistant's message calls tools", f"{place}.tool_calls")
    if bool(answered) != (message.role == "tool"):
        words = "a tool's message, and no other, names the call that it answers"
        raise refuse(f"{place}.tool_call_id: {words}", f"{place}.tool_call_id")
    thoughts = message.reasoning or message.reasoning_content or ""
    if thoughts and message.role != "assistant":
        raise refuse(f"{place}.reasoning: only an assistant's message has thoughts", f"{place}.reasoning")
    if message.content is None and not (calls or thoughts):
        raise refuse(f"{place}.content is missing", f"{place}.content", "missing_required_parameter")
    return Message(
        "system" if message.role == "developer" else message.role,
        message.content or "",
        tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls),
        answered,
        message.name or called.get(answered, ""),
        thoughts,
    )


def tools_of(
    tools: Sequence[ToolBody] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
) -> Tools | None:
    """The functions that the answer may call; None for none. Raises `ApiError`."""
    offered = [tool.function for tool in tools or ()]
    names = tuple(function.name for function in offered)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise refuse(f"tools: two are called {twice!r}; give each another name", "tools")
    choice = choice or ToolChoice(type="auto")
    named = (choice.function.name,) if choice.function is not None else ()
    if choice.type == "required" and not names:
        raise refuse("tool_choice: a call is required, and there are no tools; give some", "tool_choice")
    if choice.type == "function" and not set(named) & set(names):
        raise refuse("tool_choice: there is no tool of this name; name one of the tools", "tool_choice")
    if not offered or choice.type == "none":
        return None
    empty = {"type": "object", "properties": {}}
    functions = (
        Function(function.name, function.description or "", function.parameters or empty, bool(function.strict))
        for function in offered
    )
    several = parallel is not False and not named  # a function that is named is called once
    return Tools(tuple(functions), several, names if choice.type == "required" else named)


def schema_of(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema of the answer; None for any text. Raises `ApiError`."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    place = "response_format.json_schema"
    if form.json_schema is None:
        raise refuse(f"{place} is missing", place, "missing_required_parameter")
    return form.json_schema.schema_
