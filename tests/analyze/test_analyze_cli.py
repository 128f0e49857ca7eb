"""`blend analyze` from the command line, over a saved tiny model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from blend.cli import blend as group
from blend.errors import DatasetError, PromptError
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = " ".join(f"w{number}" for number in range(100))
    return save_tiny_model(tmp_path_factory.mktemp("analyze") / "tiny", words, max_position_embeddings=512)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    def chunk(number: int, words: int) -> dict[str, str]:
        return {"title": "", "text": " ".join(f"w{3 + (number * 7 + i * i) % 90}" for i in range(words))}

    records: list[dict[str, Any]] = [
        {"id": f"q{n}", "question": "w5 w6 w7", "chunks": [chunk(n, 20), chunk(n + 1, 15), chunk(n + 2, 9)]}
        for n in range(2)
    ]
    records.append({"id": "long", "question": "w5", "chunks": [chunk(1, 600)]})
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(group, ["analyze", *map(str, arguments)])


def test_a_question_file(model, dataset, tmp_path):
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    place = ("--model", model, "--store", tmp_path / "store", "--device", "cpu")
    common = ("--dataset", dataset, *place, "--json", numbers)
    result = _run(*common, "--ratio", "0.3", "--head", "1", "--layer", "3", "--html", page)
    assert result.exit_code == 0, result.output
    document = json.loads(numbers.read_text())
    assert [record["id"] for record in document["records"]] == ["q0", "q1"]
    assert "long left out: the prompt has" in result.stderr
    assert document["config"]["ratio"] == 0.3
    assert all(record["mapped"] for record in document["records"]), "calibrated on the file's chunks, as a report is"
    assert {layer["head"] for layer in document["prompts"][0]["pictures"]["layers"]} == {1}
    assert document["prompts"][0]["pictures"]["shown"] == 3
    assert document["axes"]["kinds"] == ["capitalised", "number", "punctuation", "other"]
    assert set(document["prompts"][0]["kinds"]) <= set(document["axes"]["kinds"])
    counted = [sum(rows for rows, _ in document["mean"]["places"][name]) for name in ("by_start", "by_kind")]
    assert counted[0] == pytest.approx(counted[1])
    assert "tokens are among the highest 10%" in document["readings"]["kinds"]
    assert len(document["mean"]["cross"]["full"]) == 4
    assert json.dumps(document["head"]) in page.read_text()
    assert document["readings"]["cross"] in result.stdout
    assert "there is no layer 4" in str(_run(*common, "--layer", "4").exception)
    again = _run(*common, "--limit", "1", "--no-correction")
    assert again.exit_code == 0, again.output
    (record,) = json.loads(numbers.read_text())["records"]
    assert not record["mapped"]


def test_a_question_over_the_index(model, tmp_path, monkeypatch):
    from blend.corpus import TitledText
    from blend.rag import Rag

    hit = SimpleNamespace(chunk=TitledText("w9", "w5 w6 w7 w8 w9 w10"))
    search = SimpleNamespace(search=lambda question, count: [hit] * count)
    monkeypatch.setattr("blend.cli.opening.check", lambda given, **needs: None)  # no index is there
    monkeypatch.setattr(Rag, "retriever", search)
    out = tmp_path / "out.json"
    place = ("--model", model, "--store", tmp_path / "s", "--device", "cpu")
    result = _run("w3 w4", "--top-k", "2", *place, "--json", out)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["workload"] == "one question over the index"
    assert document["records"][0]["question"] == "w3 w4"
    assert document["records"][0]["chunks"] == 2


def test_mistakes(model, dataset, tmp_path):
    common = ("--model", model, "--store", tmp_path / "store", "--device", "cpu", "--json", tmp_path / "o.json")
    assert "one of them" in _run(*common).output
    assert "one of them" in _run("why?", "--dataset", dataset, *common).output
    assert "where to write" in _run("why?", "--model", model).output
    assert isinstance(_run(" ", *common).exception, PromptError)
    assert isinstance(_run("--dataset", tmp_path / "none.jsonl", *common).exception, DatasetError)
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"id": "a", "question": "w5", "chunks": []}\n')
    nothing = _run("--dataset", empty, *common).exception
    assert isinstance(nothing, PromptError)
    assert "no chunks" in str(nothing)
    assert not (tmp_path / "o.json").exists()
