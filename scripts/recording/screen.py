"""A small terminal: from the output of a cast to pieces of text, each with its place and its times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from blend.errors import ConfigError
from recording.cast import OUTPUT, Cast

PLAIN = ""
DIM = "dim"
BOLD = "bold"
_STYLES = {"": PLAIN, "0": PLAIN, "1": BOLD, "2": DIM, "22": PLAIN}
# A colour, erasing to the end of the line, a mode such as bracketed paste, the window's title; or one character.
_STEP = re.compile(
    r"\x1b\[(?P<style>[\d;]*)m|(?P<erase>\x1b\[0?K)|\x1b\[\?[\d;]*[hl]|\x1b\].*?(?:\x07|\x1b\\)|(?P<char>[^\x1b])", re.S
)


@dataclass(frozen=True)
class Cell:
    """A character on the screen since `start` (seconds), in a style."""

    char: str
    style: str
    start: float


@dataclass(frozen=True)
class Piece:
    """Text on one line of the screen from `start` to `end` in seconds; end is None where it stays."""

    line: int
    column: int
    text: str
    style: str
    start: float
    end: float | None


class Screen:
    """Cells by line and column; text that leaves them becomes a piece."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns = columns
        self.lines = lines
        self.line = 0
        self.column = 0
        self.style = PLAIN
        self.cells: dict[tuple[int, int], Cell] = {}
        self.gone: list[tuple[int, int, Cell, float]] = []

    def show(self, text: str, seconds: float) -> None:
        """Take output of a program."""
        place = 0
        while place < len(text):
            step = _STEP.match(text, place)
            if step is None:
                raise ConfigError(f"the picture cannot show the sequence {text[place : place + 8]!r} of a terminal")
            place = step.end()
            if step["char"]:
                self._put(step["char"], seconds)
            elif step["erase"]:
                self._erase(seconds)
            elif step["style"] is not None:
                self.style = _style(step["style"])

    def _put(self, char: str, seconds: float) -> None:
        if char == "\n":
            self._next_line(seconds)
        elif char == "\r":
            self.column = 0
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char.isprintable():
            if self.column == self.columns:
                self.column = 0
                self._next_line(seconds)
            self._drop(self.line, self.column, seconds)
            self.cells[self.line, self.column] = Cell(char, self.style, seconds)
            self.column += 1

    def _next_line(self, seconds: float) -> None:
        self.line += 1
        if self.line < self.lines:
            return
        self.line -= 1
        before = dict(self.cells)
        for line, column in before:
            self._drop(line, column, seconds)
        for (line, column), cell in before.items():
            if line:
                self.cells[line - 1, column] = replace(cell, start=seconds)

    def _erase(self, seconds: float) -> None:
        for column in range(self.column, self.columns):
            self._drop(self.line, column, seconds)

    def _drop(self, line: int, column: int, seconds: float) -> None:
        cell = self.cells.pop((line, column), None)
        if cell is not None:
            self.gone.append((line, column, cell, seconds))


def _style(codes: str) -> str:
    return _STYLES.get(codes.split(";")[-1], PLAIN)


def pieces(cast: Cast) -> list[Piece]:
    """All that the terminal shows, line by line; cells that appear and go together are one piece."""
    screen = Screen(cast.columns, cast.lines)
    for event in cast.events:
        if event.kind == OUTPUT:
            screen.show(event.text, event.seconds)
    ended = [(line, column, cell, end) for line, column, cell, end in screen.gone if end > cell.start]
    staying = [(line, column, cell, None) for (line, column), cell in screen.cells.items()]
    return _joined([*ended, *staying])


def _joined(cells: Iterable[tuple[int, int, Cell, float | None]]) -> list[Piece]:
    ordered = sorted(cells, key=lambda item: (item[0], item[2].start, item[3] or 0, item[2].style, item[1]))
    groups = groupby(ordered, key=lambda item: (item[0], item[2].start, item[3], item[2].style))
    return [piece for _, group in groups for piece in _runs(list(group))]


def _runs(cells: Sequence[tuple[int, int, Cell, float | None]]) -> list[Piece]:
    """Neighbours on one line as one text each; blanks at the ends are left out."""
    found: list[Piece] = []
    for line, column, cell, end in cells:
        last = found[-1] if found else None
        if last is not None and last.column + len(last.text) == column:
            found[-1] = replace(last, text=last.text + cell.char)
        else:
            found.append(Piece(line, column, cell.char, cell.style, cell.start, end))
    return [piece for piece in found if piece.text.strip()]
