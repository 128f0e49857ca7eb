"""Blended prefill: load, reposition, select, recompute, cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.assemble import assemble, load_chunks
from blend.calibration import measure_maps
from blend.config import BlendConfig
from blend.context_map import ContextMap
from blend.encode import ChunkEncoder
from blend.errors import PromptError
from blend.library import ChunkLibrary, LoadedLibrary, Tokens, Wanted
from blend.recompute import make_plan, recompute
from blend.select import make_selector
from blend.select.controls import All
from blend.store.base import ChunkStore
from blend.timing import Stopwatch
from blend.types import PromptLayout, Selection

if TYPE_CHECKING:
    from blend.blended_cache import BlendedCache
    from blend.decoder import Decoder


MAP_CONTENT = "context map"  # how a store describes the namespace of one


@dataclass(frozen=True)
class Blend:
    """A finished prefill.

    cache: KV of the whole prompt, ready for decoding. logits: of the next token, `[1, vocab]`. first_token: their argmax.
    hits: which chunks came out of the store. missing: caches that it should have held. problems: one line for every chunk's
    entry that had to be refused. map_problems: the same for the context maps, without which the prompt was then blended.
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
    map_problems: tuple[str, ...]
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
        """The caches of chunks behind this prefix."""
        if prefix not in self._libraries:
            self._libraries[prefix] = ChunkLibrary(self.decoder, self.store, prefix)
        return self._libraries[prefix]

    def encoder(self, prefix: Tokens) -> ChunkEncoder:
        """The encoder of chunks alone behind this prefix; the prefix's own KV is computed when it is first needed."""
        return self.library(prefix).alone

    def context_map(self, prefix: Tokens, *, company: bool = False) -> ContextMap | None:
        """The context map for chunks alone or in company, from memory or the store.

        None where none was measured, none is needed because nothing is computed in company, or it is damaged.
        """
        return self._held_map(prefix, company=company).map

    def _held_map(self, prefix: Tokens, *, company: bool) -> _StoredMap:
        library = self.library(prefix)
        if company and library.company is None:
            return _StoredMap(None, ())
        encoder = library.encoder(company=company)
        if encoder.prefix_tokens not in self._maps:
            self._maps[encoder.prefix_tokens] = self._stored_map(encoder)
        return self._maps[encoder.prefix_tokens]

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
        if not anew and all(self.context_map(prefix, company=company) for company in kinds):
            return True
        plain = [chunk for chunk in chunks if chunk not in library.stand_in]
        sources = [partial(library.caches, company=company) for company in kinds]
        for company, found in zip(kinds, measure_maps(library.alone, plain, sources, progress), strict=True):
            if found is not None:
                self._keep_map(library, found, company=company)
        return any(self.context_map(prefix, company=company) for company in kinds)

    def _keep_map(self, library: ChunkLibrary, found: ContextMap, *, company: bool) -> None:
        encoder = library.encoder(company=company)
        key = encoder.identity.map_key
        words = {"content": MAP_CONTENT, "model": self.decoder.name, "dtype": encoder.identity.dtype}
        kind = {"company": "stand-in"} if company else {}
        self.store.describe(key.namespace, {**words, "prefix_tokens": str(len(library.prefix)), **kind})
        self.store.put(key, found.to_cache())
        # As the store's codec rounds it, in this process and the next.
        self._maps[encoder.prefix_tokens] = self._stored_map(encoder)

    def _stored_map(self, encoder: ChunkEncoder) -> _StoredMap:
        loaded = load_chunks(self.store, [encoder.identity.map_key], [None], len(self.decoder.layers))
        held = loaded.chunks[0]
        return _StoredMap(None if held is None else ContextMap.from_cache(held, self.decoder.device), loaded.problems)

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
        library = self.library(layout.prefix)
        watch = watch or Stopwatch(self.decoder.device)
        with watch.stage("load"):
            loaded = library.load(layout.chunks, company=config.stand_in)
        with watch.stage("reposition"):
            cache = assemble(self.decoder, layout, library.alone.prefix, loaded.chunks, room)
            plan = make_plan(layout, loaded.hits, selector, config.ratio, self.decoder.device)
            mapping = config.context_map and not isinstance(plan.selector, All)
            map_problems = self.map_rows(cache, layout, loaded, plan.inexact) if mapping else ()
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
            missing=loaded.missing,
            problems=loaded.problems,
            map_problems=map_problems,
            stages=dict(watch.stages),
            ttft_s=watch.total(),
            bytes_loaded=sum(chunk.nbytes for chunk in {id(c): c for c in loaded.chunks if c}.values()),
        )

    def map_rows(
        self, cache: BlendedCache, layout: PromptLayout, loaded: LoadedLibrary, rows: torch.Tensor
    ) -> tuple[str, ...]:
        """Add to the stored KV at `rows` what the context maps predict; a line for every map that had to be refused."""
        company = torch.zeros(layout.rows, dtype=torch.bool, device=rows.device)
        for together, span in zip(loaded.company, layout.chunk_spans, strict=True):
            company[span.start : span.stop] = together
        problems: tuple[str, ...] = ()
        for kind in (False, True):
            mine = rows[company[rows] == kind]
            if mine.shape[0] == 0:
                continue
            held = self._held_map(layout.prefix, company=kind)
            problems += held.problems
            if held.map is not None:
                held.map.apply(self.decoder, cache, layout, mine)
        return problems

    def remember(self, blend: Blend) -> int:
        """Compute and store the caches that `blend` missed, so that the next prompt hits; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        self.library(blend.layout.prefix).compute(blend.missing)
        return len({wanted.chunk for wanted in blend.missing})


class _StoredMap(NamedTuple):
    """What a store held under a map's key, and the line for one that had to be refused."""

    map: ContextMap | None
    problems: tuple[str, ...]
