"""How many calls of torch it takes to place a layer."""

import numpy as np
import pytest
import torch

from blend_kernels import ChunkShape, LayerShape, PlacingTable, Turn, place_layer
from tests.kernels.test_placing import BF16, frequencies, make_chunk
from tests.kernels.test_plain_attention import Dispatched

VIEWS = ("slice", "view", "transpose", "alias", "split", "as_strided")


def side_by_side(chunks):
    rows = np.fromiter((chunk.tokens for chunk in chunks), np.int64)
    starts, zeros = np.cumsum(rows) - rows, np.zeros_like(rows)
    return PlacingTable(chunks, zeros, starts, rows, starts, zeros > 0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("packing", "with_gain", "most"),
    [("plain", False, 8), ("plain", True, 13), ("int8", False, 21), ("int4", False, 31)],
)
def test_few_calls_of_torch_a_layer_for_any_number_of_chunks(packing, with_gain, most):
    names, shape = [], ChunkShape((LayerShape(1, 8, 1, 8),) * 2, BF16, packing)
    for count in (8, 64):
        table = side_by_side([make_chunk(shape, 3)[0] for _ in range(count)])
        turn = Turn(frequencies(4, "cpu"))
        caches = [torch.empty(1, 3 * count, 8, dtype=BF16) for _ in range(2)]
        gain = torch.zeros(3 * count, 16) if with_gain else None
        place_layer(table, 0, *caches, turn, None, gain=gain)
        with Dispatched() as calls:
            place_layer(table, 1, *caches, turn, None, gain=gain)
        names.append([name for name in calls.names if name not in VIEWS])
    assert names[0] == names[1]
    assert len(names[0]) <= most
