"""The one value of a forward pass over rows: which rows of which prompts run, where they write, and under which mask.

Driver, cache and attention share it, and it changes in one place: when a selector narrows the rows at some layer. The rows of
several prompts lie one after another in one flat sequence; every prompt keeps a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch

from blend.config import MaskMode
from blend.errors import ConfigError
from blend.model.cache import BlendedCache

if TYPE_CHECKING:
    from blend.model.attention import AttentionCall

FreshKV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Narrowing:
    """Go on with fewer rows of a prompt from `layer` on.

    choose: called with the layer's fresh keys and values of all current rows (`[1, kv_heads, rows, head_dim]`), returns the
    sorted positions to keep. Only the layer's norm and QKV projection run before it decides. keep_kv: whether the fresh KV of
    the rows that go is written to the cache.
    """

    layer: int
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keep_kv: bool = False


@dataclass(frozen=True)
class RowRequest:
    """Rows of one prompt that a forward pass computes.

    token_ids: `[batch, rows]`; a batch shares positions and mask, and has the pass to itself. positions: sorted int64 `[rows]`.
    cache: what the rows read and write; it holds the KV of every earlier row that they are to see. narrowings: in the order of
    their layers. observe: called with every layer's attention before it is computed; what it raises ends the pass.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cache: BlendedCache
    narrowings: tuple[Narrowing, ...] = ()
    observe: Callable[[AttentionCall], None] | None = None


class Resume(Enum):
    """Where steps that have no rows to be run are to be resumed, with `next`.

    BESIDE: in any thread, where nobody else waits: what follows may wait for a store. HERE: in the thread that runs the
    decoder. TURN: the same, when others have had a pass: what follows is one of its own.
    """

    BESIDE = "beside"
    HERE = "here"
    TURN = "turn"


_Result = TypeVar("_Result")
RowSteps = Generator[RowRequest, torch.Tensor, _Result]
"""Yields rows to run, is sent their logits, ends with a result: work of the decoder that a scheduler interleaves."""
Steps = Generator[RowRequest | Resume, torch.Tensor, _Result]
"""The same, of work that may wait for a store, or run the decoder itself; begun in the thread that runs the decoder."""


class Run:
    """Sorted positions `[rows]`; a contiguous run is written as a slice, several times cheaper than an indexed write."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions
        first, last = int(positions[0]), int(positions[-1])
        self.stop = last + 1
        self._slice = slice(first, last + 1) if last + 1 - first == positions.shape[0] else None

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        """Put `states` `[batch, kv_heads, rows, head_dim]` into `buffer`, as long as a prompt may be, at these rows."""
        if self._slice is not None:
            buffer[:, :, self._slice] = states
        else:
            buffer.index_copy_(2, self.positions, states.to(buffer.dtype))


class ForwardPass:
    """What is running: the requests, and the rows of each that are still there.

    one_copy: whether the model leaves keys and values alone between its cache and its attention, so that the attention of
    several prompts may read their caches where they are instead of one copy side by side. untouched: whether this pass found
    it so.
    """

    def __init__(self, requests: Sequence[RowRequest], mask: MaskMode = "exact", *, one_copy: bool = False) -> None:
        if len(requests) > 1 and (mask != "exact" or any(request.token_ids.shape[0] != 1 for request in requests)):
            raise ConfigError(
                "prompts run together only one sequence each and under the exact mask; run them one by one"
            )
        self.requests = tuple(requests)
        self.mask = mask
        self.one_copy = one_copy
        self.runs = [Run(request.positions) for request in requests]
        self.untouched = True
        self.handed: list[FreshKV] = []
        self.returned: FreshKV | None = None

    @property
    def counts(self) -> list[int]:
        """Rows of each request."""
        return [run.positions.shape[0] for run in self.runs]

    @property
    def token_ids(self) -> torch.Tensor:
        """Of all rows as the requests gave them, `[batch, rows]`."""
        return torch.cat([request.token_ids for request in self.requests], dim=1)

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of all rows that are still there, `[batch, rows]`."""
        flat = torch.cat([run.positions for run in self.runs])
        return flat.expand(self.requests[0].token_ids.shape[0], -1)

    def spans(self) -> Iterator[slice]:
        """Where each request's rows lie in the flat sequence."""
        ends = list(accumulate(self.counts, initial=0))
        return map(slice, ends, ends[1:])

    def fresh(self, keys: torch.Tensor, values: torch.Tensor) -> list[FreshKV]:
        """KV of all rows `[batch, kv_heads, rows, head_dim]`, request by request."""
        return [(keys[:, :, span], values[:, :, span]) for span in self.spans()]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> FreshKV:
        """Write a layer's fresh KV into each request's cache; what the model's attention is then given."""
        pairs = zip(self.requests, self.runs, self.fresh(keys, values), strict=True)
        self.handed = [request.cache.layers[layer].write_rows(run, *kv) for request, run, kv in pairs]
        if len(self.handed) == 1:
            self.returned = self.handed[0]
        elif self.one_copy:
            self.returned = keys, values  # only to be recognised: attention reads the caches themselves
        else:
            self.returned = torch.cat([k for k, _ in self.handed], 2), torch.cat([v for _, v in self.handed], 2)
        return self.returned

    def held(self, keys: torch.Tensor, values: torch.Tensor) -> list[FreshKV]:
        """All keys and values that each request's rows may see, from what the model's attention is called with."""
        if self.left_alone(keys, values):
            return self.handed
        self.untouched = False
        lengths = [k.shape[2] for k, _ in self.handed]
        if sum(lengths) != keys.shape[2] or (self.one_copy and len(lengths) > 1):
            raise RuntimeError("the model's attention was not called with the KV of the layer that was just written")
        return list(zip(torch.split(keys, lengths, 2), torch.split(values, lengths, 2), strict=True))

    def left_alone(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are the tensors that the cache returned for this layer."""
        return self.returned is not None and all(map(_same, self.returned, (keys, values)))

    def narrow(self, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keep these sorted positions of each request; their places among the rows so far, int64 `[rows kept]`."""
        places = []
        for number, (span, rows) in enumerate(zip(list(self.spans()), kept, strict=True)):
            places.append(torch.searchsorted(self.runs[number].positions, rows) + span.start)
            if rows is not self.runs[number].positions:
                self.runs[number] = Run(rows)
        return torch.cat(places)


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return mine is theirs or (
        mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape and mine.stride() == theirs.stride()
    )


_running: ContextVar[ForwardPass | None] = ContextVar("kvblend_forward_pass", default=None)


@contextmanager
def running(forward: ForwardPass) -> Iterator[None]:
    """Make `forward` the pass that attention works for, in this thread and task only."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def current_pass() -> ForwardPass:
    """The pass that runs in this thread. Raises RuntimeError where none does."""
    forward = _running.get()
    if forward is None:
        raise RuntimeError("row_attention runs only inside a kvblend forward pass")
    return forward
