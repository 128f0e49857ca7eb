"""A corpus that vLLM computes ahead for a model that it runs quantised."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import SHAPE, about, precompute, serving
from places import PYTHONPATH
from quantised import save_int8

from tests.tiny_model import save_tiny_model

TOWNS = ("Aarhus", "Bergen", "Cadiz", "Delft")

pytestmark = pytest.mark.inside_vllm


def test_caches_that_vllm_computed_ahead_are_the_servers(tmp_path: Path) -> None:
    """With their KV correction, so that no more rows are recomputed than is asked for."""
    store, texts, int8 = tmp_path / "store", tmp_path / "texts", tmp_path / "int8"
    plain = save_tiny_model(tmp_path / "plain", "\n".join(map(about, TOWNS)), **SHAPE)
    precompute(store, plain, texts, TOWNS, surrogate_tokens=0)  # of the model as it was, which are not used
    with serving(store, save_int8(plain, int8), tmp_path / "log") as server:
        command = [sys.executable, "-m", "blend", "precompute", str(texts), "--store", str(store), "--model", str(int8)]
        command += ["--dtype", "float32", "--engine", "vllm", "--codec", "native"]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        subprocess.run(command, env=environment, capture_output=True, timeout=600, check=True)
        retrieve = {"retrieve": {"top_k": len(TOWNS)}}
        _, shown = server.ask("How many bridges has Bergen?", model="tiny+corpus", kvblend=retrieve)
    assert shown["figures"]["method"] == "rows"
    assert shown["figures"]["rows_computed"] < shown["figures"]["rows"]
