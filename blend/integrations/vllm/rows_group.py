"""The processes that one model is split over by heads (tensor parallelism), and what passes between them.

Each has its own heads of queries, keys and values; the forward pass of all is one, with collectives in it. What passes is on
vLLM's own group of these processes, in the engine's thread alone, where vLLM's collectives of this step are before or after it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch

from blend.integrations.vllm.contract import Site


class Write(NamedTuple):
    """Stored KV is to be written to a layer's blocks; keys and values of all heads follow. Their shapes, and where they go."""

    layer: int
    slots: torch.Tensor
    keys: torch.Size
    values: torch.Size
    dtype: torch.dtype


class Logits(NamedTuple):
    """Logits of hidden states are to be computed, which follow. Their shape."""

    shape: torch.Size
    dtype: torch.dtype


class Layer(Enum):
    """Of a pass, in a layer before its attention: it goes on, or ends here."""

    GO_ON = "go on"
    HALT = "halt"


class Done(NamedTuple):
    """What was to be done by all processes has ended. error: what was raised; None where nothing was."""

    error: Exception | None = None


class Group:
    """A model's processes. group: vLLM's own. kv_heads: of the whole model; fewer than processes are held several times."""

    def __init__(self, group: Any, kv_heads: int) -> None:
        self._group = group
        self._copies = max(1, group.world_size // kv_heads)

    @property
    def leads(self) -> bool:
        """Whether this is the first of them."""
        return bool(self._group.rank_in_group == 0)

    def tell(self, told: object) -> None:
        """From the first process to all others, which `hear` it."""
        self._group.broadcast_object(told)

    def hear(self) -> Any:
        """What the first process tells next."""
        return self._group.broadcast_object()

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the first process, into tensors of its shape at the others."""
        return self._group.broadcast(tensor)  # type: ignore[no-any-return]

    def gathered(self, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """States of each process's heads, `[rows, heads, width]` each: of all processes, at all processes, in one exchange.

        Not vLLM's `gather`: in its CPU build a process that sends does not wait for the one that collects. Two in a row, behind
        whatever came before, overwrite what was not read yet.
        """
        rows, widths = states[0].shape[0], [one[0].numel() for one in states]
        own = torch.cat([one.reshape(rows, -1) for one in states], dim=1)
        whole = self._group.all_gather(own, dim=0).view(self._group.world_size, rows, -1)
        parts = whole.split(widths, dim=2)
        return tuple(
            part.reshape(-1, *one.shape).transpose(0, 1).reshape(rows, -1, one.shape[2]).to(one.dtype)
            for part, one in zip(parts, states, strict=True)
        )

    def once(self, states: torch.Tensor) -> torch.Tensor:
        """Of gathered keys or values: heads that several processes hold are there once."""
        return states[:, :: self._copies]

    def own(self, states: torch.Tensor) -> torch.Tensor:
        """Of keys or values of all heads `[rows, kv_heads, head_dim]`, those of this process."""
        each = states.shape[1] * self._copies // self._group.world_size
        first = self._group.rank_in_group // self._copies * each
        return states[:, first : first + each].contiguous()

    def agreed(self, refusal: str) -> str:
        """The first refusal of any process; empty where none has one. Called by all."""
        told = [""] * self._group.world_size
        torch.distributed.all_gather_object(told, refusal, group=self._group.cpu_group)
        return next(filter(None, told), "")


def group_of(site: Site) -> Group:
    """The processes of a worker's model."""
    from vllm.distributed import get_tp_group

    return Group(get_tp_group(), site.config.model_config.get_total_num_kv_heads())
