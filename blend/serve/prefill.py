"""A prompt's way to its first token: what is known of its beginning, whether blending gains anything, its rows in pieces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.model.rows import Resume, RowRequest, Steps
from blend.serve.beside import Stepper
from blend.serve.encoding import Lacking, lacking
from blend.serve.engine import ASKED_FOR, Work
from blend.serve.failures import STORE_UNREACHABLE, is_outage
from blend.serve.worth import reason_against, why_nothing_is_left
from blend.types import common_length

if TYPE_CHECKING:
    import torch

    from blend.blender import Blend, Blender
    from blend.config import BlendConfig
    from blend.serve.beside import Beside
    from blend.serve.prefixes import Found, Prefixes
    from blend.timing import Stopwatch
    from blend.types import ChunkCache, PromptLayout


class _AgainError(Exception):
    """Told to a prefill that is to begin anew."""


class Prefill:
    """Of one prompt, from when it is begun. Only the engine's thread calls it.

    prefixes: where KV of earlier prompts is found. least_gain: see `reason_against`. reused: how many of its first rows are
    known without being computed; inexact: the last ones of these, from the first on that an earlier turn blended. reason: why
    all others are computed, or "". piece: of it, that is to be run.
    """

    def __init__(
        self, work: Work, blender: Blender, prefixes: Prefixes, beside: Beside, watch: Stopwatch, *, least_gain: int
    ) -> None:
        self._work, self._blender, self._watch, self._least_gain = work, blender, watch, least_gain
        self.reused = self.inexact = 0
        self.reason = ""
        self._found = self._find(prefixes)  # until its rows are in the prompt's own cache
        self._most_rows = 0
        self.piece: RowRequest | None = None
        self._repeated = False
        self._stepper: Stepper[Blend | None] = Stepper(self._prefilling(), beside)

    @property
    def waits(self) -> bool:
        """Whether it waits for the store, beside the engine's thread: it cannot go on, nor be let go of."""
        return self._stepper.busy

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do; what came of it is in `blend`."""
        return self._stepper.ended and not self._stepper.busy

    @property
    def blend(self) -> Blend | None:
        """What came of it; None where the prompt is left to somebody else, who would compute all of it."""
        return self._stepper.result

    def prepare(self, most_rows: int) -> None:
        """Go on as far as nothing is waited for; then there is a `piece`, unless it has ended or waits.

        most_rows: of those pieces that are cut from now on.
        """
        self._most_rows = most_rows
        self.piece = self._stepper.rows()
        self._let_go()

    def took(self, logits: torch.Tensor) -> None:
        """What the pass gave for the last row of its piece, `[1, vocab]`."""
        self.piece = None
        self._stepper.took(logits)
        self._let_go()

    def _let_go(self) -> None:
        if self.ended:
            self._found = None

    def repeat(self, error: Exception) -> None:
        """The pass failed, and others took part: it begins anew. Raises `error` where that was so before.

        What a selector and the KV correction saw of that pass cannot be taken back.
        """
        if self._repeated or isinstance(error, StoreError):
            raise error
        self._repeated = True
        self.fail(_AgainError())

    def fail(self, error: Exception) -> None:
        """Tell it why its piece cannot be run: damaged entries, and a store out of reach, only make that more is computed."""
        self.piece = None
        self._stepper.failed(error)

    def give_up(self) -> None:
        """Go no further; it `waits` until everything is let go of."""
        self._stepper.give_up()

    @property
    def full_piece_rows(self) -> int:
        """Rows of its next piece, if it is a piece of a prompt that is computed in full; else 0."""
        return self.piece.positions.shape[0] if self.reason and self.piece is not None else 0

    @property
    def lacking(self) -> Lacking | None:
        """The caches that the store lacked, if any; of a prompt that was computed in full, all of them may be lacking."""
        missing = self.blend.missing if self.blend is not None and self.reason != "cold" else ()
        return partial(lacking, self._blender, self._work.layout, missing) if missing or self.reason == "cold" else None

    @property
    def exact(self) -> int:
        """How many of the prompt's first rows are what full prefill gives, now that it has ended."""
        assert self.blend is not None
        return self.reused - self.inexact if self.inexact else self.blend.exact_rows

    def _find(self, prefixes: Prefixes) -> Found | None:
        """What is known of the prompt's beginning; None where it is less than the blender has anyway."""
        layout = self._work.layout
        if self._work.cold:
            return None
        has = layout.shared_prefix_rows
        exactly = self._work.full and self._work.reason == ASKED_FOR
        found = prefixes.find(self._work.tenant, layout.token_ids, blended=not exactly)
        if found is not None and len(layout.prefix) < found.known.tokens <= _exact_anyway(layout):
            found = found.first(len(layout.prefix))
        found = found if found is not None and found.known.tokens > has else None
        self.reused = found.known.tokens if found is not None else has
        self.inexact = found.known.tokens - found.exact_rows if found is not None else 0
        return found

    def _prefilling(self) -> Steps[Blend | None]:
        """Open its chunks, choose the rows, and compute them; nothing is done where somebody else would compute all of it."""
        try:
            self.reason = self._reason_known()
            if not self.reason and not self._work.full:
                yield Resume.BESIDE
                self.reason = reason_against(self._blender, self._layout, self._config, self._least_gain)
            if self.reason and self._work.handover is not None:
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
        if not is_outage(error) or self.reason == STORE_UNREACHABLE:
            raise error
        self.reason = STORE_UNREACHABLE

    def _reason_known(self) -> str:
        """Why nothing is to be blended, or "", as far as that is known without a look at the store."""
        if self._work.full:
            return self._work.reason
        return why_nothing_is_left(self._work.layout, self._layout, self.reused, self.inexact)

    @property
    def _config(self) -> BlendConfig:
        return self._work.config or self._blender.config

    @property
    def _layout(self) -> PromptLayout:
        """The prompt, with what is known of its beginning as its prefix."""
        layout = self._work.layout
        return layout.behind(self.reused) if self.reused > len(layout.prefix) else layout

    def _steps(self) -> Steps[Blend]:
        """Of all rows, where there is a reason for that."""
        return self._blender.steps(
            self._layout.all_plain() if self.reason else self._layout,
            config=self._config,
            room=self._work.sampling.max_tokens,
            watch=self._watch,
            most_rows=lambda: self._most_rows,
            known=self._known,
        )

    @property
    def _known(self) -> ChunkCache | None:
        """KV of the prompt's first rows; None leaves it to the blender, which has that of its own prefix."""
        if self._work.cold:
            return self._blender.decoder.no_rows()
        return self._found.known if self._found is not None else None


def may_gain_by(mine: Work, other: Work) -> bool:
    """Whether a prompt that is not begun yet may find more of its rows in memory once the `other` is prefilled."""
    if mine.cold or mine.tenant != other.tenant:
        return False
    rows = common_length(mine.layout.token_ids, other.layout.token_ids)
    if len(mine.layout.prefix) < rows <= _exact_anyway(mine.layout):
        rows = len(mine.layout.prefix)
    return rows > mine.layout.shared_prefix_rows


def _exact_anyway(layout: PromptLayout) -> int:
    """So many rows are exact in a blended prompt whose first chunk stands where it was computed, and cost nothing but loading.

    To know them from memory would change which rows are recomputed, and so an answer, for nothing.
    """
    return layout.chunk_spans[0].stop if layout.chunks and layout.exact_first else len(layout.prefix)
