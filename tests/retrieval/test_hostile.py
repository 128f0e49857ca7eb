"""Documents that attack their reader end within bounds, with a document or one clear line."""

import io
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from office_files import docx, epub, paragraph, zipped_files

from blend_retrieval.loading import load_bytes

_REPOSITORY = Path(__file__).parents[2]
_OPEN_DOCUMENT = (
    'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"'
)
_DEEP = "cannot be read whole: its elements are nested too deeply"
_PEAK = """
import sys
from blend_retrieval.loading import load_bytes
documents, skipped = load_bytes(sys.argv[1], sys.stdin.buffer.read())
peak = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
print(len(documents), int(peak) // 1024, *(fault.reason for fault in skipped))
"""


def fods(rows):
    table = f'<table:table table:name="S">{rows}</table:table>'
    body = f"<office:body><office:spreadsheet>{table}</office:spreadsheet></office:body>"
    return f"<office:document {_OPEN_DOCUMENT}>{body}</office:document>".encode()


def lying(data, name, size):
    """An archive whose directory gives this size for a part."""
    changed = bytearray(data)
    entry = changed.find(b"PK\x01\x02")
    while changed[entry + 46 : entry + 46 + len(name)] != name.encode():
        entry = changed.find(b"PK\x01\x02", entry + 4)
    changed[entry + 24 : entry + 28] = struct.pack("<I", size)
    return bytes(changed)


def overlapping():
    """An archive that names a part twice."""
    data = io.BytesIO(docx(paragraph("a")))
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("word/more.xml", "<a/>")
        archive.filelist.append(archive.filelist[-1])
    return data.getvalue()


def packed_otherwise():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", "<a/>")
    return data.getvalue()


def entity(number):
    following = f"&a{number + 1};"
    return f'<!ENTITY a{number} "{following * 50}">'


def nested_mails(depth):
    head = "From: a@example.org\nSubject: outer\nContent-Type: message/rfc822\n\n" * depth
    return f"{head}From: a@example.org\nSubject: inner\n\nhello".encode()


REFUSED = {
    "a directory that lies": (
        "a.docx",
        lambda: lying(docx(paragraph("a" * 100_000)), "word/document.xml", 100),
        "is damaged",
    ),
    "parts on each other": ("a.docx", overlapping, "is damaged: its parts lie on each other"),
    "an unusual method": ("a.docx", packed_otherwise, "is packed by a method"),
    "a deep document": ("a.docx", lambda: docx("<w:sdt><w:sdtContent>" * 600), _DEEP),
    "fields without end": (
        "a.docx",
        lambda: docx("<w:p>" + '<w:r><w:fldChar w:fldCharType="begin"/></w:r>' * 501 + "</w:p>"),
        "is damaged: its fields do not end",
    ),
    "deep HTML": ("a.html", lambda: b"<div>" * 20_000, _DEEP),
    "HTML that opens ended elements": ("a.html", lambda: b"<x-a/>" * 20_000, _DEEP),
    "end tags of nothing": ("a.html", lambda: b"<div></x>" * 20_000, _DEEP),
    "formatting that is opened again": (
        "a.html",
        lambda: "".join(f"<div><b c{number}></div>" for number in range(3000)).encode(),
        "leaves too many elements without their end tags",
    ),
    "attributes": (
        "a.html",
        lambda: f"<div {' '.join(f'a{number}' for number in range(20_000))}>".encode(),
        "has an element with more than 4,000 attributes",
    ),
    "entities that name each other": (
        "a.html",
        lambda: (
            '<!DOCTYPE html PUBLIC "XHTML" [' + "".join(entity(number) for number in range(9)) + "]><html>&a0;</html>"
        ).encode(),
        "declares entities that repeat themselves",
    ),
    "mails without an end": (
        "a.eml",
        lambda: "".join(
            f'Content-Type: multipart/mixed; boundary="b{number}"\n\n--b{number}\n' for number in range(400)
        ).encode(),
        _DEEP,
    ),
    "a sparse table": (
        "a.csv",
        lambda: b"a," * 4000 + b"\n" + b"b,c\n" * 4000,
        "has a table of more than 10,000,000 cells",
    ),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_attacks_are_refused_in_one_line(attack):
    name, make, reason = REFUSED[attack]
    _, skipped = load_bytes(name, make())
    assert skipped[0].reason.startswith(reason)


def test_an_archive_that_was_refused_has_cost_little_memory():
    text = docx("<w:p/>" * 1_000_001 + "ab" * 5_000_000)
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, "a.docx"],
        input=text,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY / "retrieval")},
    )
    documents, peak, *reason = result.stdout.decode().split()
    assert documents == "0"
    assert " ".join(reason).startswith("holds more than 1,000,000 elements")
    assert int(peak) < 300


def test_a_chapter_that_a_book_repeats_is_read_once():
    book = epub({"one": "<p>Only once.</p>"})
    with zipfile.ZipFile(io.BytesIO(book)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    package = files["OEBPS/book.opf"].decode()
    reference = '<itemref idref="one"/>'
    files["OEBPS/book.opf"] = package.replace(reference, reference * 5000)
    (document,), (fault,) = load_bytes("a.epub", zipped_files(files))
    assert document.text == "Only once."
    assert fault.reason == "stands 5,000 times in the book, and is read once"


def test_cells_that_repeat_a_text_are_bounded():
    cell = '<table:table-cell table:number-columns-repeated="16384"><text:p>x</text:p></table:table-cell>'
    _, (fault,) = load_bytes(
        "a.fods", fods(f'<table:table-row table:number-rows-repeated="1048576">{cell}</table:table-row>')
    )
    assert fault.reason == "has more than 200,000 cells that repeat others"
    long_text = cell.replace(">x<", f">{'x' * 3000}<")
    _, (fault, *_) = load_bytes("a.fods", fods(f"<table:table-row>{long_text}</table:table-row>"))
    assert fault.reason.startswith("holds more than 33,554,432 characters of text")


def test_blanks_that_a_text_counts_are_bounded():
    cell = '<table:table-cell><text:p>a<text:s text:c="999999999"/>b</text:p></table:table-cell>'
    (document,), _ = load_bytes("a.fods", fods(f"<table:table-row>{cell}</table:table-row>"))
    assert "a b" in document.text


def test_mails_in_mails_are_read_to_a_depth():
    documents, (fault,) = load_bytes("a.eml", nested_mails(30))
    assert len(documents) == 21
    assert fault.reason == "is a mail inside of more than 20 others: it is not read"


def test_long_headers_are_read():
    names = ", ".join(f"person{number}@example.org" for number in range(3000))
    (document,), _ = load_bytes("a.eml", f"To: {names}\n\nhello".encode())
    assert "person2999@example.org" in document.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.vtt", "WEBVTT\n\n00:00.000 --> 00:01.000\nhello\n" + "<v " * 40_000),
        ("a.ipynb", '{"cells": [{"cell_type": "markdown", "source": "hello ' + "![](data:" * 40_000 + '"}]}'),
        ("a.html", f'<p>hello<ol style="{"list-style:" * 40_000}"><li>a</ol>'),
    ],
)
def test_patterns_take_time_in_proportion_to_the_text(name, text):
    """Each would take minutes if its time grew with the square of the text."""
    (document,), _ = load_bytes(name, text.encode())
    assert "hello" in document.text
