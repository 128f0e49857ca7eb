from math import log2

import pytest

from retrieval.metrics import ndcg, recall, reciprocal_rank

RANKED = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("relevant", "k", "expected"),
    [
        ({"a"}, 1, 1.0),
        ({"b"}, 1, 0.0),
        ({"b", "e", "x"}, 4, 1 / 3),
        ({"b", "e"}, 9, 1.0),
        (set(), 3, 0.0),
        ({"a"}, 0, 0.0),
    ],
)
def test_recall(relevant, k, expected):
    assert recall(RANKED, relevant, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("relevant", "k", "expected"), [({"a"}, 10, 1.0), ({"c", "d"}, 10, 1 / 3), ({"c"}, 2, 0.0), ({"x"}, 10, 0.0)]
)
def test_reciprocal_rank(relevant, k, expected):
    assert reciprocal_rank(RANKED, relevant, k) == pytest.approx(expected)


def test_ndcg_by_hand():
    gain = 1 / log2(3) + 1 / log2(5)  # relevant at ranks 2 and 4
    assert ndcg(RANKED, {"b", "d"}) == pytest.approx(gain / (1 + 1 / log2(3)))
    assert ndcg(RANKED, {"b": 1, "a": 3}) == pytest.approx(1.0)
    assert ndcg(RANKED, {"a": 1, "b": 3}) == pytest.approx((1 + 3 / log2(3)) / (3 + 1 / log2(3)))
    assert ndcg(RANKED, {"a", "x"}, k=1) == pytest.approx(1.0)
    assert ndcg(RANKED, {}) == 0.0


def test_duplicates_count_once():
    assert recall(["a", "a", "b"], {"b"}, 2) == 1.0
    assert reciprocal_rank(["a", "a", "b"], {"b"}) == 0.5
    assert ndcg(["a", "a"], {"a"}) == 1.0
