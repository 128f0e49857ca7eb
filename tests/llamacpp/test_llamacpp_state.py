"""States of sequences as bytes, and waves of runs, without llama.cpp."""

import numpy as np
import pytest
import torch

from blend.integrations.llamacpp.rows import runs_of, waves_of
from blend.integrations.llamacpp.state import F16, Q8_0, CacheFormat, RowType, StateFormat, hadamard
from blend.layout import Span

WORDS = np.dtype("<u4")


def made(kinds: tuple[RowType, ...], *, mark: int | None = 77, says_turned: bool = False) -> StateFormat:
    """A format of one cache with a layer for each kind of keys, all values in half precision."""
    values = tuple(RowType(F16, 16) for _ in kinds)
    return StateFormat(
        (CacheFormat(kinds, values, says_turned),), mark, tuple((0, place) for place in range(len(kinds)))
    )


def rows_for(state_format: StateFormat, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for layer in range(len(state_format.order)):
        widths = [kind.width for kind in state_format.types(layer)]
        keys, values = (torch.randn(count, width, generator=generator).half() for width in widths)
        layers.append((keys, values))
    return layers


@pytest.mark.parametrize("mark", [None, 77])
def test_what_is_packed_is_read_back(mark: int | None) -> None:
    """Positions, every layer and every row; the format is learned from the bytes alone."""
    state_format = made((RowType(F16, 24), RowType(F16, 8)), mark=mark)
    rows = rows_for(state_format, 5)
    positions = np.array([3, 4, 9, 10, 40])
    state = state_format.pack(positions, rows, sequence=6)
    learned = StateFormat.read(state)
    assert learned.caches == state_format.caches
    assert learned.mark == mark
    (cache,) = learned.unpack(state)
    assert cache.positions.tolist() == positions.tolist()
    for layer, (keys, values) in enumerate(rows):
        assert torch.equal(RowType(F16, 1).decode(cache.raw[layer]), keys)
        assert torch.equal(RowType(F16, 1).decode(cache.raw[2 + layer]), values)


def test_rows_come_sorted_by_position() -> None:
    """Cells lie in any order: recomputed rows stand behind the others."""
    state_format = made((RowType(F16, 8),))
    rows = rows_for(state_format, 3)
    (cache,) = state_format.unpack(state_format.pack(np.array([7, 2, 5]), rows, 0))
    assert cache.positions.tolist() == [2, 5, 7]
    assert torch.equal(RowType(F16, 8).decode(cache.raw[0]), rows[0][0][[1, 2, 0]])


def test_eight_bit_rows_are_as_ggml_rounds_them() -> None:
    """`quantize_row_q8_0_ref` of one block: scale 3.81 / 127 in half precision, halves away from zero."""
    numbers = torch.linspace(-3.81, 3.81, 32)[None]
    raw = RowType(Q8_0, 34).encode(numbers)
    scale = np.float32(3.81) / np.float32(127)
    assert raw[0, :2].view(np.float16)[0] == np.float16(scale)
    expected = [int(np.sign(number) * np.floor(abs(number / scale) + 0.5)) for number in numbers[0].numpy()]
    assert raw[0, 2:].view(np.int8).tolist() == expected
    assert (RowType(Q8_0, 34).decode(raw) - numbers).abs().max() <= scale / 2 + 3.81e-3
    assert not RowType(Q8_0, 34).encode(torch.zeros(1, 32)).any()


def test_turned_rows_are_turned_back() -> None:
    """A Hadamard matrix, of which the first row sums and the second alternates; twice it is the identity."""
    unit = torch.zeros(1, 8)
    unit[0, 1] = 1
    assert torch.allclose(hadamard(unit, 4)[0, :4], torch.tensor([0.5, -0.5, 0.5, -0.5]))
    assert not hadamard(unit, 4)[0, 4:].any()
    numbers = torch.randn(3, 64)
    assert torch.allclose(hadamard(hadamard(numbers, 64), 64), numbers, atol=1e-5)
    kind = RowType(Q8_0, 68, turned=64)
    assert not np.array_equal(kind.encode(numbers), RowType(Q8_0, 68).encode(numbers))
    assert (kind.decode(kind.encode(numbers)) - numbers).abs().max() < 0.05


@pytest.mark.parametrize("turned", [0, 64])
def test_later_versions_say_what_is_turned(turned: int) -> None:
    """Two words more, which tell types from blocks of turned numbers."""
    kinds = (RowType(Q8_0, 68, turned),)
    values = (RowType(F16, 16, turned),)
    state_format = StateFormat((CacheFormat(kinds, values, says_turned=True),), 77, ((0, 0),))
    rows = [(torch.randn(2, 64), torch.randn(2, 8))]
    if turned:
        values = (RowType(Q8_0, 68, turned),)
        state_format = StateFormat((CacheFormat(kinds, values, says_turned=True),), 77, ((0, 0),))
        rows = [(torch.randn(2, 64), torch.randn(2, 64))]
    assert StateFormat.read(state_format.pack(np.arange(2), rows, 0)).caches == state_format.caches


def broken(state: np.ndarray, word: int, value: int) -> np.ndarray:
    changed = state.copy()
    changed[4 * word : 4 * word + 4].view(WORDS)[0] = value
    return changed


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (2, 3, "3 streams"),
        (3, 9, "ends early|transposed|cannot be read|else than one sequence"),
        (5, 2, "else than one sequence"),
        (10, 1, "transposed"),
        (12, 5, "cannot be read"),
    ],
)
def test_states_of_another_kind_are_refused(word: int, value: int, says: str) -> None:
    """Streams, cells, sequences, transposed values, types: each is told from what is known."""
    state_format = made((RowType(F16, 16),))
    state = state_format.pack(np.arange(2), rows_for(state_format, 2), 0)
    StateFormat.read(state)
    with pytest.raises(ValueError, match=says):
        StateFormat.read(broken(state, word, value))


def test_more_or_fewer_bytes_are_refused() -> None:
    """A state that goes on, or ends early, and one of another model."""
    state_format = made((RowType(F16, 16),))
    state = state_format.pack(np.arange(2), rows_for(state_format, 2), 0)
    with pytest.raises(ValueError, match="ends early"):
        StateFormat.read(state[:-1])
    with pytest.raises(ValueError, match="follow"):
        state_format.unpack(np.concatenate((state, state[:4])))
    other = made((RowType(F16, 24),))
    with pytest.raises(ValueError, match="another format"):
        other.unpack(state)


def waves(positions: list[int], alone: set[int], rows: int = 4, runs: int = 3) -> list[list[tuple[int, int]]]:
    found = waves_of(runs_of(positions), lambda run: bool(alone & set(range(*run))), rows, runs)
    return [[tuple(run) for run in wave] for wave in found]


def test_waves_are_as_full_as_they_may_be() -> None:
    """By rows, by runs; a long run is a wave even if it has more rows."""
    assert runs_of([1, 2, 5, 6, 7, 9]) == [Span(1, 3), Span(5, 8), Span(9, 10)]
    assert waves([1, 2, 4, 6, 8], set()) == [[(1, 3), (4, 5), (6, 7)], [(8, 9)]]
    assert waves([1, 3, 5, 7], set(), rows=9) == [[(1, 2), (3, 4), (5, 6)], [(7, 8)]]
    assert waves([1, *range(3, 12), 20], set()) == [[(1, 2)], [(3, 12)], [(20, 21)]]


def test_a_run_that_needs_all_before_it_is_a_wave_by_itself() -> None:
    """Neither those before nor those behind share its wave."""
    assert waves([1, 3, 5, 7], {3}, rows=9) == [[(1, 2)], [(3, 4)], [(5, 6), (7, 8)]]
    assert waves([1, 3], {1, 3}) == [[(1, 2)], [(3, 4)]]
