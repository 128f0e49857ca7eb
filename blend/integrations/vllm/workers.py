"""Tensor parallelism: what the worker processes of one model share.

Each worker's model has some of the attention heads. The cache of a prompt holds the heads of all workers, so all see the same
scores and choose the same rows. The blocks of vLLM's cache hold a worker's own heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class LoadFailedError(Exception):
    """A load cannot be done: vLLM computes these rows itself. The message is one line for the operator."""


class ColdError(LoadFailedError):
    """The store holds nothing of the prompt: vLLM computes it, as fast as it can without kvblend."""


class WorkerGroup:
    """The workers of one model.

    Args:
        kv_heads: KV heads of the whole model.
        group: vLLM's coordinator of tensor parallelism; None for a single worker.

    Attributes:
        size: number of workers.
        rank: number of this one.

    """

    def __init__(self, kv_heads: int = 0, group: Any = None) -> None:
        self._group = group
        self.size = 1 if group is None else int(group.world_size)
        self.rank = 0 if group is None else int(group.rank_in_group)
        # With fewer heads than workers, neighbours hold copies of one.
        self._copies = max(1, self.size // max(1, kv_heads))
        self._own_heads = max(1, kv_heads // self.size)

    @classmethod
    def of(cls, config: Any) -> WorkerGroup:
        """The one of this process. config: the `VllmConfig`."""
        if config.parallel_config.tensor_parallel_size == 1:
            return cls()
        from vllm.distributed import get_tp_group

        return cls(config.model_config.get_total_num_kv_heads(), get_tp_group())

    def all_heads(self, states: torch.Tensor) -> torch.Tensor:
        """The query heads of all workers `[rows, heads, head_dim]`. states: those of this one."""
        if self.size == 1:
            return states
        gathered: torch.Tensor = self._group.all_gather(states.contiguous(), dim=1)
        return gathered

    def all_kv_heads(self, states: torch.Tensor) -> torch.Tensor:
        """The KV heads of all workers, each once, `[rows, kv_heads, head_dim]`. states: those of this one."""
        return self.all_heads(states)[:, :: self._copies]

    def own_kv_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Those of this worker among the KV heads of all, `[rows, kv_heads, head_dim]`."""
        if self.size == 1:
            return states
        first = self.rank // self._copies * self._own_heads
        return states[:, first : first + self._own_heads]

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """The first worker's values, in all workers: rounding must not lead to different decisions."""
        if self.size == 1:
            return values
        values = values.contiguous()
        group = self._group.cpu_group if values.device.type == "cpu" else self._group.device_group
        torch.distributed.broadcast(values, src=self._group.ranks[0], group=group)
        return values

    def together(self, step: Callable[[], Hashable]) -> None:
        """Do a step without passes, once in every worker. It may fail in one of them alone.

        step: returns what must be the same in all workers. Raises what it raises, and `LoadFailedError` where it failed in
        another worker or returned something else there.
        """
        if self.size == 1:
            step()
            return
        try:
            outcome = step()
        except Exception as error:
            self._gathered(str(error) or type(error).__name__)
            raise
        outcomes = self._gathered((outcome,))
        if any(other != outcomes[0] for other in outcomes):
            failures = [other for other in outcomes if isinstance(other, str)]
            reason = failures[0] if failures else "the workers see different caches"
            raise LoadFailedError(f"another worker cannot load this prompt: {reason}")

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group.cpu_group)
        return values
