"""Conversations, tools and the form of answers in bodies of requests, and POST /v1/chat/completions'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from blend.serve.forms.tool_calls import FUNCTION_NAME, is_object
from blend.serve.http.bodies import Body, CarriedBody, CarriedName, CommonBody, Logprobs, MaxTokens, Name
from blend.serve.http.errors import Json, missing, refuse, wrong
from blend.serve.http.parts import Content, Written, note_of_unread, require_text
from blend.serve.prompts.chat_template import DIRECT
from blend.serve.request import Function, Message, ToolCall, Tools
from blend.text import json_text, shown

MOST_TOOLS = 128
MOST_MESSAGES = 1000
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
_NO_PARAMETERS = {"type": "object", "properties": {}}


def only_tools(value: Any, kinds: Sequence[str | None]) -> Any:
    """Tools of these types. Raises `ValueError` for others, such as a provider's own."""
    for tool in value if isinstance(value, list) else ():
        if isinstance(tool, dict) and tool.get("type") not in kinds:
            raise ValueError(f"{shown(tool.get('type'))} is not supported; only functions of the client are")
    return value


def _arguments(value: Any) -> Any:
    value = json_text(value) if isinstance(value, dict) else value or "{}"
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
TemplateArguments = Annotated[Json, BeforeValidator(_template_arguments)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class CalledBody(CarriedBody):
    """Name and arguments of a call."""

    carried = "tool_calls.function"
    name: FunctionName
    arguments: Arguments


class ToolCallBody(CarriedBody):
    """A call in an assistant's message."""

    carried = "tool_calls"
    ignored = ("index",)  # clients leave it there when they put streamed calls together
    id: Name
    type: Literal["function"] = "function"
    function: CalledBody


class MessageBody(CarriedBody):
    """One message of a conversation.

    reasoning, reasoning_content: vLLM's new and its old name of the thoughts. refusal, audio: what another model has said.
    """

    carried = "messages"
    unsupported = {"function_call": {}}
    ignored = ("annotations",)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Written | None = None
    refusal: str = ""
    audio: Json = {}
    name: CarriedName = ""
    tool_calls: list[ToolCallBody] = []
    tool_call_id: CarriedName = ""
    reasoning: str = ""
    reasoning_content: str = ""


class FunctionBody(CarriedBody):
    """A function that the model may call. parameters: a JSON schema."""

    carried = "tools.function"
    name: FunctionName
    description: str = ""
    parameters: Json = {}
    strict: bool = False

    @property
    def offered(self) -> Function:
        """For the service."""
        return Function(self.name, self.description, self.parameters, self.strict)


class ToolBody(CarriedBody):
    """A tool."""

    carried = "tools"
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """A function by its name."""

    name: FunctionName


class ToolChoice(Body):
    """Whether the model may or must call, or the function that it must call; a text is the type."""

    type: Literal["none", "auto", "required", "function"] = "auto"
    function: NamedFunction | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class JsonSchema(Body):
    """A schema with its name."""

    ignored = ("description", "strict")  # all schemas are followed
    name: Name
    schema_: Annotated[Json, Field(alias="schema")]


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


Verbosity = Literal["low", "medium", "high"]
NO_VERBOSITY = "verbosity has no effect: no chat template takes it"


class ConversationBody(CommonBody):
    """The fields that all conversations share."""

    chat_template_kwargs: TemplateArguments = {}  # vLLM's

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        effort: str,
        schema: Mapping[str, Any] | None = None,
        notes: tuple[str, ...] = (),
    ) -> list[Json]:
        """A prompt as fields of `Request`. effort: an `Effort`.

        A tool's message without a name gets that of the function that was called.
        """
        called = {call.id: call.name for message in messages for call in message.tool_calls}
        named = (message._replace(name=message.name or called.get(message.tool_call_id, "")) for message in messages)
        thinks = {} if effort == "none" else {"enable_thinking": True, "reasoning_effort": effort}
        template = {**DIRECT, **thinks, **self.chat_template_kwargs}
        fields = {"messages": tuple(named), "tools": tools, "schema": schema, "template": template, "notes": notes}
        return [fields]


class ChatBody(ConversationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: MaxTokens = 0
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MOST_TOOLS)] = []
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    reasoning_effort: Effort = "none"
    verbosity: Verbosity = "medium"

    def prompts(self) -> list[Json]:
        """The prompt as fields of `Request`. Raises `ApiError`."""
        choice = self.tool_choice
        named = choice.function.name if choice.function is not None else ""
        form = self.response_format
        schema = form.json_schema.schema_ if form.json_schema is not None else None
        offered = [tool.function.offered for tool in self.tools]
        contents = [message.content or Content("") for message in self.messages]
        question = last_question([message.role for message in self.messages])
        require_text({f"messages[{number}].content": contents[number] for number in question})
        without_effect = (NO_VERBOSITY,) if self.verbosity != "medium" else ()
        return self.conversation(
            [_said(*numbered) for numbered in enumerate(self.messages)],
            tools_of(offered, choice.type, named, parallel=self.parallel_tool_calls),
            self.reasoning_effort,
            schema_of(form.type, schema, "response_format.json_schema"),
            (*note_of_unread(contents), *without_effect),
        )

    @property
    def longest(self) -> int:
        """Most tokens of an answer; 0 for the server's default. Raises `ApiError`."""
        if self.max_completion_tokens and self.max_tokens not in (0, self.max_completion_tokens):
            raise refuse("max_tokens and max_completion_tokens differ; give one", "max_tokens")
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token; None gives no log-probabilities. Raises `ApiError`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def _said(number: int, message: MessageBody) -> Message:
    place = f"messages[{number}]"
    thoughts = message.reasoning or message.reasoning_content
    if message.tool_calls and message.role != "assistant":
        raise wrong(f"{place}.tool_calls", "only an assistant's message calls tools")
    if bool(message.tool_call_id) != (message.role == "tool"):
        raise wrong(f"{place}.tool_call_id", "a tool's message, and no other, names the call that it answers")
    if thoughts and message.role != "assistant":
        raise wrong(f"{place}.reasoning", "only an assistant's message has thoughts")
    if message.content is None and message.role not in ("assistant", "tool"):
        raise missing(f"{place}.content")
    spoken = message.refusal or str(message.audio.get("transcript", ""))
    return Message(
        "system" if message.role == "developer" else message.role,
        message.content.text if message.content is not None else spoken,
        tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls),
        message.tool_call_id,
        message.name,
        thoughts,
    )


def last_question(roles: Sequence[str]) -> tuple[int, ...]:
    """The number of the user's last message, if no answer of the assistant follows it."""
    behind_answers = max((number for number, role in enumerate(roles) if role == "assistant"), default=-1)
    asked = [number for number, role in enumerate(roles) if role == "user" and number > behind_answers]
    return tuple(asked[-1:])


def tools_of(offered: Sequence[Function], choice: str, named: str, *, parallel: bool) -> Tools | None:
    """The functions that the answer may call; None for none. Raises `ApiError`.

    Args:
        offered: by the client.
        choice: a type of `ToolChoice`.
        named: the function that must be called, or "".
        parallel: the answer may call several.

    """
    names = tuple(function.name for function in offered)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise wrong("tools", f"two are called {twice!r}; give each another name")
    if choice == "required" and not names:
        raise wrong("tool_choice", "a call is required, and there are no tools; give some")
    if choice == "function" and named not in names:
        raise wrong("tool_choice", "there is no tool of this name; name one of the tools")
    if not offered or choice == "none":
        return None
    required = {"required": names, "function": (named,)}.get(choice, ())
    functions = tuple(function._replace(parameters=function.parameters or _NO_PARAMETERS) for function in offered)
    return Tools(functions, parallel and not named, required)  # a function that is named is called once


def schema_of(kind: str, schema: Mapping[str, Any] | None, place: str) -> Mapping[str, Any] | None:
    """The JSON schema of an answer of this type of `ResponseFormat`; None for any text. place: of the schema."""
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    if schema is None:
        raise missing(place)
    return schema
