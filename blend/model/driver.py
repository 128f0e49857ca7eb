"""One forward pass of a HuggingFace decoder over chosen rows of a prompt, driven through transformers' own doors.

The model's modules do all the work. What is ours: an attention function that knows the rows' positions (`attention`), a cache
that writes fresh rows in place (`blended_cache`), and pre-forward hooks that narrow the rows at one layer. The model is left as
found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blend.config import MaskMode
from blend.model.attention import AttentionCall, RowsInFlight, row_attention, rows_in_flight
from blend.model.cache import BlendedCache, BlendedLayer, Rows

ATTENTION_NAME = "kvblend_rows"

FreshKV = tuple[torch.Tensor, torch.Tensor]

_LOCKS: WeakKeyDictionary[torch.nn.Module, AbstractContextManager[bool]] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


def _lock_of(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """The lock of this model, one however many drivers it has: a pass over rows changes its attention for all of them."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


@dataclass(frozen=True)
class Narrowing:
    """Go on with fewer rows from `layer` on.

    choose: called with the layer's fresh keys and values of all current rows (`[1, kv_heads, rows, head_dim]`), returns the
    sorted positions to keep. Only the layer's norm and QKV projection run before it decides. keep_kv: whether the fresh KV of
    the rows that go is written to the cache.
    """

    layer: int
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keep_kv: bool = False


class _Halt(BaseException):
    """Ends a forward pass from inside a cache update; never leaves this module."""

    def __init__(self, fresh: FreshKV) -> None:
        self.fresh = fresh


class RowDriver:
    """Runs one HuggingFace decoder over chosen rows.

    model: the causal language model. layers: its decoder layers, in order.
    """

    def __init__(self, model: Any, layers: torch.nn.ModuleList) -> None:
        self.model = model
        self.layers = layers
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        self.lock = _lock_of(model)
        self._configs = [c for c in found.values() if hasattr(c, "_attn_implementation")]

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: BlendedCache,
        *,
        total: int,
        mask: MaskMode = "exact",
        narrowings: Sequence[Narrowing] = (),
        observe: Callable[[AttentionCall], None] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the rows at `positions` of a prompt of `total` rows, writing their KV into `cache`.

        token_ids: `[batch, rows]`. positions: sorted int64 `[rows]`, the same for the whole batch. narrowings: in the order of
        their layers. observe: called with every layer's attention before it is computed. Returns the model's output.
        """
        state = RowsInFlight(positions, mask, observe)
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            cache.set_rows(Rows(positions, total))
            stack.callback(cache.set_rows, None)
            stack.enter_context(self._attention_installed())
            stack.enter_context(rows_in_flight(state))
            if narrowings:
                stack.enter_context(_narrowing_hooks(self.layers, narrowings, state, cache, total))
            return self.model(
                input_ids=token_ids,
                position_ids=positions.expand(token_ids.shape[0], -1),
                past_key_values=cache,
                use_cache=True,
                **model_kwargs,
            )

    def run_whole(self, **arguments: Any) -> Any:
        """The model's own forward pass, untouched, at a time when no pass over rows changes the model."""
        with self.lock:
            return self.model(**arguments)

    def run_until_kv(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: BlendedCache, *, total: int
    ) -> None:
        """Like `run`, but stop as soon as the last layer's KV is written: its attention and MLP feed no cache."""
        with _halting(cache.layers[-1]):
            try:
                self.run(token_ids, positions, cache, total=total)
            except _Halt:
                return
        raise AssertionError("the last layer never updated the cache")

    def watch_attention(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: BlendedCache,
        observe: Callable[[AttentionCall], None],
        *,
        total: int,
        last_layer: int | None = None,
    ) -> None:
        """Run rows only to look at their attention, layer by layer, up to and including `last_layer`; KV is written."""
        last = len(self.layers) - 1 if last_layer is None else last_layer

        def observe_and_halt(call: AttentionCall) -> None:
            observe(call)
            if call.layer >= last:
                raise _Halt((call.key, call.value))

        with suppress(_Halt):
            self.run(token_ids, positions, cache, total=total, observe=observe_and_halt)

    @contextmanager
    def _attention_installed(self) -> Iterator[None]:
        """Route attention through `row_attention`, and restore what was there afterwards."""
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, row_attention)
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation_internal = ATTENTION_NAME
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name


@contextmanager
def _halting(held: BlendedLayer, *, write: bool = True) -> Iterator[None]:
    """Raise `_Halt` with a layer's fresh KV, after writing it or instead of writing it."""
    original = held.update

    def halt(key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> FreshKV:
        if write:
            original(key_states, value_states, *args, **kwargs)
        raise _Halt((key_states, value_states))

    held.update = halt  # type: ignore[method-assign]  # for this layer object alone, until `del`
    try:
        yield
    finally:
        del held.update


@contextmanager
def _narrowing_hooks(
    layers: torch.nn.ModuleList, narrowings: Sequence[Narrowing], state: RowsInFlight, cache: BlendedCache, total: int
) -> Iterator[None]:
    """At each narrowing's layer, probe the layer, choose rows and keep only them; later layers get the same rows' arguments."""
    narrower = _Narrower(state.positions)

    def before_layer(index: int) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = narrower.cut(args, kwargs)
            for narrowing in (n for n in narrowings if n.layer == index):
                fresh = _probe(module, args, kwargs, cache.layers[index], narrowing.keep_kv)
                state.positions = narrowing.choose(*fresh)
                cache.set_rows(Rows(state.positions, total))
                narrower.keep(state.positions)
                args, kwargs = narrower.cut(args, kwargs)
            return args, kwargs

        return hook

    first = min(narrowing.layer for narrowing in narrowings)
    handles = [
        layers[i].register_forward_pre_hook(before_layer(i), with_kwargs=True) for i in range(first, len(layers))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _probe(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], held: BlendedLayer, keep_kv: bool
) -> FreshKV:
    with _halting(held, write=keep_kv):
        try:
            module.forward(*args, **kwargs)
        except _Halt as halt:
            return halt.fresh
    raise AssertionError("the layer never updated the cache")


class _Narrower:
    """Cuts row-shaped arguments of a decoder layer (hidden states, cos and sin, position ids, ...) to the rows that are kept.

    Arguments made before the first layer have all rows; hidden states have those that the last layer ran on.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._levels = [positions]
        self._index: dict[int, torch.Tensor] = {}
        self._done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, rows: torch.Tensor) -> None:
        """From now on cut to `rows`, a subset of what is kept now."""
        self._index = {level.shape[0]: torch.searchsorted(level, rows) for level in self._levels}
        self._index.pop(rows.shape[0], None)
        self._levels.append(rows)
        self._done.clear()

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a layer's forward pass, for the kept rows only."""
        return tuple(map(self._value, args)), {name: self._value(value) for name, value in kwargs.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return tuple(map(self._value, value))
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        dim = min(1, value.ndim - 1)
        index = self._index.get(value.shape[dim]) if value.ndim else None
        if index is None:
            return value
        # The same cos, sin and ids reach every layer: cut them once. The original is kept so that its id stays taken.
        if id(value) not in self._done:
            self._done[id(value)] = (value, value.index_select(dim, index))
        return self._done[id(value)][1]
