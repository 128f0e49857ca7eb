"""Reads logs of requests: JSON lines of OpenAI's chats, completions and responses, and of Anthropic's messages.

Reading is lenient. A line that holds no request is counted and named, and reading goes on. `lines` divides logs into lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from io import BufferedReader
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from blend.census.lines import LONGEST_LINE, Line, LogLines
from blend.text import counted

_MOST_BRACKETS = 400_000  # of a line; an object takes up to 350 bytes of memory
_MOST_TEXTS = 100_000  # of a request
_MOST_CHARACTERS = 8 << 20  # of a request's texts: millions of tokens
_NAMED = 5  # lines that cannot be read are named, the others are counted
_LONGEST_NAME = 80
_TOO_DEEP = "nested too deeply"
_HINTS = {
    start: f"; JSON over several lines becomes a request a line with: jq -c {elements} LOG | blend census -"
    for start, elements in ((b"[", "'.[]'"), (b"{", "."))
}
_WRAPPERS = ("body", "request", "params", "input", "payload", "data", "json", "kwargs", "record")
_REPLIES = ("response", "output", "completion", "body", "message")
_SESSIONS = ("session_id", "session", "conversation_id", "thread_id", "user", "user_id", "prompt_cache_key")
_TIMES = ("timestamp", "ts", "created", "created_at", "time")
_LATEST_S = 1e11  # larger times are in milliseconds
_TOOL_SETTINGS = (
    *("cache_control", "strict", "defer_loading", "eager_input_streaming", "allowed_callers", "input_examples"),
    "prompt_cache_breakpoint",
)
_IMAGE = "image"  # the role of a part without text
_ROLES = {"system": "system", "developer": "system", "assistant": "assistant", "tool": "tool", "function": "tool"}
ROLES = ("system", "tools", "user", "assistant", "tool")
"""Of texts: "tools" is of the descriptions of tools, "tool" of their results."""

Json = Mapping[str, Any]


class Segment(NamedTuple):
    """A text of a prompt. role: one of `ROLES`."""

    role: str
    text: str


class LoggedRequest(NamedTuple):
    """A request of a log.

    Attributes:
        source: the session or user that it names, else its log.
        place: log and line.
        segments: its prompt: the system's text, the tools, then the messages.
        reply: its answer, if the log holds it.
        seconds: when it was sent, since 1970; None if the log does not say.
        images: parts of its messages without text, which count no tokens.

    """

    source: str
    place: str
    segments: list[Segment]
    reply: list[Segment]
    seconds: float | None = None
    images: int = 0

    @property
    def turn(self) -> int:
        """1 for a prompt without answers of the assistant, 2 with one, and so on."""
        speakers = [role for role, _ in groupby(self.segments, lambda segment: segment.role)]
        return 1 + speakers.count("assistant")


class LogReader:
    """Reads logs and counts what it leaves out.

    Attributes:
        skipped: lines that hold no request, and such elements of lines that are lists.
        named: the first of them, each with its place and reason.
        unread: logs that were not read to their end, each with the reason.
        images: parts of messages without text.
        hint: what to do with a log that is one JSON document over several lines, else empty.

    """

    def __init__(self) -> None:
        self.skipped = 0
        self.hint = ""
        self.images = 0
        self.named: list[str] = []
        self.unread: list[str] = []

    def read(self, name: str, stream: BufferedReader) -> Iterator[LoggedRequest]:
        """The requests of a log of this name."""
        lines = LogLines(name, stream)
        for line in lines:
            if line.number == 1:
                self.hint = _HINTS.get(line.data, "")
            for place, request in _requests(name, f"{name}:{line.number}", line):
                if isinstance(request, LoggedRequest):
                    self.images += request.images
                    yield request
                else:
                    self._skip(f"{place}: {request}")
        if lines.problem:
            self.unread.append(f"{name} {lines.problem}")

    def _skip(self, reason: str) -> None:
        self.skipped += 1
        if len(self.named) < _NAMED:
            self.named.append(reason)


def _requests(name: str, place: str, line: Line) -> Iterator[tuple[str, LoggedRequest | str]]:
    """The requests of a line, each with its place, or why it holds none; nothing of an empty line."""
    try:
        record = _record(line)
    except ValueError as error:
        yield place, str(error)
        return
    if isinstance(record, list) and record:
        for number, element in enumerate(record):
            yield f"{place}[{number}]", _request(name, f"{place}[{number}]", element)
    elif line.nbytes:
        yield place, _request(name, place, record)


def _record(line: Line) -> Any:
    """The JSON of a line; None of an empty one. Raises `ValueError` with the reason if there is none."""
    if line.nbytes > LONGEST_LINE:
        raise ValueError(
            f"{line.nbytes:,} bytes in one line, at most {LONGEST_LINE:,} are read; one request a line: jq -c"
        )
    if line.data.count(b"{") + line.data.count(b"[") > _MOST_BRACKETS:
        raise ValueError(f"more than {_MOST_BRACKETS:,} objects and lists in a line of {line.nbytes:,} bytes")
    try:
        text = line.data.decode("utf-8", "surrogatepass").strip("\ufeff\0 \t")
        return json.loads(text) if text else None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at its byte {error.start + 1:,}") from None
    except json.JSONDecodeError:
        raise ValueError("no JSON") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:  # Python's limit of digits
        raise ValueError("an integer of thousands of digits in it") from None


def _request(name: str, place: str, record: Any) -> LoggedRequest | str:
    """A record's request, or why it holds none."""
    try:
        return _request_of(name, place, record)
    except RecursionError:
        return _TOO_DEEP


def _request_of(name: str, place: str, record: Any) -> LoggedRequest | str:
    levels = list(_levels(record))
    if not levels or not _is_body(levels[-1]):
        return "no messages, input or prompt in it"
    parts = list(_prompt(levels[-1]))
    segments = [segment for segment in parts if segment.text]
    if not segments:
        return "no text in it"
    characters = sum(len(segment.text) for segment in segments)
    if len(segments) > _MOST_TEXTS or characters > _MOST_CHARACTERS:
        most = f"at most {_MOST_TEXTS:,} of {_MOST_CHARACTERS:,} are counted"
        return f"{counted(len(segments), 'text')} of {characters:,} characters, {most}"
    source = _field(levels, _SESSIONS, str) or name
    seconds = _seconds(_field(levels, _TIMES, (str, int, float)))
    images = sum(segment.role == _IMAGE for segment in parts)
    return LoggedRequest(source[-_LONGEST_NAME:], place, segments, list(_reply(record)), seconds, images)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _levels(record: Any) -> Iterator[Json]:
    """The objects around a request, from the outermost, and its body as the last."""
    for _ in _WRAPPERS:
        if isinstance(record, str):
            record = _parsed(record)
        if not isinstance(record, dict):
            return
        yield record
        if _is_body(record):
            return
        record = next((record[name] for name in _WRAPPERS if isinstance(record.get(name), dict | str)), None)


def _is_body(record: Json) -> bool:
    """Whether an object is the body of a request."""
    if isinstance(record.get("messages"), list) or isinstance(record.get("prompt"), str):
        return True
    items = record.get("input")
    return isinstance(items, list) or (isinstance(items, str) and "model" in record)


def _field(levels: Sequence[Json], names: Sequence[str], kinds: type | tuple[type, ...]) -> Any:
    """The first value of these names and kinds in an object around a request or in its metadata; None without one."""
    for level in levels:
        metadata = level.get("metadata")
        for fields in (level, metadata if isinstance(metadata, dict) else {}):
            for name in names:
                value = fields.get(name)
                if isinstance(value, kinds) and value:
                    return value
    return None


def _seconds(value: str | float | None) -> float | None:
    """A time as seconds since 1970: a number, also of milliseconds, or a text in ISO 8601."""
    if value is None:
        return None
    try:
        seconds = datetime.fromisoformat(value).timestamp() if isinstance(value, str) else float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(seconds):
        return None
    return seconds / 1000 if seconds > _LATEST_S else seconds


def _prompt(body: Json) -> Iterator[Segment]:
    """All texts of a prompt: the system's first texts, the tools, the others."""
    first = body.get("system") or body.get("instructions")
    items = body.get("messages", body.get("input", body.get("prompt")))
    messages = list(_content("system", first))
    if isinstance(items, str):
        messages.append(Segment("user", items))
    for item in _list(items):
        messages += _message(item)
    leading = list(takewhile(lambda segment: segment.role == "system", messages))
    yield from leading
    for tool in _list(body.get("tools")) or _list(body.get("functions")):
        yield Segment("tools", _compact(_described(tool)))
    yield from messages[len(leading) :]


def _described(tool: Any) -> Any:
    """What a prompt has of a tool; marks and settings, such as `cache_control`, stand in none."""
    if not isinstance(tool, dict):
        return tool
    function = tool.get("function")
    described = {name: value for name, value in tool.items() if name not in _TOOL_SETTINGS}
    return {**described, "function": _described(function)} if isinstance(function, dict) else described


def _message(item: Any) -> Iterator[Segment]:
    """The texts of a message, or of an item of the Responses API."""
    if not isinstance(item, dict):
        return
    role = _ROLES.get(str(item.get("role")), "user")
    kind = item.get("type")
    if kind == "function_call":
        yield Segment("assistant", _call(item, "arguments"))
    if kind == "function_call_output":
        yield from _content("tool", item.get("output"))
    for name in ("reasoning_content", "reasoning"):
        if isinstance(item.get(name), str):
            yield Segment("assistant", item[name])
    yield from _content("assistant" if kind == "reasoning" else role, item.get("content"))
    for call in _list(item.get("tool_calls")):
        function = call.get("function") if isinstance(call, dict) else None
        yield Segment("assistant", _compact(function or call))


def _content(role: str, content: Any) -> Iterator[Segment]:
    """The texts of a message's content: a text, or parts."""
    if isinstance(content, str):
        yield Segment(role, content)
    for part in _list(content):
        if isinstance(part, dict):
            yield from _part(role, part)
        else:
            yield from _content(role, part)


def _part(role: str, part: Json) -> Iterator[Segment]:
    """The texts of a part of a message; an image has none."""
    kind = part.get("type")
    source = part.get("source")
    if kind == "tool_result":
        yield from _content("tool", part.get("content"))
    elif kind == "tool_use":
        yield Segment(role, _call(part, "input"))
    elif kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        texts = (part.get("title"), part.get("context"), source.get("data"))
        yield Segment(role, "\n\n".join(text for text in texts if isinstance(text, str)))
    else:
        text = part.get("text", part.get("thinking"))
        yield from [Segment(_IMAGE, "")] if text is None else _content(role, text)


def _reply(record: Any) -> Iterator[Segment]:
    """The texts of an answer that stands in the same line."""
    for _ in _REPLIES:
        if not isinstance(record, dict):
            return
        choices = _list(record.get("choices"))
        if choices and isinstance(choices[0], dict):
            yield from _message(choices[0].get("message"))
            return
        if record.get("role") == "assistant":
            yield from _message(record)
            return
        record = next((record[name] for name in _REPLIES if isinstance(record.get(name), dict)), None)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _call(record: Json, arguments: str) -> str:
    """A call of a tool: its name and its arguments, which the field `arguments` holds."""
    return _compact({"name": record.get("name"), arguments: record.get(arguments)})


def _compact(value: Any) -> str:
    """JSON as the log has it, in the order of its fields."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
