"""What is usual in a corpus: a sample in which every document counts alike, however long, and how similar documents are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders.base import Floats, Integers

_SAMPLE = 1000  # chunks


class CorpusProfile(NamedTuple):
    """Numbers about a corpus that a search needs.

    Attributes:
        documents: the number of each chunk's document, `[chunks]`. Documents are numbered as they come.
        sample: rows of chunks, about as many of each document.
        similarity: of chunks of different documents, on average; of all chunks if there is one document.
    """

    documents: Integers
    sample: Integers
    similarity: float


def profile_of(chunks: Sequence[Chunk], vectors: Floats) -> CorpusProfile:
    """The profile of a corpus that is not empty. vectors: of its chunks, `[chunks, dimension]`."""
    import numpy as np

    numbers: dict[str, int] = {}
    documents = np.array([numbers.setdefault(chunk.document_id, len(numbers)) for chunk in chunks], np.int64)
    by_document = np.argsort(documents, kind="stable")
    starts = np.searchsorted(documents[by_document], np.arange(len(numbers) + 1))
    most_documents = min(len(numbers), _SAMPLE)
    chosen = np.linspace(0, len(numbers) - 1, most_documents, dtype=np.int64)
    quota = _SAMPLE // most_documents
    samples = []
    for start, stop in zip(starts[chosen], starts[chosen + 1], strict=True):
        places = np.linspace(start, stop - 1, quota, dtype=np.int64)
        samples.append(by_document[np.unique(places)])
    sample = np.concatenate(samples)
    means = np.array([vectors[rows].mean(axis=0) for rows in samples])
    compared = means if len(means) > 1 else vectors[sample]
    return CorpusProfile(documents, sample, _similarity_between(compared))


def _similarity_between(vectors: Floats) -> float:
    """The average inner product of two different vectors, of `[vectors, dimension]`; 1 if there is one."""
    count = len(vectors)
    if count == 1:
        return 1.0
    total = vectors.sum(axis=0)
    return float((total @ total - (vectors * vectors).sum()) / (count * (count - 1)))
