"""Fewer rows from some layer on: pre-forward hooks that probe a layer, let selectors choose, and cut what later layers get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blend.model.cache import Halt, PassCache, PassLayer
from blend.model.rows import ForwardPass, FreshKV


@contextmanager
def narrowing_hooks(layers: torch.nn.ModuleList, forward: ForwardPass, cache: PassCache) -> Iterator[None]:
    """At each narrowing's layer, probe the layer, choose rows and keep only them; later layers get the same rows' arguments."""
    narrower = _Narrower(sum(forward.counts))
    wanted = sorted({narrowing.layer for request in forward.requests for narrowing in request.narrowings})

    def cut(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return narrower.cut(args, kwargs)

    def choose_at(index: int) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for turn in range(_turns(forward, index)):
                fresh = _probe(module, args, kwargs, cache.layers[index])
                narrower.keep(_choose(forward, index, turn, fresh))
                args, kwargs = narrower.cut(args, kwargs)
            return args, kwargs

        return hook

    # Other hooks of a layer see rows that fit together: cutting comes before them, and choosing after they had their say.
    handles = [
        layer.register_forward_pre_hook(cut, with_kwargs=True, prepend=True) for layer in list(layers)[wanted[0] + 1 :]
    ]
    handles += [layers[index].register_forward_pre_hook(choose_at(index), with_kwargs=True) for index in wanted]
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
    """The layer's fresh KV of all rows still there; nothing is written, and its attention and MLP do not run.

    `forward` and no call: the layer's own hooks had their say on these arguments and would change them twice. Hooks of modules
    inside the layer do run, once here and once for the rows that are kept.
    """
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
