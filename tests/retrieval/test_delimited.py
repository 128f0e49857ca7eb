"""CSV and TSV: what divides the columns, captions, quotation marks. No value changes."""

import pytest
from sheet_files import grid

from blend_retrieval.loading import load_bytes


def read(name, text):
    (document,), skipped = load_bytes(name, text.encode())
    assert not skipped
    return document.text


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            "Depth, m;Width, m;Fee, EUR\n1,5;2,5;31,20\n",
            [["Depth, m", "Width, m", "Fee, EUR"], ["1,5", "2,5", "31,20"]],
        ),
        ("1,5;2,5\n2,5;3,5\n", [["1,5", "2,5"], ["2,5", "3,5"]]),
        ("Pier;Fee\nA;1.234,50 €\nB;-12,20 €\n", [["Pier", "Fee"], ["A", "1.234,50 €"], ["B", "-12,20 €"]]),
        ("Time;Load, kW\n00:15;1,234\n00:30;2,345\n", [["Time", "Load, kW"], ["00:15", "1,234"], ["00:30", "2,345"]]),
        ("Fee\n1,5\n2,5\n", [["Fee"], ["1,5"], ["2,5"]]),
        ("Note\nHello, world\nBye\n", [["Note"], ["Hello, world"], ["Bye"]]),
        ("id;tags\n1;red,blue\n2;wet,dry\n", [["id", "tags"], ["1", "red,blue"], ["2", "wet,dry"]]),
        ("id,tags\n1,red;blue\n2,wet;dry\n", [["id", "tags"], ["1", "red;blue"], ["2", "wet;dry"]]),
        ("Pier, Fee\nA, 31\nB, 12\n", [["Pier", "Fee"], ["A", "31"], ["B", "12"]]),
        ("Pier|Fee\nA|1,5\nB|2,5\n", [["Pier", "Fee"], ["A", "1,5"], ["B", "2,5"]]),
        ("Pier\tFee, EUR\nA\t1,5\nB\t2,5\n", [["Pier", "Fee, EUR"], ["A", "1,5"], ["B", "2,5"]]),
        ("a;b\r1;2\r3;4\r", [["a", "b"], ["1", "2"], ["3", "4"]]),
        ("Fee;\n1,5;\n2,5;\n", [["Fee"], ["1,5"], ["2,5"]]),
        ("code,fee\n007,1e5\n-0,+1.50\n", [["code", "fee"], ["007", "1e5"], ["-0", "+1.50"]]),
    ],
)
def test_columns_are_divided_by_the_sign_that_divides_every_row(text, rows):
    assert grid(read("fees.csv", text)) == rows


@pytest.mark.parametrize(
    "line", ["sep=;\n", "SEP=;\r\n", '"sep=;"\n', "sep=\t\n", "sep=^\n"], ids=["plain", "CRLF", "quoted", "tab", "rare"]
)
def test_a_first_line_may_name_the_delimiter(line):
    delimiter = line.strip('"\r\n')[4]
    text = line + delimiter.join(["Pier", "Fee, EUR"]) + "\n" + delimiter.join(["A", "31,50"]) + "\n"
    assert grid(read("fees.csv", text)) == [["Pier", "Fee, EUR"], ["A", "31,50"]]


@pytest.mark.parametrize(
    ("text", "captions"),
    [
        ("Harbour fees 2026\n\nPier;Fee\nA;31,50\nB;12,20\n", ["Harbour fees 2026"]),
        ("Harbour fees 2026;;\nin EUR;;\nPier;Fee;\nA;31,50;\nB;12,20;\n", ["Harbour fees 2026", "in EUR"]),
        ("Day;2026-01-01\n\nPier;Fee;Since\nA;31,50;2020\nB;12,20;2021\n", ["Day; 2026-01-01"]),
        ("Fees; net\nPier;Fee;Since\nA;31,50;2020\nB;12,20;2021\n", ["Fees; net"]),
    ],
)
def test_lines_above_the_header_are_paragraphs(text, captions):
    *paragraphs, table = read("fees.csv", text).split("\n\n")
    assert paragraphs == captions
    header, first, second = grid(table)
    assert header[:2] == ["Pier", "Fee"]
    assert (first[:2], second[:2]) == (["A", "31,50"], ["B", "12,20"])


def test_a_second_table_has_its_own_header():
    first, second = read("fees.csv", "Pier,Fee\nA,31\n\nBoat,Tax\nOrm,12\n\nKell,13\nBrack,14\n").split("\n\n")
    assert grid(first) == [["Pier", "Fee"], ["A", "31"]]
    assert grid(second) == [["Boat", "Tax"], ["Orm", "12"], ["Kell", "13"], ["Brack", "14"]]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.tsv", 'Part\tKind\n"5 inch pipe\tsteel\nValve\tbrass\n', [['"5 inch pipe', "steel"], ["Valve", "brass"]]),
        ("a.tsv", 'Part\tKind\n"Orm"\tboat\n24"\tpipe "x"\n', [['"Orm"', "boat"], ['24"', 'pipe "x"']]),
        ("a.tsv", '"Part"\t"Kind"\n"Orm"\t"boat"\n', [["Orm", "boat"]]),
        ("a.tsv", 'Part\tKind\n"5"" pipe"\tsteel\n', [['5" pipe', "steel"]]),
        ("a.tsv", 'Part\tKind\n"tab\there"\tsteel\n', [["tab here", "steel"]]),
        ("a.tsv", 'Part\tKind\n"two\nlines"\tsteel\n', [["two lines", "steel"]]),
        ("a.csv", 'Part,Kind\n"5 inch pipe,steel\nValve,brass\n', [['"5 inch pipe', "steel"], ["Valve", "brass"]]),
        ("a.csv", 'Part,Kind\n"5"" pipe, long",steel\nValve,brass\n', [['5" pipe, long', "steel"], ["Valve", "brass"]]),
        ("a.csv", 'Part,Kind\n"say \\"hi\\", ok",5\n"x",6\n', [['say "hi", ok', "5"], ["x", "6"]]),
        ("a.csv", 'Part, Kind\n"Orm", "wide, low"\n', [["Orm", "wide, low"]]),
        ("a.csv", "'Part','Kind'\n'Orm','wide, low'\n'Kell','it''s'\n", [["Orm", "wide, low"], ["Kell", "it's"]]),
        ("a.csv", "Part,Kind\nOrm,'wide\nKell,it's\n", [["Orm", "'wide"], ["Kell", "it's"]]),
        ("a.csv", 'Part,Kind\n5" pipe,steel\n="007",x\n', [['5" pipe', "steel"], ['="007"', "x"]]),
        ("a.csv", 'Part,Kind\n"first, line\nsecond; line",steel\n', [["first, line second; line", "steel"]]),
    ],
)
def test_quotation_marks(name, text, rows):
    assert grid(read(name, text))[1:] == rows


def test_rows_with_more_cells_than_the_header_are_named():
    documents, (skipped,) = load_bytes("fees.csv", b"Pier,Fee\nA,1,50\nB,2\n\nBoat,Tax,Day\nOrm,3,4\n")
    assert "| A | 1 | 50 |" in documents[0].text
    _, (long_rows,) = load_bytes("fees.csv", b"Pier,Fee,Tax\n1,5,2,5,x\n2,5,3,5,y\n")
    assert long_rows.source == "fees.csv row 2, row 3"
    reason = "has more cells than the header: its columns may be wrong"
    assert (skipped.source, skipped.reason, skipped.lost) == ("fees.csv row 2", reason, 0)


def test_a_line_of_numbers_above_rows_without_a_header_is_a_caption():
    first, second = read("fees.csv", "2,3,piers\n1,5,2,5,x\n2,5,3,5,y\n").split("\n\n")
    assert first == "2, 3, piers"
    assert grid(second) == [["1", "5", "2", "5", "x"], ["2", "5", "3", "5", "y"]]
