"""Whether kvblend can blend in a context of this model and this build of llama.cpp: tried out when it is loaded.

1. A short prompt's state is read; every byte of it must be accounted for.
2. It is written to another sequence. The next token must get the same logits there.
3. Each layer's keys must move to another position by a rotation.
4. Rows that run apart, in spare sequences, must give the logits of the same tokens as one sequence.
Whatever fails is said in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blend.errors import ConfigError, UnsupportedModelError
from blend.integrations.llamacpp.cache import CellCache, CellLayout
from blend.integrations.llamacpp.context import AttentionNode, BatchRows, Context, ContextOptions
from blend.integrations.llamacpp.library import TRIED
from blend.integrations.llamacpp.model import GGUFModel
from blend.integrations.llamacpp.rotation import DISTANCES, KeysAt, measured_turns
from blend.integrations.llamacpp.state import StateFormat, hadamard
from blend.model.admission import PROBE_DELTA, probe_ids
from blend.model.cache import LayerRotation, Run
from blend.model.passes import RowRequest
from blend_kernels import Deltas, Turn, rotate_keys

_TOKENS = 4  # whose keys are measured at all distances
_SAME = 0.02  # largest difference of logits that should be equal, as a share of the largest; batches differ in rounding
_MOVED = 0.15  # of keys computed at two positions: half precision builds up over the layers


def admitted(model: GGUFModel, options: ContextOptions) -> tuple[Context, CellLayout, list[AttentionNode]]:
    """A context of the model, what its caches must know, and its layers' attention in a short prompt.

    Raises:
        ConfigError: the library's states have an unknown format.
        UnsupportedModelError: the model cannot be blended.

    """
    context = Context(model, options)
    try:
        ids = _probe(model)
        nodes, logits = _learn_format(context, ids)
        _check_state(context, ids)
        turns = _measure(model, options)
        layout = _layout(nodes, turns)
        _check_rows(context, layout, ids, logits)
    except BaseException:
        context.close()
        raise
    return context, layout, nodes


def _probe(model: GGUFModel) -> NDArray[np.int64]:
    """Tokens of a short prompt; a state leaves out what is behind a window."""
    ids = probe_ids(model.vocabulary)[0].numpy()
    return ids[: model.window] if model.window else ids


def _learn_format(context: Context, ids: NDArray[np.int64]) -> tuple[list[AttentionNode], Tensor]:
    """Set the context's `state_format`; the attention of a short prompt, and its logits."""
    nodes: list[AttentionNode] = []

    def see(node: AttentionNode) -> bool:
        nodes.append(node)
        return True

    with context.spare(1) as (sequence,):
        logits = context.run(_rows(ids, 0, sequence), see)
        state = context.state(sequence)
    try:
        context.state_format = StateFormat.read(state)
        caches = context.state_format.unpack(state)
    except ValueError as error:
        raise _unknown_state(str(error)) from None
    order = []
    for node in nodes:
        places = [
            (cache, place)
            for cache, rows in enumerate(caches)
            for place, raw in enumerate(rows.raw[: len(rows.raw) // 2])
            if raw[0].tobytes().startswith(node.first_key)
        ]
        if len(places) != 1:
            raise _unknown_state(f"{len(places)} layers of the state hold the keys of layer {node.layer}")
        order += places
    if sum(len(cache.keys) for cache in context.state_format.caches) != len(order):
        raise UnsupportedModelError(f"{context.model.file.name}: some of its layers read the KV of others")
    context.state_format = context.state_format._replace(order=tuple(order))
    turned = context.state_format.caches[0].keys[0].turned
    return [node._replace(query=hadamard(node.query, turned)) for node in nodes], logits


def _unknown_state(reason: str) -> ConfigError:
    return ConfigError(f"this build of llama.cpp keeps its states otherwise ({reason}); tried with {TRIED}")


def _rows(ids: NDArray[np.int64], start: int, sequence: int) -> BatchRows:
    """Tokens of one sequence; the last one's logits are wanted."""
    count = len(ids)
    positions = np.arange(start, start + count, dtype=np.int32)
    return BatchRows(
        np.asarray(ids, np.int32), positions, np.full(count, sequence, np.int32), positions == positions[-1]
    )


def _check_state(context: Context, ids: NDArray[np.int64]) -> None:
    """A state that is taken apart, put together and written must be as good as the sequence that it is of."""
    state_format = context.state_format
    with context.spare(2) as (source, target):
        context.run(_rows(ids[:-1], 0, source))
        caches = state_format.unpack(context.state(source))
        kvs = []
        for layer, (cache, place) in enumerate(state_format.order):
            raw = caches[cache].raw
            keys, values = (
                kind.decode(raw[place + part * (len(raw) // 2)]) for part, kind in enumerate(state_format.types(layer))
            )
            kvs.append((keys, values))
        context.set_state(target, state_format.pack(caches[0].positions, kvs, target))
        last = [context.run(_rows(ids[-1:], len(ids) - 1, sequence)) for sequence in (source, target)]
    if not _difference(*last) <= _SAME:
        raise _unknown_state(f"logits behind a state that was written differ by {_difference(*last):.1%}")


def _difference(first: Tensor, second: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((first - second).abs().amax() / second.abs().amax().clamp_min(1e-6))


def _measure(model: GGUFModel, options: ContextOptions) -> list[Turn | None]:
    """How each layer's keys rotate. In half precision: in a context that keeps them in fewer bits too much builds up."""
    context = Context(model, replace(options, cache_type="f16"))
    try:
        ids = _probe(model)[:_TOKENS]
        _learn_format(context, ids)
        state_format = context.state_format
        pairs = [(token, distance) for distance in DISTANCES for token in ids]
        tokens, positions = np.array(pairs, np.int32).T
        with context.spare(len(pairs)) as sequences:
            context.run(BatchRows(tokens, positions, np.array(sequences, np.int32), np.zeros(len(pairs), bool)))
            states = [state_format.unpack(context.state(sequence)) for sequence in sequences]
        nodes, _ = _learn_format(context, ids)
        layers = []
        for (cache, place), node in zip(state_format.order, nodes, strict=True):
            kind = state_format.caches[cache].keys[place]
            rows = torch.cat([kind.decode(state[cache].raw[place]) for state in states]).float()
            heads, dim = node.key_shape
            layers.append(KeysAt(rows.view(len(DISTANCES), _TOKENS, heads, dim).transpose(1, 2)))
        turns = measured_turns(layers, model.file.name)
        _check_moved(context, _layout(nodes, turns), _probe(model))
        return turns
    finally:
        context.close()


def _layout(nodes: Sequence[AttentionNode], turns: Sequence[Turn | None]) -> CellLayout:
    pairs = zip(nodes, turns, strict=True)
    rotations = tuple(LayerRotation(turn, None, node.key_shape, node.value_shape) for node, turn in pairs)
    return CellLayout(rotations, torch.float16)


def _check_rows(context: Context, layout: CellLayout, ids: NDArray[np.int64], logits: Tensor) -> None:
    """Scattered rows over the prompt's KV must give its logits again."""
    cache = CellCache(context, layout, len(ids))
    try:
        _request(cache, ids, range(len(ids)))
        again = _request(cache, ids, [1, 2, len(ids) // 2, len(ids) - 1])
    finally:
        cache.free()
    if not _difference(again, logits) <= _SAME:
        difference = _difference(again, logits)
        raise UnsupportedModelError(
            f"{context.model.file.name}: rows that run apart differ from one sequence by {difference:.1%}; use full prefill"
        )


def _request(cache: CellCache, ids: NDArray[np.int64], rows: Sequence[int]) -> Tensor:
    tokens = torch.tensor([[int(ids[row]) for row in rows]])
    return cache.compute(RowRequest(tokens, Run.read(torch.tensor([*rows])), cache))


def _check_moved(context: Context, layout: CellLayout, ids: NDArray[np.int64]) -> None:
    """A prompt's keys must be those of the same prompt at other positions, turned; its values must be the same."""
    state_format = context.state_format
    with context.spare(2) as sequences:
        states = []
        for start, sequence in zip((0, PROBE_DELTA), sequences, strict=True):
            context.run(_rows(ids, start, sequence))
            states.append(state_format.unpack(context.state(sequence)))
    steps = Deltas(torch.full((len(ids),), PROBE_DELTA))
    for layer, ((cache, place), rotation) in enumerate(zip(state_format.order, layout.rotations, strict=True)):
        kind = state_format.caches[cache].keys[place]
        heads, dim = rotation.key_shape
        here, there = (
            kind.decode(state[cache].raw[place]).float().view(1, -1, heads, dim).transpose(1, 2) for state in states
        )
        if not _difference(rotate_keys(here, steps, rotation.keys), there) <= _MOVED:
            raise UnsupportedModelError(
                f"{context.model.file.name}: the keys of layer {layer} depend on more than their distance; use full prefill"
            )
