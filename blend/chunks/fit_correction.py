"""Fitting context maps: ridge regression on a few prompts of the user's own chunks.

A prompt of chunks is prefilled in full once; what its rows gain over their stored KV is what `blend.chunks.correction`
predicts. Each map has the rank `RANK`: of the fitted regression the directions that predict most (reduced-rank regression,
Izenman 1975). A part (keys or values of a layer) that predicts held-out prompts no better than nothing is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.assemble import assemble
from blend.chunks.correction import ContextMap, LayerMap, position_features, rows_of, width_of
from blend.types import ChunkCache, PromptLayout

if TYPE_CHECKING:
    from blend.chunks.encode import ChunkEncoder
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder

RANK = 32
GROUP = 8  # chunks of a calibration prompt
PROMPT_TOKENS = 2560  # its tokens at most, where two chunks are not longer
TOKENS = 8_000  # of all calibration prompts, if the chunks have as many
MOST_PROMPTS = 32
HELD_OUT = 5  # one prompt in so many chooses the penalty and what to leave out
WIDEST = 2048  # wider KV is sketched to this many inputs before the regression
PENALTIES = (0.01, 0.1, 1.0, 10.0)

CachesOf = Callable[[Sequence[tuple[int, ...]]], Sequence[ChunkCache]]


def measure_maps(
    encoder: ChunkEncoder,
    chunks: Sequence[Sequence[int]],
    sources: Sequence[CachesOf],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ContextMap | None]:
    """Fit a map for each source of caches, on the same prompts made of these chunks.

    None when fewer than two chunks or prompts can be made, or nothing helps. sources: each gives the caches of a prompt's
    chunks, the first computed right behind the prefix. progress: called with tokens done and in all. Costs a full prefill of
    every prompt.
    """
    prompts = _prompts(encoder, [tuple(chunk) for chunk in dict.fromkeys(map(tuple, chunks)) if chunk])
    if len(prompts) < 2:
        return [None] * len(sources)
    fits: list[list[_LayerFit]] = [[] for _ in sources]
    held_out = max(1, len(prompts) // HELD_OUT)
    for number, layout in enumerate(prompts):
        fresh = _together(encoder, layout)
        for fit, caches_of in zip(fits, sources, strict=True):
            stored = assemble(encoder.decoder, layout, encoder.prefix, caches_of(layout.chunks), room=0)
            _take_in(fit, encoder.decoder, layout, stored, fresh, held_out=number >= len(prompts) - held_out)
        progress(sum(prompt.rows for prompt in prompts[: number + 1]), sum(prompt.rows for prompt in prompts))
    extent = max(prompt.chunk_spans[-1].start - len(prompt.prefix) for prompt in prompts)
    return [_solved(fit, extent) for fit in fits]


def _take_in(
    fits: list[_LayerFit],
    decoder: Decoder,
    layout: PromptLayout,
    stored: BlendedCache,
    fresh: BlendedCache,
    *,
    held_out: bool,
) -> None:
    """Give every layer's fit what the chunks after the first gain in this prompt."""
    rows = torch.arange(layout.chunk_spans[1].start, layout.rows, device=decoder.device)
    features = position_features(layout, rows)
    for index, rotation in enumerate(decoder.rotations):
        pair = [cache.view(index) for cache in (stored, fresh)]
        before, after = (rows_of(k[:, :, rows], v[:, :, rows], rotation, rows) for k, v in pair)
        if index == len(fits):
            fits.append(_LayerFit(before, features.shape[1], width_of(pair[0][0])))
        fits[index].add(before, features, after - before, held_out=held_out)


def _solved(fits: list[_LayerFit], extent: int) -> ContextMap | None:
    layers = (None, *(fit.solve() for fit in fits[1:]))  # layer 0 depends on token and position only
    return ContextMap(layers, extent) if any(layers) else None


def _prompts(encoder: ChunkEncoder, chunks: list[tuple[int, ...]]) -> list[PromptLayout]:
    """Calibration prompts of chunks in random order, the same ones for the same chunks."""
    limit = min(PROMPT_TOKENS, (encoder.decoder.context_length or PROMPT_TOKENS) - len(encoder.prefix_tokens))
    draw = random.Random(0)
    prompts: list[PromptLayout] = []
    wanted = min(TOKENS, sum(map(len, chunks)))
    while len(prompts) < 2 or (sum(p.rows for p in prompts) < wanted and len(prompts) < MOST_PROMPTS):
        group: list[tuple[int, ...]] = []
        for chunk in draw.sample(chunks, min(GROUP, len(chunks))):
            if len(group) < 2 or sum(map(len, group)) + len(chunk) <= limit:
                group.append(chunk)
        layout = PromptLayout(encoder.prefix_tokens, tuple(group), ())
        context = encoder.decoder.context_length
        if len(group) < 2 or (context is not None and layout.rows > context):
            return []
        prompts.append(layout)
    return prompts


def _together(encoder: ChunkEncoder, layout: PromptLayout) -> BlendedCache:
    """A prompt's KV computed in one piece."""
    decoder, start = encoder.decoder, len(layout.prefix)
    cache = assemble(decoder, layout, encoder.prefix, [None] * len(layout.chunks), room=0)
    decoder.encode_rows(torch.tensor([layout.token_ids[start:]], device=decoder.device), start, cache)
    return cache


class _LayerFit:
    """Ridge regression of one layer from second moments, so that no rows are kept.

    centre and scale come from the first rows and are rounded to bfloat16, so that a store may keep them in it.
    """

    def __init__(self, rows: torch.Tensor, features: int, keys: int) -> None:
        self._centre = rows.mean(0).bfloat16().float()
        self._scale = (rows.std(0, correction=0) + 1e-6).bfloat16().float()
        self._keys, self._features, width = keys, features, rows.shape[1]
        self._sketch = _sketch(width, rows.device) if width > WIDEST else None
        inputs = features + (width if self._sketch is None else WIDEST)
        make = rows.new_zeros
        self._seen = [_Moments(make(inputs, inputs), make(inputs, width), make(width)) for _ in range(2)]
        self._counts = [0, 0]

    def add(self, rows: torch.Tensor, features: torch.Tensor, gain: torch.Tensor, *, held_out: bool) -> None:
        """Take in rows of one prompt."""
        x = (rows - self._centre) / self._scale
        x = torch.cat((x if self._sketch is None else x @ self._sketch, features), dim=1)
        moments = self._seen[held_out]
        moments.xx.addmm_(x.T, x)
        moments.xy.addmm_(x.T, gain)
        moments.yy.add_(gain.square().sum(0))
        self._counts[held_out] += rows.shape[0]

    def solve(self) -> LayerMap | None:
        """The map, or None where it predicts the held-out rows no better than nothing; each part with its own best penalty."""
        trained, held = self._seen
        everything = _Moments(*(a + b for a, b in zip(trained, held, strict=True)))
        parts = slice(0, self._keys), slice(self._keys, None)
        errors = torch.stack([held.residual(self._weights(trained, self._counts[0], p)) for p in PENALTIES])
        weights = torch.zeros_like(everything.xy)
        for part in parts:
            losses = errors[:, part].sum(1)
            best = int(losses.argmin())
            if losses[best] < held.yy[part].sum():
                weights[:, part] = self._weights(everything, sum(self._counts), PENALTIES[best])[:, part]
        if not weights.any():
            return None
        down, up = _reduce_rank(weights, everything, parts)
        if self._sketch is not None:
            down = torch.cat((self._sketch @ down[: -self._features], down[-self._features :]))
        return LayerMap(self._centre, self._scale, down, up)

    def _weights(self, moments: _Moments, count: int, penalty: float) -> torch.Tensor:
        """Solve (X^T X + penalty n) W = X^T Y; the position features are hardly penalised."""
        weight = torch.full_like(moments.xx[0], penalty * count)
        weight[-self._features :] = 1e-3 * count
        solved: torch.Tensor = torch.linalg.solve(moments.xx + weight.diag(), moments.xy)
        return solved


class _Moments(NamedTuple):
    """xx: X^T X. xy: X^T Y. yy: squared norm of each output."""

    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor

    def residual(self, weights: torch.Tensor) -> torch.Tensor:
        """Squared error of X @ weights for each output."""
        return self.yy - 2 * (weights * self.xy).sum(0) + (weights * (self.xx @ weights)).sum(0)


def _reduce_rank(weights: torch.Tensor, moments: _Moments, parts: Sequence[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors `[inputs, rank]` and `[rank, outputs]` of what is nearest to X @ weights, keys and values counting alike."""
    predicted = weights.T @ moments.xx @ weights
    scale = torch.ones_like(moments.yy)
    for part in parts:
        scale[part] = predicted.diagonal()[part].sum().sqrt().clamp_min(1e-20)
    _, vectors = torch.linalg.eigh(predicted / scale[:, None] / scale)
    best = vectors[:, -min(RANK, vectors.shape[1]) :]
    return (weights / scale) @ best, best.T * scale


def _sketch(width: int, device: torch.device) -> torch.Tensor:
    """Random signs `[width, WIDEST]` that keep distances (Johnson-Lindenstrauss; Achlioptas 2003)."""
    signs = torch.randint(0, 2, (width, WIDEST), generator=torch.Generator().manual_seed(0)).to(device)
    sketch: torch.Tensor = (2.0 * signs - 1.0) / WIDEST**0.5
    return sketch
