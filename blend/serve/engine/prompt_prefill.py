"""The prefill of one prompt in the engine: finds its beginning in memory, and blends or computes the rest in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from blend.errors import StoreError
from blend.layout import PlaceOrigin
from blend.model.passes import Resume, Steps
from blend.prefill.resources import NOTHING_MOVED, MovedRows
from blend.quality import Estimate, Quality
from blend.serve.engine.background import FindMissing, Stepper
from blend.serve.engine.comparison import RowComparison
from blend.serve.engine.edits import EditEvidence, shown, value_changes
from blend.serve.engine.prefixes import rows_of_prompt
from blend.serve.engine.savings import exact_anyway, is_blendable, reason_against
from blend.serve.engine.shared_text import SharedText
from blend.serve.events import (
    BLENDED_BEFORE,
    COLD,
    IN_MEMORY,
    ONLY_PARTS,
    SHORT,
    Figures,
    Started,
    TokenPart,
    TracedToken,
)
from blend.serve.failures import STORE_UNREACHABLE, is_outage
from blend.serve.prompt import ASKED_FOR, Prompt
from blend.serve.reasons import EDITED
from blend.stopwatch import Stopwatch
from blend.verified import UNCHECKED

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.layout import PromptLayout, Span
    from blend.model.cache import BlendedCache
    from blend.prefill.blender import Blend, Blender
    from blend.prefill.progress import FinalRows, PrefillProgress
    from blend.serve.engine.background import IOPool
    from blend.serve.engine.histories import FoundEdit, Histories
    from blend.serve.engine.prefixes import CachedPrefix, Conversation, PrefixCache
    from blend.serve.request import Edits
    from blend.types import CacheKey, ChunkCache

_MOSTLY = 0.5  # of a place's rows: then its text counts as found
_NOT_PROMISED = "no quality is promised: an earlier turn was blended without an estimate"


class _RestartError(Exception):
    """A pass failed that these rows shared with others."""


class _JoinedError(Exception):
    """Another request brings the same text, while this one computes it in its prompt."""


class PromptPrefill(Stepper["Blend"]):
    """Drives the prefill of a prompt.

    Args:
        prefixes: finds the prompt's beginning.
        histories: finds the prompt that this one edits.
        io: pool for calls that may wait for the store.
        submitted: when the engine got the prompt, by `time.monotonic`.
        least_gain: see `reason_against`.

    Attributes:
        quality: what the prompt asks for.
        first_rows: KV of the reused rows; None for the blender's own prefix.
        most_rows: of pieces from now on.

    """

    def __init__(
        self,
        prompt: Prompt,
        blender: Blender,
        prefixes: PrefixCache,
        histories: Histories,
        io: IOPool,
        *,
        submitted: float,
        least_gain: int,
    ) -> None:
        super().__init__(self._prefilling(), io)
        self._prompt = prompt
        self._blender = blender
        self._prefixes = prefixes
        self._histories = histories
        self._watch = Stopwatch(blender.decoder.device)
        self._submitted = submitted
        self._waited_s = time.monotonic() - submitted
        self._least_gain = least_gain
        self._config = prompt.config or blender.config
        self._recurrent = bool(blender.decoder.recurrent)
        self.quality = Quality.of(self._config)
        self._reason = ""  # why it is computed in full
        self._reused = 0  # first rows that come from memory
        self._inexact = 0  # how many of them, from the first blended one on
        self._estimate: Estimate | None = None  # of these
        self._author_before = ""  # whose earlier prompts these rows have read
        self.first_rows: ChunkCache | None = None
        self.most_rows = 0
        self._restarted = False
        layout = prompt.layout
        if prompt.request.cold:
            self.first_rows = blender.decoder.no_rows()
        elif (prefix := self._beginning(prefixes)) is not None:
            self.first_rows = prefix.cache
            self._reused = prefix.cache.tokens
            self._inexact = self._reused - prefix.exact_rows
            if self._inexact:
                self._estimate = prefix.estimate
                self._author_before = prefix.author
        elif not self._recurrent or layout.shared_prefix_rows == len(layout.kept_behind):
            self._reused = layout.shared_prefix_rows
        self._whole = layout  # in other pieces once other requests bring parts of them
        self._layout = self._behind(self._reused)
        self._edit: FoundEdit | None = None
        self._edits: Edits | None = None  # how its text behind the edits is answered for
        self._moved = NOTHING_MOVED
        self._progress: PrefillProgress | None = None  # of the running attempt
        self._shared = SharedText(prompt, blender, self._config, least_gain)
        self._rows_before = 0  # computed in an earlier attempt
        self._rows_taken = self._reused  # all that are in front of the running attempt
        if self._may_move:
            self._edit = histories.edit(prompt, self._layout)
        if self._edit is not None and prompt.request.edits != "fast":
            is_history = self._edit.edit.is_of_history(prompt.history())
            self._edit = self._edit if is_history else None
        if self._edit is not None:
            self._lay_out_edit(self._edit)

    def restart(self, error: Exception) -> None:
        """Begin anew after a shared pass failed, once: selectors cannot forget. Raises `error` if that is in vain."""
        if self._restarted or isinstance(error, StoreError):
            raise error
        self._restarted = True
        self.failed(_RestartError())

    def _beginning(self, prefixes: PrefixCache) -> CachedPrefix | None:
        """The prompt's beginning in the prefix cache, if that is more than the blender's own prefix."""
        layout = self._prompt.layout
        exact_only = self._prompt.full_because == ASKED_FOR
        quality = None if exact_only else self.quality
        prefix = prefixes.find(self._prompt.request.tenant, layout.token_ids, quality, self._prompt.author)
        if prefix is not None and len(layout.prefix) < prefix.cache.tokens <= exact_anyway(layout):
            prefix = prefix.first(len(layout.prefix))
        if prefix is None or prefix.cache.tokens <= layout.shared_prefix_rows:
            return None
        return None if self._recurrent and not prefix.cache.states else prefix

    @property
    def _may_move(self) -> bool:
        """Whether it may take an earlier prompt's rows: they promise no quality, and a recurrent state does not move."""
        prompt = self._prompt
        return not (prompt.full_because or prompt.request.cold or self.quality.asked or self._recurrent)

    def _lay_out_edit(self, match: FoundEdit) -> None:
        """Lay out the prompt behind its edits: with rows of the earlier prompt, or with all that read the edits computed."""
        edit, earlier = match
        request = self._prompt.request
        self._edits = "exact"
        self._layout = edit.computed()
        if request.edits == "exact" or self._histories.is_doubted(request.tenant, self._prompt.author):
            return
        sound = None
        if request.edits == "checked":
            sound = edit.sound(earlier.evidence, self._histories.spell) if earlier.evidence is not None else None
            if sound is None:
                return
        rows = self._prefixes.rows_of(earlier.conversation, edit.begin, edit.end)
        if rows is None:
            return
        self._edits = request.edits
        self._layout = edit.moved() if sound is None else edit.proven()
        self._moved = MovedRows(rows, edit.edited, sound)

    def _prefilling(self) -> Steps[Blend]:
        """Decide whether to blend, then load, select and compute."""
        self._reason = self._prompt.full_because or self._nothing_to_blend()
        undecided = not self._reason
        while True:
            try:
                if undecided:
                    undecided = False
                    yield from self._decide()
                return (yield from self._blending())
            except StoreError as error:
                self._fall_back(error)
            except _RestartError:
                pass
            except _JoinedError:
                self._layout = self._behind(self._rows_taken)
                undecided = True

    def _decide(self) -> Steps[None]:
        """Have the text that others bring, too, computed apart, then decide whether to blend."""
        if self._edit is None:
            rows = self._rows_taken
            with suppress(StoreError):  # the store takes no cache; whether it can be read shows next
                self._whole = yield from self._shared.steps(self._whole, rows, lambda: self.most_rows)
                self._layout = self._behind(rows)
        yield Resume.BACKGROUND
        self._reason = reason_against(self._blender, self._layout, self._config, self._least_gain)

    def _behind(self, rows: int) -> PromptLayout:
        """The prompt with its first rows as the prefix, if they are more than its own."""
        behind = self._whole.behind(rows) if rows > len(self._whole.prefix) else self._whole
        return behind.composable() if self._recurrent else behind

    def _rows_of_piece(self) -> int:
        """Most rows of the next piece. Raises `_JoinedError` if the text behind it is better computed for several requests."""
        is_plain = self._reason in (COLD, SHORT) and self._edit is None and not self._prompt.request.trace
        if is_plain and self._shared.has_news and self._progress is not None:
            self._take_over_rows(self._progress)
            self._progress = None
            raise _JoinedError
        return self.most_rows

    def _take_over_rows(self, progress: PrefillProgress) -> None:
        """Copy the rows that are computed: the prompt goes on behind them."""
        before = self.first_rows.tokens if self.first_rows is not None else self._layout.shared_prefix_rows
        final = progress.final_rows() if progress.rows_run else None
        rows = final.cache.resumable(final.exact) if final is not None else 0
        if final is not None and rows > before:
            self.first_rows = rows_of_prompt(final.cache, 0, rows)
            self._rows_before += rows - before
            self._rows_taken = rows

    def _blending(self) -> Steps[Blend]:
        return self._blender.steps(
            self._layout.all_plain() if self._reason else self._layout,
            config=self._config,
            room=self._prompt.sampling.max_tokens,
            watch=self._watch,
            most_rows=self._rows_of_piece,
            known=self.first_rows,
            moved=NOTHING_MOVED if self._reason else self._moved,
            watcher=self._watch_attempt,
        )

    def _watch_attempt(self, progress: PrefillProgress) -> None:
        self._progress = progress

    def _fall_back(self, error: StoreError) -> None:
        """Compute everything when the store is unreachable. Raises any other error."""
        if not is_outage(error) or self._reason == STORE_UNREACHABLE:
            raise error
        self._reason = STORE_UNREACHABLE

    def _nothing_to_blend(self) -> str:
        """Why nothing is left to blend behind the reused rows, or ""."""
        layout = self._prompt.layout
        if is_blendable(self._layout):
            return "" if self._blender.trusted else UNCHECKED
        if self._edits is not None:
            return EDITED
        if self._inexact:
            return BLENDED_BEFORE
        if self._recurrent and is_blendable(layout) and not is_blendable(layout.composable()):
            return ONLY_PARTS
        return IN_MEMORY if is_blendable(layout) or self._reused == layout.rows - 1 else ""

    # While it runs

    def let_go(self) -> None:
        """Once it has ended: free what only the prefill needed."""
        self.first_rows = None  # they are in the prompt's own cache now
        self._progress = None

    @property
    def rows_run(self) -> int:
        """Rows computed so far."""
        return self._progress.rows_run if self._progress is not None else 0

    @property
    def rows_to_run(self) -> int:
        """All rows to compute, as far as they are chosen."""
        return self._progress.rows_to_run if self._progress is not None else 0

    def final_rows(self) -> FinalRows | None:
        """The first rows that nothing will change any more; None if that is not known. Only while it is not `busy`."""
        if self._progress is None or not self.rows_run:
            return None
        final = self._progress.final_rows()
        if not self._inexact:
            return final
        return final._replace(exact=self._reused - self._inexact, estimate=self._larger(final.estimate))

    # Once it has ended

    @property
    def blend(self) -> Blend:
        """The prefilled prompt."""
        assert self.result is not None
        return self.result

    @property
    def exact_rows(self) -> int:
        """How many of the first rows equal full prefill's."""
        return self._reused - self._inexact if self._inexact else self.blend.exact_rows

    @property
    def estimate(self) -> Estimate | None:
        """The larger one of the blend's and of the one that came with the reused rows."""
        return self._larger(self.blend.quality)

    def _larger(self, estimate: Estimate | None) -> Estimate | None:
        estimates = [each for each in (estimate, self._estimate) if each is not None]
        return max(estimates, key=lambda each: each.kl, default=None)

    def started(self) -> Started:
        """What it has cost, and what of it came from where."""
        prompt = self._prompt
        request = prompt.request
        layout = prompt.layout
        blend = self.blend
        rows_hit = np.zeros(layout.rows, np.bool_)
        rows_hit[: self._reused] = True
        for span, is_hit in zip(blend.layout.chunk_spans, blend.hits, strict=True):
            rows_hit[slice(*span)] = is_hit
        pairs = zip(layout.places, layout.chunk_spans, strict=True)
        cited = [span for place, span in pairs if place.origin is not PlaceOrigin.TEXT]
        hits = tuple(bool(rows_hit[slice(*span)].mean() >= _MOSTLY) for span in cited)
        estimate = self.estimate
        unknown = self.quality.asked and self._inexact and self._estimate is None
        figures = Figures(
            method="full" if self._reason and not self._inexact else "blend",
            reason="" if self._reason == ASKED_FOR else self._reason,
            rows=layout.rows,
            rows_computed=self._rows_before + blend.rows_recomputed,
            rows_reused=self._reused,
            rows_inexact=self._inexact,
            rows_moved=self._rows_moved,
            rows_shared=self._rows_shared,
            rows_ahead=self._shared.rows_computed,
            edits=self._edits or "",
            hits=sum(hits),
            chunks=len(hits),
            bytes_loaded=blend.bytes_loaded,
            missing=len(blend.missing),
            stages={"prepare": self._submitted - request.arrived, **blend.stages},
            waited_s=self._waited_s,
            ttft_s=time.monotonic() - request.arrived,
            notes=(*blend.notes, _NOT_PROMISED) if unknown else blend.notes,
            quality=estimate.document if estimate else None,
        )
        trace = _traced(layout, blend) if request.trace else ()
        return Started(figures, hits, trace, (*blend.problems, *blend.artifact_problems), edited=self._computed_anew)

    @property
    def author(self) -> str:
        """Whose earlier prompts its rows have read, because some of them moved; "" if none moved."""
        return self._prompt.author if self._rows_moved else self._author_before

    @property
    def _rows_moved(self) -> int:
        layout = self._layout if self.result is None else self.blend.layout
        return sum(len(place.tokens) for place in layout.places if place.origin is PlaceOrigin.MOVED)

    @property
    def _rows_shared(self) -> int:
        """Rows of text that a request in flight has computed, this one or another."""
        pairs = zip(self.blend.layout.places, self.blend.hits, strict=True)
        return sum(len(place.tokens) for place, is_hit in pairs if is_hit and place.stored in self._shared.texts)

    @property
    def _computed_anew(self) -> tuple[Span, ...]:
        """Text of the earlier prompt that was computed, because it may have read what the edit took out."""
        if self._edit is None or self._rows_moved:
            return ()
        return tuple(self._edit.edit.spans)

    def comparison(self, conversation: Conversation, evidence: EditEvidence | None) -> RowComparison | None:
        """What to compare in idle time; None for nothing. conversation: the prompt with its answer."""
        if self._edit is None or evidence is None:
            return None
        hunks = self._edit.edit.hunks(self._histories.spell)
        before = self._edit.earlier.conversation
        return RowComparison.of(self._prompt.author, conversation, before, hunks, evidence)

    def evidence(self, cache: BlendedCache, tokens: int) -> EditEvidence | None:
        """What the prompt's edits have shown; None if it edits none. tokens: of the prompt and its answer, in `cache`."""
        if self._edit is None:
            return None
        if self._edits == "fast":
            return EditEvidence.nothing(tokens)
        edit, earlier = self._edit
        computed = np.zeros(self.blend.layout.rows, np.bool_)
        computed[self.blend.selection.rows.cpu().numpy()] = True
        changes = np.full(len(computed), np.nan, np.float32)
        rows = self._prefixes.rows_of(earlier.conversation, edit.begin, edit.end)
        source = edit.in_order
        compared = np.flatnonzero(computed & (source >= edit.begin) & (source < edit.end))
        if rows is not None and len(compared):
            there = source[compared] - edit.begin
            changes[compared] = value_changes(cache, rows, compared, there, self._blender.decoder.rotations)
        moved_by = earlier.evidence if self._rows_moved else None
        return shown(edit, moved_by, computed, changes, tokens, self._histories.spell)

    def find_missing(self) -> FindMissing | None:
        """How to learn the new text, and to find the caches that were missing; None if there is nothing to do."""
        missing = self.blend.missing
        texts = self._brought()
        learn = self._prompt.learn
        if not (missing or texts or self._reason == COLD):  # then it is not known yet which caches are missing
            return None
        blender = self._blender
        layout = self._whole
        brought = {place.whole for place in layout.places if place.is_brought}

        def find() -> tuple[ChunkLibrary, Sequence[CacheKey]]:
            admitted = learn(blender.library(layout.kept_behind), texts) if learn and texts else ()
            library = blender.library(layout.kept_behind)  # learning may have chosen the surrogate context
            candidates = missing or library.missing_of(library.wanted(layout))
            allowed = [key for key in candidates if key.chunk not in brought or key.chunk in admitted]
            return library, [*dict.fromkeys([*allowed, *library.missing(list(admitted))])]

        return find

    def _brought(self) -> list[tuple[int, ...]]:
        """The texts to learn, and those that were learned.

        Texts among the reused rows are left out, unless the request keeps text: they were learned when these rows were
        computed. With recurrent layers, so are those whose operators take longer to read than their rows to compute.
        """
        prompt = self._prompt
        if prompt.learn is None:
            return []
        reused = 0 if prompt.kept is not None else self._reused
        return list(prompt.brought_texts(self._blender.decoder.operator_rows, reused, self._whole))


def _traced(layout: PromptLayout, blend: Blend) -> tuple[TracedToken, ...]:
    parts: list[TokenPart] = ["prefix"] * len(layout.prefix)
    for place in layout.places:
        parts += ["text" if place.origin is PlaceOrigin.TEXT else "chunk"] * len(place.tokens)
    parts += ["suffix"] * len(layout.suffix)
    recomputed = torch.zeros(layout.rows, dtype=torch.bool)
    recomputed[blend.selection.rows.cpu()] = True
    scores: list[float | None] = [None] * layout.rows
    if blend.selection.scores is not None:
        scores = [*blend.selection.scores.tolist()]
    rows = zip(parts, recomputed.tolist(), scores, strict=True)
    return tuple(TracedToken("", part, computed, score) for part, computed, score in rows)
