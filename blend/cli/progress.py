"""Progress of long stages on stderr: a bar on a terminal, elsewhere a line every ten seconds.

    progress = stage_progress()          # a callback: progress("encode", done, total)
    fetching = fetch_progress()          # the same for weights
    with counting("Verifying caches", "caches", total) as count:
        count(1)
    with reading() as progress:          # progress("a.xlsx", done, total, "bytes")

A bar appears after two seconds, so that short stages draw nothing. It is gone when its stage ends, or its command does, and
leaves one line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click
from rich.cells import cell_len
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from blend.cli.console import errors, note, seconds
from blend.text import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from blend.stopwatch import Progress

LINE_EVERY_S = 10.0
MEGABYTE = 10**6
DRAWN_AFTER_S = 2.0
_FORESEEABLE = 50  # the first of so many parts includes one-time work, and predicts nothing about the others
_LAYOUTS = ((30, True), (12, True), (12, False), (6, False))  # width of the bar in columns; whether the rate is shown


class StageWords(NamedTuple):
    """What a stage does, and what it counts. unit: empty for a single step, of which only the time is shown."""

    words: str
    unit: str = ""


_STAGES = {
    "chunk": StageWords("Dividing documents", "documents"),
    "embed": StageWords("Embedding chunks", "chunks"),
    "restore": StageWords("Looking for copies in nearer tiers", "caches"),
    "encode": StageWords("Computing caches", "tokens"),
    "calibrate": StageWords("Measuring the KV correction", "tokens"),
    "solve": StageWords("Fitting the KV correction", "layers"),
    "questions": StageWords("Fitting estimates of quality", "questions"),
}
_FETCHES = {
    "wait": StageWords("Waiting for another process that fetches the same weights"),
    "download": StageWords("Downloading weights", "MB"),
    "verify": StageWords("Checking sha256"),
    "convert": StageWords("Converting to safetensors, once"),
    "load": StageWords("Loading weights", "tensors"),
}


class Stage:
    """How much of a stage is done, and how fast. total: 0 if it is unknown."""

    def __init__(self, words: StageWords, done: int, total: int) -> None:
        self.words = words
        self.done = done
        self.total = total
        self._first = done  # what was done before, for example by an interrupted run
        self._begun = self._updated = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Note that so much is done now, of so much."""
        self.done = done
        self.total = total
        self._updated = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Time since the stage began."""
        return time.monotonic() - self._begun

    @property
    def line(self) -> str:
        """Everything in words: what is done, rate and time left."""
        if not self.words.unit:
            return f"{self.words.words}: {seconds(self.elapsed_s)}"
        return f"{self.words.words}: {_joined(self._counted, self._rate_words, self._remaining)}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar with as many of its figures as fit the width; nothing in its first seconds."""
        if self.elapsed_s < DRAWN_AFTER_S:
            return
        words = visible(self.words.words)
        share = f"{self.done / self.total:4.0%}" if self.total else self._counted
        all_figures = _joined(share, self._rate_words, self._remaining)
        few_figures = _joined(share, self._remaining)
        if not self.words.unit:
            all_figures = few_figures = seconds(max(1, round(self.elapsed_s)))
        room = options.max_width - cell_len(words) - 1
        layouts = [(width, all_figures if shows_rate else few_figures) for width, shows_rate in _LAYOUTS]
        fitting = [(width, figures) for width, figures in layouts if width + 1 + len(figures) <= room]
        width, figures = fitting[0] if fitting else (0, few_figures)
        total = self.total if self.words.unit else 0
        bar = ProgressBar(total or None, self.done, width=width, animation_time=self.elapsed_s)
        line = Table.grid(padding=(0, 1))
        shown_words = Text(words, no_wrap=True, overflow="ellipsis")
        shown_figures = Text(figures, no_wrap=True)
        if width:
            line.add_row(shown_words, bar, shown_figures)
        else:
            line.add_row(shown_words, shown_figures)
        yield line

    @property
    def _counted(self) -> str:
        of_total = f" of {self.total:,}" if self.total else ""
        return f"{self.done:,}{of_total} {self.words.unit}"

    @property
    def _rate(self) -> float:
        elapsed = self._updated - self._begun
        return (self.done - self._first) / elapsed if elapsed > 0 else 0.0

    @property
    def _rate_words(self) -> str:
        return f"{self._rate:,.0f} {self.words.unit}/s" if self._rate >= 1 else ""

    @property
    def _remaining(self) -> str:
        """The time that is left; empty where it cannot be foreseen."""
        is_foreseeable = self._rate and self.total / _FORESEEABLE <= self.done < self.total
        if not is_foreseeable:
            return ""
        since_update = time.monotonic() - self._updated
        remaining_s = (self.total - self.done) / self._rate - since_update
        return f"{seconds(max(1, round(remaining_s)))} left"


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


class StageDisplay:
    """Shows one stage at a time, by a bar or by lines. It ends with the command that it was made in, however that ends."""

    def __init__(self) -> None:
        self._stage: Stage | None = None
        self._bar: Live | None = None
        self._noted = 0.0
        context = click.get_current_context(silent=True)
        if context is not None:
            context.call_on_close(self.end)

    @property
    def words(self) -> StageWords | None:
        """Those of the stage that is shown."""
        return self._stage.words if self._stage is not None else None

    def update(self, words: StageWords, done: int, total: int) -> None:
        """Show that so much of a stage is done. Another stage than the last one begins."""
        if self._stage is None or self._stage.words != words:
            self._begin(Stage(words, done, total))
            return
        self._stage.update(done, total)
        now = time.monotonic()
        if self._bar is None and words.unit and done and now - self._noted >= LINE_EVERY_S and done != total:
            self._noted = now
            note(self._stage.line)

    def _begin(self, stage: Stage) -> None:
        self.end()
        self._stage = stage
        self._noted = time.monotonic()
        if draws_bars():
            # The conversion of weights catches what libraries write to sys.stderr; the bar stays on the terminal.
            errors.file = errors.file
            self._bar = Live(stage, console=errors, transient=True, redirect_stdout=False, refresh_per_second=5)
            self._bar.start()

    def end(self, *, summary: bool = False) -> None:
        """Show the stage no more. A stage that is done leaves a line if its bar was seen, or with `summary`."""
        stage, bar = self._stage, self._bar
        self._stage = self._bar = None
        if stage is None:
            return
        was_seen = bar is not None and stage.elapsed_s >= DRAWN_AFTER_S
        if bar is not None:
            bar.stop()
            errors.file = None  # type: ignore[assignment]  # sys.stderr again
        if stage.done == stage.total > 0 and (was_seen or summary):
            note(stage.line)


def draws_bars() -> bool:
    """Whether stderr is a terminal that moves its cursor. A server loads in a thread, and logs meanwhile: it gets lines."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and not errors.quiet and errors.is_interactive and errors.file.isatty()


def stage_progress(part: str = "") -> Progress:
    """A progress callback for `precompute` and measurements. part: what is computed, if not all.

    The caches leave a line in any case, other stages if they had a bar.
    """
    display = StageDisplay()

    def show(name: str, done: int, total: int) -> None:
        words, unit = _STAGES[name]
        display.update(StageWords(words + part, unit), done, total)
        if done == total:
            display.end(summary=name == "encode")

    return show


def fetch_progress() -> Progress:
    """A progress callback for a fetch of weights: a bar for each step, or a line where it begins."""
    display = StageDisplay()

    def show(name: str, done: int, total: int) -> None:
        words = _FETCHES[name]
        begins = display.words != words
        megabytes = round(total / MEGABYTE)
        if name == "download":
            display.update(words, round(done / MEGABYTE), megabytes)
        else:
            display.update(words, done, total)
        if done == total > 0:
            display.end()
        elif begins and not draws_bars() and name != "load":  # the commands say what they load
            amount = f", {megabytes:,} MB" if name == "download" else ""
            note(f"{words.words}{amount} ...")

    return show


@contextmanager
def reading() -> Iterator[Callable[[str, int, int, str], None]]:
    """Show on a terminal how far the reader of a long file is, while the block runs.

    It gets the callback for `load_documents`: the file's name, what is read of it, of how much, and the unit, which
    is empty where the file ends.
    """
    display = StageDisplay()

    def show(name: str, done: int, total: int, unit: str) -> None:
        if not draws_bars():
            return
        if unit:
            display.update(StageWords(f"Reading {name}", unit), done, total)
        else:
            display.end()

    try:
        yield show
    finally:
        display.end()


@contextmanager
def counting(words: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how much of something is done while the block runs, which calls what it gets with that. total: 0 if unknown."""
    display = StageDisplay()
    stage_words = StageWords(words, unit)
    display.update(stage_words, 0, total)
    try:
        yield lambda done: display.update(stage_words, done, total)
    finally:
        display.end()
