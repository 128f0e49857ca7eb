"""One attempt at a blended prefill, step by step: open, choose, load, recompute, finish. `Blender.steps` drives it.

Each step is a plain method over the state of the attempt. Steps that need the decoder give the rows to run; `Blender.steps`
yields them to whoever runs passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blend.chunks.assemble import Assembly
from blend.chunks.correction import Corrections
from blend.chunks.opened import OpenChunks, open_chunks
from blend.config import BlendConfig
from blend.model.cache import Run
from blend.model.passes import Narrowing, Resume, RowRequest
from blend.prefill.correction_check import CorrectionCheck
from blend.prefill.notes import notes_of
from blend.prefill.plan import make_plan
from blend.prefill.question import QueryAttention
from blend.prefill.resources import BlenderParts, PromptInputs
from blend.quality import RATIOS, Estimate, Judge, Quality, signals_of
from blend.select import All, Evidence, Needs, Nothing, Step, make_selector, require_whole_chunks
from blend.select.base import KV, needs_of, scoring_layers
from blend.select.selectors import rows_of
from blend.types import Selection

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.model.cache import BlendedCache
    from blend.model.row_decoder import RowDecoder
    from blend.prefill.plan import Plan, Rows
    from blend.types import CacheKey


LEAST_RATIO_UNCORRECTED = 0.3  # of rows, if there is no KV correction yet or it does not fit a prompt


class NothingStoredError(Exception):
    """The store holds none of a prompt's chunks. missing: the caches that were looked for."""

    def __init__(self, missing: Sequence[CacheKey]) -> None:
        super().__init__("none of the prompt's chunks is stored")
        self.missing = missing


class Attempt(NamedTuple):
    """How a prompt is tried.

    Attributes:
        config: how rows are chosen.
        corrected: whether KV corrections are added.
        sound: whether all entries are read and verified first, because one of them was damaged.
        instead_of: the attempt whose KV correction did not fit.

    """

    config: BlendConfig
    corrected: bool
    sound: bool = False
    instead_of: Prefill | None = None


class Prefill:
    """The state of one attempt; use it in a `with`, which opens the prompt's caches and closes them.

    Args:
        blender: the decoder, the store and what was measured on its caches.
        prompt: the prompt.
        attempt: how it is tried.

    Attributes:
        library: the caches behind its prefix; None if it uses none.
        opened: the caches of its places.
        plan: which rows may be recomputed.
        assembly: the placing of the stored caches into the prompt's.
        question_logits: behind the question's rows, once they ran.
        logits: for the next token, `[1, vocab]`, once the last rows ran.
        estimate: the expected KL, if a quality was asked for and there is an estimator.
        check: compares stored and corrected KV with fresh KV.
        ahead_run, chosen_run: how many rows ran so far: of those of the prefix that run before the others, and of the others.

    Raises:
        ConfigError: the selector needs a layer that the decoder lacks, or breaks its contract (`blend.select.base`).
        StoreError: the store cannot be read.

    """

    # Set when the caches are opened.
    opened: OpenChunks
    problems: tuple[str, ...]
    judge: Judge | None
    uncorrected: bool
    notes: tuple[str, ...]
    plan: Plan
    assembly: Assembly
    cache: BlendedCache
    check: CorrectionCheck
    _needs: Needs
    # Rows, set with the plan: those of the prefix without known KV, those always computed, and those to choose from.
    _ahead: Run
    _always: Run
    _leads: Tensor
    _candidates: Tensor
    _rows: Run  # all that are still computed
    _computed_from: list[tuple[int, int]]  # from which layer on how many
    _ids: Tensor

    def __init__(self, blender: BlenderParts[RowDecoder], prompt: PromptInputs, attempt: Attempt) -> None:
        self._blender = blender
        self._decoder = blender.decoder
        self.prompt = prompt
        self.attempt = attempt
        self._watch = prompt.watch
        self._stack = ExitStack()
        self._depth = len(self._decoder.rotations)
        self.library: ChunkLibrary | None = None
        self.question_logits: Tensor | None = None
        self.logits: Tensor | None = None
        self.estimate: Estimate | None = None
        self._question: QueryAttention | None = None
        self._attention: Tensor | None = None
        self.ahead_run = self.chosen_run = 0

    # 1. Open

    def __enter__(self) -> Prefill:
        try:
            self._decoder.together(self._set_up)
            self._stack.enter_context(self.assembly)
        except BaseException:
            self._stack.close()
            raise
        return self

    def _set_up(self) -> tuple[object, ...]:
        """Open the caches and plan the rows; what passes depend on."""
        with self._watch.stage("load"):
            self.opened = self._stack.enter_context(self._open())
        if self.prompt.needs_hit and not any(self.opened.hits):
            raise NothingStoredError(self.opened.missing)
        with self._watch.stage("reposition"):
            self._prepare()
        corrections = [gain.correction.before for gain in self.assembly.gains]
        return (self.opened.hits, self.plan.budget, self.judge is not None, *corrections)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _open(self) -> OpenChunks:
        layout = self.prompt.layout
        opened = OpenChunks(self._decoder, layout)
        if self.prompt.uses_store:
            self.library = self._blender.library(layout.kept_behind)
            sound = self.attempt.sound or self._decoder.workers > 1  # one worker must not fail within a pass
            opened = open_chunks(self.library, layout, contextual=self.attempt.config.surrogate, sound=sound)
        if self.prompt.moved.cache is not None:
            opened.take_moved(self.prompt.moved.cache)
        return opened

    # 2. Choose: the plan, then as many rows as it or the judge says

    def _prepare(self) -> None:
        """Plan the rows, and set up the placing of the stored ones."""
        config = self.attempt.config
        layout = self.prompt.layout
        selector = make_selector(config.selector)
        if self._decoder.recurrent and config.ratio < 1:
            require_whole_chunks(selector)
        adds = self.attempt.corrected and not isinstance(selector, All)
        corrections = Corrections()
        if adds and self.library is not None:
            corrections = self._blender.corrections.of_prompt(self.library, self.opened)
        self.problems = corrections.problems
        self.judge = self._target() if adds else None
        self.uncorrected = adds and self._blender.uncorrected_ratio > 0 and self.opened.lacks(corrections.of_places)
        configured_ratio = config.ratio if self.judge is None else RATIOS[0]
        least_ratio = self._blender.uncorrected_ratio if self.uncorrected else 0.0
        ratio = max(configured_ratio, least_ratio)
        notes = notes_of(
            self.attempt.config,
            self.judge,
            ratio,
            unfit=self.attempt.instead_of is not None,
            raised=ratio > configured_ratio,
            recurrent=bool(self._decoder.recurrent),
            blends=adds and any(self.opened.hits),
        )
        self.notes = tuple(notes)
        self.plan = make_plan(
            layout,
            self.opened.hits,
            selector,
            ratio,
            first_exact=self.opened.first_exact,
            first_lossless=self.opened.first_lossless,
            known=self.prompt.beginning.tokens,
            leads=self.opened.lead_lengths() if self._decoder.recurrent else None,
            judged=self.judge is not None,
            moved=self.prompt.moved,
        )
        self.assembly = Assembly(
            self._decoder,
            layout,
            self.prompt.beginning,
            self.opened.chunks,
            self.opened.loader,
            self.prompt.new_cache(),
            corrections.of_places,
            self._watch,
        )
        self.cache = self.assembly.cache
        self._needs = needs_of(self.plan.selector, self._depth)
        self.check = CorrectionCheck(self._decoder, layout, self.assembly, self._last_scored_layer)
        self._prepare_rows()

    def _prepare_rows(self) -> None:
        plan = self.plan
        device = self._decoder.device
        looks = self._needs.query is not None
        # The question attends to the prefix, so that runs first.
        self._ahead = Run.on_host(plan.ahead if looks else plan.ahead[:0], device)
        always = plan.required if looks else np.concatenate((plan.ahead, plan.required))
        self._always = Run.on_host(always, device)
        self._candidates = self._on_device(plan.candidates)
        self._leads = self._on_device(plan.leads)
        rows = np.sort(np.concatenate((plan.candidates, always)), kind="stable")
        self._rows = Run.on_host(rows, device)
        self._computed_from = [(0, len(rows))]
        self._ids = self._on_device(self.prompt.layout.ids)[None]

    @property
    def _last_scored_layer(self) -> int:
        """The last layer that the question's pass needs, or the last one."""
        if self._needs.query is None:
            return self._depth - 1
        return scoring_layers(self._needs.query.layers, self._decoder.attending)[-1]

    def _target(self) -> Judge | None:
        """What a prompt with stored chunks is held to; None keeps the ratio."""
        config = self.attempt.config
        needs = needs_of(make_selector(config.selector), self._depth)
        quality = Quality.of(config)
        if not quality.asked or self.library is None or not any(self.opened.hits):
            return None
        if needs.query is None or needs.steps != (Step(0),):
            return None
        return self._blender.estimators.target(self.library, quality)

    def rows_ahead(self) -> Iterator[RowRequest]:
        """The rows of the prefix without known KV, if the selector looks at the prompt."""
        with self._watch.stage("recompute"):
            for request in self._requests(self._ahead):
                yield request
                self.ahead_run += request.run.rows
            self.cache.mark()  # the question's pass and the recompute both begin here

    def ask(self) -> None:
        """Make the question's pass ready, if the selector looks at it: blank the context rows without stored KV."""
        layout = self.prompt.layout
        score = self._needs.query
        if score is None:
            return
        required = self.plan.required
        uncached = required[required < layout.context.stop]
        with self._watch.stage("select"):
            if self.plan.whole_chunks:  # the question's rows need the states of all rows before them
                self._question = QueryAttention(self._decoder, self.cache, layout, score, also=uncached)
                self.check.keep_leads(self._leads)  # they run with the question
                self._restart_states(self._question.rows)
            else:
                self._question = QueryAttention(self._decoder, self.cache, layout, score, self._on_device(uncached))

    @property
    def resume(self) -> Resume:
        """How to go on with `look`: behind other prompts' passes if it runs the decoder itself."""
        runs_decoder = self._asks_alone or self._asks_by_graph
        return Resume.NEXT_TURN if runs_decoder else Resume.ENGINE

    @property
    def _asks_alone(self) -> bool:
        """Whether the question has a pass to itself, which then ends with the last scored layer."""
        return self._needs.query is not None and self.prompt.most_rows is None and self.judge is None

    @property
    def _asks_by_graph(self) -> bool:
        """Whether the decoder has a graph for the question: so short a pass needs no company."""
        question = self._question
        return question is not None and question.can_replay(logits=self.judge is not None)

    def look(self) -> None:
        """Run the passes that no other prompt takes part in."""
        with self._watch.stage("select"):
            question = self._question
            if question is not None and (self._asks_alone or self._asks_by_graph):
                replayed = question.replay(self.assembly.await_layer, logits=self.judge is not None)
                if not replayed and self._asks_alone:
                    question.watch(self.assembly.await_layer)

    def question_rows(self) -> Iterator[RowRequest]:
        """The question over the stored caches, for its attention and, if there is a judge, the next token's logits."""
        question = self._question
        if question is None or question.is_complete:
            return
        with self._watch.stage("select"):
            # A shared pass runs the layers above the scored ones for nothing, but does not hold up answers. In the last layer
            # it shows only the rows whose logits are wanted.
            shows_all = question.last_layer < self._depth - 1
            for request in self._requests(question.rows):
                outputs = 1 if shows_all else request.positions.shape[0]
                yield replace(request, observe=question.observe, outputs=outputs)

    def choose(self) -> None:
        """Choose the rows to recompute, or those that the selector narrows down later."""
        with self._watch.stage("select"):
            logits = self.question_logits
            if self._question is not None:
                self._attention = self._question.attention()
                logits = self._question.logits if logits is None else logits
            if self.judge is not None and logits is not None:
                self._judge(self.judge, logits[-1])
                self.logits = logits[-1:]
            for step in self._needs.steps:
                if step.layer == 0:
                    self._narrow(step, None)
            self._watch_recomputed(0)

    def _on_device(self, rows: Rows) -> Tensor:
        return torch.from_numpy(rows).to(self._decoder.device, non_blocking=True)

    def _judge(self, judge: Judge, logits: Tensor) -> None:
        """Let the judge choose how many rows to recompute. logits: of the question's last row, `[vocab]`."""
        assert self._attention is not None
        attention = self._attention.sum(0)
        plan = self.plan
        required = torch.from_numpy(plan.required).to(attention.device)
        stale = torch.from_numpy(plan.stale).to(attention.device)
        signals = []
        for ratio in RATIOS:
            budget = max(0, round(ratio * plan.stored) - plan.lead_rows)
            rows = rows_of(plan.selector, self._evidence(Step(0), None, budget))
            computed = torch.cat((rows, required))
            signals.append(signals_of(logits, attention, stale, computed))
        estimate = judge.choice(signals)
        least_ratio = plan.lead_rows / plan.stored
        self.estimate = estimate._replace(ratio=max(estimate.ratio, least_ratio))
        budget = max(plan.budget, round(estimate.ratio * plan.stored) - plan.lead_rows)
        budget = int(self._decoder.agreed(torch.tensor(budget)))
        self.plan = replace(plan, budget=budget)

    def _narrow_at(self, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        """The rows to keep from the step on, given its layer's KV of the rows so far, `[1, kv_heads, rows, head_dim]`."""
        self.assembly.await_layer(step.layer)
        with self._watch.stage("select"):
            self._narrow(step, (keys, values))
            self._watch_recomputed(step.layer)
        return self._rows.positions

    def _narrow(self, step: Step, fresh: KV | None) -> None:
        selector = self.plan.selector
        if isinstance(selector, All):
            return
        if isinstance(selector, Nothing):
            self._candidates = self._candidates[:0]
            self._rows = self._always
        else:
            evidence = self._evidence(step, fresh, round(step.factor * self.plan.budget))
            self._candidates = self._decoder.agreed(rows_of(selector, evidence))
            rows = torch.cat((self._candidates, self._always.positions)).sort().values
            self._rows = Run(rows, None, self.prompt.layout.rows)
        self._computed_from.append((step.layer, self._rows.rows))

    def _watch_recomputed(self, layer: int) -> None:
        """Have the check compare the rows with stored KV that are recomputed from this layer on."""
        rows = self._candidates
        if self._leads.shape[0] and self._question is None:
            rows = torch.cat((rows, self._leads)).sort().values
        self.check.choose(rows, layer)

    def _evidence(self, step: Step, fresh: KV | None, budget: int) -> Evidence:
        candidates = self._candidates
        stored = None
        if fresh is not None:
            fresh = _at(fresh, torch.searchsorted(self._rows.positions, candidates))
            stored = _at(self.cache.view(step.layer), candidates)
        return Evidence(
            self.prompt.layout,
            candidates,
            min(budget, candidates.shape[0]),
            layer=step.layer,
            fresh=fresh,
            stored=stored,
            query_attention=None if self._attention is None else self._attention[:, candidates],
            whole_chunks=self.plan.whole_chunks,
        )

    # 3. Load

    def layers_to_load(self) -> Iterator[Resume]:
        """Await all layers before a pass that other prompts share: it must neither wait nor fail for this store."""
        for layer in self.assembly.pending if self.prompt.most_rows is not None else ():
            yield Resume.BACKGROUND
            self.assembly.await_layer(layer)

    # 4. Recompute

    def chosen_rows(self) -> Iterator[RowRequest]:
        """The chosen rows, all at once or in ascending pieces.

        A piece reads the rows that earlier pieces wrote, as it would in one pass. A selector that chooses at a check layer gets
        all rows in one piece, and may choose among them again at later layers. With recurrent layers the leads run with the
        question: if they are enough, its pass was the recompute.
        """
        is_computed = self.logits is not None and not self._candidates.shape[0]
        if is_computed and self.plan.whole_chunks:
            return
        later = [step for step in self._needs.steps if step.layer > 0]
        narrowings = tuple(Narrowing(step.layer, partial(self._narrow_at, step)) for step in later)
        with self._watch.stage("recompute"):
            if self.plan.whole_chunks:
                self._restart_states(self._rows)
            for request in self._requests(self._rows, whole=bool(narrowings)):
                yield replace(request, narrowings=narrowings)
                self.chosen_run += request.run.rows

    def _restart_states(self, rows: Run) -> None:
        """If only the last chunk's state counts, start anew behind each stored chunk that a pass over these rows leaves out.

        Not if it leaves out nothing that differs from full recompute.
        """
        mode = self.attempt.config.states
        if mode == "verified":
            mode = self._blender.states
        if mode == "composed":
            return
        starts = self.plan.restarts(self.opened.hits, rows.positions.cpu().numpy())
        self.cache.restart(starts, len(self.prompt.layout.prefix))

    def _requests(self, rows: Run, *, whole: bool = False) -> Iterator[RowRequest]:
        most_rows = None if whole else self.prompt.most_rows
        for piece in rows.pieces(most_rows):
            start = piece.start
            ids = self._ids[:, piece.positions] if start is None else self._ids[:, start : start + piece.rows]
            yield RowRequest(ids, piece, self.cache, await_layer=self.assembly.await_layer)

    # 5. Finish

    def finish(self) -> None:
        """Everything is placed and computed: let go of what only the prefill needed."""
        self.assembly.finish()
        self.opened.keep()
        self.cache.settle()

    def read_result(self) -> tuple[int, bool]:
        """The first token's id, and whether the KV correction fits the prompt: the one read from the device.

        The id is -1 where the engine computes the logits itself.
        """
        assert self.logits is not None
        with self._watch.stage("first_token"):
            has_logits = self.logits.shape[-1] > 0
            score = self.check.score()
            token = self.logits[0].argmax() if has_logits else torch.full((), -1, device=score.device)
            first_token, fit = self._decoder.agreed(torch.stack((token.double(), score))).tolist()
            return int(first_token), fit >= 0

    @property
    def selection(self) -> Selection:
        """The rows that were computed."""
        counts = []
        for layer in range(self._depth):
            rows_so_far = [rows for start, rows in self._computed_from if start <= layer]
            counts.append(rows_so_far[-1] + self._ahead.rows)
        counts += [1] * (len(self._decoder.layers) - self._depth)  # those that keep no KV
        if self.attempt.instead_of is not None:
            earlier = self.attempt.instead_of.selection.rows_per_layer
            counts = [sum(pair) for pair in zip(counts, earlier, strict=True)]
        rows = torch.cat((self._ahead.positions, self._rows.positions))
        scores = None if self._attention is None else self._attention.sum(0)
        return Selection(rows, tuple(counts), scores)


def _at(kv: KV, index: Tensor) -> KV:
    keys, values = kv
    return keys.index_select(2, index), values.index_select(2, index)
