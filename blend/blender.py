"""Blended prefill: load, reposition, select, recompute, cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blend.assemble import assemble, load_chunks
from blend.config import BlendConfig
from blend.context_map import ContextMap, measure_map
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


MAP_CONTENT = "context map"  # how a store describes the namespace of one


@dataclass(frozen=True)
class Blend:
    """A finished prefill.

    cache: KV of the whole prompt, ready for decoding. logits: of the next token, `[1, vocab]`. first_token: their argmax.
    hits: which chunks came out of the store. problems: one line for every chunk's entry that had to be refused. map_problems:
    the same for the context map, without which the prompt was then blended.
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
        self._encoders: dict[tuple[int, ...], ChunkEncoder] = {}
        self._maps: dict[tuple[int, ...], ContextMap | None] = {}
        self._map_problems: dict[tuple[int, ...], tuple[str, ...]] = {}

    def encoder(self, prefix: tuple[int, ...]) -> ChunkEncoder:
        """The encoder of chunks behind this prefix; its own KV is computed at the first call."""
        if prefix not in self._encoders:
            self._encoders[prefix] = ChunkEncoder(self.decoder, prefix)
        return self._encoders[prefix]

    def context_map(self, prefix: tuple[int, ...]) -> ContextMap | None:
        """The context map behind this prefix, from memory or the store; None where none was measured or it is damaged."""
        if prefix not in self._maps:
            self._maps[prefix] = self._stored_map(prefix)
        return self._maps[prefix]

    def calibrate(
        self,
        prefix: tuple[int, ...],
        chunks: Sequence[Sequence[int]],
        *,
        anew: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> bool:
        """Measure and store the context map behind `prefix` on prompts made of some of these chunks.

        One that is there stays, unless it is to be measured `anew`. progress: called with tokens done and in all. Returns
        whether there is one now. Raises `StoreError` when the store cannot be written.
        """
        if not anew and self.context_map(prefix) is not None:
            return True
        encoder = self.encoder(prefix)
        found = measure_map(encoder, chunks, lambda some: self._caches(encoder, some), progress)
        if found is not None:
            key = encoder.identity.map_key
            words = {"content": MAP_CONTENT, "model": self.decoder.name, "dtype": encoder.identity.dtype}
            self.store.describe(key.namespace, {**words, "prefix_tokens": str(len(prefix))})
            self.store.put(key, found.to_cache())
            self._maps[prefix] = self._stored_map(
                prefix
            )  # as the store's codec rounds it, in this process and the next
        return self._maps.get(prefix) is not None

    def _stored_map(self, prefix: tuple[int, ...]) -> ContextMap | None:
        depth = len(self.decoder.layers)
        loaded = load_chunks(self.store, [self.encoder(prefix).identity.map_key], [None], depth)
        self._map_problems[prefix] = loaded.problems
        held = loaded.chunks[0]
        return None if held is None else ContextMap.from_cache(held, self.decoder.device)

    def _caches(self, encoder: ChunkEncoder, chunks: Sequence[tuple[int, ...]]) -> list[ChunkCache]:
        """Caches of chunks; what the store lacks is computed and stored."""
        keys, depth = [encoder.identity.key(chunk) for chunk in chunks], len(self.decoder.layers)
        found = list(load_chunks(self.store, keys, [len(chunk) for chunk in chunks], depth).chunks)
        missing = [index for index, cache in enumerate(found) if cache is None]
        for index, cache in encoder.encode([chunks[i] for i in missing]):
            found[missing[index]] = cache
            self.store.put(keys[missing[index]], cache)
        return [cache for cache in found if cache is not None]

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
            mapping = config.context_map and plan.inexact.shape[0] > 0 and not isinstance(plan.selector, All)
            found = self.context_map(layout.prefix) if mapping else None
            if found is not None:
                found.apply(self.decoder, cache, layout, plan.inexact)
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
            map_problems=self._map_problems[layout.prefix] if mapping else (),
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
