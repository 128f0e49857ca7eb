"""What the selectors rank rows by, on one prompt, computed for all context rows whatever the configured selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from blend.select import HighDeviation, Mixed, QueryGuided, QueryScore, make_selector
from blend.select.base import scoring_layers
from blend.select.evidence import query_attention
from blend.select.selectors import combine, deviation

if TYPE_CHECKING:
    from blend.config import BlendConfig
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder
    from blend.types import PromptLayout


@dataclass(frozen=True)
class RowScores:
    """One number a context row, `[context rows]` each, and where they were taken.

    deviation: distance of stored from fresh KV at `check_layer`, as `hkvd` measures it. question: attention of the suffix
    rows over the stored caches in `layers`, as `query_guided` does. both: combined as `mixed` does. Each with the parameters
    of the configured selector where it measures the same, and else with the defaults.
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
    selector = make_selector(config.selector)
    measure = selector if isinstance(selector, HighDeviation | Mixed) else HighDeviation()
    score = selector if isinstance(selector, QueryGuided | Mixed) else QueryGuided()
    check = min(measure.check_layer, len(decoder.layers) - 1)
    context = slice(layout.context.start, layout.context.stop)
    new, old = ([part[:, :, context] for part in cache.view(check)] for cache in (exact, stored))
    far = deviation((new[0], new[1]), (old[0], old[1]), measure.of, measure.norm)
    asked = QueryScore(score.layers, score.rows, score.value_norm)
    attention = query_attention(decoder, stored, layout, asked)[:, context].sum(0)
    both = combine(far, attention, selector.rule if isinstance(selector, Mixed) else "product")
    layers = scoring_layers(score.layers, len(decoder.layers))
    return RowScores(_array(far), _array(attention), _array(both), check, layers)


def _array(values: torch.Tensor) -> np.ndarray:
    array: np.ndarray = values.double().cpu().numpy()
    return array
