"""Rich Text Format."""

import pytest

from blend_retrieval.loading import load_bytes

HEAD = (
    r"{\rtf1\ansi\ansicpg1252\deff0{\fonttbl{\f0\fcharset0 Calibri;}{\f1\fcharset204 Arial Cyr;}{\f2\fcharset2 Symbol;}"
    r"{\f3\fcharset128 MS Mincho;}}{\colortbl;\red255\green0\blue0;}{\stylesheet{\s0 Normal;}{\s1\outlinelevel0 heading 1;}"
    r"{\s2 heading 2;}}{\*\generator Writer 1;}"
)


def read(body, head=HEAD):
    (document,), skipped = load_bytes("a.rtf", f"{head}{body}}}".encode("latin-1"))
    return document, [entry.reason for entry in skipped]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (r"The fee is {\b 31} crowns, 10{\super 6} litres, H{\sub 2}O.", "The fee is 31 crowns, 10^6^ litres, H~2~O."),
        (r"10\up6 6\up0 x {\strike 98} 31", "10^6^x ~~98~~ 31"),
        (
            r"\u220?ber na\'efve \ldblquote q\rdblquote  \u-10179?\u-8704? a\_b\~c\{d\}\\e",
            "Über naïve “q” 😀 a-b c{d}\\e",
        ),
        (r"\uc2\u8364\'80\'80 5 \uc0\u8364 6", "€ 5 €6"),
        (r"{\f1 \'cf\'f0\'e8\'e2\'e5\'f2} {\f3 \'93\'fa\'96\'7b} {\f2 \'61}", "Привет 日本 α"),
        (r"See {\field{\*\fldinst HYPERLINK http://x}{\fldrslt the office}}.", "See the office."),
        (r"31{\footnote\pard\plain {\super\chftn} Since 2019.} crowns", "31 [note: Since 2019.] crowns"),
        (r"31{\*\atnauthor Orm}{\*\annotation Ask.} crowns", "31 [comment by Orm: Ask.] crowns"),
        (r"{\upr{ANSI ?}{\*\ud{5 \u8364?}}} more", "5 € more"),
        (r"a{\*\unknown secret}b{\*\bkmkstart x}c\bin3 }}}d", "abcd"),
        (r"one\line two\par three", "one\ntwo\n\nthree"),
        (r"a{\shp{\*\shpinst{\sp{\sn shapeType}{\sv 202}}{\shptxt\pard In the box.\par}}}", "a\n\nIn the box."),
    ],
)
def test_text(body, text):
    document, reasons = read(rf"\pard {body}\par")
    assert [line.strip() for line in document.text.splitlines()] == text.splitlines()
    assert reasons == []


FIELD = r"Paid: {\field{\*\fldinst %s {\*\formfield{%s}}}{\fldrslt }} today\par"


@pytest.mark.parametrize(
    ("kind", "data", "shown"),
    [
        ("FORMCHECKBOX", r"\fftype1\ffres1", "[x]"),
        ("FORMCHECKBOX", r"\fftype1\ffres0\ffdefres1", "[ ]"),
        ("FORMCHECKBOX", r"\fftype1\ffres25\ffdefres1", "[x]"),
        ("FORMDROPDOWN", r"\fftype2\ffres1{\*\ffl north}{\*\ffl south}", "south"),
    ],
)
def test_fields_of_forms(kind, data, shown):
    assert read(FIELD % (kind, data))[0].text == f"Paid: {shown} today"


def test_headings_lists_and_tables():
    number = r"{\listtext\pard %s\tab}\pard\ls1 %s\par"
    body = (
        r"\pard\s1 Scope\par\pard\s2 Fees\par"
        + "".join(number % entry for entry in (("1.", "Drain"), ("2.", "Close")))
        + r"\pard Wait.\par"
        + number % ("3.", "Open")
        + r"\pard{\pntext\f2\'b7\tab}bullet\par"
        + r"\trowd\cellx1\cellx2\pard\intbl Pier\cell Fee\cell\row"
        + r"\trowd\cellx1\cellx2\pard\intbl A\par B\cell 31\cell\row\pard End.\par"
    )
    document, _ = read(body)
    assert document.title == "Scope"
    assert [line for line in document.text.splitlines() if line] == [
        *("# Scope", "## Fees", "1. Drain", "2. Close", "Wait.", "3. Open", "- bullet"),
        *("| Pier | Fee |", "| --- | --- |", "| A B | 31 |", "End."),
    ]


def test_titles_headers_and_what_is_not_read():
    body = (
        r"{\info{\title Harbour rules}{\author Anna}}{\header\pard Revision 12\par}"
        r"{\footer Page {\field{\*\fldinst PAGE}{\fldrslt 7}}\par}\pard The fee.{\pict\pngblip 89504e47}{\v secret 99}\par"
    )
    document, reasons = read(body)
    assert (document.title, document.text) == ("Harbour rules", "Revision 12\n\nThe fee.")
    assert reasons == ["holds 1 picture, which is not read", "its hidden or deleted text is not read"]


def test_damaged_and_other_files():
    document, reasons = read(r"\pard The {\b fee is 31", HEAD)
    assert document.text == "The fee is 31"
    assert reasons == ["is damaged at its end"]
    for data, reason in ((b"text", "is not RTF"), (b"{\\rtf1 " + b"{" * 1000, "has groups that are nested too deeply")):
        _, (skipped,) = load_bytes("a.rtf", data)
        assert skipped.reason.startswith(reason)
