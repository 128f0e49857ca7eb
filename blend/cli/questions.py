"""Questions over a corpus: those of a file, or made from its chunks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blend.cli.console import read_text
from blend.errors import DatasetError, PromptError
from blend.eval.dataset import Question, parse_questions

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
    """The texts of a file's questions. Raises `DatasetError`."""
    return [question.text for question in read_question_file(path)]


def read_question_file(path: Path) -> list[Question]:
    """The questions of a file with their gold answers, one a line. Raises `DatasetError`."""
    return parse_questions(read_text(path, DatasetError), str(path))
