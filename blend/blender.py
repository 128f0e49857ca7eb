"""Blended prefill: load, reposition, select, recompute, cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.assemble import Assembly
from blend.chunks.correction import KVCorrection
from blend.chunks.correction_check import CorrectionCheck
from blend.chunks.corrections import Corrections, StoredCorrections
from blend.chunks.encode import ChunkEncoder
from blend.chunks.library import ChunkLibrary, Tokens, Variant
from blend.chunks.placed import Opener, Placed, place
from blend.config import BlendConfig
from blend.errors import EntryDamagedError, PromptError
from blend.model.rows import Steps
from blend.recompute import make_plan, recompute
from blend.select import make_selector
from blend.select.controls import All
from blend.store import open_store
from blend.store.base import ChunkStore
from blend.timing import Progress, Stopwatch, no_progress
from blend.types import ChunkCache, PromptLayout, Selection

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder

LEAST_RATIO_UNCORRECTED = 0.3  # of rows, where the KV correction was measured and turns out not to fit a prompt


@dataclass(frozen=True)
class Blend:
    """A finished prefill.

    cache: KV of the whole prompt, ready for decoding. logits: of the next token, `[1, vocab]`. first_token: their argmax.
    hits: which chunks came out of the store, False for ordinary text. exact: of so many of the first rows the KV is what full
    prefill gives. missing: caches that it should have held. problems: one line for every chunk's
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
    exact: int
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


class Blender:
    """Blended prefill for one decoder over one store.

    config: how rows are chosen, unless a call says otherwise. corpus: whose surrogate context and KV corrections are used.
    """

    def __init__(
        self, decoder: Decoder, store: ChunkStore, config: BlendConfig | None = None, *, corpus: str = ""
    ) -> None:
        self.decoder = decoder
        self.store = store
        self.corpus = corpus
        self.config = config or BlendConfig()
        self._libraries: dict[Tokens, ChunkLibrary] = {}
        self._unasked: dict[Tokens, ChunkLibrary] = {}
        self._corrections = StoredCorrections(decoder, store)

    def library(self, prefix: Tokens) -> ChunkLibrary:
        """The caches of chunks behind this prefix, as the store stands now."""
        held = self._libraries.get(prefix)
        if held is None:
            before = self._unasked.get(prefix)
            now = ChunkLibrary(self.decoder, self.store, prefix, corpus=self.corpus, before=before)
            self._unasked.pop(prefix, None)
        else:
            now = held.renewed()
        self._libraries[prefix] = now
        return now

    def _library_of(self, layout: PromptLayout) -> ChunkLibrary:
        """For a prompt. One that takes nothing from the store does not ask it either, and works while it is out of reach."""
        prefix = layout.kept_behind
        if any(chunk is not None for chunk in layout.stored):
            return self.library(prefix)
        held = self._libraries.get(prefix) or self._unasked.get(prefix)
        if held is None:
            held = self._unasked[prefix] = ChunkLibrary(self.decoder, open_store("memory:"), prefix, corpus=self.corpus)
        return held

    def read_ahead(self, layout: PromptLayout) -> None:
        """The caches of this prompt's chunks will be wanted soon: into memory with them, where the store has such a tier."""
        library = self.library(layout.kept_behind)
        self.store.prefetch(map(library.key, library.wanted([chunk for chunk in layout.stored if chunk is not None])))

    def encoder(self, prefix: Tokens) -> ChunkEncoder:
        """The encoder of chunks alone behind this prefix; the prefix's own KV is computed when it is first needed."""
        return self.library(prefix).isolated

    def correction(self, prefix: Tokens, *, contextual: bool = False, first: bool = False) -> KVCorrection | None:
        """The KV correction for isolated or contextual caches, from memory or the store; first: in a prompt's first place.

        None where none was measured, none is needed because nothing is computed in context or what stands there is exact, or it
        is damaged.
        """
        return self._corrections.held(self.library(prefix), contextual=contextual, first=first).map

    def calibrate(
        self,
        prefix: Tokens,
        chunks: Sequence[Tokens],
        *,
        anew: bool = False,
        progress: Progress = no_progress,
    ) -> bool:
        """Measure and store the KV corrections behind `prefix` on prompts made of some of these chunks.

        Those that are there stay, unless they are to be measured `anew`. progress: of the stage "calibrate". Returns
        whether there is one now. Raises `StoreError` when the store cannot be written.
        """
        plain = [tuple(chunk) for chunk in chunks]
        return self._corrections.measure(self.library(prefix), plain, anew=anew, progress=progress)

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
        steps = self.steps(layout, config=config, room=room, watch=watch)
        try:
            request = next(steps)
            while True:
                try:
                    with self.decoder.before_head(partial(watch.switch, "first_token")):
                        logits = self.decoder.prefill([request], mask=config.mask)
                except EntryDamagedError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(logits)
        except StopIteration as done:
            blend: Blend = done.value
            return blend
        finally:
            steps.close()

    def steps(
        self,
        layout: PromptLayout,
        *,
        config: BlendConfig | None = None,
        room: int = 256,
        watch: Stopwatch | None = None,
        most_rows: int | None = None,
        known: ChunkCache | None = None,
    ) -> Steps[Blend]:
        """`prefill` for a scheduler: yields rows for `Decoder.prefill`, is sent their logits, ends with the `Blend`.

        The rows may run in one pass with rows of other prompts, whose answers then need not wait. most_rows: of a piece. known:
        KV of the prefix, or of its first rows, where that is at hand; the rest is computed first. What the selector looks at
        beforehand runs inside. An `EntryDamagedError` that running the rows raised is to be thrown in. Close it when it is
        given up. Raises as `prefill`.
        """
        config = config or self.config
        if not (layout.prefix and layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self.decoder.check_length(layout.rows)
        library = self._library_of(layout)
        watch = watch or Stopwatch(self.decoder.device)
        if known is None and library.prefix == layout.prefix:
            known = library.isolated.prefix
        known = known or self.decoder.no_rows()
        run = partial(self._pass, layout, known, room=room, watch=watch, most_rows=most_rows)
        try:
            first = yield from run(library.open, config, corrected=config.correction)
        except EntryDamagedError:  # found while a layer was read: once more, with everything verified beforehand
            first = yield from run(library.open_sound, config, corrected=config.correction)
        done = first
        if not first.fits:
            more = _with_more_rows(config)
            again = yield from run(library.open_sound, more, corrected=False)
            done = _instead_of(first, again, more)
        with watch.stage("first_token"):
            first_token = int(done.logits[0].argmax())
        opened = done.placed.opened
        return Blend(
            decoder=self.decoder,
            layout=layout,
            cache=done.cache,
            logits=done.logits,
            first_token=first_token,
            selection=done.selection,
            hits=done.placed.hits,
            exact=done.exact,
            missing=opened.missing,
            problems=opened.problems,
            artifact_problems=(*(library.problems if config.surrogate else ()), *first.problems),
            correction_fits=first.fits,
            notes=done.notes,
            stages=dict(watch.stages),
            ttft_s=watch.total(),
            bytes_loaded=opened.nbytes,
        )

    def _pass(
        self,
        layout: PromptLayout,
        known: ChunkCache,
        opener: Opener,
        config: BlendConfig,
        *,
        room: int,
        watch: Stopwatch,
        most_rows: int | None,
        corrected: bool,
    ) -> Steps[_Pass]:
        """Put the stored chunks in place, with or without the KV correction, and recompute."""
        with watch.stage("load"):
            placed = place(layout, opener, contextual=config.surrogate)
        with closing(placed):
            with watch.stage("reposition"):
                plan = make_plan(
                    layout,
                    placed.hits,
                    make_selector(config.selector),
                    config.ratio,
                    self.decoder.device,
                    first_exact=placed.first_exact,
                    known=known.tokens,
                )
                adding = corrected and not isinstance(plan.selector, All)
                found = self.corrections(placed) if adding else Corrections((), ())
                assembly = Assembly(self.decoder, layout, known, placed.readers, room, found.of_chunks, watch)
            check = CorrectionCheck(self.decoder, layout, assembly.added)
            with assembly, assembly.cache.watched(check.see) if assembly.added else nullcontext():
                found_rows = recompute(self.decoder, assembly.cache, plan, watch=watch, most_rows=most_rows)
                logits, selection = yield from found_rows
        return _Pass(assembly.cache, logits, selection, check.score() >= 0, found.problems, placed, plan.exact)

    def corrections(self, placed: Placed) -> Corrections:
        """The KV correction for each place of a prompt; none for a first chunk that is exact where it stands."""
        found = self._corrections.of_prompt(placed.opened, first=placed.first)
        return found._replace(of_chunks=placed.spread(found.of_chunks))

    def remember(self, blend: Blend) -> int:
        """Compute and store the caches that `blend` missed, so that the next prompt hits; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        self.library(blend.layout.kept_behind).compute(blend.missing)
        return len({wanted.chunk for wanted in blend.missing})


class _Pass(NamedTuple):
    """A prompt put together and recomputed. fits: whether the KV correction did no harm to the rows where that shows."""

    cache: BlendedCache
    logits: torch.Tensor
    selection: Selection
    fits: bool
    problems: tuple[str, ...]
    placed: Placed
    exact: int
    notes: tuple[str, ...] = ()


def _with_more_rows(config: BlendConfig) -> BlendConfig:
    """For another attempt, from the stored values: the KV correction took the rows seen further from the truth."""
    return replace(config, ratio=min(1.0, max(2 * config.ratio, LEAST_RATIO_UNCORRECTED)))


def _instead_of(first: _Pass, again: _Pass, more: BlendConfig) -> _Pass:
    """The second attempt, charged with the rows of both."""
    spent = [a + b for a, b in zip(first.selection.rows_per_layer, again.selection.rows_per_layer, strict=True)]
    note = f"the KV correction does not fit this prompt: left out, and {more.ratio:.0%} of the rows recomputed instead"
    return again._replace(selection=replace(again.selection, rows_per_layer=tuple(spent)), notes=(note,))
