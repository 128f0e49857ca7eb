"""Texts to unit vectors: the contract of an embedder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Progress = Callable[[str, int, int], None]
"""Called with the stage, "embed", texts done and texts in all, at the start and after every batch."""


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
