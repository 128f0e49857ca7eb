"""Chunks for tests: made by hand, and of documents with a way to render them."""

from collections.abc import Iterable

from blend_retrieval import chunking
from blend_retrieval.document import Document


def chunks(*texts: str) -> list[chunking.Chunk]:
    return [chunking.Chunk(f"id-{text}", "d.md", "Title", text, 3) for text in texts]


def render(title: str, text: str) -> str:
    return f"{title}\n\n{text}\n\n" if title else f"{text}\n\n"


def chunk_documents(
    documents: Iterable[Document], encode: chunking.Encode, max_tokens: int = 256, render: chunking.Render = render
) -> tuple[chunking.Chunk, ...]:
    return chunking.chunk_documents(documents, encode, max_tokens, render)
