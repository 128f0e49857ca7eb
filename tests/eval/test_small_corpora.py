"""Small corpora out of a seed, and the table of their results."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from blend.errors import DatasetError
from blend.eval.small_corpora.corpora import CORPUS_TOKENS, KINDS, corpus
from blend.eval.small_corpora.results import Row, append_rows, failed, geometric_mean, read_rows, table


class Words:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


ROW = Row(
    model="m",
    seed=0,
    corpus=3,
    kind="prose",
    corpus_chunks=[9, 30],
    prompt_chunks=[30, 9],
    kl={"15 %": 0.01, "5 %": 0.04, "0 %": 0.09, "15 %, no map": 0.9, "reuse": 0.1},
    notes={"5 %": ["left out"]},
)


def test_a_corpus_depends_on_its_number_and_the_seed_alone() -> None:
    assert corpus(5, 0, Words()) == corpus(5, 0, Words())
    assert corpus(5, 0, Words())[1] != corpus(5, 1, Words())[1]
    assert [corpus(number, 0, Words())[0] for number in range(10)] == list(KINDS)


@pytest.mark.parametrize("number", range(20))
def test_corpora_are_small(number: int) -> None:
    kind, documents = corpus(number, 0, Words())
    assert 1 <= len(documents) <= 12
    lengths = [len(document) for document in documents]
    if kind == "long among short" and number:
        assert sorted(lengths)[-1] >= 4 * sorted(lengths)[-2]
    elif kind != "near-duplicates":  # a word of another length may have taken a word's place
        assert all(10 <= length <= 600 for length in lengths)
        assert len(documents) <= 2 or sum(lengths) <= 6 * CORPUS_TOKENS


def test_near_duplicates_share_most_words() -> None:
    kind, documents = corpus(12, 0, Words())
    assert kind == "near-duplicates"
    first, *others = [document.split(" ") for document in documents]
    for other in others:
        assert len(other) == len(first)
        assert sum(a != b for a, b in zip(first, other, strict=True)) < 0.5 * len(first)


def test_the_table_says_means_and_how_often_a_blend_is_beyond_the_limit() -> None:
    """KL of 5 %: 0.04 and 0.64; mean 0.34, geometric mean 0.16."""
    hard = replace(ROW, corpus=4, kl={**ROW.kl, "5 %": 0.64, "0 %": 0.0}, notes={})
    head, *lines = table([ROW, hard], worst=1)
    assert head.split() == [
        "method",
        "mean",
        "KL",
        "geo.",
        "mean",
        "worst",
        "beyond",
        "limit,",
        "reuse",
        "not",
        "notes",
    ]
    assert lines[1].split() == ["5", "%", "0.3400", "0.16000", "0.640", "1", "1"]
    assert [line[:4] for line in lines] == ["15 %", "5 % ", "0 % ", "15 %", "reus", "  co"]
    assert lines[5].startswith("  corpus 4 (prose) [30, 9] of [9, 30]: 15 % 0.010, 5 % 0.640, 0 % 0.000")
    assert geometric_mean([0.0, 1.0]) == pytest.approx(math.sqrt(1e-6))


def test_a_blend_fails_where_plain_reuse_keeps_the_limit() -> None:
    assert not failed([ROW])  # without the map is not what is shipped
    assert failed([replace(ROW, kl={**ROW.kl, "0 %": 0.51})])
    assert not failed([replace(ROW, kl={**ROW.kl, "0 %": 0.51, "reuse": 0.51})])


def test_rows_come_back_from_their_file_and_after_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append_rows(path, [ROW])
    assert path.read_text() == json.dumps(asdict(ROW)) + "\n"
    with path.open("a") as file:
        file.write('{"model": "m", "se')
    append_rows(path, [replace(ROW, corpus=4), replace(ROW, corpus=5)])
    assert [row.corpus for row in read_rows(path)] == [3, 4, 5]
    path.write_text('{"model": "m"}\n')
    with pytest.raises(DatasetError, match="a line is no result"):
        read_rows(path)
