"""Rows -> tables and points of the picture, against lines worked out by hand."""

from pathlib import Path

import pytest
from selection_rows import row

from blend.errors import ConfigError, DatasetError
from study.rows import Row, append_rows, read_rows
from study.show import families, show, tables

FULL = [row("full", str(n), 0.0, top1=1.0, f1=0.6, ttft_s=8.0, select_s=0.0, share=1.0, f1_full=1.0) for n in (1, 2)]
BASE = [row("published", str(n), 0.4, f1=0.3) for n in (1, 2)]
QUERY = [row("query", str(n), 0.1, f1=0.5) for n in (1, 2)]
REUSE = [row("reuse", str(n), 0.8, f1=0.2, select_s=0.0, ttft_s=0.5, share=0.05) for n in (1, 2)]
ROWS = [*REUSE, *BASE, *QUERY, *FULL]


def test_markdown_has_the_methods_asked_for() -> None:
    lines = list(tables([*FULL, *BASE, *QUERY], ["query"]))
    assert lines[:4] == ["", "| KL | s (2) |", "|---|--:|", "| query | 0.100 |"]
    assert lines[4:8] == ["", "| gold, difference to full | s (2) |", "|---|--:|", "| query | -0.100 [-0.10, -0.10] |"]
    full = (
        "| full | 0.000 | 0.00 [0.00,0.00] | 0.000 | 1.00 | 1.00 | 0.60 | +0.000 [+0.00, +0.00] | 100% | 1.0x | 0.0% |"
    )
    query = (
        "| query | 0.100 | 0.25 [0.25,0.25] | 0.100 | 0.50 | 0.75 | 0.50 | -0.100 [-0.10, -0.10] | 25% | 4.0x | 5.0% |"
    )
    assert lines[11:] == [full, query]


def test_changed_answers_and_what_they_mean() -> None:
    def answered(method: str, answers: str, right: str) -> list[Row]:
        pairs = enumerate(zip(answers, right, strict=True))
        return [row(method, str(n), 0.1, answer=answer, right=is_right == "1") for n, (answer, is_right) in pairs]

    full, query = answered("full", "abcdef", "110010"), answered("query", "aBCDEf", "110100")
    lines = list(tables([*full, *query, row("published", "0", 0.4)], ["query"]))
    start = lines.index("| answers | changed | what the changes mean |")
    meanings = "1 equal in meaning, 1 better, 1 worse, 1 wrong in both"
    assert lines[start + 2] == f"| query | 67% [30%, 90%] | {meanings} |"


def test_a_record_without_answer_tokens_has_no_part_in_kl() -> None:
    """Full recompute ended at once: nothing to compare along, which is no agreement."""
    *_, reuse = tables([*ROWS, row("reuse", "3", None), row("published", "3", None), row("full", "3", 0.0)])
    assert reuse.startswith("| reuse | 0.800 | 2.00 [2.00,2.00] | 0.800 |")


def test_ratios_of_a_method_are_one_line_of_the_picture() -> None:
    rows = [*ROWS, *(row("query 5 %", str(n), 0.2, share=0.1, ttft_s=1.0) for n in (1, 2)), row("all", "1", 0.0)]
    found = families(rows)
    assert list(found) == ["query", "published", "reuse"]
    assert [(point.percent, point.rows, point.ttft) for point in found["query"]] == [
        (5, pytest.approx(10.0), pytest.approx(12.5)),
        (15, pytest.approx(25.0), pytest.approx(25.0)),
    ]
    assert found["query"][1].kl == pytest.approx(0.1)


def test_the_last_line_of_a_key_counts_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert read_rows(path) == []
    append_rows(path, [QUERY[0], QUERY[1]])
    append_rows(path, [row("query", "1", 0.7)])
    assert [one.kl for one in read_rows(path)] == [0.7, 0.1]
    with path.open("a") as file:
        file.write('{"question": "Who?"}\n')
    with pytest.raises(DatasetError, match=r"r\.jsonl: a line lacks model, set"):
        read_rows(path)
    with pytest.raises(DatasetError, match="cannot be read"):
        read_rows(tmp_path)


def test_sets_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(DatasetError, match="holds no results"):
        list(show(path))
    append_rows(path, ROWS)
    with pytest.raises(ConfigError, match=r"holds no results of u; it has s"):
        list(show(path, sets=["u"]))
