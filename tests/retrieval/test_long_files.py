"""Long sheets are read in little memory, and long files of all kinds say how far their reader is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from office_files import docx, epub, zipped_files
from pdfs import minimal_pdf
from sheet_files import grid, ods_content, xlsx

from blend_retrieval.isolated import ReadingLimits
from blend_retrieval.loading import load_bytes
from blend_retrieval.readers import progress
from blend_retrieval.readers.progress import reported_to
from blend_retrieval.readers.zipped import declared_size

_REPOSITORY = Path(__file__).parents[2]
_PEAK = """
import sys
from blend_retrieval.loading import load_bytes
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) >> 10
load_bytes(sys.argv[1], b"PK")
data = sys.stdin.buffer.read()
before = peak()
(document,), _ = load_bytes(sys.argv[1], data)
print(document.text.count("\\n"), peak() - before)
"""


def sheet(rows):
    return xlsx(f"<sheetData>{rows}</sheetData>")


def sheet_row(number, *texts):
    cells = "".join(
        f'<c r="{column}{number}" t="str"><v>{text}</v></c>' for column, text in zip("ABCD", texts, strict=False)
    )
    return f'<row r="{number}">{cells}</row>'


def sheet_rows(count):
    return "".join(sheet_row(number, "a", f"text {number}") for number in range(1, count + 1))


def ods(tables):
    return zipped_files({"content.xml": ods_content(tables)})


def open_row(*texts):
    cells = "".join(f"<table:table-cell><text:p>{text}</text:p></table:table-cell>" for text in texts)
    return f"<table:table-row>{cells}</table:table-row>"


def open_table(rows):
    return f'<table:table table:name="Fees">{rows}</table:table>'


def open_rows(count):
    return "".join(open_row("a", f"text {number}") for number in range(count))


@pytest.mark.parametrize(
    ("name", "make"),
    [("a.xlsx", lambda: sheet(sheet_rows(60_000))), ("a.ods", lambda: ods(open_table(open_rows(60_000))))],
)
def test_a_long_sheet_takes_little_memory(name, make):
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, name],
        input=make(),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY / "retrieval")},
    )
    lines, megabytes = map(int, result.stdout.split())
    assert lines == 60_002
    assert megabytes < 20, "rows of dictionaries take 30 MB, a tree 100"


@pytest.mark.parametrize("rest", ["</row></sheetData>", "<", "<row r='3001'><c r='A3001'"])
def test_a_damaged_sheet_is_read_up_to_the_damage(rest):
    data = xlsx(f"<sheetData>{sheet_rows(3000)}{rest}")
    (document,), (fault,) = load_bytes("a.xlsx", data)
    assert fault.reason == "is damaged: it is not read to its end"
    assert grid(document.text)[-1] == ["a", "text 3000"]


def test_rows_of_a_file_may_stand_in_any_order_and_twice():
    rows = [
        sheet_row(3, "c", "3"),
        sheet_row(1, "name", "number"),
        sheet_row(2, "old", "0"),
        sheet_row(2, "b", "2"),
        sheet_row(4, "d", "4"),
    ]
    (document,), _ = load_bytes("a.xlsx", sheet("".join(rows)))
    assert grid(document.text) == [["name", "number"], ["b", "2"], ["c", "3"], ["d", "4"]]


def test_styles_groups_and_shapes_of_a_sheet_belong_to_it():
    """What stands in front of rows, around them and in other sheets, is not taken for theirs."""
    style = '<style:style style:name="{}"><style:text-properties style:text-position="super"/></style:style>'
    inner = open_table(open_row("in a shape"))
    frame = f'<draw:frame draw:name="f"><draw:object/>{inner}<text:p>title</text:p></draw:frame>'
    first = open_table(
        f"<table:shapes>{frame}</table:shapes><table:other>{open_row('no', 'where')}</table:other>"
        f"<table:table-header-rows>{open_row('pier', 'fee')}</table:table-header-rows>"
        f"<table:table-row-group>{open_row('A', '1')}</table:table-row-group>"
    )
    second = open_table("<table:table-column/><table:table-column table:visibility='collapse'/>" + open_row("b", "c"))
    content = ods_content(first + second, style.format("x"))
    (document,), faults = load_bytes("a.fods", content.encode())
    assert grid(document.text) == [["pier", "fee"], ["A", "1"], ["b", "c"]]
    assert document.text.count("title") == 1
    assert [fault.source for fault in faults] == ["a.fods sheet Fees: object f", "a.fods sheet Fees: column B"]


REFUSED = {
    "a row of a million cells": (
        "a.xlsx",
        lambda: sheet(f"<row>{'<c/>' * 1_100_000}</row>"),
        "an element that is too large",
    ),
    "a cell of many cells": (
        "a.fods",
        lambda: ods_content(open_table(f"<table:table-row>{'<a/>' * 1_100_000}</table:table-row>")).encode(),
        "an element that is too large",
    ),
    "elements in elements": ("a.xlsx", lambda: sheet("<x>" * 200_000), "nested too deeply"),
    "merged cells": (
        "a.xlsx",
        lambda: xlsx(
            f"<sheetData>{sheet_row(1, 'a', 'b')}</sheetData><mergeCells>"
            + '<mergeCell ref="A2:B2"/>' * 200_001
            + "</mergeCells>"
        ),
        "more than 200,000 merged cells",
    ),
    "paragraphs": ("a.docx", lambda: docx("<w:p/>" * 300_001), "more than 300,000 paragraphs"),
    "styles": (
        "a.fods",
        lambda: ods_content(
            open_table(open_row("a")), "".join(f'<style:style style:name="{number}"/>' for number in range(100_001))
        ).encode(),
        "more than 100,000 styles",
    ),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_a_stream_keeps_within_bounds(attack):
    name, make, reason = REFUSED[attack]
    _, (fault, *_) = load_bytes(name, make())
    assert reason in fault.reason


def test_merged_cells_do_not_take_time_by_the_square():
    """Each of these areas changes four rows. A look at all changed rows for each area would take minutes."""
    header = sheet_row(1, "a", "b", "c")
    rows = header + "".join(sheet_row(number, "a", "", f"text {number}") for number in range(2, 20_001))
    areas = "".join(f'<mergeCell ref="A{number}:B{number + 3}"/>' for number in range(1, 20_001))
    begun = time.process_time()
    (document,), _ = load_bytes("a.xlsx", xlsx(f"<sheetData>{rows}</sheetData><mergeCells>{areas}</mergeCells>"))
    assert document.text.count("\n") == 20_002
    assert time.process_time() - begun < 5


LONG = {
    "a.xlsx": (lambda: sheet(sheet_rows(3000)), "bytes"),
    "a.fods": (lambda: ods_content(open_table(open_rows(3000))).encode(), "bytes"),
    "a.csv": (lambda: b"a,b\n" * 3000, "rows"),
    "a.jsonl": (lambda: "\n".join(json.dumps({"text": f"text {number}"}) for number in range(30)).encode(), "lines"),
    "a.epub": (lambda: epub({f"c{number}": "<p>text</p>" for number in range(30)}), "chapters"),
    "a.pdf": (lambda: minimal_pdf("one", "two", "three"), "pages"),
}


@pytest.mark.parametrize("name", LONG)
def test_readers_say_how_far_they_are(name, monkeypatch):
    monkeypatch.setattr(progress, "REPORT_EVERY_S", 0)
    make, unit = LONG[name]
    reports = []
    with reported_to(lambda *report: reports.append(report)):
        load_bytes(name, make())
    *during, end = reports
    shares = [done for done, _, _ in during]
    assert len(shares) > 1
    assert shares == sorted(shares)
    assert all(done <= total and unit == reported for done, total, reported in during)
    assert end == (0, 0, "")


def test_short_files_say_nothing():
    reports = []
    with reported_to(lambda *report: reports.append(report)):
        load_bytes("a.csv", b"a,b\n1,2\n")
    load_bytes("a.csv", b"a,b\n" * 3000)
    assert reports == []


def test_processor_time_of_an_archive_grows_with_what_it_holds():
    """A sheet of a million rows of one kind is packed 200 times, and takes 15 s."""
    limits = ReadingLimits()
    rows = sheet_row(1, "a", "b") * 100_000
    data = sheet(rows)
    unpacked = declared_size(data)
    assert len(data) < 100_000
    assert unpacked > len(rows)
    assert limits.seconds_for(len(data), unpacked) > 14
    assert limits.seconds_for(len(data), 10 * unpacked) > 50
    assert limits.seconds_for(3000, 1 << 40) == limits.most_seconds


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"PK\x05\x06" + b"\xff" * 18, b"PK" + b"PK\x05\x06" + b"\0" * 18, b"text"]
)
def test_no_archive_counts_as_it_is(data):
    assert declared_size(data) == 0
