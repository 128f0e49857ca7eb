"""`scripts/bench_vllm` over a tiny model: both servers really run, and the same command goes on where it was stopped."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.inside_vllm
ROOT = Path(__file__).parents[2]


def test_both_servers_are_asked_the_same(tmp_path: Path) -> None:
    file, parts = tmp_path / "r.json", ["first", "warm", "together"]
    if find_spec("pandas") is not None:
        parts.append("generator")  # vLLM's own load generator reads its prompts with it
    command = [sys.executable, str(ROOT / "scripts" / "bench_vllm"), "--tiny", "--vllm", sys.executable]
    command += ["--json", str(file), "--store", str(tmp_path / "store"), "--only", *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    held = json.loads(file.read_text())
    assert not any(row["error"] for row in held["first"])
    questions = {row["server"]: [] for row in held["first"]}
    for row in held["first"]:
        questions[row["server"]].append(row["prompt_tokens"])
    pairs = zip(questions["vllm"], questions["vllm + kvblend"], strict=True)
    assert all(
        abs(plain - ours) < 8 for plain, ours in pairs
    )  # a passage that begins with a heading has it in its title
    assert len(held["warm"]) == 10
    assert not any(row["error"] for row in held["warm"])
    assert {row["server"] for row in held["together"]} == set(questions)
    assert len(held.get("generator", [])) == (2 if "generator" in parts else 0)
    assert "TTFT vllm" in done.stdout
