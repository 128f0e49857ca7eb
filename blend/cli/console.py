"""Output of the commands: progress and notes on stderr, results on stdout.

All text is written here or in `blend.cli`. Titles, file names, ids and answers may hold control characters, which
`blend.limits` makes harmless.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from blend.errors import BlendError, ConfigError
from blend.limits import json_text, visible
from blend_retrieval.decoding import DecodingError, decode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from blend.types import Progress as OnProgress


ANSWER_KEEPS = "\n\t"
_FETCH = {
    "wait": "Waiting for another process that fetches the same weights",
    "download": "Downloading weights, part",
    "verify": "Checking sha256",
    "convert": "Converting to safetensors, once",
}


class _Console(Console):
    """Raises for a closed pipe, as `blend.cli` expects."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich is handling


errors = _Console(stderr=True, highlight=False)
output = _Console(highlight=False)


def note(message: str) -> None:
    """Print one line to stderr."""
    errors.print(Text(visible(message)), soft_wrap=True)


def read_text(path: Path, failure: type[BlendError]) -> str:
    """The text of a user's file, with a note if its encoding was detected. Raises `failure`, in one line."""
    try:
        text, how = decode(path.read_bytes())
    except OSError as error:
        raise failure(f"{path} cannot be read ({error.strerror}); name a text file") from None
    except DecodingError as error:
        raise failure(f"{path} {error}") from None
    if how:
        note(f"{path} {how}")
    return text


def say(line: str = "") -> None:
    """Print one line of a result to stdout."""
    click.echo(visible(line))


def stream(piece: str) -> None:
    """Print a piece of an answer, which may hold line breaks and tabs."""
    click.echo(visible(piece, keep=ANSWER_KEEPS), nl=False)


@contextmanager
def hushed(quiet: bool) -> Iterator[None]:
    """Print no notes and no progress inside, if `quiet`; errors are still printed."""
    before = errors.quiet
    errors.quiet = quiet
    try:
        yield
    finally:
        errors.quiet = before


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings from inside as notes."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    for warning in caught:
        note(str(warning.message))


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON object on one line, all that a command with `--json` writes to stdout."""
    click.echo(json_text(document) if _speaks_unicode() else json.dumps(document))


def print_wide(console: Console, renderable: RenderableType, columns: int) -> None:
    """Print at this width, also to a narrower terminal or a pipe."""
    if console.width >= columns:
        console.print(renderable)
    else:
        _Console(highlight=False, stderr=console.stderr, width=columns).print(renderable)


def fetch_progress() -> OnProgress:
    """A progress callback for a fetch of weights: one line a step, and one every `LINE_EVERY_S` while it takes longer."""
    ended = threading.Event()

    def show(stage: str, done: int, total: int) -> None:
        nonlocal ended
        ended.set()
        if done < total:
            ended = threading.Event()
            step = _FETCH[stage] + (f" {done + 1} of {total}" if stage == "download" else "")
            note(f"{step} ...")
            # The conversion redirects sys.stderr.
            console = _Console(file=errors.file, quiet=errors.quiet, highlight=False)
            threading.Thread(target=_show_time, args=(console, step, ended), daemon=True).start()

    return show


def _show_time(console: Console, step: str, ended: threading.Event) -> None:
    begun = time.monotonic()
    while not ended.wait(LINE_EVERY_S):
        console.print(f"{step}: {seconds(time.monotonic() - begun)}", soft_wrap=True)


def seconds(value: float) -> str:
    """A time, short: 12 ms, 1.23 s, 75 s, 12 min 5 s, 7.1 h, 40 days."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    if value >= 7200:
        return f"{value / 3600:.1f} h" if value < 172_800 else f"{value / 86_400:,.0f} days"
    whole = round(value)
    return f"{whole // 60} min {whole % 60} s"


def make_sure(what: str, *, sure: bool) -> None:
    """Ask before `what` is deleted, unless `sure`. Raises `ConfigError` without a terminal to ask on."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"say --yes to delete {what}: there is no terminal to ask on")
    click.confirm(f"Delete {what}?", abort=True)


def counted(number: int, noun: str) -> str:
    """1 chunk, 2 chunks, 3 caches."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _speaks_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


_STAGES = {
    "chunk": ("Dividing documents", "documents"),
    "embed": ("Embedding chunks", "chunks"),
    "encode": ("Computing caches", "tokens"),
    "calibrate": ("Measuring the KV correction", "tokens"),
    "questions": ("Fitting estimates of quality", "questions"),
}
LINE_EVERY_S = 10.0
FORESEEABLE = 50  # the first of so many parts includes one-time work, and predicts nothing about the others


@contextmanager
def stage_progress(part: str = "") -> Iterator[OnProgress]:
    """A progress callback for `precompute` and measurements, while the block runs. part: what is computed, if not all.

    On a terminal every stage has a bar; elsewhere it has a line every so often, and at its end.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[pace]}"))
    bars = Progress(TextColumn("{task.description}"), *columns, console=errors)
    begun: dict[str, float] = {}
    shown: dict[str, float] = {}
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if not total:
            return
        words, unit = _STAGES[stage]
        now = time.monotonic()
        pace = _pace(unit, done, total, now - begun.setdefault(stage, now))
        last = shown.setdefault(stage, now)
        if errors.is_terminal:
            if stage not in tasks:
                tasks[stage] = bars.add_task(words + part, total=total, pace="")
            bars.update(tasks[stage], completed=done, pace=pace)
        elif done and (now - last >= LINE_EVERY_S or (done == total and stage == "encode")):
            shown[stage] = now
            note(f"{words}{part}: {done:,} of {total:,} {unit}{pace and f', {pace}'}")

    with bars if errors.is_terminal else nullcontext():
        yield show


def _pace(
    unit: str,
    done: int,
    total: int,
    elapsed: float,
) -> str:
    """The rate since the stage began, as the summary has it, and the time left; nothing before that says anything."""
    if not elapsed or done < total / FORESEEABLE:
        return ""
    remaining = f"{seconds((total - done) * elapsed / done)} left" if done < total else ""
    rate = f"{done / elapsed:,.0f} {unit}/s" if done >= elapsed else ""
    return ", ".join(filter(None, (rate, remaining)))
