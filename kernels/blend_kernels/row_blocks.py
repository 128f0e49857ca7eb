"""How the plain-torch path cuts sorted rows into blocks, and what each block sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Rows of one block at most: beyond this a bigger matrix product gains nothing and its ragged part only grows.
_MOST_ROWS = 256
# Share of a block's visible pairs that may be wasted in any case: bigger products run faster by about as much (measured).
WASTED_SHARE = 0.05
# A run of neighbouring rows this long is cheaper as an is_causal square than as masked blocks.
_LONG_RUN = 256


class RowBlock(NamedTuple):
    """Rows `start` to `stop - 1`; `square` when they are neighbours and long enough for a causal square."""

    start: int
    stop: int
    square: bool


class KeyRange(NamedTuple):
    """Keys `start` to `stop - 1`; `ragged` when some row of the block does not see all of them."""

    start: int
    stop: int
    ragged: bool


def row_blocks(last: Sequence[int], waste: int, squares: bool) -> list[RowBlock]:
    """Cut rows, whose last visible keys are `last` (ascending), into blocks; long runs into `squares` when asked.

    A block ends before the invisible (row, key) pairs that it computes, `sum(last of the block - last[r])`, exceed both
    `waste`, which is what one more block costs in calls, and a share of the block's visible pairs.
    """
    blocks, start = [], 0
    for run_start, run_stop in _long_runs(last) if squares else ():
        blocks += _scattered(last, start, run_start, waste)
        blocks.append(RowBlock(run_start, run_stop, True))
        start = run_stop
    return blocks + _scattered(last, start, len(last), waste)


def _long_runs(last: Sequence[int]) -> list[tuple[int, int]]:
    runs, start, rows = [], 0, len(last)
    while start + _LONG_RUN <= rows:
        stop = start + 1
        while stop < rows and last[stop] == last[stop - 1] + 1:
            stop += 1
        if stop - start >= _LONG_RUN:
            runs.append((start, stop))
        start = stop
    return runs


def _scattered(last: Sequence[int], start: int, stop: int, waste: int) -> list[RowBlock]:
    blocks, first, wasted, seen = [], start, 0, last[start] if start < stop else 0
    for row in range(start + 1, stop):
        wasted += (row - first) * (last[row] - last[row - 1])
        seen += last[row]
        if wasted > max(waste, WASTED_SHARE * seen) or row - first == _MOST_ROWS:
            blocks.append(RowBlock(first, row, False))
            first, wasted, seen = row, 0, last[row]
    return [*blocks, RowBlock(first, stop, False)] if first < stop else blocks


def key_ranges(first_end: int, last_end: int, window: int | None) -> list[KeyRange]:
    """The keys that rows with last visible keys `first_end` to `last_end` see; every row sees a key of every range.

    Only the ends of the span are ragged; what lies between takes no mask.
    """
    low = 0 if window is None else max(0, first_end - window + 1)
    full = 0 if window is None else max(0, last_end - window + 1)
    if full > low and full >= first_end:
        return [KeyRange(low, last_end + 1, True)]
    ranges = [KeyRange(low, full + 1, True)] if full > low else []
    middle = KeyRange(ranges[0].stop if ranges else low, first_end, False)
    if last_end == first_end:
        return [*ranges, KeyRange(middle.start, first_end + 1, False)]
    return [*ranges, *([middle] if middle.stop > middle.start else []), KeyRange(first_end, last_end + 1, True)]
