"""`--quality`: estimates by `blend precompute --questions`, then estimates with every answer."""

from tests import towns

QUESTION = "When did the glacier open?"


def test_a_store_with_estimates_states_what_to_expect(filled, tmp_path):
    before = filled("answer", QUESTION, "--quality", "0.5", "--json", "--max-new-tokens", "2")
    assert before.json["quality"] is None
    assert any("no quality is promised" in line for line in before.json["problems"])
    documents = tmp_path / "documents"
    documents.mkdir()
    for number, topic in enumerate(("glacier", "harbour", "library")):
        (documents / f"{topic}.md").write_text(towns.document(topic, number), encoding="utf-8")
    made = filled("precompute", str(documents), "--chunk-tokens", "64", "--questions", "auto")
    assert made.code == 0, made.err
    assert "fitted to 18 questions: too few for --quality 0.05" in made.err
    generous = filled("answer", QUESTION, "--quality", "50", "--json", "--max-new-tokens", "2").json
    assert (generous["quality"]["target"], generous["quality"]["ratio"]) == (50, 0.05)
    assert generous["quality"]["kl"] >= 0
    assert generous["problems"] == [line for line in generous["problems"] if "promised" not in line]
    strict = filled("answer", QUESTION, "--quality", "0.05", "--json", "--max-new-tokens", "2").json
    assert (strict["quality"]["kl"], strict["quality"]["ratio"]) == (0.0, 1.0)
    assert any("estimates from 18 prompts cannot show this quality" in line for line in strict["problems"])
    assert "expected KL" in filled("answer", QUESTION, "--quality", "50", "--max-new-tokens", "2").out


def test_too_few_questions_are_refused(filled, tmp_path):
    documents, questions = tmp_path / "documents", tmp_path / "q.txt"
    towns.write_documents(documents)
    questions.write_text("When did the glacier open?\n", encoding="utf-8")
    refused = filled("precompute", str(documents), "--chunk-tokens", "64", "--questions", str(questions))
    assert "q.txt has 1 question, estimates take 16" in refused.refused(2)
    assert "--quick" in filled("precompute", str(documents), "--quick", "--questions", "auto").refused(2)
