"""Blended prefill: load, reposition, select, recompute, cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.assemble import assemble
from blend.chunks.correction import Added, ContextMap
from blend.chunks.correction_check import MapCheck
from blend.chunks.encode import ChunkEncoder
from blend.chunks.fit_correction import Source, measure_maps
from blend.chunks.library import ChunkLibrary, LoadedLibrary, Tokens, Wanted
from blend.config import BlendConfig
from blend.errors import EntryDamagedError, PromptError
from blend.recompute import make_plan, recompute
from blend.select import make_selector
from blend.select.controls import All
from blend.store.base import ChunkStore
from blend.timing import Stopwatch
from blend.types import PromptLayout, Selection

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder

LEAST_RATIO_UNMAPPED = 0.3  # of rows, where the context map was measured and turns out not to fit a prompt


@dataclass(frozen=True)
class Blend:
    """A finished prefill.

    cache: KV of the whole prompt, ready for decoding. logits: of the next token, `[1, vocab]`. first_token: their argmax.
    notes: what was done otherwise than configured, a line each.
    hits: which chunks came out of the store. missing: caches that it should have held. problems: one line for every chunk's
    entry that had to be refused. artifact_problems: the same for stand-in and context maps, without which it was then blended.
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
    missing: tuple[Wanted, ...]
    problems: tuple[str, ...]
    artifact_problems: tuple[str, ...]
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

    config: how rows are chosen, unless a call says otherwise.
    """

    def __init__(self, decoder: Decoder, store: ChunkStore, config: BlendConfig | None = None) -> None:
        self.decoder = decoder
        self.store = store
        self.config = config or BlendConfig()
        self._libraries: dict[Tokens, ChunkLibrary] = {}
        self._maps: dict[Tokens, _StoredMap] = {}

    def library(self, prefix: Tokens) -> ChunkLibrary:
        """The caches of chunks behind this prefix, as the store stands now."""
        held = self._libraries.get(prefix)
        self._libraries[prefix] = now = held.renewed() if held else ChunkLibrary(self.decoder, self.store, prefix)
        return now

    def encoder(self, prefix: Tokens) -> ChunkEncoder:
        """The encoder of chunks alone behind this prefix; the prefix's own KV is computed when it is first needed."""
        return self.library(prefix).alone

    def context_map(self, prefix: Tokens, *, company: bool = False) -> ContextMap | None:
        """The context map for chunks alone or in company, from memory or the store.

        None where none was measured, none is needed because nothing is computed in company, or it is damaged.
        """
        return self._held_map(self.library(prefix), company=company).map

    def _held_map(self, library: ChunkLibrary, *, company: bool) -> _StoredMap:
        encoder = library.encoder(company=company)
        if company and encoder is library.alone:
            return _StoredMap(None, (), library.generation)
        held = self._maps.get(encoder.prefix_tokens)
        if held is None or held.generation != library.generation:
            self._maps[encoder.prefix_tokens] = held = self._stored_map(encoder, library.generation)
        return held

    def calibrate(
        self,
        prefix: Tokens,
        chunks: Sequence[Tokens],
        *,
        anew: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> bool:
        """Measure and store the context maps behind `prefix` on prompts made of some of these chunks.

        Those that are there stay, unless they are to be measured `anew`. progress: called with tokens done and in all. Returns
        whether there is one now. Raises `StoreError` when the store cannot be written.
        """
        library = self.library(prefix)
        kinds = (False, True) if library.company else (False,)
        if not anew and all(self._held_map(library, company=company).map for company in kinds):
            return True
        together = {one.chunk for one in library.wanted(chunks) if one.company}
        sources = [
            Source(partial(library.caches, company=company), together.__contains__ if company else lambda chunk: True)
            for company in kinds
        ]
        for company, found in zip(kinds, measure_maps(library.alone, chunks, sources, progress), strict=True):
            if found is not None:
                name = library.encoder(company=company).identity.correction_name
                self.store.write_artifact(name, found.to_bytes())
        return any(self.context_map(prefix, company=company) for company in kinds)

    def _stored_map(self, encoder: ChunkEncoder, generation: str) -> _StoredMap:
        try:
            content = self.store.read_artifact(encoder.identity.correction_name)
            if content is None:
                return _StoredMap(None, (), generation)
            found = ContextMap.from_bytes(content, self.decoder.device)
            found.require_fit(self.decoder.rotations)
        except (EntryDamagedError, ValueError) as error:
            return _StoredMap(None, (f"the context map cannot be used: {error}",), generation)
        return _StoredMap(found, (), generation)

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
        make_selector(config)  # an unknown one is refused before anything is read
        if not (layout.prefix and layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self.decoder.check_length(layout.rows)
        library = self.library(layout.prefix)
        watch = watch or Stopwatch(self.decoder.device)
        with watch.stage("load"):
            loaded = library.load(layout.chunks, company=config.stand_in)
        first = self._pass(layout, loaded, config, room, watch, mapped=config.context_map)
        done = first if first.fits else self._without_map(first, layout, loaded, config, room, watch)
        with watch.stage("first_token"):
            first_token = int(done.logits[0].argmax())
        return Blend(
            decoder=self.decoder,
            layout=layout,
            cache=done.cache,
            logits=done.logits,
            first_token=first_token,
            selection=done.selection,
            hits=loaded.hits,
            missing=loaded.missing,
            problems=loaded.problems,
            artifact_problems=(*(library.problems if config.stand_in else ()), *first.problems),
            notes=done.notes,
            stages=dict(watch.stages),
            ttft_s=watch.total(),
            bytes_loaded=sum(chunk.nbytes for chunk in {id(c): c for c in loaded.chunks if c}.values()),
        )

    def _pass(
        self,
        layout: PromptLayout,
        loaded: LoadedLibrary,
        config: BlendConfig,
        room: int,
        watch: Stopwatch,
        *,
        mapped: bool,
    ) -> _Pass:
        """Put the stored chunks in place, with or without the context map, and recompute."""
        with watch.stage("reposition"):
            cache = assemble(self.decoder, layout, loaded.library.alone.prefix, loaded.chunks, room)
            selector = make_selector(config)
            plan = make_plan(layout, loaded.hits, selector, config.ratio, self.decoder.device)
            mapping = mapped and not isinstance(plan.selector, All)
            maps = self.map_rows(cache, layout, loaded, plan.inexact) if mapping else MappedRows((), ())
        check = MapCheck(self.decoder, maps.added)
        with cache.watched(check.see) if maps.added else nullcontext():
            logits, selection = recompute(self.decoder, cache, plan, mask=config.mask, watch=watch)
        return _Pass(cache, logits, selection, check.score() >= 0, maps.problems)

    def _without_map(
        self,
        first: _Pass,
        layout: PromptLayout,
        loaded: LoadedLibrary,
        config: BlendConfig,
        room: int,
        watch: Stopwatch,
    ) -> _Pass:
        """Once more from the stored values, with more rows: the context map took those seen further from the truth."""
        more = replace(config, ratio=min(1.0, max(2 * config.ratio, LEAST_RATIO_UNMAPPED)))
        again = self._pass(layout, loaded, more, room, watch, mapped=False)
        spent = [a + b for a, b in zip(first.selection.rows_per_layer, again.selection.rows_per_layer, strict=True)]
        note = (
            f"the context map does not fit this prompt: left out, and {more.ratio:.0%} of the rows recomputed instead"
        )
        return again._replace(selection=replace(again.selection, rows_per_layer=tuple(spent)), notes=(note,))

    def map_rows(
        self, cache: BlendedCache, layout: PromptLayout, loaded: LoadedLibrary, rows: torch.Tensor
    ) -> MappedRows:
        """Add to the stored KV at `rows` what the context maps predict."""
        company = torch.zeros(layout.rows, dtype=torch.bool, device=rows.device)
        for together, span in zip(loaded.company, layout.chunk_spans, strict=True):
            company[span.start : span.stop] = together
        problems: tuple[str, ...] = ()
        added: tuple[Added, ...] = ()
        for kind in (False, True):
            mine = rows[company[rows] == kind]
            if mine.shape[0] == 0:
                continue
            held = self._held_map(loaded.library, company=kind)
            problems += held.problems
            if held.map is not None:
                added += (held.map.apply(self.decoder, cache, layout, mine),)
        return MappedRows(added, problems)

    def remember(self, blend: Blend) -> int:
        """Compute and store the caches that `blend` missed, so that the next prompt hits; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        self.library(blend.layout.prefix).compute(blend.missing)
        return len({wanted.chunk for wanted in blend.missing})


class MappedRows(NamedTuple):
    """What context maps added to a prompt, and a line for every map that had to be refused."""

    added: tuple[Added, ...]
    problems: tuple[str, ...]


class _Pass(NamedTuple):
    """A prompt put together and recomputed. fits: whether the context map did no harm to the rows where that shows."""

    cache: BlendedCache
    logits: torch.Tensor
    selection: Selection
    fits: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


class _StoredMap(NamedTuple):
    """What a store held at one generation under a map's name, and the line for one that had to be refused."""

    map: ContextMap | None
    problems: tuple[str, ...]
    generation: str
