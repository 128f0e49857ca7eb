"""`scripts/bench_reuse`, as a process of its own, on a tiny model."""

import json
from pathlib import Path

from commands import command

from tests.tiny_model import save_tiny_model

CASES = {"passages", "edits", "code", "conversation", "rewritten", "novel"}
ROOT = Path(__file__).resolve().parents[2]


def test_every_case_reuses_what_recurs(tmp_path: Path) -> None:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    model = save_tiny_model(tmp_path / "tiny", text[:40_000], max_position_embeddings=16_384)
    file = tmp_path / "reuse.json"
    given = ("bench_reuse", "--json", str(file), "--model", str(model), "--characters", "800", "--rounds", "1")
    given = (*given, "--requests", "20", "--kl-records", "1", "--answer-tokens", "2", "--stored", "100000")
    done = command(*given)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(file.read_text())["reuse"]}
    index = rows.pop("index")
    assert index["bytes_a_token"] < 20
    assert 0.49 < index["found"] < 0.53
    assert rows.keys() == CASES
    # In 20 requests of `novel` some recurring text comes for the first time among the last ten. Elsewhere a piece that
    # reaches over the end of a text is new behind another text: for a third of the first prompts' rows.
    least = {**dict.fromkeys(rows, 0.85), "novel": 0.55}
    assert {name: row["reused"] for name, row in rows.items() if row["reused"] <= least[name]} == {}
    assert rows["passages"]["kl_corpus"] >= 0
    shown = command(*given, "--show")
    assert all(f"| {case} |" in shown.stdout for case in CASES)
