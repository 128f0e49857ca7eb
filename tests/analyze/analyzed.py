"""A tiny prompt analyzed, and the dense attention of the same weights in float64 through transformers' eager attention."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from cases import make_layout
from dense_reference import LayerKV, _SubstitutingLayer
from models import FAMILIES, build, decoder
from transformers.cache_utils import Cache

from blend.analyze.study import PromptAnalysis, analyze_prompt
from blend.config import BlendConfig
from blend.model.attention import AttentionCall
from blend.model.cache import Run, cache_argument
from blend.prefill.blender import Blender
from blend.store import open_store

LAYOUT = make_layout()
FIRST_K = BlendConfig(selector="first_k", ratio=0.25)


def analyzed(name: str, config: BlendConfig = FIRST_K, layout: Any = LAYOUT, **options: Any) -> PromptAnalysis:
    return analyze_prompt(Blender(decoder(name), open_store("memory:", codec="native"), config), layout, **options)


@cache
def calls_of(name: str) -> tuple[AttentionCall, ...]:
    """The attention of full recompute, layer by layer, as the engine sees it."""
    engine, seen = decoder(name), list[AttentionCall]()
    rows = Run.consecutive(0, LAYOUT.rows, torch.device("cpu"))
    ids = torch.tensor([LAYOUT.token_ids])
    engine.watch_attention(ids, rows, engine.new_cache(LAYOUT.rows), seen.append)
    return tuple(seen)


@cache
def dense_weights(name: str) -> tuple[np.ndarray, ...]:
    """Attention of full recompute, `[heads, rows, rows]` a layer."""
    return dense_attention(name)


def dense_attention(
    name: str, stored: Sequence[LayerKV] | None = None, rows: torch.Tensor | None = None
) -> tuple[np.ndarray, ...]:
    """Attention `[heads, rows, rows]` a layer when all rows but `rows` have the given KV; full recompute without them."""
    model = build(FAMILIES[name], attn_implementation="eager")
    model = model if name == "deepseek-v3" else model.double()  # torch multiplies experts in float32 only
    fresh = torch.zeros(LAYOUT.rows, dtype=torch.bool)
    if rows is not None:
        fresh[rows] = True
    kept: list[Any] = [None] * model.config.num_hidden_layers
    if stored is not None:
        kept = [tuple(part.to(model.dtype) for part in kv) for kv in stored]
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([LAYOUT.token_ids]),
            use_cache=True,
            output_attentions=True,
            **{cache_argument(model): Cache(layers=[_SubstitutingLayer(kv, fresh) for kv in kept])},
        )
    return tuple(weights[0].double().numpy() for weights in out.attentions)


def by_segment(weights: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """`[..., keys]` -> `[..., segments]`, written as plain sums."""
    return np.stack([weights[..., start:stop].sum(-1) for start, stop in spans], -1)


def to_other_chunks(weights: np.ndarray, layout: Any = LAYOUT) -> np.ndarray:
    """`[rows, rows]` -> what each row gives to chunks other than its own, row by row."""
    given = np.zeros(len(weights))
    for mine in layout.chunk_spans:
        for other in layout.chunk_spans:
            if other != mine:
                given[mine.start : mine.stop] += weights[mine.start : mine.stop, other.start : other.stop].sum(1)
    return given
