"""Whether blending a prompt gains anything over computing it, or taking it from memory, and why not."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import StoreError
from blend.model.forward import Resume, RowRequest, Steps
from blend.select import make_selector
from blend.select.base import needs_of, scoring_layers
from blend.serve.background import Lacking, Stepper, lacking
from blend.serve.outage import STORE_UNREACHABLE, is_outage
from blend.serve.types import (
    ASKED_FOR,
    BLENDED_BEFORE,
    IN_MEMORY,
    Ended,
    EndReason,
    Event,
    Failed,
    Sampling,
    Started,
    Token,
    Work,
)
from blend.timing import Stopwatch
from blend.types import common_length

if TYPE_CHECKING:
    from blend.blender import Blend, Blender
    from blend.config import BlendConfig
    from blend.model.decoder import Decoder
    from blend.serve.background import Beside
    from blend.serve.prefixes import Found, Prefixes
    from blend.types import ChunkCache, PromptLayout


LEAST = 32  # rows: less is not worth another error than rounding; chosen, not measured


def why_nothing_is_left(whole: PromptLayout, left: PromptLayout, reused: int, inexact: int) -> str:
    """Why nothing is left to blend of a prompt that begins in memory, or "".

    left: the prompt behind its `reused` first rows, which are in memory; `inexact` of them an earlier turn blended.
    """
    if _blendable(left):
        return ""
    if inexact:
        return BLENDED_BEFORE
    return IN_MEMORY if _blendable(whole) or reused == whole.rows - 1 else ""


def _blendable(layout: PromptLayout) -> bool:
    """Whether any of it may be in a store."""
    return any(chunk is not None for chunk in layout.stored)


def reason_against(blender: Blender, layout: PromptLayout, config: BlendConfig, least_gain: int = LEAST) -> str:
    """One word or two for why this prompt is better computed in full, or "".

    Rows that need not be computed are held against those that the question's own pass computes to choose rows, which run
    through part of the layers; `least_gain` rows must be left. "cold" where what could be saved is not in the store yet.
    """
    stored = [(chunk, len(mine)) for chunk, mine in zip(layout.stored, layout.chunks, strict=True) if chunk is not None]
    if not stored:
        return "nothing to reuse"
    if config.ratio >= 1:
        return "everything is recomputed"
    library = blender.library(layout.kept_behind)
    keys = {chunk: [library.key(one) for one in library.variants([chunk])] for chunk, _ in stored}
    readable = blender.store.readable(chain.from_iterable(keys.values()))
    held = sum(rows for chunk, rows in stored if not readable.isdisjoint(keys[chunk]))
    cost = least_gain + _question_rows(blender, layout, config)
    if held * (1 - config.ratio) > cost:
        return ""
    return "cold" if sum(rows for _, rows in stored) * (1 - config.ratio) > cost else "short"


def _question_rows(blender: Blender, layout: PromptLayout, config: BlendConfig) -> float:
    """Rows through all layers that cost as much as choosing rows by the question."""
    depth = len(blender.decoder.layers)
    query = needs_of(make_selector(config.selector), depth).query
    return len(layout.suffix) * (scoring_layers(query.layers, depth)[-1] + 1) / depth if query else 0.0


# --- From logits to the next token.


LEAST_TEMPERATURE = 1e-5  # below it the likeliest token is taken, as a draw would all the same


class Sampler:
    """Chooses the tokens of one answer; prompt: its token ids.

    The model's own `generation_config` decides which tokens end an answer, and its repetition penalty applies, as in
    `model.generate`, so that a greedy answer is the one that `blend answer` gives.
    """

    def __init__(self, decoder: Decoder, sampling: Sampling, prompt: tuple[int, ...]) -> None:
        config: Any = decoder.model.generation_config
        stops = config.eos_token_id
        self.stops = frozenset(() if sampling.ignore_eos else [stops] if isinstance(stops, int) else stops or ())
        self._sampling, self._device = sampling, decoder.device
        self._draw = torch.Generator(device=decoder.device)
        if sampling.seed is not None:
            self._draw.manual_seed(sampling.seed)
        else:
            self._draw.seed()
        self._penalty = float(config.repetition_penalty or 1.0)
        self._seen = torch.tensor(sorted(set(prompt)), device=decoder.device) if self._penalty != 1.0 else None

    def choose(self, logits: torch.Tensor) -> Token:
        """The next token from logits `[vocab]`."""
        scores = self._penalised(logits.float())
        greedy = self._sampling.temperature < LEAST_TEMPERATURE
        token = int(scores.argmax()) if greedy else self._drawn(scores)
        if self._seen is not None:
            self._seen = torch.cat((self._seen[self._seen != token], self._seen.new_tensor([token])))
        if self._sampling.logprobs is None:
            return Token(token)
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(self._sampling.logprobs)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Token(token, float(logprobs[token]), top)

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        """Tokens seen before made less likely (CTRL, Keskar et al. 2019)."""
        if self._seen is None:
            return scores
        seen = scores[self._seen]
        worse = torch.where(seen < 0, seen * self._penalty, seen / self._penalty)
        return scores.index_copy(0, self._seen, worse)

    def _drawn(self, scores: torch.Tensor) -> int:
        """Drawn from the nucleus (Holtzman et al. 2020): the likeliest tokens that reach `top_p` together, one at least."""
        below = scores - scores.max()  # the best stays 0: no temperature makes it infinite
        chances, order = (below / self._sampling.temperature).softmax(-1).sort(descending=True)
        beyond = chances.cumsum(-1) - chances >= self._sampling.top_p
        beyond[0] = False
        return int(order[torch.multinomial(chances.masked_fill(beyond, 0.0), 1, generator=self._draw)])


# --- What is told of a prompt when its prefill is done, or was left to somebody else.


def started(
    work: Work, blend: Blend, *, reused: tuple[int, int], reason: str, waited_s: float, ttft_s: float
) -> Started:
    """Of a prompt that was blended, or computed in full for this `reason`; see `Started`.

    reused: rows that were taken over from earlier prompts, and how many of them are not exact.
    """
    stored = zip(work.layout.stored, _hits(work, blend), strict=True)
    return Started(
        hits=tuple(hit for chunk, hit in stored if chunk is not None),
        rows=work.layout.rows,
        rows_computed=blend.rows_recomputed,
        rows_reused=reused[0],
        rows_inexact=reused[1],
        bytes_loaded=blend.bytes_loaded,
        lacking=len(blend.missing),
        reason=reason,
        stages=blend.stages,
        waited_s=waited_s,
        ttft_s=ttft_s,
        notes=blend.notes,
        trace=_traced(blend) if work.trace else (),
        problems=(*blend.problems, *blend.artifact_problems),
    )


def declined(work: Work, *, reason: str, waited_s: float, ttft_s: float) -> Started:
    """Of a prompt of which nothing was computed for this `reason`."""
    hits = (False,) * sum(chunk is not None for chunk in work.layout.stored)
    return Started(hits, work.layout.rows, work.layout.rows, 0, 0, 0, 0, reason, {}, waited_s, ttft_s, ())


def _hits(work: Work, blend: Blend) -> list[bool]:
    """For each place of the prompt whether its KV was there; those before what is known are."""
    covered = len(work.layout.chunks) - len(blend.layout.chunks)
    return [True] * covered + list(blend.hits)


def _traced(blend: Blend) -> tuple[tuple[bool, float | None], ...]:
    computed = torch.zeros(blend.layout.rows, dtype=torch.bool)
    computed[blend.selection.rows.cpu()] = True
    scores: list[float | None] = [None] * blend.layout.rows
    if blend.selection.scores is not None:
        scores = [*blend.selection.scores.tolist()]
    return tuple(zip(computed.tolist(), scores, strict=True))


# --- A prompt's way to its first token: what is known of its beginning, whether blending gains anything, its rows in pieces.


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
                yield Resume.BACKGROUND
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


# --- One prompt on its way through the embedded engine: waiting, prefilled (`prefill`), then decoded token by token.


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
