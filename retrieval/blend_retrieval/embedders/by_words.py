"""An embedder without a model: its vectors say which words a text has, for machines that can have no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from blend_retrieval.embedders.base import Embedder, Floats, Progress
from blend_retrieval.words import words

BY_WORDS = "words"
_DIMENSION = 256
_KEPT = 1 << 16  # words whose places are remembered


class WordsEmbedder(Embedder):
    """Counts words. Passages are ranked by `LexicalIndex`; the vectors say which passages repeat each other."""

    name = BY_WORDS
    dimension = _DIMENSION
    knows_meaning = False
    floor = 1e-6  # a passage shares a word with the question

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Floats:
        """See `Embedder.embed`. Every word adds the root of its count in one place, found by hashing."""
        import numpy as np

        vectors = np.zeros((len(texts), _DIMENSION), np.float32)
        if progress:
            progress("embed", 0, len(texts))
        for vector, text in zip(vectors, texts, strict=True):
            for word, count in Counter(words(text)).items():
                place = _place_of(word)
                vector[place.number] += place.sign * count**0.5
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        without_words = lengths[:, 0] < 1e-6
        vectors[without_words, 0] = lengths[without_words] = 1
        if progress and texts:
            progress("embed", len(texts), len(texts))
        unit: Floats = vectors / lengths
        return unit


class _Place(NamedTuple):
    number: int
    sign: int


@lru_cache(_KEPT)
def _place_of(word: str) -> _Place:
    """Where a word counts, the same in every process. The sign lets words that share a place cancel out on average."""
    digest = int.from_bytes(blake2b(word.encode(), digest_size=4).digest(), "big")
    return _Place(digest % _DIMENSION, 1 if digest >> 31 else -1)
