"""Stages of work: seconds per stage of a blended prefill, and progress of the work before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STAGES = ("retrieve", "load", "reposition", "select", "recompute", "first_token")

Progress = Callable[[str, int, int], None]
"""Called with a stage, the amount done, and the total.

Of a precompute: "chunk" in documents, "embed" in chunks, "encode" and "calibrate" in tokens. Of a fetch of weights: "download"
in parts, and "wait", "verify" and "convert", one step each.
"""


def no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


class Stopwatch:
    """Seconds per stage, each exclusive of the stages nested in it, and in total since construction.

    On a GPU every stage boundary waits for the device, so that work is charged to the stage that asked for it. clock: gives
    seconds.
    """

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._running: list[str] = []
        self.stages: dict[str, float] = {}
        self._begin = self._mark = self._now()

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
        """Charge what follows inside the running stage to `name` instead."""
        self._charge()
        self._running[-1] = name

    def total(self) -> float:
        """Seconds since construction."""
        return self._now() - self._begin

    def _charge(self) -> None:
        now = self._now()
        if self._running:
            name = self._running[-1]
            self.stages[name] = self.stages.get(name, 0.0) + now - self._mark
        self._mark = now

    def _now(self) -> float:
        if self._device is not None and self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return self._clock()
