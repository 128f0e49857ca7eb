"""Question files: JSON Lines, one record a line.

    {"id": "q1", "question": "...", "answers": ["..."], "chunks": [{"title": "...", "text": "..."}], "gold_chunks": [0]}

`id`, `question` and `chunks` are required. `answers` (gold answers, the best one counts), `gold_chunks` (indices of the
chunks that hold the answer), `task` (a label to report by) and `all_values` (values that must all be named) may be left
out; other keys are ignored. `"chunks": []` asks the bare question.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from blend.errors import ConfigError, DatasetError
from blend.limits import is_text
from blend_retrieval.decoding import marked_encoding

LINE = '{"id": "q1", "question": "...", "answers": ["..."], "chunks": [{"title": "...", "text": "..."}]}'
LONGEST_LINE = 100_000_000  # characters


@dataclass(frozen=True)
class RecordChunk:
    """One retrieved text; the title may be empty, the text is not."""

    title: str
    text: str


@dataclass(frozen=True)
class Record:
    """One question with the chunks to answer it from."""

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[RecordChunk, ...]
    gold_chunks: tuple[int, ...] = ()
    task: str = "qa"
    all_values: tuple[str, ...] = ()


def load_dataset(path: str | Path, limit: int | None = None) -> list[Record]:
    """The first `limit` records of a question file, or all; lines after them are not read and blank lines are skipped.

    Raises `DatasetError` naming file and line for what cannot be read, a repeated id, or a file without records, and
    `ConfigError` for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}")
    path = Path(path)
    records: dict[str, Record] = {}
    for place, line in islice(_lines(path), limit):
        record = _record(place, line)
        if record.id in records:
            raise DatasetError(f"{place}: id {record.id!r} was used before; ids must be unique")
        records[record.id] = record
    if not records:
        raise DatasetError(f"{path}: holds no records; expected lines like {LINE}")
    return list(records.values())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with its place as `file:line`."""
    number = 0
    try:
        with path.open("rb") as data:
            file = io.TextIOWrapper(data, marked_encoding(data.peek(4)))
            # No more than a line may have is read at once: a device may never end one.
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), ""), start=1):
                if len(line) > LONGEST_LINE:
                    raise DatasetError(f"{path}:{number}: longer than {LONGEST_LINE:,} characters; expected JSON Lines")
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        place = f" soon after line {number}" if number else ""
        raise DatasetError(f"{path}: not UTF-8 text{place}; expected JSON Lines") from error


def _record(place: str, line: str) -> Record:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DatasetError(f"{place}: not JSON ({reason}); expected one JSON object a line") from error
    if not isinstance(fields, dict):
        raise DatasetError(f"{place}: expected a JSON object, not {_kind(fields)}")
    return _Fields(place, fields).record()


_KINDS_OF_JSON = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}
_T = TypeVar("_T")


def _kind(value: object) -> str:
    return _KINDS_OF_JSON.get(type(value), "a number")


class _Fields:
    """The keys of one line, each checked as it is taken."""

    def __init__(self, place: str, fields: dict[str, object]) -> None:
        self._place = place
        self._fields = fields

    def record(self) -> Record:
        values = self._required("chunks", list)
        chunks = tuple(self._chunk(f'"chunks"[{i}]', value) for i, value in enumerate(values))
        number = self._fields.get("id")  # row numbers are common ids
        return Record(
            id=str(number) if type(number) is int else self._filled("id"),
            question=self._filled("question"),
            answers=self._texts("answers"),
            chunks=chunks,
            gold_chunks=self._indices("gold_chunks", len(chunks)),
            task="qa" if self._fields.get("task") is None else self._filled("task"),
            all_values=self._texts("all_values"),
        )

    def _required(self, key: str, kind: type[_T]) -> _T:
        if key not in self._fields:
            raise self._error(f'"{key}" is missing; a line looks like {LINE}')
        return self._checked(f'"{key}"', self._fields[key], kind)

    def _filled(self, key: str) -> str:
        text = self._required(key, str)
        if not text.strip():
            raise self._error(f'"{key}" is empty')
        return text

    def _checked(self, what: str, value: object, kind: type[_T]) -> _T:
        if not isinstance(value, kind):
            raise self._error(f"{what} must be {_KINDS_OF_JSON[kind]}, not {_kind(value)}")
        if isinstance(value, str) and not is_text(value):
            raise self._error(f"{what} holds half of a surrogate pair, which is not text")
        return value

    def _list(self, key: str) -> list[object]:
        return [] if self._fields.get(key) is None else self._required(key, list)

    def _texts(self, key: str) -> tuple[str, ...]:
        values = self._list(key)
        return tuple(self._checked(f'"{key}"[{i}]', value, str) for i, value in enumerate(values))

    def _indices(self, key: str, count: int) -> tuple[int, ...]:
        indices = []
        for value in self._list(key):
            if type(value) is not int or not 0 <= value < count:
                raise self._error(f'"{key}" must hold indices of its {count} chunks, counted from 0, not {value!r:.40}')
            indices.append(value)
        return tuple(indices)

    def _chunk(self, what: str, value: object) -> RecordChunk:
        fields = self._checked(what, value, dict)
        title = "" if fields.get("title") is None else fields["title"]
        text = self._checked(f"{what}.text", fields.get("text"), str)
        if not text.strip():
            raise self._error(f"{what} has no text")
        return RecordChunk(self._checked(f"{what}.title", title, str), text)

    def _error(self, problem: str) -> DatasetError:
        return DatasetError(f"{self._place}: {problem}")
