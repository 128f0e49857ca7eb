"""Rows recomputed by vLLM's own model, in processes of their own: each has vLLM's engine in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import PYTHONPATH

pytestmark = pytest.mark.inside_vllm
HERE = Path(__file__).parent
PATIENCE = 900  # seconds; processes that wait for each other wait for ever


@pytest.mark.parametrize("proof", ["rows_proof.py", "rows_quantised_proof.py"])
def test_rows_in_a_process_of_their_own(proof: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(HERE / "vllm.ini"), "-q", str(HERE / proof)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
