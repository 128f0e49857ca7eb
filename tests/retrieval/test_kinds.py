"""Office files, tables, e-books, mails and source code."""

import io
import zipfile
from email.message import EmailMessage

import pytest
from office_files import docx, epub, paragraph, row, zipped_files
from pdfs import minimal_pdf

from blend_retrieval.isolated import IsolatedReader, ReadingLimits
from blend_retrieval.loading import load_bytes, load_documents


def read(name, data):
    (document,), skipped = load_bytes(name, data)
    assert not skipped
    return document


def test_word():
    body = (
        paragraph("Harbour rules", "Title")
        + paragraph("Fees", "Heading1")
        + paragraph("The tank holds 10").removesuffix("</w:p>")
        + paragraph("6", run="<w:vertAlign w:val='superscript'/>").removeprefix("<w:p>")
        + f"<w:tbl>{row('Harbour', 'Fee')}{row('Orm', '31')}</w:tbl>"
    )
    document = read("rules.docx", docx(body))
    assert document.title == "Harbour rules"
    assert "The tank holds 10^6^" in document.text
    assert "| Harbour | Fee |\n| --- | --- |\n| Orm | 31 |" in document.text


def test_slides():
    from pptx import Presentation
    from pptx.util import Inches

    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = "Fees"
    table = slide.shapes.add_table(2, 2, Inches(1), Inches(3), Inches(4), Inches(1)).table
    for place, text in enumerate(("Harbour", "Fee", "Orm", "31")):
        table.cell(place // 2, place % 2).text = text
    slide.shapes.add_textbox(Inches(1), Inches(2), Inches(4), Inches(1)).text_frame.text = "In crowns."
    slide.notes_slide.notes_text_frame.text = "Say it twice."
    deck.slides.add_slide(deck.slide_layouts[6])
    data = io.BytesIO()
    deck.save(data)
    text = read("fees.pptx", data.getvalue()).text
    assert text == "## Fees\n\nIn crowns.\n\n| Harbour | Fee |\n| --- | --- |\n| Orm | 31 |\n\nSay it twice."


def test_merged_cells_of_slides():
    from pptx import Presentation
    from pptx.util import Inches

    deck = Presentation()
    shapes = deck.slides.add_slide(deck.slide_layouts[6]).shapes
    table = shapes.add_table(4, 3, Inches(1), Inches(1), Inches(4), Inches(1)).table
    for place, text in enumerate(["Zone", "Fee", "", "", "summer", "winter", "North", "31", "12", "", "30", "11"]):
        table.cell(place // 3, place % 3).text = text
    for first, last in [((0, 0), (1, 0)), ((0, 1), (0, 2)), ((2, 0), (3, 0))]:
        table.cell(*first).merge(table.cell(*last))
    data = io.BytesIO()
    deck.save(data)
    assert read("fees.pptx", data.getvalue()).text.splitlines() == [
        *("| Zone | Fee | Fee |", "| Zone | summer | winter |", "| --- | --- | --- |"),
        *("| North | 31 | 12 |", "| North | 30 | 11 |"),
    ]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", 'Harbour,Note,Fee\nOrm,"a, b\nc",31\n\nBrack,,40\n'),
        ("a.csv", 'Harbour;Note;Fee\nOrm;"a, b\nc";31\nBrack;;40\n'),
        ("a.tsv", 'Harbour\tNote\tFee\nOrm\t"a, b\nc"\t31\nBrack\t\t40\n'),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_comma_separated_values(name, data, encoding):
    lines = ["| Harbour | Note | Fee |", "| --- | --- | --- |", "| Orm | a, b c | 31 |", "| Brack |  | 40 |"]
    assert read(name, data.encode(encoding)).text.splitlines() == lines


def test_decimal_commas_divide_no_columns():
    assert read("a.csv", b"Fee;Tax\n1,5;0,3\n2,5;0,5\n").text.splitlines()[2:] == ["| 1,5 | 0,3 |", "| 2,5 | 0,5 |"]


def test_e_books_in_reading_order():
    chapters = {"two": "<h1>Two</h1><p>Second.</p>", "one": "<h1>One</h1><nav>Menu</nav><p>Last.</p>"}
    document = read("book.epub", epub(chapters))
    assert (document.title, document.text) == ("The book", "# Two\n\nSecond.\n\n# One\n\nLast.")
    (document,), (skipped,) = load_bytes("book.epub", epub({**chapters, "lost": None}))
    assert skipped.source == "book.epub chapter OEBPS/lost.xhtml"


def test_chapters_of_pictures_and_pages_beside_the_reading_order_are_named():
    book = epub(
        {
            "cover": "<html><head><title/></head><img src='a.png'/></html>",
            "one": "<title/><p>First.</p><img src='b.png'/>",
        }
    )
    package, page = "OEBPS/book.opf", 'media-type="application/xhtml+xml"'
    with zipfile.ZipFile(io.BytesIO(book)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    listed = (
        files[package]
        .decode()
        .replace(
            "</manifest>",
            f'<item id="n" href="notes.xhtml" {page}/><item href="nav.xhtml" properties="nav" {page}/></manifest>',
        )
    )
    listed = listed.replace("</spine>", '<itemref idref="gone"/></spine>')
    (document,), skipped = load_bytes("book.epub", zipped_files(files | {package: listed}))
    assert document.text == "First."
    assert {fault.source: fault.reason for fault in skipped} == {
        "book.epub chapter OEBPS/cover.xhtml": "holds only pictures",
        "book.epub chapter gone": "is not in the book's list of files",
        "book.epub page notes.xhtml": "is not in the reading order, so it is not read",
    }


def test_mails_with_their_attachments_and_mails():
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = "Gebühren für März", "orm@example.org", "all@example.org"
    message.set_content("Die Gebühr ist 31 Kronen.")
    message.add_alternative("<p>Die <b>Geb&uuml;hr</b> ist 31 Kronen.</p>", subtype="html")
    for name, data in (("fees.pdf", minimal_pdf("Fee: 31")), ("tool.exe", b"MZ"), ("b.txt", b"\0")):
        message.add_attachment(data, maintype="application", subtype="octet-stream", filename=name)
    inner = EmailMessage()
    inner["Subject"] = "The fee"
    inner.set_content("<p>It is <b>31</b>.</p>", subtype="html")
    message.add_attachment(inner)
    documents, skipped = load_bytes("a.eml", message.as_bytes())
    assert {(one.id, one.title): one.text for one in documents} == {
        ("a.eml", "Gebühren für März"): "From: orm@example.org\nTo: all@example.org\n\nDie Gebühr ist 31 Kronen.",
        ("a.eml#attachment 4", "The fee"): "It is **31**.",
        ("a.eml#fees.pdf", "fees"): "Fee: 31",
    }
    assert {fault.source: fault.reason for fault in skipped} == {
        "a.eml tool.exe": "is an attachment of a kind that is not read",
        "a.eml b.txt": "is a binary file, not text",
    }


@pytest.mark.parametrize("name", ["a.log", "a.py", "a.json", "a.yaml", "Main.java"])
def test_logs_and_source_code_are_text(name):
    assert read(name, b"first = 1\nsecond = 2\n").text == "first = 1\nsecond = 2"


@pytest.mark.parametrize("suffix", ["docx", "pptx", "xlsx", "epub"])
def test_archives_that_unpack_to_too_much_or_are_none(suffix):
    bad = {
        "unpacks to 67,108,864 bytes": zipped_files({"word/document.xml": b" " * (64 << 20)}),
        "is damaged": b"PK nothing",
        "is encrypted, or in a format of before 2007": b"\xd0\xcf\x11\xe0" + b"\0" * 100,
    }
    for reason, data in bad.items():
        documents, (skipped,) = load_bytes(f"a.{suffix}", data)
        assert not documents
        assert skipped.reason.startswith(reason)


def test_composed_and_decomposed_names_are_one(tmp_path):
    import unicodedata

    for form in ("NFC", "NFD"):
        folder = tmp_path / form
        folder.mkdir()
        (folder / unicodedata.normalize(form, "Gebühren.md")).write_text("31")
        assert load_documents(folder).documents[0].id == "Geb\u00fchren.md"


def test_the_field_of_records_that_holds_their_text(tmp_path):
    lines = b'{"id": "a", "body": "The harbour.", "text": "no"}\n{"text": "other"}\n'
    (document,), (skipped,) = load_bytes("r.jsonl", lines, "body")
    assert (document.id, document.text) == ("r.jsonl#a", "The harbour.")
    assert (skipped.source, skipped.reason) == ("r.jsonl line 2", 'is not a record with a string under "body"')
    (tmp_path / "r.jsonl").write_bytes(lines)
    assert load_documents(tmp_path, text_field="body").documents[0].text == "The harbour."
    assert IsolatedReader(ReadingLimits()).read("r.jsonl", lines, "body").documents[0].text == "The harbour."


def test_a_table_in_a_far_corner_takes_no_room():
    import openpyxl

    book, data = openpyxl.Workbook(), io.BytesIO()
    for line, (harbour, fee) in enumerate([("Harbour", "Fee"), ("Orm", 31), ("Kell", 12)], 1):
        book.active.cell(line, 2, harbour)
        book.active.cell(100 * line, 16_384, fee)
    book.save(data)
    document = read("corner.xlsx", data.getvalue())
    assert len(document.text) < 200
    assert [cell in document.text for cell in ("Harbour", "Orm", "31", "12")] == [True] * 4
