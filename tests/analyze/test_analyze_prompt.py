"""A whole analysis against dense recomputation: deviation before and after, attention between chunks and of the question."""

import numpy as np
import pytest
import torch
from analyzed import FIRST_K, LAYOUT, analyzed, by_segment, dense_attention, dense_weights, to_other_chunks
from cases import make_layout
from dense_reference import dense_blend, dense_prefill, dense_reuse
from models import LAYERS, decoder, eager_model

from blend.analyze.numbers import summarize
from blend.analyze.study import PromptAnalysis, analyze_prompt
from blend.config import BlendConfig
from blend.errors import ConfigError, PromptError
from blend.prefill.blender import Blender
from blend.store import open_store

NAMES = ("llama", "mistral", "qwen2", "gemma2", "deepseek-v3")
CONTEXT = slice(LAYOUT.context.start, LAYOUT.context.stop)
SUFFIX = torch.arange(LAYOUT.context.stop, LAYOUT.rows)


def _stored(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return dense_reuse(eager_model(name), LAYOUT.prefix, LAYOUT.chunks, len(LAYOUT.suffix))


def _squared(mine: torch.Tensor, true: torch.Tensor) -> np.ndarray:
    return ((mine - true).double() ** 2)[0, :, CONTEXT].sum((0, 2)).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_deviation_before_and_after(name):
    found, stored = analyzed(name), _stored(name)
    rows = torch.from_numpy(found.recomputed)
    full = dense_prefill(eager_model(name), LAYOUT.token_ids).layers
    blended = dense_blend(eager_model(name), LAYOUT.token_ids, stored, [rows] * LAYERS).layers
    for layer in range(LAYERS):
        for part, index in (("keys", 0), ("values", 1)):
            true = full[layer][index]
            for deviation, mine in ((found.before, stored), (found.after, blended)):
                measured = getattr(deviation, part)
                expected = _squared(mine[layer][index], true)
                np.testing.assert_allclose(measured.squared[layer], expected, rtol=1e-3, atol=1e-6)
                np.testing.assert_allclose(measured.size[layer], _squared(0 * true, true), rtol=1e-4)
    assert found.after.values.squared.sum() < found.before.values.squared.sum()


@pytest.mark.parametrize("name", NAMES)
def test_what_flows_between_chunks(name):
    found, stored = analyzed(name), _stored(name)
    rows = torch.from_numpy(found.recomputed)
    full, reuse, blend = dense_weights(name), dense_attention(name, stored, SUFFIX), dense_attention(name, stored, rows)
    computed = np.zeros(LAYOUT.rows, dtype=bool)
    computed[found.recomputed] = True
    asked = slice(LAYOUT.context.stop, LAYOUT.rows)
    spans = found.segments.spans
    for layer in range(LAYERS):
        expected = np.where(computed, to_other_chunks(blend[layer].mean(0)), 0)
        np.testing.assert_allclose(found.exchange.cross[layer], expected, atol=2e-5)
        for index, weights in enumerate((full, reuse, blend)):
            reads = by_segment(weights[layer].mean(0)[asked], spans).mean(0)
            np.testing.assert_allclose(found.exchange.question[index, layer], reads, atol=2e-5)
        for index, weights in enumerate((reuse, blend)):
            distance = np.abs(weights[layer] - full[layer])[:, asked].sum(2).mean(1) / 2
            np.testing.assert_allclose(found.exchange.variation[index, layer], distance, atol=2e-5)


def test_the_cross_numbers_are_means_over_context_rows():
    found = analyzed("llama")
    numbers = summarize(found).cross
    full = np.stack([to_other_chunks(layer.mean(0)) for layer in dense_weights("llama")])[:, CONTEXT]
    read = np.stack([layer.mean(0)[SUFFIX].mean(0) for layer in dense_weights("llama")])[:, CONTEXT].sum(0)
    np.testing.assert_allclose(numbers.full, full.mean(1), atol=2e-5)
    np.testing.assert_allclose(numbers.full_read, (full * read / read.sum()).sum(1), atol=2e-5)
    blended = found.exchange.cross[:, CONTEXT]
    np.testing.assert_allclose(numbers.blended, blended.sum(1) / LAYOUT.context.length, atol=1e-12)
    assert (numbers.blended < numbers.full).all()
    variation = (numbers.variation_reuse, numbers.variation_blended)
    np.testing.assert_allclose(variation, found.exchange.variation.mean(2), atol=1e-12)


@pytest.mark.parametrize(
    ("selector", "score"), [("hkvd", "deviation"), ("query_guided", "question"), ("mixed", "combined")]
)
def test_the_scores_rank_rows_as_the_selector_does(selector, score):
    found = analyzed("qwen2", BlendConfig(f"{selector}:lead=0", ratio=0.3))
    scores = getattr(found.scores, score)
    chosen = np.intersect1d(found.recomputed, np.arange(*LAYOUT.context)) - LAYOUT.context.start
    later = np.arange(LAYOUT.chunk_spans[0].length, LAYOUT.context.length)  # the first chunk is exact and never chosen
    best = later[np.argsort(-scores[later], kind="stable")[: len(chosen)]]
    assert sorted(best) == chosen.tolist()


def test_the_correction_is_part_of_the_blend_and_not_of_reuse():
    blender = Blender(decoder("llama"), open_store("memory:", codec="native"), BlendConfig(selector="none"))
    plain = analyze_prompt(blender, LAYOUT)
    draw = torch.Generator().manual_seed(1)
    assert blender.calibrate(LAYOUT.prefix, torch.randint(3, 60, (120, 14), generator=draw).tolist())
    mapped = analyze_prompt(blender, LAYOUT)
    assert (plain.mapped, mapped.mapped) == (False, True)
    np.testing.assert_allclose(mapped.before.values.squared, plain.before.values.squared, rtol=1e-5, atol=1e-10)
    assert mapped.after.keys.squared.sum() < plain.after.keys.squared.sum()


def test_a_chunk_that_comes_twice():
    layout = make_layout(chunks=(6,))
    twice = type(layout).of_chunks(layout.prefix, layout.chunks * 2, layout.suffix)
    squared = analyzed("llama", FIRST_K, twice).before.values.squared
    assert squared[:, :6].sum() < 1e-6 < squared[:, 6:].sum()


def test_refusals():
    with pytest.raises(PromptError, match="no chunks"):
        analyzed("llama", FIRST_K, make_layout(chunks=()))
    with pytest.raises(PromptError, match="512"):
        analyzed("llama", FIRST_K, make_layout(chunks=(600,)))
    with pytest.raises(ConfigError, match="leave out --mask"):
        analyzed("llama", BlendConfig(mask="bottom-right"))
    for head in (-1, 4):
        with pytest.raises(ConfigError, match="heads 0 to 3"):
            analyzed("llama", FIRST_K, head=head)


def test_a_chosen_head_is_drawn_in_every_layer(nan_buffers):
    found: PromptAnalysis = analyzed("llama", FIRST_K, head=2, cells=10)
    pictures = [layer.picture for layer in found.attention]
    assert [picture.head for picture in pictures] == [2] * LAYERS
    assert {picture.width for picture in pictures} == {6}
    assert np.isfinite([picture.cells for picture in pictures]).all()
