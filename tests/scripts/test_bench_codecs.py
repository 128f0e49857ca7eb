"""`scripts/bench_codecs`, as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from commands import ROOT, command


def test_a_line_a_codec() -> None:
    done = command("bench_codecs", "--shape", "1,64,32", "--codec", "bfloat16", "int8", "int4")
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[3:]]
    assert [line[0] for line in lines] == ["bfloat16", "int8", "int4"]
    shares = [float(line[1]) for line in lines]
    assert 1.0 == shares[0] > shares[1] > shares[2]
    assert all(float(rate) > 0 for line in lines for rate in line[2:])


def test_a_python_without_torch_starts_the_checkouts_own() -> None:
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    done = subprocess.run(
        [python, "-S", str(ROOT / "scripts" / "bench_codecs"), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if (ROOT / ".venv" / "bin" / "python").exists():
        assert done.stdout.startswith("usage: bench_codecs")
    else:
        assert done.stderr == "this Python has no torch: run `scripts/venv test` first\n"
