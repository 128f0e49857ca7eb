"""The KV correction does no harm: what it is fitted on, how far it reaches, and that prompts it does not fit go without."""

from collections.abc import Callable
from dataclasses import replace

import models
import pytest
import torch
from cases import assert_same_blend, cache_of
from corrections import gained

from blend.chunks import regression
from blend.chunks.correction import Bounds, KVCorrection
from blend.chunks.regression import LayerRows, fit_layer
from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig
from blend.model.decoder import Decoder
from blend.model.passes import run_steps
from blend.prefill import blender as blender_module
from blend.prefill.blender import Blend, Blender
from blend.prefill.check import CorrectionCheck
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED
from blend.store import open_store
from blend.types import PromptLayout

PREFIX, SUFFIX = (5, 6, 7, 8, 9), (11, 12, 13)
GUIDED = BlendConfig(selector="query_guided", ratio=0.15)
Change = Callable[[KVCorrection], KVCorrection]


def texts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, 90, (length,), generator=draw).tolist()) for length in lengths]


def calibrated(chunks: list[tuple[int, ...]], name: str = "llama") -> Blender:
    blender = Blender(models.decoder(name), open_store("memory:"), GUIDED)
    library = blender.library(PREFIX)
    library.compute(library.missing(chunks))
    blender.calibrate(PREFIX, chunks)
    return blender


@pytest.mark.parametrize("count", [2, 3, 9, 16])
def test_every_chunk_of_a_small_corpus_is_fitted_behind_another(count, monkeypatch):
    """Those of the surrogate context too, which have a cache alone only."""
    chunks, run, rows = texts(*[10] * count), Decoder.encode_rows, list[list[int]]()

    def recording(self: Decoder, ids: torch.Tensor, *rest: object) -> None:
        rows.append(ids[0].tolist())
        run(self, ids, *rest)

    blender = Blender(models.decoder("llama"), open_store("memory:"))
    library = with_surrogate(blender.library(PREFIX), chunks, 20)
    library.compute(library.missing(chunks))
    monkeypatch.setattr(Decoder, "encode_rows", recording)
    blender.calibrate(PREFIX, chunks)
    behind = {tuple(prompt[at : at + 10]) for prompt in rows for at in range(10, len(prompt), 10)}
    assert behind == set(chunks)
    assert len(library.surrogate) == count // 8


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("llama", 1), ("qwen2", 0), ("gemma3", 2)])
def test_a_long_chunk_among_short_ones_is_not_made_worse(name, seed):
    """It used to stand first in both calibration prompts, so that no row as far from its chunk's start was fitted."""
    chunks = texts(8, 8, 8, 90, seed=seed)
    blender = calibrated(chunks, name)
    layout = PromptLayout.of_chunks(PREFIX, (chunks[0], chunks[3], chunks[1], chunks[2]), SUFFIX)
    # Of a random model's gain little can be predicted, so that the map may gain nothing; it used to lose by a factor of 2 to 8.
    assert errors(blender, layout, correction=True) < 1.15 * errors(blender, layout, correction=False)


def errors(blender: Blender, layout: PromptLayout, *, correction: bool) -> float:
    """Squared distance of the context's KV from full recompute, over layers, relative to its size in each."""
    reuse = BlendConfig(selector="none", correction=correction)
    found, truth = (cache_of(blender.prefill(layout, config=c)) for c in (reuse, BlendConfig(selector="all")))
    span = slice(layout.chunk_spans[0].stop, layout.context.stop)
    total = 0.0
    for mine, true in zip(found, truth, strict=True):
        for a, b in zip(mine, true, strict=True):
            total += float((a - b)[:, :, span].square().sum() / b[:, :, span].square().sum())
    return total


def constant(rows: int) -> torch.Tensor:
    """Features of rows far from the start of their chunks, right behind the prefix."""
    features = torch.zeros(rows, 8)
    features[:, 0] = 1.0
    return features


def grouped(groups: int, turns: int) -> tuple[LayerRows, torch.Tensor]:
    """Rows whose gain depends on which chunk they are of and on nothing else; what a row of another chunk looks like."""
    draw = torch.Generator().manual_seed(0)
    marks, gains = torch.randn(groups, 12, generator=draw), torch.randn(groups, 12, generator=draw)
    group = torch.arange(groups).repeat_interleave(20).repeat(turns)
    turn = torch.arange(turns).repeat_interleave(20 * groups)
    features = constant(group.shape[0])
    stored = marks[group] * 3 + 0.1 * torch.randn(group.shape[0], 12, generator=draw)
    seen = LayerRows(stored, gains[group], features, group, turn, keys=6, covered=1.0)
    return seen, torch.randn(40, 12, generator=draw) * 9


def test_rows_of_one_chunk_are_never_on_both_sides():
    """What a chunk's rows tell of its other rows must not pass for a prediction of other chunks."""
    seen, _ = grouped(groups=4, turns=1)
    assert fit_layer(seen) is None


def test_chunks_seen_are_predicted_and_unlike_ones_left_alone():
    seen, other = grouped(groups=4, turns=2)
    found = fit_layer(seen)
    assert (gained(found, seen.stored, seen.features) - seen.gain).square().sum() < 0.05 * seen.gain.square().sum()
    assert not gained(found, other, seen.features[:40]).any()
    assert fit_layer(seen._replace(covered=0.0)) is None


def unseen(stored: torch.Tensor, gain: torch.Tensor, features: torch.Tensor, group: torch.Tensor) -> LayerRows:
    """Rows of a corpus of which most was not seen."""
    turn = torch.zeros_like(group)
    return LayerRows(stored, gain, features, group, turn, keys=gain.shape[1] // 2, covered=0.0)


def test_no_prediction_passes_what_was_seen():
    draw = torch.Generator().manual_seed(0)
    stored = torch.randn(200, 16, generator=draw)
    gain = stored @ torch.randn(16, 16, generator=draw)
    features, group = constant(200), torch.arange(200) // 50
    found = fit_layer(unseen(stored, gain, features, group))
    for times in (1.5, 3.0, 100.0):
        predicted = gained(found, stored * times, features)
        for part in (slice(0, 8), slice(8, 16)):
            assert predicted[:, part].norm(dim=1).max() <= 1.001 * gain[:, part].norm(dim=1).max()
    assert not gained(found, stored * 100, features).any()


def test_an_input_that_did_not_vary_does_not_count_for_more_later():
    draw = torch.Generator().manual_seed(0)
    stored = torch.randn(200, 16, generator=draw)
    stored[:, 3] = 0.5
    gain = stored @ torch.randn(16, 16, generator=draw)
    features, group = constant(200), torch.arange(200) // 50
    found = fit_layer(unseen(stored, gain, features, group))
    before = gained(found, stored, features)
    stored[:, 3] += 0.01
    assert (gained(found, stored, features) - before).abs().max() < 0.01 * before.abs().max()


def test_position_features_that_hardly_differ_are_told_apart():
    """Against the normal equations solved with numpy in float64; solved in float32 they are off by percents."""
    import numpy as np

    draw = torch.Generator().manual_seed(0)
    stored, features = torch.randn(400, 4, generator=draw), torch.zeros(400, 8)
    features[:, :3] = torch.tensor([1.0, 40.0, 40.0]) + torch.tensor([0.0, 0.05, 0.05]) * torch.randn(
        400, 3, generator=draw
    )
    gain = (features[:, 1:2] - features[:, 2:3]) * torch.randn(1, 4, generator=draw)
    group = torch.arange(400) // 100
    found = fit_layer(unseen(stored, gain, features, group))
    x = np.concatenate([((stored - found.centre) / found.scale).numpy(), features.numpy()], 1).astype(np.float64)
    penalties = [np.diag([p * 400] * 4 + [regression.POSITION_PENALTY * 400] * 8) for p in regression.PENALTIES]
    weights = [np.linalg.solve(x.T @ x + penalty, x.T @ gain.numpy().astype(np.float64)) for penalty in penalties]
    down, up = found.down.double().numpy(), found.up.double().numpy()
    off = min(np.abs(x @ w - x @ down @ up).max() for w in weights)
    assert off < 1e-4 * gain.abs().max()


def scaled(found: KVCorrection, times: float) -> KVCorrection:
    """The map with gains `times` as large, without bounds."""
    layers = [
        part and replace(part, up=part.up * times, bounds=Bounds(part.bounds.reach, 1e6, 1e6)) for part in found.layers
    ]
    return replace(found, layers=tuple(layers))


def hundredfold(found: KVCorrection) -> KVCorrection:
    return scaled(found, 100)


def with_map_changed(change: Change) -> tuple[Blender, PromptLayout]:
    chunks = texts(30, 40, 30, 50, *[14] * 60)
    blender = calibrated(chunks, "qwen2")
    name, found = blender.encoder(PREFIX).identity.correction_name, blender.correction(PREFIX)
    blender.store.write_artifact(name, change(found).to_bytes())
    return blender, PromptLayout.of_chunks(PREFIX, (chunks[1], chunks[0], chunks[3], chunks[2]), SUFFIX)


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
    blender, layout = with_map_changed(hundredfold)
    config = replace(GUIDED, selector=selector, ratio=ratio)
    blend = blender.prefill(layout, config=config)
    without = blender.prefill(layout, config=replace(config, correction=False, ratio=then))
    assert len(blend.notes) == 1
    assert "KV correction" in blend.notes[0]
    assert_same_blend(blend, without)
    assert blend.rows_share > without.rows_share  # what the first attempt cost is counted
    assert blend.artifact_problems == ()


def test_until_there_is_a_correction_more_rows_are_recomputed_and_the_reply_says_so():
    """Where a worker computes caches by itself: at 15 % those without a correction change answers."""
    chunks = texts(30, 40, 30, 50, *[14] * 60)
    blender = Blender(models.decoder("qwen2"), open_store("memory:"), GUIDED)
    careful = Blender(blender.decoder, blender.store, GUIDED, uncorrected_ratio=LEAST_RATIO_UNCORRECTED)
    library, layout = blender.library(PREFIX), PromptLayout.of_chunks(PREFIX, (chunks[1], chunks[0], chunks[3]), SUFFIX)
    library.compute(library.missing(chunks))

    def filled(**changes: object) -> Blend:
        return careful.prefill(layout, config=replace(GUIDED, **changes))  # type: ignore[arg-type]

    before, asked_for = filled(), filled(correction=False)
    assert torch.equal(before.selection.rows, filled(correction=False, ratio=LEAST_RATIO_UNCORRECTED).selection.rows)
    assert before.uncorrected
    assert before.notes == ("there is no KV correction for these caches yet: 30% of the rows recomputed",)
    assert (
        asked_for.selection.rows.shape < before.selection.rows.shape
    )  # who wants none gets the ratio that was asked for
    assert asked_for.notes == ()
    blender.calibrate(PREFIX, chunks)
    after = filled()
    assert after.selection.rows.shape == asked_for.selection.rows.shape
    assert (after.uncorrected, after.notes) == (False, ())


@pytest.mark.parametrize("shorter", [0, 2])
def test_a_first_chunk_near_its_own_place_needs_no_correction(shorter: int) -> None:
    """Behind a prefix that is not quite that of its cache: then twice the rows were recomputed for nothing."""
    chunks = texts(30, 40, 30, 50, *[14] * 60)
    blender = Blender(models.decoder("qwen2"), open_store("memory:"), GUIDED, uncorrected_ratio=LEAST_RATIO_UNCORRECTED)
    library = blender.library(PREFIX)
    library.compute(library.missing(chunks))
    blender.calibrate(PREFIX, chunks)
    prefix = PREFIX[: len(PREFIX) - shorter]
    layout = PromptLayout.of_chunks(prefix, (chunks[1], chunks[0], chunks[3]), SUFFIX, canonical_prefix=PREFIX)
    blend = blender.prefill(layout)
    assert (blend.uncorrected, blend.notes) == (False, ())


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.4])
def test_a_map_that_fits_stays_and_nothing_is_said(ratio):
    blender, layout = with_map_changed(lambda found: found)
    config = replace(GUIDED, ratio=ratio)
    blend, reuse = blender.prefill(layout, config=config), blender.prefill(layout, config=BlendConfig(selector="none"))
    assert blend.notes == ()
    kept = torch.ones(layout.rows, dtype=torch.bool)
    kept[blend.selection.rows] = False
    for mine, theirs in zip(cache_of(blend), cache_of(reuse), strict=True):
        assert all(torch.equal(a[:, :, kept], b[:, :, kept]) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("name", "ratio"), [("mistral", 0.15), ("gemma3", 0.05), ("qwen2", 0.05)])
def test_a_map_that_is_right_only_where_chunks_start_is_left_out(name, ratio):
    """Most of the rows recomputed are the first of their chunks: they must not speak for the others."""
    chunks = texts(8, 90, *[20] * 30)
    blender = calibrated(chunks, name)
    layout = PromptLayout.of_chunks(PREFIX, (chunks[0], chunks[1], chunks[2]), SUFFIX)
    config = replace(GUIDED, ratio=ratio)
    assert blender.prefill(layout, config=config).correction_fits
    wrong = _right_at_the_start_only(blender.correction(PREFIX))
    blender.store.write_artifact(blender.encoder(PREFIX).identity.correction_name, wrong.to_bytes())
    assert errors(blender, layout, correction=True) > 3 * errors(blender, layout, correction=False)
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


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `CorrectionCheck` makes of each prompt whose map it judges."""
    found, score = list[float](), CorrectionCheck.score

    def recorded(self: CorrectionCheck) -> torch.Tensor:
        scored = score(self)
        found.append(float(scored))
        return scored

    monkeypatch.setattr(CorrectionCheck, "score", recorded)
    return found


@pytest.mark.parametrize("selector", ["query_guided", "random", "hkvd"])
def test_a_map_is_judged_alike_however_the_rows_are_cut(selector, scores):
    """One that fits and one that does not."""
    chunks = texts(140, 120, 100, 80, *[14] * 60)
    blender = calibrated(chunks, "qwen2")
    name, found = blender.encoder(PREFIX).identity.correction_name, blender.correction(PREFIX)
    layout = PromptLayout.of_chunks(PREFIX, (chunks[1], chunks[0], chunks[3], chunks[2]), SUFFIX)
    config = replace(GUIDED, selector=selector, ratio=0.4)

    def judged(times: float, most_rows: int | None) -> tuple[float, Blend]:
        blender.store.write_artifact(name, scaled(found, times).to_bytes())
        scores.clear()
        blend = run_steps(
            blender.steps(layout, config=config, most_rows=most_rows), lambda rows: blender.decoder.prefill([rows])
        )
        return scores[0], blend

    for times, fits in ((1.0, True), (20.0, False)):
        score, alone = judged(times, None)
        assert (score > 0) == fits
        for most_rows in (1, 7, 64):
            in_pieces, blend = judged(times, most_rows)
            assert in_pieces == pytest.approx(score, abs=1e-5)
            assert torch.equal(blend.selection.rows, alone.selection.rows)
            assert blend.notes == alone.notes
            torch.testing.assert_close(blend.logits, alone.logits, atol=1e-3, rtol=1e-3)


def test_a_provisional_correction_fills_gaps_until_the_corpus_has_its_own():
    blender = Blender(models.decoder("llama"), open_store("memory:"))
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
    for chunks, provisional in ((others, True), (others, False)):
        assert blender.calibrate(PREFIX, chunks, provisional=provisional)
        assert stored() == own
    assert blender.store.stats().entries == 0, "a fit stores no caches"


def test_a_provisional_correction_does_not_replace_what_the_corpus_got_meanwhile(monkeypatch):
    blender, corpus = Blender(models.decoder("llama"), open_store("memory:")), texts(*[12] * 8)
    plain = blender_module.fit_corrections

    def slow(*arguments, **options):
        monkeypatch.setattr(blender_module, "fit_corrections", plain)
        blender.calibrate(PREFIX, corpus)
        return plain(*arguments, **options)

    monkeypatch.setattr(blender_module, "fit_corrections", slow)
    blender.calibrate(PREFIX, texts(*[14] * 8, seed=1), provisional=True)
    assert not blender.correction(PREFIX).provisional
