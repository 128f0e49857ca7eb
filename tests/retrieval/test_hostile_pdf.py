"""Small PDFs that would take hours or gigabytes: a page that draws too much is named, and the other pages are read."""

import resource
import time
import zlib

import pytest
from pdfs import pdf, stream

from blend_retrieval.loading import load_bytes

TEXT = b"BT /F1 12 Tf 72 720 Td (harbour) Tj ET"
FORM = b"/Type /XObject /Subtype /Form /BBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> /XObject << /X %d 0 R >> >> "
TO_FORM = b"/XObject << /X 8 0 R >> "
REASON = "draws more than 200,000 texts or 32 MiB, and is not read"


def nested(depth, name=b"X"):
    """A page that draws forms that draw forms ten times; and a good page."""
    forms = []
    for level in range(depth):
        content = TEXT if level == depth - 1 else b"/%s Do " % name * 10
        forms.append(stream(content, FORM % (9 + level)))
    return pdf([b"/X Do", TEXT], *forms, resources=TO_FORM)


def itself():
    return pdf([b"/X Do", TEXT], stream(b"/X Do " * 10, FORM % 8), resources=TO_FORM)


def hidden_resources():
    """A form that draws itself, whose resources are in an object stream."""
    packed = zlib.compress(b"20 0 << /XObject << /X 8 0 R >> >>")
    objects = stream(packed, b"/Type /ObjStm /N 1 /First 5 /Filter /FlateDecode ")
    form = stream(b"/X Do " * 10, b"/Type /XObject /Subtype /Form /BBox [0 0 612 792] /Resources 20 0 R ")
    return pdf([b"/X Do", TEXT], form, objects, resources=TO_FORM)


def packed(content):
    data = pdf([TEXT, TEXT], stream(zlib.compress(content, 9), b"/Filter /FlateDecode "))
    return data.replace(b"/Contents 5 0 R", b"/Contents 8 0 R")


@pytest.mark.parametrize(
    "data",
    [
        nested(9),
        nested(40),
        nested(9, b"#58"),
        itself(),
        hidden_resources(),
        packed(b"BT /F1 12 Tf " + b"(a) Tj " * 2_000_000 + b"ET"),
        packed(b"BT /F1 12 Tf (" + b"a" * 10_000_000 + b") Tj ET"),
        packed(b" " * 40_000_000),
    ],
    ids=["nested", "deep", "escaped", "itself", "object-stream", "texts", "long-text", "blanks"],
)
def test_a_page_that_draws_too_much_is_named_and_the_next_one_is_read(data):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load_bytes("a.pdf", data)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert ("a.pdf page 1", REASON) in {(fault.source, fault.reason) for fault in loaded.skipped}
    assert [document.text for document in loaded.documents] == ["harbour"]
    assert grown < 300_000  # KiB


def test_what_draws_less_is_read_whole():
    (document,), skipped = load_bytes("a.pdf", nested(4))
    assert "harbour" in document.text
    assert not skipped
    texts = b"".join(b"1 0 0 1 72 %d Tm (ab%d) Tj " % (i % 790, i) for i in range(5_000))
    (document,), skipped = load_bytes("a.pdf", pdf([b"BT /F1 1 Tf " + texts + b"ET"]))
    assert "ab4999" in document.text
    assert not skipped


@pytest.mark.parametrize(
    "data",
    [
        pdf([TEXT]).replace(b"/Kids [4 0 R]", b"/Kids [2 0 R 4 0 R]"),
        pdf([TEXT]).replace(b"/Count 1", b"/Count 99999999"),
        pdf([TEXT]).replace(b"/Length 38", b"/Length 999999999"),
        pdf([TEXT]).replace(b"612 792", b"1000000000 1000000000"),
        pdf([TEXT], *[b"<< >>"] * 20_000),
        pdf([TEXT], b"[" * 100_000),
        pdf(
            [TEXT],
            b"<< /First 7 0 R /Last 7 0 R >>",
            b"<< /Title (a) /Next 7 0 R /First 7 0 R /Dest [4 0 R /Fit] >>",
            catalog=b"/Outlines 6 0 R ",
        ),
    ],
    ids=["kids-loop", "count", "length", "box", "objects", "deep-array", "outline-loop"],
)
def test_loops_and_lies_take_no_text(data):
    (document,), _ = load_bytes("a.pdf", data)
    assert "harbour" in document.text


def test_texts_all_over_a_page_take_linear_time():
    def seconds(number):
        places = b"".join(b"1 0 0 1 %d %d Tm (ab) Tj " % (i * 37 % 600, i * 7 % 790) for i in range(number))
        data = pdf([b"BT /F1 1 Tf " + places + b"ET"])
        start = time.process_time()
        load_bytes("a.pdf", data)
        return time.process_time() - start

    assert seconds(6_000) < 8 * seconds(1_500)
