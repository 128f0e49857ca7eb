"""A vLLM worker's model as kvblend's decoder: it runs rows over the cache blocks of a request, or over scratch memory.

Every run of consecutive rows is a sequence for vLLM's attention, as long as its last row is deep. All runs of a prompt have the
same block table. Causal attention over the paged cache then lets each row see exactly the rows of its prompt up to itself.
Nothing of vLLM is replaced: a pass builds attention metadata and runs the model with a forward context that skips compiled
code. Hooks on the attention layers, installed for the pass only, see queries, keys and values after RoPE.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from blend.integrations.vllm.contract import Site, slots_of
from blend.model.attention import AttentionCall
from blend.model.cache import KV, BlendedCache, BlendedLayer, LayerRotation, Run
from blend.model.decoder import RowDecoder
from blend.model.forward import Halt, RowRequest
from blend.types import CacheIdentity

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

Observe = Callable[[AttentionCall], None]
OnLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called before each layer's attention with its number and fresh queries, keys, values `[rows, heads, head_dim]`."""
_UNLIMITED = ("CPU_ATTN",)  # takes any number of sequences; other attention backends have buffers for vLLM's own number
_FITTED = 4096  # positions that rotary frequencies are fitted to


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
        self.place, self.capacity = place, capacity


class PromptRows(NamedTuple):
    """Rows of one prompt to compute: sorted positions, int64 `[rows]`, and the prompt's blocks."""

    positions: torch.Tensor
    blocks: Sequence[int]


class RowPass(NamedTuple):
    """Rows of prompts that run together.

    token_ids: of all rows of all prompts, int64 `[rows]`. scratch: how many blocks of scratch memory the prompts lie in; 0
    where they lie in the engine's. shift: added to the rotary positions.
    """

    token_ids: torch.Tensor
    prompts: tuple[PromptRows, ...]
    scratch: int = 0
    shift: int = 0


def runs(positions: torch.Tensor) -> list[tuple[int, int]]:
    """First and last of each run of consecutive positions among these sorted ones."""
    here = positions.cpu()
    lengths = torch.unique_consecutive(here - torch.arange(here.shape[0]), return_counts=True)[1]
    last = here[lengths.cumsum(0) - 1]
    return list(zip((last - lengths + 1).tolist(), last.tolist(), strict=True))


def batch_of(prompts: Sequence[PromptRows], block_size: int, device: torch.device) -> CommonAttentionMetadata:
    """The rows of several prompts as a batch for vLLM's attention."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths, ends, tables = list[int](), list[int](), list[Sequence[int]]()
    for positions, blocks in prompts:
        for first, last in runs(positions):
            lengths.append(last - first + 1)
            ends.append(last + 1)
            tables.append(blocks)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seen = torch.tensor(ends, dtype=torch.int32)
    slots = torch.cat([slots_of(positions, blocks, block_size) for positions, blocks in prompts])
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seen.to(device),
        num_reqs=len(lengths),
        num_actual_tokens=int(slots.shape[0]),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        block_table_tensor=_padded(tables).to(device),
        slot_mapping=slots.to(device),
        causal=True,
        positions=torch.cat([positions for positions, _ in prompts]).to(device),
        seq_lens_cpu_upper_bound=seen,
    )


def _padded(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    widest = max(map(len, tables))
    kinds = {id(table): [*table, *[0] * (widest - len(table))] for table in tables}
    return torch.tensor([kinds[id(table)] for table in tables], dtype=torch.int32)


class ScratchBlocks:
    """Replaces the cache of attention layers while rows run that are not kept: one layer's memory for all layers.

    layers: vLLM's attention modules, which cache alike. blocks: of their own cache. A layer's contents are lost when the next
    one runs, so earlier rows are written again for every layer of a pass.
    """

    def __init__(self, layers: Sequence[Any], blocks: int) -> None:
        self._layers, self._blocks = layers, blocks
        self._memory: torch.Tensor | None = None
        self._size = 0

    @contextmanager
    def bound(self, blocks: int) -> Iterator[None]:
        """Meanwhile blocks 0 to `blocks - 1` of every layer are scratch memory, and its own cache cannot be reached."""
        own = [layer.kv_cache for layer in self._layers]
        memory = self._grown(own[0], blocks)
        try:
            for layer in self._layers:
                layer.kv_cache = memory
            yield
        finally:
            for layer, cache in zip(self._layers, own, strict=True):
                layer.kv_cache = cache

    def _grown(self, like: torch.Tensor, blocks: int) -> torch.Tensor:
        if self._memory is None or self._size < blocks:
            self._memory = None  # before the larger one is allocated
            self._memory, self._size = _alike(like, block_dimension(like, self._blocks), blocks), blocks
        return self._memory


def block_dimension(cache: torch.Tensor, blocks: int) -> int:
    """Which dimension of a layer's cache counts its blocks. Raises `ValueError` where the shape does not show it."""
    found = [dimension for dimension, size in enumerate(cache.shape) if size == blocks]
    if len(found) != 1:
        raise ValueError(
            f"because a cache of shape {tuple(cache.shape)} does not show which dimension counts its {blocks} blocks"
        )
    return found[0]


def _alike(cache: torch.Tensor, dimension: int, blocks: int) -> torch.Tensor:
    """Zeros with the same memory order of dimensions and another number of blocks; masked values must not be NaN."""
    order = sorted(range(cache.ndim), key=lambda one: cache.stride(one), reverse=True)
    shape = [blocks if one == dimension else cache.shape[one] for one in order]
    back = [order.index(one) for one in range(cache.ndim)]
    return torch.zeros(shape, dtype=cache.dtype, device=cache.device).permute(back)


def model_of(layers: Sequence[Any]) -> Any:
    """The module that holds these attention layers and computes logits; a wrapper before what it wraps.

    vLLM gives connectors the attention layers and not the model. Called once, at start, before vLLM hides objects from the
    garbage collector. Raises `ValueError` where there is no such module.
    """
    wanted = set(map(id, layers))
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.nn.Module)
        and callable(getattr(type(one), "compute_logits", None))
        and wanted <= {id(module) for module in one.modules()}
    ]
    if not found:
        raise ValueError("because no model of this process holds the attention layers of its cache")
    return max(found, key=lambda model: sum(1 for _ in model.modules()))


def frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every distinct set of rotary frequencies, float64 `[pairs]` in radians per position, in the model's tables."""
    found: list[torch.Tensor] = []
    for name, table in model.named_buffers():
        if name.endswith("cos_sin_cache") and table.ndim == 2 and table.shape[0] > 1:
            mine = from_table(table).to(table.device)
            if not any(mine.shape == other.shape and torch.equal(mine, other) for other in found):
                found.append(mine)
    return found


def from_table(table: torch.Tensor) -> torch.Tensor:
    """Frequencies `[pairs]` from a table `[positions, 2 * pairs]` of cosines and sines of position times frequency.

    A common factor does not matter. A line through all angles is as exact as the model's single-precision numbers.
    """
    cos, sin = table[:_FITTED].detach().double().cpu().chunk(2, dim=-1)
    angles = torch.from_numpy(np.unwrap(torch.atan2(sin, cos).numpy(), axis=0))  # no frequency exceeds half a turn
    places = torch.arange(angles.shape[0], dtype=torch.float64)[:, None]
    return ((places * angles).sum(0) / places.square().sum()).float().double()


class RowModel:
    """A worker's model that runs rows. model: the module. Raises `ValueError` where it or its blocks cannot be found."""

    def __init__(self, site: Site) -> None:
        self.site, self.model = site, model_of(site.layers)
        backend, spec = site.layers[0].get_attn_backend(), site.layers[0].get_kv_cache_spec(site.config)
        with _configured(site):
            self._builder = backend.get_builder_cls()(spec, list(site.names), site.config, site.device)
        blocks = int(site.config.cache_config.num_gpu_blocks)
        block_dimension(site.layers[0].kv_cache, blocks)
        self._scratch = ScratchBlocks(site.layers, blocks)

    @torch.inference_mode()
    def run(self, rows: RowPass, on_layer: OnLayer) -> torch.Tensor | None:
        """Run rows; the last layer's hidden states `[rows, hidden]`, or None where `on_layer` raised `Halt`.

        Their KV is written. What they see must be in their blocks.
        """
        scratch = self._scratch.bound(rows.scratch) if rows.scratch else nullcontext()
        with suppress(Halt), scratch:
            return self._forward(rows, on_layer)
        return None

    def _forward(self, rows: RowPass, on_layer: OnLayer) -> torch.Tensor:
        from vllm.forward_context import set_forward_context

        site, device = self.site, self.site.device
        common = batch_of(rows.prompts, site.block_size, device)
        positions = torch.cat([prompt.positions for prompt in rows.prompts]) + rows.shift
        with ExitStack() as stack:
            stack.enter_context(_configured(site))
            metadata = self._builder.build(0, common)
            stack.enter_context(
                set_forward_context(
                    dict.fromkeys(site.names, metadata),
                    site.config,
                    num_tokens=common.num_actual_tokens,
                    slot_mapping=dict.fromkeys(site.names, common.slot_mapping),
                    skip_compiled=True,
                )
            )
            stack.enter_context(_hooked(site.layers, on_layer))
            ids = rows.token_ids.to(device=device, dtype=torch.int32)
            hidden: torch.Tensor = self.model(input_ids=ids, positions=positions.to(device))
            return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of hidden states `[rows, hidden]`, `[rows, vocab]`."""
        with _configured(self.site):
            found: torch.Tensor = self.model.compute_logits(hidden)
        return found


def _configured(site: Site) -> AbstractContextManager[None]:
    """VLLM's configuration, set while its code runs. Imported here, so that this module loads without vLLM."""
    from vllm.config import set_current_vllm_config

    found: AbstractContextManager[None] = set_current_vllm_config(site.config)
    return found


@contextmanager
def _hooked(layers: Sequence[Any], on_layer: OnLayer) -> Iterator[None]:
    handles = [
        layer.register_forward_pre_hook(partial(_hook, on_layer, index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(on_layer: OnLayer, index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    on_layer(
        index,
        named["query"].view(-1, layer.num_heads, layer.head_size),
        named["key"].view(-1, layer.num_kv_heads, layer.head_size),
        named["value"].view(-1, layer.num_kv_heads, layer.head_size_v),
    )


class PagedDecoder(RowDecoder):
    """A `RowDecoder`. fingerprint, kept_as: name and dtype under which its caches are stored. rotations: as measured."""

    def __init__(
        self, model: RowModel, fingerprint: str, kept_as: str, rotations: tuple[LayerRotation, ...] = ()
    ) -> None:
        self.model, self.fingerprint, self.kept_as, self.rotations = model, fingerprint, kept_as, rotations
        self.layers = model.site.layers

    def named(self, fingerprint: str, kept_as: str) -> PagedDecoder:
        """The same decoder, its caches under another fingerprint and dtype."""
        return PagedDecoder(self.model, fingerprint, kept_as, self.rotations)

    @cached_property
    def name(self) -> str:  # type: ignore[override]  # read only
        """The model's name in vLLM."""
        return str(self.model.site.config.model_config.model)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.site.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.model.site.config.model_config.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.model.site.config.model_config.get_vocab_size())

    @property
    def context_length(self) -> int | None:
        """Of the longest prompt that the engine takes."""
        return int(self.model.site.config.model_config.max_model_len)

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What, besides a chunk's tokens, determines its cache."""
        return CacheIdentity(self.fingerprint, self.kept_as, prefix)

    def new_cache(self, capacity: int) -> PagedCache:
        """An empty cache in scratch memory."""
        return PagedCache(len(self.layers), capacity)

    def cache_in(self, place: PromptBlocks, capacity: int) -> PagedCache:
        """An empty cache of a prompt in the engine's blocks."""
        return PagedCache(len(self.layers), capacity, place)

    def encode_rows(self, token_ids: torch.Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of consecutive tokens `[batch, n]` at positions `start...` into `cache`."""
        run = Run.consecutive(start, start + token_ids.shape[1], token_ids.device)
        self.run_rows(RowRequest.of(token_ids, run, cache))

    def watch_attention(
        self,
        token_ids: torch.Tensor,
        run: Run,
        cache: BlendedCache,
        observe: Observe,
        *,
        last_layer: int | None = None,
        await_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Run rows to observe their attention, up to and including `last_layer`; their KV is written."""
        last = len(self.layers) - 1 if last_layer is None else last_layer
        self._run(RowRequest.of(token_ids, run, cache, observe=observe, await_layer=await_layer), halt_at=last)

    def run_rows(self, request: RowRequest) -> None:
        """Compute rows into their cache's buffers and blocks, only those of its place; in the last layer only KV.

        Rows that a narrowing drops run up to its layer. The others run again from the first layer, to the same KV.
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
        return torch.cat([keys for keys, _ in parts], 2), torch.cat([values for _, values in parts], 2)

    def _run(self, request: RowRequest, *, halt_at: int | None, fresh: list[KV] | None = None) -> torch.Tensor | None:
        """One pass. halt_at: the layer it ends in, its KV written. fresh: gets that layer's KV instead."""
        cache, batch = _paged(request.cache), request.token_ids.shape[0]
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
        for piece in torch.split(rows, max(1, scheduler.max_num_batched_tokens // batch)) if rows.shape[0] else ():
            found = runs(piece)
            step = len(found) if most is None else max(1, most // batch)
            cuts = [int(torch.searchsorted(piece, first)) for first, _ in found[::step]]
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
        site, place = self.decoder.model.site, self.cache.place
        each = -(-self.cache.capacity // site.block_size)
        scratch = [tuple(range(row * each, (row + 1) * each)) for row in range(self.batch)]
        self.tables = scratch if place is None else [place.blocks]
        self._run = Run.read(self.positions) if self.positions.shape[0] else None

    def on_layer(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Before a layer's attention; states `[batch x rows, heads, head_dim]`."""
        layer = self.copy_stored(index)
        keys, values = self._by_prompt(key), self._by_prompt(value)
        ends = index == self.halt_at
        if ends and self.fresh is not None:
            self.fresh.append((keys.clone(), values.clone()))
            raise Halt((keys, values))
        assert self._run is not None
        held = layer.write_rows(self._run, keys, values)
        if self.observe is not None:
            self.observe(self._call(index, self._by_prompt(query), *held))
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
        first, last = (0, layer.length) if place is None else (place.start, min(place.stop, layer.length))
        if layer.is_initialized and first < last:
            span = torch.arange(first, last, device=self.decoder.device)
            keys, values = (part[:, :, first:last].transpose(1, 2).flatten(0, 1) for part in (layer.keys, layer.values))
            self._write(index, keys, values, span)
        layer.in_blocks = place is not None
        return layer

    def _write(self, index: int, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """KV `[batch x rows, kv_heads, head_dim]` to the blocks, by vLLM's own writer."""
        site = self.decoder.model.site
        slots = torch.cat([slots_of(rows, table, site.block_size) for table in self.tables])
        with torch.inference_mode():
            site.write(index, keys.contiguous(), values.contiguous(), slots)

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
    """The same request for some of its rows, without narrowings."""
    ids = request.token_ids[:, torch.searchsorted(request.positions, rows)]
    return replace(request, token_ids=ids, positions=rows, narrowings=())
