"""Which rows run together: runs of consecutive rows, and waves of runs.

llama.cpp wants each sequence of a batch to go on where its stored rows end. Every run therefore gets a spare sequence, to
which the cells of all earlier rows are lent. Rows of one wave see the KV of earlier runs as it was before the wave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from blend.layout import Span


def runs_of(positions: Sequence[int]) -> list[Span]:
    """The runs of sorted positions."""
    runs: list[Span] = []
    for position in positions:
        if runs and position == runs[-1].stop:
            runs[-1] = Span(runs[-1].start, position + 1)
        else:
            runs.append(Span(position, position + 1))
    return runs


def rows_in(wave: Sequence[Span]) -> int:
    """The rows of a wave."""
    return sum(run.length for run in wave)


def pieces_of(runs: Sequence[Span], most_rows: int) -> list[Span]:
    """The runs, long ones in pieces."""
    pieces = []
    for run in runs:
        pieces += [Span(start, min(run.stop, start + most_rows)) for start in range(run.start, run.stop, most_rows)]
    return pieces


def halves_of(wave: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """A wave of at least two rows as two, one after the other."""
    positions = [position for run in wave for position in range(*run)]
    middle = len(positions) // 2
    return runs_of(positions[:middle]), runs_of(positions[middle:])


def waves_of(
    runs: Sequence[Span], is_alone: Callable[[Span], bool], most_rows: int, most_runs: int
) -> Iterator[list[Span]]:
    """Runs in ascending waves.

    Args:
        runs: ascending.
        is_alone: whether a run needs the fresh KV of all runs before it, and those behind need its own: it is a wave by itself.
            Rows that have no KV yet are such runs, and so is the question.
        most_rows: rows of a wave of several runs.
        most_runs: runs of a wave.

    """
    wave: list[Span] = []
    for run in runs:
        alone = is_alone(run)
        rows = rows_in(wave) + run.length
        if wave and (alone or rows > most_rows or len(wave) == most_runs):
            yield wave
            wave = []
        wave.append(run)
        if alone:
            yield wave
            wave = []
    if wave:
        yield wave
