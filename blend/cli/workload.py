"""The questions of a report, a file's or built-in ones about the corpus and needles in it, and calibration on their chunks."""

from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend.cli import opening
from blend.cli.progress import stage_progress
from blend.errors import ConfigError
from blend.eval.dataset import MIN_CHUNKS, Record, RecordChunk, load_dataset, make_needles

if TYPE_CHECKING:
    from blend.eval.evaluator import Evaluator
    from blend.rag import Rag
    from blend_retrieval import Chunk

NEEDLE_CHUNKS = 8


def load_records(given: dict[str, Any], dataset: Path | None, limit: int | None) -> tuple[Rag, list[Record]]:
    """The engine with its model loaded, and the questions; what is wrong with these shows before the model is loaded."""
    if dataset is not None:
        records = load_dataset(dataset, limit)
        rag = opening.open_for_questions(given)
    else:
        rag = opening.open_corpus(given)
        records = builtin_records(rag, limit or 1)
    _ = rag.store, rag.decoder
    return rag, records


def calibrate(rag: Rag, evaluator: Evaluator, records: list[Record]) -> None:
    """What `blend precompute` does once for documents, for the chunks of these records: a surrogate context and KV corrections.

    Nothing where the store has them, or where the options go without.
    """
    if rag.blend_config.correction:
        with stage_progress() as progress:
            evaluator.calibrate(records, rag.corpus_config.surrogate_tokens, progress)


def builtin_records(rag: Rag, limit: int) -> list[Record]:
    """Questions about the demo corpus, where the index holds it, in turn with needle questions over its chunks.

    Raises `ConfigError` for a corpus of less than four different chunks.
    """
    chunks = rag.index.chunks
    filler = list(dict.fromkeys(chunk.text.strip() for chunk in chunks))
    if len(filler) < MIN_CHUNKS:
        raise ConfigError(
            f"the corpus has {len(filler)} different chunks, built-in questions need {MIN_CHUNKS}: "
            "precompute more documents, or bring questions of your own with --dataset"
        )
    about = _corpus_questions(rag, {chunk.document_id for chunk in chunks})
    needles = make_needles(filler, per_kind=limit // 4 + 1, chunks=min(NEEDLE_CHUNKS, len(filler)), seed=0)
    both = chain.from_iterable(zip_longest(about, needles))
    return [record for record in both if record is not None][:limit]


def _corpus_questions(rag: Rag, documents: set[str]) -> list[Record]:
    from blend_retrieval.demo_questions import DEMO_QUESTIONS

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
