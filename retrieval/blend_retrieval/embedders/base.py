"""The contract of an embedder, which turns texts into unit vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float32]"
"""Vectors, similarities or scores."""
Integers: TypeAlias = "npt.NDArray[np.int64]"
"""Rows of an index."""
MINILM_FLOOR = 0.15  # least similarity of a result with minilm; docs/retrieval.md
Progress = Callable[[str, int, int], None]
"""Called with the stage, "embed", texts done and texts in all, at the start and after every batch."""


class Embedder(ABC):
    """Turns texts into vectors whose inner product is their similarity.

    name: what people call it.
    dimension: length of a vector.
    window: tokens that the model reads at once; None: any number. Longer texts are read in several windows.
    floor: similarity below which a passage has nothing to do with a question; 0 where that was not measured.
    knows_meaning: whether the vectors say what texts mean. If not, passages are ranked by their words alone.
    """

    name: str
    dimension: int
    window: int | None = None
    floor: float = 0.0
    knows_meaning: bool = True

    @property
    def identity(self) -> str:
        """Its name in an index: vectors of embedders with one identity can be compared."""
        return self.name

    def made(self, identity: str) -> bool:
        """Whether it made an index with this identity. Earlier versions of kvblend wrote the name alone."""
        return identity in (self.identity, self.name)

    @abstractmethod
    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Floats:
        """Vectors of passages, float32 `[texts, dimension]`, each of length 1."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, also beyond the window; of an embedder without a tokenizer: words."""
        return [len(text.split()) for text in texts]

    def embed_query(self, text: str) -> Floats:
        """Vector of a question, float32 `[dimension]`, with the query prompt if the model was trained with one."""
        vector: Floats = self.embed([text])[0]
        return vector
