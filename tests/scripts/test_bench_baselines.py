"""`scripts/bench_baselines` with HuggingFace and kvblend on a tiny model, and its tables; needs no other engine."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from commands import main, module

from _load import tiny_model
from _results import Results

HERE = ["HuggingFace float32", "HuggingFace bfloat16", "kvblend"]

pytestmark = pytest.mark.timeout(600)  # processes that load torch


@pytest.fixture
def small(tmp_path: Path) -> list[object]:
    """A run of seconds."""
    sizes = ["--lengths", "192", "--chunk-tokens", "48", "--threads", "1", "--probes", "4", "--rounds", "2"]
    sizes += ["--answers", "1", "3", "--decode-tokens", "192"]
    where = ["--json", tmp_path / "b.json", "--folder", tmp_path / "made", "--model", tiny_model(tmp_path)]
    return [*where, *sizes]


def test_engines_take_turns_and_only_missing_rows_are_measured(
    small: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main("bench_baselines", *small, "--only", *HERE) == 0
    held = json.loads((tmp_path / "b.json").read_text())
    rows = held["prefill"]
    first = [(row["engine"], row["method"]) for row in rows if row["round"] == 0]
    blended = [("kvblend", name) for name in ("full", "reuse", "query_guided 5 %", "query_guided 15 %")]
    assert first == [("HuggingFace float32", "full"), ("HuggingFace bfloat16", "full"), *blended]
    assert [row["engine"] for row in rows if row["round"] == 1][-2:] == HERE[1::-1], "the other way round"
    assert all(row["seconds"] > 0 for row in rows)
    exact = {row["engine"]: row for row in held["fidelity"]}
    assert exact["HuggingFace float32"]["kl"] == 0
    assert exact["kvblend"]["kl"] < 1e-9, "float32 is kvblend's dtype on a model this small"
    assert 0 < exact["HuggingFace bfloat16"]["kl"] < 0.01
    steps = held["decode"]
    assert [(row["engine"], row["answers"]) for row in steps if row["round"] == 0] == [
        *product(HERE, [1]),
        *product(HERE, [3]),
    ]
    assert [(row["engine"], row["answers"]) for row in steps if row["round"] == 1][:3] == [*product(HERE[::-1], [1])]
    assert all(row["seconds"] > 0 for row in steps)
    shown = capfd.readouterr().out
    assert main("bench_baselines", *small, "--only", *HERE) == 0
    again = json.loads((tmp_path / "b.json").read_text())
    assert (again["prefill"], again["decode"]) == (rows, steps)
    assert capfd.readouterr().out == shown
    assert "times as fast as HuggingFace float32" in shown


def test_a_missing_engine_is_left_out_with_a_line_that_says_how_to_install_it(
    small: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = [word for name in ("vllm", "openvino", "llamacpp") for word in (f"--{name}", tmp_path / "gone")]
    assert main("bench_baselines", *small, *gone, "--only", "vLLM", "OpenVINO", "llama.cpp BF16") == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "to install it" in line]
    assert [line.partition(" is left out; to install it: ")[0] for line in lines] == [
        "vLLM",
        "OpenVINO",
        "llama.cpp BF16",
    ]
    assert lines[0].endswith("scripts/venv_vllm")


def row(engine: str, method: str, turn: int, seconds: float) -> dict[str, Any]:
    key = {"engine": engine, "method": method, "tokens": 2048, "round": turn}
    return {**key, "seconds": seconds, "prompt": 2000, "kvblend": engine == "kvblend", "dtype": "d", "version": "v"}


def test_speedups_are_against_the_fastest_engine_that_is_as_exact() -> None:
    results = Results(None)
    times = {("exact", "full"): (8.0, 6.0), ("coarse", "full"): (2.0, 2.0), ("kvblend", "reuse"): (1.0, 3.0)}
    rows = [row(*key, turn, seconds) for key, both in times.items() for turn, seconds in enumerate(both)]
    exactness = [("exact", 0.0019), ("coarse", 0.0021), ("kvblend", 0.001)]
    results.content |= {
        "prefill": rows,
        "fidelity": [{"engine": name, "kl": kl} for name, kl in exactness],
    }
    lines = list(module("bench_baselines").table(results))
    assert lines[-1] == "kvblend, reuse: 5.0 times as fast as exact, the fastest that is as exact", "of 8 and 2"
    assert lines[3].startswith("| exact | d | 7.00 | 286 | 0.0019 | v |")
