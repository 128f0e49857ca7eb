import re
import zlib

import numpy as np
import pytest

from blend_retrieval.embedders import Embedder


class BagOfWords(Embedder):
    """Unit vectors of hashed words; counts what it is asked to embed."""

    def __init__(self, name="bag", dimension=64):
        self.name, self.dimension, self.embedded = name, dimension, []

    def embed(self, texts, progress=None):
        self.embedded += texts
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                vectors[row, zlib.crc32(word.encode()) % self.dimension] += 1
            vectors[row] /= max(np.linalg.norm(vectors[row]), 1e-9)
            if progress:
                progress("embed", row + 1, len(texts))
        return vectors


@pytest.fixture
def bag():
    return BagOfWords()


@pytest.fixture
def other_bag():
    return BagOfWords("other")
