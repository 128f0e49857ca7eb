"""Questions over a corpus: those of a file, or made from its chunks."""

from __future__ import annotations

import json
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
    """The questions of a file. Raises `DatasetError`."""
    lines = [line.strip() for line in read_text(path, DatasetError).splitlines() if line.strip()]
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1)]
    if not questions:
        raise DatasetError(f"{path}: no question in it; write one a line")
    return questions


def _question(path: Path, number: int, line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        question = json.loads(line)["question"]
    except (ValueError, KeyError):
        question = None
    if not isinstance(question, str) or not question.strip():
        raise DatasetError(f'{path}, line {number}: no JSON object with a text "question"; write {{"question": "..."}}')
    return question
