"""Cross-encoders, which read a question and a passage together: slower than an embedder, and a better judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blend_retrieval.embedders.base import Floats
from blend_retrieval.embedders.sentence import quiet
from blend_retrieval.errors import EmbeddingError
from blend_retrieval.hub import reason_of, why_not


class Reranker:
    """A cross-encoder of sentence-transformers.

    Args:
        name: its id on the model hub, or its folder.
        device: where it runs.

    Raises:
        EmbeddingError: it cannot be loaded.

    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        with quiet():
            try:
                self._model = _loaded(name, device)
            except EmbeddingError:
                raise
            except Exception as error:  # sentence-transformers passes on any error of its parts
                raise EmbeddingError(f"the reranker {name} cannot be loaded ({reason_of(error)})") from error

    def scores(self, query: str, passages: Sequence[str]) -> Floats:
        """How well each passage answers the question, float32 `[passages]`; more is better."""
        pairs = [(query, passage) for passage in passages]
        logits = self._model.predict(pairs, show_progress_bar=False).reshape(len(pairs), -1)
        scores: Floats = logits[:, -1]
        return scores


def _loaded(name: str, device: str) -> Any:
    """The model that is on this machine, or else on the hub."""
    from sentence_transformers import CrossEncoder

    try:
        return CrossEncoder(name, device=device, local_files_only=True)
    except Exception:
        if Path(name).is_dir():
            raise
    if reason := why_not(name):
        raise EmbeddingError(f"the reranker {name} {reason}; name a folder that holds one, or leave it out")
    return CrossEncoder(name, device=device)
