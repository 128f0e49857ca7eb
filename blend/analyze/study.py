"""One prompt under three prefills: full recompute, plain reuse and the configured blend; everything the report shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from blend.analyze.deviation import KVDeviation, measure_deviation
from blend.analyze.heatmap import HeadMap, cell_width
from blend.analyze.observe import LayerAttention, observe_layer, observe_rows, total_variation
from blend.analyze.scores import RowScores, row_scores
from blend.analyze.segments import Segments
from blend.analyze.tokens import token_texts, word_kinds
from blend.blender import Blend, Blender
from blend.chunks.assemble import assemble, place
from blend.errors import ConfigError, PromptError
from blend.model.forward import AttentionCall
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder


@dataclass(frozen=True)
class Exchange:
    """What flows between chunks under the blend, and what the question reads under each prefill.

    cross: share of attention to other chunks of the recomputed rows, `[layers, rows]`, 0 for every other row. question: mean
    attention of the suffix rows to each segment under full recompute, plain reuse and the blend, `[3, layers, segments]`.
    variation: total variation distance between the suffix rows' attention and that under full recompute, for plain reuse and
    the blend, `[2, layers, heads]`.
    """

    cross: np.ndarray
    question: np.ndarray
    variation: np.ndarray


@dataclass(frozen=True)
class PromptAnalysis:
    """All findings on one prompt; context rows are those of the chunks.

    texts, kinds: of each token, see `tokens`. recomputed: sorted positions that the blend computed in every layer. rows_share:
    computed rows over all rows, summed over layers. mapped: whether the blend applied a KV correction. attention: of full
    recompute, one entry a layer. before, after: deviation from full recompute of the cache as stored and moved, and of the
    blended one. scores: what selectors rank by.
    """

    layout: PromptLayout
    segments: Segments
    texts: tuple[str, ...]
    kinds: tuple[int, ...]
    recomputed: np.ndarray
    rows_share: float
    mapped: bool
    attention: tuple[LayerAttention, ...]
    exchange: Exchange
    before: KVDeviation
    after: KVDeviation
    scores: RowScores

    @property
    def pictures(self) -> tuple[HeadMap, ...]:
        """One head of each layer, token by token."""
        return tuple(layer.picture for layer in self.attention)


@torch.inference_mode()
def analyze_prompt(
    blender: Blender, layout: PromptLayout, *, head: int | None = None, cells: int = 256
) -> PromptAnalysis:
    """Run a prompt under full recompute, plain reuse and the blender's configuration, and compare them.

    Chunks that the store lacks are computed and stored first. head: which one the token-by-token pictures show; None takes
    each layer's head that gives most to other chunks. cells: cells a side of these pictures at most.
    Raises `PromptError` for a prompt without chunks or longer than the model's context, `ConfigError` for a head that does not
    exist and for a mask that is not exact (attention is read off passes under the exact mask).
    """
    decoder, config = blender.decoder, blender.config
    _check(decoder, layout, config.mask, head)
    library = blender.library(layout.kept_behind)
    library.compute(library.missing(layout.chunks, isolated=True))
    segments, suffix = Segments.of(layout), torch.arange(layout.context.stop, layout.rows, device=decoder.device)
    stored, _ = _stored(blender, layout, contextual=False)
    reuse_calls = _watch(decoder, layout, suffix, stored)
    blend = blender.prefill(layout, room=0)
    blend_calls = _watch(decoder, layout, blend.selection.rows, blend.cache)
    exact = decoder.new_cache(layout.rows)
    attention: list[LayerAttention] = []
    variation: list[list[np.ndarray]] = []

    def observe(call: AttentionCall) -> None:
        width = cell_width(layout.rows, cells)
        attention.append(observe_layer(call, segments, width=width, head=head))
        others = (reuse_calls[call.layer], blend_calls[call.layer])
        variation.append([total_variation(call, other, len(layout.suffix)) for other in others])

    every = torch.arange(layout.rows, device=decoder.device)
    decoder.watch_attention(_ids(decoder, layout, every), every, exact, observe)
    texts = token_texts(decoder.tokenizer, layout.token_ids)
    exchange = _exchange(segments, attention, reuse_calls, blend_calls, np.array(variation))
    before, after = (measure_deviation(cache, exact, layout.context) for cache in (stored, blend.cache))
    ranked, mapped = _as_ranked(blender, blend)
    return PromptAnalysis(
        layout=layout,
        segments=segments,
        texts=texts,
        kinds=word_kinds(texts),
        recomputed=blend.selection.rows.cpu().numpy(),
        rows_share=blend.rows_share,
        mapped=mapped,
        attention=tuple(attention),
        exchange=exchange,
        before=before,
        after=after,
        scores=row_scores(decoder, config, layout, ranked, exact),
    )


def _check(decoder: Decoder, layout: PromptLayout, mask: str, head: int | None) -> None:
    if not layout.context.length:
        raise PromptError("the prompt has no chunks, so there is nothing to reuse and nothing to analyze; give it some")
    if mask != "exact":
        raise ConfigError(f"attention is analyzed under the exact mask, not under {mask!r}; leave out --mask")
    heads = decoder.config.num_attention_heads
    if head is not None and not 0 <= head < heads:
        raise ConfigError(f"head {head} does not exist: {decoder.name} has heads 0 to {heads - 1}")
    decoder.check_length(layout.rows)


def _stored(
    blender: Blender, layout: PromptLayout, *, contextual: bool, corrected: bool = False
) -> tuple[BlendedCache, bool]:
    """The stored chunks at the prompt's positions, nothing recomputed, and whether a KV correction was added."""
    library = blender.library(layout.kept_behind)
    placed = place(layout, library.open_sound, contextual=contextual)
    if not all(placed.hits):
        placed.close()
        why = placed.opened.problems[0] if placed.opened.problems else "the store dropped them; give it a larger budget"
        raise PromptError(f"some chunks of the prompt cannot be read back from the store: {why}")
    corrections = blender.corrections(placed).of_chunks if corrected else ()
    assembly = assemble(blender.decoder, layout, blender.encoder(layout.prefix).prefix, placed.readers, corrections)
    return assembly.cache, bool(assembly.added)


def _as_ranked(blender: Blender, blend: Blend) -> tuple[BlendedCache, bool]:
    """The stored chunks as the blend's selector saw them, and whether a KV correction was applied."""
    corrected = blender.config.correction and blend.correction_fits
    return _stored(blender, blend.layout, contextual=blender.config.surrogate, corrected=corrected)


def _watch(
    decoder: Decoder, layout: PromptLayout, rows: torch.Tensor, cache: BlendedCache
) -> tuple[AttentionCall, ...]:
    """The attention of rows over a cache, layer by layer; their KV is written. The calls hold views of the cache, not copies.

    Rows of a finished blend compute what they computed in it, because all that they read is in the cache.
    """
    calls: list[AttentionCall] = []
    decoder.watch_attention(_ids(decoder, layout, rows), rows, cache, calls.append)
    return tuple(calls)


def _ids(decoder: Decoder, layout: PromptLayout, rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor(layout.token_ids, device=decoder.device)[rows][None]


def _exchange(
    segments: Segments,
    attention: Sequence[LayerAttention],
    reuse_calls: Sequence[AttentionCall],
    blend_calls: Sequence[AttentionCall],
    variation: np.ndarray,
) -> Exchange:
    rows, suffix = segments.spans[-1].stop, segments.spans[-1].length
    cross = np.zeros((len(blend_calls), rows))
    question = np.zeros((3, len(blend_calls), len(segments.spans)))
    for layer, (full, reuse, blend) in enumerate(zip(attention, reuse_calls, blend_calls, strict=True)):
        seen = observe_rows(blend, segments)
        cross[layer, seen.positions] = segments.to_other_chunks(seen.by_segment, seen.positions)
        question[0, layer] = full.by_segment[-1]
        question[1, layer] = observe_rows(reuse, segments).by_segment.mean(0)
        question[2, layer] = seen.by_segment[-suffix:].mean(0)
    return Exchange(cross, question, variation.transpose(1, 0, 2))
