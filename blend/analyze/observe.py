"""What is read off each layer's attention while the model runs: under full recompute, and of the blended rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from blend.analyze.heatmap import HeadMap, MapMaker
from blend.analyze.segments import Segments
from blend.analyze.sparsity import LayerSparsity, SparsityMeter
from blend.analyze.tiles import tiles
from blend.model.forward import AttentionCall


@dataclass(frozen=True)
class LayerAttention:
    """Full recompute at one layer.

    by_segment: mean attention of a segment's rows to each segment, `[segments, segments]`, rows add up to 1. cross: share of
    each row's attention that goes to chunks other than its own, mean over heads, `[rows]`, 0 outside chunks. question: mean
    attention of the suffix rows to each row, `[rows]`. picture: one head token by token.
    """

    sparsity: LayerSparsity
    by_segment: np.ndarray
    cross: np.ndarray
    question: np.ndarray
    picture: HeadMap


def observe_layer(call: AttentionCall, segments: Segments, *, width: int, head: int | None = None) -> LayerAttention:
    """Go once over the tiles of a call with all rows of the prompt.

    width: tokens a side of a cell of the picture. head: which one to draw; None takes the head that gives most to other chunks.
    """
    heads, rows = call.query.shape[1:3]
    meter, pictures = SparsityMeter(heads), MapMaker(heads, rows, width)
    given = np.zeros((rows, len(segments.spans)))
    cross = np.zeros((heads, rows))
    question = torch.zeros(rows)
    suffix = segments.spans[-1]
    for tile in tiles(call, multiple=width):
        meter.add(tile)
        pictures.add(tile)
        by_segment = segments.pool(tile.weights).double().cpu().numpy()
        given[tile.start : tile.stop] = by_segment.mean(0)
        cross[:, tile.start : tile.stop] = segments.to_other_chunks(by_segment, np.arange(tile.start, tile.stop))
        asked = tile.weights[:, max(0, suffix.start - tile.start) :]
        question[: asked.shape[2]] += asked.sum((0, 1)).cpu()
    drawn = int(cross.sum(1).argmax()) if head is None else head
    return LayerAttention(
        meter.result(),
        np.stack([_mean_rows(given[span.start : span.stop]) for span in segments.spans]),
        cross.mean(0),
        question.double().numpy() / (heads * suffix.length),
        pictures.result(call.layer, drawn),
    )


@dataclass(frozen=True)
class Rows:
    """Attention of some rows at one layer, mean over heads: the rows' positions, and `[rows, segments]`."""

    positions: np.ndarray
    by_segment: np.ndarray


def observe_rows(call: AttentionCall, segments: Segments) -> Rows:
    """Attention by segment of the rows that a call computes."""
    given = [segments.pool(tile.weights).double().mean(0).cpu().numpy() for tile in tiles(call)]
    return Rows(call.positions.cpu().numpy(), np.concatenate(given))


def total_variation(exact: AttentionCall, other: AttentionCall, rows: int) -> np.ndarray:
    """Half the L1 distance between two distributions over keys, mean over the last `rows` rows, `[heads]`; from 0 to 1."""
    distance = np.zeros(exact.query.shape[1])
    pairs = zip(
        tiles(exact, first=exact.query.shape[2] - rows), tiles(other, first=other.query.shape[2] - rows), strict=True
    )
    for mine, theirs in pairs:
        distance += (mine.weights - theirs.weights).abs().sum((1, 2)).double().cpu().numpy() / 2
    return distance / rows


def _mean_rows(given: np.ndarray) -> np.ndarray:
    mean: np.ndarray = given.mean(0) if len(given) else np.zeros(given.shape[1])
    return mean
