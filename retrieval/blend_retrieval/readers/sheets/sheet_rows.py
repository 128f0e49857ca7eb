"""The rows of a sheet by their numbers, in a fraction of the memory of dictionaries: a sheet may have a million."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from blend_retrieval.readers.tables import Row, Rows, table_cell


class SheetRows:
    """Rows that are filled from top to bottom, as files have them, and changed at a few places.

    Numbers of rows and columns count from 0. Cells that are blank are left out.
    """

    def __init__(self) -> None:
        self._numbers = array("q")  # of `_rows`, ascending
        self._rows = Rows()
        self._changed: dict[int, dict[int, str]] = {}  # stand for rows of the same numbers

    def add(self, number: int, cells: Mapping[int, str]) -> None:
        """Set a row's cells, whatever it had."""
        shown = [(column, words) for column, text in cells.items() if (words := table_cell(text))]
        if not shown:
            return
        shown.sort()
        row = Row.of(dict(shown))
        if self._numbers and number <= self._numbers[-1]:
            self._changed[number] = row.cells
        else:
            self._numbers.append(number)
            self._rows.append(row)

    def get(self, number: int) -> dict[int, str]:
        """The cells of a row, to read."""
        if number in self._changed:
            return self._changed[number]
        place = bisect_left(self._numbers, number)
        if place < len(self._numbers) and self._numbers[place] == number:
            return self._rows[place].cells
        return {}

    def change(self, number: int) -> dict[int, str]:
        """The cells of a row, to change. Texts in it are as `table_cell` returns them."""
        return self._changed.setdefault(number, self.get(number))

    def columns(self) -> list[int]:
        """The columns that have filled cells."""
        columns = set(self._rows.columns())
        columns.update(*self._changed.values())
        return sorted(columns)

    def within(self, first: int, last: int) -> list[int]:
        """The numbers of the rows from one to another that are not blank, both included."""
        start = bisect_left(self._numbers, first)
        end = bisect_right(self._numbers, last)
        numbers = set(self._numbers[start:end])
        rows = range(first, last + 1)
        if len(rows) < len(self._changed):
            numbers.update(number for number in rows if number in self._changed)
        else:
            numbers.update(number for number in self._changed if number in rows)
        return sorted(numbers)

    def taken(self, spanning: Iterable[int] = ()) -> Iterator[Row]:
        """The rows from top to bottom, with an empty one for each gap. They are gone afterwards.

        spanning: rows in which a cell stands over several columns.
        """
        wide = set(spanning)
        before = -1
        for number, row in self._in_order():
            if number > before + 1:
                yield Row((), "")
            yield row._replace(spans=True) if number in wide else row
            before = number

    def _in_order(self) -> Iterator[tuple[int, Row]]:
        changed = deque(sorted(self._changed.items()))
        for place, number in enumerate(self._numbers):
            while changed and changed[0][0] < number:
                yield _row(*changed.popleft())
            row = self._rows.take(place)
            if changed and changed[0][0] == number:
                yield _row(*changed.popleft())
            else:
                yield number, row
        for number, cells in changed:
            yield _row(number, cells)


def _row(number: int, cells: dict[int, str]) -> tuple[int, Row]:
    in_order = dict(sorted(cells.items()))
    return number, Row.of(in_order)
