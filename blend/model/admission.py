"""Admits a model by measurement: three short forward passes decide whether blended prefill is exact on it.

1. The same tokens at two positions show how every layer's cached keys rotate (`find_rotation`).
2. A blended prefill over all rows, and one that narrows to scattered rows over an exact cache, must give the logits of the
   model's own forward pass. With recurrent layers the second one leaves rows out, and their operators stand for them.
A model that fails is refused with the reason; nothing is assumed from its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blend.errors import BlendError, UnsupportedModelError, first_line
from blend.model.cache import NO_KV, BlendedCache, LayerRotation, Rotation, output_cache
from blend.model.driver import RowDriver
from blend.model.mixers import find_mixers, recurrent_layers
from blend.model.passes import Narrowing, RowRequest
from blend.model.recurrent import LayerState, LeftOut, Operator


def find_rotation(
    at_start: Tensor,
    moved: Tensor,
    delta: int,
    frequencies: Sequence[Tensor],
    tolerance: float,
) -> Rotation | None:
    """The rotation that maps `at_start` to `moved`, both `[1, kv_heads, tokens, head_dim]` and `delta` positions apart.

    None if no known layout does so within `tolerance`, relative to the largest entry.
    """
    scale = moved.abs().amax().clamp_min(1e-6)

    def error(rotation: Rotation) -> float:
        difference = rotation.apply(at_start, delta) - moved
        return difference.abs().amax().item()

    best = min(_candidates(at_start.shape[-1], frequencies), key=error)
    return best if error(best) <= tolerance * scale else None


def _candidates(
    head_dim: int,
    frequencies: Iterable[Tensor],
) -> Iterable[Rotation]:
    yield Rotation()
    backwards = [-inv_freq for inv_freq in frequencies]  # nanochat turns the other way
    for inv_freq in (*frequencies, *backwards):
        width = 2 * inv_freq.shape[0]
        if width > head_dim:
            continue
        for offset in sorted({0, head_dim - width}):
            yield Rotation(inv_freq, interleaved=False, offset=offset)
            yield Rotation(inv_freq, interleaved=True, offset=offset)


PROBE_TOKENS = 12
PROBE_DELTA = 37

# Largest relative difference between two computations of the same keys or logits: float32 allows for another order of sums,
# half precision for rounding that builds up over the layers.
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.15

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_ROWS_ALONE = {"mlp", "moe"}  # layers that compute each row by itself


class Admitted(NamedTuple):
    """What was found out about a model: rotations of all layers that keep something, and the recurrent layers by index."""

    rotations: tuple[LayerRotation, ...]
    recurrent: Mapping[int, LayerState]


def admit(driver: RowDriver, name: str) -> Admitted:
    """What was measured; `driver.kv_layers` and `driver.recurrent` are set to it.

    Raises `UnsupportedModelError` if the model cannot be blended.
    """
    check_layer_kinds(driver.config, name)
    ids = probe_ids(driver.vocabulary).to(driver.device)
    driver.recurrent = _recurrent(driver, name, ids)
    try:
        with torch.inference_mode():
            here, logits = _native_forward(driver, ids, 0)
            there, _ = _native_forward(driver, ids, PROBE_DELTA)
        driver.kv_layers = _count_kept(driver, name, here)
        rotations = tuple(_rotations(driver, name, here, there))
    except BlendError:
        raise
    except Exception as error:
        reason = "its forward pass takes no position ids or returns no cache of keys and values"
        raise _refusal(name, reason, error) from error
    _check_driving(driver, name, ids, logits)
    return Admitted(rotations, driver.recurrent)


def _refusal(
    name: str,
    reason: str,
    error: Exception | None = None,
) -> UnsupportedModelError:
    cause = "" if error is None else f" ({type(error).__name__}: {first_line(error)})"
    return UnsupportedModelError(f"{name}: {reason}{cause}; use full prefill for this model")


def _recurrent(
    driver: RowDriver,
    name: str,
    ids: Tensor,
) -> dict[int, LayerState]:
    def run(cache: Any) -> None:
        driver.run_whole(input_ids=ids, use_cache=True, **{driver.cache_argument: cache})

    try:
        with torch.inference_mode():
            return find_mixers(list(driver.layers), driver.config, run)
    except BlendError as error:
        raise _refusal(name, str(error)) from None
    except Exception as error:
        raise _refusal(name, "its recurrent layers cannot be run from given states", error) from error


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference between two computations of the same keys or logits."""
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


def check_layer_kinds(config: Any, name: str) -> None:
    """Raise `UnsupportedModelError` if a text model's configuration names layers of unknown kinds."""
    recurrent = recurrent_layers(config)
    kinds = {kind for index, kind in enumerate(_layer_types(config)) if index not in recurrent}
    kinds -= _ATTENTION_KINDS | _ROWS_ALONE
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(kinds))}, whose state is not a KV cache of single tokens; "
            "use full prefill for this model"
        )


def _layer_types(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ()


def probe_ids(vocabulary: int) -> Tensor:
    """Tokens to try a model with, int64 `[1, tokens]`; they depend on the size of the vocabulary alone."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary // 8, vocabulary // 2, (1, PROBE_TOKENS), generator=generator)


def _native_forward(
    driver: RowDriver,
    ids: Tensor,
    start: int,
) -> tuple[Any, Tensor]:
    """The cache and the last row's logits of the model's own forward pass of `ids` at positions `start...`."""
    stop = start + ids.shape[1]
    positions = torch.arange(start, stop, device=ids.device)[None]
    out = driver.run_whole(
        input_ids=ids,
        position_ids=positions,
        use_cache=True,
    )
    cache = output_cache(out)
    if cache is None:
        raise ValueError("use_cache=True gave no cache")
    return cache, out.logits[:, -1]


def _count_kept(driver: RowDriver, name: str, cache: Any) -> int:
    """How many layers keep something of their own. Later ones read the KV of earlier layers (Gemma 3n, Gemma 4)."""
    has_cache = layers_kept(cache.layers[: len(driver.layers)], driver.config)
    count = sum(has_cache)
    if not count or not all(has_cache[:count]):
        raise _refusal(name, "layers without a KV cache stand below layers that have one")
    return count


def layers_kept(layers: Sequence[Any], config: Any) -> list[bool]:
    """Which layers of a transformers cache keep something of their own, or need nothing; the others read it elsewhere."""
    alone = {index for index, kind in enumerate(_layer_types(config)) if kind in _ROWS_ALONE}
    stateless = alone | recurrent_layers(config)
    return [has_kv(layer) or index in stateless for index, layer in enumerate(layers)]


def has_kv(layer: Any) -> bool:
    """Whether a layer of a transformers cache holds keys and values."""
    return isinstance(getattr(layer, "keys", None), Tensor)


def _rotations(
    driver: RowDriver,
    name: str,
    here: Any,
    there: Any,
) -> list[LayerRotation]:
    frequencies = _frequencies(driver.model)

    def rotation_of(index: int, part: str) -> Rotation:
        before = getattr(here.layers[index], part).float()
        after = getattr(there.layers[index], part).float()
        rotation = find_rotation(before, after, PROBE_DELTA, frequencies, tolerance(driver.dtype))
        if rotation is None:
            raise _refusal(
                name,
                f"the {part} of layer {index} cannot be moved to another position by any known rotation "
                "(learned absolute positions, a norm with weights behind RoPE, or an encoding that depends on length)",
            )
        return rotation

    rotations = []
    for index, layer in enumerate(here.layers[: driver.kv_layers]):
        if not has_kv(layer):
            rotations.append(NO_KV)
            continue
        keys = rotation_of(index, "keys")
        values = rotation_of(index, "values")
        rotations.append(LayerRotation(keys, values, _shape_of(layer.keys), _shape_of(layer.values)))
    return rotations


def _shape_of(states: Tensor) -> tuple[int, int]:
    """Heads and head dimension of `[batch, kv_heads, rows, head_dim]`."""
    _, heads, _, dim = states.shape
    return heads, dim


def _frequencies(model: Any) -> list[Tensor]:
    """The model's distinct `inv_freq` buffers; local and global layers may differ."""
    frequencies: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.ndim == 1:
            value = buffer.detach().double()
            if not any(torch.equal(value, frequency) for frequency in frequencies):
                frequencies.append(value)
    return frequencies


def _check_driving(
    driver: RowDriver,
    name: str,
    ids: Tensor,
    logits: Tensor,
) -> None:
    """Compare blended prefill of all rows, then of scattered rows, with the model's own logits."""
    total = ids.shape[1]
    positions = torch.arange(total, device=ids.device)
    scattered = positions[[1, 2, total // 2, total - 1]]
    try:
        cache = BlendedCache(driver.kv_layers, total)
        whole_logits = driver.prefill([RowRequest(ids, positions, cache)])
        narrowing = (Narrowing(1, lambda keys, values: scattered),) if driver.kv_layers > 1 else ()
        if driver.recurrent:
            partial_logits = _left_out(driver, ids, positions, cache)
        else:
            partial_logits = driver.prefill([RowRequest(ids, positions, cache, narrowing)])
    except BlendError:
        raise
    except Exception as error:
        raise _refusal(name, "its attention cannot be driven over chosen rows", error) from error
    scale = logits.abs().amax().clamp_min(1e-6)
    blended = torch.stack((whole_logits, partial_logits))
    difference = ((blended - logits).abs().amax() / scale).item()
    if not difference <= tolerance(driver.dtype):
        reason = f"blended prefill differs from the model's own forward pass by {difference:.1%}"
        raise _refusal(name, reason)


def _left_out(
    driver: RowDriver,
    ids: Tensor,
    positions: Tensor,
    cache: BlendedCache,
) -> Tensor:
    """The last row's logits when rows in the middle are left out, and two operators take their place."""

    def run(
        rows: Tensor,
        on_operator: Callable[[int, Operator], None] | None = None,
    ) -> Tensor:
        return driver.prefill([RowRequest(ids[:, rows], rows, cache, on_operator=on_operator)])

    edges = (3, 6, 8)
    first = positions[: edges[0]]
    run(first)
    for start, stop in pairwise(edges):
        operators: dict[int, Operator] = {}
        run(positions[start:stop], operators.__setitem__)
        for index, operator in operators.items():
            cache.carried(index).add(LeftOut(start, stop, operator))
    run(torch.cat((first, positions[edges[-1] : -1])))
    return run(positions[-1:])
