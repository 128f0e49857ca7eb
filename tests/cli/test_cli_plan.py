"""`blend plan`: what it says of a corpus is what precomputing it does; mistakes end in one line."""

import re
from pathlib import Path

import pytest
import transformers
from blend_process import CHUNKS, Blend

GIVEN = ("--model", "8B", "--dtype", "bfloat16", "--prefill-rate", "9000")
MILLION = (*GIVEN, "--chunks", "1000000", "--codec", "bfloat16")


@pytest.fixture(autouse=True)
def large_model(tmp_path: Path) -> None:
    """The configuration of an 8B model in the folder "8B", without weights or tokenizer."""
    transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    ).save_pretrained(tmp_path / "8B")


def test_a_plan_of_documents_is_what_precompute_then_does(lots: Blend) -> None:
    ask = ("plan", "lots", *CHUNKS, "--codec", "bfloat16", "--json")
    before = lots(*ask, "--measure").json
    assert before["rate"] == "measured here"
    assert not lots.store.exists()
    done = lots("precompute", "lots", *CHUNKS, "--json").json
    assert before["chunks"] == done["chunks"]
    assert before["isolated"] + before["contextual"] == done["computed"]
    assert before["rows"][0]["total_bytes"] == done["store"]["bytes"]
    after = lots(*ask).json
    rate = re.search(r"at ([\d,]+) tokens/s", after["rate"])
    assert rate is not None, after["rate"]
    assert int(rate[1].replace(",", "")) == pytest.approx(done["tokens_per_s"], abs=1)  # both are rounded
    # About: the rate stands for as many isolated as contextual caches, and the chunks of the surrogate context lack the latter.
    assert after["precompute_s"] == pytest.approx(done["seconds"], rel=0.1)


def test_a_tiers_name_is_shown_as_it_is(blend: Blend) -> None:
    assert "[/x], 500 MB/s" in blend("plan", *MILLION, "--tier", "[/x]=500,0.02").out


def test_a_million_chunks_without_a_model(blend: Blend) -> None:
    found = blend("plan", *MILLION, "--hour-price", "3", "--tier", "tape=100,0.001", "--json").json
    tiers = {row["tier"]: row for row in found["rows"]}
    row = tiers["tape"]
    one = 256 * 128 * 1024  # an 8B model: 128 KiB a token in bfloat16
    assert 2 * one < row["chunk_bytes"] < 2 * one * 1.001
    assert row["break_even"] * found["compute_s"] == pytest.approx(row["prompt_bytes"])
    assert found["full_s"] == pytest.approx(found["prompt_tokens"] / 9000)
    assert row["usd_month"] == pytest.approx(row["total_bytes"] / 1e9 * 0.001)
    assert row["load_s"] == pytest.approx(row["prompt_bytes"] / 100e6)
    assert row["pays_from"] is None  # loading from there takes longer than computing
    assert tiers["objects"]["gain"] == pytest.approx(found["full_s"] / tiers["objects"]["first_token_s"])


def test_the_table_of_a_billion_chunks_is_not_cut(blend: Blend) -> None:
    shown = blend("plan", *GIVEN, "--chunks", "1000000000").out
    assert " 67.1 PB " in shown
    assert "…" not in shown


def test_tokens_and_chunks_are_two_ways_to_say_it(blend: Blend) -> None:
    ask = ("plan", *GIVEN, "--codec", "bfloat16", "--json")
    by_chunks = blend(*ask, "--chunks", "1000").json
    assert blend(*ask, "--tokens", "256000").json == by_chunks
    assert blend(*ask, "--tokens", "128000", "--chunks", "1000").json["tokens"] == 128_000


def test_words_for_people(blend: Blend) -> None:
    shown = blend("plan", *GIVEN, "--chunks", "1000000").out
    assert shown.startswith("1,000,000 chunks, 256,000,000 tokens; 8B in bfloat16, two caches a chunk.\n")
    for words in ("bfloat16 +67.1 MB +67.1 TB ", "float32 ", "objects, 500 MB/s ", "Prices are assumptions"):
        assert re.search(words, shown), words
