"""Tables of PDFs that go on over the next page, and what lies outside of a page."""

import pytest
from pdfs import pdf, written_at

from blend_retrieval.loading import load_bytes

HEADER = ("Pier", "Summer fee", "Winter fee")
ROWS = [(name, str(31 + place), str(12 + place)) for place, name in enumerate("ABCDEFG")]


def rows_at(top, *rows, width=180):
    return [(72 + width * x, top - 14 * y, cell) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell]


def read(*pages, **options):
    """The lines of a PDF with these texts on its pages, and the reasons."""
    (document,), skipped = load_bytes("fees.pdf", pdf([written_at(*places) for places in pages], **options))
    return [line for line in document.text.splitlines() if line], [entry.reason for entry in skipped]


def table(*rows):
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + " --- |" * len(rows[0]), *body]


def foot(number):
    return [(300, 40, f"Page {number}")]


def head(number):
    return [(72, 770, "Harbour rules"), (500, 770, str(number))]


@pytest.mark.parametrize("header", [(), (HEADER,)], ids=["not repeated", "repeated"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("framed", [False, True])
def test_rows_on_the_next_page_belong_to_the_table(header, count, framed):
    frames = [[*head(number), *foot(number)] if framed else [] for number in (1, 2)]
    first, second = ROWS[:2], ROWS[2 : 2 + count]
    lines, _ = read([*rows_at(300, HEADER, *first), *frames[0]], [*rows_at(720, *header, *second), *frames[1]])
    expected = table(HEADER, *first, *second)
    place = lines.index(expected[0])
    assert lines[place : place + len(expected)] == expected
    assert len(lines) == len(expected) + (4 if framed else 0)


def test_three_pages_with_a_caption_that_goes_on_and_blank_cells():
    third = [("F", "36", ""), ("G", "", "18")]
    caption = [(72, 760, "Table 1 (continued)")]
    pages = [rows_at(300, HEADER, *ROWS[:2]), rows_at(740, *ROWS[2:5]) + caption, rows_at(740, *third)]
    lines, _ = read(*pages)
    assert lines == [*table(HEADER, *ROWS[:5], *third), "Table 1 (continued)"]


def test_a_header_at_the_foot_of_a_page():
    lines, _ = read([(72, 700, "All fees."), *rows_at(100, HEADER)], rows_at(740, *ROWS[:3]))
    assert lines == ["All fees.", *table(HEADER, *ROWS[:3])]


def test_another_table_on_the_next_page_is_its_own():
    second = ("Boat", "Length", "Draught")
    for caption in ([], [(72, 765, "Table 2: boats")]):
        lines, _ = read(rows_at(300, HEADER, *ROWS[:2]), [*caption, *rows_at(740, second, *ROWS[2:4])])
        assert lines == [*table(HEADER, *ROWS[:2]), *(text for _, _, text in caption), *table(second, *ROWS[2:4])]


def test_a_paragraph_between_two_tables_parts_them():
    prose = [(72, 260 - 14 * y, f"Sentence {y} of the text that follows the table.") for y in range(5)]
    lines, _ = read(rows_at(340, HEADER, *ROWS[:2]) + prose, rows_at(740, *ROWS[2:5]))
    assert lines[-4:] == table(*ROWS[2:5])


@pytest.mark.parametrize(
    ("box", "outside"),
    [
        (b"", [(-300, 700, "Draft: 99 crowns."), (72, 900, "Old: 98 crowns.")]),
        (b"/CropBox [60 100 612 792] ", [(10, 700, "97"), (200, 60, "Printed 96 times.")]),
        (b"/CropBox [60 100 612 792] /Rotate 180 ", [(200, 60, "Printed 96 times.")]),
    ],
)
def test_text_outside_of_the_page_is_named(box, outside):
    lines, reasons = read([(72, 700, "The fee is 31 crowns."), *outside], entries=box)
    assert lines == ["The fee is 31 crowns."]
    assert reasons == ["has text outside of the visible page, which is not read"]


def test_a_word_on_the_edge_of_the_page_is_whole():
    lines, _ = read([(50, 700, "1234567 crowns")], entries=b"/CropBox [70 100 612 792] ")
    assert lines == ["1234567 crowns"]


def test_a_line_right_above_a_table_begins_another():
    lines, _ = read(rows_at(300, HEADER, *ROWS[:2]), [(72, 754, "Boats, by length:"), *rows_at(740, *ROWS[2:4])])
    assert lines == [*table(HEADER, *ROWS[:2]), "Boats, by length:", *table(*ROWS[2:4])]


def test_a_running_head_is_no_row():
    pairs = [row[:2] for row in (HEADER, *ROWS[:3])]
    prose = [(72, 700 - 14 * y, f"Sentence {y} of the chapter, which has no table at all.") for y in range(5)]
    lines, _ = read(rows_at(300, *pairs), [(72, 740, "No"), (520, 740, "6"), *prose])
    assert lines[: len(pairs) + 1] == table(*pairs)
    assert lines[len(pairs) + 1] == "No 6"
