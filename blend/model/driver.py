"""One forward pass of a HuggingFace decoder over chosen rows of a prompt, driven through transformers' own doors.

The model's modules do all the work. What is ours: an attention function that knows the rows' positions (`attention`), a cache
that writes fresh rows in place (`blended_cache`), and pre-forward hooks that narrow the rows at one layer. The model is left as
found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blend.config import MaskMode
from blend.model.attention import AttentionCall, row_attention
from blend.model.cache import Halt, PassCache, PassLayer
from blend.model.rows import ForwardPass, FreshKV, RowRequest, running

ATTENTION_NAME = "kvblend_rows"

_LOCKS: WeakKeyDictionary[torch.nn.Module, AbstractContextManager[bool]] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


def _lock_of(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """The lock of this model, one however many drivers it has: a pass over rows changes its attention for all of them."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


class RowDriver:
    """Runs one HuggingFace decoder over chosen rows.

    model: the causal language model. layers: its decoder layers, in order. one_copy: see `ForwardPass`; None until
    the first pass has shown it.
    """

    def __init__(self, model: Any, layers: torch.nn.ModuleList) -> None:
        self.model = model
        self.layers = layers
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        self.lock = _lock_of(model)
        self.one_copy: bool | None = None
        self._configs = [c for c in found.values() if hasattr(c, "_attn_implementation")]

    def run(
        self,
        requests: Sequence[RowRequest],
        *,
        mask: MaskMode = "exact",
        halt_at: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the rows of these requests in one forward pass, each over its own cache, which their KV is written to.

        halt_at: stop in this layer as soon as its KV is written; nothing is returned then. Returns the model's output, logits
        `[batch, rows that are left, vocab]`. Raises `ConfigError` for several requests that cannot run together.
        """
        forward = ForwardPass(requests, mask, one_copy=bool(self.one_copy))
        cache = PassCache(forward, len(self.layers), halt_at)
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            stack.enter_context(self._attention_installed())
            stack.enter_context(running(forward))
            stack.callback(self._learn, forward)
            stack.enter_context(suppress(Halt))
            if any(request.narrowings for request in requests):
                stack.enter_context(_narrowing_hooks(self.layers, forward, cache))
            return self.model(
                input_ids=forward.token_ids,
                position_ids=forward.position_ids,
                past_key_values=cache,
                use_cache=True,
                **model_kwargs,
            )

    def _learn(self, forward: ForwardPass) -> None:
        if self.one_copy is None and forward.handed:
            self.one_copy = forward.untouched

    def run_whole(self, **arguments: Any) -> Any:
        """The model's own forward pass, untouched, at a time when no pass over rows changes the model."""
        with self.lock:
            return self.model(**arguments)

    def watch(self, request: RowRequest, last_layer: int) -> None:
        """Run rows only to have their attention observed, up to and including `last_layer`; KV is written."""

        def observe_and_halt(call: AttentionCall) -> None:
            if request.observe is not None:
                request.observe(call)
            if call.layer >= last_layer:
                raise Halt((call.key, call.value))

        self.run([replace(request, observe=observe_and_halt)])

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
def _narrowing_hooks(layers: torch.nn.ModuleList, forward: ForwardPass, cache: PassCache) -> Iterator[None]:
    """At each narrowing's layer, probe the layer, choose rows and keep only them; later layers get the same rows' arguments."""
    narrower = _Narrower(sum(forward.counts))
    wanted = sorted({narrowing.layer for request in forward.requests for narrowing in request.narrowings})

    def before_layer(index: int) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = narrower.cut(args, kwargs)
            for turn in range(_turns(forward, index)):
                fresh = _probe(module, args, kwargs, cache.layers[index])
                narrower.keep(_choose(forward, index, turn, fresh))
                args, kwargs = narrower.cut(args, kwargs)
            return args, kwargs

        return hook

    handles = [
        layers[index].register_forward_pre_hook(before_layer(index), with_kwargs=True)
        for index in range(wanted[0], len(layers))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _turns(forward: ForwardPass, layer: int) -> int:
    """How often a request narrows at this layer, at most."""
    return max(sum(n.layer == layer for n in request.narrowings) for request in forward.requests)


def _choose(forward: ForwardPass, layer: int, turn: int, fresh: FreshKV) -> torch.Tensor:
    """Let every request that narrows here choose; the places of what all of them keep among the rows so far."""
    kept = []
    for number, (request, kv) in enumerate(zip(forward.requests, forward.fresh(*fresh), strict=True)):
        run, here = forward.runs[number], [n for n in request.narrowings if n.layer == layer]
        if turn < len(here):
            if here[turn].keep_kv:
                request.cache.layers[layer].write_rows(run, *kv)
            kept.append(here[turn].choose(*kv))
        else:
            kept.append(run.positions)
    return forward.narrow(kept)


def _probe(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], held: PassLayer) -> FreshKV:
    """The layer's fresh KV of all rows still there; nothing is written, and its attention and MLP do not run."""
    held.probing = True
    try:
        module.forward(*args, **kwargs)
    except Halt as halt:
        return halt.fresh
    finally:
        held.probing = False
    raise AssertionError("the layer never updated the cache")


class _Narrower:
    """Cuts row-shaped arguments of a decoder layer (hidden states, cos and sin, position ids, ...) to the rows that are kept.

    Arguments made before the first layer have all rows; hidden states have those that the last layer ran on. A tensor is told
    by how many rows it has.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._index: dict[int, torch.Tensor] = {}
        self._done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, places: torch.Tensor) -> None:
        """From now on cut to the rows at these places `[rows]` among those that are kept now."""
        self._index = {rows: index[places] for rows, index in self._index.items()}
        self._index[self._rows] = places
        self._rows = places.shape[0]
        self._index.pop(self._rows, None)
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
