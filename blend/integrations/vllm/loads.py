"""Blends prompts in a worker of vLLM: its own model recomputes rows over stored chunks, between the engine's passes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blend.chunks.probe import gives_same_kv
from blend.config import BlendConfig
from blend.errors import BlendError, EntryDamagedError, StoreError, first_line
from blend.integrations.vllm.admission import admitted
from blend.integrations.vllm.contract import BOOK, LOG, PREFILLS_ITSELF, LayoutTicket, Options, OutageLog
from blend.integrations.vllm.decoder import PagedCache, PagedDecoder, Passes, Pause
from blend.integrations.vllm.scheduler import Load, Outcome, StepNews
from blend.integrations.vllm.shared import LoadText, SharedLoads
from blend.layout import PlaceOrigin, Tokens
from blend.model.passes import Resume, RowRequest, Steps
from blend.model.precision import DTYPES
from blend.prefill.blender import Blend, Blender
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED, NothingStoredError
from blend.rag import Rag
from blend.serve.engine.background import EncodingQueue, IOPool
from blend.serve.flights import Flight
from blend.serve.prompts.learned import LearnedCaches
from blend.serve.request import RequestOrigin
from blend.stopwatch import Stopwatch
from blend.store.base import ChunkStore
from blend.types import CacheKey

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary

CPU_ROWS, GPU_ROWS = 32, 256
"""Rows of a chunk that are computed at a time, meant to take about as long as a step that decodes a few answers.

Measured on a CPU.
"""
_WAIT_S = 0.01  # for the store while nothing runs, so that the engine does not spin
_PATIENCE_S = 2.0  # for which shorter prompts may overtake one


class BlendedLoad(NamedTuple):
    """A prompt whose KV is in the blocks. text: what of it other prompts share."""

    blend: Blend[PagedDecoder]
    text: LoadText


class PendingLoad(NamedTuple):
    """A load that has not ended. flight: compares it with others."""

    load: Load
    flight: Flight
    passes: Passes[BlendedLoad]

    def end(self) -> None:
        """Free what it holds; others wait for it no longer."""
        self.passes.close()
        self.flight.end()


class LoadQueue:
    """Does the loads of a worker, one pass of rows in each step of the engine, one prompt after another.

    The shortest prompt comes first, unless another one has waited for `_PATIENCE_S`. So first tokens come one after another,
    and answers that run wait no longer than for a step of chunked prefill. While a load waits for the store, which takes the
    caches of text that others bring, too, another one runs that does not wait for that text. The engine's thread calls it,
    alike in all workers of a model.

    Attributes:
        outcomes: of the loads that ended in the last step, by request.
        failed_blocks: of those that failed.

    """

    def __init__(self, blender: RowBlender) -> None:
        self.blender = blender
        self.outcomes: dict[str, Outcome] = {}
        self.failed_blocks: set[int] = set()
        self._loads: dict[str, PendingLoad] = {}
        self._running = ""
        self._outage = OutageLog("kvblend: blended KV is loaded again")

    @torch.inference_mode()
    def step(self, step: StepNews) -> None:
        """Run a pass of a prompt, or, without one, some of what prompts missed in the store.

        No pass runs in a step in which a prompt gets its first token (`step.rests`): the token would come behind the pass.
        """
        self.outcomes = {}
        self.failed_blocks = set()
        for load in step.loads:
            flight = self.blender.shared.begin(load)
            self._loads[load.request] = PendingLoad(load, flight, self.blender.blending(load, flight))
        for request in step.cancelled:  # vLLM waits only for its blocks
            if request in self._loads:
                self._loads.pop(request).end()
                self.outcomes[request] = Outcome()
        if step.rests:
            return
        if self._loads:
            self._run_one(step)
        elif step.unfinished:
            try:
                self.blender.background.run(step.turn)
            except Exception:  # no request waits for it
                LOG.warning("kvblend: deferred work failed", exc_info=True)

    def _run_one(self, step: StepNews) -> None:
        """Run a pass of the load that runs, or of the first one behind it that does not wait for the same text."""
        if self._running not in self._loads:
            self._running = min(self._loads, key=lambda request: _turn(self._loads[request].load, step.now))
        running = self._loads[self._running]
        if self._advance(running):
            return
        owners = [running]
        for pending in sorted(self._loads.values(), key=lambda pending: _turn(pending.load, step.now)):
            if pending is running or self.blender.waits_for(pending, owners):
                continue
            if self._advance(pending):
                return
            owners.append(pending)
        if step.turn == 1:  # nothing runs
            self.blender.shared.news.wait(_WAIT_S)

    def _advance(self, pending: PendingLoad) -> bool:
        """Run a pass of a load, or end it; False if it waits for the store."""
        load = pending.load
        try:
            return next(pending.passes) is Pause.PASS
        except StopIteration as end:
            self._outage.works()
            outcome = _outcome(end.value, load.start)
        except NothingStoredError:
            outcome = self._left(load, "cold")
        except Exception as error:  # whatever it is, vLLM can compute these rows itself
            self._outage.failed(PREFILLS_ITSELF, error, exc_info=not isinstance(error, BlendError | ValueError))
            outcome = self._left(load, "failed")
        self._loads.pop(load.request).end()
        self.outcomes[load.request] = outcome
        return True

    def _left(self, load: Load, reason: str) -> Outcome:
        """VLLM prefills."""
        self.failed_blocks.update(load.blocks[load.start // self.blender.decoder.model.block_size :])
        return Outcome({"method": "full", "reason": reason}, {f"fallbacks_{reason}": 1})


def _turn(load: Load, now: float) -> tuple[float, int]:
    """Those that have waited too long come first, then the shortest."""
    overdue = now - load.arrived > _PATIENCE_S
    return (load.arrived, 0) if overdue else (now, load.ticket.layout.rows - load.start)


def _outcome(loaded: BlendedLoad, start: int) -> Outcome:
    """Figures in the words of `blend serve`. start: the first row that vLLM's prefix cache did not have."""
    blend, text = loaded
    rows_shared = text.rows_shared(blend)
    rows = blend.layout.rows
    computed = int((blend.selection.rows >= start).sum())
    figures: dict[str, Any] = {"rows": rows, "rows_reused": start, "rows_computed": computed}
    if rows_shared or text.rows_ahead:
        figures |= {"rows_shared": rows_shared, "rows_ahead": text.rows_ahead}
    if blend.notes:
        figures["notes"] = list(blend.notes)
    if blend.quality:
        figures["quality"] = blend.quality.document
    if blend.uncorrected:
        figures["uncorrected"] = True
    counts = {
        "prompts_blended": 1,
        "prompts_uncorrected": int(blend.uncorrected),
        "damaged_entries": len(blend.problems) + len(blend.artifact_problems),
        "rows_prompt": rows,
        "rows_recomputed": computed,
        "rows_shared": rows_shared,
        "rows_ahead": text.rows_ahead,
    }
    return Outcome(figures, counts)


class RowBlender:
    """Writes prompts' blended KV into blocks of vLLM's cache. store, config: as of `Blender`.

    learned: which caches of clients' texts are stored; without it none. background: computes what prompts missed.
    """

    def __init__(
        self, decoder: PagedDecoder, store: ChunkStore, config: BlendConfig, learned: LearnedCaches | None = None
    ) -> None:
        self.decoder = decoder
        self.store = store
        self.config = config
        self._blenders: dict[tuple[str, bool], Blender[PagedDecoder]] = {}
        self.background = BackgroundEncoder(decoder, learned)
        self.shared = SharedLoads(decoder, learned)

    def close(self) -> None:
        """End the threads."""
        self.background.close()
        self.shared.close()

    def waits_for(self, pending: PendingLoad, owners: Sequence[PendingLoad]) -> bool:
        """Whether a load waits for text that one of these computes, as the first worker sees it."""
        waits = any(pending.flight.waits_for(owner.flight) for owner in owners)
        return bool(self.decoder.model.workers.from_first(waits))

    def blender(self, corpus: str = "", *, learns: bool = False) -> Blender[PagedDecoder]:
        """With the surrogate context and the KV corrections of this corpus.

        learns: another one, for the background of the first worker. So what the others know of prefixes is the same in all.
        """
        name = (corpus, learns)
        if name not in self._blenders:
            self._blenders[name] = Blender(
                self.decoder, self.store, self.config, corpus=corpus, uncorrected_ratio=LEAST_RATIO_UNCORRECTED
            )
        return self._blenders[name]

    def blending(self, load: Load, flight: Flight) -> Passes[BlendedLoad]:
        """Write the KV of a prompt's rows in every layer, pass by pass. The logits are empty: vLLM runs the last row.

        Every forward pass that begins after the end sees the KV. Other requests' blocks are never written. After a preemption
        it is called again for the prompt, with other blocks and another start. What was written before an error is not used.
        Text that others bring, too, is computed before, apart from the prompt.

        Raises:
            NothingStoredError: nothing of the prompt is stored.
            BlendError: as `Blender.steps`.

        """
        ticket = load.ticket
        config = self.config if ticket.quality is None else replace(self.config, quality=ticket.quality)
        learning = self.blender(ticket.corpus, learns=True)
        text = yield from self.shared.passes(load, flight, learning, config)
        flight.end()  # it computes nothing for others any more
        ticket = ticket._replace(layout=text.layout)
        steps = self.blender(ticket.corpus).steps(
            ticket.layout,
            config=config,
            room=0,
            watch=Stopwatch(self.decoder.device),
            new_cache=partial(PagedCache, len(self.decoder.layers), blocks=load.blocks, start=load.start),
            needs_hit=True,
        )
        try:
            blend = yield from self._passes_of(steps)
        except NothingStoredError as error:
            self.background.remember(learning, ticket, error.missing)
            raise
        self.decoder.settle(blend.cache)
        for line in (*blend.problems, *blend.artifact_problems):
            LOG.warning("kvblend: %s", line)
        self.background.remember(learning, ticket, blend.missing)
        return BlendedLoad(blend, text)

    def _passes_of(self, steps: Steps[Blend[PagedDecoder]]) -> Passes[Blend[PagedDecoder]]:
        """Drive the steps of a prefill, and stop behind each pass."""
        try:
            request = next(steps)
            while True:
                if not isinstance(request, RowRequest):
                    if request is Resume.NEXT_TURN:
                        yield Pause.PASS
                    request = next(steps)
                    continue
                try:
                    logits = yield from self.decoder.passes(request)
                except EntryDamagedError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(logits)
        except StopIteration as end:
            blend: Blend[PagedDecoder] = end.value
            return blend
        finally:
            steps.close()


class BackgroundEncoder:
    """Computes and stores caches that prompts missed. The engine's thread calls it.

    Of several workers the first one decides and stores; all compute the same rows.
    learned: decides which caches of clients' texts are stored; None stores none.
    """

    def __init__(self, decoder: PagedDecoder, learned: LearnedCaches | None) -> None:
        rows = CPU_ROWS if decoder.device.type == "cpu" else GPU_ROWS
        self._decoder = decoder
        self._learned = learned
        self._news = threading.Event()
        self._thread = IOPool("kvblend-rows", 1, self._news.set)
        self._encodings = EncodingQueue(self._thread, rows, self._on_stored)
        self._steps = 0
        self._outage = OutageLog()

    def __len__(self) -> int:
        """How many caches are left, so far known."""
        return len(self._encodings)

    def remember(self, blender: Blender[PagedDecoder], ticket: LayoutTicket, missing: Sequence[CacheKey]) -> None:
        """A prompt was blended, and the store lacked these caches.

        Its user's texts count as used even if nothing is missing.
        """
        if self._decoder.is_first:
            self._encodings.remember(lambda: self._allowed(blender, ticket, missing))

    def run(self, turn: int) -> None:
        """A step of the engine: run a piece, if it is time for one. turn: as of `StepNews`."""
        self._steps += 1
        if self._steps % turn:
            return
        self._news.clear()
        request = None
        try:
            if self._encodings.ready():
                request = self._encodings.next_rows()
        finally:  # the other workers wait for it
            request = self._decoder.from_first(request)
        if request is None:
            if turn == 1:
                self._news.wait(_WAIT_S)
            return
        if not self._decoder.is_first:
            self._decoder.run_rows(request)
            return
        try:
            self._decoder.run_rows(request)
        except Exception as error:  # of this cache; the next one may be computed
            self._encodings.fail(error)
        else:
            self._encodings.took(torch.empty((1, 0)))  # a chunk's logits are not used

    def close(self) -> None:
        """Compute no more, and end."""
        self._encodings.close()
        self._thread.close()

    def _allowed(
        self, blender: Blender[PagedDecoder], ticket: LayoutTicket, missing: Sequence[CacheKey]
    ) -> tuple[ChunkLibrary, Sequence[CacheKey]]:
        """The missing caches that may be stored, and those of new texts. In the store's thread."""
        layout = ticket.layout
        library = blender.library(layout.kept_behind)
        corpus = {place.whole for place in layout.places if place.origin is PlaceOrigin.CORPUS}
        brought = {place.whole for place in layout.places if place.is_brought} - corpus
        learned = set[Tokens]()
        if self._learned is not None and brought:
            try:
                learned = self._learned.admitted(library, sorted(brought), RequestOrigin(ticket.user))
            except StoreError as error:
                self._warn(error)
        allowed = [key for key in missing if key.chunk not in brought or key.chunk in learned]
        return library, list(dict.fromkeys([*allowed, *library.missing(sorted(learned))]))

    def _on_stored(self, key: CacheKey, error: Exception | None) -> None:
        if error is not None:
            self._warn(error)
        else:
            self._outage.works()

    def _warn(self, error: Exception) -> None:
        self._outage.failed("kvblend: a chunk's cache could not be stored: %s", first_line(error))


def row_blender(config: Any, names: Iterable[str]) -> RowBlender:
    """A blender with a worker's model. names: of the layers that have a cache.

    Raises `ConfigError` for a model whose rows cannot be moved, `StoreError` for a store that cannot be opened.
    """
    decoder, shared_name = admitted(config, names)
    options = Options.of(config)
    rag = Rag(options.store, blend=options.blend, corpus=options.corpus)
    learned = LearnedCaches(rag.root / BOOK, options.learn_budget) if options.learn_budget else None
    return RowBlender(sharing(decoder, shared_name, rag.store), rag.store, options.blend, learned)


def sharing(decoder: PagedDecoder, shared_name: str, store: ChunkStore) -> PagedDecoder:
    """The decoder with the shared caches of a dtype in which a probe in the store shows that they are alike, or as it is."""
    for dtype in dict.fromkeys((decoder.kept_as, *DTYPES)):  # its own first
        named = decoder.named(shared_name, dtype)
        if gives_same_kv(store, named, dtype):
            return named
    return decoder
