"""`scripts/bench_selection` over a tiny model and small sets of questions, in this process and once as a command."""

import json
from pathlib import Path

import pytest
from commands import command

from blend.errors import DatasetError
from study.measuring import Setting, run
from study.rows import read_rows
from study.show import show
from tests.tiny_model import save_tiny_model

METHODS = {"full", "reuse", "published", "query", "query 5 %"}


def again(folder: Path, records: int = 3, **changed: object) -> list[str]:
    """Measure what is missing; the lines that say so."""
    sets = (folder / "questions.jsonl", folder / "meetings.jsonl")
    about = {"sets": sets, "stores": folder / "stores", "model": str(folder / "tiny"), "max_new_tokens": 4, **changed}
    return list(run(Setting(**about), folder / "r.jsonl", "finalists", records))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two sets, the model and the results of three records each."""
    folder = tmp_path_factory.mktemp("bench")
    words = [f"w{number}" for number in range(100)]
    save_tiny_model(folder / "tiny", " ".join(words))
    for name, task in (("questions", "qa"), ("meetings", "summarize-query")):
        lines = []
        for number in range(36):
            texts = [" ".join(words[number + part : number + part + 20]) for part in range(4)]
            chunks = [{"title": f"{name} {number}.{part}", "text": text} for part, text in enumerate(texts)]
            about = {"id": str(number), "question": words[number], "answers": ["w1"], "task": task}
            lines.append(json.dumps({**about, "chunks": chunks}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    assert len(again(folder)) == 6
    return folder


def test_every_method_is_measured_once_on_the_same_records(measured: Path) -> None:
    by_method: dict[str, set[tuple[str, str]]] = {}
    for row in read_rows(measured / "r.jsonl"):
        by_method.setdefault(row.method, set()).add((row.set, row.id))
    assert set(by_method) == METHODS
    assert len(set(map(frozenset, by_method.values()))) == 1
    assert len(by_method["full"]) == 6
    before = (measured / "r.jsonl").read_text()
    assert again(measured) == []
    assert (measured / "r.jsonl").read_text() == before


def test_after_a_line_that_a_kill_cut_short_no_other_is_lost(measured: Path) -> None:
    """Where full recompute of the last record was cut short, the next run measures that record, on lines of their own."""
    whole = read_rows(measured / "r.jsonl")
    lines = (measured / "r.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(lines[-5])["method"] == "full"
    (measured / "r.jsonl").write_text("".join(lines[:-5]) + lines[-5][:-20])
    assert len(again(measured)) == 1
    found = {row.key: row.kl for row in read_rows(measured / "r.jsonl")}
    assert found == {row.key: pytest.approx(row.kl, abs=1e-6) for row in whole}


def test_of_several_codecs_each_has_its_own_methods(measured: Path, tmp_path: Path) -> None:
    for name in ("questions.jsonl", "tiny"):
        (tmp_path / name).symlink_to(measured / name)
    again(tmp_path, 1, sets=(tmp_path / "questions.jsonl",), codecs=("float32", "int4"))
    found = {row.method: row.kl for row in read_rows(tmp_path / "r.jsonl")}
    assert set(found) == {"full", *(f"{name}, {codec}" for name in METHODS - {"full"} for codec in ("float32", "int4"))}
    assert found["reuse, float32"] != found["reuse, int4"]
    lines = list(show(tmp_path / "r.jsonl", ["query, int4"], "query, float32"))
    assert any("to query, float32" in line for line in lines)


def test_the_command_shows_or_says_what_is_missing(measured: Path) -> None:
    given = ("show", measured / "r.jsonl", "--paired")
    shown = command("bench_selection", *given, "reuse", "query 5 %")
    assert shown.returncode == 0, shown.stderr
    assert "| query 5 % |" in shown.stdout
    assert "| published |" not in shown.stdout
    missing = command("bench_selection", *given, "oracle")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "no record has full, published and all of oracle" in missing.stderr


def test_what_cannot_be_measured_is_refused(measured: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("".join((measured / "questions.jsonl").read_text().splitlines(keepends=True)[:30]))
    with pytest.raises(DatasetError, match="no set has a record to measure"):
        again(measured, sets=(small,))
