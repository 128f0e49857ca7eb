"""`scripts/bench_edits`, as a process of its own, on a tiny model."""

import json
from pathlib import Path

from commands import command

from tests.serve.tool_templates import QWEN
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def test_recurring_text_is_reused_and_ways_are_compared(tmp_path: Path) -> None:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    model = save_tiny_model(tmp_path / "tiny", text[:40_000], template=QWEN, max_position_embeddings=8192)
    file = tmp_path / "edits.json"
    small = (
        "--turns",
        "4",
        "--turns-compared",
        "3",
        "--instructions",
        "3000",
        "--result",
        "700",
        "--answer-tokens",
        "2",
    )
    given = ("bench_edits", "--json", str(file), "--model", str(model), "--only", "header", "reread", *small)
    done = command(*given)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    turns = rows["turns"]
    assert len(turns) == 2 * 4
    assert [row["recurring"] for row in turns if row["turn"] == 0] == [0, 0]
    for row in turns[1:4] + turns[5:]:
        assert row["reused"] >= 0.85 * row["recurring"] > 0
    header = [row for row in turns if row["case"] == "header"]
    assert all(row["prefix_computed"] > 0.9 * row["rows"] > row["computed"] for row in header[1:])
    ways = {(row["case"], row["kind"], row["way"]): row for row in rows["ways"]}
    for case in ("header", "reread"):
        assert ways[case, "full", "again"]["kl"] < 1e-9
        for kind, way in (("shifted", "seam 0, "), ("served", "seam 0, "), ("blended", "")):
            none, some = (ways[case, kind, f"{way}question {ratio}"] for ratio in ("0%", "15%"))
            assert none["kl"] > 1e-9
            assert none["computed"] < some["computed"] < 0.8
    for row in rows["trajectories"]:
        assert len(row["blended"]) == len(row["exact prefixes"]) == 3
        assert all(row["blended"])
    shown = command(*given, "--show")
    assert all(f"| {name} |" in shown.stdout for name in ("header", "reread", "shifted | seam 32, question 2%"))
