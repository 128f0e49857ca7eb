"""Gradual filtering (CacheBlend, section 4.3) against a dense reference that follows the definition layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import blended, cache_of, make_layout, recorded
from dense_reference import LayerKV, assert_dense, dense_blend, dense_reuse
from models import CORE, HYBRIDS, LAYERS, decoder, eager_model

from blend import BlendConfig, Evidence, Needs, Selector
from blend.errors import ConfigError
from blend.select import SELECTORS, Gradual, Step, make_selector
from blend.select.selectors import rows_of
from tests.blend.blends import refused

LAYOUT = make_layout()
BUDGET = 14  # 30 % of 46 rows in chunks
# Layers 1, 2 and 3 of the tiny models look again; 1.5, 1 and .5 budgets are the budget on average.
KEPT = {1: 21, 2: 14, 3: 7}


def _deviations(fresh: LayerKV, stored: LayerKV, rows: list[int]) -> dict[int, float]:
    """Squared distance of each row's fresh values from its stored ones."""
    differences = {row: (fresh[1][0, :, row] - stored[1][0, :, row]).double() for row in rows}
    return {row: float((difference * difference).sum()) for row, difference in differences.items()}


@pytest.mark.parametrize("name", [*CORE, "gemma2"])
def test_each_layer_drops_the_rows_that_deviate_least_there(name):
    """By definition: a dense pass over the rows chosen below a layer gives its fresh KV, plain reuse the stored.

    Rows that drop out keep the fresh KV of the layers below, and stored KV from there on.
    """
    model = eager_model(name)
    prefill = recorded(decoder(name), LAYOUT, BlendConfig("gradual", ratio=0.3))
    reused = dense_reuse(model, LAYOUT.prefix, LAYOUT.chunks, len(LAYOUT.suffix))
    question = list(range(LAYOUT.context.stop, LAYOUT.rows))
    candidates = list(range(LAYOUT.chunk_spans[0].stop, LAYOUT.context.stop))  # the first chunk is exact as stored
    rows_by_layer = [torch.tensor([*candidates, *question])]
    for layer, budget in KEPT.items():
        same_rows_above = [*rows_by_layer, *[rows_by_layer[-1]] * (LAYERS - layer)]
        measured = dense_blend(model, LAYOUT.token_ids, reused, same_rows_above)
        deviations = _deviations(measured.layers[layer], reused[layer], candidates)
        kept = [row for row in prefill.rows_by_layer[layer].tolist() if row < LAYOUT.context.stop]
        dropped = sorted(set(candidates) - set(kept))
        assert len(kept) == budget
        assert set(kept) <= set(candidates)
        # Behind a window, rows may not deviate at all: these are equal up to rounding.
        rounding = 1e-6 * max(deviations.values())
        assert min(deviations[row] for row in kept) >= max(deviations[row] for row in dropped) - rounding
        candidates = kept
        rows_by_layer.append(torch.tensor([*kept, *question]))
    assert [rows.tolist() for rows in prefill.rows_by_layer] == [rows.tolist() for rows in rows_by_layer]
    assert_dense(
        prefill.blend.logits, cache_of(prefill.blend), dense_blend(model, LAYOUT.token_ids, reused, rows_by_layer)
    )


def test_figures_count_the_rows_of_each_layer_and_name_those_of_the_last():
    blend = blended(decoder("llama"), LAYOUT, BlendConfig("gradual", ratio=0.3))
    question = len(LAYOUT.suffix)
    below = LAYOUT.rows - LAYOUT.chunk_spans[0].stop
    counts = (below, 21 + question, 14 + question, 7 + question)
    assert blend.selection.rows_per_layer == counts
    assert blend.rows_recomputed == 7 + question
    assert blend.rows_share == pytest.approx(sum(counts) / (LAYERS * LAYOUT.rows))


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 8, 9, 12, 24, 28, 32, 80])
@pytest.mark.parametrize("first", [1.0, 1.5, 2.0])
def test_layers_from_the_check_layer_on_compute_the_budget_on_average(layers, first):
    steps = Gradual(first=first).needs(layers).steps
    factors = [[step.factor for step in steps if step.layer <= layer][-1] for layer in range(1, layers)]
    assert steps[0] == Step(1, first if len(steps) > 1 else 1.0)
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] >= 0
    assert sum(factors) == pytest.approx(layers - 1)


def test_a_deep_model_looks_again_in_its_lower_half():
    steps = make_selector("gradual").needs(24).steps
    assert [step.layer for step in steps] == [1, 3, 5, 7]
    assert [step.factor for step in steps] == pytest.approx([1.5, 1.298, 1.096, 0.895], abs=1e-3)


def test_with_its_first_share_at_the_ratio_it_chooses_again_from_as_many_rows():
    """Nothing drops out later: the rows of hkvd."""
    gradual = blended(decoder("llama"), LAYOUT, BlendConfig("gradual:first=1", ratio=0.3))
    once = blended(decoder("llama"), LAYOUT, BlendConfig("hkvd", ratio=0.3))
    assert torch.equal(gradual.selection.rows, once.selection.rows)
    assert gradual.selection.rows_per_layer == once.selection.rows_per_layer


def test_a_model_whose_upper_layers_share_kv_is_looked_at_where_it_keeps_some():
    """Two of four layers keep KV: one look, as hkvd takes it."""
    gradual = blended(decoder("gemma3n"), LAYOUT, BlendConfig("gradual", ratio=0.3))
    once = blended(decoder("gemma3n"), LAYOUT, BlendConfig("hkvd", ratio=0.3))
    assert torch.equal(gradual.logits, once.logits)
    with refused(ConfigError, r"selector gradual:check_layer=2: layer 2 has no KV"):
        blended(decoder("gemma3n"), LAYOUT, BlendConfig("gradual:check_layer=2", ratio=0.3))


def test_a_model_with_recurrent_layers_refuses_it_by_name():
    with refused(
        ConfigError, r"^selector gradual chooses single rows, which a model with recurrent layers cannot compute"
    ):
        blended(decoder(next(iter(HYBRIDS))), LAYOUT, BlendConfig("gradual", ratio=0.3))


@dataclass(frozen=True)
class LastRows(Selector):
    """A selector of a user's own that looks four times, at the input first, and takes the last rows each time."""

    def needs(self, layers: int) -> Needs:
        return Needs(0, factor=1.75, later=(Step(1, 1.5), Step(2), Step(3, 0.5)))

    def select(self, evidence: Evidence) -> torch.Tensor:
        assert (evidence.fresh is None) == (evidence.layer == 0)
        return evidence.candidates[max(0, len(evidence.candidates) - evidence.budget) :]


def test_a_users_selector_may_look_at_several_layers():
    blend = blended(decoder("llama"), LAYOUT, BlendConfig(LastRows(), ratio=0.3))
    assert blend.selection.rows_per_layer == tuple(rows + len(LAYOUT.suffix) for rows in (24, 21, 14, 7))
    rows = blend.selection.rows.tolist()
    assert rows == [*range(LAYOUT.context.stop - 7, LAYOUT.rows)]


@dataclass(frozen=True)
class SecondThoughts(Selector):
    """Keeps its promise at the first layer alone."""

    def needs(self, layers: int) -> Needs:
        return Needs(1, later=(Step(2, 0.5),))

    def select(self, evidence: Evidence) -> torch.Tensor:
        return evidence.candidates if evidence.layer == 2 else evidence.candidates[: evidence.budget]


def test_a_users_selector_is_checked_at_every_layer():
    with refused(ConfigError, r"^selector SecondThoughts: it returned 14 rows where the budget is 7"):
        blended(decoder("llama"), LAYOUT, BlendConfig(SecondThoughts(), ratio=0.3))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda: Needs(2, later=(Step(1),)), "chooses at layers 2, 1; give them in ascending order"),
        (lambda: Needs(1, later=(Step(1),)), "chooses at layers 1, 1; give them in ascending order"),
        (lambda: Step(-1), "layer: -1"),
        (lambda: Step(1, float("nan")), "factor: nan"),
        (lambda: Needs(1, factor=-0.5), "factor: -0.5"),
        (lambda: Gradual(first=0.9), "first: 0.9"),
        (lambda: make_selector("gradual:first=3"), "gradual: first: 3"),
    ],
)
def test_steps_that_cannot_be_are_refused(steps, message):
    with pytest.raises(ConfigError, match=message):
        steps()


def test_a_later_layer_that_the_model_lacks_is_refused():
    class TooDeep(LastRows):
        def needs(self, layers: int) -> Needs:
            return Needs(1, later=(Step(layers),))

    with refused(ConfigError, rf"^selector TooDeep: layer {LAYERS} has no KV"):
        blended(decoder("llama"), LAYOUT, BlendConfig(TooDeep(), ratio=0.3))


def test_only_listed_selectors_are_trusted_wherever_they_are_written():
    """A class in the module of the built-in ones that no test knows is checked as a user's own is."""

    class Unlisted(Selector):
        def select(self, evidence: Evidence) -> torch.Tensor:
            return evidence.candidates

    Unlisted.__module__ = Gradual.__module__
    assert Unlisted not in SELECTORS.values()
    with pytest.raises(ConfigError, match="it returned 46 rows where the budget is 3"):
        rows_of(Unlisted(), Evidence(LAYOUT, torch.arange(*LAYOUT.context), 3))
