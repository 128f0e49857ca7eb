"""Run one prompt under full recompute, plain reuse and the configured blend, and compare what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from blend.analyze.attention import LayerAttention, Segments, cell_width, observe_layer, observe_rows, total_variation
from blend.analyze.words import word_kinds
from blend.chunks.assemble import assemble
from blend.chunks.opened import open_chunks
from blend.errors import ConfigError, PromptError, UnsupportedModelError
from blend.layout import PromptLayout, Span
from blend.model.attention import AttentionCall
from blend.model.cache import Run
from blend.prefill.blender import Blender
from blend.prefill.question import QueryAttention
from blend.select import HighDeviation, Mixed, QueryGuided, QueryScore, make_selector
from blend.select.selectors import deviation

if TYPE_CHECKING:
    from blend.config import BlendConfig
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder

_UNFINISHED = "\ufffd"
# A character takes at most four bytes, and byte-level tokens hold at least one each.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True)
class Deviation:
    """Distance of keys or values from full recompute's, float64 `[layers, context rows]` each.

    squared: squared L2 distance to full recompute, summed over heads and dimensions. size: squared L2 norm of full recompute.
    """

    squared: ndarray
    size: ndarray

    @property
    def relative(self) -> ndarray:
        """Distance over norm, `[layers, context rows]`."""
        size = np.maximum(self.size, 1e-30)
        relative: ndarray = np.sqrt(self.squared / size)
        return relative


@dataclass(frozen=True)
class KVDeviation:
    """Keys and values of one cache against another."""

    keys: Deviation
    values: Deviation


@dataclass(frozen=True)
class RowScores:
    """One number a context row, `[context rows]` each, and where they were taken.

    deviation: distance of stored from fresh KV at `check_layer`, as `hkvd` measures it. question: attention of the suffix
    rows over the stored caches in `layers`, as `query_guided` does and names them. combined: both, as `mixed` does. Each with
    the parameters of the configured selector where it measures the same, and else with the defaults.
    """

    deviation: ndarray
    question: ndarray
    combined: ndarray
    check_layer: int
    layers: str


@dataclass(frozen=True)
class ChunkExchange:
    """What flows between chunks under the blend, and what the question reads under each prefill.

    cross: share of attention to other chunks of the recomputed rows, `[layers, rows]`, 0 for every other row. question: mean
    attention of the suffix rows to each segment under full recompute, plain reuse and the blend, `[3, layers, segments]`.
    variation: total variation distance between the suffix rows' attention and that under full recompute, for plain reuse and
    the blend, `[2, layers, heads]`.
    """

    cross: ndarray
    question: ndarray
    variation: ndarray


@dataclass(frozen=True)
class PromptAnalysis:
    """All findings on one prompt; context rows are those of the chunks.

    texts: of each token, see `token_texts`. kinds: of the word that each is part of, see `word_kinds`. recomputed: sorted
    positions that the blend computed in every layer. rows_share: computed rows over all rows, summed over layers. mapped:
    whether the blend applied a KV correction. attention: of full recompute, one entry a layer. before, after: deviation from
    full recompute of the cache as stored and moved, and of the blended one. scores: what selectors rank by.
    """

    layout: PromptLayout
    segments: Segments
    texts: tuple[str, ...]
    kinds: list[int]
    recomputed: ndarray
    rows_share: float
    mapped: bool
    attention: tuple[LayerAttention, ...]
    exchange: ChunkExchange
    before: KVDeviation
    after: KVDeviation
    scores: RowScores


@torch.inference_mode()
def analyze_prompt(
    blender: Blender, layout: PromptLayout, *, head: int | None = None, cells: int = 256
) -> PromptAnalysis:
    """Run a prompt under full recompute, plain reuse and the blender's configuration, and compare them.

    Chunks that the store lacks are computed and stored first.

    Args:
        blender: blends the prompt.
        layout: the prompt.
        head: the one that the token-by-token pictures show; None takes each layer's head that gives most to other chunks.
        cells: cells a side of these pictures at most.

    Raises:
        PromptError: a prompt without chunks, or longer than the model's context.
        ConfigError: a head that does not exist, or a mask that is not exact: attention is read off passes under that one.
    """
    decoder = blender.decoder
    _check(decoder, layout, blender.config.mask, head)
    library = blender.library(layout.kept_behind)
    library.compute(library.missing(layout.chunks))
    segments = Segments.of(layout)
    suffix = torch.arange(layout.context.stop, layout.rows, device=decoder.device)
    stored, _ = _stored(blender, layout, contextual=False)
    reuse_calls = _watch(decoder, layout, suffix, stored)
    blend = blender.prefill(layout, room=0)
    blend_calls = _watch(decoder, layout, blend.selection.rows, blend.cache)
    exact = decoder.new_cache(layout.rows)
    attention: list[LayerAttention] = []
    variation: list[list[ndarray]] = []

    def observe(call: AttentionCall) -> None:
        attention.append(observe_layer(call, segments, width=cell_width(layout.rows, cells), head=head))
        calls = (reuse_calls[call.layer], blend_calls[call.layer])
        variation.append([total_variation(call, method, len(layout.suffix)) for method in calls])

    every = Run.consecutive(0, layout.rows, decoder.device)
    ids = torch.tensor([layout.token_ids], device=decoder.device)
    decoder.watch_attention(ids, every, exact, observe)
    exchange = _exchange(segments, attention, reuse_calls, blend_calls, np.array(variation))
    corrected = blender.config.correction and blend.correction_fits
    ranked, mapped = _stored(blender, layout, contextual=blender.config.surrogate, corrected=corrected)
    texts = token_texts(decoder.tokenizer, layout.token_ids)
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
        before=measure_deviation(stored, exact, layout.context),
        after=measure_deviation(blend.cache, exact, layout.context),
        scores=row_scores(decoder, blender.config, layout, ranked, exact),
    )


def _check(decoder: Decoder, layout: PromptLayout, mask: str, head: int | None) -> None:
    if decoder.recurrent:
        raise UnsupportedModelError(f"{decoder.name} has recurrent layers, which the analysis cannot show yet")
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
    with open_chunks(library, layout, contextual=contextual, sound=True) as opened:
        if not all(opened.hits):
            why = opened.problems[0] if opened.problems else "the store dropped them; give it a larger budget"
            raise PromptError(f"some chunks of the prompt cannot be read back from the store: {why}")
        corrections = blender.corrections.of_prompt(library, opened).of_places if corrected else ()
        prefix = blender.encoder(layout.prefix).prefix
        assembly = assemble(blender.decoder, layout, prefix, opened.chunks, corrections)
    return assembly.cache, bool(assembly.gains)


def _watch(decoder: Decoder, layout: PromptLayout, rows: Tensor, cache: BlendedCache) -> list[AttentionCall]:
    """The attention of rows over a cache, layer by layer; their KV is written. The calls hold views of the cache, not copies.

    Rows of a finished blend compute what they computed in it, because all that they read is in the cache.
    """
    calls: list[AttentionCall] = []
    ids = torch.tensor(layout.token_ids, device=decoder.device)
    decoder.watch_attention(ids[rows][None], Run.read(rows), cache, calls.append)
    return calls


def _exchange(
    segments: Segments,
    attention: Sequence[LayerAttention],
    reuse_calls: Sequence[AttentionCall],
    blend_calls: Sequence[AttentionCall],
    variation: ndarray,
) -> ChunkExchange:
    suffix = segments.spans[-1]
    cross = np.zeros((len(blend_calls), suffix.stop))
    question = []
    layers = zip(attention, reuse_calls, blend_calls, strict=True)
    for layer, (full, reuse, blend) in enumerate(layers):
        by_segment = observe_rows(blend, segments)
        positions = blend.positions.cpu().numpy()
        cross[layer, positions] = segments.to_other_chunks(by_segment, positions)
        reads = (full.by_segment[-1], observe_rows(reuse, segments).mean(0), by_segment[-suffix.length :].mean(0))
        question.append(reads)
    return ChunkExchange(cross, np.array(question).swapaxes(0, 1), variation.swapaxes(0, 1))


def row_scores(
    decoder: Decoder, config: BlendConfig, layout: PromptLayout, stored: BlendedCache, exact: BlendedCache
) -> RowScores:
    """Score the context rows. Writes the suffix rows of `stored`.

    Where all rows run up to the check layer, fresh KV there is that of full recompute.

    Args:
        decoder: the model.
        config: names the selector.
        layout: the prompt.
        stored: what the selectors see of plain reuse.
        exact: KV of full recompute.
    """
    selector = make_selector(config.selector)
    measure = selector if isinstance(selector, HighDeviation | Mixed) else HighDeviation()
    score = selector if isinstance(selector, QueryGuided | Mixed) else QueryGuided()
    check = min(measure.check_layer, len(decoder.rotations) - 1)
    context = slice(*layout.context)
    fresh_keys, fresh_values = (part[:, :, context] for part in exact.view(check))
    keys, values = (part[:, :, context] for part in stored.view(check))
    far = deviation((fresh_keys, fresh_values), (keys, values), measure.of)
    scoring = QueryAttention(decoder, stored, layout, QueryScore(score.layers))
    scoring.watch()
    attention = scoring.attention()[:, context].sum(0)
    return RowScores(_array(far), _array(attention), _array(far * attention), check, score.layers)


def _array(values: Tensor) -> ndarray:
    array: ndarray = values.double().cpu().numpy()
    return array


def measure_deviation(cache: BlendedCache, exact: BlendedCache, context: Span) -> KVDeviation:
    """Compare the context rows of two caches of one prompt, layer by layer, in fp32 or better."""
    layers = range(len(exact.layers))
    keys, values = zip(*map(cache.view, layers), strict=True)
    exact_keys, exact_values = zip(*map(exact.view, layers), strict=True)
    return KVDeviation(
        keys=_deviation(keys, exact_keys, slice(*context)), values=_deviation(values, exact_values, slice(*context))
    )


def _deviation(layers: Sequence[Tensor], exact: Sequence[Tensor], rows: slice) -> Deviation:
    """Keys or values against those of full recompute, layer by layer."""
    squared = []
    size = []
    for layer, exact_layer in zip(layers, exact, strict=True):
        true = exact_layer[0, :, rows].float()
        squared.append(_squares(layer[0, :, rows].float() - true))
        size.append(_squares(true))
    return Deviation(np.stack(squared), np.stack(size))


def _squares(rows: Tensor) -> ndarray:
    """The squared L2 norm of each row over heads and dimensions, `[rows]`."""
    sums = rows.double().square().sum((0, 2))
    squares: ndarray = sums.cpu().numpy()
    return squares


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """What each token adds to the text; a character split over several tokens stands at the first of them."""
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        decoded = [_decode(tokenizer, ids[start:stop]) for stop in range(start + 1, start + 1 + _LONGEST_CHARACTER)]
        length = next((place for place, text in enumerate(decoded) if _UNFINISHED not in text), 0)
        texts += [decoded[length], *[""] * length]
    return tuple(texts)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    # SentencePiece vocabularies mark a leading space that decoding drops at the start of a text.
    piece = str(tokenizer.convert_ids_to_tokens(int(ids[0])))
    return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text
