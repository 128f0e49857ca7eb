"""Forms and notes in PDFs, and lines from right to left with numbers and words from left to right among them."""

import re

import pytest
from pdfs import pdf, stream, to_unicode, written_at

from blend_retrieval.loading import load_bytes

FORM = b"/AcroForm << /Fields [6 0 R] /DA (/F1 12 Tf) /DR << /Font << /F1 3 0 R >> >> >> "
LABELS = written_at((72, 702, "Paid:"), (250, 702, "in full"))


def read(*objects, catalog=FORM):
    """The text of a page with an annotation, which is the first of these objects."""
    (document,), _ = load_bytes("a.pdf", pdf([LABELS], *objects, catalog=catalog, entries=b"/Annots [6 0 R] "))
    return document.text


def drawn(content):
    font = b"/Resources << /Font << /Z << /Type /Font /Subtype /Type1 /BaseFont /ZapfDingbats >> >> >> "
    return stream(content, b"/Type /XObject /Subtype /Form /BBox [0 0 80 14] " + font)


def button(state, flags=0, value=b"", look=b"/AP << /N << /Yes 7 0 R /Off 8 0 R >> >> "):
    field = (
        b"<< /Type /Annot /Subtype /Widget /FT /Btn /T (paid) /Ff %d /V /%s /AS /%s /Rect [120 700 134 714] /F 4 %s>>"
    )
    return [field % (flags, value or state, state, look), drawn(b"BT /Z 12 Tf 2 2 Td (4) Tj ET"), drawn(b"")]


def field(entries, flags=4):
    return b"<< /Type /Annot /Subtype /Widget /T (paid) /Rect [120 700 240 714] /DA (/F1 12 Tf) /F %d %s >>" % (
        flags,
        entries,
    )


def note(kind, contents, entries=b""):
    return b"<< /Type /Annot /Subtype /%s /Contents (%s) /Rect [120 700 240 714] /F 4 %s >>" % (kind, contents, entries)


@pytest.mark.parametrize(
    ("objects", "text"),
    [
        (button(b"Yes"), "Paid: [x] in full"),
        (button(b"Off"), "Paid: [ ] in full"),
        (button(b"Yes", look=b""), "Paid: [x] in full"),
        (button(b"Off", value=b"Yes"), "Paid: [ ] in full"),
        (button(b"Yes", flags=1 << 15), "Paid: (x) in full"),
        (button(b"Off", flags=1 << 15), "Paid: ( ) in full"),
        ([field(b"/FT /Ch /Ff 131072 /Opt [(north) (south)] /V (south)")], "Paid: south in full"),
        ([field(b"/FT /Ch /Opt [(north) (south)] /V (south)")], "Paid: [ ] north [x] south in full"),
        ([field(b"/FT /Ch /Opt [%s] /V (e7)" % b" ".join(b"(e%d)" % n for n in range(30)))], "Paid: e7 in full"),
        ([field(b"/FT /Tx /Ff 16777216 /MaxLen 8 /V (912)")], "Paid: 912 in full"),
        ([field(b"/FT /Tx /V (912)", flags=2)], "Paid: in full"),
        ([note(b"FreeText", b"31 crowns", b"/DA (/Helv 12 Tf 0 g)")], "Paid: 31 crowns in full"),
        ([note(b"FreeText", b"shadow", b"/AP << /N 7 0 R >>"), drawn(b"")], "Paid: in full"),
        ([note(b"Text", b"Ask\nOrm.", b"/T (Anna)")], "Paid: [comment by Anna: Ask Orm.] in full"),
        ([note(b"Highlight", b"Old fee", b"/QuadPoints [1 2 3 4 5 6 7 8]")], "Paid: in full\n\n[comment: Old fee]"),
    ],
)
def test_fields_and_notes(objects, text):
    assert read(*objects) == text


def test_lines_of_a_note_on_the_page():
    text = b"<< /Type /Annot /Subtype /FreeText /Contents (First 1\\rSecond 2) /Rect [72 500 240 530] /F 4 >>"
    assert read(text, catalog=b"").splitlines() == ["Paid: in full", "", "First 1", "Second 2"]


_LEFT_TO_RIGHT = r"[0-9]+(?:[-.,:/][0-9]+)*%?|[٠-٩]+|[A-Za-z]+(?: [A-Za-z]+)*|."


def as_drawn(line):
    """A line from right to left as it stands on the page, from left to right."""
    runs = reversed(re.findall(_LEFT_TO_RIGHT, line))
    return "".join(run.translate(str.maketrans("()", ")(")) if len(run) == 1 else run for run in runs)


def drawn_lines(lines, words_apart):
    """A page with these lines; with words apart every word is placed alone, without blanks."""
    code = {letter: number for number, letter in enumerate(sorted(set("".join(lines)) - {" "}), 128)}
    shown = []
    for number, line in enumerate(lines):
        words = re.split("( )", as_drawn(line)) if words_apart else [as_drawn(line)]
        left = 100
        for word in words:
            if word != " ":
                signs = bytes(code.get(letter, ord(letter)) for letter in word).hex()
                shown.append(f"1 0 0 1 {left} {720 - 14 * number} Tm <{signs}> Tj")
            left += 7.2 * len(word)
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /AAAAAA+X /ToUnicode 6 0 R /FirstChar 0 /LastChar 255 /Widths [%s] >>"
    letters = to_unicode({number: letter for letter, number in code.items()})
    return pdf([f"BT /F1 12 Tf {' '.join(shown)} ET".encode()], letters, font=font % (b"600 " * 256))


@pytest.mark.parametrize("words_apart", [False, True])
@pytest.mark.parametrize(
    "lines",
    [
        ["ב-2024 נפתח המזח ב-6:30", "שולם ב-31.12.2024 לפי סעיף 4(ב)", "מחיר 12.5% היום", "טלפון 03-1234567", "ל-31"],
        ["של (רציף) אחד", "מזח New York פתוח"],
        ["الرسوم ١٢ كرونة", "في 2024 فتح الرصيف"],
    ],
)
def test_numbers_and_words_in_lines_from_right_to_left(lines, words_apart):
    (document,), _ = load_bytes("a.pdf", drawn_lines(lines, words_apart))
    assert document.text.splitlines() == lines
