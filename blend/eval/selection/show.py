"""Showing a file of results: the tables of each model, and its picture."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from blend.errors import ConfigError, DatasetError
from blend.eval.selection.naming import FULL
from blend.eval.selection.picture import write_frontier
from blend.eval.selection.row import Row, read_rows
from blend.eval.selection.stats import paired, sets_of
from blend.eval.selection.tables import gap_lines, markdown_tables, text_table


def show(
    path: Path, *, sets: Collection[str] = (), methods: Sequence[str] = (), picture: Path | None = None
) -> Iterator[str]:
    """The lines to print, a model at a time; the picture is written on the way.

    sets: only these; none means all. methods: Markdown tables of these too, on the records that have all of them, which alone
    the picture then shows. Several models get a picture each, named after them. Raises `DatasetError` for a file without
    results, `ConfigError` where the sets have none or no record has all methods, and as `read_rows` and `write_frontier` do.
    """
    by_model: defaultdict[str, list[Row]] = defaultdict(list)
    for row in _rows(path, sets):
        by_model[row.model].append(row)
    for model, rows in by_model.items():
        yield from ("", model, *text_table(rows), *gap_lines(rows))
        if methods:
            together = paired(rows, methods)
            yield from markdown_tables(together, methods)
            rows = [row for row in together if row.method in (FULL, *methods)]
        if picture is not None:
            target = picture if len(by_model) == 1 else _of_model(picture, model)
            write_frontier(model, rows, target)
            yield f"wrote {target}"


def _rows(path: Path, sets: Collection[str]) -> list[Row]:
    rows = read_rows(path)
    if not rows:
        raise DatasetError(f"{path}: holds no results; name a file that bench_selection wrote")
    chosen = [row for row in rows if not sets or row.set in sets]
    if not chosen:
        raise ConfigError(f"{path}: holds no results of {', '.join(sets)}; it has {', '.join(sets_of(rows))}")
    return chosen


def _of_model(picture: Path, model: str) -> Path:
    """The picture's path with the model's name in it, which may itself be a path or have a slash."""
    name = re.sub(r"[^\w.-]+", "_", model)
    return picture.with_stem(f"{picture.stem}-{name}")
