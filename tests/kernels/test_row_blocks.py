import torch
from hypothesis import given
from hypothesis import strategies as st

from blend_kernels.attention_plain import WASTED_SHARE, key_ranges, row_blocks

ends = st.lists(st.integers(0, 700), min_size=1, max_size=80).map(sorted)


@given(ends, st.integers(1, 5000), st.booleans())
def test_blocks_cover_every_row_once_and_waste_is_bounded(last, waste, squares):
    blocks = row_blocks(last, waste, squares)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(len(last)))
    for block in blocks:
        mine = last[block.start : block.stop]
        wasted = sum(mine[-1] - end for end in mine)
        assert block.square or wasted <= max(waste, WASTED_SHARE * sum(mine))


def test_long_runs_become_squares_only_when_asked():
    last = [3, 9, *range(20, 400), 900]
    assert [(b.start, b.stop) for b in row_blocks(last, 100, True) if b.square] == [(2, 382)]
    assert not any(block.square for block in row_blocks(last, 100, False))
    short_runs = [*range(0, 600, 2), *range(700, 900), *range(1000, 1255)]
    assert not any(block.square for block in row_blocks(short_runs, 100, True))
    assert [b.square for b in row_blocks([*range(256)], 100, True)] == [True]


def test_a_block_has_at_most_256_rows():
    blocks = row_blocks([7] * 600, 100, False)
    assert [(block.start, block.stop) for block in blocks] == [(0, 256), (256, 512), (512, 600)]


def test_a_block_ends_where_waste_exceeds_what_a_block_costs():
    assert [b.stop for b in row_blocks([0, 10, 20, 30], 10, False)] == [2, 4]
    assert [b.stop for b in row_blocks([0, 10, 20, 30], 30, False)] == [3, 4]
    # a share of 1,000 visible pairs a row may be wasted, however little another block costs
    assert [b.stop for b in row_blocks([1000, 1040, 1080, 1120], 1, False)] == [3, 4]


@given(ends, st.none() | st.integers(1, 300))
def test_ranges_hold_what_rows_see_and_only_ragged_ones_hold_more(last, window):
    keys = torch.arange(last[-1] + 1)
    seen = torch.stack([(keys <= end) & (keys > end - (window or len(keys))) for end in last])
    ranges = key_ranges(last[0], last[-1], window)
    covered = torch.zeros(len(keys), dtype=torch.int64)
    for part in ranges:
        inside = seen[:, part.start : part.stop]
        # A row that sees nothing of a range would have minus infinity as its log-sum-exp, and NaN weights.
        assert inside.any(dim=1).all() or len(ranges) == 1
        assert inside.all() or part.ragged
        covered[part.start : part.stop] += 1
    assert covered.max() == 1
    assert not seen[:, covered == 0].any()
