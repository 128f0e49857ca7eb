"""The second stage: requests' blocks filled with blended KV that vLLM's own model computes, in the worker that decodes.

Weights are held once, and quantised models work as they are. A pass runs between the engine's own, in its thread, and in
all processes that a model is split over.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from blend.blender import Filled
from blend.chunks.encode import gives_same_kv
from blend.config import BlendConfig
from blend.errors import BlendError
from blend.integrations.vllm.contract import DAMAGED, Load, LoadFailedError, ModelRefusedError, Site
from blend.integrations.vllm.local import CORPUS_OPTIONS, corpus_config
from blend.integrations.vllm.rows_blender import RowBlender
from blend.integrations.vllm.rows_cache import Place
from blend.integrations.vllm.rows_check import admitted
from blend.integrations.vllm.rows_decoder import Facts
from blend.integrations.vllm.rows_identity import fingerprints
from blend.integrations.vllm.rows_learned import LearnedTexts, learn_budget
from blend.integrations.vllm.rows_roles import role_of
from blend.integrations.vllm.rows_ticket import told_by
from blend.integrations.vllm.rows_worker import RowModel
from blend.rag import Rag
from blend.types import PromptLayout

_CONFIG = ("ratio", "selector", "surrogate", "correction")  # options that are entries of `BlendConfig`
_DTYPES = ("float32", "bfloat16", "float16")  # that a store may have been precomputed in
_UNLIMITED = (
    "CPU_ATTN",
)  # attention that takes any number of sequences; other backends have buffers for vLLM's own number


class RecomputedRows:
    """A `Stage`, see the contract. A ticket says where a prompt's segments end, see `rows_ticket`.

    options: "store", as of `Rag`; "ratio", "selector", "surrogate", "correction" as in `BlendConfig`; "codec" as in
    `CorpusConfig`; "learn" and "learn_budget", in GB, as `blend vllm` has them; "chunk_tokens", "embedder" and "top_k" are
    the middleware's. Raises `ValueError`, in one line, for a model that cannot be driven over rows.
    """

    apart = False
    options = frozenset({"store", "learn", "learn_budget", *_CONFIG}) | CORPUS_OPTIONS

    def __init__(self, site: Site, options: Mapping[str, Any]) -> None:
        try:
            self._role = role_of(site)
        except ValueError as error:
            raise _refused(error) from error
        # None in a process that follows another: it has no store, and decides nothing.
        self.blender = self._role.does(partial(row_blender, self._role.model, options))

    def fill(self, load: Load) -> dict[str, Any] | None:
        """See `Stage`."""
        return self._role.does(partial(self._fill, load))

    def _fill(self, load: Load) -> dict[str, Any]:
        assert self.blender is not None
        try:
            layout, corpus, brought = told_by(load.ticket, load.token_ids)
            place = Place(load.blocks, load.start, load.stop)
            if load.start < layout.context.stop:
                return _figures(layout, self.blender.blend(layout, place, corpus, brought))
            self.blender.compute(layout, place)  # all that could be reused is in vLLM's cache
            return {"rows": layout.rows, "rows_computed": load.stop - load.start}
        except (BlendError, ValueError) as error:
            raise LoadFailedError(str(error)) from error

    def rest(self, *, alone: bool) -> None:
        """Some of what earlier prompts lacked is computed, to be stored for the next."""
        self._role.does(partial(self._rest, alone=alone))

    def _rest(self, *, alone: bool) -> None:
        assert self.blender is not None
        self.blender.later.run(alone=alone)

    @property
    def unfinished(self) -> bool:
        """Whether there is more of that; the process that decides tells it for all."""
        return self.blender is not None and len(self.blender.later) > 0

    def close(self) -> None:
        """What is not computed by now is another time."""
        if self.blender is not None:
            self.blender.later.close()


def _figures(layout: PromptLayout, filled: Filled) -> dict[str, Any]:
    """Of a prompt, in the words of `blend serve`."""
    rows = {"rows": layout.rows, "rows_computed": int(filled.selection.rows.shape[0])}
    if damaged := len(filled.problems) + len(filled.artifact_problems):
        rows[DAMAGED] = damaged
    if not any(filled.hits):
        return {"method": "full", "reason": "cold", **rows}
    notes = {"notes": list(filled.notes)} if filled.notes else {}
    return {**rows, **notes, **({"uncorrected": True} if filled.uncorrected else {})}


def row_blender(model: RowModel, options: Mapping[str, Any]) -> RowBlender:
    """What fills blocks with this worker's model; options and errors as `RecomputedRows` says."""
    if "store" not in options:
        raise ValueError("kvblend: stage rows needs the option store, as of blend precompute")
    budget = learn_budget(options)
    try:
        prints = fingerprints(model.site.config)
        own = admitted(model, _facts(model.site, prints.own))
    except (BlendError, ValueError) as error:
        raise _refused(error) from error
    try:
        config = BlendConfig(**{name: options[name] for name in _CONFIG if name in options})
        rag = Rag(str(options["store"]), blend=config, corpus=corpus_config(options))
        store, learned = rag.store, LearnedTexts(rag.store, rag.root, budget)
    except BlendError as error:
        raise ValueError(f"kvblend: {error}") from error
    # Its own dtype first: what others computed in another one is as good where a probe shows it.
    dtypes = dict.fromkeys((own.facts.dtype, *_DTYPES))
    shared = (own.named(prints.shared, dtype) for dtype in dtypes)
    decoder = next((one for one in shared if gives_same_kv(store, one)), own)
    return RowBlender(decoder, store, config, learned)


def _refused(error: Exception) -> ModelRefusedError:
    return ModelRefusedError(f"kvblend: vLLM's own model cannot recompute rows, {error}; use stage copied")


def _facts(site: Site, fingerprint: str) -> Facts:
    model, scheduler = site.config.model_config, site.config.scheduler_config
    backend = site.layers[0].get_attn_backend().get_name()
    return Facts(
        name=str(model.model),
        fingerprint=fingerprint,
        dtype=str(model.dtype).removeprefix("torch."),
        vocabulary=int(model.get_vocab_size()),
        context_length=int(model.max_model_len),
        most_rows=int(scheduler.max_num_batched_tokens),
        most_runs=None if backend in _UNLIMITED else int(scheduler.max_num_seqs),
    )
