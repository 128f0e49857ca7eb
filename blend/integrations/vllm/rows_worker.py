"""Running rows on the model of a vLLM worker: its own modules, attention and cache writer, and hooks that see what passes.

Nothing of vLLM is replaced: a pass makes attention metadata for its rows, and runs the model with a forward context that
skips compiled code. Hooks on the attention layers, there for the pass alone, see queries, keys and values after RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from blend.integrations.vllm.contract import Site
from blend.integrations.vllm.rows_batch import PromptRows, batch_of
from blend.integrations.vllm.rows_find import model_of
from blend.integrations.vllm.rows_scratch import Scratch, block_dimension
from blend.model.forward import Halt

See = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called before the attention of every layer with its number and the fresh queries, keys, values `[rows, heads, head_dim]`."""


class RowPass(NamedTuple):
    """Rows of prompts that run together.

    token_ids: of all rows of all prompts, int64 `[rows]`. scratch: how many blocks of scratch memory the prompts lie in; 0
    where they lie in the engine's. queries: whether queries are looked at. shift: of rotary positions, past those of the rows.
    """

    token_ids: torch.Tensor
    prompts: tuple[PromptRows, ...]
    scratch: int = 0
    queries: bool = False
    shift: int = 0


class RowModel:
    """A worker's model as something that runs rows. site: the worker's attention layers.

    model: the module that holds them and computes logits. Raises ValueError where there is none, or its blocks cannot be told.
    """

    def __init__(self, site: Site) -> None:
        self.site, self.model = site, model_of(site.layers)
        backend, spec = site.layers[0].get_attn_backend(), site.layers[0].get_kv_cache_spec(site.config)
        with _configured(site):
            self._builder = backend.get_builder_cls()(spec, list(site.names), site.config, site.device)
        blocks = int(site.config.cache_config.num_gpu_blocks)
        block_dimension(site.layers[0].kv_cache, blocks)
        self._scratch = Scratch(site.layers, blocks)

    @torch.inference_mode()
    def run(self, rows: RowPass, see: See) -> torch.Tensor | None:
        """Run rows; hidden states of the last layer `[rows, hidden]`, or None where `see` ended the pass with `Halt`.

        Their KV is written, and what they see must be in their blocks.
        """
        scratch = self._scratch.bound(rows.scratch) if rows.scratch else nullcontext()
        with suppress(Halt), scratch:
            return self._forward(rows, see)
        return None

    @torch.inference_mode()
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put KV of all heads `[rows, kv_heads, head_dim]` into a layer's cache, see `Site.write`; within a pass too."""
        self.site.write(layer, keys, values, slots)

    def _forward(self, rows: RowPass, see: See) -> torch.Tensor:
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
            stack.enter_context(_seen(site.layers, see))
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
    """Set vLLM's configuration while its code runs; imported here, so that this module loads without vLLM."""
    from vllm.config import set_current_vllm_config

    found: AbstractContextManager[None] = set_current_vllm_config(site.config)
    return found


@contextmanager
def _seen(layers: Sequence[Any], see: See) -> Iterator[None]:
    handles = [
        layer.register_forward_pre_hook(partial(_hook, see, index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(see: See, index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    see(
        index,
        named["query"].view(-1, layer.num_heads, layer.head_size),
        named["key"].view(-1, layer.num_kv_heads, layer.head_size),
        named["value"].view(-1, layer.num_kv_heads, layer.head_size_v),
    )
