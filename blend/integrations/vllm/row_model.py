"""A vLLM worker's model that runs rows of prompts over cache blocks.

Every run of consecutive rows is a sequence for vLLM's attention, as long as its last row is deep. All runs of a prompt have the
same block table. Causal attention over the paged cache then lets each row see exactly the rows of its prompt up to itself.
Nothing of vLLM is replaced: a pass builds attention metadata and runs the model with a forward context that skips compiled
code. Hooks on the attention layers, installed for the pass only, see queries, keys and values after RoPE.

With tensor parallelism each worker's model has some of the attention heads. The cache of a prompt holds the heads of all
workers, so all see the same scores and choose the same rows. The blocks of vLLM's cache hold a worker's own heads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blend.errors import WorkersError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

OnLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called before each layer's attention with its number and fresh queries, keys, values `[rows, heads, head_dim]`.

Queries are this worker's, keys and values those of all workers.
"""
_FITTED = 4096  # positions that rotary frequencies are fitted to


def runs(positions: torch.Tensor) -> list[tuple[int, int]]:
    """First and last of each run of consecutive positions among these sorted ones."""
    rows = positions.cpu()
    lengths = torch.unique_consecutive(rows - torch.arange(rows.shape[0]), return_counts=True)[1]
    last = rows[lengths.cumsum(0) - 1]
    return list(zip((last - lengths + 1).tolist(), last.tolist(), strict=True))


def slots_of(positions: torch.Tensor, tables: Sequence[Sequence[int]], block_size: int) -> torch.Tensor:
    """Cache slots int64 `[prompts x rows]` of the same positions of several prompts, as the engine counts them."""
    blocks = torch.tensor(tables, dtype=torch.int64, device=positions.device)
    return (blocks[:, positions // block_size] * block_size + positions % block_size).flatten()


def batch_of(positions: torch.Tensor, tables: Sequence[Sequence[int]], block_size: int) -> CommonAttentionMetadata:
    """The same rows of several prompts as a batch for vLLM's attention. positions: on the cache's device."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = positions.device
    sequences = runs(positions)
    lengths = [last - first + 1 for first, last in sequences] * len(tables)
    ends = [last + 1 for _, last in sequences] * len(tables)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(ends, dtype=torch.int32)
    blocks = torch.tensor(tables, dtype=torch.int32, device=device)
    slots = slots_of(positions, tables, block_size)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(lengths),
        num_actual_tokens=int(slots.shape[0]),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        block_table_tensor=blocks.repeat_interleave(len(sequences), 0),
        slot_mapping=slots,
        causal=True,
        positions=positions.repeat(len(tables)),
        seq_lens_cpu_upper_bound=seq_lens,
    )


def alike(cache: torch.Tensor, dimension: int, blocks: int) -> torch.Tensor:
    """Zeros with the same memory order of dimensions, and so many blocks in this one; masked values must not be NaN."""
    order = sorted(range(cache.ndim), key=cache.stride, reverse=True)
    shape = list(cache.shape)
    shape[dimension] = blocks
    return torch.empty_permuted(shape, order, dtype=cache.dtype, device=cache.device).zero_()


@contextmanager
def replaced_caches(layers: Sequence[Any], memory: torch.Tensor) -> Iterator[None]:
    """Meanwhile this memory is the cache of every layer, and its own cannot be reached.

    A layer's contents are lost when the next one runs, so earlier rows are written again for every layer of a pass.
    """
    caches = [layer.kv_cache for layer in layers]
    try:
        for layer in layers:
            layer.kv_cache = memory
        yield
    finally:
        for layer, cache in zip(layers, caches, strict=True):
            layer.kv_cache = cache


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
    """The rotary frequencies of the model's tables, float64 `[pairs]` in radians per position each."""
    return [
        from_table(table).to(table.device) for name, table in model.named_buffers() if name.endswith("cos_sin_cache")
    ]


def from_table(table: torch.Tensor) -> torch.Tensor:
    """Frequencies `[pairs]` from a table `[positions, 2 * pairs]` of cosines and sines of position times frequency.

    A common factor does not matter. A line through all angles is as exact as the model's single-precision numbers.
    """
    cos, sin = table[:_FITTED].detach().double().cpu().chunk(2, dim=-1)
    angles = torch.from_numpy(np.unwrap(torch.atan2(sin, cos).numpy(), axis=0))  # no frequency exceeds half a turn
    places = torch.arange(angles.shape[0], dtype=torch.float64)[:, None]
    return ((places * angles).sum(0) / places.square().sum()).float().double()


class WorkerGroup:
    """The workers of one model.

    Args:
        kv_heads: KV heads of the whole model.
        group: vLLM's coordinator of tensor parallelism.

    Attributes:
        size: number of workers.
        rank: number of this one.

    """

    def __init__(self, kv_heads: int, group: Any) -> None:
        self._group = group
        self.size = group.world_size
        self.rank = group.rank_in_group
        # With fewer heads than workers, neighbours hold copies of one.
        self._copies = max(1, self.size // kv_heads)
        self._own_heads = max(1, kv_heads // self.size)

    @classmethod
    def of(cls, config: Any) -> WorkerGroup:
        """The one of this process. config: the `VllmConfig`."""
        from vllm.distributed import get_tp_group

        return cls(config.model_config.get_total_num_kv_heads(), get_tp_group())

    def all_heads(self, states: torch.Tensor) -> torch.Tensor:
        """The query heads of all workers `[rows, heads, head_dim]`. states: those of this one."""
        gathered: torch.Tensor = self._group.all_gather(states.contiguous(), dim=1)
        return gathered

    def all_kv_heads(self, states: torch.Tensor) -> torch.Tensor:
        """The KV heads of all workers, each once, `[rows, kv_heads, head_dim]`. states: those of this one."""
        return self.all_heads(states)[:, :: self._copies]

    def own_kv_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Those of this worker among the KV heads of all, `[rows, kv_heads, head_dim]`."""
        first = self.rank // self._copies * self._own_heads
        return states[:, first : first + self._own_heads]

    def from_first(self, value: Any) -> Any:
        """What the first worker says."""
        return self._group.broadcast_object(value)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """The first worker's values, in all workers: rounding must not lead to different decisions."""
        values = values.contiguous()
        group = self._group.cpu_group if values.device.type == "cpu" else self._group.device_group
        torch.distributed.broadcast(values, src=self._group.ranks[0], group=group)
        return values

    def together(self, step: Callable[[], Hashable]) -> None:
        """Do a step without passes, once in every worker. It may fail in one of them alone.

        step: returns what must be the same in all workers. Raises what it raises, and `WorkersError` where it failed in another
        worker or returned something else there.
        """
        try:
            outcome = step()
        except Exception as error:
            self._gathered(str(error) or type(error).__name__)
            raise
        outcomes = self._gathered((outcome,))
        if any(result != outcomes[0] for result in outcomes):
            failures = [result for result in outcomes if isinstance(result, str)]
            reason = failures[0] if failures else "the workers see different caches"
            raise WorkersError(f"another worker cannot load this prompt: {reason}")

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group.cpu_group)
        return values


class RowModel:
    """A worker's model that runs rows.

    Args:
        config: the `VllmConfig`.
        names: of the attention layers that have a cache.

    Attributes:
        layers: their modules, in order.
        workers: that compute the model together.
        device: where the cache lies.

    Raises:
        ValueError: the module or its blocks cannot be found.

    """

    def __init__(self, config: Any, names: Iterable[str]) -> None:
        from vllm.model_executor.models.utils import extract_layer_index

        self.config = config
        self._names = sorted(names, key=extract_layer_index)
        modules = config.compilation_config.static_forward_context
        self.layers = [modules[name] for name in self._names]
        self.workers = WorkerGroup.of(config)
        self.block_size = config.cache_config.block_size
        cache = self.layers[0].kv_cache
        self.device: torch.device = cache.device
        self.model = model_of(self.layers)
        self._block_dimension = cache.shape.index(config.cache_config.num_gpu_blocks)
        builder = self.layers[0].get_attn_backend().get_builder_cls()
        with self._configured():
            self._builder = builder(self.layers[0].get_kv_cache_spec(config), self._names, config, self.device)

    @torch.inference_mode()
    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        tables: Sequence[Sequence[int]],
        on_layer: OnLayer,
        *,
        in_scratch: bool,
        shift: int = 0,
    ) -> torch.Tensor:
        """Run the same rows of several prompts. Their KV is written; what they see must be in their blocks.

        Args:
            token_ids: int64 `[prompts, rows]`.
            positions: sorted int64 `[rows]`.
            tables: the blocks of each prompt.
            on_layer: see `OnLayer`; what it raises ends the pass.
            in_scratch: whether the blocks are scratch memory, and not the engine's.
            shift: added to the rotary positions.

        Returns:
            Hidden states behind the last layer, `[prompts x rows, hidden]`.

        """
        from vllm.forward_context import set_forward_context

        batch = batch_of(positions, tables, self.block_size)
        with ExitStack() as stack:
            if in_scratch:
                memory = alike(self.layers[0].kv_cache, self._block_dimension, sum(map(len, tables)))
                stack.enter_context(replaced_caches(self.layers, memory))
            stack.enter_context(self._configured())
            metadata = self._builder.build(0, batch)
            stack.enter_context(
                set_forward_context(
                    dict.fromkeys(self._names, metadata),
                    self.config,
                    num_tokens=batch.num_actual_tokens,
                    slot_mapping=dict.fromkeys(self._names, batch.slot_mapping),
                    skip_compiled=True,
                )
            )
            stack.enter_context(self._hooked(on_layer))
            ids = token_ids.flatten().to(torch.int32)
            hidden: torch.Tensor = self.model(input_ids=ids, positions=batch.positions + shift)
            return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of hidden states `[rows, hidden]`, `[rows, vocab]`."""
        with self._configured():
            logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits

    @torch.inference_mode()
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put KV `[rows, kv_heads, head_dim]`, keys after RoPE, into a layer's cache with the engine's own writer.

        Of the heads of all workers each writes its own. Only the writer knows how a block is laid out (packed on CPUs, NHD or
        HND).
        """
        module = self.layers[layer]
        keys = self.workers.own_kv_heads(keys).contiguous()
        values = self.workers.own_kv_heads(values).contiguous()
        module.impl.do_kv_cache_update(module, keys, values, module.kv_cache, slots)

    def _configured(self) -> AbstractContextManager[None]:
        """VLLM's configuration, set while its code runs."""
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[None] = set_current_vllm_config(self.config)
        return context

    @contextmanager
    def _hooked(self, on_layer: OnLayer) -> Iterator[None]:
        def before_attention(index: int, layer: Any, states: tuple[torch.Tensor, ...]) -> None:
            query = states[0].view(-1, layer.num_heads, layer.head_size)
            key = states[1].view(-1, layer.num_kv_heads, layer.head_size)
            value = states[2].view(-1, layer.num_kv_heads, layer.head_size_v)
            on_layer(index, query, self.workers.all_kv_heads(key), self.workers.all_kv_heads(value))

        handles = [
            layer.register_forward_pre_hook(partial(before_attention, index)) for index, layer in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
