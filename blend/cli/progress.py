"""Progress of what takes a while before the first question: bars on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from blend.cli.console import errors, note, seconds

if TYPE_CHECKING:
    from blend.timing import Progress as OnProgress

_STAGES = {
    "chunk": ("Dividing documents", "documents"),
    "embed": ("Embedding chunks", "chunks"),
    "encode": ("Computing caches", "tokens"),
    "calibrate": ("Measuring the KV correction", "tokens"),
    "fetch": ("Fetching caches", "caches"),
}
LINE_EVERY_S = 10.0
FORESEEABLE = 50  # the first of so many parts, with all that happens once, says nothing about how long the others take


@contextmanager
def stage_progress(part: str = "") -> Iterator[OnProgress]:
    """What `precompute` and calibration call, for as long as the block runs; part: of what, where it is not all."""
    with _bars(part) if errors.is_terminal else _lines(part) as show:
        yield lambda stage, done, total: show(stage, done, total) if total else None


@contextmanager
def _bars(part: str) -> Iterator[OnProgress]:
    """A bar per stage with rate and time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[pace]}"))
    bar = Progress(TextColumn("{task.description}"), *columns, console=errors)
    tasks: dict[str, Any] = {}
    begun: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        words, unit = _STAGES[stage]
        now = time.monotonic()
        if stage not in tasks:
            tasks[stage], begun[stage] = bar.add_task(words + part, total=total, pace=""), now
        bar.update(tasks[stage], completed=done, pace=_pace(unit, done, total, now - begun[stage]).removeprefix(", "))

    with bar:
        yield show


@contextmanager
def _lines(part: str) -> Iterator[OnProgress]:
    """A line when a stage has run for a while, then every so often, and when it ends after that."""
    begun: dict[str, float] = {}
    told: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        last = told.setdefault(stage, begun.setdefault(stage, now))
        if done and (now - last >= LINE_EVERY_S or (done == total and stage == "encode")):
            told[stage] = now
            note(_line(stage, done, total, now - begun[stage], part))

    yield show


def _line(stage: str, done: int, total: int, elapsed: float, part: str = "") -> str:
    words, unit = _STAGES[stage]
    return f"{words}{part}: {done:,} of {total:,} {unit}{_pace(unit, done, total, elapsed)}"


def _pace(unit: str, done: int, total: int, elapsed: float) -> str:
    """The rate since the stage began, as the summary has it, and the time left; nothing before that says anything."""
    if not elapsed or done < total / FORESEEABLE:
        return ""
    left = f", {seconds((total - done) * elapsed / done)} left" if done < total else ""
    return f", {done / elapsed:,.0f} {unit}/s{left}"
