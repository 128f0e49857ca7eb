"""Admits a model by measurement: three short forward passes decide whether blended prefill is exact on it.

1. The same tokens at two positions show how every layer's cached keys rotate (`find_turn`).
2. A blended prefill over all rows, and one that narrows to scattered rows over an exact cache, must give the logits of the
   model's own forward pass. With recurrent layers the second one leaves rows out, and their operators stand for them.
A model that fails is refused with the reason; nothing is assumed from its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from blend.errors import BlendError, UnsupportedModelError, first_line
from blend.model.cache import NO_KV, BlendedCache, LayerRotation, Run, output_cache
from blend.model.driver import RowDriver
from blend.model.mixers import find_mixers, recurrent_layers
from blend.model.passes import Narrowing, RowRequest
from blend.model.recurrent import LeftOut, Operator
from blend_kernels import Deltas, Turn, rotate_keys


def find_turn(at_start: Tensor, moved: Tensor, delta: int, frequencies: Sequence[Tensor]) -> tuple[Turn | None, float]:
    """What maps `at_start` best to `moved`, both `[1, kv_heads, tokens, head_dim]` and `delta` positions apart.

    Returns the rotation, None for none, and its error relative to the largest entry.
    """
    scale = moved.abs().amax().clamp_min(1e-6)
    steps = Deltas(torch.full(moved.shape[2:3], delta, device=moved.device))

    def error(turn: Turn | None) -> float:
        difference = rotate_keys(at_start, steps, turn) - moved
        return (difference.abs().amax() / scale).item()

    best = min(_candidates(at_start.shape[-1], frequencies), key=error)
    return best, error(best)


def _candidates(head_dim: int, frequencies: Iterable[Tensor]) -> Iterable[Turn | None]:
    yield None
    backwards = [-inv_freq for inv_freq in frequencies]  # nanochat turns the other way
    for inv_freq in (*frequencies, *backwards):
        width = 2 * inv_freq.shape[0]
        if width > head_dim:
            continue
        for offset in sorted({0, head_dim - width}):
            yield Turn(inv_freq, interleaved=False, offset=offset)
            yield Turn(inv_freq, interleaved=True, offset=offset)


PROBE_TOKENS = 12
PROBE_DELTA = 37

# Largest relative difference between two computations of the same keys or logits: float32 allows for another order of sums,
# half precision for rounding that builds up over the layers.
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.15

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_ROWS_ALONE = {"mlp", "moe"}  # layers that compute each row by itself


def admit(driver: RowDriver, name: str) -> tuple[LayerRotation, ...]:
    """Rotations of all layers that keep something; `driver.kv_layers` and `driver.recurrent` are set to what was measured.

    Raises `UnsupportedModelError` if the model cannot be blended.
    """
    check_layer_kinds(driver.config, name)
    ids = probe_ids(driver.vocabulary).to(driver.device)

    def run(cache: Any) -> None:
        driver.run_whole(input_ids=ids, use_cache=True, **{driver.cache_argument: cache})

    with _or_refused(name, "its recurrent layers cannot be run from given states"):
        try:
            driver.recurrent = find_mixers(list(driver.layers), driver.config, run)
        except UnsupportedModelError as error:
            raise _refusal(name, str(error)) from None
    with _or_refused(name, "its forward pass takes no position ids or returns no cache of keys and values"):
        here, logits = _native_forward(driver, ids, 0)
        there, _ = _native_forward(driver, ids, PROBE_DELTA)
        driver.kv_layers = _count_kept(driver, name, here)
        rotations = tuple(_rotations(driver, name, here, there))
    with _or_refused(name, "its attention cannot be driven over chosen rows"):
        blended = _driven(driver, ids)
    scale = logits.abs().amax().clamp_min(1e-6)
    difference = ((blended - logits).abs().amax() / scale).item()
    if not difference <= tolerance(driver.dtype):
        raise _refusal(name, f"blended prefill differs from the model's own forward pass by {difference:.1%}")
    return rotations


@contextmanager
def _or_refused(name: str, reason: str) -> Iterator[None]:
    """Refuse the model for this reason, whatever it raises."""
    try:
        with torch.inference_mode():
            yield
    except BlendError:
        raise
    except Exception as error:
        raise _refusal(name, f"{reason} ({type(error).__name__}: {first_line(error)})") from error


def _refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name}: {reason}; use full prefill for this model")


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


def _native_forward(driver: RowDriver, ids: Tensor, start: int) -> tuple[Any, Tensor]:
    """The cache and the last row's logits of the model's own forward pass of `ids` at positions `start...`."""
    stop = start + ids.shape[1]
    positions = torch.arange(start, stop, device=ids.device)[None]
    out = driver.run_whole(input_ids=ids, position_ids=positions, use_cache=True)
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


def _rotations(driver: RowDriver, name: str, here: Any, there: Any) -> list[LayerRotation]:
    frequencies = _frequencies(driver.model)

    def turn_of(index: int, part: str) -> Turn | None:
        before = getattr(here.layers[index], part).float()
        after = getattr(there.layers[index], part).float()
        turn, error = find_turn(before, after, PROBE_DELTA, frequencies)
        if not error <= tolerance(driver.dtype):
            raise _refusal(
                name,
                f"the {part} of layer {index} cannot be moved to another position by any known rotation "
                "(learned absolute positions, a norm with weights behind RoPE, or an encoding that depends on length)",
            )
        return turn

    rotations = []
    for index, layer in enumerate(here.layers[: driver.kv_layers]):
        if not has_kv(layer):
            rotations.append(NO_KV)
            continue
        keys = turn_of(index, "keys")
        values = turn_of(index, "values")
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


def _driven(driver: RowDriver, ids: Tensor) -> Tensor:
    """The last row's logits of blended prefill, `[2, 1, vocab]`: of all rows, and of scattered rows over exact KV.

    With recurrent layers rows in the middle are left out instead, and two operators take their place.
    """
    cache = BlendedCache(driver.kv_layers, ids.shape[1])

    def run(
        rows: Sequence[int],
        narrowings: tuple[Narrowing, ...] = (),
        on_operator: Callable[[int, Operator], None] | None = None,
    ) -> Tensor:
        positions = Run.read(torch.tensor(rows, device=ids.device))
        request = RowRequest(ids[:, rows], positions, cache, narrowings, on_operator=on_operator)
        return driver.prefill([request])

    every = range(ids.shape[1])
    whole = run(every)
    last = every[-1]
    if not driver.recurrent:
        scattered = torch.tensor([1, 2, last // 2 + 1, last], device=ids.device)
        narrowing = Narrowing(1, lambda keys, values: scattered)
        narrowings = (narrowing,) if driver.kv_layers > 1 else ()
        return torch.stack((whole, run(every, narrowings)))
    edges = (3, 6, 8)
    run(every[: edges[0]])
    for start, stop in pairwise(edges):
        operators: dict[int, Operator] = {}
        run(every[start:stop], on_operator=operators.__setitem__)
        for index, operator in operators.items():
            cache.carried(index).add(LeftOut(start, stop, operator))
    run([*every[: edges[0]], *every[edges[-1] : last]])
    return torch.stack((whole, run([last])))
