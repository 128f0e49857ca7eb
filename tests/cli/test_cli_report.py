"""`blend report` from the command line: its numbers, its files, and mistakes that show before anything is measured."""

import json
import sys

import pytest
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
    assert report["config"]["blend"] == report["config"]["methods"]["blend"] == chosen.plain()
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


def test_one_run_compares_selectors_and_ratios_and_draws_them(filled, tmp_path):
    questions = tmp_path / "q.jsonl"
    lines = [{"question": text, "answers": ["nine"], "task": "towns"} for text in QUESTIONS]
    questions.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    picture, page = tmp_path / "report.svg", tmp_path / "report.html"
    call = ("report", "--questions", questions, "--picture", picture, "--html", page, "--json", "-", *TINY)
    call += ("--repeats", "2", "--no-correction")
    compared = ["--selector", "hkvd", "--selector", "query_guided", "--ratio", "0.1", "--ratio", "0.3"]
    result = filled.done(*call, *compared)
    names = ["full", "reuse", "hkvd 10%", "hkvd 30%", "query_guided 10%", "query_guided 30%"]
    methods = result.json["methods"]
    assert list(methods) == names
    assert methods["hkvd 10%"]["rows_share"] < methods["hkvd 30%"]["rows_share"]
    assert result.json["config"]["methods"]["query_guided 10%"]["ratio"] == 0.1
    for name in names[1:]:
        assert methods[name]["floor_ratio"] > 0
        assert methods[name]["f1_diff"] is not None
        assert "load" in methods[name]["stages"]
        assert methods[name]["em"] is not None
    assert {record["question"] for record in result.json["records"]} == set(QUESTIONS)
    assert {record["task"] for record in result.json["records"]} == {"towns"}
    assert f"wrote {picture}" in result.err
    assert picture.read_text(encoding="utf-8").count("<svg") == 1
    assert "query_guided 30%" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--picture", "--html"])
def test_without_matplotlib_a_line_says_what_to_install_before_the_run(filled, monkeypatch, option):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = filled.here("report", option, "out.svg").refused(2)
    assert option in refused
    assert "pip install " in refused
    assert "[report]'" in refused


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--picture", "report.gif"), "a picture ends in .png or .svg"),
        (("--picture", "out.svg", "--html", "out.svg"), "name the same file"),
        (("--picture", "-"), "not to standard output"),
        (("--ratio", "0.1", "--ratio", "0.2", "--quality", "0.05"), "give one --ratio"),
        (("--selector", "hkvd", "--selector", "wrong"), "wrong"),
        (("--ratio", "0.1", "--ratio", "2"), "not a number from 0 to 1"),
        (("--repeats", "0"), "repeats"),
    ],
)
def test_mistakes_show_before_a_model_is_loaded(filled, options, problem):
    result = filled.here("report", *options)
    assert problem in result.refused(2)
    assert "Loading" not in result.err


def test_a_selector_that_the_model_cannot_serve_ends_the_run_before_it_begins(filled):
    result = filled("report", "--limit", "4", "--selector", "random", "--selector", "hkvd:check_layer=50", *TINY)
    assert "layer 50 has no KV" in result.refused(2)
    assert "[1/" not in result.err


def test_a_file_of_questions_of_two_kinds_is_refused(filled, tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question": "Why?"}) + "\nWhy?")
    assert "q.jsonl:2: no JSON object" in filled.here("report", "--questions", questions).refused(6)
