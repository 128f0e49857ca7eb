"""One prompt in the engine: prefix cache, blended or full prefill in pieces, then its answers, decoded token by token."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Listed
from contextlib import suppress
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import StoreError
from blend.model.cache import Run
from blend.model.forward import Resume, RowRequest, Steps
from blend.quality import Estimate, Quality
from blend.select import make_selector
from blend.select.base import needs_of, scoring_layers
from blend.serve.background import FindMissing, Stepper
from blend.serve.failures import STORE_UNREACHABLE, is_outage
from blend.serve.prefixes import rows_of_prompt
from blend.serve.sampling import Sampler
from blend.serve.types import (
    ASKED_FOR,
    BLENDED_BEFORE,
    IN_MEMORY,
    ONLY_PARTS,
    EndReason,
    Event,
    Failed,
    Figures,
    Finished,
    OnEvent,
    Output,
    Request,
    Started,
    TokenPart,
    TracedToken,
)
from blend.types import LEAD_SHARE, CacheKind, PlaceOrigin, Stopwatch, common_length
from blend.verified import UNVERIFIED

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.config import BlendConfig
    from blend.model.cache import BlendedCache
    from blend.prefill.blender import Blend, Blender
    from blend.serve.background import IOPool
    from blend.serve.prefixes import Found, PrefixCache
    from blend.types import CacheKey, ChunkCache, ChunkKey, PromptLayout

MOST_DRAFTED = 64  # tokens of a draft in a pass, which the other answers of the pass wait for
LEAST_GAIN = 32  # rows: saving fewer is not worth an approximation; chosen, not measured
_NOT_PROMISED = "no quality is promised: an earlier turn was blended without a calibration"


class _RestartError(Exception):
    """Thrown into a prefill that is to begin anew."""


class Sequence:
    """A prompt and everything the engine holds for it. Only the engine's thread calls it.

    Args:
        prefixes: finds the prompt's beginning, and keeps its rows for later prompts.
        number: order of arrival.
        least_gain: see `reason_against`.

    Attributes:
        capacity: most rows of its KV caches.
        blend: the prefilled prompt.
        started: whether its prefill has succeeded.
        answers, answers_left: answers that are being decoded, and those still to begin.
        reason: why it is computed in full, or "".
        piece: rows of its prefill that run next.
        reused: rows from the prefix cache.
        inexact: how many of them, from the first blended one on.

    """

    def __init__(
        self,
        request: Request,
        blender: Blender,
        prefixes: PrefixCache,
        number: int,
        on_event: OnEvent,
        *,
        least_gain: int = LEAST_GAIN,
    ) -> None:
        self.request, self.blender, self.number = request, blender, number
        self.capacity = request.sampling.n * (request.layout.rows + request.sampling.max_tokens)
        self.blend: Blend | None = None
        self.answers: list[Decoding] = []
        self.answers_left = 0
        self.started = self.ended = False
        self.reason = ""
        self.piece: RowRequest | None = None
        self.reused = self.inexact = 0
        self._earlier: Estimate | None = None  # of the inexact rows
        self._prefixes, self._on_event, self._least_gain = prefixes, on_event, least_gain
        self._watch, self._submitted = Stopwatch(blender.decoder.device), time.monotonic()
        self._waited_s, self._most_rows = 0.0, 0
        self._found: Found | None = None  # until its rows are in this prompt's cache
        self._stepper: Stepper[Blend | None] | None = None
        self._restarted = False

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
        return self._stepper is not None and self._stepper.busy

    def prepare(self, most_rows: int, io: IOPool) -> None:
        """Advance until a `piece` is ready, the prefill ends, or it waits for the store. most_rows: of new pieces."""
        if self._stepper is None:
            self._waited_s = self.age_s
            self._found = self._find()
            self._stepper = Stepper(self._prefilling(), io)
        self._most_rows = most_rows
        self.piece = self._stepper.rows()
        self._after_step()

    def find_missing(self) -> FindMissing | None:
        """How to keep the new text's KV, and to find the caches that were missing; None if there is nothing to do."""
        missing = self.blend.missing if self.blend is not None else ()
        brought, learn = self._brought(), self.request.learn
        if not missing and not brought and self.reason != "cold":  # cold: which caches are missing is not known yet
            return None
        blender, layout = self.blender, self.request.layout
        given = {place.stored for place in layout.places if place.origin is PlaceOrigin.REQUEST}

        def find() -> tuple[ChunkLibrary, Listed[CacheKey]]:
            library = blender.library(layout.kept_behind)
            learned = learn(library, brought) if brought and learn is not None else ()
            wanted = missing or library.missing_of(
                [one for one in library.wanted(layout) if one.kind is not CacheKind.FROM_PROMPT]
            )
            return library, [*learned, *(one for one in wanted if one.chunk not in given)]

        return find

    def _brought(self) -> dict[tuple[int, ...], ChunkCache | None]:
        """The texts that the request brought: their KV in this prompt, or None for those that the store had.

        Texts among the reused rows are left out: they were learned when these rows were computed. With recurrent layers all
        are None, and those whose operators take longer to read than their rows to compute are left out.
        """
        request, blend = self.request, self.blend
        if request.learn is None or blend is None:
            return {}
        layout, found = request.layout, dict[tuple[int, ...], "ChunkCache | None"]()
        reused = len(layout.chunks) - len(blend.layout.chunks)
        for index, (place, span) in enumerate(zip(layout.places, layout.chunk_spans, strict=True)):
            whole = place.stored
            if (
                index < reused
                or place.origin is not PlaceOrigin.REQUEST
                or whole is None
                or found.get(whole) is not None
            ):
                continue
            known = blend.hits[index - reused] or place.part_of is not None or self._recurrent
            found[whole] = None if known else rows_of_prompt(blend.cache, *span)
        if request.asked is not None and request.asked.start >= self.reused:
            asked = layout.token_ids[slice(*request.asked)]
            found[asked] = None if self._recurrent else rows_of_prompt(blend.cache, *request.asked)
        least = self.blender.decoder.operator_rows / (1 - LEAD_SHARE)
        return {text: cache for text, cache in found.items() if len(text) > least}

    def _find(self) -> Found | None:
        """The prompt's beginning in the prefix cache, if that is more than the blender's own prefix."""
        request, layout = self.request, self.request.layout
        if request.cold:
            return None
        exact_only = request.method == "full" and request.reason == ASKED_FOR
        found = self._prefixes.find(request.tenant, layout.token_ids, None if exact_only else self._asked)
        if found is not None and len(layout.prefix) < found.known.tokens <= _exact_anyway(layout):
            found = found.first(len(layout.prefix))
        if found is not None and self._recurrent and not found.known.states:
            found = None
        if found is None or found.known.tokens <= layout.shared_prefix_rows:
            whole = layout.shared_prefix_rows == len(layout.kept_behind)
            self.reused = layout.shared_prefix_rows if whole or not self._recurrent else 0
            return None
        self.reused, self.inexact = found.known.tokens, found.known.tokens - found.exact_rows
        self._earlier = found.estimate if self.inexact else None
        return found

    def _prefilling(self) -> Steps[Blend | None]:
        """Decide whether to blend, then load, select and compute. None if the prompt is left to `handover`'s owner."""
        full = self.request.method == "full"
        try:
            self.reason = self.request.reason if full else self._nothing_to_blend()
            if not self.reason and not full:
                yield Resume.BACKGROUND
                self.reason = reason_against(self.blender, self._layout, self._config, self._least_gain)
            if self.reason and self.request.handover is not None:
                return None
        except StoreError as error:
            self._fall_back(error)
        while True:
            try:
                return (yield from self._steps())
            except StoreError as error:
                self._fall_back(error)
            except _RestartError:
                pass

    def _steps(self) -> Steps[Blend]:
        return self.blender.steps(
            self._layout.all_plain() if self.reason else self._layout,
            config=self._config,
            room=self.request.sampling.max_tokens,
            watch=self._watch,
            most_rows=lambda: self._most_rows,
            known=self._known,
        )

    def _fall_back(self, error: StoreError) -> None:
        """Compute everything when the store is unreachable. Raises any other error."""
        if not is_outage(error) or self.reason == STORE_UNREACHABLE:
            raise error
        self.reason = STORE_UNREACHABLE

    def _nothing_to_blend(self) -> str:
        """Why nothing is left to blend behind the reused rows, or ""."""
        layout = self.request.layout
        if _blendable(self._layout):
            return "" if self.blender.trusted else UNVERIFIED
        if self.inexact:
            return BLENDED_BEFORE
        if self._recurrent and _blendable(layout) and not _blendable(layout.composable()):
            return ONLY_PARTS
        return IN_MEMORY if _blendable(layout) or self.reused == layout.rows - 1 else ""

    @property
    def _config(self) -> BlendConfig:
        return self.request.config or self.blender.config

    @property
    def _asked(self) -> Quality:
        return Quality.of(self._config)

    @property
    def _estimate(self) -> Estimate | None:
        """The larger one of the blend's and of the one that came with the reused rows."""
        made = self.blend.quality if self.blend is not None else None
        return max((one for one in (made, self._earlier) if one is not None), key=lambda one: one.kl, default=None)

    @property
    def _layout(self) -> PromptLayout:
        """The prompt with the reused rows as its prefix."""
        layout = self.request.layout
        layout = layout.behind(self.reused) if self.reused > len(layout.prefix) else layout
        return layout.composable() if self._recurrent else layout

    @property
    def _recurrent(self) -> bool:
        return bool(self.blender.decoder.recurrent)

    @property
    def _known(self) -> ChunkCache | None:
        """KV of the first rows; None uses the blender's own prefix."""
        if self.request.cold:
            return self.blender.decoder.no_rows()
        return self._found.known if self._found is not None else None

    @property
    def _exact_rows(self) -> int:
        """How many of the first rows equal full prefill's."""
        assert self.blend is not None
        return self.reused - self.inexact if self.inexact else self.blend.exact_rows

    def _after_step(self) -> None:
        stepper = self._stepper
        if stepper is None or stepper.busy or not stepper.ended:
            return
        self._found, self.started = None, True
        if stepper.result is not None:
            self._start(stepper.result)
            return
        figures = self._figures(rows_computed=self.request.layout.rows)
        self._on_event(Started(figures, hits=(False,) * figures.chunks))
        self._close(Finished("stop"))

    def _start(self, blend: Blend) -> None:
        """The prompt is prefilled: report it and begin the first answer."""
        request = self.request
        self.blend = blend
        if not request.cold:
            self._prefixes.keep(request.tenant, request.layout.token_ids[: self._exact_rows], blend.cache)
        if request.handover is not None:
            request.handover(blend)
        self._on_event(self._started(blend))
        if request.handover is not None:
            self._close(Finished("stop"))
        else:
            self.answers_left = request.sampling.n
            self.begin_answer()

    def begin_answer(self) -> None:
        """Take the first token of the next answer. The first one has the prompt's KV cache, the others have copies.

        A copy takes as long as a pass or longer, so the engine begins one answer a pass.
        """
        blend, request = self.blend, self.request
        assert blend is not None
        index, cache = request.sampling.n - self.answers_left, blend.cache
        if index:
            rows = request.layout.rows
            cache = cache.clone(rows + request.sampling.max_tokens - cache.get_seq_length())
            cache.truncate(rows)  # without those of the first answer
        self.answers_left -= 1
        self.answers.append(Decoding(self, index, cache))
        self.answers[-1].took(blend.logits)

    def _started(self, blend: Blend) -> Started:
        layout = self.request.layout
        covered = len(layout.chunks) - len(blend.layout.chunks)  # by the reused rows
        found = zip(layout.stored, [True] * covered + list(blend.hits), strict=True)
        hits = tuple(hit for chunk, hit in found if chunk is not None)
        estimate, notes = self._estimate, blend.notes
        if self._asked.asked and self.inexact and self._earlier is None:
            notes = (*notes, _NOT_PROMISED)
        figures = self._figures(
            rows_computed=blend.rows_recomputed,
            rows_reused=self.reused,
            rows_inexact=self.inexact,
            hits=sum(hits),
            bytes_loaded=blend.bytes_loaded,
            missing=len(blend.missing),
            notes=notes,
            quality=estimate.document if estimate else None,
            stages=blend.stages,
        )
        trace = _traced(layout, blend) if self.request.trace else ()
        return Started(figures, hits, trace, (*blend.problems, *blend.artifact_problems))

    def _figures(self, *, stages: Mapping[str, float] = MappingProxyType({}), **more: Any) -> Figures:
        request = self.request
        return Figures(
            method="full" if self.reason and not more.get("rows_inexact") else "blend",
            reason="" if self.reason == ASKED_FOR else self.reason,
            rows=request.layout.rows,
            chunks=sum(chunk is not None for chunk in request.layout.stored),
            stages={"prepare": self._submitted - request.arrived, **stages},
            waited_s=self._waited_s,
            ttft_s=time.monotonic() - request.arrived,
            **more,
        )

    # Passes of its prefill: see `scheduler.BatchItem`

    def next_rows(self) -> RowRequest:
        """The piece of its prefill."""
        assert self.piece is not None
        return self.piece

    def took(self, logits: torch.Tensor) -> None:
        """Take the logits of its last row, `[1, vocab]`."""
        assert self._stepper is not None
        self.piece = None
        self._stepper.took(logits)
        self._after_step()

    def retry(self, error: Exception) -> bool:
        """Whether its rows can run again now, after a shared pass failed. Raises `error` if they never can.

        A prefill begins anew, once, because a selector cannot forget what it saw of the failed pass.
        """
        if self._restarted or isinstance(error, StoreError):
            raise error
        self._restarted = True
        self._fail_piece(_RestartError())
        return False

    def fail(self, error: Exception) -> None:
        """End with an error. A store error during prefill only makes more be computed."""
        prefilling = self._stepper is not None and not (self._stepper.ended or self.ended)
        if prefilling and isinstance(error, StoreError):
            self._fail_piece(error)
        else:
            self._close(Failed(error))

    def _fail_piece(self, error: Exception) -> None:
        assert self._stepper is not None
        self.piece = None
        self._stepper.failed(error)

    # The end

    def end(self, reason: EndReason) -> None:
        """End all answers together and leave their rows in the prefix cache."""
        if reason == "cancelled":
            for answer in self.answers:
                self._leave_rows(answer)
        self._close(Finished(reason))

    def send(self, event: Event) -> None:
        """Report an event of an answer."""
        self._on_event(event)

    def end_answer(self, answer: Decoding, reason: EndReason) -> None:
        """Report the end of one answer and leave its rows in the prefix cache."""
        self._leave_rows(answer)
        self.answers.remove(answer)
        if self.answers or self.answers_left:
            self._on_event(Finished(reason, answer.index, last=False))
        else:
            self._close(Finished(reason, answer.index))

    def _leave_rows(self, answer: Decoding) -> None:
        """Keep prompt and answer for the next turn, except the last token, whose KV was never computed."""
        if not answer.tokens or self.request.cold:
            return
        layout, exact = self.request.layout, self._exact_rows
        ids = (*layout.token_ids, *answer.tokens)
        with suppress(Exception):  # only later prompts would gain
            if exact == layout.rows:
                self._prefixes.keep(self.request.tenant, ids[:-1], answer.cache)
            elif not self.request.verify:  # else the check leaves exact rows, and the next turn goes on from these
                promise = self._asked, self._estimate
                self._prefixes.keep_conversation(self.request.tenant, ids, answer.cache, exact, *promise)

    def _close(self, event: Event) -> None:
        if self.ended:
            return
        self.ended = True
        try:
            self._on_event(event)
        except Exception as error:  # the client must not wait for an end that it never gets
            with suppress(Exception):  # a broken listener must not harm the others
                self._on_event(Failed(error))
        if self._stepper is not None:
            self._stepper.give_up()

    def release(self) -> None:
        """Free its KV after it ended; it must not wait for the store."""
        self.blend = self._stepper = self._found = self.piece = None
        self.answers = []


class Decoding:
    """One answer to a prefilled prompt, decoded token by token. It takes part in passes: see `scheduler.BatchItem`.

    Attributes:
        index: its index among the answers to the prompt.
        cache: KV of prompt and answer.
        tokens: the answer so far.

    """

    def __init__(self, sequence: Sequence, index: int, cache: BlendedCache) -> None:
        request, decoder = sequence.request, sequence.blender.decoder
        self.index, self.cache, self.tokens = index, cache, list[int]()
        self._sequence, self._request, self._device = sequence, request, decoder.device
        self._sampler = Sampler(decoder, request, index)
        self._draft = request.draft[: request.sampling.max_tokens]

    def next_rows(self) -> RowRequest:
        """The row of its last token, and those of the draft behind it while the answer agrees with it.

        The draft's last token runs only if the answer goes on behind it: recurrent layers keep no state between the rows of a
        pass, and later prompts go on where the answer ends. After a token that was not chosen, they go back to the last state.
        """
        done, rows = len(self.tokens), self._request.layout.rows
        place = rows + done - 1
        start = self.cache.resumable(place)
        self.cache.truncate(start)  # a pass that failed, or tokens that were not chosen, may have left rows behind
        drafted = self._draft[done : min(done + MOST_DRAFTED, len(self._draft) - 1)]
        ids = [*self.tokens[start - rows :], *drafted]
        run = Run.consecutive(start, start + len(ids), self._device)
        outputs = 1 + len(drafted)
        return RowRequest.of(torch.tensor([ids], device=self._device), run, self.cache, outputs=outputs)

    def took(self, logits: torch.Tensor) -> None:
        """Choose the next tokens from logits `[rows, vocab]`: as many as agree with the draft, and one more."""
        if self._sequence.ended:  # another answer to the prompt failed in this pass
            return
        for row in logits:
            place = len(self.tokens)
            going = self._choose(row)
            if not going or self._draft[place : place + 1] != (self.tokens[-1],):
                self._draft = ()
                return

    def _choose(self, logits: torch.Tensor) -> bool:
        """Choose a token from logits `[vocab]`; whether the answer goes on."""
        token = self._sampler.choose(logits)
        self.tokens.append(token.id)
        self._sequence.send(Output((token,), answer=self.index))
        if self._sampler.ends(token.id) or self.index in self._request.stopped:
            self._sequence.end_answer(self, "stop")
        elif len(self.tokens) == self._request.sampling.max_tokens:
            self._sequence.end_answer(self, "length")
        return self in self._sequence.answers

    def retry(self, error: Exception) -> bool:
        """Its row can run again."""
        return True

    def fail(self, error: Exception) -> None:
        """End all answers to the prompt with an error."""
        self._sequence.fail(error)


def gains_from(request: Request, other: Request) -> bool:
    """Whether a prompt finds more of its rows in memory once the `other` is prefilled."""
    if request.cold or request.tenant != other.tenant:
        return False
    layout = request.layout
    rows = common_length(layout.token_ids, other.layout.token_ids)
    if len(layout.prefix) < rows <= _exact_anyway(layout):
        rows = len(layout.prefix)
    return rows > layout.shared_prefix_rows


def _exact_anyway(layout: PromptLayout) -> int:
    """Rows that are exact in a blended prompt because its first chunk stands where it was computed; they cost only loading.

    Taking them from memory instead would change which rows are recomputed, and so the answer, for no gain.
    """
    return layout.chunk_spans[0].stop if layout.chunks and layout.exact_first else len(layout.prefix)


def _blendable(layout: PromptLayout) -> bool:
    return any(chunk is not None for chunk in layout.stored)


def reason_against(blender: Blender, layout: PromptLayout, config: BlendConfig, least_gain: int = LEAST_GAIN) -> str:
    """Why this prompt is better computed in full, in a word or two, or "".

    Blending must save `least_gain` rows more than another pass, choosing rows by the question and reading operators cost.
    "cold": the saving is possible, but the store does not hold the caches yet.
    """
    stored = [(chunk, len(mine)) for chunk, mine in zip(layout.stored, layout.chunks, strict=True) if chunk is not None]
    if not stored:
        return "nothing to reuse"
    if config.ratio >= 1:
        return "everything is recomputed"
    library = blender.library(layout.kept_behind)
    keys: dict[tuple[int, ...], list[ChunkKey]] = {}
    for one in library.wanted(layout):
        keys.setdefault(one.chunk, []).append(library.key(one))
    readable = blender.store.readable(chain.from_iterable(keys.values()))
    held = sum(rows for chunk, rows in stored if not readable.isdisjoint(keys[chunk]))
    decoder = blender.decoder
    cost = least_gain + decoder.pass_rows + _question_rows(blender, layout, config) + decoder.operator_rows * len(keys)
    if held * (1 - config.ratio) > cost:
        return ""
    return "cold" if sum(rows for _, rows in stored) * (1 - config.ratio) > cost else "short"


def _question_rows(blender: Blender, layout: PromptLayout, config: BlendConfig) -> float:
    """Rows through all layers that cost as much as choosing rows by the question."""
    decoder = blender.decoder
    query = needs_of(make_selector(config.selector), len(decoder.rotations)).query
    last = scoring_layers(query.layers, decoder.attending)[-1] if query else -1
    return len(layout.suffix) * (last + 1) / len(decoder.layers)


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
