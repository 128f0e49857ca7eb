"""Question files: records with the chunks to answer from, or questions over a corpus.

    {"id": "q1", "question": "...", "answers": ["..."], "chunks": [{"title": "...", "text": "..."}]}

A record is one line of JSON. `id`, `question` and `chunks` are required. `answers` (gold answers, the best one counts) and
`task` (a label that figures are also shown by) may be left out; other keys are ignored. `"chunks": []` asks the bare question.

A question over a corpus is one line of text, or one of JSON with `question`, and `answers` and `task` if there are any.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from blend.errors import DatasetError
from blend.text import is_text
from blend_retrieval.decoding import marked_encoding

QUESTION_LINE = '{"question": "...", "answers": ["..."]}'
LINE = '{"id": "q1", "question": "...", "answers": ["..."], "chunks": [{"title": "...", "text": "..."}]}'


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
    task: str = "qa"


@dataclass(frozen=True)
class Question:
    """A question over a corpus. answers: gold answers; empty if there are none."""

    text: str
    answers: tuple[str, ...] = ()
    task: str = "qa"


def parse_questions(text: str, name: str) -> list[Question]:
    """The questions of a file, one a line; blank lines are skipped.

    All lines are plain text, or all are JSON objects; the first one decides. Only line feeds and carriage returns end a line.

    Args:
        text: The file's text.
        name: The file's name, for errors.

    Raises:
        DatasetError: The file has no question, lines of both kinds, or an object without a question.

    """
    lines = enumerate(io.StringIO(text, newline=None), start=1)
    stripped = [(f"{name}:{number}", line.strip()) for number, line in lines if line.strip()]
    if not stripped:
        raise DatasetError(f"{name}: no question in it; write one a line")
    are_objects = _object(stripped[0][1]) is not None
    return [_question(place, line, are_objects=are_objects) for place, line in stripped]


def _question(place: str, line: str, *, are_objects: bool) -> Question:
    fields = _object(line)
    if (fields is not None) is not are_objects:
        problem = "no JSON object, as the first line is" if are_objects else "a JSON object, and the first line is none"
        raise DatasetError(f"{place}: {problem}; write all lines as {QUESTION_LINE}, or all as plain text")
    if fields is None:
        return Question(line)
    try:
        return Question(_filled(fields, "question").strip(), _answers(fields), _task(fields))
    except ValueError as error:
        raise DatasetError(f"{place}: {error}; expected {QUESTION_LINE}") from None


def _object(line: str) -> dict[str, Any] | None:
    """A line's JSON object; None if it is something else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def load_dataset(path: Path, limit: int | None = None) -> list[Record]:
    """The first `limit` records of a question file, or all; lines after them are not read and blank lines are skipped.

    Raises `DatasetError` naming file and line for what cannot be read, a repeated id, or a file without records.
    """
    records: dict[str, Record] = {}
    for place, line in islice(_lines(path), limit):
        try:
            record = _record(line)
        except ValueError as error:
            raise DatasetError(f"{place}: {error}; expected {LINE}") from None
        if record.id in records:
            raise DatasetError(f"{place}: id {record.id!r} was used before; ids must be unique")
        records[record.id] = record
    if not records:
        raise DatasetError(f"{path}: holds no records; expected lines like {LINE}")
    return list(records.values())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with its place as `file:line`."""
    try:
        with path.open("rb") as data:
            file = io.TextIOWrapper(data, marked_encoding(data.peek(4)))
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text; expected JSON Lines") from error


def _record(line: str) -> Record:
    """A line's record. Raises `ValueError`."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    number = fields.get("id")  # row numbers are common ids
    return Record(
        id=str(number) if type(number) is int else _filled(fields, "id"),
        question=_filled(fields, "question"),
        answers=_answers(fields),
        chunks=tuple(map(_chunk, _list(fields, "chunks"))),
        task=_task(fields),
    )


def _answers(fields: dict[str, Any]) -> tuple[str, ...]:
    return tuple(_text(answer, '"answers"') for answer in _list(fields, "answers", default=[]))


def _task(fields: dict[str, Any]) -> str:
    return "qa" if fields.get("task") is None else _filled(fields, "task")


def _chunk(value: Any) -> RecordChunk:
    if not isinstance(value, dict):
        raise ValueError('"chunks" must hold objects')
    title = "" if value.get("title") is None else _text(value["title"], '"title"')
    return RecordChunk(title, _filled(value, "text"))


def _list(fields: dict[str, Any], key: str, default: list[Any] | None = None) -> list[Any]:
    value = default if fields.get(key) is None else fields[key]
    if not isinstance(value, list):
        raise ValueError(f'"{key}" must be a list')
    return value


def _filled(fields: dict[str, Any], key: str) -> str:
    text = _text(fields.get(key), f'"{key}"')
    if not text.strip():
        raise ValueError(f'"{key}" is empty')
    return text


def _text(value: Any, words: str) -> str:
    if not isinstance(value, str) or not is_text(value):
        raise ValueError(f"{words} must be text")
    return value
