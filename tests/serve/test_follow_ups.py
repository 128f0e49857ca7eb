"""What is retrieved for a question that goes on with a conversation, and for one that no passage is like."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rooms import QUESTION, Answer, ask, serving

from blend.rag import NONE_RETRIEVED
from blend.serve.service import Service


def documents(told: Answer) -> list[str]:
    return [source.document for source in told.sources]


def test_a_follow_up_is_answered_from_what_the_conversation_is_about(service: Service) -> None:
    first = ask(service, QUESTION, top_k=2)
    assert "harbour.md" in documents(first)
    follow_up = "And how heavy is the bell?"
    assert "harbour.md" in documents(ask(service, QUESTION, "Two.", follow_up, top_k=2))


def test_a_new_topic_is_answered_from_its_own_passages(service: Service) -> None:
    asked = "How many visitors a day does the library count?"
    alone = documents(ask(service, asked, top_k=1))
    assert documents(ask(service, QUESTION, "Two.", asked, top_k=1)) == alone == ["library.md"]


@pytest.mark.parametrize(("min_score", "left"), [(0.0, 4), (0.999, 0)])
def test_passages_below_the_least_score_are_left_out(
    filled: tuple[Path, Path], tmp_path: Path, min_score: float, left: int
) -> None:
    with serving(shutil.copytree(filled[0], tmp_path / "store"), filled[1], min_score=min_score) as service:
        opened = ask(service, QUESTION, top_k=4)
    assert len(opened.sources) == left
    assert (NONE_RETRIEVED in opened.figures.notes) == (left == 0)
