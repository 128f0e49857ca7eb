"""What fills a request's cache blocks with blended KV: the contract between vLLM's side of a load and a stage of ours.

The connector finds out which rows vLLM leaves to it, and tells the scheduler how a load ended; a `Stage` does the load. The
first copies KV that the prefill process computed (`blend.integrations.vllm.copied`); others may compute it on the spot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

DAMAGED = "damaged"
"""A figure for vLLM's metrics, not for replies: how many entries of the store a load found damaged."""


class Load(NamedTuple):
    """Rows of one request's prompt whose KV is left to kvblend.

    request: vLLM's id of it. ticket: names what the prefill process holds for it. token_ids: of the whole prompt. blocks: ids
    of the cache blocks that its rows lie in, in order, as many as the prompt needs or more. start, stop: rows `start` to
    `stop - 1` are to be written; those before are in vLLM's cache already, and those behind are computed by vLLM.
    """

    request: str
    ticket: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    start: int
    stop: int


class LoadFailedError(Exception):
    """A load that cannot be done: vLLM computes these rows itself. The message is one line for the operator."""


class ModelRefusedError(ValueError):
    """A stage cannot work with a model. The message is one line for the operator."""


@dataclass(frozen=True)
class Site:
    """What a stage works on in one worker process of vLLM.

    config: the `VllmConfig`. names: of the attention layers, in the order of the decoder's layers. layers: their modules, out
    of the compilation config's static forward context. block_size: rows of a cache block.
    """

    config: Any
    names: tuple[str, ...]
    layers: tuple[Any, ...]
    block_size: int

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.layers[0].kv_cache.device  # type: ignore[no-any-return]

    def slots(self, load: Load, rows: torch.Tensor) -> torch.Tensor:
        """Where rows of a request, int64 positions `[rows]`, lie in the cache, int64 `[rows]`, as the engine counts slots."""
        blocks = torch.tensor(load.blocks, dtype=torch.int64, device=rows.device)
        return blocks[rows // self.block_size] * self.block_size + rows % self.block_size

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put KV `[rows, kv_heads, head_dim]`, keys after RoPE, into a layer's cache, by the engine's own writer.

        The writer alone knows how a block is laid out (packed on CPUs, NHD or HND, quantised).
        """
        module = self.layers[layer]
        module.impl.do_kv_cache_update(module, keys, values, module.kv_cache, slots)


class Stage(Protocol):
    """Fills requests' blocks in one worker process.

    apart: whether `fill` may run in a thread beside forward passes; otherwise it runs between them, in the engine's own thread.
    options: which of the connector's options are its own.
    """

    apart: bool
    options: frozenset[str]

    def fill(self, load: Load) -> dict[str, Any] | None:
        """Write the KV of the rows of `load` in every layer; figures of it, for the reply and for vLLM's metrics.

        When it returns, every forward pass that begins afterwards sees it. Other requests' blocks are never written. It may be
        called again for the same request after a preemption, with other blocks and another start. Raises `LoadFailedError`;
        whatever it has written by then is not used.
        """

    def rest(self, *, alone: bool) -> None:
        """A step of the engine begins in which nothing is loaded: there is time for what can wait. Not called where `apart`.

        alone: no request computes anything in this step; otherwise running answers wait for what is done here.
        """

    @property
    def unfinished(self) -> bool:
        """Whether `rest` has more to do: the engine then goes on with its steps when all requests have ended."""
        ...

    def close(self) -> None:
        """The worker process ends."""


class MakeStage(Protocol):
    """Makes a stage for a worker process, from its own options.

    Raises `ModelRefusedError` for a model, and `ValueError`, in one line, for options that are wrong.
    """

    apart: bool
    options: frozenset[str]

    def __call__(self, site: Site, options: Mapping[str, Any]) -> Stage:
        """See above."""
