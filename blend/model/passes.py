"""Passes over rows: what is asked of them, and the state of one while it runs.

The rows of several prompts lie one after another in one flat sequence; every prompt keeps its own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from blend.config import MaskMode
from blend.errors import EntryDamagedError
from blend.model.attention import AttentionCall
from blend.model.cache import KV, BlendedCache, Run
from blend.model.recurrent import Operator
from blend_kernels import Positions, decode_attention

OnLayer = Callable[[int], None]
"""Called with the index of a layer."""


def nothing(layer: int) -> None:
    """Nothing to do for a layer."""


@dataclass(frozen=True)
class Narrowing:
    """Continue with fewer rows of a prompt from `layer` on.

    choose: gets the layer's fresh keys and values of all current rows, `[1, kv_heads, rows, head_dim]`, and returns the sorted
    positions to keep. Only the layer's norm and QKV projection run before. keep_kv: write the fresh KV of dropped rows.
    """

    layer: int
    choose: Callable[[Tensor, Tensor], Tensor]
    keep_kv: bool = False


@dataclass(frozen=True)
class RowRequest:
    """Rows of one prompt that a forward pass computes.

    Attributes:
        token_ids: `[batch, rows]`; a batch shares positions and has the pass to itself.
        run: the positions of the rows.
        cache: holds the KV of every earlier row that these rows see; their own is written to it.
        narrowings: by ascending layer.
        observe: called with every layer's attention before it is computed; an exception from it ends the pass.
        await_layer: called with a layer's index before that layer of `cache` is used; returns when the stored KV is there.
        outputs: of how many last rows the logits are wanted.
        on_operator: gets the operator of these rows in each recurrent layer; they must be consecutive.
        mask: see `BlendConfig`.

    """

    token_ids: Tensor
    run: Run
    cache: BlendedCache
    narrowings: tuple[Narrowing, ...] = ()
    observe: Callable[[AttentionCall], None] | None = None
    await_layer: OnLayer = nothing
    outputs: int = 1
    on_operator: Callable[[int, Operator], None] | None = None
    mask: MaskMode = "exact"

    @property
    def positions(self) -> Tensor:
        """The positions of the rows, sorted int64 `[rows]`."""
        return self.run.positions

    def write(self, layer: int, run: Run, keys: Tensor, values: Tensor) -> KV:
        """Write fresh KV into a layer of the cache, once its stored KV is there; see `BlendedLayer.write_rows`."""
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
RowSteps = Generator[RowRequest, Tensor, _Result]
"""Work of the decoder that a scheduler interleaves: yields rows to run, is sent their logits, ends with a result."""
Steps = Generator[RowRequest | Resume, Tensor, _Result]
"""`RowSteps` that may also wait for a store or run the decoder itself.

How to drive it: start it in the decoder's thread. For a `RowRequest`, run the rows, alone or in one pass with rows of other
prompts, and `send` the logits; if they could not be run, `throw` the error in. For a `Resume`, call `next` where and when it
says. `close` it when the result is no longer wanted; that may wait for the store.
"""


def run_steps(steps: Steps[_Result], run: Callable[[RowRequest], Tensor]) -> _Result:
    """Drive steps to their result, one pass after another; see `Steps`."""
    try:
        request = next(steps)
        while True:
            if isinstance(request, Resume):
                request = next(steps)
                continue
            try:
                logits = run(request)
            except EntryDamagedError as error:
                request = steps.throw(error)
            else:
                request = steps.send(logits)
    except StopIteration as end:
        result: _Result = end.value
        return result
    finally:
        steps.close()


class DrivenPass(Protocol):
    """What a running pass does in place of the model's cache and attention."""

    def length(self, layer: int) -> int:
        """Rows in use in a layer before this pass, of the longest prompt."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KV:
        """Write a layer's fresh KV `[batch, kv_heads, rows, head_dim]`. Returns the KV that the model's attention gets."""

    def attend(self, layer: int, query: Tensor, kv: KV, rule: Mapping[str, Any]) -> Tensor:
        """Attention of the rows, `[batch, rows, heads, value_dim]`.

        Args:
            layer: the model's index of the layer.
            query: `[batch, heads, rows, head_dim]`.
            kv: as the model hands them on.
            rule: window, softcap, scale and sinks, as in `selective_attention`.

        """


class ForwardPass:
    """A `DrivenPass` over several requests, and the rows of each that are still computed.

    Attributes:
        reads_caches: whether the model hands KV from its cache to its attention unchanged. Attention over several prompts then
            reads their caches in place instead of one concatenated copy.
        unchanged: whether that held for every layer of this pass so far.
        shares_kv: whether later layers may be handed the KV of earlier ones.

    """

    def __init__(self, requests: Sequence[RowRequest], *, reads_caches: bool = False, shares_kv: bool = False) -> None:
        self.requests = tuple(requests)
        self.reads_caches = reads_caches
        self.runs = [request.run for request in requests]
        self.unchanged = True
        self._shares_kv = shares_kv
        # What the cache returned to the model, and each request's own KV: of the last layer, or of all that others may read.
        self._written: list[tuple[KV, list[KV]]] = []

    @property
    def counts(self) -> list[int]:
        """Rows of each request."""
        return [run.rows for run in self.runs]

    @property
    def token_ids(self) -> Tensor:
        """Token ids of all rows that the requests started with, `[batch, rows]`."""
        return torch.cat([request.token_ids for request in self.requests], dim=1)

    @property
    def position_ids(self) -> Tensor:
        """Positions of all rows still computed, `[batch, rows]`."""
        flat = torch.cat([run.positions for run in self.runs])
        return flat.expand(self.requests[0].token_ids.shape[0], -1)

    def spans(self) -> Iterator[slice]:
        """Where each request's rows lie in the flat sequence."""
        ends = list(accumulate(self.counts, initial=0))
        return map(slice, ends, ends[1:])

    def last_rows(self) -> Tensor:
        """Where the rows lie whose logits are wanted, int64 indices into the flat sequence."""
        device = self.runs[0].positions.device
        rows = []
        for request, span in zip(self.requests, self.spans(), strict=True):
            start = span.stop - request.outputs
            rows.append(torch.arange(start, span.stop, device=device))
        return torch.cat(rows)

    def fresh(self, keys: Tensor, values: Tensor) -> list[KV]:
        """KV of all rows `[batch, kv_heads, rows, head_dim]`, request by request."""
        kvs = []
        for span in self.spans():
            kvs.append((keys[:, :, span], values[:, :, span]))
        return kvs

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KV:
        """Write a layer's fresh KV into each request's cache. Returns the KV that the model's attention gets."""
        pairs = zip(self.requests, self.runs, self.fresh(keys, values), strict=True)
        views = [request.write(layer, run, *kv) for request, run, kv in pairs]
        if len(views) == 1:
            returned = views[0]
        elif self.reads_caches:
            returned = keys, values  # recognised by `keys_and_values`, which gives attention the caches
        else:
            all_keys, all_values = zip(*views, strict=True)
            returned = torch.cat(all_keys, 2), torch.cat(all_values, 2)
        if not self._shares_kv:
            self._written.clear()
        self._written.append((returned, views))
        return returned

    @property
    def has_written(self) -> bool:
        """Whether a layer's KV was written."""
        return bool(self._written)

    def length(self, layer: int) -> int:
        """Rows in use in a layer before this pass, of the longest request."""
        layers = [request.cache.layers[layer] for request in self.requests]
        return max(int(cache_layer.length) for cache_layer in layers)

    def attend(self, layer: int, query: Tensor, kv: KV, rule: Mapping[str, Any]) -> Tensor:
        """Attention of the rows, request by request, `[batch, rows, heads, value_dim]`."""
        out = []
        kvs = self.keys_and_values(*kv)
        parts = zip(self.requests, self.runs, self.spans(), kvs, strict=True)
        for request, run, span, request_kv in parts:
            out.append(_attend(request, run, layer, query[:, :, span], request_kv, rule))
        return torch.cat(out, dim=1) if len(out) > 1 else out[0].contiguous()

    def keys_and_values(self, keys: Tensor, values: Tensor) -> list[KV]:
        """Keys and values of each request, from those that the model passed to its attention."""
        for returned, views in reversed(self._written):
            if all(map(same_memory, returned, (keys, values))):
                return views
        self.unchanged = False
        last_views = self._written[-1][1] if self._written else []
        lengths = [view[0].shape[2] for view in last_views]
        if sum(lengths) != keys.shape[2] or (self.reads_caches and len(lengths) > 1):
            raise RuntimeError("the model's attention was not called with the KV of the layer that was just written")
        all_keys = torch.split(keys, lengths, 2)
        all_values = torch.split(values, lengths, 2)
        return list(zip(all_keys, all_values, strict=True))

    def narrow(self, positions: Sequence[Tensor]) -> Tensor:
        """Keep these sorted positions of each request. Returns their indices among the rows so far, int64 `[rows kept]`."""
        places = []
        runs = []
        for run, span, rows in zip(self.runs, self.spans(), positions, strict=True):
            places.append(torch.searchsorted(run.positions, rows) + span.start)
            is_same = rows is run.positions
            runs.append(run if is_same else Run(rows, None, run.stop, ends=run.ends))
        self.runs = runs
        return torch.cat(places)


def _attend(request: RowRequest, run: Run, layer: int, query: Tensor, kv: KV, rule: Mapping[str, Any]) -> Tensor:
    """Attention of one request's rows, `[batch, rows, heads, value_dim]`."""
    keys = kv[0].shape[2]
    observes = request.observe is not None
    is_plain = not query.is_cuda and not observes and rule["softcap"] is None and rule["sinks"] is None
    is_last_row = run.rows == 1 and run.ends and run.stop == keys
    if is_plain and is_last_row:
        decoded = decode_attention(query, *kv, window=rule["window"], scale=rule["scale"])
        return decoded.transpose(1, 2)
    rows = run.shared
    if request.mask == "bottom-right":
        rows = Positions(torch.arange(keys - run.rows, keys, device=query.device))
    call = AttentionCall(layer, query, *kv, rows, rule)
    if request.observe is not None and not query.is_cuda:
        request.observe(call)
    output, lse = call.attend()
    if request.observe is not None and query.is_cuda:
        request.observe(replace(call, lse=lse))  # with which it reads the keys once
    return output.transpose(1, 2)


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same numbers at the same addresses."""
    if first is second:
        return True
    is_alike = first.shape == second.shape and first.stride() == second.stride()
    return is_alike and first.data_ptr() == second.data_ptr()


class Halt(BaseException):
    """Ends a forward pass from inside a layer, with the layer's fresh KV; the driver catches it."""

    def __init__(self, fresh: KV) -> None:
        self.fresh = fresh


class Narrower:
    """Cuts row-shaped arguments of a decoder layer (hidden states, cos and sin, position ids) to the kept rows.

    Arguments made before the first layer have all rows; hidden states have those that the last layer ran on. The number of rows
    of a tensor says which.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._index: dict[int, Tensor] = {}
        self._cut: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, places: Tensor) -> None:
        """From now on cut to the rows at these indices `[rows]` of the rows kept so far."""
        self._index = {rows: index[places] for rows, index in self._index.items()}
        self._index[self._rows] = places
        self._rows = places.shape[0]
        self._index.pop(self._rows, None)
        self._cut.clear()

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a layer's forward pass, cut to the kept rows."""
        cut_kwargs = {name: self._value(value) for name, value in kwargs.items()}
        return tuple(map(self._value, args)), cut_kwargs

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return tuple(map(self._value, value))
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        dim = max(value.ndim - 2, min(1, value.ndim - 1))  # [rows], [batch, rows], [..., batch, rows, width]
        index = self._index.get(value.shape[dim]) if value.ndim else None
        if index is None:
            return value
        # Every layer gets the same cos, sin and ids: cut them once. Keeping the original keeps its id unique.
        if id(value) not in self._cut:
            self._cut[id(value)] = (value, value.index_select(dim, index))
        return self._cut[id(value)][1]
