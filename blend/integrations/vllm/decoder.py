"""A vLLM worker's model as kvblend's decoder: it runs rows over the cache blocks of a request, or over scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from blend.integrations.vllm.contract import slots_of
from blend.integrations.vllm.row_model import PromptRows, RowModel, RowPass, runs
from blend.model.attention import AttentionCall
from blend.model.cache import KV, BlendedCache, BlendedLayer, LayerRotation, Run
from blend.model.passes import Halt, OnLayer, RowRequest, nothing
from blend.model.row_decoder import RowDecoder
from blend.types import CacheIdentity

Observe = Callable[[AttentionCall], None]
_UNLIMITED = ("CPU_ATTN",)  # takes any number of sequences; other attention backends have buffers for vLLM's own number


class PromptBlocks(NamedTuple):
    """Blocks of vLLM's cache that hold a prompt; rows `start` to `stop - 1` of it are to be written."""

    blocks: tuple[int, ...]
    start: int
    stop: int


class PagedLayer(BlendedLayer):
    """One layer of a `PagedCache`. in_blocks: whether the blocks hold what the buffers do; fresh rows are written to both."""

    in_blocks = False

    def blank(self, rows: torch.Tensor) -> None:
        """As its base does."""
        self.in_blocks = False
        super().blank(rows)

    def write_run(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As its base does."""
        self.in_blocks = False
        super().write_run(start, keys, values)

    def new_buffer(self, states: torch.Tensor) -> torch.Tensor:
        """As its base does, but zeroed."""
        # Zeros: whole layers are written to the blocks, and attention may multiply masked values, so NaN must not be there.
        return states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))


class PagedCache(BlendedCache):
    """A prompt's KV in buffers, copied to blocks layer by layer. place: the blocks; None for scratch memory."""

    layer = PagedLayer

    def __init__(self, layers: int, capacity: int, place: PromptBlocks | None = None) -> None:
        super().__init__(layers, capacity)
        self.place = place
        self.capacity = capacity


class PagedDecoder(RowDecoder):
    """A `RowDecoder`. fingerprint, kept_as: name and dtype under which its caches are stored. rotations: as measured."""

    def __init__(
        self,
        model: RowModel,
        fingerprint: str,
        kept_as: str,
        rotations: tuple[LayerRotation, ...] = (),
    ) -> None:
        self.model = model
        self.fingerprint = fingerprint
        self.kept_as = kept_as
        self.rotations = rotations
        self.layers = model.site.layers
        self.workers = model.site.workers.size
        self._config = model.site.config.model_config

    def named(self, fingerprint: str, kept_as: str) -> PagedDecoder:
        """The same decoder, its caches under another fingerprint and dtype."""
        return PagedDecoder(self.model, fingerprint, kept_as, self.rotations)

    @cached_property
    def name(self) -> str:  # type: ignore[override]  # read only
        """The model's name in vLLM."""
        return str(self._config.model)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.site.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._config.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._config.get_vocab_size())

    @property
    def context_length(self) -> int | None:
        """Of the longest prompt that the engine takes."""
        return int(self._config.max_model_len)

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What, besides a chunk's tokens, determines its cache."""
        return CacheIdentity(self.fingerprint, self.kept_as, prefix)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """The first worker's values."""
        return self.model.site.workers.agreed(values)

    def together(self, step: Callable[[], Hashable]) -> None:
        """Do a step in every worker; raises `LoadFailedError` where it failed in another one."""
        self.model.site.workers.together(step)

    def new_cache(self, capacity: int) -> PagedCache:
        """An empty cache in scratch memory."""
        return PagedCache(len(self.layers), capacity)

    def cache_in(self, place: PromptBlocks, capacity: int) -> PagedCache:
        """An empty cache of a prompt in the engine's blocks."""
        return PagedCache(len(self.layers), capacity, place)

    def encode_rows(
        self,
        token_ids: torch.Tensor,
        start: int,
        cache: BlendedCache,
        on_layer: OnLayer = nothing,
    ) -> None:
        """Write the KV of consecutive tokens `[batch, n]` at positions `start...` into `cache`."""
        run = Run.consecutive(start, start + token_ids.shape[1], token_ids.device)
        self.run_rows(RowRequest(token_ids, run, cache, await_layer=on_layer))

    def watch_attention(
        self,
        token_ids: torch.Tensor,
        run: Run,
        cache: BlendedCache,
        observe: Observe,
        *,
        last_layer: int | None = None,
        await_layer: OnLayer = nothing,
    ) -> None:
        """Run rows to observe their attention; their KV is written.

        Args:
            token_ids: `[batch, rows]`.
            run: the positions of the rows.
            cache: holds the rows before them.
            observe: called in each layer.
            last_layer: the layer to stop behind; the last one by default.
            await_layer: called before a layer's KV is read.
        """
        last = len(self.layers) - 1 if last_layer is None else last_layer
        self._run(RowRequest(token_ids, run, cache, observe=observe, await_layer=await_layer), halt_at=last)

    def run_rows(self, request: RowRequest) -> None:
        """All `passes`."""
        for _ in self.passes(request):
            pass

    def passes(self, request: RowRequest) -> Iterator[None]:
        """Compute rows into their cache's buffers and blocks, only those of its place; in the last layer only KV.

        Rows that a narrowing drops run up to its layer. The others run again from the first layer, to the same KV. Stops behind
        each pass.
        """
        rows = request.positions
        place = _paged(request.cache).place
        for narrowing in request.narrowings:
            keys, values = self._fresh(only(request, rows), narrowing.layer)
            rows = narrowing.choose(keys, values)
            yield
        if place is not None:
            rows = rows[(rows >= place.start) & (rows < place.stop)]
        for piece in self._pieces(rows, request.token_ids.shape[0]):
            self._run(only(request, piece), halt_at=len(self.layers) - 1)
            yield

    def logits(self, request: RowRequest) -> torch.Tensor:
        """Compute rows in every layer; next-token logits of the last of them, `[batch, vocab]`."""
        batch = request.token_ids.shape[0]
        for piece in self._pieces(request.positions, batch):
            hidden = self._run(only(request, piece), halt_at=None)
        assert hidden is not None
        return self.model.logits(hidden.view(batch, piece.shape[0], -1)[:, -1])

    def settle(self, cache: PagedCache) -> None:
        """Copy every layer to the blocks that is not there yet: the last one, and all where no row ran."""
        for index in range(len(self.layers)):
            _BlockWriter(self, cache, torch.empty(0, dtype=torch.int64)).copy_stored(index)

    def _fresh(self, request: RowRequest, layer: int) -> KV:
        """KV of all rows at a layer, which is not written there; `[1, kv_heads, rows, head_dim]`."""
        parts = list[KV]()
        for piece in self._pieces(request.positions, request.token_ids.shape[0]):
            self._run(only(request, piece), halt_at=layer, fresh=parts)
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def _run(self, request: RowRequest, *, halt_at: int | None, fresh: list[KV] | None = None) -> torch.Tensor | None:
        """One pass. halt_at: the layer it ends in, its KV written. fresh: gets that layer's KV instead."""
        cache = _paged(request.cache)
        batch = request.token_ids.shape[0]
        writer = _BlockWriter(
            self, cache, request.positions, request.observe, request.await_layer, halt_at, fresh, batch
        )
        prompts = tuple(PromptRows(request.positions, blocks) for blocks in writer.tables)
        scratch = sum(map(len, writer.tables)) if cache.place is None else 0
        return self.model.run(RowPass(request.token_ids.reshape(-1), prompts, scratch), writer.on_layer)

    def _pieces(self, rows: torch.Tensor, batch: int) -> Iterator[torch.Tensor]:
        """The rows in ascending pieces that fit a pass: each reads what those before it wrote."""
        scheduler = self.model.site.config.scheduler_config
        backend = self.layers[0].get_attn_backend().get_name()
        most = None if backend in _UNLIMITED else int(scheduler.max_num_seqs)
        if not rows.shape[0]:
            return
        for piece in torch.split(rows, max(1, scheduler.max_num_batched_tokens // batch)):
            piece_runs = runs(piece)
            step = len(piece_runs) if most is None else max(1, most // batch)
            cuts = [int(torch.searchsorted(piece, first)) for first, _ in piece_runs[::step]]
            yield from torch.tensor_split(piece, cuts[1:])


@dataclass
class _BlockWriter:
    """In each layer of a pass: copies stored KV to the blocks, and writes fresh KV to the buffers.

    tables: the blocks of each prompt of the batch.
    """

    decoder: PagedDecoder
    cache: PagedCache
    positions: torch.Tensor
    observe: Observe | None = None
    await_layer: Callable[[int], None] | None = None
    halt_at: int | None = None
    fresh: list[KV] | None = None
    batch: int = 1
    tables: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        if self.cache.place is not None:
            self.tables = [self.cache.place.blocks]
        else:
            count = -(-self.cache.capacity // self.decoder.model.site.block_size)
            self.tables = [tuple(range(row * count, (row + 1) * count)) for row in range(self.batch)]
        self._run = Run.read(self.positions) if self.positions.shape[0] else None

    def on_layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Before a layer's attention; states `[batch x rows, heads, head_dim]`."""
        layer = self.copy_stored(index)
        keys = self._by_prompt(key)
        values = self._by_prompt(value)
        ends = index == self.halt_at
        if ends and self.fresh is not None:
            self.fresh.append((keys.clone(), values.clone()))
            raise Halt((keys, values))
        assert self._run is not None
        layer_kv = layer.write_rows(self._run, keys, values)
        if self.observe is not None:
            queries = self.decoder.model.site.workers.all_heads(query)
            self.observe(self._call(index, self._by_prompt(queries), *layer_kv))
        if ends:
            if self.cache.place is not None:
                self._write(index, key, value, self.positions)
            raise Halt((keys, values))

    def copy_stored(self, index: int) -> PagedLayer:
        """Copy a layer's stored KV to the blocks, unless they have it."""
        layer: PagedLayer = self.cache.layers[index]
        if self.await_layer is not None:
            self.await_layer(index)
        place = self.cache.place
        if place is not None and layer.in_blocks:
            return layer
        first = 0 if place is None else place.start
        last = layer.length if place is None else min(place.stop, layer.length)
        if layer.is_initialized and first < last:
            span = torch.arange(first, last, device=self.decoder.device)
            keys = layer.keys[:, :, first:last].transpose(1, 2).flatten(0, 1)
            values = layer.values[:, :, first:last].transpose(1, 2).flatten(0, 1)
            self._write(index, keys, values, span)
        layer.in_blocks = place is not None
        return layer

    def _write(
        self,
        index: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """KV `[batch x rows, kv_heads, head_dim]` to the blocks, by vLLM's own writer."""
        site = self.decoder.model.site
        slots = torch.cat([slots_of(rows, table, site.block_size) for table in self.tables])
        with torch.inference_mode():
            site.write(index, keys, values, slots)

    def _by_prompt(self, states: torch.Tensor) -> torch.Tensor:
        """`[batch x rows, heads, head_dim]` as `[batch, heads, rows, head_dim]`."""
        return states.view(self.batch, -1, *states.shape[1:]).transpose(1, 2)

    def _call(
        self,
        index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> AttentionCall:
        impl = self.decoder.layers[index].impl
        softcap = getattr(impl, "logits_soft_cap", None) or None
        rule = {"softcap": softcap, "scale": float(impl.scale)}
        assert self._run is not None
        return AttentionCall(index, query, keys, values, self._run.shared, rule)


def _paged(cache: BlendedCache) -> PagedCache:
    assert isinstance(cache, PagedCache)
    return cache


def only(request: RowRequest, rows: torch.Tensor) -> RowRequest:
    """The same request for some of its rows, without narrowings."""
    ids = request.token_ids[:, torch.searchsorted(request.positions, rows)]
    return replace(request, token_ids=ids, run=Run.read(rows), narrowings=())
