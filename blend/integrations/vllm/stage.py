"""The two stages that fill requests' blocks in a worker, and the runner that has one of them do a worker's loads.

`CopyStage` copies KV that the prefill process computed. `RowStage` has vLLM's own model recompute rows over stored chunks.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
    LoadFailedError,
    OutageLog,
    Site,
    slots_of,
)
from blend.integrations.vllm.decoder import PagedCache, PagedDecoder, PromptBlocks
from blend.integrations.vllm.learning import BackgroundEncoder, learn_budget
from blend.integrations.vllm.prompts import BOOK, CORPUS_OPTIONS, corpus_config
from blend.integrations.vllm.row_model import RowModel
from blend.integrations.vllm.transport import SOCKET, HeldKV, KVPair, TransportError, digest, request
from blend.model.passes import RowRequest, run_steps
from blend.prefill.blender import Blend, Blender
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED
from blend.rag import Rag
from blend.serve.engine.background import IOPool
from blend.serve.prompts.learned import LearnedCaches
from blend.store.base import ChunkStore
from blend.types import PromptLayout, Stopwatch

_ANSWERS_S = 10.0  # for the prefill process to send a descriptor: the KV is ready
# Options that are entries of `BlendConfig`.
_CONFIG = ("ratio", "quality", "flips", "selector", "surrogate", "correction")
_DTYPES = ("float32", "bfloat16", "float16")  # in which a store may have been precomputed


@dataclass
class FinishedLoads:
    """Loads that ended since the last call. failed: their blocks, by request. figures: of the others."""

    failed: dict[str, set[int]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


class LoadRunner:
    """Has `stage` do loads. Called by the engine's thread. apart: whether loads run in a thread, during the batch."""

    def __init__(self, stage: Stage, block_size: int, *, apart: bool) -> None:
        self._stage = stage
        self._block_size = block_size
        self._lock = threading.Lock()
        self._done = FinishedLoads()
        self._outage = OutageLog("kvblend: blended KV is loaded again")
        self._thread = IOPool("kvblend-loads", 1, lambda: None) if apart else None

    def start(self, load: Load) -> None:
        """Do it now, or in the thread."""
        if self._thread is not None:
            self._thread.start(partial(self._do, load))
        else:
            self._do(load)

    def rest(self, *, alone: bool) -> None:
        """A step without loads begins. alone: without requests too."""
        if self._thread is None:
            try:
                with torch.inference_mode():
                    self._stage.rest(alone=alone)
            except Exception:  # no request waits for it
                LOG.warning("kvblend: deferred work failed", exc_info=True)

    @property
    def unfinished(self) -> bool:
        """Whether `rest` has more to do."""
        return self._thread is None and self._stage.unfinished

    def done(self) -> FinishedLoads:
        """What has ended since the last call."""
        with self._lock:
            finished = self._done
            self._done = FinishedLoads()
        return finished

    def close(self) -> None:
        """Finish, and end the thread."""
        if self._thread is not None:
            self._thread.close()
        self._stage.close()

    def _do(self, load: Load) -> None:
        try:
            with torch.inference_mode():
                figures = self._stage.fill(load) or {}
        except Exception as error:  # whatever it is, vLLM can compute these rows itself
            self._outage.failed(PREFILLS_ITSELF, error, exc_info=not isinstance(error, LoadFailedError))
            first = load.start // self._block_size
            last = (load.stop - 1) // self._block_size
            with self._lock:
                self._done.failed[load.request] = set(load.blocks[first : last + 1])
            return
        self._outage.works()
        with self._lock:
            self._done.figures[load.request] = figures


class Stage(ABC):
    """Fills requests' blocks in one worker process.

    apart: whether `fill` may run in a thread during forward passes; otherwise it runs between them, in the engine's thread.
    options: names of the connector's options that the stage takes. Making one raises `ValueError`, in one line, for a
    model that it cannot work with and for wrong options.
    """

    apart = False
    options = frozenset[str]()

    def __init__(self, site: Site, options: Mapping[str, Any]) -> None:
        self.site = site

    @abstractmethod
    def fill(self, load: Load) -> dict[str, Any] | None:
        """Write the KV of the rows of `load` in every layer. Returns figures for the reply and for vLLM's metrics.

        Every forward pass that begins after the return sees the KV. Other requests' blocks are never written. After a
        preemption it is called again for the request, with other blocks and another start. Raises `LoadFailedError`; what was
        written by then is not used.
        """

    def rest(self, *, alone: bool) -> None:  # noqa: B027 - a stage may have nothing to defer
        """Do deferred work in an engine step without loads; not called where `apart`.

        alone: no request computes anything in this step; otherwise running answers wait for this call.
        """

    @property
    def unfinished(self) -> bool:
        """Whether `rest` has more to do: the engine then keeps stepping after all requests have ended."""
        return False

    def close(self) -> None:  # noqa: B027 - a stage may hold nothing
        """The worker process ends."""


class CopyStage(Stage):
    """Copies KV from the prefill process's shared memory. Tensor-parallel workers each take their own heads.

    Raises `ValueError` for an attention backend whose cache has no writer.
    """

    apart = True
    options = frozenset({"socket"})

    def __init__(self, site: Site, options: Mapping[str, Any]) -> None:
        if not all(callable(getattr(layer.impl, "do_kv_cache_update", None)) for layer in site.layers):
            kind = type(site.layers[0].impl).__name__
            raise ValueError(f"kvblend: the attention backend {kind} has no do_kv_cache_update; choose another backend")
        super().__init__(site, options)
        self._socket = str(options.get("socket", SOCKET))
        parallel = site.config.parallel_config
        self._workers = parallel.tensor_parallel_size
        self.rank = parallel.rank % self._workers

    def fill(self, load: Load) -> None:
        """See `Stage`."""
        site = self.site
        device = site.device
        dtype = site.config.model_config.dtype
        slots = slots_of(torch.arange(load.start, load.stop, device=device), load.blocks, site.block_size)
        try:
            for index, pair in zip(site.kept, self._attach(load), strict=True):
                keys, values = (part.to(device, dtype).contiguous() for part in pair)
                site.write(index, keys, values, slots)
        except TransportError as error:
            raise LoadFailedError(str(error)) from None
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()

    def _attach(self, load: Load) -> Iterator[KVPair]:
        """The KV of the rows of `load` and this worker's heads, layer by layer."""
        answer, fd = request(self._socket, {"attach": load.ticket}, _ANSWERS_S)
        if fd is None:
            raise LoadFailedError("the prefill process holds nothing under this ticket any more")
        try:
            kv = HeldKV.of(answer["held"])
            self._check(kv, load)
            memory = mmap.mmap(fd, kv.nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        return kv.part(memory, load.start, load.stop, self.rank, self._workers)

    def _check(self, held: HeldKV, load: Load) -> None:
        """Refuse KV of another prompt or of another shape."""
        layers = [self.site.layers[index] for index in self.site.kept]
        if held.prompt != digest(load.token_ids) or held.rows < load.stop:
            raise LoadFailedError("what the prefill process holds is of another prompt")
        if len(held.layers) != len(layers):
            raise LoadFailedError(f"it has {len(held.layers)} layers, vLLM's model {len(layers)}")
        for layer, (heads, *widths) in zip(layers, held.layers, strict=True):
            worker_heads = max(1, heads // self._workers)
            if worker_heads != layer.num_kv_heads or any(width != layer.head_size for width in widths):
                raise LoadFailedError(
                    f"its layers have {heads} KV heads of {widths}, vLLM's {layer.num_kv_heads} of {layer.head_size}: "
                    "both must hold the same model"
                )


class RowStage(Stage):
    """vLLM's own model recomputes rows over stored chunks, between the engine's passes, in its thread.

    Weights are held once, and quantised models work as they are. options: "store", as of `Rag`; "ratio", "quality", "flips",
    "selector", "surrogate", "correction" as in `BlendConfig`; "codec" as in `CorpusConfig`; "learn" and "learn_budget", in GB,
    as of `blend vllm`; "chunk_tokens", "embedder" and "top_k" are the middleware's. Raises `ValueError`, in one line, for a
    model that cannot be driven over rows.
    """

    apart = False
    options = frozenset({"store", "learn", "learn_budget", *_CONFIG}) | CORPUS_OPTIONS

    def __init__(self, site: Site, options: Mapping[str, Any]) -> None:
        super().__init__(site, options)
        if why := rows_refused(site):
            raise _refusal(f"because {why}")
        try:
            model = RowModel(site)
        except ValueError as error:
            raise _refusal(error) from error
        self.blender = row_blender(model, options)

    def fill(self, load: Load) -> dict[str, Any]:
        """See `Stage`."""
        try:
            ticket = LayoutTicket.read(load.ticket, load.token_ids)
            layout = ticket.layout
            place = PromptBlocks(load.blocks, load.start, load.stop)
            if load.start < layout.context.stop:
                return _figures(layout, self.blender.blend(layout, place, ticket.corpus, ticket.quality, ticket.user))
            self.blender.compute(layout, place)  # vLLM's cache has all rows that could be reused
            return {"rows": layout.rows, "rows_computed": load.stop - load.start}
        except (BlendError, ValueError) as error:
            raise LoadFailedError(str(error)) from error

    def rest(self, *, alone: bool) -> None:
        """Compute some of what earlier prompts missed in the store."""
        self.blender.background.run(alone=alone)

    @property
    def unfinished(self) -> bool:
        """Whether there is more of that."""
        return len(self.blender.background) > 0

    def close(self) -> None:
        """Drop what is not computed by now."""
        self.blender.background.close()


STAGES: dict[str, type[Stage]] = {"copied": CopyStage, "rows": RowStage}


def stage_of(options: Mapping[str, Any]) -> type[Stage]:
    """The stage that the connector's options name. Raises `ValueError` for unknown options and values."""
    stage = options.get("stage", "copied")
    load = options.get("load")
    if stage not in STAGES:
        raise ValueError(f"kvblend: there is no stage {stage!r}; choose {' or '.join(STAGES)}")
    if load not in (None, "async", "sync"):
        raise ValueError(f"kvblend: load is {load!r}; choose async or sync")
    names = {"stage", "load"} | STAGES[stage].options
    if unknown := sorted(set(options) - names):
        raise ValueError(f"kvblend: stage {stage} has no option {unknown[0]!r}; there are {', '.join(sorted(names))}")
    return STAGES[stage]


def _figures(layout: PromptLayout, filled: Blend) -> dict[str, Any]:
    """In the words of `blend serve`."""
    figures: dict[str, Any] = {"rows": layout.rows, "rows_computed": len(filled.selection.rows)}
    if damaged := len(filled.problems) + len(filled.artifact_problems):
        figures[DAMAGED] = damaged
    if not any(filled.hits):
        return {"method": "full", "reason": "cold", **figures}
    if filled.notes:
        figures["notes"] = list(filled.notes)
    if filled.quality:
        figures["quality"] = filled.quality.document
    if filled.uncorrected:
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

    def blend(
        self,
        layout: PromptLayout,
        place: PromptBlocks,
        corpus: str = "",
        quality: float | None = None,
        user: str = "",
    ) -> Blend:
        """Write blended KV to the rows of `place`. Raises as `Blender.steps`.

        Args:
            layout: the prompt.
            place: blocks with room for the whole prompt.
            corpus: whose surrogate context and KV corrections are used.
            quality: in place of the configuration's.
            user: for whom new text is learned.

        Returns:
            The blend. Its logits are empty: vLLM runs the last row.
        """
        nothing = torch.empty((1, 0), device=self.decoder.device)
        config = self.config if quality is None else replace(self.config, quality=quality)

        def run(rows: RowRequest) -> torch.Tensor:
            if rows.observe is not None:  # the question's pass, whose logits show how many rows the quality needs
                return self.decoder.logits(rows)
            self.decoder.run_rows(rows)
            return nothing

        filler = self.filler(corpus)
        watch = Stopwatch(self.decoder.device)
        new_cache = partial(self.decoder.cache_in, place)
        filled = run_steps(filler.steps(layout, config=config, room=0, watch=watch, new_cache=new_cache), run)
        assert isinstance(filled.cache, PagedCache)
        self.decoder.settle(filled.cache)
        for line in (*filled.problems, *filled.artifact_problems):
            LOG.warning("kvblend: %s", line)
        self.background.remember(filler, layout, filled.missing, user)
        return filled

    def compute(self, layout: PromptLayout, place: PromptBlocks) -> None:
        """Compute the rows of `place`, with nothing from the store, over the rows that the blocks hold before them."""
        rows = torch.arange(place.start, place.stop, device=self.decoder.device)
        if rows.shape[0]:
            ids = torch.tensor([layout.token_ids], device=self.decoder.device)[:, rows]
            self.decoder.run_rows(RowRequest(ids, rows, self.decoder.cache_in(place, layout.rows)))


def row_blender(model: RowModel, options: Mapping[str, Any]) -> RowBlender:
    """A blender with this worker's model; options and errors as of `RowStage`."""
    if "store" not in options:
        raise ValueError("kvblend: stage rows needs the option store, as of blend precompute")
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
    return ValueError(f"kvblend: vLLM's own model cannot recompute rows, {error}; use stage copied")
