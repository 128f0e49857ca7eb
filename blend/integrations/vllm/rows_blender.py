"""Prompts' blended KV written into blocks of vLLM's cache, by a worker's own model."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

import torch

from blend.blender import LEAST_RATIO_UNCORRECTED, Filled, Filler, run_steps
from blend.config import BlendConfig
from blend.integrations.vllm.rows_cache import PagedCache, Place
from blend.integrations.vllm.rows_decoder import PagedDecoder
from blend.integrations.vllm.rows_later import Lacking, Later
from blend.integrations.vllm.rows_learned import LearnedTexts
from blend.model.forward import RowRequest
from blend.store.base import ChunkStore
from blend.timing import Stopwatch
from blend.types import PromptLayout

_LOG = logging.getLogger("vllm.kvblend")


class RowBlender:
    """Blended prefill into blocks. decoder: the worker's model. store, config: as `Blender` has them.

    learned: which caches of texts that clients bring are stored; by default none is. later: what prompts lacked.
    """

    def __init__(
        self, decoder: PagedDecoder, store: ChunkStore, config: BlendConfig, learned: LearnedTexts | None = None
    ) -> None:
        self.decoder, self.store, self.config = decoder, store, config
        self._fillers: dict[str, Filler] = {}
        self.later = Later(decoder, learned)

    def filler(self, corpus: str = "") -> Filler:
        """With the surrogate context and the KV corrections of this corpus."""
        if corpus not in self._fillers:
            self._fillers[corpus] = Filler(
                self.decoder, self.store, self.config, corpus=corpus, uncorrected_ratio=LEAST_RATIO_UNCORRECTED
            )
        return self._fillers[corpus]

    def blend(
        self, layout: PromptLayout, place: Place, corpus: str = "", brought: Collection[int] = frozenset()
    ) -> Filled:
        """Write blended KV to the rows of `place`; its blocks have room for the whole prompt. Raises as `Filler.fill`.

        The logits are empty: vLLM runs the last row itself. What the store lacked is left to `later`; brought: places of
        chunks whose text came with the request.
        """
        nothing = torch.empty((1, 0), device=self.decoder.device)

        def run(request: RowRequest) -> torch.Tensor:
            self.decoder.run_rows(request)
            return nothing

        filler = self.filler(corpus)
        steps = filler.fill(
            layout,
            config=self.config,
            room=0,
            watch=Stopwatch(self.decoder.device),
            new_cache=partial(self.decoder.cache_in, place),
        )
        filled = run_steps(steps, run)
        assert isinstance(filled.cache, PagedCache)
        self.decoder.settle(filled.cache)
        for line in (*filled.problems, *filled.artifact_problems):
            _LOG.warning("kvblend: %s", line)
        self.later.remember(Lacking(filler, layout, filled.missing, brought))
        return filled

    def compute(self, layout: PromptLayout, place: Place) -> None:
        """Compute the rows of `place`, with nothing from the store, over what the blocks hold before them."""
        rows = torch.arange(place.start, place.stop, device=self.decoder.device)
        if rows.shape[0]:
            ids = torch.tensor([layout.token_ids], device=self.decoder.device)[:, rows]
            self.decoder.run_rows(RowRequest(ids, rows, self.decoder.cache_in(place, layout.rows)))
