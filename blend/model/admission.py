"""Admits a model by measurement: three short forward passes decide whether blended prefill is exact on it.

1. The same tokens at two positions show how every layer's cached keys rotate (`find_rotation`).
2. A blended prefill over all rows, and one that narrows to scattered rows over an exact cache, must give the logits of the
   model's own forward pass. With recurrent layers the second one leaves rows out, and their operators stand for them.
A model that fails is refused with the reason; nothing is assumed from its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from blend.errors import BlendError, UnsupportedModelError, first_line
from blend.model.cache import NO_KV, BlendedCache, LayerRotation, Rotation, output_cache
from blend.model.forward import Narrowing, RowDriver, RowRequest
from blend.model.mixers import find_mixers, recurrent_layers
from blend.model.recurrent import LayerState, LeftOut, Operator


def find_rotation(
    at_start: torch.Tensor, moved: torch.Tensor, delta: int, frequencies: Sequence[torch.Tensor], tolerance: float
) -> Rotation | None:
    """The rotation that maps `at_start` to `moved`, both `[1, kv_heads, tokens, head_dim]` and `delta` positions apart.

    None if no known layout does so within `tolerance`, relative to the largest entry.
    """
    scale = moved.abs().amax().clamp_min(1e-6)
    best = min(_candidates(at_start.shape[-1], frequencies), key=lambda r: _error(r, at_start, moved, delta))
    return best if _error(best, at_start, moved, delta) <= tolerance * scale else None


def _error(rotation: Rotation, at_start: torch.Tensor, moved: torch.Tensor, delta: int) -> float:
    return (rotation.apply(at_start, delta) - moved).abs().amax().item()


def _candidates(head_dim: int, frequencies: Iterable[torch.Tensor]) -> Iterable[Rotation]:
    yield Rotation()
    for inv_freq in (*frequencies, *(-each for each in frequencies)):  # nanochat turns the other way
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
        raise UnsupportedModelError(
            f"{name}: its forward pass takes no position ids or returns no cache of keys and values "
            f"({type(error).__name__}: {first_line(error)}); use full prefill for this model"
        ) from error
    _check_driving(driver, name, ids, logits)
    return Admitted(rotations, driver.recurrent)


def _recurrent(driver: RowDriver, name: str, ids: torch.Tensor) -> dict[int, LayerState]:
    def run(cache: Any) -> None:
        driver.run_whole(input_ids=ids, use_cache=True, **{driver.cache_argument: cache})

    try:
        with torch.inference_mode():
            return find_mixers(list(driver.layers), driver.config, run)
    except BlendError as error:
        raise UnsupportedModelError(f"{name}: {error}; use full prefill for this model") from None
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: its recurrent layers cannot be run from given states "
            f"({type(error).__name__}: {first_line(error)}); use full prefill for this model"
        ) from error


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference between two computations of the same keys or logits."""
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


def check_layer_kinds(config: Any, name: str) -> None:
    """Raise `UnsupportedModelError` if a text model's configuration names layers of unknown kinds."""
    types, recurrent = enumerate(getattr(config, "layer_types", None) or ()), recurrent_layers(config)
    kinds = {kind for index, kind in types if index not in recurrent} - _ATTENTION_KINDS - _ROWS_ALONE
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(kinds))}, whose state is not a KV cache of single tokens; "
            "use full prefill for this model"
        )


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Tokens to try a model with, int64 `[1, tokens]`; they depend on the size of the vocabulary alone."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary // 8, vocabulary // 2, (1, PROBE_TOKENS), generator=generator)


def _native_forward(driver: RowDriver, ids: torch.Tensor, start: int) -> tuple[Any, torch.Tensor]:
    """The cache and the last row's logits of the model's own forward pass of `ids` at positions `start...`."""
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    out = driver.run_whole(input_ids=ids, position_ids=positions, use_cache=True)
    cache = output_cache(out)
    if cache is None:
        raise ValueError("use_cache=True gave no cache")
    return cache, out.logits[:, -1]


def _count_kept(driver: RowDriver, name: str, cache: Any) -> int:
    """How many layers keep something of their own. Later ones read the KV of earlier layers (Gemma 3n, Gemma 4)."""
    kept = layers_kept(cache.layers[: len(driver.layers)], driver.config)
    count = sum(kept)
    if not count or not all(kept[:count]):
        raise UnsupportedModelError(
            f"{name}: layers without a KV cache stand below layers that have one; use full prefill for this model"
        )
    return count


def layers_kept(layers: Sequence[Any], config: Any) -> list[bool]:
    """Which layers of a transformers cache keep something of their own, or need nothing; the others read it elsewhere."""
    alone = {i for i, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind in _ROWS_ALONE}
    others = alone | recurrent_layers(config)
    return [has_kv(layer) or index in others for index, layer in enumerate(layers)]


def has_kv(layer: Any) -> bool:
    """Whether a layer of a transformers cache holds keys and values."""
    return isinstance(getattr(layer, "keys", None), torch.Tensor)


def _rotations(driver: RowDriver, name: str, here: Any, there: Any) -> list[LayerRotation]:
    frequencies = _frequencies(driver.model)
    found = []
    for index in range(driver.kv_layers):
        if not has_kv(here.layers[index]):
            found.append(NO_KV)
            continue
        found_here: list[Rotation] = []
        shapes: list[tuple[int, int]] = []
        for part in ("keys", "values"):
            before, after = getattr(here.layers[index], part), getattr(there.layers[index], part)
            rotation = find_rotation(before.float(), after.float(), PROBE_DELTA, frequencies, tolerance(driver.dtype))
            if rotation is None:
                raise UnsupportedModelError(
                    f"{name}: the {part} of layer {index} cannot be moved to another position by any known rotation "
                    "(learned absolute positions, a norm with weights behind RoPE, or an encoding that depends on length); "
                    "use full prefill for this model"
                )
            found_here.append(rotation)
            shapes.append((before.shape[1], before.shape[3]))
        found.append(LayerRotation(found_here[0], found_here[1], shapes[0], shapes[1]))
    return found


def _frequencies(model: Any) -> list[torch.Tensor]:
    """The model's distinct `inv_freq` buffers; local and global layers may differ."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.ndim == 1:
            value = buffer.detach().double()
            if not any(value.shape == other.shape and torch.equal(value, other) for other in found):
                found.append(value)
    return found


def _check_driving(driver: RowDriver, name: str, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Compare blended prefill of all rows, then of scattered rows, with the model's own logits."""
    total = ids.shape[1]
    positions = torch.arange(total, device=ids.device)
    scattered = positions[[1, 2, total // 2, total - 1]]
    try:
        cache = BlendedCache(driver.kv_layers, total)
        every = driver.prefill([RowRequest(ids, positions, cache)])
        narrowing = (Narrowing(1, lambda keys, values: scattered),) if driver.kv_layers > 1 else ()
        if driver.recurrent:
            some = _left_out(driver, ids, positions, cache)
        else:
            some = driver.prefill([RowRequest(ids, positions, cache, narrowing)])
    except BlendError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: its attention cannot be driven over chosen rows ({type(error).__name__}: {first_line(error)}); "
            "use full prefill for this model"
        ) from error
    scale = logits.abs().amax().clamp_min(1e-6)
    difference = max(((x - logits).abs().amax() / scale).item() for x in (every, some))
    if not difference <= tolerance(driver.dtype):
        raise UnsupportedModelError(
            f"{name}: blended prefill differs from the model's own forward pass by {difference:.1%}; "
            "use full prefill for this model"
        )


def _left_out(driver: RowDriver, ids: torch.Tensor, positions: torch.Tensor, cache: BlendedCache) -> torch.Tensor:
    """The last row's logits when rows in the middle are left out, and two operators take their place."""

    def run(rows: torch.Tensor, into: dict[int, Operator] | None = None) -> torch.Tensor:
        keep = None if into is None else into.__setitem__
        return driver.prefill([RowRequest(ids[:, rows], rows, cache, on_operator=keep)])

    edges, total = (3, 6, 8), positions.shape[0]
    run(positions[: edges[0]])
    for start, stop in pairwise(edges):
        found: dict[int, Operator] = {}
        run(positions[start:stop], found)
        for index, operator in found.items():
            cache.carried(index).add(LeftOut(start, stop, operator))
    run(torch.cat((positions[: edges[0]], positions[edges[-1] : total - 1])))
    return run(positions[total - 1 :])
