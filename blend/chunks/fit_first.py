"""Fitting the KV correction of contextual caches in a prompt's first place, for a corpus that is kept in one copy.

Right behind the prefix a chunk's isolated cache is exact. So no prompts are needed: what the map adds is what the isolated
cache has over the contextual one moved there, chunk by chunk.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from blend.chunks.correction import KVCorrection, LayerCorrection, position_features, rows_of
from blend.chunks.fit_correction import TOKENS, Tokens, grouped
from blend.chunks.regression import LayerRows, RowPlaces, fit_layer
from blend.timing import Progress, no_progress
from blend.types import ChunkCache, PromptLayout

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder

CachesOf = Callable[[Sequence[Tokens]], Sequence[ChunkCache]]


def fit_first(
    decoder: RowDecoder,
    prefix: Tokens,
    chunks: Sequence[Tokens],
    caches: tuple[CachesOf, CachesOf],
    progress: Progress = no_progress,
) -> KVCorrection | None:
    """Fit the map on some of these chunks, `TOKENS` tokens of them at most beside the first; None where none helps.

    chunks: those that have contextual caches. caches: functions from chunks to their contextual and to their isolated caches.
    Whole chunks are held out. progress: of the stage "calibrate", in tokens. Holds the KV of these chunks in float32 meanwhile,
    twice.
    """
    taken = _taken(chunks)
    if len(taken) < 2:  # no chunk could be held out
        return None
    held: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in decoder.rotations]
    progress("calibrate", 0, sum(map(len, taken)))
    for number, chunk in enumerate(taken, 1):
        (stored,), (exact,) = (of([chunk]) for of in caches)
        for index, pairs in enumerate(held):
            pairs.append((_rows(decoder, stored, index), _rows(decoder, exact, index)))
        progress("calibrate", sum(map(len, taken[:number])), sum(map(len, taken)))
    places = _places(prefix, taken, decoder.device)
    fitted: list[LayerCorrection | None] = [None]  # layer 0 depends on token and position only
    for pairs, rotation in zip(held[1:], decoder.rotations[1:], strict=True):
        before, after = (torch.cat(rows) for rows in zip(*pairs, strict=True))
        fitted.append(fit_layer(LayerRows(before, after - before, places, math.prod(rotation.key_shape), 0.0)))
    return KVCorrection(tuple(fitted), 0, max(map(len, taken))) if any(fitted) else None


def _taken(chunks: Sequence[Tokens]) -> list[Tokens]:
    """Different chunks in random order, the same ones for the same chunks, while there is room for them."""
    distinct = list(dict.fromkeys(chunk for chunk in chunks if chunk))
    taken: list[Tokens] = []
    for chunk in random.Random(0).sample(distinct, len(distinct)):
        if len(taken) < 2 or sum(map(len, taken)) + len(chunk) <= TOKENS:
            taken.append(chunk)
    return taken


def _rows(decoder: RowDecoder, cache: ChunkCache, index: int) -> torch.Tensor:
    """A layer's KV with positions taken out, fp32 `[tokens, inputs]`."""
    first, step = (0, 0) if cache.still else (cache.start, 1)
    positions = first + step * torch.arange(cache.tokens, device=decoder.device)
    keys, values = (states[index].to(decoder.device)[None] for states in (cache.keys, cache.values))
    return rows_of(keys, values, decoder.rotations[index], positions)


def _places(prefix: Tokens, chunks: Sequence[Tokens], device: torch.device) -> RowPlaces:
    """Every chunk in the first place of a prompt, once."""
    group = grouped([(chunk, len(chunk)) for chunk in chunks])
    groups = torch.tensor([group[chunk] for chunk in chunks for _ in chunk], device=device)
    rows = [torch.arange(len(prefix), len(prefix) + len(chunk), device=device) for chunk in chunks]
    features = [
        position_features(PromptLayout(prefix, (chunk,), ()), mine) for chunk, mine in zip(chunks, rows, strict=True)
    ]
    return RowPlaces(torch.cat(features), groups, torch.zeros_like(groups))
