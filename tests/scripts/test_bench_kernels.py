"""`scripts/bench_kernels` on a CPU: checks, tables, reasons and goals, over the torch paths and a timer that counts nothing."""

import json
import re

import pytest
import torch
from commands import module

from _results import Results

KEYS = 256
CEILINGS = {"matmul_tflops": 2.0, "copy_gbps": 1.0}
TABLES = ("attention", "dense", "ops")


@pytest.fixture
def bench():
    """The script as a module: on the CPU, one small shape, and every run takes one millisecond."""
    found = module("bench_kernels")
    found.use("cpu")
    found.SHAPES = {"small": (4, 2, 32)}
    found.milliseconds = lambda run: run() is None or 1.0
    found.ceilings = lambda: dict(CEILINGS)
    torch.manual_seed(0)
    return found


def spoil(op):
    """The op with one entry of its result off by a tenth."""

    def spoiled(*args, **kwargs):
        result = op(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        out[..., -1] += 0.1 * out.square().mean().sqrt() + 0.1 * out[..., -1].abs()
        return result

    return spoiled


def measured(bench, skip, file=None):
    results = Results(file)
    bench.run(["small"], [KEYS], skip, results)
    return results


@pytest.fixture
def tables(bench):
    return measured(bench, {"flex"}).content


def test_everything_is_right_and_checked(bench, tables):
    assert [len(tables[name]) for name in TABLES] == [6, 1, 8]
    lines = [line for name in TABLES for line in tables[name]]
    assert [line["op"] for line in lines if line["error"] is None] == ["device copy"]
    assert not any(bench.is_wrong(line) for line in lines)
    assert all(line["error"] < 1e-4 for line in lines if line["error"] is not None)


def test_rates_count_what_is_said(tables):
    """One key is seen by the first row, all by the last; four heads of 32, two products, one millisecond."""
    decode = tables["attention"][-1]
    assert decode["tflops"] == pytest.approx(4 * 4 * 32 * KEYS / 1e9)
    assert decode["gbps"] == pytest.approx(2 * 2 * 32 * KEYS * 4 / 1e6)
    assert tables["dense"][0]["ours"] == pytest.approx(4 * 4 * 32 * KEYS * (KEYS + 1) / 2 / 1e9)
    rates = {line["op"]: line.get("gbps") for line in tables["ops"]}
    assert rates["device copy"] == pytest.approx(2 * 8 * KEYS * 128 * 4 / 1e6)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("selective_attention", ["attention"] * 6 + ["dense"]),
        ("rms_norm", ["rms_norm"]),
        ("attention_mass", ["attention_mass", "attention_mass, known lse"]),
    ],
)
def test_a_wrong_op_is_found_in_its_own_lines(bench, op, wrong):
    setattr(bench, op, spoil(getattr(bench, op)))
    held = measured(bench, {"flex", "sdpa"}).content
    assert [line.get("op", name) for name in TABLES for line in held[name] if bench.is_wrong(line)] == wrong


def test_an_error_is_relative_to_the_entry_and_its_row(bench):
    """Rounding to bf16 is no error at any magnitude; an entry of a small row that is off is one, however big other rows are."""
    exact = torch.randn(64, 128, dtype=torch.float64) * 2.0 ** torch.arange(-20, 44)[:, None]
    rounded = exact.bfloat16()
    assert bench.relative_error(rounded, exact) < bench.LIMITS[torch.bfloat16] / 4
    rounded[0, 0] += exact[0].square().mean().sqrt()
    assert bench.relative_error(rounded, exact) > bench.LIMITS[torch.bfloat16]
    rounded[0, 0] = float("nan")
    assert bench.is_wrong({"error": bench.relative_error(rounded, exact), "limit": bench.LIMITS[torch.bfloat16]})


def test_a_baseline_that_does_not_run_says_why(bench, monkeypatch):
    def fails(error):
        def prepare():
            raise error

        return prepare

    assert bench.attempt(fails(torch.OutOfMemoryError("no")), float) == "out of memory"
    assert bench.attempt(fails(RuntimeError("no | kernel\nmore")), float) == "RuntimeError: no / kernel"
    assert bench.attempt(lambda: lambda: torch.ones(1), lambda out: 0.5) == "wrong by 5.0e-01"
    assert bench.attempt(lambda: lambda: torch.ones(1), lambda out: 0.0) == 1.0
    assert bench.bench_attention("small", KEYS, "suffix", {"flex", "sdpa"})[0]["flex_ms"] == "skipped"


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_checked_and_timed(bench, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert bench.bench_attention("small", KEYS, 0.15, {"sdpa"})[0]["flex_ms"] == 1.0


def attention(**changed):
    line = {
        "shape": "8B", "keys": 16384, "share": 0.15, "rows": 2521, "error": 0.001, "limit": 0.03, "ms": 1.0, "host_ms": 0.25,
        "tflops": 1.4, "gbps": 0.5, "sdpa_mask_ms": 4.0, "flex_ms": 1.2,
    }  # fmt: skip
    return {**line, **changed}


def made(*lines):
    results = Results(None)
    dense = {"shape": "8B", "keys": 16384, "error": 0.0, "limit": 0.03, "ours": 1.0, "cudnn": 1.3, "flash": "no"}
    op = {"op": "rms_norm", "shape": "", "keys": 16384, "error": 0.0, "limit": 0.03, "ms": 2.0, "gbps": 0.7}
    results.content |= {"ceilings": [CEILINGS], "attention": list(lines), "dense": [dense], "ops": [op]}
    return results


def test_goals_are_judged_by_the_worst_line_at_16k_and_more(bench):
    lines = [
        attention(),
        attention(keys=4096, tflops=0.1),
        attention(keys=32768, tflops=1.24),
        attention(share=0.05, tflops=0.1),
    ]
    suffixes = [attention(share="suffix", gbps=0.4), attention(share="decode", gbps=0.9)]
    found = bench.report(made(*lines, *suffixes))[-len(bench.GOALS) :]
    assert [re.split("  +", line)[0] for line in found] == ["PASS", "PASS", "FAIL", "PASS", "FAIL", "PASS"]
    assert found[0].endswith("matmul rate >= 60%: 62% at worst (8B, 32768; 2 of 2 lines have it)")
    assert found[1].endswith(">= 3.00: 4.00 at worst (8B, 16384; 2 of 2 lines have it)")
    assert found[3].endswith(">= 1.00: 1.08 at worst (8B, 16384; 1 of 2 lines have it)")
    assert found[5].endswith(">= 60%: 90% at worst (8B, 16384; 1 of 1 lines have it)")


def test_tables_show_ratios_reasons_and_dashes(bench):
    out_of_memory = attention(share="suffix", sdpa_mask_ms="out of memory")
    lines = bench.report(made(attention(), out_of_memory))
    first = (
        "| 8B | 16384 | 2521 (15%) | 1.000 | 0.250 | 1.4 | 70% | 0 | - | 4.000 | 4.0 | 1.200 | 1.20 | 1.08 | 1.0e-03 |"
    )
    assert first in lines
    assert any("| 50% | out of memory | - |" in line for line in lines)
    widths = [{line.count("|") for line in one.splitlines()} for one in "\n".join(lines).split("\n\n") if "|---" in one]
    assert all(len(width) == 1 for width in widths)
    assert len(widths) == 3


def test_without_a_gpu_it_says_what_to_run(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["bench_kernels", "--json", str(tmp_path / "k.json")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "--device cpu" in capsys.readouterr().err


def test_lines_that_are_there_stay_and_the_others_are_measured_and_shown(bench, tmp_path, monkeypatch, capsys):
    """Whatever a killed run lost: lines of every table, next to what other scripts put into the file."""
    file = tmp_path / "b.json"
    held = measured(bench, {"flex"}, file).content
    kept = {name: [line for line in held[name] if line.get("share") != "decode"] for name in ("attention", "dense")}
    file.write_text(json.dumps({**held, **kept, "ops": [line for line in held["ops"] if line["shape"]], "ttft": [1]}))
    bench.milliseconds = lambda run: run() is None or 2.0
    again = measured(bench, {"flex"}, file).content
    assert [line["ms"] for line in again["attention"]] == [1.0] * 5 + [2.0]
    assert [line["ms"] for line in again["ops"]] == [1.0] * 7 + [2.0]
    assert again["ttft"] == [1]
    before = file.read_bytes()
    monkeypatch.setattr("sys.argv", ["bench_kernels", "--show", "--json", str(file)])
    assert bench.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("| small | 256 |") == 10
    assert "0 wrong results" in shown
    assert file.read_bytes() == before
