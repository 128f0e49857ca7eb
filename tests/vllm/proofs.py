"""Proofs that run in a process of their own, with vLLM in it, and leave what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import PYTHONPATH

PATIENCE = 900  # seconds; processes that wait for each other wait for ever


def found_by(script: str, folder: Path) -> dict[str, Any]:
    """What a script of this folder finds; it is given the folder, and leaves found.json there."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), str(folder)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found
