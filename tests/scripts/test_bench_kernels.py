"""`scripts/bench_kernels` on a CPU: checks, tables, reasons and goals, over the torch paths and a timer that counts nothing."""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels"
KEYS = 256
MACHINE = {"gpu": "none", "matmul_tflops": 2.0, "copy_gbps": 1.0}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module: on the CPU, one small shape, and every run takes one millisecond."""
    loader = SourceFileLoader("bench_kernels", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    module.DEVICE, module.DTYPE = "cpu", torch.float32
    module.SHAPES = {"small": (4, 2, 32)}
    module.milliseconds = lambda run: run() is None or 1.0
    module.machine = lambda: dict(MACHINE)
    torch.manual_seed(0)
    return module


def spoil(op: Any) -> Any:
    """The op with one entry of its result off by a tenth."""

    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = op(*args, **kwargs)
        out[..., -1] += 0.1 * out.square().mean().sqrt() + 0.1 * out[..., -1].abs()
        return out

    return spoiled


@pytest.fixture
def results(bench: Any, tmp_path: Path) -> dict:
    return bench.run(["small"], [KEYS], {"flex"}, tmp_path / "b.json")


def test_everything_is_right_and_checked(bench: Any, results: dict) -> None:
    assert [len(results[name]) for name in ("attention", "dense", "ops")] == [6, 1, 8]
    lines = [line for name in ("attention", "dense", "ops") for line in results[name]]
    assert [line["op"] for line in lines if line["error"] is None] == ["device copy"]
    assert not any(bench.is_wrong(line) for line in lines)
    assert all(line["error"] < 1e-4 for line in lines if line["error"] is not None)


def test_rates_count_what_is_said(results: dict) -> None:
    """One key is seen by the first row, all by the last; four heads of 32, two products, one millisecond."""
    decode = results["attention"][-1]
    assert decode["tflops"] == pytest.approx(4 * 4 * 32 * KEYS / 1e9)
    assert decode["gbps"] == pytest.approx(2 * 2 * 32 * KEYS * 4 / 1e6)
    assert results["dense"][0]["ours"] == pytest.approx(4 * 4 * 32 * KEYS * (KEYS + 1) / 2 / 1e9)
    rates = {line["op"]: line.get("gbps") for line in results["ops"]}
    assert rates["rotate_keys bf16"] == rates["device copy"] == pytest.approx(2 * 8 * KEYS * 128 * 4 / 1e6)
    assert rates["rotate_keys int8 to bf16"] == pytest.approx(8 * KEYS * 128 * (4 + 1) / 1e6)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("selective_attention", ["attention"] * 6 + ["dense"]),
        ("rotate_keys", ["rotate_keys bf16", "rotate_keys bf16, interleaved", "rotate_keys int8 to bf16"]),
        ("kv_deviation", ["kv_deviation v", "kv_deviation v, torch"]),
        ("attention_mass", ["attention_mass"]),
    ],
)
def test_a_wrong_op_is_found_in_its_own_lines(bench: Any, tmp_path: Path, op: str, wrong: list[str]) -> None:
    setattr(bench, op, spoil(getattr(bench, op)))
    results = bench.run(["small"], [KEYS], {"flex", "sdpa"}, tmp_path / "b.json")
    found = [
        line.get("op", name) for name in ("attention", "dense", "ops") for line in results[name] if bench.is_wrong(line)
    ]
    assert found == wrong


def test_an_error_is_relative_to_the_entry_and_its_row(bench: Any) -> None:
    """Rounding to bf16 is no error at any magnitude; an entry of a small row that is off is one, however big other rows are."""
    exact = torch.randn(64, 128, dtype=torch.float64) * 2.0 ** torch.arange(-20, 44)[:, None]
    rounded = exact.bfloat16()
    assert bench.relative_error(rounded, exact) < bench.LIMITS[torch.bfloat16] / 4
    rounded[0, 0] += exact[0].square().mean().sqrt()
    assert bench.relative_error(rounded, exact) > bench.LIMITS[torch.bfloat16]
    rounded[0, 0] = float("nan")
    assert bench.is_wrong({"error": bench.relative_error(rounded, exact), "limit": bench.LIMITS[torch.bfloat16]})


def test_a_baseline_that_does_not_run_says_why(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> Any:
        def prepare() -> Any:
            raise error

        return prepare

    assert bench.attempt(fails(torch.OutOfMemoryError("no")), float, "(mask 17.0 GB)") == "out of memory (mask 17.0 GB)"
    assert bench.attempt(fails(RuntimeError("no | kernel\nmore")), float) == "RuntimeError: no / kernel"
    assert bench.attempt(lambda: lambda: torch.ones(1), lambda out: 0.5) == "wrong by 5.0e-01"
    assert bench.attempt(lambda: lambda: torch.ones(1), lambda out: 0.0) == 1.0
    line = bench.bench_dense("small", KEYS)
    assert line["flash_attn"] == "no flash_attn"
    assert bench.bench_attention("small", KEYS, "suffix", {"flex", "sdpa"})["flex_ms"] == "skipped"


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_checked_and_timed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert bench.bench_attention("small", KEYS, 0.15, {"sdpa"})["flex_ms"] == 1.0


def attention(**changed: Any) -> dict:
    line = {
        "shape": "8B", "keys": 16384, "share": 0.15, "rows": 2521, "error": 0.001, "limit": 0.03, "ms": 1.0, "tflops": 1.4,
        "gbps": 0.5, "sdpa_mask_ms": 4.0, "flex_ms": 1.2,
    }  # fmt: skip
    return {**line, **changed}


def made(*lines: dict, **changed: Any) -> dict:
    dense = {"shape": "8B", "keys": 16384, "error": 0.0, "limit": 0.03, "ours": 1.0, "cudnn": 1.3, "flash": "no"}
    ops = [{"op": "rotate_keys bf16", "shape": "", "keys": 16384, "error": 0.0, "limit": 0.03, "ms": 2.0, "gbps": 0.7}]
    return {
        "machine": MACHINE,
        "attention": list(lines),
        "dense": [{**dense, "flash_attn": "no"}],
        "ops": ops,
        **changed,
    }


def verdicts(bench: Any, *results: dict) -> list[str]:
    for each in results:
        bench.compare(each)
    lines = bench.report(list(results))
    return lines[lines.index("", len(lines) - len(bench.GOALS) - 1) + 1 :]


def test_goals_are_judged_by_the_worst_line_at_16k_and_more(bench: Any) -> None:
    lines = [
        attention(),
        attention(keys=4096, tflops=0.1),
        attention(keys=32768, tflops=1.24),
        attention(share=0.05, tflops=0.1),
    ]
    suffixes = [attention(share="suffix", gbps=0.4), attention(share="decode", gbps=0.9)]
    found = verdicts(bench, made(*lines, *suffixes))
    assert [re.split("  +", line)[0] for line in found] == ["PASS", "PASS", "FAIL", "PASS", "FAIL", "PASS", "FAIL"]
    assert found[0].endswith("matmul rate >= 60%: 62% at worst (8B, 32768; 2 of 2 lines have it)")
    assert found[1].endswith(">= 3.00: 4.00 at worst (8B, 16384; 2 of 2 lines have it)")
    assert found[3].endswith(">= 1.00: 1.08 at worst (8B, 16384; 1 of 2 lines have it)")
    assert found[5].endswith(">= 80%: 90% at worst (8B, 16384; 1 of 1 lines have it)")
    assert found[6].endswith(">= 80%: 70% at worst (rotate_keys bf16, 16384; 1 of 1 lines have it)")


def test_tables_show_ratios_reasons_and_dashes(bench: Any) -> None:
    results = made(attention(), attention(share="suffix", sdpa_mask_ms="out of memory (mask 5.2 GB)"))
    bench.compare(results)
    lines = bench.report([results])
    first = "| 8B | 16384 | 2521 (15%) | 1.000 | 1 | 70% | 0 | - | 4.000 | 4.0 | 1.200 | 1.20 | 1.08 | 1.0e-03 |"
    assert first in lines
    assert any("| 50% | out of memory (mask 5.2 GB) | - |" in line for line in lines)
    widths = [
        {line.count("|") for line in block.splitlines()} for block in "\n".join(lines).split("\n\n") if "| ---" in block
    ]
    assert all(len(width) == 1 for width in widths)
    assert len(widths) == 3


def test_pieces_are_saved_and_shown_together(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for keys, file in zip((KEYS, 2 * KEYS), files, strict=True):
        saved = bench.run(["small"], [keys], {"flex", "sdpa"}, file)
        assert json.loads(file.read_text()) == saved
    monkeypatch.setattr("sys.argv", ["bench_kernels", "--show", *map(str, files)])
    assert bench.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("| small | 256 |") == shown.count("| small | 512 |") == 9
    assert "0 wrong results" in shown


def test_without_a_gpu_it_says_what_to_run(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_kernels"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main() == 2
    assert "scripts/bench_cpu_attention" in capsys.readouterr().err


def test_lines_that_are_there_stay_and_the_others_are_measured(bench: Any, results: dict, tmp_path: Path) -> None:
    """Whatever a killed run lost: lines of every table, beside what other scripts put into the file."""
    file, measured = tmp_path / "b.json", []
    kept = {name: [line for line in results[name] if line.get("share") != "decode"] for name in ("attention", "dense")}
    ops = [line for line in results["ops"] if line["shape"]]
    file.write_text(json.dumps({**results, **kept, "ops": ops, "ttft": [1]}))
    bench.milliseconds = lambda run: measured.append(run()) or 2.0
    again = bench.run(["small"], [KEYS], {"flex"}, file, resume=True)
    assert [line["ms"] for line in again["attention"]] == [1.0] * 5 + [2.0]
    assert [line["ms"] for line in again["ops"]] == [1.0] * 2 + [2.0] * 6
    assert again["ttft"] == [1]
    assert json.loads(file.read_text()) == again
    measured.clear()
    assert bench.run(["small"], [KEYS], {"flex"}, file, resume=True) == again
    assert not measured
    assert bench.run(["small"], [KEYS], {"flex", "sdpa"}, file)["attention"][0]["ms"] == 2.0
