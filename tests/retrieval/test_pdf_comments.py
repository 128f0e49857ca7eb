"""Comments of PDFs stand behind the words that they belong to."""

import pytest
from pdfs import pdf, written_at

from blend_retrieval.loading import load_bytes


def note(place, contents="Ask Orm.", kind="Text", entries=""):
    return f"<< /Type /Annot /Subtype /{kind} /Contents ({contents}) /Rect [{place}] /F 4 {entries} >>".encode()


def read(lines, *notes):
    numbers = b" ".join(b"%d 0 R" % number for number in range(6, 6 + len(notes)))
    (document,), _ = load_bytes("a.pdf", pdf([written_at(*lines)], *notes, entries=b"/Annots [%s] " % numbers))
    return document.text


RULES = [(72, 700, "The master of Orm pays 31 crowns"), (72, 686, "and the master of Brack pays 40.")]
COMMENT = "[comment: Ask Orm.]"
FIRST = f"{RULES[0][2]} {COMMENT}\n{RULES[1][2]}"
SECOND = f"{RULES[0][2]}\n{RULES[1][2]} {COMMENT}"
QUAD = "/QuadPoints [200 710 240 710 200 698 240 698 72 696 100 696 72 684 100 684]"


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (note("300 694 320 714"), FIRST),
        (note("40 694 60 714"), FIRST),
        (note("520 680 540 700"), SECOND),
        (note("200 684 240 710", kind="Highlight", entries=QUAD), SECOND),
        (note("100 699 140 710", kind="Underline", entries=""), FIRST),
        (note("60 682 300 712", kind="Square"), SECOND),
        (note("300 500 320 520"), f"{RULES[0][2]}\n{RULES[1][2]}\n\n{COMMENT}"),
    ],
)
def test_a_comment_stands_in_its_line(entry, shown):
    assert read(RULES, entry) == shown


def test_a_comment_stands_in_its_cell_and_its_column():
    names, fees = ["Harbour", "Orm", "Brack", "Skell"], ["Fee", "31", "40", "52"]
    tops = [700 - 16 * number for number in range(4)]
    rows = [(72, top, name) for top, name in zip(tops, names, strict=True)]
    rows += [(250, top, fee) for top, fee in zip(tops, fees, strict=True)]
    text = read(rows, note("262 680 282 700"), note("100 660 120 680", "Closed in winter, and in spring of each year"))
    assert text.splitlines() == [
        *("| Harbour | Fee |", "| --- | --- |", f"| Orm | 31 {COMMENT} |"),
        *("| Brack [comment: Closed in winter, and in spring of each year] | 40 |", "| Skell | 52 |"),
    ]


def test_a_divided_word_stays_whole():
    lines = [(72, 700, "The dues of the har\xad"), (72, 686, "bour are 31 crowns")]
    assert read(lines, note("300 694 320 714")) == f"The dues of the {COMMENT} harbour are 31 crowns"


def test_a_heading_stays_as_it_is():
    heading = b"BT /F1 20 Tf 72 740 Td (Dues) Tj ET "
    lines = [(72, 700 - 14 * number, f"The master of ship {number} pays 31 crowns a day.") for number in range(9)]
    data = pdf([heading + written_at(*lines)], note("120 736 140 756"), entries=b"/Annots [6 0 R] ")
    (document,), _ = load_bytes("a.pdf", data)
    assert document.text.startswith("# Dues\n")
    assert document.text.endswith(f"\n\n{COMMENT}")


def test_a_marked_passage_ends_where_its_last_line_ends():
    lines = [(72, 700, "The fees are:"), (72, 686, "Brack 40"), (400, 686, "Skell 52")]
    marked = "/QuadPoints [72 710 480 710 72 698 480 698 72 696 100 696 72 684 100 684]"
    text = read(lines, note("72 684 480 710", kind="Highlight", entries=marked))
    assert f"Brack 40 {COMMENT}" in text


def test_a_list_keeps_its_numbers():
    lines = [(72, 700, "1."), (110, 700, "Drain the dock"), (72, 686, "2."), (110, 686, "Close the valve")]
    assert read(lines, note("50 694 70 714")) == f"1. Drain the dock {COMMENT}\n2. Close the valve"
