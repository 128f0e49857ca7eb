"""`scripts/bench_baselines` with HuggingFace and kvblend on a tiny model, and its tables; needs no other engine."""

import json
from itertools import product

import pytest
from commands import main

from _load import tiny_model

HERE = ["HuggingFace float32", "HuggingFace bfloat16", "kvblend"]

pytestmark = pytest.mark.timeout(600)  # processes that load torch


@pytest.fixture
def small(tmp_path):
    """A run of seconds."""
    sizes = ["--lengths", "192", "--chunk-tokens", "48", "--threads", "1", "--probes", "4", "--rounds", "2"]
    sizes += ["--answers", "1", "3", "--decode-tokens", "192"]
    where = ["--json", tmp_path / "b.json", "--folder", tmp_path / "made", "--model", tiny_model(tmp_path)]
    return [*where, *sizes]


def test_engines_take_turns_and_only_missing_rows_are_measured(small, tmp_path, capfd):
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
    assert "| kvblend, query_guided 5 % |" in shown


def test_a_missing_engine_is_left_out_with_a_line_that_says_how_to_install_it(small, tmp_path, capfd):
    gone = [word for name in ("vllm", "openvino", "llamacpp") for word in (f"--{name}", tmp_path / "gone")]
    assert main("bench_baselines", *small, *gone, "--only", "vLLM", "OpenVINO", "llama.cpp BF16") == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "to install it" in line]
    assert [line.partition(" is left out; to install it: ")[0] for line in lines] == [
        "vLLM",
        "OpenVINO",
        "llama.cpp BF16",
    ]
    assert lines[0].endswith("scripts/venv_vllm")
