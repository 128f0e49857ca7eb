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


@pytest.mark.parametrize(
    ("proof", "runner"),
    [
        ("rows_proof.py", "0"),
        ("rows_quantised_proof.py", "0"),
        ("shared_proof.py", "0"),
        *(("loads_proof.py", runner) for runner in "01"),
        *(("engines_proof.py", runner) for runner in "01"),
    ],
)
def test_in_a_process_of_its_own(proof: str, runner: str) -> None:
    """runner: the second of vLLM's model runners runs its Triton kernels in the interpreter here."""
    inside = "1" if proof == "engines_proof.py" else "0"
    interpreter = [str(HERE / "interpreter")] if runner == "1" else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(HERE / "vllm.ini"), "-q", str(HERE / proof)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*interpreter, PYTHONPATH, str(HERE)]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": inside,
            "VLLM_USE_V2_MODEL_RUNNER": runner,
            "TRITON_INTERPRET": runner,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
