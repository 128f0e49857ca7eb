"""Questions over a corpus: those of a file, or made from its chunks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blend.cli.console import read_text
from blend.errors import DatasetError, PromptError

if TYPE_CHECKING:
    from blend.rag import Rag

AUTO = "auto"  # in place of a file: questions made from the chunks


def made_questions(rag: Rag) -> list[str]:
    """Questions made from the corpus's chunks, the same ones for the same chunks. Raises `PromptError` if none can be made."""
    from blend.eval.estimates import MADE
    from blend.quality import questions_of

    questions = questions_of([chunk.text for chunk in rag.index.chunks], MADE)
    if not questions:
        raise PromptError("no question can be made from the corpus's chunks: give a file of questions")
    return questions


def read_questions(path: Path) -> list[str]:
    """The questions of a file, one a line. Raises `DatasetError`."""
    lines = map(str.strip, read_text(path, DatasetError).splitlines())
    questions = list(filter(None, lines))
    if not questions:
        raise DatasetError(f"{path}: no question in it; write one a line")
    return questions
