"""Variants compiled for GPUs that need not be here, in a process where Triton compiles instead of interpreting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "aot_report"
# One of each kind; the script without a filter compiles them all.
ESSENTIAL = (
    "attend bf16 (64|128|256|128 window|128 split, 1 row)$|combine bf16 128 split, 1|^mass bf16 128|^rotate|^deviation"
)


@pytest.mark.parametrize("capability", [80, 90])
def test_essential_variants_compile_without_spills(capability, tmp_path):
    table = tmp_path / "table.json"
    command = [sys.executable, SCRIPT, "--capability", str(capability), "--only", ESSENTIAL, "--json", table]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(table.read_text())["rows"]
    assert len(rows) == 11
    assert all(row["registers"] > 0 and row["spills"] == 0 for row in rows)
