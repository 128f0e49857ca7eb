"""Statistics over rows, words and prompts, on numbers worked out by hand."""

import math

import numpy as np
import pytest
from analyzed import FIRST_K, analyzed
from cases import make_layout
from models import tokenizer

from blend.analyze.numbers import (
    Deviation,
    find_places,
    mean_numbers,
    quantiles,
    rank_correlation,
    summarize,
    top_shares,
)
from blend.analyze.study import token_texts
from blend.analyze.words import KINDS, word_kinds
from blend.layout import PromptLayout


def test_top_shares():
    squared = np.array([[1.0] * 100, [91.0, *[9 / 99] * 99], [0.0] * 100])
    shares = top_shares(squared)
    np.testing.assert_allclose(shares[0], [0.05, 0.10, 0.15])
    np.testing.assert_allclose(shares[1], [(91 + n * 9 / 99) / 100 for n in (4, 9, 14)])
    assert np.isnan(shares[2]).all()


def test_quantiles_and_relative_distance():
    deviation = Deviation(np.array([[0.0, 4.0, 16.0]]), np.array([[1.0, 16.0, 4.0]]))
    np.testing.assert_allclose(deviation.relative, [[0, 0.5, 2]])
    np.testing.assert_allclose(quantiles(deviation.relative), [[0.05, 0.25, 0.5, 1.25, 1.85]])


def test_rank_correlation_with_ties_and_without_order():
    rho = rank_correlation(np.array([[2.0, 1, 3, 2], [10.0, 1, 9, 5], [7.0, 7, 7, 7]]))
    # Pearson's coefficient of ranks.
    assert rho[0, 1] == pytest.approx(np.corrcoef([1.5, 0, 3, 1.5], [3, 0, 2, 1])[0, 1])
    assert np.isnan(rho[2]).all()
    assert rho[0, 0] == pytest.approx(1)


def test_places():
    layout = PromptLayout.of_chunks((1, 1), ((2,) * 5, (3,) * 10, (4,) * 10), (5,))
    squared = np.zeros((2, 25))
    squared[1, [5, 15]] = 3.0  # the first rows of chunks 2 and 3
    squared[1, 0] = 100.0  # the first chunk does not count
    kinds = [0] * 8 + [1] * 19 + [0]
    places = find_places(squared, layout, kinds)
    assert places.by_start[:, 0].tolist() == [2, 2, 4, 8, 4, 0, 0, 0, 0]
    assert places.by_start[:, 1].tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert places.by_end[:, 0].tolist() == [2, 2, 4, 8, 4, 0, 0]
    assert places.by_end[:, 1].tolist() == [0, 0, 0, 0, 2, 0, 0]
    assert places.by_kind.tolist() == [[1, 1], [19, 1], [0, 0], [0, 0]]


def test_kinds_of_words():
    texts = ["The", " Al", "bert", "'s", " 19", "th", " house", ",", "\n", "a", "b", "", " (", "Rome", ")"]
    capital, number, point, other = KINDS
    # "Al|bert|'s" is one word; "19|th" is a number; a line break and an empty token are neither.
    kinds = [*[capital] * 4, number, number, other, point, other, other, other, other, point, capital, point]
    assert [KINDS[kind] for kind in word_kinds(texts)] == kinds


class _Bytes:
    """A tokenizer of UTF-8 bytes, with a SentencePiece mark for a leading space."""

    def decode(self, ids: list[int], **options: object) -> str:
        return bytes(i for i in ids if i != 32).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return "\u2581" if token == 32 else f"<{token}>"


def test_characters_of_several_tokens_stand_at_the_first():
    ids = list("aé\u20ac\U0001f600z".encode())
    assert token_texts(_Bytes(), ids) == ("a", "é", "", "\u20ac", "", "", "\U0001f600", "", "", "", "z")
    assert token_texts(_Bytes(), [97, 0xC3, 98]) == ("a", "\ufffd", "b")  # half a character
    assert token_texts(_Bytes(), [32]) == (" ",)
    assert token_texts(tokenizer(), [5, 6]) == ("w5", "w6")


def test_means_leave_out_what_is_undefined():
    one = summarize(analyzed("llama"))
    alone = summarize(analyzed("llama", FIRST_K, make_layout(chunks=(9,), prefix=5)))
    mean = mean_numbers([one, alone])
    np.testing.assert_allclose(mean.sparsity.keys, (one.sparsity.keys + alone.sparsity.keys) / 2)
    np.testing.assert_allclose(mean.places.by_start, one.places.by_start / 2)
    assert mean.size[1] == (4 + 1) / 2
    assert not math.isnan(mean.cross.full.sum())
