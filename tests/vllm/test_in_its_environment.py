"""The tests of this folder in the interpreter that has vLLM, which pins libraries of its own."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import PYTHONPATH, REPOSITORY

HERE = Path(__file__).parent
MADE = REPOSITORY / ".venv-vllm" / "bin" / "python"  # by scripts/venv_vllm


@pytest.mark.timeout(3600)
def test_in_an_interpreter_that_has_vllm() -> None:
    python = Path(os.environ.get("KVBLEND_VLLM_PYTHON") or MADE)
    here = find_spec("vllm")
    if here is not None and here.origin is not None:  # tests/vllm has the same name, and is no package
        pytest.skip("this interpreter has vLLM: the others run in it")
    if not python.exists():
        pytest.skip("no interpreter with vLLM: run scripts/venv_vllm, or name one in KVBLEND_VLLM_PYTHON")
    command = [str(python), "-m", "pytest", "-c", str(HERE / "vllm.ini"), "-q", str(HERE)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_ci_fails_without_the_environment(tmp_path: Path) -> None:
    """Who asks for these tests is never shown a success that is none."""
    install = tmp_path / "scripts" / "venv_vllm"
    for folder in (install.parent, tmp_path / ".ci"):
        folder.mkdir()
    shutil.copy(REPOSITORY / ".ci" / "vllm", tmp_path / ".ci")
    install.write_text("#!/bin/sh\nexit 1\n")
    install.chmod(0o755)
    done = subprocess.run([tmp_path / ".ci" / "vllm"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "tests/vllm did not run" in done.stderr
