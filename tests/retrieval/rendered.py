"""Chunks for tests: made by hand, and of documents with a tokenizer and a way to render them."""

import re

from blend_retrieval import chunking
from blend_retrieval.document import Document


def chunks(*texts):
    return [chunking.Chunk(f"id-{text}", "d.md", "Title", text, 3) for text in texts]


def words_and_signs(text):
    """A token a word of up to five letters, sign or blank."""
    return re.findall(r"\w{1,5}|[^\w]", text)


def render(title, text):
    return f"{title}\n\n{text}\n\n" if title else f"{text}\n\n"


def chunk_documents(documents, max_tokens=256, encode=words_and_signs):
    return chunking.chunk_documents(documents, encode, max_tokens, render)


def chunked(text, max_tokens=256, encode=words_and_signs, *, title="Guide", name="g.md"):
    """The chunks of one document."""
    return chunk_documents([Document(name, title, text, name)], max_tokens, encode)
