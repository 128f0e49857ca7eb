"""Read attention off a running model: weights in tiles of rows, pooled by segment, counted, and drawn as a heat map."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from blend.layout import PromptLayout, Span
from blend.model.attention import AttentionCall


@dataclass(frozen=True)
class Segments:
    """Prefix, every chunk and the suffix in prompt order; the spans cover all rows without gaps."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, layout: PromptLayout) -> Segments:
        """The segments of a prompt."""
        prefix = Span(0, len(layout.prefix))
        suffix = Span(layout.context.stop, layout.rows)
        return cls((prefix, *layout.chunk_spans, suffix))

    @property
    def names(self) -> tuple[str, ...]:
        """How the report calls them: prefix, chunk 1, ..., question."""
        chunks = [f"chunk {number}" for number in range(1, len(self.spans) - 1)]
        return ("prefix", *chunks, "question")

    @property
    def owner(self) -> ndarray:
        """Index of the segment that each row belongs to, int64 `[rows]`."""
        lengths = [span.length for span in self.spans]
        return np.repeat(np.arange(len(self.spans)), lengths)

    def pool(self, weights: Tensor) -> Tensor:
        """Weights `[..., keys]` over the first keys of the prompt, summed by segment: `[..., segments]`."""
        keys = weights.shape[-1]
        owner = torch.from_numpy(self.owner[:keys]).to(weights.device)
        member = torch.nn.functional.one_hot(owner, len(self.spans))
        return weights @ member.to(weights.dtype)

    def to_other_chunks(self, by_segment: ndarray, rows: ndarray) -> ndarray:
        """Sum what each row of `[..., rows, segments]` gives to chunks other than its own, `[..., rows]`; 0 outside chunks."""
        owner = self.owner[rows]
        inside = (owner > 0) & (owner < len(self.spans) - 1)
        chunks = by_segment[..., 1:-1].sum(-1)
        shape = (*by_segment.shape[:-1], 1)
        index = np.broadcast_to(owner[:, None], shape)
        own_chunk = np.take_along_axis(by_segment, index, -1).squeeze(-1)
        return np.where(inside, np.maximum(chunks - own_chunk, 0.0), 0.0)


# Weights in memory at once, in elements: 8 MiB of fp32.
MOST_WEIGHTS = 1 << 21


class Tile(NamedTuple):
    """Softmax weights of rows `start` to `stop - 1` of a call.

    weights: fp32 `[heads, rows, keys]`, exactly 0 where a row may not look; keys beyond the tile's last row are left out.
    visible: how many keys each row may look at, int64 `[rows]`.
    """

    start: int
    stop: int
    weights: Tensor
    visible: Tensor


def tiles(call: AttentionCall, *, multiple: int = 1, first: int = 0, most: int = MOST_WEIGHTS) -> Iterator[Tile]:
    """The weights of a call of batch 1 in its exact mask, as softmax of the scaled, capped scores.

    A layer's window is honoured; a model's learned attention sinks are not part of the weights.

    Args:
        call: the attention.
        multiple: every tile but the last has a multiple of so many rows.
        first: the row to begin with.
        most: about how many weights a tile may hold; at least `multiple` rows are taken.
    """
    heads, rows = call.query.shape[1:3]
    keys = call.key.shape[2]
    step = max(1, most // (heads * keys * multiple)) * multiple
    for start in range(first, rows, step):
        yield _tile(call, start, min(start + step, rows))


def _tile(call: AttentionCall, start: int, stop: int) -> Tile:
    last = call.positions[start:stop]
    keys = int(last[-1]) + 1
    scores = _scores(call, start, stop, keys)
    key = torch.arange(keys, device=last.device)
    hidden = key > last[:, None]
    visible = last + 1
    window = call.rule["window"]
    if window is not None:
        hidden |= key <= last[:, None] - window
        visible = visible.clamp_max(window)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    return Tile(start, stop, weights, visible)


def _scores(call: AttentionCall, start: int, stop: int, keys: int) -> Tensor:
    """Scaled and capped scores, `[heads, rows, keys]`; query heads of one group share a KV head."""
    query = call.query[0, :, start:stop].float()
    key = call.key[0, :, :keys].float()
    heads, rows, dim = query.shape
    grouped = query.reshape(key.shape[0], -1, dim)
    scale = call.rule["scale"] or dim**-0.5
    softcap = call.rule["softcap"]
    scores = (grouped @ key.mT).mul_(scale).view(heads, rows, keys)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores


THRESHOLDS = (1e-2, 1e-3, 1e-4)
MASSES = (0.90, 0.95, 0.99)


def count_below(tile: Tile) -> ndarray:
    """How many weights of visible keys lie below each of `THRESHOLDS`, `[heads, thresholds]`."""
    hidden = tile.weights[0].numel() - int(tile.visible.sum())
    return np.stack([_count(tile.weights < threshold) - hidden for threshold in THRESHOLDS], 1)


def count_holding(tile: Tile) -> ndarray:
    """Fewest keys that hold each of `MASSES` of a row's attention, summed over the rows, `[heads, masses]`."""
    # The share that may be dropped, smallest weights first; hidden keys weigh 0 and are dropped before all others.
    ordered = np.sort(tile.weights.cpu().numpy(), axis=-1)
    dropped = torch.from_numpy(ordered).cumsum(-1)
    return np.stack([_count(dropped > 1 - mass) for mass in MASSES], 1)


def _count(weights: Tensor) -> ndarray:
    """How many of `[heads, rows, keys]` are true, `[heads]`."""
    count: ndarray = weights.sum((1, 2)).cpu().numpy()
    return count


# Weights below 1e-4 are drawn as nothing; the levels between are equal steps of the logarithm.
DECADES = 4


@dataclass(frozen=True)
class HeadMap:
    """The largest weight in each cell of `width` x `width` tokens, `[cells, cells]`, of one head of one layer."""

    layer: int
    head: int
    width: int
    cells: ndarray

    def encoded(self) -> str:
        """Base64 of one byte a cell, row by row up to the diagonal: 0 below 1e-4, else 255 x (1 + log10(weight) / 4)."""
        lower = self.cells[np.tril_indices(len(self.cells))]
        logarithms = np.log10(np.maximum(lower, 10.0**-DECADES))
        levels = np.clip(1 + logarithms / DECADES, 0, 1)
        grey = np.round(255 * levels).astype(np.uint8)
        return base64.b64encode(grey.tobytes()).decode("ascii")


def cell_width(rows: int, most: int) -> int:
    """Tokens a side of a cell, so that at most `most` cells cover `rows`."""
    return max(1, -(-rows // most))


def pool_cells(cells: Tensor, tile: Tile, width: int) -> None:
    """Note the largest weights of a tile in `[heads, cells, cells]`; tiles must start at multiples of `width` rows."""
    heads, rows, keys = tile.weights.shape
    padding = (0, -keys % width, 0, -rows % width)
    padded = torch.nn.functional.pad(tile.weights, padding)
    blocks = padded.view(heads, padded.shape[1] // width, width, -1, width)
    pooled = blocks.amax((2, 4)).cpu()
    top = tile.start // width
    cells[:, top : top + pooled.shape[1], : pooled.shape[2]] = pooled


@dataclass(frozen=True)
class LayerAttention:
    """Full recompute at one layer.

    below: share of the visible weights below each of `THRESHOLDS`, `[heads, thresholds]`. keys: fewest keys that hold each of
    `MASSES` of a row's attention, mean over rows, `[heads, masses]`. visible: keys that a row may look at, mean over rows.
    by_segment: mean attention of a segment's rows to each segment, `[segments, segments]`, rows add up to 1. cross: share of
    each row's attention that goes to chunks other than its own, mean over heads, `[rows]`, 0 outside chunks. question: mean
    attention of the suffix rows to each row, `[rows]`. picture: one head token by token.
    """

    below: ndarray
    keys: ndarray
    visible: float
    by_segment: ndarray
    cross: ndarray
    question: ndarray
    picture: HeadMap


def observe_layer(call: AttentionCall, segments: Segments, *, width: int, head: int | None = None) -> LayerAttention:
    """Go once over the tiles of a call with all rows of the prompt.

    width: tokens a side of a cell of the picture. head: which one to draw; None takes the head that gives most to other chunks.
    """
    heads, rows = call.query.shape[1:3]
    side = -(-rows // width)
    cells = torch.zeros(heads, side, side)
    below = np.zeros((heads, len(THRESHOLDS)))
    keys = np.zeros((heads, len(MASSES)))
    visible = 0
    row_attention = np.zeros((rows, len(segments.spans)))
    cross = np.zeros((heads, rows))
    question = torch.zeros(rows)
    suffix = segments.spans[-1]
    for tile in tiles(call, multiple=width):
        pool_cells(cells, tile, width)
        below += count_below(tile)
        keys += count_holding(tile)
        visible += int(tile.visible.sum())
        by_segment = segments.pool(tile.weights).double().cpu().numpy()
        row_attention[tile.start : tile.stop] = by_segment.mean(0)
        positions = np.arange(tile.start, tile.stop)
        cross[:, tile.start : tile.stop] = segments.to_other_chunks(by_segment, positions)
        from_suffix = tile.weights[:, max(0, suffix.start - tile.start) :]
        received = from_suffix.sum((0, 1)).cpu()
        question[: len(received)] += received
    drawn = int(cross.sum(1).argmax()) if head is None else head
    return LayerAttention(
        below=below / visible,
        keys=keys / rows,
        visible=visible / rows,
        by_segment=np.stack([_mean_rows(row_attention[span.start : span.stop]) for span in segments.spans]),
        cross=cross.mean(0),
        question=question.double().numpy() / (heads * suffix.length),
        picture=HeadMap(call.layer, drawn, width, cells[drawn].numpy().copy()),
    )


def observe_rows(call: AttentionCall, segments: Segments) -> ndarray:
    """Attention by segment of the rows that a call computes, mean over heads, `[rows, segments]`."""
    means = [segments.pool(tile.weights).double().mean(0).cpu().numpy() for tile in tiles(call)]
    return np.concatenate(means)


def total_variation(exact: AttentionCall, method: AttentionCall, rows: int) -> ndarray:
    """Half the L1 distance between two distributions over keys, mean over the last `rows` rows, `[heads]`; from 0 to 1."""
    distance = np.zeros(exact.query.shape[1])
    exact_tiles = tiles(exact, first=exact.query.shape[2] - rows)
    method_tiles = tiles(method, first=method.query.shape[2] - rows)
    for exact_tile, method_tile in zip(exact_tiles, method_tiles, strict=True):
        gap = (exact_tile.weights - method_tile.weights).abs()
        distance += gap.sum((1, 2)).double().cpu().numpy() / 2
    return distance / rows


def _mean_rows(rows: ndarray) -> ndarray:
    """The mean of `[rows, segments]`; 0 without rows."""
    total: ndarray = rows.sum(0)
    return total / max(1, len(rows))
