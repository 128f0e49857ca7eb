"""The second stage: requests' blocks filled with blended KV, computed by vLLM's own model in the worker that decodes.

Weights are held once, and quantised models work as they are. A pass runs between the engine's own, in its thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from blend.chunks.library import Variant
from blend.chunks.likeness import alike
from blend.config import BlendConfig
from blend.errors import BlendError
from blend.filling import Filled, Filler, run_steps
from blend.integrations.vllm.contract import Load, LoadFailedError, Site
from blend.integrations.vllm.rows_cache import PagedCache, Place
from blend.integrations.vllm.rows_check import admitted, refusal
from blend.integrations.vllm.rows_decoder import Facts, PagedDecoder
from blend.integrations.vllm.rows_find import model_of
from blend.integrations.vllm.rows_identity import fingerprints
from blend.integrations.vllm.rows_ticket import layout_of
from blend.model.rows import RowRequest
from blend.store import open_store
from blend.store.base import ChunkStore
from blend.timing import Stopwatch
from blend.types import PromptLayout

_UNLIMITED = ("CPU_ATTN",)  # attention backends that take any number of sequences; others have buffers for what vLLM runs at once
_MOST_MISSING = 256  # chunks remembered to be computed when there is time

_log = logging.getLogger(__name__)


class RowsStage:
    """Blends prompts in one worker process; see the contract's `Stage`.

    decoder: the worker's model. store: chunk caches. config: how rows are chosen. corpus: see `blend.corpora`.
    """

    apart = False

    def __init__(self, decoder: PagedDecoder, store: ChunkStore, config: BlendConfig, corpus: str = "") -> None:
        self.decoder, self.store, self.config = decoder, store, config
        self._filler = Filler(decoder, store, config, corpus=corpus)
        self._missing: deque[tuple[PromptLayout, Variant]] = deque(maxlen=_MOST_MISSING)

    def fill(self, load: Load) -> None:
        """Write blended KV for the rows of `load`. Raises `LoadFailedError`."""
        try:
            layout = layout_of(load.ticket, load.token_ids)
            place = Place(load.blocks, load.start, load.stop)
            if load.start >= layout.context.stop:
                self._plain(layout, place)
            else:
                self.blended(layout, place)
        except (BlendError, ValueError) as error:
            raise LoadFailedError(str(error)) from error

    def blended(self, layout: PromptLayout, place: Place) -> Filled:
        """Fill blocks with a prompt's blended KV, rows `place.start` to `place.stop - 1`. The blocks hold all of its rows."""
        nothing = torch.empty((1, 0), device=self.decoder.device)

        def run(request: RowRequest) -> torch.Tensor:
            self.decoder.run_rows(request)
            return nothing  # vLLM runs the last row itself, and has the logits

        steps = self._filler.fill(
            layout,
            config=self.config,
            room=0,
            watch=Stopwatch(self.decoder.device),
            new_cache=partial(self.decoder.cache_in, place),
        )
        filled = run_steps(steps, run)
        assert isinstance(filled.cache, PagedCache)
        self.decoder.settle(filled.cache)
        for line in (*filled.placed.opened.problems, *filled.problems, *filled.notes):
            _log.warning("kvblend: %s", line)
        self._missing.extend((layout, one) for one in filled.placed.opened.missing)
        return filled

    def _plain(self, layout: PromptLayout, place: Place) -> None:
        """Rows of the suffix alone: all that can be reused is in the blocks."""
        cache, rows = self.decoder.cache_in(place, layout.rows), torch.arange(place.start, place.stop)
        if rows.shape[0]:
            self.decoder.run_rows(RowRequest(torch.tensor([layout.token_ids])[:, rows], rows, cache))

    def rest(self) -> bool:
        """Compute and store one of the caches that prompts lacked; whether there was one. For a time when no request waits."""
        if not self._missing:
            return False
        layout, wanted = self._missing.popleft()
        library = self._filler.library(layout.kept_behind)
        self._filler.keep(layout, library.lacking([wanted]))
        return True

    def close(self) -> None:
        """Nothing is held but memory."""


def make_rows_stage(site: Site, settings: Mapping[str, Any]) -> RowsStage:
    """As `stage_for`, for the model that is found to hold the worker's layers: at start only, see `model_of`."""
    return stage_for(site, model_of(site.layers), settings)


def stage_for(site: Site, model: Any, settings: Mapping[str, Any]) -> RowsStage:
    """A stage for this worker. Raises ValueError, in one line, where its model cannot be driven: the first stage remains.

    settings: "store" (a folder), and, with the defaults of `BlendConfig`, "ratio", "selector", "surrogate", "correction"; "corpus".
    """
    if why := refusal(site):
        raise ValueError(f"rows cannot be recomputed by vLLM's own model, because {why}; let the prefill process compute them")
    wanted = {name: settings[name] for name in ("ratio", "selector", "surrogate", "correction") if name in settings}
    config = BlendConfig(**wanted)
    store = open_store(str(settings["store"]))
    prints = fingerprints(site.config)
    decoder = admitted(site, model, _facts(site, prints.own))
    shared = decoder.named(prints.shared)
    return RowsStage(shared if alike(store, shared) else decoder, store, config, str(settings.get("corpus", "")))


def _facts(site: Site, fingerprint: str) -> Facts:
    model, scheduler = site.config.model_config, site.config.scheduler_config
    backend = site.layers[0].get_attn_backend().get_name()
    return Facts(
        name=str(model.served_model_name or model.model),
        fingerprint=fingerprint,
        vocabulary=int(model.get_vocab_size()),
        context_length=int(model.max_model_len),
        most_rows=int(scheduler.max_num_batched_tokens),
        most_runs=None if backend in _UNLIMITED else int(scheduler.max_num_seqs),
    )
