"""One prompt on its way through the embedded engine: waiting, prefilled (`prefill`), then decoded token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from blend.errors import StoreError
from blend.model.forward import RowRequest
from blend.serve.engine import Ended, EndReason, Event, Failed, Started, Token, Work
from blend.serve.prefill import Prefill
from blend.serve.sampling import Sampler
from blend.serve.started import declined, started
from blend.serve.worth import LEAST
from blend.timing import Stopwatch

if TYPE_CHECKING:
    from blend.blender import Blend, Blender
    from blend.serve.beside import Beside
    from blend.serve.encoding import Lacking
    from blend.serve.prefixes import Prefixes


class Job:
    """A prompt, and everything that is held for it. Only the engine's thread touches it, but for `cancel`; see `waits`.

    prefixes: where KV of earlier prompts is found, and that of this one is left. least_gain: see `reason_against`.
    number: counts jobs as they come. capacity: rows of its cache at most. blend: what its answer is decoded from, until it is
    released.
    """

    def __init__(
        self,
        work: Work,
        blender: Blender,
        prefixes: Prefixes,
        number: int,
        on_event: Callable[[Event], None],
        *,
        least_gain: int = LEAST,
    ) -> None:
        self.work, self.number = work, number
        self.blender = blender
        self.capacity = work.layout.rows + work.sampling.max_tokens
        self.blend: Blend | None = None
        self.ended = False
        self._prefixes, self._least_gain = prefixes, least_gain
        self._on_event, self._watch, self._arrived = on_event, Stopwatch(blender.decoder.device), time.monotonic()
        self._waited_s = 0.0
        self._prefill: Prefill | None = None
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

    def begin(self, beside: Beside) -> None:
        """Take up its prefill."""
        self._waited_s = self.age_s
        self._prefill = Prefill(
            self.work, self.blender, self._prefixes, beside, self._watch, least_gain=self._least_gain
        )

    @property
    def begun(self) -> bool:
        """Whether its prefill is under way or done."""
        return self._prefill is not None

    @property
    def waits(self) -> bool:
        """Whether its prefill waits for the store, beside the engine's thread: it cannot go on, nor be released."""
        return self._prefill is not None and self._prefill.waits

    def prepare(self, most_rows: int) -> None:
        """Go on with its prefill as far as nothing is waited for; see `Prefill.prepare`."""
        assert self._prefill is not None
        self._prefill.prepare(most_rows)
        self._look(self._prefill)

    @property
    def ready(self) -> bool:
        """Whether its prefill has rows to run."""
        return self._prefill is not None and self._prefill.piece is not None

    @property
    def full_piece_rows(self) -> int:
        """Rows of its next piece, if it is a piece of a prompt that is computed in full; else 0."""
        return self._prefill.full_piece_rows if self._prefill is not None else 0

    @property
    def lacking(self) -> Lacking | None:
        """The caches that the store lacked for it, if any."""
        return self._prefill.lacking if self._prefill is not None else None

    def _decline(self, reason: str) -> None:
        """Leave the whole prompt to whoever would have taken it over."""
        self._on_event(declined(self.work, reason=reason, waited_s=self._waited_s, ttft_s=self.age_s))
        self._close(Ended("stop"))

    def request(self) -> RowRequest:
        """The rows that it wants in the next pass: a piece of its prefill, or its last token."""
        if self.blend is None:
            assert self._prefill is not None
            assert self._prefill.piece is not None
            return self._prefill.piece
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
        assert self._prefill is not None
        self._prefill.took(logits)
        self._look(self._prefill)

    def _look(self, prefill: Prefill) -> None:
        """Whether its prefill is done."""
        if not prefill.ended:
            return
        if prefill.blend is None:
            self._decline(prefill.reason)
        else:
            self._start(prefill, prefill.blend)

    def repeat(self, error: Exception) -> bool:
        """A pass failed in which it was not alone: whether its rows are ready again. Raises `error` where they were before."""
        if self.blend is not None:
            return True  # `request` forgets what the pass may have left
        assert self._prefill is not None
        self._prefill.repeat(error)
        return False

    def _start(self, prefill: Prefill, blend: Blend) -> None:
        self.blend = blend
        self._sampler = Sampler(blend.decoder, self.work.sampling, blend.layout.token_ids)
        if not self.work.cold:
            self._prefixes.keep(self.work.tenant, self.work.layout.token_ids[: prefill.exact], blend.cache)
        if self.work.handover is not None:
            self.work.handover(blend)
            self._on_event(self._started(prefill, blend))
            self._close(Ended("stop"))
            return
        self._on_event(self._started(prefill, blend))
        self._next(blend.logits)

    def _started(self, prefill: Prefill, blend: Blend) -> Started:
        reused, times = (prefill.reused, prefill.inexact), {"waited_s": self._waited_s, "ttft_s": self.age_s}
        return started(self.work, blend, reused=reused, reason=prefill.reason, **times)

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
        """Tell, and leave to later prompts what they can use."""
        if reason in ("stop", "length", "cancelled"):
            with suppress(Exception):  # it is for later prompts
                self._leave_rows()
        self._close(Ended(reason))

    def _leave_rows(self) -> None:
        """Leave prompt and answer to the next turn; the last token's KV was never computed."""
        if self.blend is None or self._prefill is None or self.ended or not self._tokens or self.work.cold:
            return
        layout, cache, exact = self.work.layout, self.blend.cache, self._prefill.exact
        ids = (*layout.token_ids, *self._tokens)
        if exact == layout.rows:
            self._prefixes.keep(self.work.tenant, ids[:-1], cache)
        else:
            self._prefixes.keep_conversation(self.work.tenant, ids, cache, exact)

    def fail(self, error: Exception) -> None:
        """The same, with an error; but damaged entries, and a store out of reach, only make that more is computed."""
        prefill = self._prefill if isinstance(error, StoreError) and not self.ended else None
        if prefill is not None and not prefill.ended:
            prefill.fail(error)
        else:
            self._close(Failed(error))

    def _close(self, event: Event) -> None:
        if self.ended:
            return
        self.ended = True
        with suppress(Exception):  # a listener that is gone must not harm the others
            self._on_event(event)
        if self._prefill is not None:
            self._prefill.give_up()

    def release(self) -> None:
        """Let go of its KV, now that it has ended, waits for nothing, and nothing is asked of it any more.

        Who listens to its events holds it as well, for `cancel`: such a circle stays in memory until Python looks for circles.
        """
        self.blend = self._prefill = self._sampler = None
        self._on_event = _nobody


def _nobody(event: Event) -> None:
    """Listens no more."""
