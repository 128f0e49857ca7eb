"""The tests of this folder in the interpreter that has vLLM, which pins libraries of its own."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
MADE = REPOSITORY / ".venv-vllm" / "bin" / "python"  # by scripts/venv_vllm


def test_in_an_interpreter_that_has_vllm() -> None:
    python = Path(os.environ.get("KVBLEND_VLLM_PYTHON") or MADE)
    here = find_spec("vllm")
    if here is not None and here.origin is not None:  # tests/vllm has the same name, and is no package
        pytest.skip("this interpreter has vLLM: the others run in it")
    if not python.exists():
        pytest.skip("no interpreter with vLLM: run scripts/venv_vllm, or name one in KVBLEND_VLLM_PYTHON")
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
    command = [str(python), "-m", "pytest", "-c", str(HERE / "vllm.ini"), "-q", str(HERE)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
