"""Cross-encoders, which read a question and a passage together: slower than an embedder, and a better judge."""

from __future__ import annotations

from collections.abc import Sequence

from blend_retrieval.embedders.base import Floats
from blend_retrieval.hub import load_model


class Reranker:
    """A cross-encoder of sentence-transformers.

    Args:
        name: its id on the model hub, or its folder.
        device: where it runs.

    Raises:
        EmbeddingError: it cannot be loaded.

    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        remedy = "name a folder that holds one, or leave it out"
        self._model = load_model("CrossEncoder", "reranker", name, device, remedy)

    def scores(self, query: str, passages: Sequence[str]) -> Floats:
        """How well each passage answers the question, float32 `[passages]`; more is better."""
        pairs = [(query, passage) for passage in passages]
        logits = self._model.predict(pairs, show_progress_bar=False)
        scores: Floats = logits.reshape(len(pairs), -1)[:, -1]
        return scores
