"""`blend report` from the command line: its numbers, its files, and mistakes that show before anything is measured."""

import json
from pathlib import Path

import pytest
from blend_process import SHORT_CONTEXT, Blend, one_line

METRICS = ("f1", "em", "rouge_l")
TINY = ("--max-new-tokens", "3")


def _record(number: int, words: int = 40) -> dict[str, object]:
    texts = [f"Hall {number} has {part + 3} doors. " * (words // 7) for part in range(3)]
    return {
        "id": f"q{number}",
        "question": f"How many doors has hall {number}?",
        "answers": ["3", "three"],
        "chunks": [{"title": f"Hall {number}", "text": text} for text in texts],
        "gold_chunks": [0],
    }


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(_record(number)) + "\n" for number in range(3)))
    return path


def test_a_question_file(blend: Blend, dataset: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out" / "report.json", tmp_path / "report.svg"
    call = ("report", "--dataset", dataset, "--limit", "2", "--json", out, "--picture", picture, *TINY)
    call += ("--mask", "bottom-right", "--selector", "first_k:k=3", "--ratio", "0.3", "--dtype", "bfloat16")
    result = blend(*call)
    assert result.code == 0, result.err
    assert "difference to full" in result.out
    assert max(map(len, result.out.splitlines())) > 80  # whole tables, although the terminal is said to have 80 columns
    assert "\x1b" not in result.out
    assert "<svg" in picture.read_text()
    report = json.loads(out.read_text())
    assert report["record_count"] == 2
    assert (report["dtype"], report["weights"]) == ("bfloat16", "native")
    assert "\nbfloat16, " in result.out
    assert report["config"]["blend"] == {
        "selector": "first_k:k=3",
        "ratio": 0.3,
        "mask": "bottom-right",
        "correction": True,
        "surrogate": True,
        "quality": None,
        "flips": None,
    }
    assert len(report["methods"]) == 3
    _check_methods(report["methods"])


def _check_methods(methods: dict[str, dict[str, object]]) -> None:
    assert list(methods)[:2] == ["full", "reuse"]
    for name, numbers in methods.items():
        assert {"ttft_s", "speedup", "rows_share", "floor_ratio", "kl", "top1", *METRICS} <= set(numbers)
        assert numbers["ttft_s"] > 0
        if name != "full":
            assert numbers["floor_ratio"] > 0
            assert numbers["kl"] is not None
            assert all(set(numbers[f"{metric}_diff"]) == {"mean", "low", "high"} for metric in METRICS)
    shares = [numbers["rows_share"] for numbers in methods.values()]
    assert shares[0] == 1 > shares[2] > shares[1] > 0


def test_built_in_questions_and_json_on_stdout(filled: Blend) -> None:
    result = filled("report", "--limit", "4", "--json", "-", *TINY)
    assert result.code == 0, result.err
    assert "difference to full" in result.err
    _check_methods(result.json["methods"])
    assert set(result.json["tasks"]) == {f"needle-{kind}" for kind in ("single", "multikey", "twohop", "split")}


def test_a_record_that_does_not_fit_is_left_out(blend: Blend, short_model: Path, tmp_path: Path) -> None:
    blend.model = short_model
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(_record(n, words)) + "\n" for n, words in ((0, 4000), (1, 20))))
    result = blend("report", "--dataset", path, "--json", "-", *TINY)
    assert result.code == 0, result.err
    assert "q0 left out" in result.err
    assert result.json["record_count"] == 1
    path.write_text(json.dumps(_record(0, 4000)) + "\n")
    assert f"no question fits the {SHORT_CONTEXT} tokens" in blend("report", "--dataset", path, *TINY).refused(3)


def test_a_question_file_that_is_broken(blend: Blend, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"id": "a", "question": "x", "chunks": []}\n{"id": \n')
    result = blend.here("report", "--dataset", broken)
    assert (result.code, result.out) == (6, "")
    assert one_line(result.err) == result.err.strip()
    assert "broken.jsonl:2: not JSON" in result.err


def test_built_in_questions_need_some_text(blend: Blend, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("One short note about a bell.")
    assert blend("precompute", tmp_path / "note.txt").code == 0
    assert "--dataset" in blend("report").refused(2)
