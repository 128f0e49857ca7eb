"""Prompts' blended KV written into blocks of vLLM's cache, by a worker's own model."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial

import torch

from blend.chunks.open_library import Variant
from blend.config import BlendConfig
from blend.errors import StoreError
from blend.filling import Filled, Filler, run_steps
from blend.integrations.vllm.rows_cache import PagedCache, Place
from blend.integrations.vllm.rows_decoder import PagedDecoder
from blend.model.rows import RowRequest
from blend.store.base import ChunkStore
from blend.timing import Stopwatch
from blend.types import PromptLayout

_MOST_MISSING = 256  # caches remembered, to be computed when there is time

_LOG = logging.getLogger("vllm.kvblend")


class RowBlender:
    """Blended prefill into blocks. decoder: the worker's model. store, config: as `Blender` has them."""

    def __init__(self, decoder: PagedDecoder, store: ChunkStore, config: BlendConfig) -> None:
        self.decoder, self.store, self.config = decoder, store, config
        self._fillers: dict[str, Filler] = {}
        self._missing: deque[tuple[Filler, PromptLayout, Variant]] = deque(maxlen=_MOST_MISSING)

    def filler(self, corpus: str = "") -> Filler:
        """With the surrogate context and the KV corrections of this corpus."""
        if corpus not in self._fillers:
            self._fillers[corpus] = Filler(self.decoder, self.store, self.config, corpus=corpus)
        return self._fillers[corpus]

    def blend(self, layout: PromptLayout, place: Place, corpus: str = "") -> Filled:
        """Write blended KV to the rows of `place`; its blocks have room for the whole prompt. Raises as `Filler.fill`.

        The logits are empty: vLLM runs the last row itself. What the store lacked is remembered for `rest`.
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
        for line in (*filled.placed.opened.problems, *filled.problems, *filled.notes):
            _LOG.warning("kvblend: %s", line)
        self._missing.extend((filler, layout, one) for one in filled.placed.opened.missing)
        return filled

    def compute(self, layout: PromptLayout, place: Place) -> None:
        """Compute the rows of `place`, with nothing from the store, over what the blocks hold before them."""
        rows = torch.arange(place.start, place.stop, device=self.decoder.device)
        if rows.shape[0]:
            ids = torch.tensor([layout.token_ids], device=self.decoder.device)[:, rows]
            self.decoder.run_rows(RowRequest(ids, rows, self.decoder.cache_in(place, layout.rows)))

    def rest(self) -> bool:
        """Compute and store one of the caches that prompts lacked; whether there was one. For when no request waits."""
        if not self._missing:
            return False
        filler, layout, wanted = self._missing.popleft()
        try:
            filler.keep(layout, filler.library(layout.kept_behind).lacking([wanted]))
        except StoreError as error:
            _LOG.warning("kvblend: %s", error)
        return True
