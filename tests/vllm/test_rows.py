"""Rows recomputed by vLLM's own model: the same KV, scores and answers as kvblend's decoder gives.

vLLM wants an environment of its own: name its Python in KVBLEND_VLLM_PYTHON. `rows_proof.py` runs there, once for this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("KVBLEND_VLLM_PYTHON")
ROOT = Path(__file__).parents[2]
CLOSE = 1e-4  # relative to the largest entry: other summation orders in float32, nothing else

pytestmark = pytest.mark.skipif(not PYTHON, reason="KVBLEND_VLLM_PYTHON names no Python of an environment with vLLM")


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("rows_proof.py")), str(tmp_path_factory.mktemp("rows"))],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stderr[-4000:], file=sys.stderr)
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ["default", "all rows", "no rows", "random", "deviation", "gradual"])
def test_the_same_rows_kv_and_answer(proof: dict[str, Any], case: str) -> None:
    found = proof[case]
    assert found["rows"] == [True] * 4
    assert found["kv"] < CLOSE
    assert found["equal"]


def test_some_rows_are_left_as_stored(proof: dict[str, Any]) -> None:
    assert all(some < every for some, every in zip(proof["default"]["recomputed"], proof["all rows"]["recomputed"], strict=True))


def test_the_question_scores_rows_alike(proof: dict[str, Any]) -> None:
    assert proof["default"]["scores"] < CLOSE


def test_all_rows_are_full_prefill(proof: dict[str, Any]) -> None:
    assert proof["native is full"]


def test_a_blend_of_some_rows_answers_otherwise(proof: dict[str, Any]) -> None:
    """On a random model stale KV shows in the answer, so that equal answers mean equal KV."""
    assert any(proof["blended differs"])


def test_chunk_caches_are_those_of_the_encoder(proof: dict[str, Any]) -> None:
    assert proof["encoded"] < CLOSE


def test_caches_are_shared_only_where_a_probe_shows_them_alike(proof: dict[str, Any]) -> None:
    assert proof["identities"] == {"with probe": True, "without": False}
