"""One prompt on its way through the embedded engine: waiting, prefilled in steps, then decoded token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from blend.errors import StoreError
from blend.model.rows import Resume, RowRequest, Steps
from blend.serve.beside import Stepper
from blend.serve.encoding import Lacking, lacking
from blend.serve.engine import ASKED_FOR, Ended, EndReason, Event, Failed, Started, Token, Work
from blend.serve.outage import STORE_UNREACHABLE, is_outage
from blend.serve.sampling import Sampler
from blend.serve.started import declined, started
from blend.serve.worth import LEAST, reason_against, why_nothing_is_left
from blend.timing import Stopwatch
from blend.types import common_length

if TYPE_CHECKING:
    from blend.blender import Blend, Blender
    from blend.config import BlendConfig
    from blend.serve.beside import Beside
    from blend.serve.prefixes import Found, Prefixes
    from blend.types import ChunkCache, PromptLayout


class _AgainError(Exception):
    """Told to a prefill that is to begin anew."""


class Job:
    """A prompt, and everything that is held for it. Only the engine's thread touches it, but for `cancel`; see `waits`.

    prefixes: where KV of earlier prompts is found, and that of this one is left. least_gain: see `reason_against`.
    number: counts jobs as they come. capacity: rows of its cache at most. piece: of its prefill, that is to be run.
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
        self._found: Found | None = None  # until its rows are in the prompt's own cache
        self._reused = self._inexact = 0
        self._reason = ""
        self._most_rows = 0
        self._prefill: Stepper[Blend | None] | None = None
        self.piece: RowRequest | None = None
        self._sampler: Sampler | None = None
        self._tokens: list[int] = []
        self._cancelled = self._repeated = False

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
        self._found = self._find()
        self._prefill = Stepper(self._prefilling(), beside)

    @property
    def begun(self) -> bool:
        """Whether its prefill is under way or done."""
        return self._prefill is not None

    @property
    def waits(self) -> bool:
        """Whether its prefill waits for the store, beside the engine's thread: it cannot go on, nor be released."""
        return self._prefill is not None and self._prefill.busy

    def may_gain_by(self, other: Job) -> bool:
        """Whether this prompt, not begun yet, may find more of its rows in memory once `other` is prefilled."""
        mine, others = self.work, other.work
        if mine.cold or mine.tenant != others.tenant:
            return False
        rows = common_length(mine.layout.token_ids, others.layout.token_ids)
        if len(mine.layout.prefix) < rows <= _exact_anyway(mine.layout):
            rows = len(mine.layout.prefix)
        return rows > mine.layout.shared_prefix_rows

    def prepare(self, most_rows: int) -> None:
        """Go on as far as nothing is waited for; then there is a `piece`, unless it has ended or waits.

        most_rows: of those pieces that are cut from now on.
        """
        assert self._prefill is not None
        self._most_rows = most_rows
        self.piece = self._prefill.rows()
        self._look()

    def _prefilling(self) -> Steps[Blend | None]:
        """Open its chunks, choose the rows, and compute them; nothing is done where somebody else would compute all of it."""
        try:
            self._reason = self._reason_known()
            if not self._reason and not self.work.full:
                yield Resume.BESIDE
                self._reason = reason_against(self.blender, self._layout, self._config, self._least_gain)
            if self._reason and self.work.handover is not None:
                return None
        except StoreError as error:
            self._go_on_without(error)
        while True:
            try:
                return (yield from self._steps())
            except StoreError as error:
                self._go_on_without(error)
            except _AgainError:
                pass

    def _go_on_without(self, error: StoreError) -> None:
        """A store that is out of reach only makes everything be computed. Raises whatever else it is."""
        if not is_outage(error) or self._reason == STORE_UNREACHABLE:
            raise error
        self._reason = STORE_UNREACHABLE

    def _reason_known(self) -> str:
        """Why nothing is to be blended, or "", as far as that is known without a look at the store."""
        if self.work.full:
            return self.work.reason
        return why_nothing_is_left(self.work.layout, self._layout, self._reused, self._inexact)

    @property
    def _config(self) -> BlendConfig:
        return self.work.config or self.blender.config

    @property
    def _layout(self) -> PromptLayout:
        """The prompt, with what is known of its beginning as its prefix."""
        layout = self.work.layout
        return layout.behind(self._reused) if self._reused > len(layout.prefix) else layout

    def _steps(self) -> Steps[Blend]:
        """Of all rows, where there is a reason for that."""
        return self.blender.steps(
            self._layout.all_plain() if self._reason else self._layout,
            config=self._config,
            room=self.work.sampling.max_tokens,
            watch=self._watch,
            most_rows=lambda: self._most_rows,
            known=self._known,
        )

    @property
    def _known(self) -> ChunkCache | None:
        """KV of the prompt's first rows; None leaves it to the blender, which has that of its own prefix."""
        if self.work.cold:
            return self.blender.decoder.no_rows()
        return self._found.known if self._found is not None else None

    def _decline(self) -> None:
        """Leave the whole prompt to whoever would have taken it over."""
        self._on_event(declined(self.work, reason=self._reason, waited_s=self._waited_s, ttft_s=self.age_s))
        self._close(Ended("stop"))

    def _find(self) -> Found | None:
        """What is known of the prompt's beginning; None where it is less than the blender has anyway."""
        layout = self.work.layout
        if self.work.cold:
            return None
        has = layout.shared_prefix_rows
        exactly = self.work.full and self.work.reason == ASKED_FOR
        found = self._prefixes.find(self.work.tenant, layout.token_ids, blended=not exactly)
        if found is not None and len(layout.prefix) < found.known.tokens <= _exact_anyway(layout):
            found = found.first(len(layout.prefix))
        found = found if found is not None and found.known.tokens > has else None
        self._reused = found.known.tokens if found is not None else has
        self._inexact = found.known.tokens - found.exact_rows if found is not None else 0
        return found

    @property
    def full_piece_rows(self) -> int:
        """Rows of its next piece, if it is a piece of a prompt that is computed in full; else 0."""
        full = bool(self._reason) and self.blend is None
        return self.piece.positions.shape[0] if full and self.piece is not None else 0

    @property
    def lacking(self) -> Lacking | None:
        """The caches that the store lacked, if any; of a prompt that was computed in full, all of them may be lacking."""
        missing = self.blend.missing if self.blend is not None and self._reason != "cold" else ()
        return partial(lacking, self.blender, self.work.layout, missing) if missing or self._reason == "cold" else None

    def request(self) -> RowRequest:
        """The rows that it wants in the next pass: a piece of its prefill, or its last token."""
        if self.blend is None:
            assert self.piece is not None
            return self.piece
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
        self.piece = None
        self._prefill.took(logits)
        self._look()

    def _look(self) -> None:
        """Whether its prefill is done."""
        assert self._prefill is not None
        if self._prefill.busy or not self._prefill.ended:
            return
        if self._prefill.result is None:
            self._decline()
        else:
            self._start(self._prefill.result)

    def repeat(self, error: Exception) -> bool:
        """A pass failed in which it was not alone: whether its rows are ready again. Raises `error` where they were before.

        A prefill begins anew: what a selector and the KV correction saw of that pass cannot be taken back.
        """
        if self.blend is not None:
            return True  # `request` forgets what the pass may have left
        if self._repeated or isinstance(error, StoreError):
            raise error
        assert self._prefill is not None
        self._repeated, self.piece = True, None
        self._prefill.failed(_AgainError())
        return False

    def _start(self, blend: Blend) -> None:
        self.blend, self._found = blend, None
        self._sampler = Sampler(blend.decoder, self.work.sampling, blend.layout.token_ids)
        if not self.work.cold:
            self._prefixes.keep(self.work.tenant, self.work.layout.token_ids[: self._exact], blend.cache)
        if self.work.handover is not None:
            self.work.handover(blend)
            self._on_event(self._started(blend))
            self._close(Ended("stop"))
            return
        self._on_event(self._started(blend))
        self._next(blend.logits)

    def _started(self, blend: Blend) -> Started:
        reused = self._reused, self._inexact
        return started(self.work, blend, reused=reused, reason=self._reason, waited_s=self._waited_s, ttft_s=self.age_s)

    @property
    def _exact(self) -> int:
        """How many of the prompt's first rows are what full prefill gives."""
        assert self.blend is not None
        return self._reused - self._inexact if self._inexact else self.blend.exact_rows

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
        if self.blend is None or self.ended or not self._tokens or self.work.cold:
            return
        layout, cache = self.work.layout, self.blend.cache
        ids = (*layout.token_ids, *self._tokens)
        if self._exact == layout.rows:
            self._prefixes.keep(self.work.tenant, ids[:-1], cache)
        else:
            self._prefixes.keep_conversation(self.work.tenant, ids, cache, self._exact)

    def fail(self, error: Exception) -> None:
        """The same, with an error; but damaged entries, and a store out of reach, only make that more is computed."""
        prefill = self._prefill if isinstance(error, StoreError) and not self.ended else None
        if prefill is not None and not prefill.ended:
            self.piece = None
            prefill.failed(error)
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
        self.blend = self._found = self._prefill = self.piece = self._sampler = None
        self._on_event = _nobody


def _nobody(event: Event) -> None:
    """Listens no more."""


def _exact_anyway(layout: PromptLayout) -> int:
    """So many rows are exact in a blended prompt whose first chunk stands where it was computed, and cost nothing but loading.

    To know them from memory would change which rows are recomputed, and so an answer, for nothing.
    """
    return layout.chunk_spans[0].stop if layout.chunks and layout.exact_first else len(layout.prefix)
