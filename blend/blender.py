"""Blended prefill: load, reposition, select, recompute, cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blend.assemble import assemble, load_chunks
from blend.config import BlendConfig
from blend.context_shift import add_shift, measure_shift
from blend.encode import ChunkEncoder
from blend.errors import PromptError
from blend.recompute import make_plan, recompute
from blend.select import make_selector
from blend.select.controls import All
from blend.store.base import ChunkStore
from blend.timing import Stopwatch
from blend.types import ChunkCache, PromptLayout, Selection

if TYPE_CHECKING:
    from blend.blended_cache import BlendedCache
    from blend.decoder import Decoder


@dataclass(frozen=True)
class Blend:
    """A finished prefill.

    cache: KV of the whole prompt, ready for decoding. logits: of the next token, `[1, vocab]`. first_token: their argmax.
    hits: which chunks came out of the store. problems: one line for every store entry that had to be refused.
    stages: seconds per stage. ttft_s: seconds from the call to the first token's id on the host.
    bytes_loaded: bytes of stored KV that were read.
    """

    decoder: Decoder
    layout: PromptLayout
    cache: BlendedCache
    logits: torch.Tensor
    first_token: int
    selection: Selection
    hits: tuple[bool, ...]
    problems: tuple[str, ...]
    stages: Mapping[str, float]
    ttft_s: float
    bytes_loaded: int

    @property
    def rows_recomputed(self) -> int:
        """Rows that were computed in every layer."""
        return int(self.selection.rows.shape[0])

    @property
    def rows_share(self) -> float:
        """Computed rows, summed over layers, over all rows x layers: what compute costs beside full prefill."""
        return self.selection.share(self.layout.rows)

    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run further tokens `[1, n]` behind the prompt; logits `[1, n, vocab]`."""
        return self.decoder.append(token_ids, self.cache)

    def rewind(self) -> None:
        """Forget everything that was appended to the prompt."""
        self.cache.truncate(self.layout.rows)


class Blender:
    """Blended prefill for one decoder over one store.

    config: how rows are chosen, unless a call says otherwise.
    """

    def __init__(self, decoder: Decoder, store: ChunkStore, config: BlendConfig | None = None) -> None:
        self.decoder = decoder
        self.store = store
        self.config = config or BlendConfig()
        self._encoders: dict[tuple[int, ...], ChunkEncoder] = {}
        self._shifts: dict[tuple[int, ...], ChunkCache | None] = {}

    def encoder(self, prefix: tuple[int, ...]) -> ChunkEncoder:
        """The encoder of chunks behind this prefix; its own KV is computed at the first call."""
        if prefix not in self._encoders:
            self._encoders[prefix] = ChunkEncoder(self.decoder, prefix)
        return self._encoders[prefix]

    def context_shift(self, prefix: tuple[int, ...]) -> ChunkCache | None:
        """The context shift behind this prefix, from memory or the store; None where it was never measured."""
        if prefix not in self._shifts:
            key = self.encoder(prefix).identity.shift_key
            self._shifts[prefix] = load_chunks(self.store, [key], [1], len(self.decoder.layers)).chunks[0]
        return self._shifts[prefix]

    def calibrate(self, prefix: tuple[int, ...], chunks: Sequence[Sequence[int]]) -> bool:
        """Measure and store the context shift behind `prefix` on some of these chunks, unless that was done before.

        Returns whether there is one now. Raises `StoreError` when the store cannot be written.
        """
        if self.context_shift(prefix) is None:
            encoder = self.encoder(prefix)
            self._shifts[prefix] = shift = measure_shift(encoder, chunks)
            if shift is not None:
                self.store.put(encoder.identity.shift_key, shift)
        return self._shifts[prefix] is not None

    def prefill(
        self,
        layout: PromptLayout,
        *,
        config: BlendConfig | None = None,
        room: int = 256,
        watch: Stopwatch | None = None,
    ) -> Blend:
        """Prefill a prompt from stored chunks.

        room: tokens to reserve for decoding. watch: a stopwatch that runs since the query's arrival, if it came earlier.
        Raises `PromptError` when the prompt does not fit the model, `ConfigError` for an unknown selector. Damaged store
        entries are recomputed, never raised.
        """
        config = config or self.config
        selector = make_selector(config)
        if not (layout.prefix and layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self.decoder.check_length(layout.rows)
        encoder = self.encoder(layout.prefix)
        watch = watch or Stopwatch(self.decoder.device)
        with watch.stage("load"):
            keys = [encoder.identity.key(chunk) for chunk in layout.chunks]
            loaded = load_chunks(self.store, keys, [len(c) for c in layout.chunks], len(self.decoder.layers))
        with watch.stage("reposition"):
            cache = assemble(self.decoder, layout, encoder.prefix, loaded.chunks, room)
            plan = make_plan(layout, loaded.hits, selector, config.ratio, self.decoder.device)
            shift = self.context_shift(layout.prefix) if config.shift else None
            if shift is not None and not isinstance(plan.selector, All):
                add_shift(self.decoder, cache, shift, plan.inexact, config.shift)
        logits, selection = recompute(self.decoder, cache, plan, mask=config.mask, watch=watch)
        with watch.stage("first_token"):
            first_token = int(logits[0].argmax())
        return Blend(
            decoder=self.decoder,
            layout=layout,
            cache=cache,
            logits=logits,
            first_token=first_token,
            selection=selection,
            hits=loaded.hits,
            problems=loaded.problems,
            stages=dict(watch.stages),
            ttft_s=watch.total(),
            bytes_loaded=sum(chunk.nbytes for chunk in {id(c): c for c in loaded.chunks if c}.values()),
        )

    def remember(self, blend: Blend) -> int:
        """Compute and store the chunks that `blend` missed, so that the next prompt hits; how many there were.

        Raises `StoreError` when the store cannot be written.
        """
        encoder = self.encoder(blend.layout.prefix)
        missed = list(dict.fromkeys(c for c, hit in zip(blend.layout.chunks, blend.hits, strict=True) if not hit))
        for index, cache in encoder.encode(missed):
            self.store.put(encoder.identity.key(missed[index]), cache)
        return len(missed)
