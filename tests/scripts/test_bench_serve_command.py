"""`scripts/bench_serve` as one command, against real servers of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import command, main


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The one command with a tiny model, after one of its servers was measured by itself; and its results."""
    folder = tmp_path_factory.mktemp("serve")
    file = folder / "r.json"
    assert main("bench_serve", "--json", file, "--tiny", "--servers", "blend", "--only", "load") == 0
    assert {row["server"] for row in json.loads(file.read_text())["load"]} == {"blend"}
    return command("bench_serve", "--json", file, "--picture", folder / "r.png", "--tiny"), file


def test_one_command_measures_all_servers(measured: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, file = measured
    assert result.returncode == 0, result.stderr
    assert "blend, round" not in result.stderr, "those rows were there"
    held = json.loads(file.read_text())
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
    assert file.with_name("r.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_there_is_shown_and_not_measured_again_nor_mixed_with_other_options(
    measured: tuple[subprocess.CompletedProcess[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    result, file = measured
    before = file.read_bytes()
    assert main("bench_serve", "--json", file, "--show") == 0
    assert capsys.readouterr().out == result.stdout
    assert "requests/s with p95 TTFT <= 20 s: blend >= 6, blend --full >= 6" in result.stdout
    with pytest.raises(SystemExit, match="was measured with other options: name another file"):
        main("bench_serve", "--json", file, "--tiny", "--zipf", "1.5")
    assert file.read_bytes() == before
