"""Text that every user may read: surrogate context and KV corrections of learned text come from it, never from a client's."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from blend.corpus import divided
from blend_retrieval import load_documents, write_stdlib_corpus
from blend_retrieval.corpus_stdlib import DEFAULT_MODULES

if TYPE_CHECKING:
    from blend.layout import Tokens
    from blend.rag import Rag

_MODULES = DEFAULT_MODULES[::3]  # some 16,000 tokens, twice what a fit reads


def trusted_chunks(rag: Rag) -> list[Tokens]:
    """Token ids of chunks of Python's own documentation. Raises `RetrievalError` if this Python cannot render it."""
    with TemporaryDirectory() as folder:
        documents = load_documents(write_stdlib_corpus(folder, _MODULES)).documents
    return [rag.template.chunk_ids(chunk) for chunk in divided(documents, rag.template, rag.corpus_config).chunks]
