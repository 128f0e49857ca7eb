"""What the commands show: progress on stderr, results on stdout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from blend.precompute import Progress as OnProgress
    from blend.weights import FetchProgress

errors = Console(stderr=True, highlight=False)
output = Console(highlight=False)

_STAGES = {"embed": ("Embedding chunks", "chunks"), "encode": ("Computing caches", "tokens")}
_FETCH = {
    "wait": "Waiting for another process that fetches the same weights",
    "download": "Downloading weights, part",
    "verify": "Checking sha256",
    "convert": "Converting to safetensors, once",
}


def note(message: str) -> None:
    """One line of what is going on."""
    errors.print(message)


def show_fetch(step: FetchProgress) -> None:
    """One line a step of a weights download."""
    count = f" {step.done + 1} of {step.total}" if step.stage == "download" and step.done < step.total else ""
    if step.stage != "download" or count:
        note(f"{_FETCH[step.stage]}{count} ...")


@contextmanager
def stage_progress() -> Iterator[OnProgress]:
    """A progress bar per stage with rate and time left; the callback is what `precompute` calls."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
    )
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        words, unit = _STAGES[stage]
        if total == 0:
            return
        if stage not in tasks:
            tasks[stage] = bar.add_task(words, total=total, rate="")
        speed = bar.tasks[tasks[stage]].finished_speed or bar.tasks[tasks[stage]].speed
        bar.update(tasks[stage], completed=done, rate=f"{speed:.0f} {unit}/s" if speed else "")

    with bar:
        yield show


def seconds(value: float) -> str:
    """A time, short: 12 ms, 1.23 s, 75 s."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
