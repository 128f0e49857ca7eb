"""`scripts/bench_reuse` and `scripts/bench_edits` on a tiny model."""

import json
import random
import sys

import pytest
from commands import ROOT, module, printed

from blend.serve.engine.profile import PrefillProfile
from tests.serve.tool_templates import QWEN
from tests.tiny_model import save_tiny_model
from tests.towns import documents


def tiny(folder, checkout):
    text = "\n".join(page.read_text() for page in sorted((checkout / "docs").glob("*.md")))
    return save_tiny_model(folder / "tiny", text[:40_000], template=QWEN, max_position_embeddings=16_384)


def write_prose(folder):
    """A checkout in which no line comes twice: every text is of random words."""
    draw = random.Random(1)
    words = sorted({word for text in documents().values() for word in text.split() if word.isalpha()})

    def text(lines):
        return "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(lines))

    (folder / "docs").mkdir(parents=True)
    (folder / "docs" / "page.md").write_text("\n\n".join(text(3) for _ in range(40)))
    (folder / "blend").mkdir()
    for name in ("anvil", "bridge", "clock", "dune", "ember", "fjord", "gate"):
        (folder / "blend" / f"{name}.py").write_text(text(20))


def measured(folder, script, checkout, **options):
    """The rows of all cases, after --show has shown each of them."""
    file = folder / "r.json"
    small = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    given = (script, "--json", file, "--model", tiny(folder, checkout), *small)
    printed(*given)
    shown = printed(*given, "--show")
    rows = {row["case"]: row for row in json.loads(file.read_text())["reuse"]}
    assert all(f"| {case} |" in shown for case in rows)
    return rows


def test_every_case_reuses_what_recurs(tmp_path):
    rows = measured(tmp_path, "bench_reuse", ROOT, characters=800, rounds=1, requests=20, kl_records=1)
    # In 20 requests of `novel` some recurring text comes for the first time among the last ten. Elsewhere a piece that
    # reaches over the end of a text is new behind another text: for a third of the first prompts' rows. A conversation that
    # has an earlier one's results in the same order counts as that one, edited. The text is
    # that of docs/: figures move with it.
    least = {**dict.fromkeys(("passages", "edits", "code", "rewritten"), 0.8), "conversation": 0.5, "novel": 0.55}
    assert rows.keys() == least.keys()
    assert {name: row["reused"] for name, row in rows.items() if row["reused"] <= least[name]} == {}


def test_agents_that_begin_together_compute_their_files_once(tmp_path):
    file = tmp_path / "r.json"
    small = ("--agents", 4, "--tokens", 600, "--kl-records", 2)
    given = ("bench_reuse", "subagents", "--json", file, "--model", tiny(tmp_path, ROOT), *small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillProfile, "seconds", lambda profile, rows: 60.0)  # a tiny model computes faster than a disk
        printed(*given)
    [row] = json.loads(file.read_text())["subagents"]
    one, every = row["one"], row["all"]
    assert one["rows"] >= one["computed"][0] > 4 * 600 * 0.95
    assert len(every["computed"]) == len(every["ttft_s"]) == 4
    assert every["first_s"] <= every["last_s"] == max(every["ttft_s"])
    # Pieces at the borders of files differ from prompt to prompt, so they are computed by each.
    assert sum(every["ahead"]) > 0.5 * one["prompt_rows"]
    assert sum(every["computed"]) + sum(every["ahead"]) < every["rows"] < 0.8 * 4 * one["prompt_rows"]
    assert len(row["kl_learned"]) == 2
    assert all(0 < kl < 0.1 for kl in row["kl_learned"])
    assert all(kl is None or 0 < kl < 0.1 for kl in row["kl_served"])
    [line] = [line for line in printed(*given, "--show").splitlines() if line.startswith("| 4 |")]
    assert f"{every['rows'] / one['rows']:.2f}" in line


def test_text_behind_edits_is_reused(tmp_path, monkeypatch):
    module("bench_edits")  # loads what keeps the name of the checkout
    checkout = tmp_path / "checkout"
    write_prose(checkout)
    for name in ("_paths", "_reuse"):
        monkeypatch.setattr(sys.modules[name], "ROOT", checkout)
    rows = measured(tmp_path, "bench_edits", checkout, turns=6, instructions=3000, result=700, kl_records=4)
    assert rows.keys() == {"header", "compaction"}
    header = rows["header"]
    # In bfloat16 many rows of random weights change with the clock; one turn more is then computed.
    assert header["reused"] >= 0.6
    assert header["prefixes"]["computed"] > 0.9 > 0.6 > header["blended"]["computed"]
    # Rows that moved were computed behind another clock; by caches of the text apart the distance is greater.
    assert header["moved"] > 0.5
    assert 1e-8 < header["kl_served"] < header["kl"]
    # Behind dropped results everything is computed. Of new text, lines that came before would be blended: there are none.
    compaction = rows["compaction"]
    assert compaction["moved"] == 0.0
    assert compaction["kl_served"] < 1e-8
    assert compaction["blended"]["computed"] <= compaction["prefixes"]["computed"] + 0.01
