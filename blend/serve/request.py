"""What a client asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, NamedTuple

from blend.errors import PromptError
from blend.sampling import Sampling
from blend.serve.shares import Holder

Role = Literal["system", "user", "assistant", "tool"]
Method = Literal["blend", "full"]
Edits = Literal["exact", "checked", "fast"]


class FieldError(PromptError):
    """A field of a request that this model or this installation cannot serve. param: its name."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ToolCall(NamedTuple):
    """A call of a function, as the model wrote it.

    arguments: the JSON text of an object; in an answer that was cut short, its beginning.
    """

    id: str
    name: str
    arguments: str


class Message(NamedTuple):
    """One message of a conversation, plain text.

    tool_calls, thoughts: of an assistant's message. tool_call_id: the call whose result this is. name: of the author or the
    function.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    thoughts: str = ""


class Function(NamedTuple):
    """A function that the client offers. parameters: a JSON schema of an object. strict: arguments must match it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        about = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": dict(self.parameters)}}


class Tools(NamedTuple):
    """The functions that an answer may call.

    parallel: several of them; else the first call ends the answer. required: names of functions; the answer must call one.
    """

    functions: tuple[Function, ...]
    parallel: bool = True
    required: tuple[str, ...] = ()


class GivenDocument(NamedTuple):
    """A document that a request brings: its text, optionally with the client's id; or the id of one in the corpus."""

    text: str = ""
    title: str = ""
    id: str = ""


class Mark(NamedTuple):
    """Text of a prompt that is to be kept.

    Attributes:
        seconds: for how long.
        message: index of the message in which the text ends; None keeps all of the prompt.
        characters: of that message, from its first on.

    """

    seconds: float
    message: int | None = None
    characters: int = 0


def _goes_on() -> bool:
    return False


class RequestOrigin(NamedTuple):
    """Whose request brings text, or leaves rows.

    Attributes:
        user: see `Request`.
        session: see `Request`.
        client: see `Request`.
        ended: whether the session was deleted since the request came. Then nothing of the request may stay.

    """

    user: str = ""
    session: str = ""
    client: str = ""
    ended: Callable[[], bool] = _goes_on

    @property
    def users_session(self) -> str:
        """The name of the session among those of all users of the tenant; "" without one."""
        return f"{self.user}/{self.session}" if self.session else ""

    @property
    def holder(self) -> Holder:
        """Whom text and rows count for."""
        return Holder(self.client, self.user)


ANYONE = RequestOrigin()
"""A request without a client, an end user or a session."""


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Attributes:
        messages: the conversation; the last one is the user's or a tool's.
        prompt: text or token ids to continue, instead of messages.
        tools: functions that the answer may call; None: it calls none.
        schema: JSON schema of the answer, unless it is a call.
        id: its name in the log; "" if it is not logged.
        tenant: "" without tenants.
        user: the application's end user, whose learned text is kept apart from others'; "" if it names none.
        session: one of the user's sessions, which may be deleted with its text; "" if it names none.
        client: who takes turns with others: a tenant, the holder of a key, or an address; "" if it is unknown.
        forwarded: whether a proxy has passed it on, behind which there may be many end users.
        marks: text to keep. Text before several marks is kept for the longest time.
        documents: inserted before the user's last message.
        top_k: chunks to retrieve from the corpus; None retrieves none.
        corpus: its name; "" detects it from pasted text.
        sampling: how tokens are chosen.
        stop: texts that end the answer and are not part of it.
        method: "full" computes everything.
        cold: neither use nor fill the prefix cache.
        edits: rows of text behind an edit: "exact" computes them, "checked" moves those that edits before have shown to be
            independent of what changes, "fast" moves all and computes few.
        priority: smaller first.
        deadline_s: seconds from arrival in which the first token must come.
        quality: mean KL that the prompt may have; None: the server's own.
        trace: report every token of the prompt.
        verify: check the answer against full recompute.
        template: arguments of the chat template.
        notes: what of the request has no effect, for the figures of its answer.
        arrived: time of arrival, by `time.monotonic`.
        cancelled: set it, from any thread, to give the request up; `Finished` follows.
        session_ended: set when its session is deleted: then it leaves neither text nor rows.

    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: Tools | None = None
    schema: Mapping[str, Any] | None = None
    id: str = ""
    tenant: str = ""
    user: str = ""
    session: str = ""
    client: str = ""
    forwarded: bool = False
    marks: tuple[Mark, ...] = ()
    documents: tuple[GivenDocument, ...] = ()
    top_k: int | None = None
    corpus: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    method: Method = "blend"
    cold: bool = False
    edits: Edits = "checked"
    priority: int = 0
    deadline_s: float | None = None
    quality: float | None = None
    trace: bool = False
    verify: bool = False
    template: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    arrived: float = field(default_factory=monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False)
    session_ended: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def origin(self) -> RequestOrigin:
        """Whose it is."""
        return RequestOrigin(self.user, self.session, self.client, self.session_ended.is_set)

    @property
    def users_session(self) -> str:
        """See `RequestOrigin`."""
        return self.origin.users_session

    @property
    def has_form(self) -> bool:
        """Whether a grammar holds the answer to a form: of a schema, of a call that is required, or of a strict function."""
        tools = self.tools
        strict = tools is not None and (bool(tools.required) or any(function.strict for function in tools.functions))
        return self.schema is not None or strict
