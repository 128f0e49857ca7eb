"""What processes of one model give each other arrives as it was given, whichever of them is held up; none waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from proofs import found_by


@pytest.mark.inside_vllm
def test_processes_that_get_in_each_others_way_lose_nothing(tmp_path: Path) -> None:
    found = found_by("group_proof.py", tmp_path)
    assert found == {"layers": 3000, "wrong": 0}
