"""`scripts/bench_serve` as one command, against real servers of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The one command with a tiny model, against real servers of its own; one of them was asked before, by itself."""
    folder = tmp_path_factory.mktemp("serve")
    first = script("--json", folder / "r.json", "--tiny", "--servers", "blend", "--only", "load")
    assert first.returncode == 0, first.stderr
    assert {row["server"] for row in json.loads((folder / "r.json").read_text())["load"]} == {"blend"}
    return script("--json", folder / "r.json", "--picture", folder / "r.png", "--tiny"), folder


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "bench_serve"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)


def test_one_command_measures_all_servers(measured: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, folder = measured
    assert result.returncode == 0, result.stderr
    held = json.loads((folder / "r.json").read_text())
    rows = {(row["server"], row["rate"]): row for row in held["load"]}
    assert list(rows) == [(name, rate) for name in ("blend", "blend --full") for rate in (4.0, 6.0)]
    for row in rows.values():
        assert row["completed"] == row["requests"] > 0, row["errors"]
        assert row["ttft_s"]["p50"] <= row["ttft_s"]["p95"]
        assert row["answer_tokens"] == 6
    for rate in (4.0, 6.0):
        ours, full = rows["blend", rate], rows["blend --full", rate]
        assert ours["requests"] == full["requests"]
        assert ours["prompt_tokens"] == full["prompt_tokens"], "the same prompts at the same times"
        blended = [one["figures"] for one in ours["samples"] if one["figures"]["method"] == "blend"]
        assert len(blended) > ours["requests"] / 2, "in so short prompts a long question may leave nothing to gain"
        assert all(one["hits"] == one["chunks"] > 0 for one in blended)
        assert ours["computed_share"] < full["computed_share"], "the latter reuses common beginnings only"
    [decoded], [stalled] = held["decode"], held["stall"]
    assert decoded["tokens_per_s"] > 0
    assert decoded["plain_per_s"] > 0
    assert (stalled["answers"], stalled["prefills"], stalled["errors"]) == (2, 2, [])
    assert stalled["longest_s"] >= stalled["median_s"] > 0
    assert held["machine"]["versions"]["kvblend"]
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_there_is_shown_and_not_measured_again(measured: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, folder = measured
    before = (folder / "r.json").read_bytes()
    shown = script("--json", folder / "r.json", "--show")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == result.stdout
    assert "requests/s with p95 TTFT <= 20 s: blend >= 6, blend --full >= 6" in shown.stdout
    assert (folder / "r.json").read_bytes() == before


def test_a_file_of_other_options_is_not_mixed_in(measured: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = measured
    refused = script("--json", folder / "r.json", "--tiny", "--zipf", "1.5")
    assert refused.returncode == 1
    assert "was measured with other options: name another file" in refused.stderr
