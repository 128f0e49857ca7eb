"""The regression behind the KV correction, its features and its bounds, each against its formula."""

import numpy as np
import pytest
import torch
from corrections import gained

from blend.chunks import regression
from blend.chunks.correction import ROW_FEATURES, Bounds, KVCorrection, LayerCorrection, position_features, row_features
from blend.chunks.regression import LayerRows, fit_layer
from blend.layout import PromptLayout


def rows_seen(stored: torch.Tensor, gain: torch.Tensor, features: torch.Tensor, covered: float = 1.0) -> LayerRows:
    """Rows of four groups of chunks, each seen once."""
    count = stored.shape[0]
    group = torch.arange(count) * 4 // count
    return LayerRows(stored, gain, features, group, torch.zeros(count).long(), gain.shape[1] // 2, covered)


def of_no_meaning(rows: int) -> torch.Tensor:
    """Features of rows in chunks of 20, in places of no meaning."""
    features = torch.randn(rows, 8, generator=torch.Generator().manual_seed(9))
    features[:, ROW_FEATURES] = row_features(torch.arange(rows) % 20)
    return features


def constant(rows: int) -> torch.Tensor:
    """Features of rows far from the start of their chunks, right behind the prefix."""
    features = torch.zeros(rows, 8)
    features[:, 0] = 1.0
    return features


def predicted(seen: LayerRows) -> torch.Tensor:
    """What the map of these rows adds to them."""
    return gained(fit_layer(seen), seen.stored, seen.features, torch.arange(seen.stored.shape[0]) % 20)


def off_from_normal_equations(seen: LayerRows, penalty: float) -> float:
    """The largest distance of the map from the normal equations solved with numpy in float64."""
    found, (count, width) = fit_layer(seen), seen.stored.shape
    x = np.concatenate([((seen.stored - found.centre) / found.scale).numpy(), seen.features.numpy()], 1)
    x = x.astype(np.float64)
    penalties = np.diag([penalty * count] * width + [regression.POSITION_PENALTY * count] * 8)
    weights = np.linalg.solve(x.T @ x + penalties, x.T @ seen.gain.numpy().astype(np.float64))
    return np.abs(x @ weights - x @ found.down.double().numpy() @ found.up.double().numpy()).max()


def test_a_linear_relation_is_found_and_unpredictable_parts_are_left_alone():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 24, generator=draw) * 3 + 5
    linear = rows @ torch.randn(24, 12, generator=draw) + 1.0
    noise = torch.randn(400, 12, generator=draw)
    found = predicted(rows_seen(rows, torch.cat((linear, noise), dim=1), of_no_meaning(400)))
    spread = linear - linear.mean(0)
    assert (found[:, :12] - linear).square().sum() < 0.02 * spread.square().sum()
    assert not found[:, 12:].any()


def test_noise_gives_no_map():
    draw = torch.Generator().manual_seed(0)
    rows, gain = (torch.randn(40, 24, generator=draw) for _ in range(2))
    assert fit_layer(rows_seen(rows, gain, of_no_meaning(40))) is None


def test_the_factors_are_those_of_the_whole_regression_where_the_rank_allows():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 20, generator=draw)
    gain = rows @ torch.randn(20, 20, generator=draw) + 0.1 * torch.randn(500, 20, generator=draw)
    assert off_from_normal_equations(rows_seen(rows, gain, of_no_meaning(500)), min(regression.PENALTIES)) < 2e-3


def test_position_features_that_hardly_differ_are_told_apart():
    """Solved in float32 they are off by percents."""
    draw = torch.Generator().manual_seed(0)
    stored, features = torch.randn(400, 4, generator=draw), torch.zeros(400, 8)
    spread = torch.tensor([0.0, 0.05, 0.05]) * torch.randn(400, 3, generator=draw)
    features[:, :3] = torch.tensor([1.0, 40.0, 40.0]) + spread
    gain = (features[:, 1:2] - features[:, 2:3]) * torch.randn(1, 4, generator=draw)
    seen = rows_seen(stored, gain, features, covered=0.0)
    off = min(off_from_normal_equations(seen, penalty) for penalty in regression.PENALTIES)
    assert off < 1e-4 * gain.abs().max()


def test_wide_kv_goes_through_a_sketch(monkeypatch):
    monkeypatch.setattr(regression, "WIDEST", 16)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 4, generator=draw)
    rows, gain = (hidden @ torch.randn(4, 40, generator=draw) for _ in range(2))
    seen = rows_seen(rows, gain, of_no_meaning(400))
    assert fit_layer(seen).down.shape[0] == 48
    assert (predicted(seen) - gain).square().sum() < 0.05 * gain.square().sum()


def grouped(turns: int) -> LayerRows:
    """Rows whose gain depends on which of four chunks they are of, and on nothing else."""
    draw = torch.Generator().manual_seed(0)
    marks, gains = torch.randn(4, 12, generator=draw), torch.randn(4, 12, generator=draw)
    group = torch.arange(4).repeat_interleave(20).repeat(turns)
    turn = torch.arange(turns).repeat_interleave(20 * 4)
    stored = marks[group] * 3 + 0.1 * torch.randn(len(group), 12, generator=draw)
    return LayerRows(stored, gains[group], constant(len(group)), group, turn, keys=6, covered=1.0)


def test_rows_of_one_chunk_are_never_on_both_sides():
    """What a chunk's rows tell of its other rows must not pass for a prediction of other chunks."""
    assert fit_layer(grouped(turns=1)) is None


def test_chunks_seen_are_predicted_and_unlike_ones_left_alone():
    seen = grouped(turns=2)
    found = fit_layer(seen)
    assert (gained(found, seen.stored, seen.features) - seen.gain).square().sum() < 0.05 * seen.gain.square().sum()
    other = torch.randn(40, 12, generator=torch.Generator().manual_seed(1)) * 9
    assert not gained(found, other, seen.features[:40]).any()
    assert fit_layer(seen._replace(covered=0.0)) is None


def test_no_prediction_passes_what_was_seen():
    draw = torch.Generator().manual_seed(0)
    stored = torch.randn(200, 16, generator=draw)
    gain, features = stored @ torch.randn(16, 16, generator=draw), constant(200)
    found = fit_layer(rows_seen(stored, gain, features, covered=0.0))
    for times in (1.5, 3.0, 100.0):
        farther = gained(found, stored * times, features)
        for part in (slice(0, 8), slice(8, 16)):
            assert farther[:, part].norm(dim=1).max() <= 1.001 * gain[:, part].norm(dim=1).max()
    assert not farther.any()


def of_groups(stored: torch.Tensor, gain: torch.Tensor, group: torch.Tensor) -> LayerRows:
    """Rows whose values are like their keys."""
    both = [torch.cat((part, part), dim=1) for part in (stored, gain)]
    return LayerRows(*both, constant(len(group)), group, torch.zeros_like(group), keys=stored.shape[1], covered=0.0)


def test_a_map_that_harms_one_group_of_chunks_is_left_out():
    """However much it gains on the others."""
    draw = torch.Generator().manual_seed(0)
    stored, group = torch.randn(200, 8, generator=draw), torch.arange(4).repeat_interleave(50)
    gain = stored @ torch.randn(8, 8, generator=draw)
    assert fit_layer(of_groups(stored, gain, group))
    gain[group == 3] *= -0.2
    assert fit_layer(of_groups(stored, gain, group)) is None


def test_a_gain_larger_than_any_seen_is_limited_before_it_is_judged():
    """In the last group all inputs are large together, and the gain is no larger than where each was alone."""
    draw, size = torch.Generator().manual_seed(0), 3.0
    alone, together = torch.eye(8).repeat(30, 1), torch.full((4, 8), 8**-0.5)
    sign = torch.randint(0, 2, (244, 1), generator=draw) * 2 - 1
    stored, gain = size * sign * torch.cat((alone, together)), size * sign * torch.full((244, 8), 8**-0.5)
    group = torch.cat((torch.arange(3).repeat_interleave(80), torch.full((4,), 3)))
    seen = of_groups(stored, gain, group)
    missed = gained(fit_layer(seen), seen.stored, seen.features) - seen.gain
    assert missed.square().sum() < 0.05 * seen.gain.square().sum()


def test_keys_that_never_vary_leave_a_map_of_values_that_can_be_stored():
    draw = torch.Generator().manual_seed(0)
    stored = torch.randn(200, 16, generator=draw)
    stored[:, :8] = 0.5
    found = fit_layer(rows_seen(stored, stored @ torch.randn(16, 16, generator=draw), constant(200)))
    content = KVCorrection((found,), before=9, length=9).to_bytes()
    assert KVCorrection.from_bytes(content, torch.device("cpu")).layers[0]


def test_an_input_that_did_not_vary_does_not_count_for_more_later():
    draw = torch.Generator().manual_seed(0)
    stored, features = torch.randn(200, 16, generator=draw), constant(200)
    stored[:, 3] = 0.5
    found = fit_layer(rows_seen(stored, stored @ torch.randn(16, 16, generator=draw), features, covered=0.0))
    before = gained(found, stored, features)
    stored[:, 3] += 0.01
    assert (gained(found, stored, features) - before).abs().max() < 0.01 * before.abs().max()


def test_position_features_by_hand():
    layout = PromptLayout.of_chunks((1, 2), ((3, 4, 5), (6, 7, 8, 9, 10, 11)), (12,))
    features = position_features(layout, torch.tensor([5, 6, 8, 10]))
    assert torch.equal(features[:, 0], torch.ones(4))
    assert torch.allclose(features[:, 1], torch.tensor([4 / 1, 5 / 2, 7 / 4, 9 / 6]).log())
    assert torch.allclose(features[:, 2], torch.full((4,), 4.0).log())
    assert features[:, 3:6].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert torch.allclose(features[:, 6], (-torch.tensor([0.0, 1, 3, 5]) / 8).exp())
    capped = position_features(layout, torch.tensor([5, 6, 8, 10]), before=1, length=4)
    assert torch.allclose(capped[:, 1], torch.tensor([2 / 1, 3 / 2, 5 / 4, 5 / 4]).log())
    assert torch.equal(capped[2], capped[3])
    of_first = position_features(layout, torch.tensor([2, 4]))
    assert torch.equal(of_first[:, 1:3], torch.zeros(2, 2)), "nothing stands before the first chunk"


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (Bounds(2.0, 100.0, 100.0), [7.5, -2.5]),  # as far as the farthest row seen
        (Bounds(4 / 3, 100.0, 100.0), [3.75, -1.25]),  # half as far again
        (Bounds(1.0, 100.0, 100.0), [0.0, 0.0]),  # twice as far
        (Bounds(100.0, 1.5, 100.0), [1.5, -0.5]),  # a larger gain of keys than any seen
        (Bounds(100.0, 100.0, 1.25), [3.75, -1.25]),  # of values
    ],
)
def test_what_lies_beyond_the_rows_seen_is_shrunk(bounds, expected):
    """A map of one key and one value, whose gauge is the first input."""
    down, gauge = torch.zeros(10, 1), torch.zeros(10, 1)
    down[0, 0], down[2, 0], gauge[0, 0] = 1.0, 0.5, 1.0
    centre, scale, up = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]), torch.tensor([[3.0, -1.0]])
    part = LayerCorrection(centre, scale, down, up, gauge, bounds, keys=1)
    found = gained(part, torch.tensor([[5.0, 9.0]]), constant(1))
    assert torch.allclose(found, torch.tensor([expected]), atol=1e-5)
