"""One prompt in the engine: its prefill (`PromptPrefill`), then its answers (`Decoding`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Listed
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import StoreError
from blend.model.passes import RowRequest
from blend.quality import Estimate
from blend.serve.engine.background import FindMissing
from blend.serve.engine.decoding import Decoding
from blend.serve.engine.prefill import PromptPrefill
from blend.serve.engine.savings import LEAST_GAIN
from blend.serve.events import (
    COLD,
    EndReason,
    Event,
    Failed,
    Figures,
    Finished,
    OnEvent,
    Started,
    TokenPart,
    TracedToken,
)
from blend.serve.prompt import ASKED_FOR, Prompt
from blend.serve.request import Request
from blend.types import PlaceOrigin, Stopwatch

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.prefill.blender import Blend, Blender
    from blend.serve.engine.background import IOPool
    from blend.serve.engine.prefixes import PrefixCache
    from blend.types import CacheKey, PromptLayout

_NOT_PROMISED = "no quality is promised: an earlier turn was blended without an estimate"


class Sequence:
    """A prompt and everything the engine holds for it. Only the engine's thread calls it.

    Args:
        prefixes: finds the prompt's beginning, and keeps its rows for later prompts.
        number: order of arrival.
        least_gain: see `reason_against`.

    Attributes:
        capacity: most rows of its KV caches.
        blend: the prefilled prompt.
        piece: rows of its prefill that run next.
        started: whether its prefill has succeeded.
        answers, answers_left: answers that are being decoded, and those still to begin.

    """

    def __init__(
        self,
        prompt: Prompt,
        blender: Blender,
        prefixes: PrefixCache,
        number: int,
        on_event: OnEvent,
        *,
        least_gain: int = LEAST_GAIN,
    ) -> None:
        self.prompt = prompt
        self.blender = blender
        self.number = number
        self.capacity = prompt.sampling.n * (prompt.layout.rows + prompt.sampling.max_tokens)
        self.blend: Blend | None = None
        self.piece: RowRequest | None = None
        self.answers: list[Decoding] = []
        self.answers_left = 0
        self.started = self.ended = False
        self._prefixes = prefixes
        self._least_gain = least_gain
        self.send = on_event
        self._watch = Stopwatch(blender.decoder.device)
        self._submitted = time.monotonic()
        self._waited_s = 0.0
        self._prefill: PromptPrefill | None = None  # from its first turn until its release

    @property
    def request(self) -> Request:
        """What the client asked for."""
        return self.prompt.request

    @property
    def age_s(self) -> float:
        """Seconds since it was submitted to the engine."""
        return time.monotonic() - self._submitted

    @property
    def end_reason(self) -> EndReason | None:
        """Why it must end now, or None."""
        if self.request.cancelled.is_set():
            return "cancelled"
        deadline_s = self.request.deadline_s
        late = deadline_s is not None and time.monotonic() - self.request.arrived > deadline_s
        return "deadline" if late and self.blend is None else None

    # Prefill

    @property
    def waits(self) -> bool:
        """Whether its prefill waits for the store: it can neither advance nor be released."""
        return self._prefill is not None and self._prefill.busy

    def prepare(self, most_rows: int, io: IOPool) -> None:
        """Advance until a `piece` is ready, the prefill ends, or it waits for the store. most_rows: of new pieces."""
        if self._prefill is None:
            self._waited_s = self.age_s
            self._prefill = PromptPrefill(
                self.prompt,
                self.blender,
                self._prefixes,
                io,
                self._watch,
                least_gain=self._least_gain,
            )
        self._prefill.most_rows = most_rows
        self.piece = self._prefill.rows()
        self._after_step()

    @property
    def _begun(self) -> PromptPrefill:
        """Its prefill, which has begun."""
        assert self._prefill is not None
        return self._prefill

    def find_missing(self) -> FindMissing | None:
        """How to learn the new text, and to find the caches that were missing; None if there is nothing to do."""
        missing = self.blend.missing if self.blend is not None else ()
        texts = self._brought()
        learn = self.prompt.learn
        cold = self._begun.reason == COLD  # which caches are missing is not known yet
        if not (missing or texts or cold):
            return None
        blender = self.blender
        layout = self.prompt.layout
        brought = {place.whole for place in layout.places if place.is_brought}

        def find() -> tuple[ChunkLibrary, Listed[CacheKey]]:
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
        prompt = self.prompt
        if prompt.learn is None:
            return []
        reused = 0 if prompt.kept is not None else self._begun.reused
        return list(prompt.brought_texts(self.blender.decoder.operator_rows, reused))

    @property
    def _estimate(self) -> Estimate | None:
        """The larger one of the blend's and of the one that came with the reused rows."""
        blended = self.blend.quality if self.blend is not None else None
        estimates = [estimate for estimate in (blended, self._begun.estimate) if estimate is not None]
        return max(estimates, key=lambda estimate: estimate.kl, default=None)

    @property
    def _exact_rows(self) -> int:
        """How many of the first rows equal full prefill's."""
        assert self.blend is not None
        prefill = self._begun
        return prefill.reused - prefill.inexact if prefill.inexact else self.blend.exact_rows

    def _after_step(self) -> None:
        prefill = self._begun
        if prefill.busy or not prefill.ended:
            return
        prefill.first_rows = None  # they are in the prompt's own cache now
        self.started = True
        assert prefill.result is not None
        self._start(prefill.result)

    def _start(self, blend: Blend) -> None:
        """The prompt is prefilled: report it and begin the first answer."""
        request = self.request
        self.blend = blend
        if not request.cold:
            exact_ids = self.prompt.layout.token_ids[: self._exact_rows]
            self._prefixes.keep(request.tenant, exact_ids, blend.cache, request.users_session)
        self.send(self._started(blend))
        self.answers_left = self.prompt.sampling.n
        self.begin_answer()

    def begin_answer(self) -> None:
        """Take the first token of the next answer. The first one has the prompt's KV cache, the others have copies.

        A copy takes as long as a pass or longer, so the engine begins one answer a pass.
        """
        blend = self.blend
        sampling = self.prompt.sampling
        assert blend is not None
        index = sampling.n - self.answers_left
        cache = blend.cache
        if index:
            rows = self.prompt.layout.rows
            cache = cache.clone(rows + sampling.max_tokens - cache.get_seq_length())
            cache.truncate(rows)  # without those of the first answer
        self.answers_left -= 1
        self.answers.append(Decoding(self, self.blender.decoder, index, cache))
        self.answers[-1].took(blend.logits)

    def _started(self, blend: Blend) -> Started:
        layout = self.prompt.layout
        prefill = self._begun
        covered = len(layout.chunks) - len(blend.layout.chunks)  # by the reused rows
        place_hits = zip(layout.places, [True] * covered + list(blend.hits), strict=True)
        hits = tuple(hit for place, hit in place_hits if place.origin is not PlaceOrigin.TEXT)
        estimate = self._estimate
        notes = blend.notes
        if prefill.quality.asked and prefill.inexact and prefill.estimate is None:
            notes = (*notes, _NOT_PROMISED)
        figures = self._figures(
            rows_computed=blend.rows_recomputed,
            rows_reused=prefill.reused,
            rows_inexact=prefill.inexact,
            rows_moved=sum(len(place.tokens) for place in blend.layout.places if place.origin is PlaceOrigin.MOVED),
            hits=sum(hits),
            bytes_loaded=blend.bytes_loaded,
            missing=len(blend.missing),
            notes=notes,
            quality=estimate.document if estimate else None,
            stages=blend.stages,
        )
        trace = _traced(layout, blend) if self.request.trace else ()
        return Started(figures, hits, trace, (*blend.problems, *blend.artifact_problems))

    def _figures(self, *, stages: Mapping[str, float] = MappingProxyType({}), **figures: Any) -> Figures:
        request = self.request
        layout = self.prompt.layout
        reason = self._begun.reason
        return Figures(
            method="full" if reason and not figures.get("rows_inexact") else "blend",
            reason="" if reason == ASKED_FOR else reason,
            rows=layout.rows,
            chunks=sum(place.origin is not PlaceOrigin.TEXT for place in layout.places),
            stages={"prepare": self._submitted - request.arrived, **stages},
            waited_s=self._waited_s,
            ttft_s=time.monotonic() - request.arrived,
            **figures,
        )

    # Passes of its prefill: see `scheduler.BatchItem`

    def next_rows(self) -> RowRequest:
        """The piece of its prefill."""
        assert self.piece is not None
        return self.piece

    def took(self, logits: torch.Tensor) -> None:
        """Take the logits of its last row, `[1, vocab]`."""
        self.piece = None
        self._begun.took(logits)
        self._after_step()

    def retry(self, error: Exception) -> bool:
        """Always False: its prefill begins anew. Raises `error` if that is in vain."""
        self.piece = None
        self._begun.restart(error)
        return False

    def fail(self, error: Exception) -> None:
        """End with an error. A store error during prefill only makes more be computed."""
        prefilling = self._prefill is not None and not (self._prefill.ended or self.ended)
        if prefilling and isinstance(error, StoreError):
            self.piece = None
            self._begun.failed(error)
        else:
            self._close(Failed(error))

    # The end

    def end(self, reason: EndReason) -> None:
        """End all answers together and leave their rows in the prefix cache."""
        if reason == "cancelled":
            for answer in self.answers:
                self._leave_rows(answer)
        self._close(Finished(reason))

    def end_answer(self, answer: Decoding, reason: EndReason) -> None:
        """Report the end of one answer and leave its rows in the prefix cache."""
        self._leave_rows(answer)
        self.answers.remove(answer)
        if self.answers or self.answers_left:
            self.send(Finished(reason, answer.index, last=False))
        else:
            self._close(Finished(reason, answer.index))

    def _leave_rows(self, answer: Decoding) -> None:
        """Keep prompt and answer for the next turn, except the last token, whose KV was never computed."""
        if not answer.tokens or self.request.cold:
            return
        exact = self._exact_rows
        tenant = self.request.tenant
        session = self.request.users_session
        prompt = self.prompt.layout.token_ids
        tokens = tuple(answer.tokens)
        with suppress(Exception):  # only later prompts would gain
            if exact == len(prompt):
                self._prefixes.keep(tenant, (*prompt, *tokens[:-1]), answer.cache, session)
            elif not self.request.verify:  # else the check leaves exact rows, and the next turn goes on from these
                promise = self._begun.quality, self._estimate
                self._prefixes.keep_conversation(tenant, prompt, tokens, answer.cache, exact, *promise, session)
            self._prefixes.note(tenant, self.prompt.author, prompt, tokens)

    def _close(self, event: Event) -> None:
        if self.ended:
            return
        self.ended = True
        try:
            self.send(event)
        except Exception as error:  # the client must not wait for an end that it never gets
            with suppress(Exception):  # a broken listener must not harm the others
                self.send(Failed(error))
        if self._prefill is not None:
            self._prefill.give_up()

    def release(self) -> None:
        """Free its KV after it ended; it must not wait for the store."""
        self.blend = self._prefill = self.piece = None
        self.answers = []


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
