"""The two stages that fill requests' blocks in a worker, and the runner that has one of them do a worker's loads.

`CopyStage` copies KV that the prefill process computed. `RowStage` has vLLM's own model recompute rows over stored chunks.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from blend.chunks.encode import gives_same_kv
from blend.config import BlendConfig
from blend.errors import BlendError
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
from blend.integrations.vllm.decoder import (
    PagedCache,
    PagedDecoder,
    PromptBlocks,
    PromptRows,
    RowModel,
    RowPass,
    frequencies,
)
from blend.integrations.vllm.learning import BackgroundEncoder, learn_budget
from blend.integrations.vllm.prompts import BOOK, CORPUS_OPTIONS, corpus_config
from blend.integrations.vllm.transport import SOCKET, HeldKV, KVPair, TransportError, digest, request
from blend.model.admission import PROBE_DELTA, find_rotation, probe_ids, tolerance
from blend.model.cache import KV, LayerRotation, Rotation
from blend.model.fingerprint import files_fingerprint
from blend.model.forward import RowRequest
from blend.prefill.blender import Blend, Blender, run_steps
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED
from blend.rag import Rag
from blend.serve.background import IOPool
from blend.serve.learned import LearnedCaches
from blend.store.base import ChunkStore
from blend.types import PromptLayout, Stopwatch

_ANSWERS_S = 10.0  # for the prefill process to send a descriptor: the KV is ready
_CONFIG = (
    "ratio",
    "quality",
    "flips",
    "selector",
    "surrogate",
    "correction",
)  # options that are entries of `BlendConfig`
_DTYPES = ("float32", "bfloat16", "float16")  # in which a store may have been precomputed


@dataclass
class FinishedLoads:
    """Loads that ended since the last call. failed: their blocks, by request. figures: of the others."""

    failed: dict[str, set[int]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


class LoadRunner:
    """Has `stage` do loads. Called by the engine's thread. apart: whether loads run in a thread, during the batch."""

    def __init__(self, stage: Stage, block_size: int, *, apart: bool) -> None:
        self._stage, self._block_size = stage, block_size
        self._lock, self._done = threading.Lock(), FinishedLoads()
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
            found, self._done = self._done, FinishedLoads()
        return found

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
            known = isinstance(error, LoadFailedError)
            self._outage.failed(PREFILLS_ITSELF, error, exc_info=not known)
            first, last = load.start // self._block_size, (load.stop - 1) // self._block_size
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
        self._workers, self.rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size

    def fill(self, load: Load) -> None:
        """See `Stage`."""
        site, device, dtype = self.site, self.site.device, self.site.config.model_config.dtype
        slots = slots_of(torch.arange(load.start, load.stop, device=device), load.blocks, site.block_size)
        try:
            for index, pair in zip(site.kept, self._held(load), strict=True):
                keys, values = (part.to(device, dtype).contiguous() for part in pair)
                site.write(index, keys, values, slots)
        except TransportError as error:
            raise LoadFailedError(str(error)) from None
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()

    def _held(self, load: Load) -> Iterator[KVPair]:
        """The KV of the rows of `load` and this worker's heads, layer by layer."""
        answer, fd = request(self._socket, {"attach": load.ticket}, _ANSWERS_S)
        if fd is None:
            raise LoadFailedError("the prefill process holds nothing under this ticket any more")
        try:
            held = HeldKV.of(answer["held"])
            self._check(held, load)
            memory = mmap.mmap(fd, held.nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        return held.part(memory, load.start, load.stop, self.rank, self._workers)

    def _check(self, held: HeldKV, load: Load) -> None:
        """Refuse KV of another prompt or of another shape."""
        layers = [self.site.layers[index] for index in self.site.kept]
        if held.prompt != digest(load.token_ids) or held.rows < load.stop:
            raise LoadFailedError("what the prefill process holds is of another prompt")
        if len(held.layers) != len(layers):
            raise LoadFailedError(f"it has {len(held.layers)} layers, vLLM's model {len(layers)}")
        for layer, (heads, *widths) in zip(layers, held.layers, strict=True):
            mine = max(1, heads // self._workers)
            if mine != layer.num_kv_heads or any(width != layer.head_size for width in widths):
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
            asked = LayoutTicket.read(load.ticket, load.token_ids)
            layout, place = asked.layout, PromptBlocks(load.blocks, load.start, load.stop)
            if load.start < layout.context.stop:
                return _figures(layout, self.blender.blend(layout, place, asked.corpus, asked.brought, asked.quality))
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
    stage, load = options.get("stage", "copied"), options.get("load")
    if stage not in STAGES:
        raise ValueError(f"kvblend: there is no stage {stage!r}; choose {' or '.join(STAGES)}")
    if load not in (None, "async", "sync"):
        raise ValueError(f"kvblend: load is {load!r}; choose async or sync")
    known = {"stage", "load"} | STAGES[stage].options
    if unknown := sorted(set(options) - known):
        raise ValueError(f"kvblend: stage {stage} has no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return STAGES[stage]


def _figures(layout: PromptLayout, filled: Blend) -> dict[str, Any]:
    """In the words of `blend serve`."""
    rows = {"rows": layout.rows, "rows_computed": int(filled.selection.rows.shape[0])}
    if damaged := len(filled.problems) + len(filled.artifact_problems):
        rows[DAMAGED] = damaged
    if not any(filled.hits):
        return {"method": "full", "reason": "cold", **rows}
    notes = {"notes": list(filled.notes)} if filled.notes else {}
    quality = {"quality": filled.quality.document} if filled.quality else {}
    return {**rows, **notes, **quality, **({"uncorrected": True} if filled.uncorrected else {})}


class RowBlender:
    """Writes prompts' blended KV into blocks of vLLM's cache. store, config: as of `Blender`.

    learned: which caches of clients' texts are stored; without it none. background: computes what prompts missed.
    """

    def __init__(
        self, decoder: PagedDecoder, store: ChunkStore, config: BlendConfig, learned: LearnedCaches | None = None
    ) -> None:
        self.decoder, self.store, self.config = decoder, store, config
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
        brought: Collection[int] = frozenset(),
        quality: float | None = None,
    ) -> Blend:
        """Write blended KV to the rows of `place`, whose blocks have room for the whole prompt. Raises as `Blender.fill`.

        The logits are empty: vLLM runs the last row. brought: places of chunks whose text came with the request. quality: in
        place of the configuration's.
        """
        nothing = torch.empty((1, 0), device=self.decoder.device)
        config = self.config if quality is None else replace(self.config, quality=quality)

        def run(rows: RowRequest) -> torch.Tensor:
            if rows.observe is not None:  # the question's pass, whose logits show how many rows the quality needs
                return self.decoder.logits(rows)
            self.decoder.run_rows(rows)
            return nothing

        filler, watch = self.filler(corpus), Stopwatch(self.decoder.device)
        new_cache = partial(self.decoder.cache_in, place)
        filled = run_steps(filler.steps(layout, config=config, room=0, watch=watch, new_cache=new_cache), run)
        assert isinstance(filled.cache, PagedCache)
        self.decoder.settle(filled.cache)
        for line in (*filled.problems, *filled.artifact_problems):
            LOG.warning("kvblend: %s", line)
        self.background.remember(filler, layout, filled.missing, brought)
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
        shared, mine = fingerprints(model.site.config)
        own = admitted(model, mine)
    except (BlendError, ValueError) as error:
        raise _refusal(error) from error
    try:
        config = BlendConfig(**{name: options[name] for name in _CONFIG if name in options})
        rag = Rag(str(options["store"]), blend=config, corpus=corpus_config(options))
        store, learned = rag.store, LearnedCaches(rag.root / BOOK, budget) if budget else None
    except BlendError as error:
        raise ValueError(f"kvblend: {error}") from error
    # Its own dtype first: caches in another one serve where a probe shows that they are alike.
    dtypes = dict.fromkeys((own.kept_as, *_DTYPES))
    decoder = next((one for one in (own.named(shared, dtype) for dtype in dtypes) if gives_same_kv(store, one)), own)
    return RowBlender(decoder, store, config, learned)


def _refusal(error: object) -> ValueError:
    return ValueError(f"kvblend: vLLM's own model cannot recompute rows, {error}; use stage copied")


def fingerprints(config: Any) -> tuple[str, str]:
    """Names of a model's caches: shared with transformers, and vLLM's own. Raises `ValueError` for weights that are no files.

    vLLM may run the weights quantised or with another rotation. Where it is configured to, nothing is shared. Otherwise the
    shared name is used if the store holds a probe of the model and vLLM gives the same KV (`blend.chunks.encode`).
    """
    model = config.model_config
    files = files_fingerprint(model.model)
    if files is None:
        raise ValueError(
            f"because the weights of {model.model} are not all files of this machine, so its caches have no name"
        )
    dummy = config.load_config.load_format == "dummy" and "dummy weights"
    # Options tell what vLLM quantises as it loads: the name may be "online" for all of them.
    changed = [one for one in (model.quantization, model.quantization_config, model.hf_overrides, dummy) if one]
    own = sha256(f"vllm\n{files}\n{changed!r}".encode()).hexdigest()[:32]
    return own if changed else files, own


def rows_refused(site: Site) -> str:
    """Why rows cannot be run on this worker, beyond `contract.refuse`, as words behind "because"; "" where they can."""
    config, layers, parallel = site.config, site.layers, site.config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return "the model has more than one worker"
    if config.model_config.is_multimodal_model:
        return "it reads more than text"
    from vllm.model_executor.layers.attention import Attention

    if not all(type(one) is Attention for one in layers):
        return "its attention keeps something else than keys and values"
    specs = [layer.get_kv_cache_spec(config) for layer in layers]
    reasons = {
        "layers share caches": any(layer.kv_sharing_target_layer_name is not None for layer in layers),
        "its layers do not cache alike": any(one != specs[0] for one in specs),
        "its attention has sinks": any(layer.has_sink for layer in layers),
        "its attention has position biases": any(getattr(one.impl, "alibi_slopes", None) is not None for one in layers),
        "its blocks are cut by the attention backend": specs[0].block_size != site.block_size,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def admitted(model: RowModel, fingerprint: str) -> PagedDecoder:
    """The worker's model as a decoder, tried out. Raises `ValueError`, in one line, where its keys or rows cannot be moved."""
    config = model.site.config.model_config
    ids = probe_ids(int(config.get_vocab_size())).to(model.site.device)
    here, logits = _whole(model, ids, 0)
    there, _ = _whole(model, ids, PROBE_DELTA)
    # A quantised model may round an activation the other way, which is off by as much as half precision is.
    most = tolerance(torch.bfloat16 if config.quantization else config.dtype)
    kept_as = str(config.dtype).removeprefix("torch.")
    decoder = PagedDecoder(model, fingerprint, kept_as, _rotations(model, here, there, most))
    _check_rows(decoder, ids, logits, most)
    return decoder


def _whole(model: RowModel, ids: torch.Tensor, start: int) -> tuple[list[KV], torch.Tensor]:
    """A prompt as one sequence, as vLLM runs it: KV of its layers at positions `start...`, logits of its last row."""
    rows, found = torch.arange(ids.shape[1], device=ids.device), list[KV]()
    blocks = tuple(range(-(-ids.shape[1] // model.site.block_size)))

    def observe(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        found.append((key.transpose(0, 1)[None].clone(), value.transpose(0, 1)[None].clone()))

    hidden = model.run(RowPass(ids[0], (PromptRows(rows, blocks),), scratch=len(blocks), shift=start), observe)
    assert hidden is not None
    return found, model.logits(hidden[-1:])


def _rotations(model: RowModel, here: list[KV], there: list[KV], most: float) -> tuple[LayerRotation, ...]:
    known = frequencies(model.model)
    found = []
    for index, pairs in enumerate(zip(here, there, strict=True)):
        turns, shapes = list[Rotation](), list[tuple[int, int]]()
        for before, after in zip(*pairs, strict=True):
            turn = find_rotation(before.float(), after.float(), PROBE_DELTA, known, most)
            if turn is None:
                raise ValueError(f"because no known rotation moves the KV of layer {index} to another position")
            turns.append(turn)
            shapes.append((before.shape[1], before.shape[3]))
        found.append(LayerRotation(turns[0], turns[1], shapes[0], shapes[1]))
    return tuple(found)


def _check_rows(decoder: PagedDecoder, ids: torch.Tensor, logits: torch.Tensor, most: float) -> None:
    """Compare scattered rows over exact KV, in scratch memory, with the same tokens as one sequence."""
    total = ids.shape[1]
    rows = torch.tensor([1, 2, total // 2, total - 1], device=ids.device)
    cache = decoder.new_cache(total)
    decoder.encode_rows(ids, 0, cache)
    found = decoder.logits(RowRequest(ids[:, rows], rows, cache))
    difference = ((found - logits).abs().amax() / logits.abs().amax().clamp_min(1e-6)).item()
    if not difference <= most:
        raise ValueError(f"because rows run apart differ from its own forward pass by {difference:.1%}")
