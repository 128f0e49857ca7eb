"""PDFs written by hand."""


def minimal_pdf(*pages, title=None):
    """A PDF by hand: a catalogue, pages with one line of text each, one font, a cross-reference table."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(pages)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, text in enumerate(pages):
        page = (
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(page % (5 + 2 * index))
        objects.append(stream(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b""))
    if title is None:
        return pdf_of(*objects)
    return pdf_of(*objects, f"<< /Title ({title}) >>".encode(), info=b" /Info %d 0 R" % (len(objects) + 1))


FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"


def stream(content, entries=b""):
    return b"<< /Length %d %s>>\nstream\n%s\nendstream" % (len(content), entries, content)


def one_page_pdf(content, *objects, font=FONT, catalog=b"", entries=b""):
    """A PDF of one page. objects: more of them, from number 6 on. catalog, entries: of the catalogue and the page."""
    return pdf_of(
        b"<< /Type /Catalog /Pages 2 0 R %s>>" % catalog,
        b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
        font,
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 5 0 R /Resources << /Font << /F1 3 0 R >> >> %s>>"
        % entries,
        stream(content),
        *objects,
    )


def pdf_of(*objects, info=b""):
    data, places = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    tail = b"trailer << /Size %d /Root 1 0 R%s >>\nstartxref\n%d\n%%%%EOF\n" % (size, info, len(data))
    return data + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + tail


def written_at(*places):
    """The content of a page with texts at these places: (x, y, text)."""
    lines = [b"1 0 0 1 %g %g Tm (%s) Tj" % (x, y, text.encode("cp1252")) for x, y, text in places]
    return b"BT /F1 11 Tf %s ET" % b" ".join(lines)


def in_letters(lines):
    """A PDF whose codes are these lines' letters from right to left, as programs write Hebrew and Arabic."""
    letters = sorted({letter for line in lines for letter in line if not letter.isascii()})
    code = {letter: 128 + number for number, letter in enumerate(letters)}
    names = " ".join(f"<{code[letter]:02X}> <{ord(letter):04X}>" for letter in letters)
    to_unicode = (
        f"begincmap 1 begincodespacerange <00> <FF> endcodespacerange {len(letters)} beginbfchar {names} endbfchar "
        "1 beginbfrange <20> <7E> <0020> endbfrange endcmap"
    )
    widths = b"600 " * 256
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /AAAAAA+X /ToUnicode 6 0 R /FirstChar 0 /LastChar 255 /Widths [%s] >>"
    shown = [bytes(code.get(letter, ord(letter)) for letter in line[::-1]).hex() for line in lines]
    content = " ".join(f"1 0 0 1 300 {720 - 14 * n} Tm <{text}> Tj" for n, text in enumerate(shown))
    return one_page_pdf(f"BT /F1 12 Tf {content} ET".encode(), stream(to_unicode.encode()), font=font % widths)
