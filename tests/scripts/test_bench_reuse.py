"""`scripts/bench_reuse` and `scripts/bench_edits`, as processes of their own, on a tiny model."""

import json
from pathlib import Path

from commands import ROOT, command

from tests.serve.tool_templates import QWEN
from tests.tiny_model import save_tiny_model

CASES = {"passages", "edits", "code", "conversation", "rewritten", "novel"}


def tiny(folder: Path) -> Path:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    return save_tiny_model(folder / "tiny", text[:40_000], template=QWEN, max_position_embeddings=16_384)


def test_every_case_reuses_what_recurs(tmp_path: Path) -> None:
    file = tmp_path / "reuse.json"
    small = ("--characters", 800, "--rounds", 1, "--requests", 20, "--kl-records", 1)
    given = ("bench_reuse", "--json", file, "--model", tiny(tmp_path), *small)
    done = command(*given)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(file.read_text())["reuse"]}
    assert rows.keys() == CASES
    # In 20 requests of `novel` some recurring text comes for the first time among the last ten. Elsewhere a piece that
    # reaches over the end of a text is new behind another text: for a third of the first prompts' rows.
    least = {**dict.fromkeys(rows, 0.85), "novel": 0.55}
    assert {name: row["reused"] for name, row in rows.items() if row["reused"] <= least[name]} == {}
    shown = command(*given, "--show")
    assert all(f"| {case} |" in shown.stdout for case in CASES)


def test_text_behind_edits_is_reused(tmp_path: Path) -> None:
    file = tmp_path / "edits.json"
    small = ("--turns", 6, "--instructions", 3000, "--result", 700, "--kl-records", 1)
    given = ("bench_edits", "--json", file, "--model", tiny(tmp_path), *small)
    done = command(*given)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(file.read_text())["reuse"]}
    assert rows.keys() == {"header", "compaction"}
    assert all(row["least"] >= 0.85 for row in rows.values())
    assert rows["header"]["prefixes"]["computed"] > 0.9 > rows["header"]["blended"]["computed"]
    shown = command(*given, "--show")
    assert all(f"| {name} |" in shown.stdout for name in rows)
