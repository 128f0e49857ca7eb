"""`scripts/bench_selection`, as a process of its own over a tiny model and small sets of questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_selection"
GROUPS = ("base", "finalists", "parts", "frontier", "layers", "screen")


@pytest.fixture(scope="module")
def bench() -> Any:
    loader = SourceFileLoader("bench_selection", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


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


def test_a_line_that_a_kill_cut_short_is_measured_again(measured: Path, bench: Any) -> None:
    whole = (measured / "r.jsonl").read_text()
    lost = json.loads(whole.splitlines()[-1])
    (measured / "r.jsonl").write_text(whole[:-20])
    assert again(measured).returncode == 0
    found = bench.read(measured / "r.jsonl")
    same = [r for r in found if all(r[k] == lost[k] for k in ("set", "id", "method"))]
    assert [r["kl"] for r in same] == [pytest.approx(lost["kl"], abs=1e-6)]


def test_show_prints_tables_and_draws(measured: Path, tmp_path: Path) -> None:
    shown = script("show", measured / "r.jsonl", "--paired", "reuse", "query 5 %", "--picture", tmp_path / "p.png")
    assert shown.returncode == 0, shown.stderr
    assert "| query 5 % |" in shown.stdout
    assert "| published |" not in shown.stdout
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_show_names_what_is_lacking(measured: Path) -> None:
    shown = script("show", measured / "r.jsonl", "--paired", "oracle")
    assert shown.returncode == 1
    assert "no record has full, published and all of oracle" in shown.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_names_say_the_ratio(bench: Any, group: str) -> None:
    """The picture and the tables read the ratio of a method from its name."""
    for name, config in bench.methods(group, 24).items():
        selector = config.plain()["selector"]
        if selector not in ("none", "all") or " %" in name:
            said = bench.ratio_of(name)[1]
            assert said == (0 if selector == "none" else round(config.ratio * 100)), name


@pytest.mark.parametrize("layers", [12, 24, 30, 32])
def test_bands_are_layers_of_the_model(bench: Any, layers: int) -> None:
    from blend.select import QueryGuided
    from blend.select.query_score import scoring_layers

    found = [c.selector for c in bench.methods("layers", layers).values() if isinstance(c.selector, QueryGuided)]
    assert len(found) > 8
    for selector in found:
        assert len(scoring_layers(selector.layers, layers)) >= layers // 6


def test_summaries_are_judged_by_rouge(bench: Any) -> None:
    row = {"f1": 0.5, "rouge_l": 0.25, "task": "summarize-query"}
    assert bench.to_gold(row) == 0.25
    assert bench.to_gold({**row, "task": "qa"}) == 0.5


def test_the_interval_of_a_ratio_pairs_records(bench: Any) -> None:
    """A method with half the baseline's KL on every record has a ratio of one half, and no spread."""
    base = {"s": {str(n): {"kl": 0.1 * (n + 1)} for n in range(10)}}
    mine = {"s": {i: {"kl": row["kl"] / 2} for i, row in base["s"].items()}}
    assert bench.ratio_interval(mine, base) == "0.50 [0.50,0.50]"


def test_profile_names_the_layers_that_find_the_rows(measured: Path) -> None:
    sets = [measured / "questions.jsonl", measured / "meetings.jsonl"]
    found = script("profile", *sets, "--model", measured / "tiny", "--stores", measured / "stores", "--records", "2")
    assert found.returncode == 0, found.stderr
    *table, option = found.stdout.splitlines()
    shares = [[float(share) for share in line.split()[1:]] for line in table]
    assert [line.split()[0] for line in table] == ["questions", "meetings", "mean"]
    assert all(0.0 < share <= 1.0 for line in shares for share in line)
    chosen = [int(layer) for layer in option.removeprefix("--selector query_guided:layers=").split("+")]
    assert sorted(shares[-1][layer] for layer in chosen) == sorted(shares[-1])[-len(chosen) :]
