"""`scripts/bench_ttft --shape` and `scripts/bench_gpu` on a CPU: rows, resumption, and what they do not need."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT, command, main

from _results import Results
from _shapes import SHAPES, random_decoder, random_ids, random_layout
from _ttft import METHODS, Bench, Subject
from blend import BlendConfig

pytestmark = pytest.mark.timeout(600)  # processes that load torch
# Installed wherever kvblend is, but not on a GPU machine that was made for something else.
BLOCKED = (
    "click", "faiss", "markdown_it", "matplotlib", "rich", "semantic_text_splitter", "sentence_transformers",
)  # fmt: skip
# Only our own imports are refused: other libraries bring theirs, or do without.
BLOCKER = f"""
import builtins, sys
found = builtins.__import__
def refused(name, globals=None, locals=None, fromlist=(), level=0):
    top = (globals or {{}}).get("__name__", "").partition(".")[0]
    ours = top in ("blend", "blend_retrieval", "blend_kernels", "__main__") or top.startswith(("_", "bench_"))
    if ours and level == 0 and name.partition(".")[0] in {BLOCKED!r}:
        raise ImportError(f"{{name}} is not installed here, {{top}} asked for it")
    return found(name, globals, locals, fromlist, level)
builtins.__import__ = refused
"""


@pytest.fixture
def blocked(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python, children's too, imports our `sitecustomize` at every start."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    return {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT))), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Options of a run of seconds on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ["--only", "ttft:tiny", "--chunk-tokens", "128", "--rounds", "1"]
    return ["--json", tmp_path / "gpu.json", "--folder", tmp_path, *given]


def rows(file: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: list[dict[str, Any]] = json.loads(file.read_text(), parse_constant=refuse)["ttft"]
    return found


def test_the_blocker_blocks(blocked: dict[str, str]) -> None:
    code = "exec('import rich', {'__name__': 'blend.store'})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **blocked})
    assert "rich is not installed here" in result.stderr


def test_one_command_measures_all_methods_in_all_stores_and_goes_on_where_it_was_stopped(
    blocked: dict[str, str], small: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    assert main("bench_gpu", *small, "--minutes", "0") == 3
    assert "run the same command again" in capfd.readouterr().out
    assert not file.exists()
    result = command("bench_gpu", *small, **blocked)
    assert result.returncode == 0, result.stderr
    found = rows(file)
    assert [(row["store"], row["method"]) for row in found] == [(s, m) for s in ("memory", "disk") for m in METHODS]
    assert all(row["ttft_s"] > 0 and row["wrong"] is None and row["prompt"] == 1024 + 104 for row in found)
    blended = [row for row in found if row["method"] != "full"]
    assert all(row["over_floor"] > 0 and row["speedup"] > 0 and not row["notes"] for row in blended)
    assert {row["bytes_loaded"] for row in blended} == {1024 * 2 * 3 * 2 * 16 * 4}, (
        "K and V, 3 layers, 2 heads of 16, fp32"
    )
    assert not list(tmp_path.glob("tmp*")), "the disk store is gone"
    assert main("bench_gpu", *small) == 0
    assert rows(file) == found
    assert "1024" in capfd.readouterr().out


def test_rows_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"machine": {"cpu": "another"}, "ttft": []}))
    with pytest.raises(SystemExit, match="was measured on another machine"):
        main("bench_ttft", "--shape", "tiny", "--json", file)


def test_a_piece_that_there_is_none_of_is_refused(small: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("bench_gpu", *small, "--only", "ttft:9B") == 2
    assert capsys.readouterr().err.startswith("no piece is called ttft:9B: name KIND")


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that other tests hold
    others = [random_ids(512, 16, 100 + number) for number in range(16)]
    decoder = random_decoder("tiny", torch.device("cpu"), torch.bfloat16)
    return Subject(decoder, lambda tokens: random_layout(512, tokens, 16), others, random=True)


def test_only_rows_that_are_missing_are_measured(subject: Subject, tmp_path: Path) -> None:
    """A model is made for them alone; all others stay."""
    file, made = tmp_path / "r.json", []

    def load() -> Subject:
        made.append(1)
        return subject

    def bench() -> Bench:
        return Bench(load, {"shape": "tiny"}, Results(file), "bfloat16", 1)

    first = bench().run([64], ["memory"])
    assert [row["method"] for row in first] == list(METHODS)
    assert bench().run([64], ["memory"]) == first
    assert len(made) == 1
    both = bench().run([64, 96], ["memory"])
    assert (both[: len(METHODS)], len(both)) == (first, 2 * len(METHODS))


def test_out_of_memory_is_said_in_the_rows() -> None:
    def load() -> Subject:
        raise torch.OutOfMemoryError("no")

    rows = Bench(load, {"shape": "8B"}, Results(None), "bfloat16", 1).run([4096], ["memory"])
    assert [row["why_not"] for row in rows] == ["out of GPU memory"] * len(METHODS)


def test_the_neutral_correction_is_applied_in_every_layer_and_changes_nothing(subject: Subject) -> None:
    layout = subject.layout(96)
    logits = {}
    for correction in (True, False):
        bench = Bench(lambda: subject, {}, Results(None), "bfloat16", 1)
        blender = bench.filled("memory:", layout)
        for contextual in (False, True):
            held = blender.correction(layout.prefix, contextual=contextual)
            assert held is not None
            assert sum(layer is not None for layer in held.layers) == 2
        blend = blender.prefill(layout, config=BlendConfig(ratio=0.15, correction=correction))
        logits[correction] = blend.logits
        assert blend.correction_fits
    torch.testing.assert_close(logits[True], logits[False], rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "billions"), [("0.5B", 0.494), ("1.5B", 1.544), ("8B", 8.03), ("70B-shard", 8.82)])
def test_shapes_are_those_of_the_models(shape: str, billions: float) -> None:
    """Parameters as the models' cards say them; 70B-shard has an eighth of 70.55 billion."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[shape].config(), dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
