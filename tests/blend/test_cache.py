"""The blended cache as one piece of memory, where all layers have one shape, and as a piece for each."""

import pytest
import torch

from blend.model.cache import BlendedCache

LAYERS, CAPACITY = 3, 9
ROWS = torch.tensor([0, 2, 3])
WHOLE, OF_TWO_SHAPES, UNALIGNED = ([(2, 8)] * 6, [(2, 8), (2, 4)] * 3, [(1, 1)] * 6)


def begun(shapes: list[tuple[int, int]]) -> BlendedCache:
    """A cache that begins with four random rows, of keys and values with these heads and dimensions in turn."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn((heads, 4, dim), generator=generator) for heads, dim in shapes]
    cache = BlendedCache(LAYERS, CAPACITY)
    cache.begin(parts[0::2], parts[1::2], 6)
    for layer, keys, values in zip(cache.layers, parts[0::2], parts[1::2], strict=True):
        assert torch.equal(layer.keys[0, :, :4], keys)
        assert torch.equal(layer.values[0, :, :4], values)
    assert cache.get_seq_length() == 6
    return cache


@pytest.mark.parametrize(("shapes", "whole"), [(WHOLE, True), (OF_TWO_SHAPES, False), (UNALIGNED, False)])
def test_layers_of_one_shape_are_one_piece_of_memory(shapes, whole):
    assert begun(shapes).is_whole == whole


def test_what_is_written_to_layers_together_is_in_each():
    cache = begun(WHOLE)
    keys, values = cache.together(1, 3)
    assert keys.shape == values.shape == (2, 2, CAPACITY, 8)
    keys[:] = torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1)
    values[:] = -keys
    for index in (1, 2):
        layer_keys, layer_values = cache.view(index)
        assert (layer_keys == index).all()
        assert (layer_values == -index).all()


@pytest.mark.parametrize("shapes", [WHOLE, OF_TWO_SHAPES])
def test_rows_of_some_layers_are_gathered(shapes):
    cache = begun(shapes)
    gathered = cache.gather([2, 0], ROWS)
    for index, kv in zip([2, 0], gathered, strict=True):
        for part, buffer in zip(kv, cache.together(index, index + 1), strict=True):
            assert torch.equal(part, buffer[:, :, ROWS])
