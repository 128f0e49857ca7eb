"""The parts of `scripts/bench_ttft --shape` in this process: rows, stores, corrections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ttft_rows import METHODS, held

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import _shapes
    import _stores
    import _ttft

    class Parts:
        shapes, stores, ttft = _shapes, _stores, _ttft

    return Parts


def only(parts: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Full prefill and one method, to be quick."""
    monkeypatch.setattr(parts.ttft, "METHODS", {method: parts.ttft.METHODS[method]})


@pytest.fixture
def bench(parts: Any, tmp_path: Path) -> Any:
    """A bench of the tiny shape, in bf16 as on a GPU."""
    from _results import Results

    def make(file: Path | None = None, **changed: Any) -> Any:
        options = {
            "shape": "tiny", "device": torch.device("cpu"), "dtype": torch.bfloat16, "chunk_tokens": 16, "codec": "bfloat16",
            "correction": "neutral", "rounds": 1, "stores": ("memory",), "folder": tmp_path,
        }  # fmt: skip
        return parts.ttft.Bench(parts.ttft.Plan(**{**options, **changed}), Results(file), resume=True)

    return make


def test_rows_are_written_one_by_one_and_the_lost_one_again(bench: Any, tmp_path: Path) -> None:
    """The file holds every row before the next is measured; what a killed call lost is measured, all others stay."""
    file, seen = tmp_path / "r.json", []
    made = bench(file)
    put = made.results.put

    def watched(table: str, key: Any, row: Any) -> None:
        put(table, key, row)
        seen.append([each["method"] for each in held(file)["ttft"]])

    made.results.put = watched
    made.run([64])
    assert seen == [METHODS[:count] for count in range(1, 6)]
    whole = held(file)["ttft"]
    file.write_text(json.dumps({"ttft": whole[:-1], "more": 1}))
    again = bench(file).run([64])
    assert again[:-1] == whole[:-1]
    assert again[-1]["method"] == METHODS[-1]
    assert again[-1]["when"] >= whole[-1]["when"]
    assert again[-1] != whole[-1]
    assert held(file) == {"ttft": again, "more": 1}
    last = bench(file)
    assert last.run([64]) == again
    assert "decoder" not in last.__dict__, "a model is made for rows that are lacking"


def test_the_neutral_correction_is_applied_in_every_layer_and_changes_nothing(bench: Any, parts: Any) -> None:
    from blend import BlendConfig, Blender, open_store

    made = bench()
    layout = parts.shapes.random_layout(512, 96, 16)
    others = [parts.shapes.random_ids(512, 16, 100 + number) for number in range(16)]
    found = {}
    for correction in ("neutral", "off"):
        store = open_store("memory:")
        parts.stores.fill(made.decoder, store, layout, others, correction)
        blender = Blender(made.decoder, store)
        for contextual in (False, True):
            held = blender.correction(layout.prefix, contextual=contextual)
            assert (held is not None) == (correction == "neutral")
            assert held is None or sum(layer is not None for layer in held.layers) == 2
        found[correction] = blender.prefill(layout, config=BlendConfig(ratio=0.15))
    assert found["neutral"].correction_fits
    torch.testing.assert_close(found["neutral"].logits, found["off"].logits, rtol=0, atol=0)


def test_every_store_holds_the_same_caches_one_after_another(bench: Any, parts: Any, tmp_path: Path) -> None:
    """The logits from each store are those from the first, and a store is empty when the next one is full."""
    from blend import Blender, open_store

    made, layout = bench(), parts.shapes.random_layout(512, 96, 16)
    first = open_store("memory:")
    parts.stores.fill(
        made.decoder, first, layout, [parts.shapes.random_ids(512, 16, n) for n in range(100, 116)], "neutral"
    )
    expected, entries = Blender(made.decoder, first).prefill(layout), first.stats().entries
    target = open_store(tmp_path / "store")
    parts.stores.move(first, target)
    assert (first.stats().entries, target.stats().entries) == (0, entries)
    again = Blender(made.decoder, target).prefill(layout)
    assert all(again.hits)
    torch.testing.assert_close(again.logits, expected.logits, rtol=0, atol=0)


def test_a_prompt_that_does_not_fit_says_so_in_its_rows(
    bench: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.shapes, "free_host_bytes", lambda: 1 << 10)
    made = bench(shape="8B")
    rows = made.run([4096])
    assert "decoder" not in made.__dict__
    assert all(row["why_not"].endswith("GiB of memory, 0.0 GiB are free") for row in rows)


def test_cold_rows_are_cold_or_say_why_not(bench: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(parts, monkeypatch, "reuse")
    full, cold = bench(stores=("disk-cold",)).run([64])
    assert full["method"] == "full"
    assert cold.get("held", "").endswith("cold") or "does not forget" in cold["why_not"]


@pytest.mark.parametrize(
    ("shape", "billions", "kib_a_token"),
    [("0.5B", 0.494, 12), ("1.5B", 1.544, 28), ("8B", 8.03, 128), ("70B-shard", 8.82, 40)],
)
def test_shapes_are_those_of_the_models(parts: Any, shape: str, billions: float, kib_a_token: int) -> None:
    """Parameters and bf16 KV of a token, as the models' cards say them; 70B-shard has an eighth of 70.55 billion."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parts.shapes.SHAPES[shape].config(), dtype=torch.bfloat16)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers == pytest.approx(billions * 1e9, rel=1e-3)
    assert parts.shapes.SHAPES[shape].parameters == pytest.approx(numbers, rel=1e-3)
    assert parts.shapes.SHAPES[shape].kv_width * 2 == kib_a_token << 10
