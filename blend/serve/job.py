"""One prompt on its way through the embedded engine: waiting, prefilled in steps, then decoded token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from blend.model.rows import RowRequest
from blend.serve.engine import Ended, EndReason, Event, Failed, Started, Token, Work
from blend.serve.sampling import Sampler
from blend.timing import Stopwatch

if TYPE_CHECKING:
    from blend.blender import Blend, Blender
    from blend.recompute import Steps


class Job:
    """A prompt, and everything that is held for it. Only the engine's thread touches it, but for `cancel`.

    order: sorts jobs by priority and arrival. capacity: rows of its cache at most.
    """

    def __init__(self, work: Work, number: int, on_event: Callable[[Event], None], watch: Stopwatch) -> None:
        self.work, self.order = work, (work.priority, number)
        self.capacity = work.layout.rows + work.sampling.max_tokens
        self.blend: Blend | None = None
        self.ended = False
        self._on_event, self._watch, self._arrived = on_event, watch, time.monotonic()
        self._waited_s = 0.0
        self._steps: Steps[Blend] | None = None
        self._piece: RowRequest | None = None
        self._sampler: Sampler | None = None
        self._tokens: list[int] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Give it up the next time the engine looks."""
        self._cancelled = True

    @property
    def age_s(self) -> float:
        """Seconds since its arrival."""
        return time.monotonic() - self._arrived

    @property
    def given_up(self) -> EndReason | None:
        """Why it is not to go on, or None."""
        if self._cancelled:
            return "cancelled"
        late = self.work.deadline_s is not None and self.age_s > self.work.deadline_s
        return "deadline" if late and self.blend is None else None

    def begin(self, blender: Blender, most_rows: int) -> None:
        """Open its chunks, choose the rows, and make the first piece ready."""
        self._waited_s = self.age_s
        room = self.work.sampling.max_tokens
        self._steps = blender.steps(
            self.work.layout, config=self.work.config, room=room, watch=self._watch, most_rows=most_rows
        )
        self._piece = next(self._steps)

    @property
    def begun(self) -> bool:
        """Whether its prefill is under way or done."""
        return self._steps is not None

    def request(self) -> RowRequest:
        """The rows that it wants in the next pass: a piece of its prefill, or its last token."""
        if self.blend is None:
            assert self._piece is not None
            return self._piece
        place = self.work.layout.rows + len(self._tokens) - 1
        cache = self.blend.cache
        cache.truncate(place)  # a pass that failed half way through may have left rows behind
        device = self.blend.logits.device
        ids = torch.tensor([self._tokens[-1:]], device=device)
        return RowRequest(ids, torch.tensor([place], device=device), cache)

    def took(self, logits: torch.Tensor) -> None:
        """What the pass gave for its last row, `[1, vocab]`."""
        if self.blend is not None:
            self._next(logits)
            return
        assert self._steps is not None
        try:
            self._piece = self._steps.send(logits)
        except StopIteration as done:
            self._start(done.value)

    def _start(self, blend: Blend) -> None:
        self.blend, self._piece = blend, None
        self._sampler = Sampler(blend.decoder, self.work.sampling, blend.layout.token_ids)
        notes = (*blend.notes, *blend.problems, *blend.artifact_problems)
        figures = (
            blend.hits,
            blend.layout.rows,
            blend.rows_recomputed,
            blend.stages,
            self._waited_s,
            self.age_s,
            notes,
        )
        self._on_event(Started(*figures))
        self._next(blend.logits)

    def _next(self, logits: torch.Tensor) -> None:
        assert self._sampler is not None
        token: Token = self._sampler.choose(logits[0])
        self._tokens.append(token.id)
        self._on_event(token)
        if token.id in self._sampler.stops:
            self.end("stop")
        elif len(self._tokens) == self.work.sampling.max_tokens:
            self.end("length")

    def end(self, reason: EndReason) -> None:
        """Tell, and let go of everything."""
        self._close(Ended(reason))

    def fail(self, error: Exception) -> None:
        """The same, with an error."""
        self._close(Failed(error))

    def _close(self, event: Event) -> None:
        if self.ended:
            return
        self.ended = True
        if self._steps is not None:
            self._steps.close()
        with suppress(Exception):  # a listener that is gone must not harm the others
            self._on_event(event)
