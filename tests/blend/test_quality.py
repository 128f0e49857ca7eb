"""Estimates of a blend's KL, and as many rows as they call for."""

import math
import random
from dataclasses import replace

import pytest
import torch
from blends import filled
from cases import cache_of, make_layout
from models import CORE, decoder

from blend.config import BlendConfig
from blend.eval.estimates import FixedRatio, measure
from blend.intervals import LEAST_SAMPLE, upper_share
from blend.layout import PromptLayout
from blend.quality import RATIOS, Estimator, Quality, Signals, Target, questions_of, signals_of

ASKED = BlendConfig(quality=0.05)


def estimator(prompts: int = 60, seed: int = 0) -> Estimator:
    """KL that falls with the ratio, and signals that tell of it."""
    draw = random.Random(seed)
    signals, kl, flips = [], [], []
    for _ in range(prompts):
        size = math.exp(draw.gauss(-3, 1.2))
        mine = [size * share for share in (1.0, 0.4, 0.15, 0.05)]
        kl.append(tuple(mine))
        flips.append(tuple(draw.random() < min(1.0, 5 * one) for one in mine))
        told = [one * math.exp(draw.gauss(0, 0.4)) for one in mine]
        signals.append(tuple(Signals(draw.random(), one) for one in told))
    return Estimator(tuple(signals), tuple(kl), tuple(flips))


def test_estimates_follow_the_truth():
    fitted, fresh = estimator(), estimator(seed=1)
    told = [fitted.expected(one[0]) for one in fresh.signals]
    true = [one[0] for one in fresh.kl]
    order = sorted(range(len(true)), key=told.__getitem__)
    low, high = order[: len(order) // 2], order[len(order) // 2 :]
    assert sum(true[i] for i in high) > 4 * sum(true[i] for i in low)
    assert sum(told) / sum(true) == pytest.approx(1, abs=0.4)  # the mean is right, not only the order


def on_other_prompts(quality: Quality, prompts: int, seed: int) -> tuple[list[float], list[float]]:
    """KL and flips of 200 prompts where others say how many rows the target takes; 0 where it takes all."""
    fitted, fresh = estimator(prompts, seed=seed), estimator(200, seed=100 + seed)
    target = Target.of(quality, fitted)
    assert quality.kl is None or fitted.policy(target.limit).kl.mean() <= quality.kl
    places = [(*RATIOS, 1.0).index(target.choice(signals).ratio) for signals in fresh.signals]
    kl, flips = (
        [(*true, 0.0)[at] for true, at in zip(truth, places, strict=True)] for truth in (fresh.kl, fresh.flips)
    )
    return kl, flips


@pytest.mark.parametrize("target", [0.02, 0.03, 0.1])
def test_a_limit_keeps_the_target_on_other_prompts(target):
    kl = [one for seed in range(20) for one in on_other_prompts(Quality(target), 60, seed)[0]]
    assert sum(kl) / len(kl) <= target  # of all fits together: it is kept in expectation
    assert sum(one > 0 for one in kl) > 2000


def test_flips_are_kept_on_other_prompts():
    trials = [on_other_prompts(Quality(flips=0.1), 200, seed) for seed in range(20)]
    assert sum(sum(flips) / len(flips) <= 0.1 for _, flips in trials) >= 18
    assert min(sum(one > 0 for one in kl) for kl, _ in trials) > 20


def test_what_too_few_prompts_cannot_show():
    few = estimator(40)
    assert few.limit(Quality(0.02)) == few.limit(Quality(flips=0.02)) == 0.0
    both = Quality(0.05, 0.3)
    assert few.limit(both) == min(few.limit(Quality(0.05)), few.limit(Quality(flips=0.3)))


def test_upper_ends_of_shares():
    assert upper_share(0, 40) == pytest.approx(1 - 0.05 ** (1 / 40), abs=1e-6)
    assert upper_share(0, 149) < 0.02 < upper_share(0, 148)
    assert upper_share(5, 100) == pytest.approx(0.1023, abs=1e-3)  # R: binom.test(5, 100, alternative = "less")
    assert upper_share(3, 3) == 1.0


def test_artifacts_come_back_and_others_are_refused():
    made = estimator(LEAST_SAMPLE)
    assert Estimator.from_bytes(made.to_bytes()) == made
    with pytest.raises(ValueError, match="another version"):
        Estimator.from_bytes(made.to_bytes().replace(b'"version": 2', b'"version": 9'))


def test_signals_by_hand():
    logits, attention = torch.tensor([math.log(2), 0.0, 0.0]), torch.tensor([9.0, 1.0, 2.0, 3.0])
    found = signals_of(logits, attention, torch.tensor([1, 2, 3]), torch.tensor([0, 3]))
    assert found.entropy == pytest.approx(-sum(one * math.log(one) for one in (0.5, 0.25, 0.25)), abs=1e-6)
    assert found.stale == pytest.approx(3 / 15)
    assert signals_of(logits, attention, torch.tensor([1]), torch.tensor([1])).stale == 0


LAYOUT = make_layout(chunks=(23, 31, 27, 40))
RECURRENT = ("qwen3.5", "bamba", "falcon-h1", "lfm2")


@pytest.mark.parametrize("name", [*CORE, *RECURRENT])
def test_a_ratio_that_is_chosen_late_gives_what_it_gives_from_the_start(name):
    """With recurrent layers the leads may be enough: then the question's pass is the recompute."""
    blender = filled(decoder(name), LAYOUT)
    for ratio in (*RATIOS, 1.0):
        judge = blender.estimators = FixedRatio(ratio)
        blend = blender.prefill(LAYOUT, config=ASKED)
        plain = blender.prefill(LAYOUT, config=BlendConfig("all" if ratio == 1 else "query_guided", ratio))
        if ratio == 1:
            assert (blend.quality.kl, blend.quality.ratio, blend.exact_rows) == (0.0, 1.0, LAYOUT.rows)
        else:
            assert torch.equal(blend.selection.rows, plain.selection.rows)
        near = {"atol": 1e-4, "rtol": 1e-4} if ratio == 1 or name in RECURRENT else {}
        torch.testing.assert_close(blend.logits, plain.logits, **near)
        torch.testing.assert_close(cache_of(blend), cache_of(plain), **near)
        least = 0.15 if name in RECURRENT else 0.0
        assert blend.quality.ratio >= ratio
        assert blend.quality.ratio == pytest.approx(max(ratio, least), abs=0.05)
        assert not blend.notes
        stale = [signals.stale for signals in judge.prompts[0]]
        assert stale == sorted(stale, reverse=True)
        assert 1 > stale[0] > stale[-1] >= 0
        following = torch.tensor([[5, 6, 7]])
        torch.testing.assert_close(blend.append(following), plain.append(following), atol=1e-4, rtol=1e-4)


def test_a_stored_estimator_is_used():
    blender = filled(decoder("llama"), LAYOUT)
    plain = blender.prefill(LAYOUT)
    without = blender.prefill(LAYOUT, config=ASKED)
    assert without.quality is None
    assert "no quality is promised" in without.notes[0]
    assert torch.equal(without.selection.rows, plain.selection.rows)
    name = blender.encoder(LAYOUT.prefix).identity.quality_name
    blender.store.write_artifact(name, estimator().to_bytes())
    generous = blender.prefill(LAYOUT, config=replace(ASKED, quality=10.0))
    assert (generous.quality.ratio, generous.quality.target) == (RATIOS[0], Quality(10.0))
    assert not generous.notes
    strict = blender.prefill(LAYOUT, config=replace(ASKED, quality=1e-6))
    assert strict.quality.ratio == 1.0
    # Selectors that do not look at the question have no signals.
    deviating = BlendConfig(selector="hkvd")
    of_deviation = blender.prefill(LAYOUT, config=replace(deviating, quality=0.05))
    assert of_deviation.quality is None
    assert "no quality is promised" in of_deviation.notes[0]
    assert torch.equal(of_deviation.selection.rows, blender.prefill(LAYOUT, config=deviating).selection.rows)
    blender.store.write_artifact(name, b"damaged")
    assert blender.prefill(LAYOUT, config=ASKED).quality is None


def test_what_an_estimator_can_show():
    few = estimator(16)
    assert few.limit(Quality(0.05)) == 0 < 1 / 17 <= few.least_kl
    assert few.limit(Quality(few.least_kl)) > 0
    easy = replace(estimator(), kl=((1e-9,) * len(RATIOS),) * 60)
    assert easy.limit(Quality(0.05)) == 0.05  # far above every estimate, since all of them were fine


def test_it_is_measured_at_every_ratio():
    blender = filled(decoder("llama"), LAYOUT)
    found = measure(blender, LAYOUT)
    assert len(found.signals) == len(found.kl) == len(found.flips) == len(found.answers) - 1 == len(RATIOS)
    assert len({one.entropy for one in found.signals}) == 1
    assert min(found.kl) > 0
    assert measure(blender, PromptLayout.of_chunks(LAYOUT.prefix, (), LAYOUT.suffix)) is None


def test_questions_about_texts():
    texts = [f"The harbour number {i} has nine old gates and two bells. It opened in {1800 + i}." for i in range(30)]
    found = questions_of(texts, 20)
    assert len(found) == 20
    assert questions_of(texts, 20) == found
    assert all(one.endswith("?") for one in found)
