"""`scripts/bench_selection`, as a process of its own over a tiny model and small sets of questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from study.rows import read_rows
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_selection"


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two sets, the model and the results of three records each."""
    folder = tmp_path_factory.mktemp("bench")
    words = [f"w{number}" for number in range(100)]
    save_tiny_model(folder / "tiny", " ".join(words))
    for name, task in (("questions", "qa"), ("meetings", "summarize-query")):
        lines = []
        for number in range(36):
            chunks = [
                {"title": f"{name} {number}.{part}", "text": " ".join(words[number + part : number + part + 20])}
                for part in range(4)
            ]
            lines.append(
                {"id": str(number), "question": words[number], "answers": ["w1"], "chunks": chunks, "task": task}
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = again(folder)
    assert result.returncode == 0, result.stderr
    return folder


def again(folder: Path, records: int = 3, methods: str = "finalists") -> subprocess.CompletedProcess[str]:
    return script(
        *(
            "run",
            folder / "questions.jsonl",
            folder / "meetings.jsonl",
            "--model",
            folder / "tiny",
            "--methods",
            methods,
        ),
        *(
            "--records",
            str(records),
            "--out",
            folder / "r.jsonl",
            "--stores",
            folder / "stores",
            "--max-new-tokens",
            "4",
        ),
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]


def test_every_method_is_measured_on_the_same_records(measured: Path) -> None:
    by_method: dict[str, set[tuple[str, str]]] = {}
    for row in rows(measured):
        by_method.setdefault(row["method"], set()).add((row["set"], row["id"]))
    assert set(by_method) == {"full", "reuse", "published", "query", "query 5 %"}
    assert len(set(map(frozenset, by_method.values()))) == 1
    assert len(by_method["full"]) == 6


def test_what_is_measured_is_not_measured_again(measured: Path) -> None:
    before = (measured / "r.jsonl").read_text()
    assert again(measured).returncode == 0
    assert (measured / "r.jsonl").read_text() == before


def test_after_a_line_that_a_kill_cut_short_no_other_is_lost(measured: Path) -> None:
    """Where full recompute of the last record was cut short, the next run measures that record, on lines of their own."""
    whole = read_rows(measured / "r.jsonl")
    lines = (measured / "r.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(lines[-5])["method"] == "full"
    (measured / "r.jsonl").write_text("".join(lines[:-5]) + lines[-5][:-20])
    assert again(measured).returncode == 0
    found = {row.key: row.kl for row in read_rows(measured / "r.jsonl")}
    assert found == {row.key: pytest.approx(row.kl, abs=1e-6) for row in whole}
    assert script("show", measured / "r.jsonl").returncode == 0


def test_show_prints_tables_and_draws(measured: Path, tmp_path: Path) -> None:
    shown = script("show", measured / "r.jsonl", "--paired", "reuse", "query 5 %", "--picture", tmp_path / "p.png")
    assert shown.returncode == 0, shown.stderr
    assert "| query 5 % |" in shown.stdout
    assert "| published |" not in shown.stdout
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_show_names_what_is_lacking(measured: Path) -> None:
    shown = script("show", measured / "r.jsonl", "--paired", "oracle")
    assert shown.returncode == 2
    assert shown.stderr.count("\n") == 1
    assert "no record has full, published and all of oracle" in shown.stderr


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--task", "poetry"), 6, "no set has a record to measure"),
        (("--shard", "2/2"), 2, "shard is '2/2'"),
    ],
)
def test_a_mistake_ends_in_one_line(measured: Path, more: tuple[str, str], code: int, said: str) -> None:
    options = ("--model", measured / "tiny", "--out", measured / "x.jsonl", "--stores", measured / "stores", *more)
    done = script("run", measured / "questions.jsonl", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (measured / "x.jsonl").exists()
