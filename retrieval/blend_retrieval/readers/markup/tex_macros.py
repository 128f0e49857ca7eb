"""Macros that a LaTeX file defines, and the arguments of commands."""

from __future__ import annotations

import re
from typing import NamedTuple

_DEFINITION = re.compile(
    r"\\(?:(?:re)?newcommand|providecommand|DeclareRobustCommand|NewDocumentCommand|DeclareMathOperator)\*?\s*"
    r"(?:\{\s*\\([a-zA-Z@]+)\s*\}|\\([a-zA-Z@]+))|\\def\s*\\([a-zA-Z@]+)((?:#\d)*)"
)
_COMMAND = re.compile(r"\\([a-zA-Z@]+)")
_BLANKS = re.compile(r"[ \t]*\n?[ \t]*")
_MOST_EXPANSIONS = 20_000
_MOST_DEPTH = 20  # of macros in macros


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
    at = start
    while at < len(text):
        sign = text[at]
        if sign == "\\":
            at += 1
        elif sign == "{":
            depth += 1
        elif sign == "}":
            depth -= 1
            if not depth:
                return Argument(text[start + 1 : at], at + 1)
        at += 1
    return None


def option(text: str, place: int) -> Argument | None:
    """The argument in brackets that stands at a place; None if there is none."""
    start = _behind_blanks(text, place)
    if start >= len(text) or text[start] != "[":
        return None
    depth = 0
    for at in range(start + 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if text[at] == "]" and depth <= 0:
            return Argument(text[start + 1 : at], at + 1)
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
            written, stop = self._written(text, command)
            texts.append(text[place : command.start()])
            texts.append(self.expanded(written, depth + 1))
            place = stop
        return "".join([*texts, text[place:]])

    def _written(self, text: str, command: re.Match[str]) -> Argument:
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
        for number, value_text in enumerate(values, 1):
            body = body.replace(f"#{number}", value_text)
        if not macro.arguments and text[stop : stop + 2] == "{}":
            stop += 2
        return Argument(body, stop)
