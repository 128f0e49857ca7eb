"""A forward pass over chosen rows: what to compute, where KV is written, and the attention of scattered rows.

The rows of several prompts lie one after another in one flat sequence; every prompt keeps its own cache. `ForwardPass` holds
the state that cache and attention share. It changes only when a selector narrows the rows at some layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from blend.config import MaskMode
from blend.errors import ConfigError, UnsupportedModelError
from blend.model.cache import KV, BlendedCache, Run
from blend_kernels import attention_mass, selective_attention

# Arguments of other kinds of attention; a model that passes one is refused.
_UNSUPPORTED = ("position_bias", "alibi", "block_mask", "head_mask")


@dataclass(frozen=True)
class Narrowing:
    """Continue with fewer rows of a prompt from `layer` on.

    choose: gets the layer's fresh keys and values of all current rows, `[1, kv_heads, rows, head_dim]`, and returns the sorted
    positions to keep. Only the layer's norm and QKV projection run before. keep_kv: write the fresh KV of dropped rows.
    """

    layer: int
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keep_kv: bool = False


@dataclass(frozen=True)
class RowRequest:
    """Rows of one prompt that a forward pass computes.

    token_ids: `[batch, rows]`; a batch shares positions and has the pass to itself. positions: sorted int64 `[rows]`.
    cache: holds the KV of every earlier row that these rows see; their own is written to it. narrowings: by ascending layer.
    observe: called with every layer's attention before it is computed; an exception from it ends the pass.
    await_layer: called with a layer's index before that layer of `cache` is used; it returns when the stored KV is there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cache: BlendedCache
    narrowings: tuple[Narrowing, ...] = ()
    observe: Callable[[AttentionCall], None] | None = None
    await_layer: Callable[[int], None] | None = None

    def write(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write fresh KV into a layer of the cache, once its stored KV is there; see `BlendedLayer.write_rows`."""
        if self.await_layer is not None:
            self.await_layer(layer)
        return self.cache.layers[layer].write_rows(run, keys, values)  # type: ignore[no-any-return]


class Resume(Enum):
    """How to go on with steps that have no rows to run.

    BACKGROUND: in any thread; what follows may wait for a store. ENGINE: in the thread that runs the decoder.
    NEXT_TURN: in that thread, after other prompts had a pass; what follows runs the decoder itself.
    """

    BACKGROUND = "background"
    ENGINE = "engine"
    NEXT_TURN = "next_turn"


_Result = TypeVar("_Result")
RowSteps = Generator[RowRequest, torch.Tensor, _Result]
"""Work of the decoder that a scheduler interleaves: yields rows to run, is sent their logits, ends with a result."""
Steps = Generator[RowRequest | Resume, torch.Tensor, _Result]
"""`RowSteps` that may also wait for a store or run the decoder itself.

How to drive it: start it in the decoder's thread. For a `RowRequest`, run the rows, alone or in one pass with rows of other
prompts, and `send` the logits; if they could not be run, `throw` the error in. For a `Resume`, call `next` where and when it
says. `close` it when the result is no longer wanted; that may wait for the store.
"""


class ForwardPass:
    """State of a running pass: the requests, and the rows of each that are still computed.

    reads_caches: the model hands KV from its cache to its attention unchanged. Attention over several prompts then reads their
    caches in place instead of one concatenated copy. unchanged: whether that held for every layer of this pass so far.
    """

    def __init__(self, requests: Sequence[RowRequest], mask: MaskMode = "exact", *, reads_caches: bool = False) -> None:
        if len(requests) > 1 and (mask != "exact" or any(request.token_ids.shape[0] != 1 for request in requests)):
            raise ConfigError(
                "prompts run together only one sequence each and under the exact mask; run them one by one"
            )
        self.requests = tuple(requests)
        self.mask = mask
        self.reads_caches = reads_caches
        self.runs = [Run(request.positions) for request in requests]
        self.unchanged = True
        self.views: list[KV] = []
        self.returned: KV | None = None

    @property
    def counts(self) -> list[int]:
        """Rows of each request."""
        return [run.positions.shape[0] for run in self.runs]

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids of all rows that the requests started with, `[batch, rows]`."""
        return torch.cat([request.token_ids for request in self.requests], dim=1)

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of all rows still computed, `[batch, rows]`."""
        flat = torch.cat([run.positions for run in self.runs])
        return flat.expand(self.requests[0].token_ids.shape[0], -1)

    def spans(self) -> Iterator[slice]:
        """Where each request's rows lie in the flat sequence."""
        ends = list(accumulate(self.counts, initial=0))
        return map(slice, ends, ends[1:])

    def fresh(self, keys: torch.Tensor, values: torch.Tensor) -> list[KV]:
        """KV of all rows `[batch, kv_heads, rows, head_dim]`, request by request."""
        return [(keys[:, :, span], values[:, :, span]) for span in self.spans()]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write a layer's fresh KV into each request's cache. Returns the KV that the model's attention gets."""
        pairs = zip(self.requests, self.runs, self.fresh(keys, values), strict=True)
        self.views = [request.write(layer, run, *kv) for request, run, kv in pairs]
        if len(self.views) == 1:
            self.returned = self.views[0]
        elif self.reads_caches:
            self.returned = keys, values  # recognised by `keys_and_values`, which gives attention the caches
        else:
            self.returned = torch.cat([k for k, _ in self.views], 2), torch.cat([v for _, v in self.views], 2)
        return self.returned

    def keys_and_values(self, keys: torch.Tensor, values: torch.Tensor) -> list[KV]:
        """Keys and values of each request, from those that the model passed to its attention."""
        if self._is_returned(keys, values):
            return self.views
        self.unchanged = False
        lengths = [k.shape[2] for k, _ in self.views]
        if sum(lengths) != keys.shape[2] or (self.reads_caches and len(lengths) > 1):
            raise RuntimeError("the model's attention was not called with the KV of the layer that was just written")
        return list(zip(torch.split(keys, lengths, 2), torch.split(values, lengths, 2), strict=True))

    def _is_returned(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are the tensors that the cache returned for this layer."""
        return self.returned is not None and all(map(_same, self.returned, (keys, values)))

    def narrow(self, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keep these sorted positions of each request. Returns their indices among the rows so far, int64 `[rows kept]`."""
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


class PassCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The cache that the model sees during a pass: each layer's KV goes to the caches of the pass's requests.

    halt_at: this layer's `update` writes its KV, then ends the pass with `Halt`.
    """

    def __init__(self, forward: ForwardPass, layers: int, halt_at: int | None = None) -> None:
        super().__init__(layers=[PassLayer(forward, index, halts=index == halt_at) for index in range(layers)])


class Halt(BaseException):
    """Ends a forward pass from inside a layer, with the layer's fresh KV; the driver catches it."""

    def __init__(self, fresh: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.fresh = fresh


class PassLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of a `PassCache`. probing: the next `update` raises `Halt` with the fresh KV instead of writing it."""

    is_sliding = False
    is_croppable = False

    def __init__(self, forward: ForwardPass, index: int, *, halts: bool) -> None:
        super().__init__()
        self._forward, self._index, self._halts = forward, index, halts
        self.probing = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the requests' caches allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' fresh KV. Returns the KV for the model's attention."""
        if self.probing:
            raise Halt((key_states, value_states))
        written = self._forward.write(self._index, key_states, value_states)
        if self._halts:
            raise Halt((key_states, value_states))
        return written

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys of the longest request, and their offset; no mask is built from it."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Rows in use before this pass, of the longest request."""
        return max(int(request.cache.layers[self._index].length) for request in self._forward.requests)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


_running: ContextVar[ForwardPass | None] = ContextVar("kvblend_forward_pass", default=None)


@contextmanager
def running(forward: ForwardPass) -> Iterator[None]:
    """Make `forward` the current pass of this thread and task."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def current_pass() -> ForwardPass:
    """The current pass of this thread. Raises RuntimeError without one."""
    forward = _running.get()
    if forward is None:
        raise RuntimeError("row_attention runs only inside a kvblend forward pass")
    return forward


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention as the model calls it.

    query: `[batch, heads, rows, head_dim]`. key, value: `[batch, kv_heads, keys, head_dim]`. Row r sees keys up to
    `positions[r]`, of those the last `window` if there is a window. sinks: `[heads]`, logits that take attention only.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    mask: MaskMode
    window: int | None
    softcap: float | None
    scale: float | None
    sinks: torch.Tensor | None = None

    @property
    def _rule(self) -> dict[str, Any]:
        return {
            "mode": self.mask,
            "window": self.window,
            "softcap": self.softcap,
            "scale": self.scale,
            "sinks": self.sinks,
        }

    def output(self) -> torch.Tensor:
        """Attention's output, `[batch, heads, rows, value_dim]` over memory `[batch, rows, heads, value_dim]`."""
        out: torch.Tensor = selective_attention(self.query, self.key, self.value, self.positions, **self._rule)
        return out

    def mass(self, *, per_head: bool = False, reduce: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """Attention that each key receives from all rows (their sum or maximum), fp32 `[batch, (heads,) keys]`."""
        return attention_mass(
            self.query,
            self.key,
            self.positions,
            **self._rule,
            per_head=per_head,
            reduce=reduce,
        )


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the current pass's rows, request by request, with the signature of transformers' `AttentionInterface`.

    The pass comes from a context variable: not every architecture hands keyword arguments of the forward pass to attention.
    Returns `[batch, rows, heads, value_dim]` and no weights.
    """
    forward = current_pass()
    if attention_mask is not None or any(others.get(name) is not None for name in _UNSUPPORTED):
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a mask or bias of its own to attention, which blended prefill cannot reproduce; "
            "use full prefill for this model"
        )
    layer = int(getattr(module, "layer_idx", -1))
    out = []
    parts = zip(forward.requests, forward.runs, forward.spans(), forward.keys_and_values(key, value), strict=True)
    for request, run, span, (keys, values) in parts:
        call = AttentionCall(
            layer,
            query[:, :, span],
            keys,
            values,
            run.positions,
            forward.mask,
            sliding_window,
            softcap,
            scaling,
            s_aux,
        )
        if request.observe is not None:
            request.observe(call)
        out.append(call.output().transpose(1, 2))
    return torch.cat(out, dim=1) if len(out) > 1 else out[0].contiguous(), None
