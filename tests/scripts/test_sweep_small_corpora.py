"""`scripts/sweep_small_corpora`, as a process of its own over a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "sweep_small_corpora"


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def run(folder: Path, count: int) -> list[dict[str, Any]]:
    result = script("run", "--out", folder / "r.jsonl", "--model", folder / "tiny", "--count", str(count))
    assert result.returncode == 0, result.stderr
    return rows(folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    save_tiny_model(folder / "tiny", "the spare key is kept in room 12\n" * 20)
    run(folder, 1)
    return folder


def test_the_first_corpus_is_a_long_note_among_three_short_ones_in_both_orders(measured: Path) -> None:
    found = [row for row in rows(measured) if row["corpus"] == 0]
    assert len(found) == 2
    lengths = [row["prompt_chunks"] for row in found]
    assert lengths[0] == lengths[1][::-1]
    assert sorted(lengths[0]) == sorted(found[0]["corpus_chunks"])
    assert max(lengths[0]) > 5 * min(lengths[0])
    assert all(kl >= 0 for row in found for kl in row["kl"].values())


def test_a_second_run_measures_what_is_lacking(measured: Path) -> None:
    first = rows(measured)
    more = run(measured, 2)
    assert more[: len(first)] == first
    assert [row["corpus"] for row in more[len(first) :]] == [1] * (len(more) - len(first))
    assert run(measured, 2) == more


def test_show_fails_where_a_blend_is_beyond_the_limit_and_plain_reuse_is_not(measured: Path, tmp_path: Path) -> None:
    assert script("show", measured / "r.jsonl").returncode == 0
    row = rows(measured)[0]
    row["kl"] |= {"5 %": 0.7, "reuse": 0.1}
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    shown = script("show", tmp_path / "bad.jsonl")
    assert shown.returncode == 1
    assert "long among short" in shown.stdout
    row["kl"]["reuse"] = 0.6
    (tmp_path / "hard.jsonl").write_text(json.dumps(row) + "\n")
    assert script("show", tmp_path / "hard.jsonl").returncode == 0
