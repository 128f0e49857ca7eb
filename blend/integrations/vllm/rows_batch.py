"""Rows scattered over prompts as a batch that vLLM's attention takes: every run of consecutive rows is a sequence of its own.

Such a sequence is as long as its last row is deep, and all runs of a prompt have the same block table. Causal attention over a
paged cache then lets every row see exactly the rows of its prompt up to its own, whatever wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class PromptRows(NamedTuple):
    """Rows of one prompt to be computed: sorted positions, int64 `[rows]`, and the blocks that the prompt lies in."""

    positions: torch.Tensor
    blocks: Sequence[int]


def slots_of(positions: torch.Tensor, blocks: Sequence[int], block_size: int) -> torch.Tensor:
    """Where rows at these positions lie in the cache, int64 `[rows]`, as the engine counts slots."""
    table = torch.tensor(tuple(blocks), dtype=torch.int64, device=positions.device)
    return table[positions // block_size] * block_size + positions % block_size


def batch_of(prompts: Sequence[PromptRows], block_size: int, device: torch.device) -> CommonAttentionMetadata:
    """The rows of several prompts, one after another."""
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


def runs(positions: torch.Tensor) -> list[tuple[int, int]]:
    """First and last of every run of consecutive positions among these sorted ones."""
    if not positions.shape[0]:
        return []
    here = positions.cpu()
    cuts = (here[1:] != here[:-1] + 1).nonzero()[:, 0]
    last = torch.cat((cuts, cuts.new_tensor([here.shape[0] - 1])))
    first = torch.cat((cuts.new_tensor([0]), cuts + 1))
    return list(zip(here[first].tolist(), here[last].tolist(), strict=True))


def _padded(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    widest = max(map(len, tables))
    kinds = {id(table): [*table, *[0] * (widest - len(table))] for table in tables}
    return torch.tensor([kinds[id(table)] for table in tables], dtype=torch.int32)
