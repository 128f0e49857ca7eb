"""Rows of results (one method on one record) and their file: JSON Lines that only grow, so a stopped run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from blend.errors import DatasetError
from blend.eval.report import Measurement

Key = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method on a record, as the line in the file has it.

    kl, top1: to full recompute, along its answer. f1, rouge_l: to gold answers. f1_full: word F1 to the answer of full
    recompute. right: whether the answer names a gold answer. ttft_s, full_ttft_s, select_s: seconds of the method, of full
    prefill, of its selecting. rows: of the prompt. share: of its rows that were computed. None means undefined.
    """

    model: str
    set: str
    task: str
    id: str
    method: str
    kl: float | None = None
    top1: float | None = None
    f1: float | None = None
    rouge_l: float | None = None
    f1_full: float | None = None
    answer: str | None = None
    right: bool | None = None
    ttft_s: float
    full_ttft_s: float
    select_s: float
    rows: int
    share: float

    @property
    def key(self) -> Key:
        """Of two lines of one key the later one counts."""
        return self.model, self.set, self.id, self.method

    @property
    def gold(self) -> float | None:
        """The set's own measure against gold: word F1, or ROUGE-L where answers are summaries."""
        return self.rouge_l if self.task.startswith("summarize") else self.f1


_REQUIRED = [field.name for field in fields(Row) if field.default is MISSING]


def read_rows(path: Path) -> list[Row]:
    """Every row of a file in the order of the lines, the last of each key. Raises `DatasetError` as `read_lines` does."""
    rows = [_row(path, line) for line in read_lines(path)]
    return list({row.key: row for row in rows}.values())


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file, as `append_lines` does."""
    append_lines(path, list(map(asdict, rows)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every object of a file of JSON Lines; none where there is no file. A line that a kill cut short is dropped.

    Raises `DatasetError` for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DatasetError(f"{path}: cannot be read ({reason}); name a file of results") from error
    return [line for line in map(_parsed, text.splitlines()) if isinstance(line, dict)]


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add objects in one write, so that a stop leaves at most one line half written and processes may share the file.

    Begins a line of its own where the file ends in a half-written one.
    """
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())


def row_of(model: str, name: str, measured: Measurement, full: Measurement, f1_full: float | None) -> Row:
    """The row of a measurement on the set `name`, next to full recompute of the same record."""
    itself = measured is full
    same = ("task", "method", "f1", "rouge_l", "answer", "right", "ttft_s")
    return Row(
        **{name: getattr(measured, name) for name in same},
        model=model,
        set=name,
        id=measured.record_id,
        kl=0.0 if itself else measured.kl,
        top1=1.0 if itself else measured.top1,
        f1_full=f1_full,
        full_ttft_s=full.ttft_s,
        select_s=measured.stages.get("select", 0.0),
        rows=measured.rows_total,
        share=measured.rows_computed / measured.rows_total,
    )


def _row(path: Path, line: Mapping[str, Any]) -> Row:
    missing = [name for name in _REQUIRED if name not in line]
    if missing:
        raise DatasetError(f"{path}: a line lacks {', '.join(missing)}; name a file that bench_selection wrote")
    return Row(**{field.name: line[field.name] for field in fields(Row) if field.name in line})


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None
