"""A vLLM worker's model as kvblend's decoder: it runs rows over the blocks of a request, or over scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from blend.integrations.vllm.rows_batch import PromptRows, runs, slots_of
from blend.integrations.vllm.rows_cache import PagedCache, PagedLayer, Place
from blend.integrations.vllm.rows_worker import RowModel, RowPass
from blend.model.admission import LayerRotation
from blend.model.cache import KV, BlendedCache, Run
from blend.model.decoder import check_length, no_rows
from blend.model.forward import AttentionCall, Halt, RowRequest
from blend.types import CacheIdentity, ChunkCache

Observe = Callable[[AttentionCall], None]


@dataclass(frozen=True)
class Facts:
    """What is known of a worker's model besides its modules.

    name: how messages call it. fingerprint, dtype: under which its caches are kept. vocabulary: how many token ids there are.
    context_length: longest prompt. most_rows, most_runs: of one pass, see `batch_of`; None where there is no limit.
    """

    name: str
    fingerprint: str
    dtype: str
    vocabulary: int
    context_length: int
    most_rows: int
    most_runs: int | None = None


class PagedDecoder:
    """A `RowDecoder`. rotations: how its cached keys turn, as they were measured."""

    def __init__(self, model: RowModel, facts: Facts, rotations: tuple[LayerRotation, ...] = ()) -> None:
        self.model, self.facts, self.rotations = model, facts, rotations
        self.layers = model.site.layers

    def named(self, fingerprint: str, dtype: str) -> PagedDecoder:
        """The same, with caches under another fingerprint and dtype."""
        facts = replace(self.facts, fingerprint=fingerprint, dtype=dtype)
        return PagedDecoder(self.model, facts, self.rotations)

    @property
    def name(self) -> str:
        """How vLLM's process calls the model."""
        return self.facts.name

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.site.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in; blocks may hold another."""
        return self.model.site.config.model_config.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return self.facts.vocabulary

    @property
    def context_length(self) -> int | None:
        """The longest prompt that the engine takes."""
        return self.facts.context_length

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What, besides a chunk's tokens, determines its cache."""
        return CacheIdentity(self.facts.fingerprint, self.facts.dtype, prefix)

    def check_length(self, rows: int) -> None:
        """Refuse prompts beyond the engine's context, with `PromptError`."""
        check_length(self.facts.name, self.context_length, rows)

    def new_cache(self, capacity: int) -> PagedCache:
        """An empty cache in scratch memory."""
        return PagedCache(len(self.layers), capacity)

    def cache_in(self, place: Place, capacity: int) -> PagedCache:
        """An empty cache of a prompt in blocks of the engine."""
        return PagedCache(len(self.layers), capacity, place)

    def no_rows(self) -> ChunkCache:
        """The KV of no tokens at all."""
        return no_rows(self.rotations, self.dtype, self.device)

    def encode_rows(self, token_ids: torch.Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of a contiguous run of tokens `[batch, n]` at positions `start...` into `cache`."""
        self.run_rows(
            RowRequest(token_ids, torch.arange(start, start + token_ids.shape[1], device=token_ids.device), cache)
        )

    def watch_attention(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: BlendedCache,
        observe: Observe,
        *,
        last_layer: int | None = None,
        await_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Run rows only to look at their attention, up to and including `last_layer`; KV is written."""
        last = len(self.layers) - 1 if last_layer is None else last_layer
        self._run(RowRequest(token_ids, positions, cache, observe=observe, await_layer=await_layer), halt_at=last)

    def run_rows(self, request: RowRequest) -> None:
        """Compute rows into the blocks and buffers of their cache, those of its place alone; the last layer gives KV alone.

        Rows that a narrowing drops have run as far as its layer. Those that stay run again from the first, to the same KV.
        """
        rows, place = request.positions, _paged(request.cache).place
        for narrowing in request.narrowings:
            keys, values = self._fresh(only(request, rows), narrowing.layer)
            rows = narrowing.choose(keys, values)
        if place is not None:
            rows = rows[(rows >= place.start) & (rows < place.stop)]
        for piece in self._pieces(rows, request.token_ids.shape[0]):
            self._run(only(request, piece), halt_at=len(self.layers) - 1)

    def logits(self, request: RowRequest) -> torch.Tensor:
        """Compute rows in every layer; next-token logits of the last of them, `[batch, vocab]`."""
        hidden = self._run(request, halt_at=None)
        assert hidden is not None
        batch, rows = request.token_ids.shape
        return self.model.logits(hidden.view(batch, rows, -1)[:, -1])

    def settle(self, cache: PagedCache) -> None:
        """Bring every layer to the blocks that has not been: the last of them, and all where no row ran."""
        for index in range(len(self.layers)):
            _ToBlocks(self, cache, torch.empty(0, dtype=torch.int64)).bring(index)

    def _fresh(self, request: RowRequest, layer: int) -> KV:
        """The KV of all rows at a layer, unwritten there; `[1, kv_heads, rows, head_dim]`."""
        parts = list[KV]()
        for piece in self._pieces(request.positions, request.token_ids.shape[0]):
            self._run(only(request, piece), halt_at=layer, handed=parts)
        return torch.cat([keys for keys, _ in parts], 2), torch.cat([values for _, values in parts], 2)

    def _run(self, request: RowRequest, *, halt_at: int | None, handed: list[KV] | None = None) -> torch.Tensor | None:
        """One pass. halt_at: the layer it ends in, its KV written. handed: gets that layer's KV instead."""
        cache, batch = _paged(request.cache), request.token_ids.shape[0]
        seen = _ToBlocks(self, cache, request.positions, request.observe, request.await_layer, halt_at, handed, batch)
        prompts = tuple(PromptRows(request.positions, blocks) for blocks in seen.tables)
        scratch = sum(map(len, seen.tables)) if cache.place is None else 0
        rows = RowPass(request.token_ids.reshape(-1), prompts, scratch, queries=request.observe is not None)
        return self.model.run(rows, seen.see)

    def _pieces(self, rows: torch.Tensor, batch: int) -> Iterator[torch.Tensor]:
        """The rows in ascending pieces that one pass takes: each reads what those before it wrote."""
        for piece in torch.split(rows, max(1, self.facts.most_rows // batch)) if rows.shape[0] else ():
            found, most = runs(piece), self.facts.most_runs
            step = len(found) if most is None else max(1, most // batch)
            cuts = [int(torch.searchsorted(piece, first)) for first, _ in found[::step]]
            yield from torch.tensor_split(piece, cuts[1:])


@dataclass
class _ToBlocks:
    """What happens in the layers of a pass: stored KV is brought to the blocks, and fresh KV is taken down.

    tables: the blocks of each prompt of the batch.
    """

    decoder: PagedDecoder
    cache: PagedCache
    positions: torch.Tensor
    observe: Observe | None = None
    await_layer: Callable[[int], None] | None = None
    halt_at: int | None = None
    handed: list[KV] | None = None
    batch: int = 1
    tables: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        site, place = self.decoder.model.site, self.cache.place
        each = -(-self.cache.capacity // site.block_size)
        scratch = [tuple(range(row * each, (row + 1) * each)) for row in range(self.batch)]
        self.tables = scratch if place is None else [place.blocks]
        self._run = Run(self.positions) if self.positions.shape[0] else None

    def see(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Before the attention of a layer; states `[batch x rows, heads, head_dim]`."""
        layer = self.bring(index)
        keys, values = self._by_prompt(key), self._by_prompt(value)
        ends = index == self.halt_at
        if ends and self.handed is not None:
            self.handed.append((keys.clone(), values.clone()))
            raise Halt((keys, values))
        assert self._run is not None
        held = layer.write_rows(self._run, keys, values)
        if self.observe is not None:
            self.observe(self._call(index, self._by_prompt(query), *held))
        if ends:
            if self.cache.place is not None:
                self._write(index, key, value, self.positions)
            raise Halt((keys, values))

    def bring(self, index: int) -> PagedLayer:
        """Bring a layer's stored KV to the blocks, if they do not have it."""
        layer: PagedLayer = self.cache.layers[index]
        if self.await_layer is not None:
            self.await_layer(index)
        place = self.cache.place
        if place is not None and layer.in_blocks:
            return layer
        first, last = (0, layer.length) if place is None else (place.start, min(place.stop, layer.length))
        if layer.is_initialized and first < last:
            span = torch.arange(first, last, device=self.decoder.device)
            keys, values = (part[:, :, first:last].transpose(1, 2).flatten(0, 1) for part in (layer.keys, layer.values))
            self._write(index, keys, values, span)
        layer.in_blocks = place is not None
        return layer

    def _write(self, index: int, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """KV `[batch x rows, kv_heads, head_dim]` to the blocks, by vLLM's own writer."""
        model = self.decoder.model
        slots = torch.cat([slots_of(rows, table, model.site.block_size) for table in self.tables])
        model.write(index, keys.contiguous(), values.contiguous(), slots)

    def _by_prompt(self, states: torch.Tensor) -> torch.Tensor:
        """`[batch x rows, heads, head_dim]` as `[batch, heads, rows, head_dim]`."""
        return states.view(self.batch, -1, *states.shape[1:]).transpose(1, 2)

    def _call(self, index: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> AttentionCall:
        impl = self.decoder.layers[index].impl
        softcap = getattr(impl, "logits_soft_cap", None) or None
        return AttentionCall(index, query, keys, values, self.positions, "exact", None, softcap, float(impl.scale))


def _paged(cache: BlendedCache) -> PagedCache:
    assert isinstance(cache, PagedCache)
    return cache


def only(request: RowRequest, rows: torch.Tensor) -> RowRequest:
    """The same for some of its rows, without narrowings."""
    ids = request.token_ids[:, torch.searchsorted(request.positions, rows)]
    return replace(request, token_ids=ids, positions=rows, narrowings=())
