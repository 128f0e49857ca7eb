"""Blended prefill: a prompt's cache from stored chunks, and the first token of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from blend.chunks.open_library import Variant
from blend.config import BlendConfig
from blend.filling import Filler, run_steps
from blend.model.forward import RowRequest, Steps
from blend.recompute import MostRows
from blend.store.base import ChunkStore
from blend.timing import Stopwatch
from blend.types import ChunkCache, PromptLayout, Selection

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder


@dataclass(frozen=True)
class Blend:
    """A finished prefill.

    cache: KV of the whole prompt, ready for decoding. logits: of the next token, `[1, vocab]`. first_token: their argmax.
    hits: which chunks came out of the store, False for ordinary text. exact_rows: of so many of the first rows the KV is what
    full prefill gives. missing: caches that it should have held. problems: one line for every chunk's
    entry that had to be refused. artifact_problems: the same for surrogate context and KV corrections, without which it was
    then blended. correction_fits: False where the KV corrections were left out for this prompt, and more rows recomputed.
    notes: what was done otherwise than configured, a line each. stages: seconds per stage. ttft_s: seconds from the call to
    the first token's id on the host. bytes_loaded: bytes of stored KV that were read.
    """

    decoder: Decoder
    layout: PromptLayout
    cache: BlendedCache
    logits: torch.Tensor
    first_token: int
    selection: Selection
    hits: tuple[bool, ...]
    exact_rows: int
    missing: tuple[Variant, ...]
    problems: tuple[str, ...]
    artifact_problems: tuple[str, ...]
    correction_fits: bool
    notes: tuple[str, ...]
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


class Blender(Filler):
    """Blended prefill for one decoder over one store.

    config: how rows are chosen, unless a call says otherwise. corpus: whose surrogate context and KV corrections are used.
    """

    decoder: Decoder

    def __init__(
        self, decoder: Decoder, store: ChunkStore, config: BlendConfig | None = None, *, corpus: str = ""
    ) -> None:
        super().__init__(decoder, store, config, corpus=corpus)

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
        Raises `PromptError` when the prompt does not fit the model, `ConfigError` for a selector that breaks its contract.
        Damaged store entries are recomputed, never raised.
        """
        config, watch = config or self.config, watch or Stopwatch(self.decoder.device)

        def run(request: RowRequest) -> torch.Tensor:
            with self.decoder.before_head(partial(watch.switch, "first_token")):
                return self.decoder.prefill([request], mask=config.mask)

        return run_steps(self.steps(layout, config=config, room=room, watch=watch), run)

    def steps(
        self,
        layout: PromptLayout,
        *,
        config: BlendConfig | None = None,
        room: int = 256,
        watch: Stopwatch | None = None,
        most_rows: MostRows | None = None,
        known: ChunkCache | None = None,
    ) -> Steps[Blend]:
        """`prefill` for a scheduler: yields rows for `Decoder.prefill`, is sent their logits, ends with the `Blend`.

        The rows may run in one pass with rows of other prompts, whose answers then need not wait; nor need they where it yields
        a `Resume`. most_rows: see there; stored layers are then in place before the first that reads them. known: KV of the
        prefix, or of its first rows, where that is at hand; the rest is computed first. An `EntryDamagedError` that running the
        rows raised is to be thrown in. Close it when it is given up, which may wait for the store too. Raises as `prefill`.
        """
        watch = watch or Stopwatch(self.decoder.device)
        config = config or self.config
        filled = yield from self.fill(layout, config=config, room=room, watch=watch, most_rows=most_rows, known=known)
        with watch.stage("first_token"):
            first_token = int(filled.logits[0].argmax())
        opened = filled.placed.opened
        return Blend(
            decoder=self.decoder,
            layout=layout,
            cache=filled.cache,
            logits=filled.logits,
            first_token=first_token,
            selection=filled.selection,
            hits=filled.placed.hits,
            exact_rows=filled.exact_rows,
            missing=opened.missing,
            problems=opened.problems,
            artifact_problems=filled.problems,
            correction_fits=filled.fits,
            notes=filled.notes,
            stages=dict(watch.stages),
            ttft_s=watch.total(),
            bytes_loaded=opened.nbytes,
        )

    def remember(self, blend: Blend) -> int:
        """Compute and store the caches that `blend` missed, so that the next prompt hits; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        return self.keep(blend.layout, blend.missing)
