"""The KV correction does no harm: what it is fitted on, and that prompts it does not fit go without."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from blends import assert_bits, assert_kv, context_error, empty_blender, filled, prefill_in_steps, texts
from cases import assert_same_blend, cache_of
from models import decoder

from blend.chunks import fit
from blend.chunks.correction import Bounds, KVCorrection
from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig
from blend.eval.estimates import FixedRatio
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.prefill import blender as blender_module
from blend.prefill.blender import Blend, Blender
from blend.prefill.correction_check import CorrectionCheck
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED

PREFIX, SUFFIX = (5, 6, 7, 8, 9), (11, 12, 13)
GUIDED = BlendConfig(selector="query_guided", ratio=0.15)
REUSE = BlendConfig(selector="none")
CHUNKS = texts(30, 40, 30, 50, *[14] * 60)


def prompt(*chunks: tuple[int, ...], prefix: tuple[int, ...] = PREFIX) -> PromptLayout:
    return PromptLayout.of_chunks(prefix, chunks, SUFFIX, canonical_prefix=PREFIX)


def calibrated(chunks: list[tuple[int, ...]], name: str = "qwen2") -> Blender:
    blender = filled(decoder(name), prompt(*chunks), GUIDED)
    blender.calibrate(PREFIX, chunks)
    return blender


def write_map(blender: Blender, correction: KVCorrection) -> None:
    blender.store.write_artifact(blender.encoder(PREFIX).identity.correction_name, correction.to_bytes())


@pytest.mark.parametrize("count", [2, 3, 9, 16])
def test_every_chunk_of_a_small_corpus_is_fitted_behind_another(count, monkeypatch):
    """Those of the surrogate context too, which have a cache alone only."""
    chunks, encode = texts(*[10] * count), Mock(side_effect=Decoder.encode_rows)
    blender = empty_blender()
    library = with_surrogate(blender.library(PREFIX), chunks, 20)
    library.compute(library.missing(chunks))
    monkeypatch.setattr(Decoder, "encode_rows", lambda *arguments: encode(*arguments))
    blender.calibrate(PREFIX, chunks)
    prompts = [call.args[1][0].tolist() for call in encode.call_args_list]
    behind = {tuple(ids[at : at + 10]) for ids in prompts for at in range(10, len(ids), 10)}
    assert behind == set(chunks)
    assert len(library.surrogate) == count // 8


def test_prompts_of_a_fit_are_filled_to_the_last_token(monkeypatch):
    monkeypatch.setattr(fit, "PROMPT_TOKENS", 40)
    prompts = fit.deal_prompts(empty_blender().encoder(PREFIX), texts(*[10] * 20))
    assert max(prompt.context.length for prompt in prompts) == 40


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("llama", 1), ("qwen2", 0), ("gemma3", 2)])
def test_a_long_chunk_among_short_ones_is_not_made_worse(name, seed):
    """It used to stand first in both calibration prompts, so that no row as far from its chunk's start was fitted."""
    chunks = texts(8, 8, 8, 90, seed=seed)
    blender, layout = calibrated(chunks, name), prompt(chunks[0], chunks[3], chunks[1], chunks[2])
    # Of a random model's gain little can be predicted, so that the map may gain nothing; it used to lose by a factor of 2 to 8.
    assert context_error(blender, layout, corrected=True) < 1.15 * context_error(blender, layout, corrected=False)


def scaled(found: KVCorrection, times: float) -> KVCorrection:
    """The map with gains `times` as large, without bounds."""
    layers = [
        part and replace(part, up=part.up * times, bounds=Bounds(part.bounds.reach, 1e6, 1e6)) for part in found.layers
    ]
    return replace(found, layers=tuple(layers))


def with_map_scaled(times: float) -> tuple[Blender, PromptLayout]:
    blender = calibrated(CHUNKS)
    write_map(blender, scaled(blender.correction(PREFIX), times))
    return blender, prompt(CHUNKS[1], CHUNKS[0], CHUNKS[3], CHUNKS[2])


@pytest.mark.parametrize(
    ("selector", "ratio", "then"),
    [
        ("query_guided", 0.15, LEAST_RATIO_UNCORRECTED),
        ("query_guided", 0.2, 0.4),
        ("hkvd", 0.15, LEAST_RATIO_UNCORRECTED),
        ("random", 0.15, LEAST_RATIO_UNCORRECTED),
    ],
)
def test_a_map_that_does_not_fit_the_prompt_is_left_out_and_more_is_recomputed(selector, ratio, then):
    blender, layout = with_map_scaled(100)
    config = BlendConfig(selector, ratio)
    blend = blender.prefill(layout, config=config)
    without = blender.prefill(layout, config=replace(config, correction=False, ratio=then))
    assert len(blend.notes) == 1
    assert "KV correction" in blend.notes[0]
    assert_same_blend(blend, without)
    assert blend.rows_share > without.rows_share  # what the first attempt cost is counted
    assert blend.artifact_problems == ()


def test_until_there_is_a_correction_more_rows_are_recomputed_and_the_reply_says_so():
    """Where a worker computes caches by itself: at 15 % those without a correction change answers."""
    layout = prompt(CHUNKS[1], CHUNKS[0], CHUNKS[3])
    blender = filled(decoder("qwen2"), layout, GUIDED)
    careful = Blender(blender.decoder, blender.store, GUIDED, uncorrected_ratio=LEAST_RATIO_UNCORRECTED)
    before, uncorrected = careful.prefill(layout), replace(GUIDED, correction=False)
    assert before.notes == ("there is no KV correction for these caches yet: 30% of the rows recomputed",)
    assert before.uncorrected
    more, asked_for = (
        careful.prefill(layout, config=replace(uncorrected, ratio=ratio)) for ratio in (LEAST_RATIO_UNCORRECTED, 0.15)
    )
    assert torch.equal(before.selection.rows, more.selection.rows)
    assert asked_for.rows_recomputed < before.rows_recomputed, "who wants none gets the ratio that was asked for"
    assert asked_for.notes == ()
    blender.calibrate(PREFIX, CHUNKS)
    after = careful.prefill(layout)
    assert after.rows_recomputed == asked_for.rows_recomputed
    assert (after.uncorrected, after.notes) == (False, ())


@pytest.mark.parametrize("shorter", [0, 2])
def test_a_first_chunk_near_its_own_place_needs_no_correction(shorter: int) -> None:
    """Behind a prefix that is not quite that of its cache: then twice the rows were recomputed for nothing."""
    plain = calibrated(CHUNKS)
    blender = Blender(plain.decoder, plain.store, GUIDED, uncorrected_ratio=LEAST_RATIO_UNCORRECTED)
    blend = blender.prefill(prompt(CHUNKS[1], CHUNKS[0], CHUNKS[3], prefix=PREFIX[: len(PREFIX) - shorter]))
    assert (blend.uncorrected, blend.notes) == (False, ())


@pytest.mark.parametrize(
    ("selector", "ratio"), [*(("query_guided", ratio) for ratio in (0.05, 0.15, 0.4)), ("query_guided:layers=0", 0.15)]
)
def test_a_map_that_fits_stays_and_nothing_is_said(selector, ratio):
    """Also where the question looks at no layer that the map is judged in."""
    blender, layout = calibrated(CHUNKS), prompt(CHUNKS[1], CHUNKS[0], CHUNKS[3], CHUNKS[2])
    blend, reuse = (blender.prefill(layout, config=config) for config in (BlendConfig(selector, ratio), REUSE))
    assert blend.notes == ()
    kept = torch.ones(layout.rows, dtype=torch.bool)
    kept[blend.selection.rows] = False
    assert_kv(cache_of(blend), cache_of(reuse), kept, assert_bits)


@pytest.mark.parametrize(("name", "ratio"), [("mistral", 0.15), ("gemma3", 0.05), ("qwen2", 0.05)])
def test_a_map_that_is_right_only_where_chunks_start_is_left_out(name, ratio):
    """Most of the rows recomputed are the first of their chunks: they must not speak for the others."""
    chunks = texts(8, 90, *[20] * 30)
    blender, layout, config = calibrated(chunks, name), prompt(*chunks[:3]), replace(GUIDED, ratio=ratio)
    assert blender.prefill(layout, config=config).correction_fits
    write_map(blender, _right_at_the_start_only(blender.correction(PREFIX)))
    assert context_error(blender, layout, corrected=True) > 3 * context_error(blender, layout, corrected=False)
    assert not blender.prefill(layout, config=config).correction_fits


def _right_at_the_start_only(found: KVCorrection) -> KVCorrection:
    layers = []
    for part in found.layers:
        if part is not None:
            down = part.down.clone()
            shift = 10 * down[: part.centre.shape[0]].square().sum(0).sqrt()
            down[-8] += shift  # of every row
            down[-2] -= shift  # of rows near the start: their feature falls from one to nothing
            part = replace(part, down=down, bounds=Bounds(1e6, 1e6, 1e6))
        layers.append(part)
    return replace(found, layers=tuple(layers))


@pytest.mark.parametrize("selector", ["query_guided", "random", "hkvd"])
def test_a_map_is_judged_alike_however_the_rows_are_cut(selector, monkeypatch):
    """One that fits and one that does not."""
    chunks, scores, score = texts(140, 120, 100, 80, *[14] * 60), list[torch.Tensor](), CorrectionCheck.score
    monkeypatch.setattr(CorrectionCheck, "score", lambda check: scores.append(score(check)) or scores[-1])
    blender, layout = calibrated(chunks), prompt(chunks[1], chunks[0], chunks[3], chunks[2])
    found = blender.correction(PREFIX)

    def judged(most_rows: int | None) -> tuple[float, Blend]:
        scores.clear()
        blend = prefill_in_steps(blender, layout, config=BlendConfig(selector, 0.4), most_rows=most_rows)
        return float(scores[0]), blend

    for times, fits in ((1.0, True), (20.0, False)):
        write_map(blender, scaled(found, times))
        whole, alone = judged(None)
        assert (whole > 0) == fits
        for most_rows in (1, 7, 64):
            in_pieces, blend = judged(most_rows)
            assert in_pieces == pytest.approx(whole, abs=1e-5)
            assert torch.equal(blend.selection.rows, alone.selection.rows)
            assert blend.notes == alone.notes
            torch.testing.assert_close(blend.logits, alone.logits, atol=1e-3, rtol=1e-3)


def test_a_provisional_correction_fills_gaps_until_the_corpus_has_its_own():
    blender = empty_blender()
    corpus, others = texts(*[12] * 8), texts(*[14] * 8, seed=1)

    def stored() -> tuple[bool, bytes]:
        found = blender.correction(PREFIX)
        return found.provisional, found.to_bytes()

    assert blender.calibrate(PREFIX, others, provisional=True)
    first = stored()
    assert first[0]
    assert blender.calibrate(PREFIX, texts(*[13] * 8, seed=2), provisional=True)
    assert stored() == first, "the gap was filled"
    assert blender.calibrate(PREFIX, corpus)
    own = stored()
    assert not own[0]
    for provisional in (True, False):
        assert blender.calibrate(PREFIX, others, provisional=provisional)
        assert stored() == own
    assert blender.store.stats().entries == 0, "a fit stores no caches"


def test_a_provisional_correction_does_not_replace_what_the_corpus_got_meanwhile(monkeypatch):
    blender, corpus = empty_blender(), texts(*[12] * 8)
    plain = blender_module.fit_corrections

    def slow(*arguments, **options):
        monkeypatch.setattr(blender_module, "fit_corrections", plain)
        blender.calibrate(PREFIX, corpus)
        return plain(*arguments, **options)

    monkeypatch.setattr(blender_module, "fit_corrections", slow)
    blender.calibrate(PREFIX, texts(*[14] * 8, seed=1), provisional=True)
    assert not blender.correction(PREFIX).provisional


@pytest.mark.parametrize("ratio", [0.15, 0.4])
@pytest.mark.parametrize(("judged", "most_rows"), [(False, None), (False, 16), (True, None), (True, 16)])
@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1"])
def test_a_map_is_judged_by_what_the_question_overwrites(name, judged, most_rows, ratio):
    """With recurrent layers the leads of chunks run with the question, before the rows are chosen."""
    chunks = texts(*[30] * 12)
    blender = calibrated(chunks, name)
    write_map(blender, scaled(blender.correction(PREFIX), 100))
    config = BlendConfig("query_guided", ratio, quality=1.0 if judged else None)
    if judged:
        blender.estimators = FixedRatio(ratio)
    layout = prompt(chunks[1], chunks[0], *chunks[2:6])
    blend = prefill_in_steps(blender, layout, config=config, most_rows=most_rows)
    assert any("the KV correction does not fit this prompt" in note for note in blend.notes)
