"""What the selectors rank rows by, on one prompt, computed for all context rows whatever the configured selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from blend.recompute import make_plan, query_attention
from blend.select.controls import Nothing
from blend.select.mixed import combine
from blend.select.query_score import QueryScore, scoring_layers
from blend_kernels import kv_deviation

if TYPE_CHECKING:
    from blend.config import BlendConfig
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder
    from blend.types import PromptLayout


@dataclass(frozen=True)
class RowScores:
    """One number a context row, `[context rows]` each, and where they were taken.

    deviation: distance of stored from fresh KV at `check_layer`, as `hkvd` is configured. question: attention of the suffix
    rows over the stored caches in `layers`, as `query_guided` is. both: combined as `mixed` does.
    """

    deviation: np.ndarray
    question: np.ndarray
    both: np.ndarray
    check_layer: int
    layers: tuple[int, ...]


def row_scores(
    decoder: Decoder, config: BlendConfig, layout: PromptLayout, stored: BlendedCache, exact: BlendedCache
) -> RowScores:
    """Score the context rows; `stored` holds what the selectors see of plain reuse, `exact` full recompute.

    Where all rows run up to the check layer, fresh KV there is that of full recompute. Writes the suffix rows of `stored`.
    """
    check = min(config.check_layer, len(decoder.layers) - 1)
    context = slice(layout.context.start, layout.context.stop)
    new, old = ([part[:, :, context] for part in cache.view(check)] for cache in (exact, stored))
    norm: Literal["l2sq", "l1"] = "l2sq" if config.norm == "l2" else "l1"
    deviation = kv_deviation(new[0], old[0], new[1], old[1], norm=norm, parts=config.deviation_of)[0]
    plan = make_plan(layout, (True,) * len(layout.chunks), Nothing(), 0.0, decoder.device)
    layers = scoring_layers(config.query_layers, len(decoder.layers))
    attention = query_attention(decoder, stored, plan, QueryScore.of(config))[:, context].sum(0)
    both = combine(deviation, attention, config.rule)
    return RowScores(_array(deviation), _array(attention), _array(both), check, layers)


def _array(values: torch.Tensor) -> np.ndarray:
    array: np.ndarray = values.double().cpu().numpy()
    return array
