"""Calls of functions in answers: the forms in which models write them, and their parser."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blend.serve.forms.thoughts import begun
from blend.serve.request import ToolCall

_LETTERS = string.ascii_letters + string.digits
_ID = 9  # letters: the templates of Mistral's models take ids of exactly this length
_CLOSES = re.compile(r"[}\]`]")
# The start of an answer that is a call without markers, perhaps in a fence of Markdown; and the beginnings of such a start.
_BARE = re.compile(r'([\s;]*)(`{1,2}$|```(j|js|jso)$|(```(json)?\s*)?(\[\s*)?(\{\s*("|$)|$))')
_BARE_CALL = re.compile(r'[\s;]*(?:```(?:json)?\s*)?(?:\[\s*)?\{\s*"')  # the same, once it is decided
# How a mask lets a call begin, up to its arguments (`blend.serve.forms.grammar`).
_HEAD = re.compile(r'[\s\[,]*\{"name": ("[^"]*"), "(?:arguments|parameters)": ')
_FENCE = re.compile(r"```(json)?")
_ARGUMENTS = ("arguments", "parameters")
_STRUCTURE = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'[\\"]')
_SHORT = 1024  # characters that are read again whenever a bracket closes
_LONGEST_START = 1024  # characters, blanks in it included, in which the start of a bare call must be decided
_UNDECIDED = 6  # characters at the end of a text: an error of JSON in them may vanish with more text
_JSON = json.JSONDecoder(strict=False)  # models write line breaks into strings
FUNCTION_NAME = re.compile(r"^[A-Za-z0-9_.-]{1,128}$")
"""Names of functions, in tools and in calls."""


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    Attributes:
        begin, end: the text around each call, or "".
        arguments: the name of the field with the arguments.
        array: whether the calls are elements of one array.
        bare: whether calls come without `begin`.

    """

    begin: str = ""
    end: str = ""
    arguments: str = "arguments"
    array: bool = False
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts around calls; they may be control tokens."""
        return tuple(filter(None, (self.begin, self.end)))


HERMES = CallFormat("<tool_call>", "</tool_call>")
MISTRAL = CallFormat("[TOOL_CALLS]", array=True)
LLAMA = CallFormat("<|python_tag|>", arguments="parameters", bare=True)
GENERIC = CallFormat(bare=True)


def format_of(template: object) -> CallFormat:
    """The form of calls that a chat template shows the model. template: its text, or several by name."""
    text = str(template)
    return next((form for form in (HERMES, MISTRAL, LLAMA) if form.begin in text), GENERIC)


class BracketDepth:
    """Follows the brackets of a text that is JSON, outside of its strings. closed: all of them have closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def closed(self) -> bool:
        """Whether no bracket and no string is open."""
        return self._depth <= 0 and not self._in_string

    def add(self, text: str) -> None:
        """Follow the next characters."""
        place = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while match := (_IN_STRING if self._in_string else _STRUCTURE).search(text, place):
            place = match.end()
            if match[0] == '"':
                self._in_string = not self._in_string
            elif match[0] == "\\":
                self._escaped = place == len(text)
                place += 1
            else:
                self._depth += 1 if match[0] in "{[" else -1


class CallParser:
    """Divides one answer into text and calls. ended: the answer is complete, because only one call was wanted.

    An answer may also begin with a bare call of a known function: models write them in every family. Text that may belong to a
    call is held back; text that turns out not to be one is given out as it is. Blanks around calls are dropped. A long call
    is read when its brackets have closed, or when it has doubled since: its length never makes a step slow.

    Args:
        form: in which the model writes calls.
        names: of the functions.
        parallel: take several calls.
        required: a mask makes the answer a call: all of it is calls, also where it is cut short.
    """

    def __init__(
        self, form: CallFormat, names: Collection[str], *, parallel: bool = True, required: bool = False
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._parallel = parallel
        self._required = required
        self._held = ""  # not given out yet
        self._blanks = list[str]()  # in front of it
        self._further = list[str]()  # behind it: of a call that has begun
        self._length = 0  # of both
        self._brackets = BracketDepth()  # of the call
        self._again = 0  # the length at which a call with open brackets is read again
        self._in_call = False
        self._spoke = self._called = False
        self.ended = False

    def add(self, text: str) -> list[str | ToolCall]:
        """The text and the calls that this makes certain, in order."""
        self._further.append(text)
        self._length += len(text)
        if self._in_call:
            self._brackets.add(text)
            if not self._may_end(text):
                return []
        waits = self._in_call
        self._join()
        if not waits and self._begin() == 0 and not self._closes(text):
            self._follow()
            return []
        pieces = list(self._pieces(final=False))
        self._follow()
        return pieces

    def _closes(self, text: str) -> bool:
        """Whether a call may end in this text."""
        end = self._form.end
        return bool(_CLOSES.search(text)) or (bool(end) and end[-1] in text)

    def _may_end(self, text: str) -> bool:
        """Whether the call that has begun may end in this text, or may turn out to be none."""
        due = self._length < _SHORT or self._brackets.closed or self._length >= self._again
        return due and self._closes(text)

    def _join(self) -> None:
        """Hold all text in one piece."""
        self._held = "".join((self._held, *self._further))
        self._further = []

    def _follow(self) -> None:
        """Note whether the held text begins with a call, whatever follows; its brackets are then followed."""
        begins = self._in_call and len(self._held) == self._length
        self._length = len(self._held)
        self._again = 2 * self._length
        if begins:
            return
        marked = bool(self._form.begin) and self._held.startswith(self._form.begin)
        self._in_call = marked or (not self._spoke and bool(_BARE_CALL.match(self._held)))
        if self._in_call:
            self._brackets = BracketDepth()
            self._brackets.add(self._held.removeprefix(self._form.begin))

    def finish(self) -> list[str | ToolCall]:
        """What was held back, when nothing follows."""
        self._join()
        if self._required:
            return [] if self.ended else list(self._cut_short())
        pieces = list(self._pieces(final=True))
        if self._blanks and not self._called:
            pieces.append("".join(self._blanks))
        return pieces

    def _pieces(self, *, final: bool) -> Iterator[str | ToolCall]:
        while self._held and not self.ended:
            begin = self._begin()
            if begin is None:
                undecided = 0 if final else begun(self._form.begin, self._held)
                yield from self._say(len(self._held) - undecided)
                return
            yield from self._say(begin)
            calls, length = self._read()
            if length is None and not final:
                return
            if calls:
                self._held = "" if length is None else self._held[length:]
                yield from self._call(calls)
            else:
                yield from self._say(len(self._held) if length is None else length)

    def _begin(self) -> int | None:
        """Where a call may begin in the held text."""
        marked = self._held.find(self._form.begin) if self._form.begin else -1
        if not self._spoke and (bare := _BARE.match(self._held)) and bare[2]:
            is_decided = bare.end() < len(self._held)
            if is_decided or len(self._held) <= _LONGEST_START:
                return bare.end(1)
        return marked if marked >= 0 else None

    def _say(self, length: int) -> Iterator[str]:
        """Give out so much of the held text, except blanks at its end: a call may follow them."""
        text = self._held[:length]
        self._held = self._held[length:]
        if self._called and not self._spoke:
            text = text.lstrip(" \t\r\n;")
        words = text.rstrip(" \t\r\n")
        blanks = text[len(words) :]
        spoken = "".join((*self._blanks, words)) if words else ""
        if words:
            self._blanks = []
        if blanks:
            self._blanks.append(blanks)
        if words:
            self._spoke = True
            yield spoken

    def _call(self, calls: list[ToolCall]) -> Iterator[ToolCall]:
        self._blanks = []
        self._called = True
        self.ended = not self._parallel
        yield from calls if self._parallel else calls[:1]

    def _read(self) -> tuple[list[ToolCall], int | None]:
        """The calls at the start of the held text, and how long it is up to their end; None: more must come to know."""
        begin = self._form.begin
        end = self._form.end
        if not (marked := bool(begin) and self._held.startswith(begin)):
            fence = _FENCE.match(self._held)
            begin, end = (fence[0], "```") if fence else ("", "")
        start = len(self._held) - len(self._held[len(begin) :].lstrip())
        try:
            value, stop = _JSON.raw_decode(self._held, start)
        except json.JSONDecodeError as error:
            return [], self._after_mistake(error, marked)
        except (RecursionError, ValueError):  # the latter for a number of thousands of digits
            return [], None if self._required else len(self._held)
        values = value if isinstance(value, list) else [value]
        parsed = [self._made(call, marked) for call in values]
        calls = [] if None in parsed else [call for call in parsed if call is not None]
        behind = self._held[stop:].lstrip()
        if begin and calls and behind.startswith(end):
            stop = len(self._held) - len(behind) + len(end)
        elif begin and calls and end.startswith(behind):
            return calls, None
        return calls, stop

    def _after_mistake(self, error: json.JSONDecodeError, marked: bool) -> int | None:
        """Where a text ends that is no JSON; None while it may still become some."""
        if error.msg.startswith("Unterminated") or len(self._held.rstrip()) - error.pos < _UNDECIDED:
            return None
        if marked and self._form.end:
            end = self._held.find(self._form.end)
            return None if end < 0 else end + len(self._form.end)
        again = self._held.find(self._form.begin, 1) if self._form.begin else -1
        return again if again > 0 else max(1, len(self._held) - begun(self._form.begin, self._held))

    def _cut_short(self) -> Iterator[ToolCall]:
        """The calls in the rest of an answer under a mask; the last one with the arguments written so far."""
        text = self._held.removeprefix(self._form.begin)
        while head := _HEAD.match(text):
            text = text[head.end() :]
            try:
                length = _JSON.raw_decode(text)[1]
            except (ValueError, RecursionError):
                length = len(text)
            if length:
                yield ToolCall(_identifier(), json.loads(head[1]), text[:length])
            text = text[length:].removeprefix("}")

    def _made(self, value: Any, marked: bool) -> ToolCall | None:
        """A call of the decoded JSON; None if it is not one."""
        if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
            return None
        argument_values: Any = next((value[field] for field in _ARGUMENTS if field in value), {} if marked else None)
        if isinstance(argument_values, str):  # some models write the arguments as a JSON text
            argument_values = _object(argument_values)
        if not isinstance(argument_values, Mapping) or not (
            FUNCTION_NAME.fullmatch(name) if marked else name in self._names
        ):
            return None
        arguments = json.dumps(argument_values, ensure_ascii=False)
        return ToolCall(_identifier(), name, arguments) if is_object(arguments) else None


def is_object(text: Any) -> bool:
    """Whether this is the text of a JSON object (RFC 8259), as the arguments of a call must be, from a model or a client."""
    from pydantic_core import from_json

    try:
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    except (TypeError, ValueError):  # the former for half a surrogate pair
        return False


def _identifier() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID))


def _object(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
