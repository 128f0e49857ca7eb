"""Runs recurrent layers in a pass over chosen rows: run by run of consecutive rows, each from its own state.

A layer's mixer is the innermost module that reads and writes its states in transformers' cache. For the time of a pass, hooks
call it once for every run, with a cache that holds the run's state. `find_mixers` finds them and measures their kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from blend.errors import UnsupportedModelError
from blend.model.passes import ForwardPass, RowRequest
from blend.model.recurrent import LayerState, State, find_kind


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of one prompt in a pass.

    start, stop: positions. span: where they lie in the flat sequence.
    """

    start: int
    stop: int
    span: slice
    request: RowRequest


class _Call(NamedTuple):
    """Arguments of a mixer for all rows of a pass."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int

    def of(self, span: slice, layer: LinearAttentionLayer, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for some of the rows, `batch` times, with a cache that holds this layer alone."""
        depth = max(map(len, self.values(Cache)))
        cache = Cache(layers=[layer] * depth)

        def cut(value: Any) -> Any:
            if isinstance(value, Cache):
                return cache
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            if not isinstance(value, Tensor):
                return value
            if value.ndim < 2 or value.shape[1] != self.rows:
                return value
            part = value[:, span]
            return part.expand(batch, *part.shape[1:]) if batch > 1 else part

        args = tuple(map(cut, self.args))
        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        return args, kwargs

    def values(self, kind: type) -> list[Any]:
        """The arguments of a type."""
        values = (*self.args, *self.kwargs.values())
        return [value for value in values if isinstance(value, kind)]


class _SplitMixer:
    """Hooks of one layer's mixer during a pass: all runs but the last are computed before it, the last one by itself."""

    def __init__(self, index: int, state: LayerState, runs: Sequence[RowRun]) -> None:
        self._index = index
        self._state = state
        self._runs = runs
        self._outputs: list[Any] = []
        self._layer = LinearAttentionLayer()

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-forward hook."""
        call = _Call(args, kwargs, self._runs[-1].span.stop)
        self._outputs = []
        for run in self._runs[:-1]:
            args, kwargs = self._enter(run, call)
            output = module.forward(*args, **kwargs)
            self._outputs.append(self._leave(run, output))
        return self._enter(self._runs[-1], call)

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook."""
        last = self._leave(self._runs[-1], output)
        return _joined([*self._outputs, last])

    def _enter(self, run: RowRun, call: _Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        run.request.await_layer(self._index)
        cache = run.request.cache
        rows = cache.restarts.get(run.start, run.start)
        state = cache.carried(self._index).before(rows)
        if run.request.on_operator is not None:
            state = self._state.starts(self._zeros(call) if state is None else state)
        if state is None:
            self._layer = LinearAttentionLayer(max(1, len(self._state.conv)))
            return call.of(run.span, self._layer, 1)
        self._layer = state.layer()
        return call.of(run.span, self._layer, state.batch)

    def _zeros(self, call: _Call) -> State:
        device = call.values(Tensor)[0].device
        zeros = []
        for shape, dtype in zip(self._state.state_shapes, self._state.dtypes, strict=True):
            zeros.append(torch.zeros(shape, dtype=dtype, device=device))
        return self._state.state(zeros)

    def _leave(self, run: RowRun, output: Any) -> Any:
        state = State.of(self._layer)
        if run.request.on_operator is not None:
            state, operator = self._state.ends(state)
            run.request.on_operator(self._index, operator)
            output = _first(output)
        run.request.cache.carried(self._index).put(run.stop, state)
        return output


def _first(output: Any) -> Any:
    """The first of a batch."""
    if isinstance(output, tuple):
        return tuple(map(_first, output))
    return output[:1] if isinstance(output, Tensor) else output


def _joined(outputs: Sequence[Any]) -> Any:
    """Outputs `[1, rows, ...]` of runs, one behind the other."""
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], tuple):
        return tuple(map(_joined, zip(*outputs, strict=True)))
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    return outputs[0]


@contextmanager
def split_mixers(states: Mapping[int, LayerState], forward: ForwardPass) -> Iterator[None]:
    """For the time of a pass, run each recurrent layer run by run."""
    handles = []
    runs = runs_of(forward)
    for index, state in states.items():
        split = _SplitMixer(index, state, runs)
        handles.append(state.mixer.register_forward_pre_hook(split.before, with_kwargs=True))
        handles.append(state.mixer.register_forward_hook(split.after))
    try:
        yield
        for request, rows in zip(forward.requests, forward.runs, strict=True):
            request.cache.count_rows(rows.stop)
    finally:
        for handle in handles:
            handle.remove()


def runs_of(forward: ForwardPass) -> list[RowRun]:
    """The consecutive rows of each prompt of a pass; a run ends where the state starts anew."""
    runs = []
    requests = zip(forward.requests, forward.runs, forward.spans(), strict=True)
    for request, rows, place in requests:
        is_first = rows.positions.diff() != 1
        if request.cache.restarts:
            restarts = torch.tensor(list(request.cache.restarts), device=is_first.device)
            is_first |= torch.isin(rows.positions[1:], restarts)
        ends = (torch.nonzero(is_first)[:, 0] + 1).tolist()
        edges = [0, *ends, rows.rows]
        starts = rows.positions[edges[:-1]].tolist()
        for (begin, end), start in zip(pairwise(edges), starts, strict=True):
            span = slice(place.start + begin, place.start + end)
            runs.append(RowRun(start, start + end - begin, span, request))
    return runs


BEFORE = 4
MEASURED = 2  # rows before those that are measured, and these: few, or a state that decays shows nothing


def recurrent_layers(config: Any) -> set[int]:
    """Indices of the layers that have a recurrent state in transformers' cache; none if it makes no such cache."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # whatever an unusual configuration makes it raise; admission then says what is wrong
        return set()
    return {index for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def find_mixers(
    layers: Sequence[torch.nn.Module], config: Any, run: Callable[[Cache], object]
) -> dict[int, LayerState]:
    """The recurrent layers of a model, measured. Empty if it has none, or this version of transformers knows none.

    run: runs the model's own forward pass over a few rows, with a given cache. Raises
    `UnsupportedModelError` where a layer's rows act on its state in no known way.
    """
    if not recurrent_layers(config):
        return {}
    cache = _WatchedCache(config=config)
    with _watched(layers, cache.stack):
        run(cache)
    layer_states: dict[int, LayerState] = {}
    handles = []
    for index, stacks in cache.stacks.items():
        measure = partial(_measure, index, layer_states)
        handles.append(_common(stacks).register_forward_pre_hook(measure, with_kwargs=True))
    try:
        run(DynamicCache(config=config))
    finally:
        for handle in handles:
            handle.remove()
    return dict(sorted(layer_states.items()))


def _common(stacks: Sequence[Sequence[torch.nn.Module]]) -> torch.nn.Module:
    """The innermost module in all of these stacks of running modules."""
    levels = zip(*stacks, strict=False)
    shared: list[torch.nn.Module] = [
        modules[0] for modules in levels if all(module is modules[0] for module in modules)
    ]
    return shared[-1]


def _measure(index: int, layer_states: dict[int, LayerState], module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Measure how the rows that a mixer gets act on its state."""
    call = _Call(args, kwargs, rows=0)
    hidden = call.values(Tensor)[0]
    cache = call.values(Cache)[0]
    call = call._replace(rows=hidden.shape[1])
    layer_states[index] = _layer_state(index, module, call, cache.layers[index].number_of_states)


def _layer_state(index: int, module: torch.nn.Module, call: _Call, number: int) -> LayerState:
    def run(state: State | None, span: slice) -> State:
        layer = LinearAttentionLayer(number) if state is None else state.layer()
        batch = 1 if state is None else state.batch
        args, kwargs = call.of(span, layer, batch)
        module.forward(*args, **kwargs)
        return State.of(layer)

    before = run(None, slice(0, BEFORE))
    conv_shapes = tuple(tuple(part.shape[1:]) for part in before.conv)
    dtypes = tuple(part.dtype for part in before.tensors)
    if before.recurrent is None:
        return LayerState(module, None, conv_shapes, (), dtypes)
    shape = tuple(before.recurrent.shape[1:])

    def ends(recurrent: Tensor) -> Tensor:
        after = run(before.repeated(recurrent), slice(BEFORE, BEFORE + MEASURED)).recurrent
        assert after is not None
        return after

    kind = find_kind(ends, before.recurrent)
    if kind is None:
        raise UnsupportedModelError(
            f"layer {index}: what its rows make of its recurrent state ({type(module).__name__}) is no known operator"
        )
    return LayerState(module, kind, conv_shapes, shape, dtypes)


class _WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A cache that remembers which modules run when a layer's states are read or written.

    stack: the running modules, kept by hooks. stacks: what it was at each use, layer by layer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.stack: list[torch.nn.Module] = []
        self.stacks = defaultdict[int, list[tuple[torch.nn.Module, ...]]](list)
        for name in ("update_conv_state", "update_recurrent_state", "get_conv_state", "get_recurrent_state"):
            method = getattr(self, name, None)
            if method is not None:
                setattr(self, name, self._watching(method))

    def _watching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, which notes the running modules first."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            layer = next(value for value in values if type(value) is int)
            self.stacks[layer].append(tuple(self.stack))
            return method(*args, **kwargs)

        return watched


@contextmanager
def _watched(layers: Sequence[torch.nn.Module], stack: list[torch.nn.Module]) -> Iterator[None]:
    """Keep the stack of the running modules inside these layers."""
    handles = []
    distinct = dict.fromkeys(module for layer in layers for module in layer.modules())
    for module in distinct:
        handles.append(module.register_forward_pre_hook(lambda module, args: stack.append(module)))
        handles.append(module.register_forward_hook(lambda module, args, output: stack.remove(module)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
