"""Parquet and Feather files as Markdown tables, or as documents where each row is one."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from blend_retrieval.document import enumerated
from blend_retrieval.readers.base import TEXT_FIELD, Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.jsonl import record_part
from blend_retrieval.readers.progress import report
from blend_retrieval.readers.sheets.sheets import MOST_CELLS
from blend_retrieval.readers.tables import markdown_table

_PARQUET, _ENCRYPTED_PARQUET, _ARROW, _OLD_FEATHER = b"PAR1", b"PARE", b"ARROW1", b"FEA1"
_RECORD_FIELDS = {"title", "id", "_id"}  # beside the text, of rows that are documents
_BYTES = "holds bytes, which are not read"
_MOST_TEXT = 60_000_000  # characters that any file may unpack to
_MOST_SWELLING = 100  # times of its bytes that a file may unpack to beyond that
_PANIC = "PanicException"  # of a parser in Rust; it derives from BaseException alone


def read_parquet(data: bytes, title: str, text_field: str = TEXT_FIELD) -> Parts:
    """Read the rows as a table; as documents if the columns are those of a JSONL record."""
    from arro3.io import read_parquet as batches_of

    if data.endswith(_ENCRYPTED_PARQUET):
        raise UnreadableError("is encrypted")
    if not (data.startswith(_PARQUET) and data.endswith(_PARQUET)):
        raise UnreadableError("is damaged: it does not begin and end as Parquet does")
    return _parts(batches_of, data, title, text_field)


def read_feather(data: bytes, title: str, text_field: str = TEXT_FIELD) -> Parts:
    """Read the rows as `read_parquet` does."""
    from arro3.io import read_ipc as batches_of

    if data.startswith(_OLD_FEATHER):
        raise UnreadableError("is in the first version of Feather: save it in the second")
    if not (data.startswith(_ARROW) and data.endswith(_ARROW)):
        raise UnreadableError("is damaged: it does not begin and end as Feather does")
    return _parts(batches_of, data, title, text_field)


def _parts(batches_of: Any, data: bytes, title: str, text_field: str) -> Parts:
    try:
        columns = _Columns(title, text_field, len(data))
        return columns.parts(batches_of(io.BytesIO(data)))
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise UnreadableError("is damaged") from None


class _Columns:
    """The texts of a file's columns, batch by batch."""

    def __init__(self, title: str, text_field: str, file_length: int) -> None:
        self._title = title
        self._text_field = text_field
        self._free_length = max(_MOST_TEXT, _MOST_SWELLING * file_length)
        self._unread: dict[str, dict[str, None]] = {}
        self._faults: list[Fault] = []

    def parts(self, batches: Iterable[Any]) -> Parts:
        """Tables or documents, and what was not read."""
        header, *rows = self._rows(batches)
        record_fields = {self._text_field, *_RECORD_FIELDS}
        documents: list[Part]
        if self._text_field in header and record_fields.issuperset(header):
            documents = self._records(header, rows)
        else:
            markdown = markdown_table([header, *rows])
            documents = [Part("", self._title, markdown, "markdown")]
        for reason, names in self._unread.items():
            where = f"column {enumerated(list(names))}"
            self._faults.append(Fault(where, reason, len(names)))
        return [*documents, *self._faults]

    def _rows(self, batches: Iterable[Any]) -> list[list[str]]:
        """The names of the columns, and the texts of each row."""
        header: list[str] = []
        rows: list[list[str]] = []
        for batch in batches:
            header = list(batch.column_names)
            columns = map(self._counted_texts, header, batch.columns)
            rows += map(list, zip(*columns, strict=True))
            report(len(rows), 0, "rows")
            most_rows = MOST_CELLS // max(len(header), 1)
            if len(rows) > most_rows:
                reason = f"has more than the {MOST_CELLS:,} cells that are read"
                self._faults.append(Fault(f"after row {most_rows:,}", reason))
                del rows[most_rows:]
                break
        return [header, *rows]

    def _records(self, header: list[str], rows: list[list[str]]) -> list[Part]:
        parts: dict[Part, None] = {}
        for row in rows:
            record = dict(zip(header, row, strict=True))
            part = record_part(record, self._text_field)
            title = part.title or f"{self._title} {part.name}"
            parts[part._replace(title=title)] = None
        return list(parts)

    def _counted_texts(self, name: str, column: Any) -> list[str]:
        """The texts of a column. Raises `UnreadableError` where those of the file are far longer than the file."""
        texts = []
        for text in self._texts(name, column):
            self._free_length -= len(text)
            if self._free_length < 0:
                raise UnreadableError("unpacks to far more text than a file of its size holds: divide it")
            texts.append(text)
        return texts

    def _texts(self, name: str, column: Any) -> Iterator[str]:
        """The values of a column as Arrow writes them; nested ones as JSON."""
        from arro3.core import DataType

        kind: Any = column.type
        if DataType.is_nested(kind) and not _is_of_numbers(kind):
            values = (value.as_py() for value in column)
            yield from ("" if value is None else self._json(name, value) for value in values)
            return
        checks = (DataType.is_binary, DataType.is_large_binary, DataType.is_fixed_size_binary, DataType.is_binary_view)
        if any(check(kind) for check in checks):
            self._name(name, _BYTES)
            yield from repeat("", len(column))
            return
        try:
            texts = column.cast(DataType.string())
        except Exception:  # such as a date after the year 9999; arro3 raises no narrower class
            self._name(name, "holds a value that cannot be written as text")
            yield from repeat("", len(column))
            return
        yield from (text.as_py() or "" for text in texts)

    def _name(self, column: str, reason: str) -> None:
        self._unread.setdefault(reason, {})[column] = None

    def _json(self, name: str, value: object) -> str:
        def shown(inner: object) -> str:
            if isinstance(inner, bytes):
                self._name(name, _BYTES)
                return ""
            return str(inner)

        return json.dumps(value, ensure_ascii=False, default=shown)


def _is_of_numbers(kind: Any) -> bool:
    from arro3.core import DataType

    return DataType.is_list(kind) and DataType.is_numeric(kind.value_type)
