"""`scripts/bench_codecs`, as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from commands import ROOT, output


def test_a_line_a_codec():
    printed = output("bench_codecs", "--shape", "1,64,32", "--codec", "bfloat16", "int8", "int4")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[3:]]
    assert [line[0] for line in lines] == ["bfloat16", "int8", "int4"]
    shares = [float(line[1]) for line in lines]
    assert 1.0 == shares[0] > shares[1] > shares[2]
    assert all(float(rate) > 0 for line in lines for rate in line[2:])


def test_a_python_without_torch_starts_the_checkouts_own():
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    words = [python, "-S", str(ROOT / "scripts" / "bench_codecs"), "--help"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
    if (ROOT / ".venv" / "bin" / "python").exists():
        assert done.stdout.startswith("usage: bench_codecs")
    else:
        assert done.stderr == "this Python has no torch: run `scripts/venv test` first\n"
