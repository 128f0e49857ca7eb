"""The regression behind the KV correction, its features and its bounds, each against its formula."""

import pytest
import torch
from corrections import gained

from blend.chunks import regression
from blend.chunks.correction import ROW_FEATURES, Bounds, LayerCorrection, position_features, row_features
from blend.chunks.regression import LayerRows, fit_layer
from blend.types import PromptLayout


def rows_seen(stored: torch.Tensor, gain: torch.Tensor, keys: int, groups: int = 4) -> LayerRows:
    """Rows of as many groups of chunks, each seen once, in places of no meaning."""
    count = stored.shape[0]
    features = torch.randn(count, 8, generator=torch.Generator().manual_seed(9))
    features[:, ROW_FEATURES] = row_features(local_of(stored))
    group, turn = torch.arange(count) * groups // count, torch.zeros(count).long()
    return LayerRows(stored, gain, features, group, turn, keys, covered=1.0)


def local_of(rows: torch.Tensor) -> torch.Tensor:
    """Numbers of these rows in their chunks."""
    return torch.arange(rows.shape[0]) % 20


def test_a_linear_relation_is_found_and_unpredictable_parts_are_left_alone():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 24, generator=draw) * 3 + 5
    linear = rows @ torch.randn(24, 10, generator=draw) + 1.0
    gain = torch.cat((linear, torch.randn(400, 14, generator=draw)), dim=1)
    seen = rows_seen(rows, gain, keys=10)
    found = fit_layer(seen)
    predicted = gained(found, rows, seen.features, local_of(rows))
    spread = linear - linear.mean(0)
    assert (predicted[:, :10] - linear).square().sum() < 0.02 * spread.square().sum()
    assert not predicted[:, 10:].any()


def test_noise_gives_no_map():
    draw = torch.Generator().manual_seed(0)
    rows, gain = (torch.randn(40, 24, generator=draw) for _ in range(2))
    assert fit_layer(rows_seen(rows, gain, keys=12)) is None


def test_the_factors_are_those_of_the_whole_regression_where_the_rank_allows():
    """Against the normal equations solved with numpy in float64."""
    import numpy as np

    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 20, generator=draw)
    gain = rows @ torch.randn(20, 20, generator=draw) + 0.1 * torch.randn(500, 20, generator=draw)
    seen = rows_seen(rows, gain, keys=10)
    found = fit_layer(seen)
    x = np.concatenate([((rows - found.centre) / found.scale).numpy(), seen.features.numpy()], 1).astype(np.float64)
    penalty = np.diag([min(regression.PENALTIES) * 500] * 20 + [1e-3 * 500] * 8)
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ gain.numpy())
    np.testing.assert_allclose(gained(found, rows, seen.features, local_of(rows)).numpy(), x @ weights, atol=2e-3)


def test_wide_kv_goes_through_a_sketch(monkeypatch):
    monkeypatch.setattr(regression, "WIDEST", 16)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 4, generator=draw)
    rows = hidden @ torch.randn(4, 40, generator=draw)
    gain = hidden @ torch.randn(4, 40, generator=draw)
    seen = rows_seen(rows, gain, keys=20)
    found = fit_layer(seen)
    assert found.down.shape[0] == 48
    assert (gained(found, rows, seen.features, local_of(rows)) - gain).square().sum() < 0.05 * gain.square().sum()


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


def layer_map(bounds: Bounds) -> tuple[LayerCorrection, torch.Tensor]:
    """A map of one key and one value, whose gauge is the first input, and the features of one row."""
    down, gauge, features = torch.zeros(10, 1), torch.zeros(10, 1), torch.zeros(1, 8)
    down[0, 0], down[2, 0], gauge[0, 0], features[0, 0] = 1.0, 0.5, 1.0, 1.0
    centre, scale, up = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]), torch.tensor([[3.0, -1.0]])
    return LayerCorrection(centre, scale, down, up, gauge, bounds, keys=1), features


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
    part, features = layer_map(bounds)
    found = gained(part, torch.tensor([[5.0, 9.0]]), features)
    assert torch.allclose(found, torch.tensor([expected]), atol=1e-5)
