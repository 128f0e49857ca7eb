"""Reads logs of requests: JSON lines, also gzipped, of OpenAI's chats, completions and responses, and of Anthropic's messages.

Reading is lenient. A line that holds no request is counted and named, and reading goes on.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from io import BufferedReader
from itertools import takewhile
from typing import Any, NamedTuple

_MAGIC = b"\x1f\x8b"  # of gzip
_LONGEST_LINE = 64 << 20
_NAMED = 5  # lines that cannot be read are named, the others are counted
_LONGEST_NAME = 80
_WRAPPERS = ("body", "request", "params", "input", "payload", "data", "json", "kwargs", "record")
_REPLIES = ("response", "output", "completion", "body", "message")
_SESSIONS = ("session_id", "session", "conversation_id", "thread_id", "user", "user_id", "prompt_cache_key")
_TIMES = ("ts", "timestamp", "created", "created_at", "time")
_ROLES = {
    "system": "system",
    "developer": "system",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
ROLES = ("system", "tools", "user", "assistant", "tool")
"""Of texts: "tools" is of the descriptions of tools, "tool" of their results."""

Json = Mapping[str, Any]


class Segment(NamedTuple):
    """A text of a prompt.

    role: one of `ROLES`. message: its message's number in the request, from 1; 0 for descriptions of tools.
    """

    role: str
    text: str
    message: int = 0


class LoggedRequest(NamedTuple):
    """A request of a log.

    Attributes:
        source: the session or user that it names, else its log.
        place: log and line.
        segments: its prompt: the system's text, the tools, then the messages.
        reply: its answer, if the log holds it.
        turn: 1 for a prompt without answers of the assistant, 2 with one, and so on.
        seconds: when it was sent, since 1970; None if the log does not say.

    """

    source: str
    place: str
    segments: list[Segment]
    reply: list[Segment]
    turn: int
    seconds: float | None


class _NoRequestError(Exception):
    """A line holds no request, for this reason."""


class LogReader:
    """Reads logs and counts what it leaves out.

    Attributes:
        nbytes: read so far, after decompression.
        skipped: lines that hold no request.
        named: the first of them, each with its place and reason.
        images: parts of messages without text, which are not counted as tokens.

    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.skipped = 0
        self.named: list[str] = []
        self.images = 0

    def read(self, name: str, stream: BufferedReader) -> Iterator[LoggedRequest]:
        """The requests of a log of this name."""
        try:
            for number, line in enumerate(_lines(stream), 1):
                self.nbytes += len(line)
                place = f"{name}:{number}"
                try:
                    if line.strip():
                        yield self._request(name, place, line)
                except _NoRequestError as error:
                    self._skip(f"{place}: {error}")
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            self._skip(f"{name}: reading ended early: {error}")

    def _skip(self, reason: str) -> None:
        self.skipped += 1
        if len(self.named) < _NAMED:
            self.named.append(reason)

    def _request(self, name: str, place: str, line: bytes) -> LoggedRequest:
        if len(line) > _LONGEST_LINE:
            raise _NoRequestError(f"longer than {_LONGEST_LINE >> 20} MiB")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise _NoRequestError("no JSON") from None
        levels = list(_levels(record))
        body = levels[-1] if levels else {}
        if not _is_body(body):
            raise _NoRequestError("no messages, input or prompt in it")
        segments = [segment for segment in self._segments(body) if segment.text]
        if not segments:
            raise _NoRequestError("no text in it")
        reply = list(self._reply(record))
        turns = {segment.message for segment in segments if segment.role == "assistant"}
        session = _first(levels, _SESSIONS, str)
        return LoggedRequest(
            (session or name)[-_LONGEST_NAME:],
            place,
            segments,
            reply,
            1 + len(turns),
            _seconds(_first(levels, _TIMES, (str, int, float))),
        )

    def _segments(self, body: Json) -> Iterator[Segment]:
        """All texts of a prompt: the system's first texts, the tools, the others."""
        messages = [segment for item in _items(body) for segment in self._message(*item)]
        leading = list(takewhile(lambda segment: segment.role == "system", messages))
        yield from leading
        for tool in _list(body.get("tools")) or _list(body.get("functions")):
            yield Segment("tools", _compact(tool))
        yield from messages[len(leading) :]

    def _message(self, number: int, item: Any) -> Iterator[Segment]:
        """The texts of a message, or of an item of the Responses API."""
        if not isinstance(item, dict):
            return
        role = _ROLES.get(str(item.get("role")), "user")
        kind = item.get("type")
        if kind == "function_call_output":
            yield from self._parts("tool", number, item.get("output"))
            return
        if kind == "function_call":
            yield Segment("assistant", _call(item, "arguments"), number)
            return
        if kind == "reasoning":
            role = "assistant"
        for name in ("reasoning_content", "reasoning"):
            if isinstance(item.get(name), str):
                yield Segment("assistant", item[name], number)
        yield from self._parts(role, number, item.get("content"))
        for call in _list(item.get("tool_calls")):
            function = call.get("function") if isinstance(call, dict) else None
            yield Segment("assistant", _compact(function or call), number)

    def _parts(
        self,
        role: str,
        number: int,
        content: Any,
    ) -> Iterator[Segment]:
        """The texts of a message's content."""
        if isinstance(content, str):
            yield Segment(role, content, number)
            return
        for part in _list(content):
            if isinstance(part, str):
                yield Segment(role, part, number)
            elif isinstance(part, dict):
                yield from self._part(role, number, part)

    def _part(
        self,
        role: str,
        number: int,
        part: Json,
    ) -> Iterator[Segment]:
        kind = part.get("type")
        source = part.get("source")
        if kind == "tool_result":
            yield from self._parts("tool", number, part.get("content"))
        elif kind == "tool_use":
            yield Segment(role, _call(part, "input"), number)
        elif isinstance(text := part.get("text", part.get("thinking")), str):
            yield Segment(role, text, number)
        elif kind == "document" and isinstance(source, dict) and source.get("type") == "text":
            texts = [part.get("title"), part.get("context"), source.get("data")]
            yield Segment(role, "\n\n".join(filter(None, map(_text, texts))), number)
        elif kind != "redacted_thinking":
            self.images += 1

    def _reply(self, record: Any) -> Iterator[Segment]:
        """The texts of an answer that stands in the same line."""
        for _ in _REPLIES:
            if not isinstance(record, dict):
                return
            choices = _list(record.get("choices"))
            if choices and isinstance(choices[0], dict):
                yield from self._message(0, choices[0].get("message"))
                return
            if record.get("role") == "assistant" and "content" in record:
                yield from self._message(0, record)
                return
            record = next((record[name] for name in _REPLIES if isinstance(record.get(name), dict)), None)


def _lines(stream: BufferedReader) -> Iterator[bytes]:
    """The lines of a log; of one that is too long the first part, which is longer than `_LONGEST_LINE`."""
    packed = stream.peek(2)[:2] == _MAGIC
    source: Any = gzip.GzipFile(fileobj=stream) if packed else stream
    while line := source.readline(_LONGEST_LINE + 1):
        yield line
        while len(line) > _LONGEST_LINE and not line.endswith(b"\n"):
            line = source.readline(_LONGEST_LINE + 1)


def _levels(record: Any) -> Iterator[Json]:
    """The objects around a request, from the outermost, and its body as the last."""
    for _ in _WRAPPERS:
        if isinstance(record, str):
            try:
                record = json.loads(record)
            except (ValueError, RecursionError):
                return
        if not isinstance(record, dict):
            return
        yield record
        if _is_body(record):
            return
        record = next((record[name] for name in _WRAPPERS if _may_wrap(record.get(name))), None)


def _may_wrap(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, str) and value.startswith("{"))


def _is_body(record: Json) -> bool:
    """Whether an object is the body of a request."""
    if isinstance(record.get("messages"), list) or isinstance(record.get("prompt"), str):
        return True
    items = record.get("input")
    return isinstance(items, list) or (isinstance(items, str) and "model" in record)


def _items(body: Json) -> list[tuple[int, Any]]:
    """Messages or items of a body, numbered from 1."""
    first = body.get("system") or body.get("instructions")
    messages = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    leading = [{"role": "system", "content": first}] if first else []
    return list(enumerate([*leading, *_list(messages)], 1))


def _first(
    levels: Sequence[Json],
    names: Iterable[str],
    kinds: Any,
) -> Any:
    """The first of these fields that an object around a request has, or its metadata."""
    for level in levels:
        metadata = level.get("metadata")
        for fields in (level, metadata if isinstance(metadata, dict) else {}):
            for name in names:
                if isinstance(fields.get(name), kinds) and fields[name]:
                    return fields[name]
    return None


def _seconds(value: str | float | None) -> float | None:
    """A time as seconds since 1970: a number, also of milliseconds, or a text in ISO 8601."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return None
    return value / 1000 if value is not None and value > 1e11 else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _call(record: Json, arguments: str) -> str:
    """A call of a tool: its name and its arguments, which the field `arguments` holds."""
    return _compact({"name": record.get("name"), arguments: record.get(arguments)})


def _compact(value: Any) -> str:
    """JSON as the log has it, in the order of its fields."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
