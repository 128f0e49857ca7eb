"""`scripts/bench_llamacpp` on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import transformers

from blend.integrations.llamacpp.library import Library
from tests import towns
from tests.llamacpp.gguf_files import save_gguf
from tests.places import REPOSITORY
from tests.tiny_model import save_tiny_model


def bench(*arguments: object) -> str:
    command = [sys.executable, str(REPOSITORY / "scripts" / "bench_llamacpp"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_rows_and_blending_take_turns(library: Library, tmp_path: Path) -> None:
    place = save_tiny_model(tmp_path / "hf", "\n".join(towns.documents().values()))
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    file = save_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    results = tmp_path / "r.json"
    small = ("--tokens", 600, "--chunks", 3, "--rounds", 2, "--ubatch", 64, 128, "--threads", 1, "--ratios", 0.2)
    printed = bench("--model", file, "--json", results, *small)
    rows = json.loads(results.read_text())
    assert [row["ubatch"] for row in rows["ubatch"]] == [64, 128]
    turns = rows["turns"]
    assert [(row["prompt"], row["way"]) for row in turns] == [(0, "all rows"), (0, 0.2), (1, 0.2), (1, "all rows")]
    assert all(row["s"] > 0 and row["next_s"] > 0 and row["rows"] > 600 for row in turns)
    assert all(0 < row["computed"] < 0.6 * row["rows"] for row in turns if row["way"] == 0.2)
    assert "| 20% | 2 |" in printed
    assert bench("--json", results, "--show") == printed
