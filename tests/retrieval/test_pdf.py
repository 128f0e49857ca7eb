"""PDF documents read as a viewer shows them: pages, forms, columns, tables, letters, and what has no text."""

import io
import zlib

import pytest
from pdfs import in_letters, minimal_pdf, pdf, stream, to_unicode, written_at

from blend_retrieval.loading import load_bytes, load_documents


def test_pdf_pages_and_title(tmp_path):
    (tmp_path / "a.pdf").write_bytes(minimal_pdf("Hello from page one", "", "And from page three", title="My paper"))
    (tmp_path / "scan.pdf").write_bytes(minimal_pdf(""))
    loaded = load_documents(tmp_path)
    assert loaded.documents[0].title == "My paper"
    assert loaded.documents[0].text == "Hello from page one\n\nAnd from page three"
    assert "OCR" in loaded.skipped[0].reason


@pytest.mark.parametrize("cipher", ["RC4-128", "AES-128", "AES-256"])
def test_encrypted_pdf_is_read_if_it_needs_no_password(tmp_path, cipher):
    pytest.importorskip("cryptography")
    pypdf = pytest.importorskip("pypdf")
    (tmp_path / "plain.pdf").write_bytes(minimal_pdf("Some words"))
    for name, password in (("open.pdf", ""), ("closed.pdf", "secret")):
        writer = pypdf.PdfWriter(clone_from=pypdf.PdfReader(tmp_path / "plain.pdf"))
        writer.encrypt(password, algorithm=cipher)
        writer.write(tmp_path / name)
    loaded = load_documents(tmp_path)
    assert [(d.id, d.text) for d in loaded.documents] == [("open.pdf", "Some words"), ("plain.pdf", "Some words")]
    assert [s.reason for s in loaded.skipped] == ["is protected by a password; save it without one"]


def test_pdf_whose_pages_unpack_to_too_much_is_skipped(tmp_path):
    plain = minimal_pdf("Some words")
    packed = zlib.compress(b" " * 100_000_000, 9)
    start, stop = plain.index(b"<< /Length"), plain.index(b"endstream")
    bomb = b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\n" % (len(packed), packed)
    (tmp_path / "bomb.pdf").write_bytes(plain[:start] + bomb + plain[stop:])
    (tmp_path / "b.md").write_text("Good.")
    loaded = load_documents(tmp_path)
    assert [d.id for d in loaded.documents] == ["b.md"]
    assert loaded.skipped[0].reason == "draws more than 200,000 texts or 32 MiB, and is not read"


def read(content, *objects, **options):
    """The text of a page with this content."""
    (document,), skipped = load_bytes("a.pdf", pdf([content], *objects, **options))
    assert not skipped
    return document.text


@pytest.mark.parametrize("drawn", [True, False])
def test_filled_fields_stand_beside_their_labels(drawn):
    look = stream(
        b"/Tx BMC BT /F1 12 Tf 2 4 Td (912 EUR) Tj ET EMC", b"/Type /XObject /Subtype /Form /BBox [0 0 200 20] "
    )
    appearance = b"/AP << /N 7 0 R >> " if drawn else b""
    field = (
        b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (rent) /V (912 EUR) /Rect [170 715 370 735] %s/F 4 >>"
        % appearance
    )
    form = b"/AcroForm << /Fields [6 0 R] /DA (/F1 12 Tf) /DR << /Font << /F1 3 0 R >> >> >> "
    content = b"BT /F1 12 Tf 72 720 Td (Monthly rent:) Tj ET"
    assert read(content, field, look, catalog=form, entries=b"/Annots [6 0 R] ") == "Monthly rent: 912 EUR"


def scans(*texts):
    """A PDF with a picture on every page, and these texts."""
    image = stream(
        b"\0" * 12, b"/Type /XObject /Subtype /Image /Width 2 /Height 2 /ColorSpace /DeviceRGB /BitsPerComponent 8 "
    )
    drawn = b"q 612 0 0 792 0 0 cm /I Do Q BT /F1 9 Tf 72 720 Td (%s) Tj ET"
    resources = b"/XObject << /I %d 0 R >> " % (4 + 2 * len(texts))
    return pdf([drawn % text.encode() for text in texts], image, resources=resources)


def test_pages_that_are_pictures_are_named():
    long = "A page of text that is printed over a picture, as on slides and covers of reports."
    (document,), (skipped,) = load_bytes("half.pdf", scans(long, "", long, "", "Page 5", ""))
    assert document.text == f"{long}\n\n{long}\n\nPage 5"
    places = "half.pdf page 2, page 4, page 5 and 1 more"
    assert skipped == (places, "holds no text, only pictures; run it through OCR", ("half.pdf",), 4)


def test_attachments_are_named():
    import pypdfium2

    document = pypdfium2.PdfDocument(minimal_pdf("Some words"))
    document.new_attachment("fees.xlsx").set_data(b"PK")
    data = io.BytesIO()
    document.save(data)
    (read_document,), (skipped,) = load_bytes("a.pdf", data.getvalue())
    assert read_document.text == "Some words"
    assert (skipped.source, skipped.reason) == ("a.pdf attachment fees.xlsx", "is not read")


def test_glyph_names_are_not_taken_for_text():
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /AAAAAA+Y /FirstChar %d /LastChar %d /Widths [500 500 500] %s>>"
    for first in (1, 65):
        encoding = b"/Encoding << /Differences [%d /g21 /g22 /g23] >> " % first
        named = font % (first, first + 2, encoding)
        shown = b"BT /F1 12 Tf 72 720 Td <%s> Tj ET" % bytes(range(first, first + 3)).hex().encode()
        documents, (skipped,) = load_bytes("a.pdf", pdf([shown], font=named))
        assert not documents
        assert "glyphs that name no characters" in skipped.reason


def test_ligatures_and_divided_words():
    content = b"BT /F1 12 Tf 72 720 Td (The \\001nal of\\001ce re\\002) Tj 0 -14 Td (placement, 3 m\xc2\xb2) Tj ET"
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /AAAAAA+X /ToUnicode 6 0 R >>"
    letters = to_unicode({1: "ﬁ", 2: "\u00ad"})
    assert read(content, letters, font=font).startswith("The final office replacement, 3 m")


def test_a_hyphen_stays_where_the_text_spells_it():
    lines = ("A well-", "known re-", "placement, a well-known one.")
    content = written_at(*((60, 700 - 14 * y, line) for y, line in enumerate(lines)))
    assert read(content) == "A well-known replacement, a well-known one."


TABLE = (("Harbour", "Season", "Fee"), ("Orm", "summer", "31"), ("Orm", "", "12"), ("Brack", "spring", "40"))
CELLS = [(60 + 140 * x, 700 - 16 * y, cell) for y, row in enumerate(TABLE) for x, cell in enumerate(row)]


@pytest.mark.parametrize("order", [CELLS, sorted(CELLS)])
def test_a_table_keeps_its_rows_however_it_is_drawn(order):
    text = read(written_at((60, 740, "Fees of all harbours"), *order, (60, 600, "All fees are in crowns.")))
    assert [line for line in text.splitlines() if line] == [
        "Fees of all harbours",
        "| Harbour | Season | Fee |",
        "| --- | --- | --- |",
        "| Orm | summer | 31 |",
        "| Orm |  | 12 |",
        "| Brack | spring | 40 |",
        "All fees are in crowns.",
    ]


LEFT = ("The north pier is the oldest part", "of the harbour and was built by", "masons. It holds twelve ships.")
RIGHT = ("The south pier was added when", "trade grew. Its cranes lift")


def test_columns_of_prose_are_read_one_after_the_other():
    left, right = ([(x, 700 - 14 * y, line) for y, line in enumerate(lines)] for x, lines in ((60, LEFT), (320, RIGHT)))
    by_row = sorted([*left, *right], key=lambda place: -place[1])
    head, tail = (60, 740, "A history in two columns of text by the clerk of the harbour"), (60, 600, "The end.")
    text = read(written_at(head, *by_row, tail))
    assert [line for line in text.splitlines() if line] == [head[2], *LEFT, *RIGHT, tail[2]]


def test_a_table_of_single_words_is_no_prose():
    pairs = (("quai", "pier"), ("bateau", "boat"), ("phare", "lighthouse"))
    words = [(60 + 140 * x, 700 - 16 * y, word) for y, pair in enumerate(pairs) for x, word in enumerate(pair)]
    _, _, *rows = read(written_at(*words)).splitlines()
    assert rows == ["| bateau | boat |", "| phare | lighthouse |"]


def test_numbers_of_lines_and_list_items_make_no_table():
    numbers = [(40, 700 - 14 * y, str(y)) for y in range(1, 4)]
    prose = [(60, 700 - 14 * y, line) for y, line in enumerate((LEFT[0] + " of it all", *LEFT[1:]), 1)]
    items = [(60, 600, "•"), (80, 600, "First item"), (60, 586, "2."), (80, 586, "Second item")]
    text = read(written_at(*numbers, *prose, *items))
    assert "|" not in text
    assert text.endswith("• First item\n2. Second item")


def test_a_power_keeps_its_value():
    content = b"BT /F1 12 Tf 72 720 Td (10) Tj 5 Ts /F1 8 Tf (6) Tj 0 Ts /F1 12 Tf ( litres) Tj ET"
    assert read(content) == "10^6 litres"


@pytest.mark.parametrize(
    ("turned", "second", "entries"), [(b"0 1 -1 0", (314, 300), b"/Rotate 90 "), (b"-1 0 0 -1", (300, 314), b"")]
)
def test_turned_pages(turned, second, entries):
    content = b"BT /F1 12 Tf %s 300 300 Tm (One) Tj %s %d %d Tm (Two) Tj ET" % (turned, turned, *second)
    assert read(content, entries=entries) == "One\nTwo"


@pytest.mark.parametrize(
    "lines", [["המזח נפתח בשש", "האגרה היא גבוהה", "ספינות משלמות"], ["يفتح الرصيف", "والرسوم كرونة"]]
)
def test_text_from_right_to_left(lines):
    (document,), _ = load_bytes("a.pdf", in_letters(lines))
    assert document.text.splitlines() == lines
