"""Macros that a LaTeX file defines, and the arguments of commands."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import NamedTuple

_DEFINITION = re.compile(
    r"\\(?:(?:re)?newcommand|providecommand|DeclareRobustCommand|NewDocumentCommand|DeclareMathOperator)\*?\s*"
    r"(?:\{\s*\\([a-zA-Z@]+)\s*\}|\\([a-zA-Z@]+))|\\def\s*\\([a-zA-Z@]+)((?:#\d)*)"
)
_COMMAND = re.compile(r"\\([a-zA-Z@]+)")
_BLANKS = re.compile(r"[ \t]*\n?[ \t]*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BRACES_AND_BRACKETS = re.compile(r"[{}\]]")
_DEPTHS = {"{": 1, "}": -1}
_MOST_EXPANSIONS = 20_000
_MOST_DEPTH = 20  # of macros in macros
_MOST_WRITTEN = 5_000_000  # characters in the place of macros
_MOST_SEARCHED = 10_000_000  # characters that are searched for the ends of arguments and environments, in vain

searched_in_vain: ContextVar[int] = ContextVar("searched_in_vain", default=0)
"""The characters of the file that is read; `read_tex` sets it to zero."""


class OpenArgumentsError(Exception):
    """Too many arguments and environments of a file do not end."""


def note_open(text: str, place: int, steps: int = 1) -> None:
    """Count a search in vain, from a place to the end of a text, at so many characters a step. Raises OpenArgumentsError."""
    count = searched_in_vain.get() + (len(text) - place) // steps
    searched_in_vain.set(count)
    if count > _MOST_SEARCHED:
        raise OpenArgumentsError


class Argument(NamedTuple):
    """The text of an argument, and the place behind it."""

    text: str
    stop: int


def argument(text: str, place: int) -> Argument | None:
    """The argument in braces that stands at a place, behind blanks; None if there is none."""
    start = _behind_blanks(text, place)
    if start >= len(text) or text[start] != "{":
        return None
    depth = 0
    for token in _BRACES.finditer(text, start):
        depth += _DEPTHS.get(token[0], 0)
        if token[0] == "}" and not depth:
            return Argument(text[start + 1 : token.start()], token.end())
    note_open(text, start)
    return None


def option(text: str, place: int) -> Argument | None:
    """The argument in brackets that stands at a place; None if there is none."""
    start = _behind_blanks(text, place)
    if start >= len(text) or text[start] != "[":
        return None
    depth = 0
    for token in _BRACES_AND_BRACKETS.finditer(text, start + 1):
        depth += _DEPTHS.get(token[0], 0)
        if token[0] == "]" and depth <= 0:
            return Argument(text[start + 1 : token.start()], token.end())
    note_open(text, start)
    return None


def _behind_blanks(text: str, place: int) -> int:
    blanks = _BLANKS.match(text, place)
    return blanks.end() if blanks else place


class _Macro(NamedTuple):
    """The number of a macro's arguments, the default of the first, and the text in its place."""

    arguments: int
    default: str | None
    body: str


class Macros:
    """Takes definitions out of a text, and writes macros out."""

    def __init__(self) -> None:
        self._macros: dict[str, _Macro] = {}
        self._expansions = 0
        self._written_left = _MOST_WRITTEN

    def defined(self, text: str) -> str:
        """The text without its definitions."""
        texts = []
        place = 0
        while definition := _DEFINITION.search(text, place):
            name = definition[1] or definition[2] or definition[3]
            stop = definition.end()
            count = (definition[4] or "").count("#")
            default = None
            if not definition[3]:
                number = option(text, stop)
                if number:
                    digits = number.text.strip()
                    count = int(digits) if digits.isdigit() else 0
                    stop = number.stop
                first = option(text, stop) if number else None
                if first:
                    default, stop = first.text, first.stop
            body = argument(text, stop)
            texts.append(text[place : definition.start()])
            if body is None:
                texts.append(definition[0])
                place = definition.end()
                continue
            self._macros[name] = _Macro(count, default, body.text)
            place = body.stop
        return "".join([*texts, text[place:]])

    def expanded(self, text: str, depth: int = 0) -> str:
        """The text with macros written out; those that call themselves without end stay."""
        texts = []
        place = 0
        for command in _COMMAND.finditer(text):
            is_inside = command.start() < place  # of an argument
            if is_inside or command[1] not in self._macros:
                continue
            self._expansions += 1
            if depth > _MOST_DEPTH or self._expansions > _MOST_EXPANSIONS:
                break
            expansion = self._written(text, command)
            if expansion is None:
                break
            written, stop = expansion
            texts.append(text[place : command.start()])
            texts.append(self.expanded(written, depth + 1))
            place = stop
        return "".join([*texts, text[place:]])

    def _written(self, text: str, command: re.Match[str]) -> Argument | None:
        """The text in the place of a macro; None if it goes beyond the bound."""
        macro = self._macros[command[1]]
        stop = command.end()
        values: list[str] = []
        if macro.default is not None:
            first = option(text, stop)
            values.append(first.text if first else macro.default)
            stop = first.stop if first else stop
        while len(values) < macro.arguments:
            value = argument(text, stop)
            if value is None:
                break
            values.append(value.text)
            stop = value.stop
        body = macro.body
        copied = sum(body.count(f"#{number}") * len(value) for number, value in enumerate(values, 1))
        self._written_left -= len(body) + copied
        if self._written_left < 0:
            return None
        for number, value_text in enumerate(values, 1):
            if body.count(f"#{number}") * len(value_text) > _MOST_WRITTEN:
                return None
            body = body.replace(f"#{number}", value_text)
        if not macro.arguments and text[stop : stop + 2] == "{}":
            stop += 2
        return Argument(body, stop)
