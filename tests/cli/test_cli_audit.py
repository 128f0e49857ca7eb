"""`blend audit` as a user calls it."""

from pathlib import Path

import pytest
from blend_process import Blend

from blend.cli.audit import Audited

QUESTIONS = ("When did the glacier open?", "How many gates has the harbour?", "What is the market known for?")


def test_full_recompute_agrees_with_itself(filled: Blend, tmp_path: Path) -> None:
    questions = tmp_path / "q.txt"
    questions.write_text("\n\n".join(QUESTIONS), encoding="utf-8")
    asked = ("audit", str(questions), "--max-new-tokens", "8", "--dtype", "float32")
    result = filled(*asked, "--ratio", "1", "--quality", "0.0001", "--json")
    assert result.code == 0
    assert result.json["kl"]["mean"] < 1e-5
    assert result.json["flips"]["mean"] == 0
    assert result.json["flips"]["high"] > 0.3  # three answers prove little
    assert [one["question"] for one in result.json["answers"]] == list(QUESTIONS)
    undecided = filled(*asked, "--ratio", "0", "--quality", "0.000001")
    assert undecided.code == 0
    assert "the mean KL within 1e-06: undecided: 16 questions would probably decide" in undecided.out
    questions.write_text("\n".join(QUESTIONS * 6), encoding="utf-8")
    blended = filled(*asked, "--ratio", "0", "--quality", "0.000001")
    assert blended.code == 10
    assert "larger --ratio" in blended.err
    assert blended.err.count("no quality is promised") == 1
    assert "precompute --questions" in blended.err
    assert "18 answers" in blended.out
    assert "nats a token" in blended.out


def test_different_answers_are_judged_by_the_share_that_is_asked_for(
    filled: Blend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = tmp_path / "q.txt"
    questions.write_text("\n".join(QUESTIONS * 6), encoding="utf-8")
    different = Audited("a question", "an answer", 0.0, 0, 0.2, estimated=True, notes=())
    monkeypatch.setattr("blend.cli.audit.audit", lambda *_: different)
    broken = filled.here("audit", str(questions), "--flips", "0.1", "--json")
    assert (broken.code, broken.json["kept"]) == (10, False)
    assert "the share of different answers is above 0.1" in broken.err
    assert "calibrate on more questions" in broken.err
    few = filled.here("audit", str(questions), "--flips", "0.1", "--limit", "3", "--json")
    assert (few.code, few.json["decided"]) == (0, {"the share of different answers": "undecided"})


def test_questions_as_json_lines(filled: Blend, tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"id": "1", "question": "When did the glacier open?"}\n', encoding="utf-8")
    result = filled("audit", str(questions), "--max-new-tokens", "2", "--limit", "1")
    assert result.code == 0
    assert "1 answer," in result.out
    questions.write_text('{"id": "1"}\n', encoding="utf-8")
    wrong = filled("audit", str(questions))
    assert wrong.code != 0
    assert "line 1" in wrong.err
    questions.write_text("\n", encoding="utf-8")
    assert "no question" in filled("audit", str(questions)).err
