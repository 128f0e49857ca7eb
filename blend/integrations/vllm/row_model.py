"""A vLLM worker's model that runs rows of prompts over cache blocks.

Every run of consecutive rows is a sequence for vLLM's attention, as long as its last row is deep. All runs of a prompt have the
same block table. Causal attention over the paged cache then lets each row see exactly the rows of its prompt up to itself.
Nothing of vLLM is replaced: a pass builds attention metadata and runs the model with a forward context that skips compiled
code. Hooks on the attention layers, installed for the pass only, see queries, keys and values after RoPE.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from blend.integrations.vllm.contract import Site, slots_of
from blend.model.passes import Halt

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

OnLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called before each layer's attention with its number and fresh queries, keys, values `[rows, heads, head_dim]`.

Queries are this worker's, keys and values those of all workers.
"""
_FITTED = 4096  # positions that rotary frequencies are fitted to


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
    rows = positions.cpu()
    lengths = torch.unique_consecutive(rows - torch.arange(rows.shape[0]), return_counts=True)[1]
    last = rows[lengths.cumsum(0) - 1]
    return list(zip((last - lengths + 1).tolist(), last.tolist(), strict=True))


def batch_of(prompts: Sequence[PromptRows], block_size: int, device: torch.device) -> CommonAttentionMetadata:
    """The rows of several prompts as a batch for vLLM's attention."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths: list[int] = []
    ends: list[int] = []
    tables: list[Sequence[int]] = []
    for positions, blocks in prompts:
        for first, last in runs(positions):
            lengths.append(last - first + 1)
            ends.append(last + 1)
            tables.append(blocks)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(ends, dtype=torch.int32)
    slots = torch.cat([slots_of(positions, blocks, block_size) for positions, blocks in prompts])
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(lengths),
        num_actual_tokens=int(slots.shape[0]),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        block_table_tensor=_padded(tables).to(device),
        slot_mapping=slots.to(device),
        causal=True,
        positions=torch.cat([positions for positions, _ in prompts]).to(device),
        seq_lens_cpu_upper_bound=seq_lens,
    )


def _padded(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    widest = max(map(len, tables))
    padded = {id(table): [*table, *[0] * (widest - len(table))] for table in tables}
    return torch.tensor([padded[id(table)] for table in tables], dtype=torch.int32)


class ScratchBlocks:
    """Replaces the cache of attention layers while rows run that are not kept: one layer's memory for all layers.

    layers: vLLM's attention modules, which cache alike. blocks: of their own cache. A layer's contents are lost when the next
    one runs, so earlier rows are written again for every layer of a pass.
    """

    def __init__(self, layers: Sequence[Any], blocks: int) -> None:
        self._layers = layers
        self._blocks = blocks
        self._memory: torch.Tensor | None = None
        self._size = 0

    @contextmanager
    def bound(self, blocks: int) -> Iterator[None]:
        """Meanwhile blocks 0 to `blocks - 1` of every layer are scratch memory, and its own cache cannot be reached."""
        caches = [layer.kv_cache for layer in self._layers]
        memory = self._grown(caches[0], blocks)
        try:
            for layer in self._layers:
                layer.kv_cache = memory
            yield
        finally:
            for layer, cache in zip(self._layers, caches, strict=True):
                layer.kv_cache = cache

    def _grown(self, like: torch.Tensor, blocks: int) -> torch.Tensor:
        if self._memory is None or self._size < blocks:
            self._memory = None  # before the larger one is allocated
            self._memory = _alike(like, block_dimension(like, self._blocks), blocks)
            self._size = blocks
        return self._memory


def block_dimension(cache: torch.Tensor, blocks: int) -> int:
    """Which dimension of a layer's cache counts its blocks. Raises `ValueError` where the shape does not show it."""
    dimensions = [dimension for dimension, size in enumerate(cache.shape) if size == blocks]
    if len(dimensions) != 1:
        raise ValueError(
            f"because a cache of shape {tuple(cache.shape)} does not show which dimension counts its {blocks} blocks"
        )
    return dimensions[0]


def _alike(cache: torch.Tensor, dimension: int, blocks: int) -> torch.Tensor:
    """Zeros with the same memory order of dimensions and another number of blocks; masked values must not be NaN."""
    order = sorted(range(cache.ndim), key=cache.stride, reverse=True)
    shape = [blocks if axis == dimension else cache.shape[axis] for axis in order]
    back = [order.index(axis) for axis in range(cache.ndim)]
    return torch.zeros(shape, dtype=cache.dtype, device=cache.device).permute(back)


def model_of(layers: Sequence[Any]) -> Any:
    """The module that holds these attention layers and computes logits; a wrapper before what it wraps.

    vLLM gives connectors the attention layers and not the model. Called once, at start, before vLLM hides objects from the
    garbage collector. Raises `ValueError` where there is no such module.
    """
    layer_ids = set(map(id, layers))
    models = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.nn.Module)
        and callable(getattr(type(candidate), "compute_logits", None))
        and layer_ids <= {id(module) for module in candidate.modules()}
    ]
    if not models:
        raise ValueError("because no model of this process holds the attention layers of its cache")
    return max(models, key=lambda model: sum(1 for _ in model.modules()))


def frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every distinct set of rotary frequencies, float64 `[pairs]` in radians per position, in the model's tables."""
    distinct: list[torch.Tensor] = []
    for name, table in model.named_buffers():
        if name.endswith("cos_sin_cache") and table.ndim == 2 and table.shape[0] > 1:
            fitted = from_table(table).to(table.device)
            if not any(fitted.shape == earlier.shape and torch.equal(fitted, earlier) for earlier in distinct):
                distinct.append(fitted)
    return distinct


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
        self.site = site
        self.model = model_of(site.layers)
        layer = site.layers[0]
        builder = layer.get_attn_backend().get_builder_cls()
        with _configured(site):
            self._builder = builder(layer.get_kv_cache_spec(site.config), list(site.names), site.config, site.device)
        blocks = int(site.config.cache_config.num_gpu_blocks)
        block_dimension(layer.kv_cache, blocks)
        self._scratch = ScratchBlocks(site.layers, blocks)

    @torch.inference_mode()
    def run(self, rows: RowPass, on_layer: OnLayer) -> torch.Tensor | None:
        """Run rows; the last layer's hidden states `[rows, hidden]`, or None where `on_layer` raised `Halt`.

        Their KV is written. What they see must be in their blocks.
        """
        memory = self._scratch.bound(rows.scratch) if rows.scratch else nullcontext()
        with suppress(Halt), memory:
            return self._forward(rows, on_layer)
        return None

    def _forward(self, rows: RowPass, on_layer: OnLayer) -> torch.Tensor:
        from vllm.forward_context import set_forward_context

        site = self.site
        common = batch_of(rows.prompts, site.block_size, site.device)
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
            stack.enter_context(_hooked(site, on_layer))
            ids = rows.token_ids.to(device=site.device, dtype=torch.int32)
            hidden: torch.Tensor = self.model(input_ids=ids, positions=positions.to(site.device))
            return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of hidden states `[rows, hidden]`, `[rows, vocab]`."""
        with _configured(self.site):
            logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits


def _configured(site: Site) -> AbstractContextManager[None]:
    """VLLM's configuration, set while its code runs. Imported here, so that this module loads without vLLM."""
    from vllm.config import set_current_vllm_config

    context: AbstractContextManager[None] = set_current_vllm_config(site.config)
    return context


@contextmanager
def _hooked(site: Site, on_layer: OnLayer) -> Iterator[None]:
    def before_attention(
        index: int,
        layer: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        key = named["key"].view(-1, layer.num_kv_heads, layer.head_size)
        value = named["value"].view(-1, layer.num_kv_heads, layer.head_size_v)
        on_layer(
            index,
            named["query"].view(-1, layer.num_heads, layer.head_size),
            site.workers.all_kv_heads(key),
            site.workers.all_kv_heads(value),
        )

    handles = [
        layer.register_forward_pre_hook(partial(before_attention, index), with_kwargs=True)
        for index, layer in enumerate(site.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
