"""Cross-encoders, which read a question and a passage together: slower than an embedder, and a better judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blend_retrieval.embedders.sentence import quiet
from blend_retrieval.errors import EmbeddingError
from blend_retrieval.hub import why_not

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Reranker:
    """A cross-encoder of sentence-transformers.

    Args:
        name: its id on the model hub, or its folder.
        device: where it runs.

    Raises:
        EmbeddingError: it cannot be loaded.

    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        from sentence_transformers import CrossEncoder

        local = Path(name).is_dir()
        with quiet():
            if not local and (reason := why_not(name)):
                raise EmbeddingError(f"the reranker {name} {reason}; name a folder that holds one, or leave it out")
            try:
                self._model = CrossEncoder(name, device=device)
            except Exception as error:  # sentence-transformers passes on any error of its parts
                line = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
                raise EmbeddingError(f"the reranker {name} cannot be loaded ({line})") from error

    def scores(self, query: str, passages: Sequence[str]) -> npt.NDArray[np.float32]:
        """How well each passage answers the question, float32 `[passages]`; more is better."""
        pairs = [(query, passage) for passage in passages]
        found: npt.NDArray[np.float32] = self._model.predict(pairs, show_progress_bar=False).reshape(len(pairs), -1)[
            :, -1
        ]
        return found
