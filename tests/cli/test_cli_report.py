"""`blend report` from the command line: its numbers, its files, and mistakes that show before anything is measured."""

import json

from blend_process import SHORT_CONTEXT, record

from blend import BlendConfig

TINY = ("--max-new-tokens", "3")


def test_a_question_file(blend, dataset, tmp_path):
    out = tmp_path / "out" / "report.json"
    call = ("report", "--dataset", dataset, "--limit", "2", "--json", out, *TINY)
    call += ("--mask", "bottom-right", "--selector", "first_k:k=3", "--ratio", "0.3", "--dtype", "bfloat16")
    result = blend.done(*call)
    assert "answers changed: " in result.out
    assert max(map(len, result.out.splitlines())) > 80  # whole tables, although the terminal is said to have 80 columns
    assert "\x1b" not in result.out
    report = json.loads(out.read_text())
    assert report["record_count"] == 2
    assert (report["dtype"], report["weights"]) == ("bfloat16", "native")
    assert "\nbfloat16, " in result.out
    chosen = BlendConfig(selector="first_k:k=3", ratio=0.3, mask="bottom-right")
    assert report["config"]["blend"] == chosen.plain()
    assert len(report["methods"]) == 3
    _check_methods(report["methods"])


def _check_methods(methods: dict[str, dict[str, object]]) -> None:
    assert list(methods)[:2] == ["full", "reuse"]
    for name, numbers in methods.items():
        assert {"speedup", "kl", "top1", "f1"} <= set(numbers)
        assert numbers["ttft_s"] > 0
        if name != "full":
            assert numbers["kl"] is not None
            assert set(numbers["f1_diff"]) == {"mean", "low", "high"}
    shares = [numbers["rows_share"] for numbers in methods.values()]
    assert shares[0] == 1 > shares[2] > shares[1] > 0


def test_built_in_questions_and_json_on_stdout(filled):
    result = filled.done("report", "--limit", "4", "--json", "-", *TINY)
    assert "answers changed: " in result.err
    _check_methods(result.json["methods"])
    assert {record["task"] for record in result.json["records"]} == {"needle-single", "needle-split"}


def test_a_record_that_does_not_fit_is_left_out(blend, short_model, tmp_path):
    blend.model = short_model
    path = tmp_path / "long.jsonl"
    too_long = json.dumps(record(0, sentences=500))
    path.write_text(f"{too_long}\n{json.dumps(record(1))}")
    result = blend.done("report", "--dataset", path, "--json", "-", *TINY)
    assert "q0 left out" in result.err
    assert result.json["record_count"] == 1
    path.write_text(too_long)
    assert f"no question fits the {SHORT_CONTEXT} tokens" in blend("report", "--dataset", path, *TINY).refused(3)


def test_built_in_questions_need_some_text(blend, tmp_path):
    (tmp_path / "note.txt").write_text("One short note about a bell.")
    blend.precompute(tmp_path / "note.txt")
    assert "--dataset" in blend("report").refused(2)


QUESTIONS = ("When did the glacier open?", "How many gates has the harbour?", "What is the market known for?")


def test_questions_over_the_corpus_are_held_to_the_quality_that_is_asked_for(filled, tmp_path):
    questions = tmp_path / "q.txt"
    questions.write_text("\n\n".join(QUESTIONS), encoding="utf-8")
    call = ("report", "--questions", questions, "--dtype", "float32", "--json", "-", *TINY)
    exact = filled.done(*call, "--ratio", "1", "--quality", "0.0001")
    assert [record["record_id"] for record in exact.json["records"][::3]] == ["q001", "q002", "q003"]
    assert exact.json["workload"] == "q.txt"
    blend = exact.json["methods"]["blend"]
    assert blend["kl"] < 1e-5
    assert blend["changes"]["share"]["mean"] == 0
    assert blend["changes"]["share"]["high"] > 0.3  # three answers prove little
    judged = exact.json["judged"]["kl"]
    assert (judged["mean"], judged["target"], judged["answers"]) == (blend["kl"], 0.0001, 3)
    assert judged["decision"] == "undecided"
    assert "within 0.0001: undecided, 16 records would probably decide" in exact.err
    questions.write_text("\n".join(QUESTIONS * 6), encoding="utf-8")
    broken = filled(*call, "--ratio", "0", "--quality", "0.000001")
    assert broken.code == 10
    assert broken.json["judged"]["kl"]["decision"] == "broken"
    assert broken.err.count("no quality is promised") == 1
    assert "larger --ratio" in broken.err


def test_questions_made_from_the_chunks(filled):
    result = filled.done("report", "--questions", "auto", "--limit", "2", *TINY)
    assert "questions made from the chunks" in result.out
    assert "2 records" in result.out
