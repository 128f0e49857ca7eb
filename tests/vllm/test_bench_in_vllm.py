"""`scripts/bench_vllm` over a tiny model: both servers really run, and the same command goes on where it was stopped."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import REPOSITORY

pytestmark = pytest.mark.inside_vllm


def test_both_servers_are_asked_the_same(tmp_path: Path) -> None:
    file, parts = tmp_path / "r.json", ["first", "warm", "together"]
    if find_spec("pandas") is not None:
        parts.append("generator")  # vLLM's own load generator reads its prompts with it
    command = [sys.executable, str(REPOSITORY / "scripts" / "bench_vllm"), "--tiny", "--vllm", sys.executable]
    command += ["--json", str(file), "--store", str(tmp_path / "store"), "--only", *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = json.loads(file.read_text())
    assert not any(row["error"] for row in (*tables["first"], *tables["warm"]))
    names = ("vllm", "vllm + kvblend")
    plain, ours = ([row["prompt_tokens"] for row in tables["first"] if row["server"] == name] for name in names)
    # A passage that begins with a heading has it in its title.
    assert all(abs(some - others) < 8 for some, others in zip(plain, ours, strict=True))
    assert len(tables["warm"]) == 10
    assert {row["server"] for row in tables["together"]} == set(names)
    assert len(tables.get("generator", [])) == (2 if "generator" in parts else 0)
