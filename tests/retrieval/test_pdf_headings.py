"""Headings of PDFs, by the size of their letters and by the outline; what merely looks like one is none."""

import pytest
from pdfs import minimal_pdf, pdf
from rendered import chunk_documents

from blend_retrieval.headings import headings_in
from blend_retrieval.loading import load_bytes

SENTENCES = (
    "The north pier is the oldest part of the harbour, and masons built it.",
    "It holds twelve ships, and each of them pays thirty crowns a day.",
    "Ships that come late pay the double fee, and captains sign the book.",
)


def body(top, x=60, count=3, size=10):
    """Lines of a paragraph from this height downwards."""
    return [(size, x, top - 12 * n, SENTENCES[n % 3]) for n in range(count)]


def page(*lines):
    """The content of a page: (size, x, y, text)."""
    shown = [b"/F1 %g Tf 1 0 0 1 %g %g Tm (%s) Tj" % (size, x, y, text.encode("cp1252")) for size, x, y, text in lines]
    return b"BT %s ET" % b" ".join(shown)


def outline(entries, first):
    """The objects of an outline, the first of which has this number: (depth, title, page object, height)."""
    numbers = range(first + 1, first + 1 + len(entries))
    root = [b"<< /Type /Outlines /First %d 0 R /Last %d 0 R >>" % (numbers[0], numbers[-1])]
    items = []
    for place, (number, (depth, title, target, top)) in enumerate(zip(numbers, entries, strict=True)):
        links = b""
        for later, (other, *_) in zip(numbers[place + 1 :], entries[place + 1 :], strict=True):
            if other > depth and later == number + 1:
                links += b"/First %d 0 R /Last %d 0 R /Count 1 " % (later, later)
            elif other == depth:
                links += b"/Next %d 0 R " % later
                break
            elif other < depth:
                break
        item = b"<< /Title (%s) /Parent %d 0 R /Dest [%d 0 R /XYZ 60 %d 0] %s>>"
        items.append(item % (title.encode(), first, target, top, links))
    return root + items


def read(contents, entries=()):
    """The document of a PDF with these pages and this outline."""
    first = 4 + 2 * len(contents)
    objects = outline(entries, first) if entries else []
    catalog = b"/Outlines %d 0 R " % first if entries else b""
    (document,), skipped = load_bytes("a.pdf", pdf(contents, *objects, title="Paper", catalog=catalog))
    assert not skipped
    return document


def headings(document):
    return [(heading.level, heading.text) for heading in headings_in(document.text, document.markup)]


def without_marks(text):
    return [line.strip("# ") for line in text.splitlines() if line.strip("# ")]


BY_SIZE = [
    (24, 60, 740, "Rules of the harbour"),
    *body(700),
    (16, 60, 640, "Fees"),
    *body(610),
    (13, 60, 560, "Boats that are shorter than twelve metres, and all"),
    (13, 60, 544, "that stay for less than a night"),
    *body(520),
    (16, 60, 460, "1.2 Version 4.6"),
    *body(430),
]
LEVELS = [
    (1, "Rules of the harbour"),
    (2, "Fees"),
    (3, "Boats that are shorter than twelve metres, and all that stay for less than a night"),
    (2, "1.2 Version 4.6"),
]


def test_larger_lines_are_headings_with_levels_by_size():
    document = read([page(*BY_SIZE)])
    assert headings(document) == LEVELS
    whole = " ".join(text for _, _, _, text in BY_SIZE)
    assert " ".join(without_marks(document.text)) == whole


def test_a_chunk_has_the_headings_above_it_in_its_title():
    document = read([page(*BY_SIZE)])
    titles = [chunk.title for chunk in chunk_documents([document], 110)]
    assert titles[0] == "Paper > Rules of the harbour"
    assert "Paper > Rules of the harbour > Fees" in titles
    assert titles[-1] == "Paper > Rules of the harbour > 1.2 Version 4.6"


def test_a_size_is_what_the_page_shows():
    lines = [b"1 0 0 1 60 %d Tm (%s) Tj" % (y, text.encode()) for _, _, y, text in body(700)]
    content = b"BT /F1 1 Tf 24 0 0 24 60 740 Tm (Rules of the harbour) Tj /F1 10 Tf %s ET" % b" ".join(lines)
    assert headings(read([content])) == [(1, "Rules of the harbour")]


OUTLINE = [
    (0, "Fees", 4, 650),
    (1, "Boats shorter than twelve metres", 4, 570),
    (0, "Chapter 2: Penalties", 6, 760),
    (0, "Not in the text", 6, 700),
]
OUTLINED = [
    page(
        *body(740),
        (10, 60, 640, "1. Fees"),
        *body(628),
        (10, 60, 560, "1.1 Boats shorter"),
        (10, 60, 548, "than twelve metres"),
        *body(536),
        (10, 60, 100, "Fees"),
    ),
    page((10, 60, 740, "2 Penalties"), *body(720), (10, 60, 300, "Boats shorter than twelve metres")),
]


def test_the_outline_names_headings_of_any_size():
    assert headings(read(OUTLINED, OUTLINE)) == [
        (1, "1. Fees"),
        (2, "1.1 Boats shorter than twelve metres"),
        (1, "2 Penalties"),
    ]
    assert headings(read(OUTLINED)) == []


@pytest.mark.parametrize("size", [10, 14])
def test_of_equal_lines_the_outline_names_the_larger_then_the_nearer_one(size):
    lines = [(10, 60, 740, "Fees"), *body(720), (size, 60, 500, "Fees"), *body(480), (10, 60, 300, "Fees"), *body(280)]
    text = read([page(*lines)], [(0, "Fees", 4, 510 if size == 10 else 310)]).text
    assert without_marks(text) == [line for _, _, _, line in lines]
    assert [place for place, line in enumerate(filter(None, text.splitlines())) if line == "# Fees"] == [4]


def test_the_outline_gives_lines_of_one_size_their_levels():
    content = page((14, 60, 740, "Fees"), *body(710), (14, 60, 640, "Boats"), *body(610))
    assert headings(read([content], [(0, "Fees", 4, 750), (1, "Boats", 4, 650)])) == [(1, "Fees"), (2, "Boats")]


def test_sizes_have_the_levels_that_the_outline_gives_them():
    content = page(
        *((18, 60, 740, "Fees"), *body(710)),
        *((14, 60, 650, "Boats"), *body(620)),
        *((12, 60, 560, "Small boats"), *body(530)),
        *((18, 60, 470, "Penalties"), *body(440)),
    )
    entries = [(0, "Fees", 4, 750), (1, "Boats", 4, 660)]
    expected = [(1, "Fees"), (2, "Boats"), (3, "Small boats"), (1, "Penalties")]
    assert headings(read([content], entries)) == expected
    assert headings(read([content])) == expected


@pytest.mark.parametrize(
    "line", ["Figure 3: Fees of all harbours", "Table 2. Fees", "42 %", "3,141.59", "All ships pay thirty crowns.", "Q"]
)
def test_captions_numbers_and_sentences_are_no_headings(line):
    document = read([page(*body(740), (18, 60, 680, line), *body(640))])
    assert headings(document) == []
    assert line in document.text


def test_quotes_and_names_on_a_title_page_are_no_headings():
    quote = [
        (18, 60, 600 - 22 * n, text)
        for n, text in enumerate(("The sea gives", "and the sea takes", "said the", "clerk"))
    ]
    title = [(24, 60, 740, "Rules of the harbour"), (14, 60, 700, "Kim Berg and Ole Dahl"), (12, 60, 680, "May 2024")]
    text = [*body(650, count=4), *quote, *body(480, count=8), (14, 60, 340, "Fees"), *body(310, count=8)]
    assert headings(read([page(*title, *text)])) == [(1, "Rules of the harbour"), (2, "Fees")]
    section = (14, 60, 665, "Scope")
    for names in (title, title[:2]):
        assert headings(read([page(*names, section, *text)])) == [
            (1, "Rules of the harbour"),
            (2, "Scope"),
            (2, "Fees"),
        ]


REMARKS = [(13, 60, 640 - 30 * n, text) for n, text in enumerate((*SENTENCES, "Yours truly, Kim"))]
POEM = [(13, 60, 640 - 30 * n, f"And the sea gives, and takes {n}") for n in range(12)]


@pytest.mark.parametrize(
    ("lines", "count"),
    [([(11, 60, 640, "A remark on fees")], 3), (REMARKS, 18), (POEM, 3)],
    ids=["little", "remarks", "poem"],
)
def test_a_size_that_is_hardly_larger_or_that_of_sentences_or_of_much_text_is_none_of_headings(lines, count):
    assert headings(read([page(*body(740), *lines, *body(280, count=count))])) == []


def test_a_number_may_stand_apart_from_its_heading_but_no_other_text():
    numbered = [(14, 60, 680, "1.2"), (14, 110, 680, "Fees")]
    apart = [(14, 60, 600, "Harbour"), (14, 330, 600, "Fee")]
    document = read([page(*body(740), *numbered, *body(660), *apart, *body(580))])
    assert headings(document) == [(1, "1.2 Fees")]
    assert "Harbour Fee" in document.text


def test_headings_may_follow_one_another():
    chapters = [(14, 60, 700 - 40 * n, f"Chapter {name}") for n, name in enumerate(("One", "Two", "Three", "Four"))]
    expected = [(1, f"Chapter {name}") for name in ("One", "Two", "Three", "Four")]
    assert headings(read([page(*body(760), *chapters, *body(500, count=8))])) == expected


def test_running_heads_are_no_headings():
    contents = [
        page((14, 60, 770, f"Harbour office, page {n}"), *body(740), (14, 60, 650, f"Pier {name}"), *body(620))
        for n, name in enumerate(("North", "South", "West"))
    ]
    title = page((24, 60, 740, "Harbour office, page"), *body(700))
    document = read([title, *contents])
    assert headings(document) == [
        (1, "Harbour office, page"),
        *((2, f"Pier {name}") for name in ("North", "South", "West")),
    ]
    assert document.text.count("Harbour office") == 4


def test_cells_of_a_table_are_no_headings():
    cells = [("Harbour", "Season", "Fee"), ("Orm", "summer", "31"), ("Brack", "spring", "40")]
    table = [
        (14 if y == 0 else 10, 60 + 160 * x, 600 - 16 * y, cell)
        for y, row in enumerate(cells)
        for x, cell in enumerate(row)
    ]
    document = read([page((14, 60, 760, "Fees"), *body(740), *table, *body(500))])
    assert headings(document) == [(1, "Fees")]
    assert "| Harbour | Season | Fee |" in document.text


def test_headings_keep_their_place_in_columns():
    north = ("The north pier is the oldest part", "of the harbour and was built by", "masons. It holds twelve ships,")
    south = ("and trade grew. Its cranes lift", "what the ships bring, and those", "who come late pay the double")
    left = [(10, 60, 700 - 12 * n, line) for n, line in enumerate((*north, *south))]
    left[3] = (14, 60, 664, "South pier")
    right = [(10, 330, 700 - 12 * n, line) for n, line in enumerate((*south, *north))]
    text = read([page(*left, *right)]).text
    assert without_marks(text) == [line for _, _, _, line in (*left, *right)]
    assert "\n\n# South pier\n\n" in text


def test_other_lines_after_a_number_sign_are_no_headings():
    (document,), _ = load_bytes(
        "a.pdf", minimal_pdf("# Install what the server needs", "#5 is open", "## x", title="Paper")
    )
    assert headings(document) == []
    assert without_marks(document.text) == ["Install what the server needs", "5 is open", "x"]
    assert "#5 is open" in document.text


def test_a_long_line_after_a_number_sign_is_no_heading():
    assert list(headings_in(f"# {'word ' * 60}\n\n# Fees\n", "marked")) == [(1, "Fees", 304, 311)]


def test_damaged_titles_leave_the_text():
    half_a_pair = b"<FEFFD8000041>"
    objects = outline([(0, "Fees", 4, 740)], 6)
    objects[1] = objects[1].replace(b"(Fees)", half_a_pair)
    data = pdf([page(*BY_SIZE)], *objects, title="Paper", catalog=b"/Outlines 6 0 R ")
    (document,), skipped = load_bytes("a.pdf", data.replace(b"(Paper)", half_a_pair))
    assert (document.title, skipped) == ("a", ())
    assert headings(document) == LEVELS


def test_a_damaged_outline_leaves_the_text():
    entries = [(0, "Fees", 4, 740), (0, "Gone", 99, 700), (0, "Loop", 4, 600)]
    contents = [page(*BY_SIZE)]
    first = 4 + 2 * len(contents)
    objects = outline(entries, first)
    objects[-1] = b"<< /Title (Loop) /Parent %d 0 R /Next %d 0 R /First %d 0 R >>" % (first, first + 1, first)
    (document,), _ = load_bytes("a.pdf", pdf(contents, *objects, catalog=b"/Outlines %d 0 R " % first))
    whole = " ".join(text for _, _, _, text in BY_SIZE)
    assert " ".join(without_marks(document.text)) == whole
