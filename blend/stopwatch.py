"""The stages of a prefill, their progress, and the watch that times them on any device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch


STAGES = ("retrieve", "load", "reposition", "select", "recompute", "first_token")
Progress = Callable[[str, int, int], None]
"""Called with a stage, the amount done, and the total.

Of a precompute: "chunk" in documents, "embed" in chunks, "restore" in caches, "encode" and "calibrate" in tokens, "solve" in
layers, "questions".
Of a fetch of weights: "download" in bytes, and "wait", "verify" and "convert", one step each; "load" in tensors.
"""


def no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


class Stopwatch:
    """Seconds per stage, each exclusive of the stages nested in it, and in total since construction.

    On a GPU a stage ends when the device reaches its end; the host does not wait for that. clock: gives seconds.
    """

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._clock = clock
        self._running: list[str] = []
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._begin = clock()
        self._last = self._mark()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`; an enclosing stage pauses meanwhile."""
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def switch(self, name: str) -> None:
        """Charge the rest of the running stage to `name`."""
        self._charge()
        self._running[-1] = name

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each stage that has ended; waits for the device to get there."""
        seconds: dict[str, float] = {}
        for name, start, stop in self._spans:
            seconds[name] = seconds.get(name, 0.0) + _between(start, stop)
        return seconds

    def total(self) -> float:
        """Seconds since construction; waits for the device."""
        if self._device is not None:
            import torch

            torch.cuda.synchronize(self._device)
        return self._clock() - self._begin

    def _charge(self) -> None:
        now = self._mark()
        if self._running:
            self._spans.append((self._running[-1], self._last, now))
        self._last = now

    def _mark(self) -> Mark:
        if self._device is None:
            return self._clock()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


Mark: TypeAlias = "float | torch.cuda.Event"


def _between(start: Mark, stop: Mark) -> float:
    """Seconds between two marks of one stopwatch."""
    if isinstance(start, float) and isinstance(stop, float):
        return stop - start
    assert not isinstance(start, float | int)
    assert not isinstance(stop, float | int)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
