"""What a server is asked and when: questions over Zipf-distributed passages at Poisson times, drawn from a seed.

The draws know nothing of the server that gets them, so that all servers are asked the same at the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from _serving_corpus import Corpus, Passage

Draws = np.random.Generator


class TimedQuestion(NamedTuple):
    """A question, the passages that it is to be answered from, and when it comes: seconds after the first moment."""

    at_s: float
    question: str
    passages: tuple[Passage, ...]

    @property
    def context_tokens(self) -> int:
        """Of all passages together."""
        return sum(passage.tokens for passage in self.passages)


def arrivals(rate: float, seconds: float, draws: Draws) -> NDArray[np.float64]:
    """Times of a Poisson process of `rate` a second, ascending, all below `seconds`, of which as many come as are expected.

    Its number alone varies by its root: a quarter of sixteen, which would be another rate than the one that is reported. Given
    their number, the times are uniform.
    """
    return np.sort(draws.uniform(0.0, seconds, round(rate * seconds)))


def zipf(count: int, exponent: float) -> NDArray[np.float64]:
    """Chances of ranks 1 to `count`, in proportion to `rank ** -exponent`; 0 makes all alike."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class Traffic:
    """Where questions are drawn from.

    exponent: of the passages' popularity, in the corpus's order. context_tokens: of the passages of one question, the nearest
    that whole passages give from below.
    """

    corpus: Corpus
    context_tokens: int
    exponent: float

    def times(self, times: Sequence[float] | NDArray[np.float64], draws: Draws) -> list[TimedQuestion]:
        """One question for each time."""
        chances = zipf(len(self.corpus.passages), self.exponent)
        return [self._one(float(time), chances, draws) for time in times]

    def poisson(self, rate: float, seconds: float, seed: Sequence[int]) -> list[TimedQuestion]:
        """Questions that come at `rate` a second."""
        draws = np.random.default_rng(seed)
        return self.times(arrivals(rate, seconds, draws), draws)

    def at_once(self, count: int, seed: Sequence[int]) -> list[TimedQuestion]:
        """So many questions that all come in the first moment."""
        return self.times([0.0] * count, np.random.default_rng(seed))

    def _one(self, time: float, chances: NDArray[np.float64], draws: Draws) -> TimedQuestion:
        passages = self.corpus.passages
        # Exponential races (Efraimidis and Spirakis 2006) give the order in which they are drawn one after another.
        order = np.argsort(draws.exponential(size=len(passages)) / chances)
        question = self.corpus.questions[int(draws.integers(len(self.corpus.questions)))]
        return TimedQuestion(time, question, _within([passages[int(i)] for i in order], self.context_tokens))


def _within(passages: Sequence[Passage], tokens: int) -> tuple[Passage, ...]:
    """The first passages, as many as together have no more than `tokens`; one at least."""
    total = np.cumsum([passage.tokens for passage in passages])
    return tuple(passages[: max(1, int(np.searchsorted(total, tokens, side="right")))])
