"""Questions that need two chunks, and the table of answers by kind."""

import json
import re

import pytest
from commands import main

from blend.errors import DatasetError
from blend.eval.dataset import load_dataset
from study.tables import tables
from study.two_hop import KIND, two_hop_records

FILLER = [" ".join(f"word{number}.{place}" for place in range(45)) for number in range(12)]


def test_a_question_needs_two_chunks_and_only_them():
    for record in two_hop_records(FILLER, 20, 8):
        texts = [chunk["text"] for chunk in record["chunks"]]
        asked = re.fullmatch(r"What is the badge number of the (.*)\?", record["question"])[1]
        ((hop, person),) = [
            (number, match[1])
            for number, text in enumerate(texts)
            if (match := re.search(rf"The {asked} is (.*)\.", text))
        ]
        (answer,) = record["answers"]
        assert [
            number for number, text in enumerate(texts) if f"The badge number of {person} is {answer}." in text
        ] != [hop]
        assert sum(answer in text for text in texts) == 1
        assert sum("The badge number of" in text for text in texts) == 3
        assert len(texts) == 8


def test_more_records_add_to_fewer():
    assert two_hop_records(FILLER, 3, 8) == two_hop_records(FILLER, 9, 8)[:3]


@pytest.mark.parametrize(("paragraphs", "chunks"), [(12, 5), (7, 8)])
def test_too_little_text_is_refused(paragraphs, chunks):
    with pytest.raises(DatasetError, match="at least 6 chunks"):
        two_hop_records(FILLER[:paragraphs], 1, chunks)


def test_the_command_writes_a_set_that_reports_read(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("\n\n".join(["Too short.", *FILLER, FILLER[0]]))
    assert (
        main("bench_selection", "make", text, "--records", "4", "--chunks", "12", "--out", tmp_path / "set.jsonl") == 0
    )
    records = load_dataset(tmp_path / "set.jsonl")
    assert [record.task for record in records] == [KIND] * 4
    lines = (tmp_path / "set.jsonl").read_text().splitlines()
    assert all(len(json.loads(line)["chunks"]) == 12 for line in lines)


def _row(method, number, kind, right, **changed):
    about = {"set": "s", "id": str(number), "method": method, "kind": kind, "right": right, "answer": str(right)}
    figures = {"kl": 0.1, "top1": 1.0, "f1_full": 1.0, "f1": float(right), "ttft_s": 1.0, "full_ttft_s": 2.0}
    return {**about, **figures, "select_s": 0.1, "share": 0.5, **changed}


def test_right_answers_are_counted_by_kind():
    kinds = ("hop", "hop", "single")
    rows = [_row("full", number, kind, right=True) for number, kind in enumerate(kinds)]
    rows += [_row("reuse", number, kind, right=kind == "single") for number, kind in enumerate(kinds)]
    lines = [*tables(rows, ["reuse"], "reuse")]
    assert "| right answers | hop (2) | single (1) |" in lines
    assert "| full | 2 | 1 |" in lines
    assert "| reuse | 0 | 1 |" in lines
    assert not any("right answers" in line for line in tables(rows[2:3] + rows[5:], ["reuse"], "reuse"))


def test_agreement_is_rouge_where_answers_are_long():
    rows = [_row("full", 0, "", right=True, rouge_l=0.5), _row("reuse", 0, "", right=True, rouge_l=0.2)]
    lines = [*tables(rows, ["reuse"], "reuse")]
    assert any(line.startswith("| reuse |") and "-0.300" in line for line in lines)
