"""How well a ranking finds what is relevant: recall@k, MRR@k, nDCG@k.

ranked: ids, best first, each counted once, at its first place. relevant: ids of what should be found; for `ndcg` with a
grade above 0 each. All are between 0 and 1, and 0 when nothing is relevant. Average them over queries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from math import log2


def recall(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Share of the relevant ids among the first `k`."""
    wanted = set(relevant)
    return len(wanted.intersection(_top(ranked, k))) / len(wanted) if wanted else 0.0


def reciprocal_rank(ranked: Sequence[str], relevant: Collection[str], k: int = 10) -> float:
    """1 / rank of the first relevant id among the first `k`, else 0. Its mean over queries is MRR@k."""
    wanted = set(relevant)
    return next((1 / rank for rank, name in enumerate(_top(ranked, k), start=1) if name in wanted), 0.0)


def ndcg(ranked: Sequence[str], relevant: Mapping[str, float] | Collection[str], k: int = 10) -> float:
    """Discounted cumulative gain over that of the best possible ranking: gain = grade / log2(1 + rank).

    Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002; linear gain, as in TREC's tools.
    """
    grades = relevant if isinstance(relevant, Mapping) else dict.fromkeys(relevant, 1.0)
    best = _gain(sorted(grades.values(), reverse=True)[:k])
    return _gain([grades.get(name, 0.0) for name in _top(ranked, k)]) / best if best else 0.0


def _top(ranked: Sequence[str], k: int) -> list[str]:
    return list(islice(dict.fromkeys(ranked), max(k, 0)))


def _gain(grades: Sequence[float]) -> float:
    return sum(grade / log2(1 + rank) for rank, grade in enumerate(grades, start=1))
