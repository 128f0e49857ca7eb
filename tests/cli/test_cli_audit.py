"""`blend audit` as a user calls it."""

from pathlib import Path

from blend_process import Blend

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
    blended = filled(*asked, "--ratio", "0", "--quality", "0.000001")
    assert blended.code == 10
    assert "larger --ratio" in blended.err
    assert blended.err.count("no quality is promised") == 1
    assert "precompute --questions" in blended.err
    assert filled(*asked, "--ratio", "0", "--flips", "0.000001").code in (0, 10)
    assert "3 answers" in blended.out
    assert "nats a token" in blended.out


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
