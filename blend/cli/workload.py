"""The questions of a report that was given none: about the demo corpus, and needles hidden in the user's own chunks."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from blend.dataset import Record, RecordChunk
from blend.needles import make_needles

if TYPE_CHECKING:
    from blend.pipeline import Rag
    from retrieval import Chunk

NEEDLE_CHUNKS = 8


def builtin_records(rag: Rag, limit: int) -> list[Record]:
    """Questions about the demo corpus, where the index holds it, in turn with needle questions over its chunks."""
    chunks = rag.retriever.index.chunks
    about = _corpus_questions(rag, {chunk.document_id for chunk in chunks})
    filler = [chunk.text for chunk in chunks]
    needles = make_needles(filler, per_kind=max(1, limit // 4 + 1), chunks=min(NEEDLE_CHUNKS, len(filler)), seed=0)
    both = chain.from_iterable(zip_longest(about, needles))
    return [record for record in both if record is not None][:limit]


def _corpus_questions(rag: Rag, documents: set[str]) -> list[Record]:
    from retrieval.demo_questions import DEMO_QUESTIONS

    return [
        Record(
            id=f"corpus-{number:02}",
            question=asked.question,
            answers=asked.answers,
            chunks=tuple(_chunk(hit.chunk) for hit in rag.retriever.search(asked.question, rag.corpus_config.top_k)),
            task="corpus" if len(asked.modules) == 1 else "corpus-two-modules",
        )
        for number, asked in enumerate(DEMO_QUESTIONS)
        if {f"{module}.md" for module in asked.modules} <= documents
    ]


def _chunk(chunk: Chunk) -> RecordChunk:
    return RecordChunk(chunk.title, chunk.text)
