"""Attention read off in tiles against transformers' own weights in float64."""

import base64

import numpy as np
import pytest
from analyzed import LAYOUT, by_segment, calls_of, dense_weights, to_other_chunks

from blend.analyze.attention import (
    MASSES,
    THRESHOLDS,
    HeadMap,
    Segments,
    cell_width,
    count_below,
    count_holding,
    observe_layer,
    tiles,
)

# Grouped heads, windows, soft caps, a scale of the model's own, partial rotary; not the family with learned sinks.
NAMES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "granite", "gpt-neox", "deepseek-v3")
SEGMENTS = Segments.of(LAYOUT)


@pytest.mark.parametrize(
    ("name", "most", "multiple"), [*((name, 1, 7) for name in NAMES), *(("llama", n, 1) for n in (1, 3000, 1 << 30))]
)
def test_tiles_are_bounded_and_together_the_dense_weights(name, most, multiple):
    for call, dense in zip(calls_of(name), dense_weights(name), strict=True):
        found, stop = np.zeros_like(dense), 0
        for tile in tiles(call, most=most, multiple=multiple):
            assert tile.start == stop
            assert tile.start % multiple == 0
            assert tile.weights.numel() <= max(most, multiple * dense[:, 0].size)
            found[:, tile.start : tile.stop, : tile.weights.shape[2]] = tile.weights.numpy()
            assert tile.visible.tolist() == (dense[0, tile.start : tile.stop] > 0).sum(1).tolist()
            stop = tile.stop
        assert stop == LAYOUT.rows
        np.testing.assert_allclose(found, dense, atol=2e-6)
        assert not found[dense == 0].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [1, 1 << 30])
def test_sparsity(name, most):
    for call, dense in zip(calls_of(name), dense_weights(name), strict=True):
        seen = dense > 0
        found_below = sum(count_below(tile) for tile in tiles(call, most=most)) / seen[0].sum()
        found_keys = sum(count_holding(tile) for tile in tiles(call, most=most)) / len(dense[0])
        for index, threshold in enumerate(THRESHOLDS):
            below = ((dense < threshold) & seen).sum((1, 2)) / seen.sum((1, 2))
            np.testing.assert_allclose(found_below[:, index], below, atol=2 / seen[0].sum())
        for index, mass in enumerate(MASSES):
            held = np.cumsum(-np.sort(-dense, axis=-1), -1)
            fewest = 1 + (held < mass - 1e-9).sum(-1)
            np.testing.assert_allclose(found_keys[:, index], fewest.mean(1), atol=2 / len(dense[0]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 4])
def test_a_layer(name, width):
    for call, dense in zip(calls_of(name), dense_weights(name), strict=True):
        found = observe_layer(call, SEGMENTS, width=width)
        assert found.visible == pytest.approx((dense[0] > 0).sum(1).mean())
        mean = dense.mean(0)
        pooled = by_segment(mean, SEGMENTS.spans)
        expected = np.stack([pooled[start:stop].mean(0) for start, stop in SEGMENTS.spans])
        np.testing.assert_allclose(found.by_segment, expected, atol=5e-6)
        np.testing.assert_allclose(found.by_segment.sum(1), 1, atol=1e-5)
        np.testing.assert_allclose(found.cross, to_other_chunks(mean), atol=5e-6)
        np.testing.assert_allclose(found.question, mean[-len(LAYOUT.suffix) :].mean(0), atol=5e-6)
        busiest = int(np.argmax([to_other_chunks(head).sum() for head in dense]))
        assert (found.picture.layer, found.picture.head) == (call.layer, busiest)
        np.testing.assert_allclose(found.picture.cells, _pooled(dense[busiest], width), atol=2e-6)


def _pooled(weights: np.ndarray, width: int) -> np.ndarray:
    cells = -(-len(weights) // width)
    found = np.zeros((cells, cells))
    for i in range(len(weights)):
        for j in range(len(weights)):
            found[i // width, j // width] = max(found[i // width, j // width], weights[i, j])
    return found


def test_cells_as_bytes():
    cells = np.array([[1.0, 0.5], [1e-2, 1e-5]])
    levels = list(base64.b64decode(HeadMap(0, 0, 1, cells).encoded()))
    assert levels == [255, 128, 0]  # the upper triangle is not there
    assert [cell_width(rows, 256) for rows in (1, 256, 257, 2000)] == [1, 1, 2, 8]
