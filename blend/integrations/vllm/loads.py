"""Blends prompts in a worker of vLLM: its own model recomputes rows over stored chunks, between the engine's passes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from blend.chunks.encode import gives_same_kv
from blend.config import BlendConfig
from blend.errors import BlendError
from blend.integrations.vllm.admission import admitted, fingerprints, rows_refused
from blend.integrations.vllm.contract import (
    DAMAGED,
    LOG,
    PREFILLS_ITSELF,
    LayoutTicket,
    Load,
    OutageLog,
    Site,
)
from blend.integrations.vllm.decoder import PagedCache, PagedDecoder, PromptBlocks
from blend.integrations.vllm.learning import BackgroundEncoder, learn_budget
from blend.integrations.vllm.prompts import BOOK, CORPUS_OPTIONS, corpus_config
from blend.integrations.vllm.row_model import RowModel
from blend.integrations.vllm.workers import ColdError, LoadFailedError
from blend.model.cache import Run
from blend.model.passes import Resume, RowRequest, Steps
from blend.prefill.blender import Blend, Blender
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED, NothingStoredError
from blend.rag import Rag
from blend.serve.prompts.learned import LearnedCaches
from blend.store.base import ChunkStore
from blend.types import CacheKey, PromptLayout, Stopwatch

# Options that are entries of `BlendConfig`.
_CONFIG = ("ratio", "quality", "flips", "selector", "surrogate", "correction")
OPTIONS = frozenset({"stage", "store", "learn", "learn_budget", *_CONFIG}) | CORPUS_OPTIONS
"""Options of the connector."""
_DTYPES = ("float32", "bfloat16", "float16")  # in which a store may have been precomputed
_PATIENCE_S = 2.0  # for which shorter prompts may overtake one


Result = TypeVar("Result")
Passes = Generator[None, None, Result]
"""Runs rows; stops behind each pass."""


@dataclass
class FinishedLoads:
    """Loads that ended since the last call.

    failed: their blocks, by request. cold: those of the failed for which the store held nothing. figures: of those that
    succeeded.
    """

    failed: dict[str, set[int]] = field(default_factory=dict)
    cold: set[str] = field(default_factory=set)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    @property
    def requests(self) -> set[str]:
        """Their requests."""
        return {*self.failed, *self.figures, *self.cancelled}


@dataclass
class _Running:
    """The load that is being done. passes: does it, and stops behind each pass."""

    load: Load
    passes: Passes[None]
    figures: dict[str, Any]


class LoadQueue:
    """Does the loads of a worker, one pass of rows in each step of the engine, one prompt after another.

    The shortest prompt comes first, unless another one has waited for `_PATIENCE_S`. So first tokens come one after another,
    and answers that run wait no longer than for a step of chunked prefill. The engine's thread calls it, alike in all workers
    of a model.
    """

    def __init__(self, blender: RowBlender, block_size: int) -> None:
        self._blender = blender
        self._block_size = block_size
        self._waiting: dict[str, tuple[float, Load]] = {}
        self._running: _Running | None = None
        self._done = FinishedLoads()
        self._outage = OutageLog("kvblend: blended KV is loaded again")

    def add(self, load: Load, arrived: float) -> None:
        """Do it in one of the next steps. arrived: the scheduler's clock, in seconds."""
        self._waiting[load.request] = (arrived, load)

    def cancel(self, requests: Collection[str]) -> None:
        """These requests have ended: vLLM waits only for their blocks."""
        for request in requests:
            if self._waiting.pop(request, None):
                self._done.cancelled.add(request)
        running = self._running
        if running is not None and running.load.request in requests:
            running.passes.close()
            self._done.cancelled.add(running.load.request)
            self._running = None

    def step(self, now: float, *, alone: bool) -> None:
        """Run a pass of a prompt, or, without one, some of what prompts missed in the store.

        now: by the scheduler's clock. alone: no request computes anything in this step of the engine.
        """
        if self._running is None and self._waiting:
            self._running = self._begun(self._next(now))
        with torch.inference_mode():
            if self._running is not None:
                self._advance(self._running)
                return
            try:
                self._blender.background.run(alone=alone)
            except Exception:  # no request waits for it
                LOG.warning("kvblend: deferred work failed", exc_info=True)

    @property
    def unfinished(self) -> bool:
        """Whether something is left that no request waits for."""
        return len(self._blender.background) > 0

    def done(self) -> FinishedLoads:
        """What has ended since the last call."""
        finished = self._done
        self._done = FinishedLoads()
        return finished

    def close(self) -> None:
        """Drop what is not computed by now."""
        self._blender.background.close()

    def _next(self, now: float) -> Load:
        """The load that is due; it waits no more."""
        arrived, oldest = min(self._waiting.values(), key=lambda waiting: waiting[0])
        shortest = min((load for _, load in self._waiting.values()), key=lambda load: load.stop - load.start)
        due = oldest if now - arrived > _PATIENCE_S else shortest
        del self._waiting[due.request]
        return due

    def _begun(self, load: Load) -> _Running:
        figures: dict[str, Any] = {}
        return _Running(load, self._blender.passes(load, figures), figures)

    def _advance(self, running: _Running) -> None:
        load = running.load
        try:
            next(running.passes)
            return
        except StopIteration:
            self._outage.works()
            self._done.figures[load.request] = running.figures
        except Exception as error:  # whatever it is, vLLM can compute these rows itself
            if isinstance(error, ColdError):
                self._done.cold.add(load.request)
            else:
                self._outage.failed(PREFILLS_ITSELF, error, exc_info=not isinstance(error, LoadFailedError))
            first = load.start // self._block_size
            last = (load.stop - 1) // self._block_size
            self._done.failed[load.request] = set(load.blocks[first : last + 1])
        self._running = None


def rows_figures(rows: int, reused: int, computed: int) -> dict[str, Any]:
    """Rows of a prompt, those that vLLM's prefix cache had, and those that were computed."""
    return {"rows": rows, "rows_reused": reused, "rows_computed": computed}


def _figures(blend: Blend, start: int) -> dict[str, Any]:
    """In the words of `blend serve`. start: the first row that vLLM's prefix cache did not have."""
    computed = int((blend.selection.rows >= start).sum())
    figures = rows_figures(blend.layout.rows, start, computed)
    if damaged := len(blend.problems) + len(blend.artifact_problems):
        figures[DAMAGED] = damaged
    if blend.notes:
        figures["notes"] = list(blend.notes)
    if blend.quality:
        figures["quality"] = blend.quality.document
    if blend.uncorrected:
        figures["uncorrected"] = True
    return figures


class RowBlender:
    """Writes prompts' blended KV into blocks of vLLM's cache. store, config: as of `Blender`.

    learned: which caches of clients' texts are stored; without it none. background: computes what prompts missed.
    """

    def __init__(
        self,
        decoder: PagedDecoder,
        store: ChunkStore,
        config: BlendConfig,
        learned: LearnedCaches | None = None,
    ) -> None:
        self.decoder = decoder
        self.store = store
        self.config = config
        self._fillers: dict[str, Blender] = {}
        self.background = BackgroundEncoder(decoder, learned)

    def filler(self, corpus: str = "") -> Blender:
        """With the surrogate context and the KV corrections of this corpus."""
        if corpus not in self._fillers:
            self._fillers[corpus] = Blender(
                self.decoder, self.store, self.config, corpus=corpus, uncorrected_ratio=LEAST_RATIO_UNCORRECTED
            )
        return self._fillers[corpus]

    def passes(self, load: Load, figures: dict[str, Any]) -> Passes[None]:
        """Write the KV of the rows of `load` in every layer, pass by pass.

        Every forward pass that begins after the end sees the KV. Other requests' blocks are never written. After a preemption
        it is called again for the request, with other blocks and another start.

        figures: gets figures for the reply and for vLLM's metrics. Raises `LoadFailedError`; what was written by then is not
        used.
        """
        try:
            ticket = LayoutTicket.read(load.ticket, load.token_ids)
            layout = ticket.layout
            place = PromptBlocks(load.blocks, load.start, load.stop)
            if load.start < layout.context.stop:
                blend = yield from self.blending(layout, place, ticket.corpus, ticket.quality, ticket.user)
                figures |= _figures(blend, load.start)
            else:  # vLLM's cache has all rows that could be reused
                yield from self._computed(layout, place)
                figures |= rows_figures(layout.rows, load.start, layout.rows - load.start)
        except (BlendError, ValueError) as error:
            raise LoadFailedError(str(error)) from error

    def blending(
        self,
        layout: PromptLayout,
        place: PromptBlocks,
        corpus: str = "",
        quality: float | None = None,
        user: str = "",
    ) -> Passes[Blend]:
        """The passes of a blend. Its logits are empty: vLLM runs the last row.

        Args:
            layout: the prompt.
            place: blocks with room for the whole prompt.
            corpus: whose surrogate context and KV corrections are used.
            quality: in place of the configuration's.
            user: for whom new text is learned.

        Raises:
            ColdError: nothing of the prompt is stored.
            BlendError: as `Blender.steps`.
        """
        filler = self.filler(corpus)
        config = self.config if quality is None else replace(self.config, quality=quality)
        watch = Stopwatch(self.decoder.device)
        new_cache = partial(self.decoder.cache_in, place)
        steps = filler.steps(layout, config=config, room=0, watch=watch, new_cache=new_cache, needs_hit=True)
        try:
            blend = yield from self._passes_of(steps)
        except NothingStoredError as error:
            self._remember(filler, layout, error.missing, user)
            raise ColdError(str(error)) from None
        assert isinstance(blend.cache, PagedCache)
        self.decoder.settle(blend.cache)
        for line in (*blend.problems, *blend.artifact_problems):
            LOG.warning("kvblend: %s", line)
        self._remember(filler, layout, blend.missing, user)
        return blend

    def _remember(self, filler: Blender, layout: PromptLayout, missing: Sequence[CacheKey], user: str) -> None:
        """Have missing caches computed later; not with several workers, which would have to compute them in step."""
        if self.decoder.workers == 1:
            self.background.remember(filler, layout, missing, user)

    def _passes_of(self, steps: Steps[Blend]) -> Passes[Blend]:
        """Drive the steps of a prefill, and stop behind each pass."""
        nothing = torch.empty((1, 0), device=self.decoder.device)
        try:
            request = next(steps)
            while True:
                if not isinstance(request, RowRequest):
                    if request is Resume.NEXT_TURN:
                        yield
                    request = next(steps)
                    continue
                # The logits of the question's pass show how many rows the quality needs.
                if request.observe is not None:
                    logits = self.decoder.logits(request)
                    yield
                else:
                    logits = nothing
                    for _ in self.decoder.passes(request):
                        yield
                request = steps.send(logits)
        except StopIteration as end:
            blend: Blend = end.value
            return blend
        finally:
            steps.close()

    def _computed(self, layout: PromptLayout, place: PromptBlocks) -> Passes[None]:
        """Compute the rows of `place`, with nothing from the store, over the rows that the blocks hold before them."""
        rows = Run.consecutive(place.start, place.stop, self.decoder.device)
        if rows.rows:
            ids = torch.tensor([layout.token_ids], device=self.decoder.device)[:, place.start : place.stop]
            yield from self.decoder.passes(RowRequest(ids, rows, self.decoder.cache_in(place, layout.rows)))


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ValueError`, in one line, for options of the connector that do not exist, and without a store."""
    if options.get("stage", "rows") != "rows":
        raise ValueError(f"kvblend: there is no stage {options['stage']!r}; leave it out")
    if unknown := sorted(set(options) - OPTIONS):
        raise ValueError(f"kvblend: there is no option {unknown[0]!r}; there are {', '.join(sorted(OPTIONS))}")
    if "store" not in options:
        raise ValueError("kvblend: the connector needs the option store, as of blend precompute")


def row_model(site: Site) -> RowModel:
    """A worker's model. Raises `ValueError`, in one line, for one that cannot be driven over rows."""
    if why := rows_refused(site):
        raise _refusal(f"because {why}")
    try:
        return RowModel(site)
    except ValueError as error:
        raise _refusal(error) from error


def row_blender(model: RowModel, options: Mapping[str, Any]) -> RowBlender:
    """A blender with a worker's model.

    options: see docs/vllm.md. Raises `ValueError`, in one line, for wrong options and for a model whose rows cannot be moved.
    """
    check_options(options)
    budget = learn_budget(options)
    try:
        shared_name, vllm_name = fingerprints(model.site.config)
        admitted_decoder = admitted(model, vllm_name)
    except (BlendError, ValueError) as error:
        raise _refusal(error) from error
    try:
        config = BlendConfig(**{name: options[name] for name in _CONFIG if name in options})
        rag = Rag(str(options["store"]), blend=config, corpus=corpus_config(options))
        store = rag.store
        learned = LearnedCaches(rag.root / BOOK, budget) if budget else None
    except BlendError as error:
        raise ValueError(f"kvblend: {error}") from error
    # Its own dtype first: caches in another one serve where a probe shows that they are alike.
    for dtype in dict.fromkeys((admitted_decoder.kept_as, *_DTYPES)):
        decoder = admitted_decoder.named(shared_name, dtype)
        if gives_same_kv(store, decoder):
            return RowBlender(decoder, store, config, learned)
    return RowBlender(admitted_decoder, store, config, learned)


def _refusal(error: object) -> ValueError:
    return ValueError(f"kvblend: vLLM's own model cannot recompute rows, {error}; serve it without the connector")
