"""What caches behind another prefix cost: measured on a tiny model, resumed, shown."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny_model import save_tiny_model
from towns import document

from blend.eval.dataset import Record, RecordChunk
from blend.eval.other_prefixes import CONVERSATION, METHODS, SYSTEMS, Measured, OtherPrefixes, append, read, table
from blend.model.decoder import Decoder
from blend.store import open_store


def records(count: int) -> list[Record]:
    texts = [document("harbour", number).split("\n\n")[1:4] for number in range(count)]
    return [
        Record(
            str(number),
            f"When did town {number} open?",
            ("1900",),
            tuple(RecordChunk(f"{number}", text) for text in some),
        )
        for number, some in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = save_tiny_model(tmp_path_factory.mktemp("prefixes"), document("harbour", 1))
    return Decoder.load(str(folder), device="cpu")


def test_a_record_is_measured_behind_every_prefix_and_again_from_a_store_that_is_there(
    decoder: Decoder, tmp_path: Path
) -> None:
    asked, *apart = records(5)
    first, again = (
        list(OtherPrefixes(decoder, open_store(tmp_path / "store"), apart, tokens=4).measure(asked)) for _ in range(2)
    )
    assert [one.prefix for one in first] == [*SYSTEMS, CONVERSATION]
    for one in first[:-1]:
        assert set(one.kl) == set(METHODS)
        assert all(kl >= 0 and math.isfinite(kl) for kl in one.kl.values())
        assert one.kl["own prefix"] != one.kl["server's prefix"], "these are caches behind another prefix"
    assert set(first[-1].kl) == {name for name in METHODS if "own" not in name}
    for one, other in zip(first, again, strict=True):
        assert other.kl == pytest.approx(one.kl, abs=1e-5)


def test_what_was_written_is_read_and_shown(tmp_path: Path) -> None:
    found = [
        Measured("a", "short", {"own prefix": 0.1, "server's prefix": 0.2}),
        Measured("b", "short", {"own prefix": 0.3}),
    ]
    for one in found:
        append(tmp_path / "p.jsonl", one)
    assert read(tmp_path / "p.jsonl") == found
    [_, _, line] = table(found)
    assert [cell.strip() for cell in line.strip("| ").split("|")] == ["short", "2", "0.2000", "0.2000", "-", "-", "-"]
