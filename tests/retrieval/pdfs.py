"""PDFs written by hand."""

FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"


def stream(content, entries=b""):
    return b"<< /Length %d %s>>\nstream\n%s\nendstream" % (len(content), entries, content)


def pdf(contents, *objects, font=FONT, title="", catalog=b"", entries=b"", resources=b""):
    """A PDF with a page for each of the contents: a catalogue, pages, one font, a cross-reference table.

    objects: more of them; behind a single page their numbers start at 6. catalog, entries, resources: entries of the catalogue,
    of every page and of its resources.
    """
    numbers = range(4, 4 + 2 * len(contents), 2)
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R %s>>" % catalog,
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        font,
    ]
    for number, content in zip(numbers, contents, strict=True):
        page = (
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> %s>> %s>>"
        )
        bodies += [page % (number + 1, resources, entries), stream(content)]
    bodies += [*objects, f"<< /Title ({title}) >>".encode()]
    data, places = b"%PDF-1.7\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    tail = b"trailer << /Size %d /Root 1 0 R /Info %d 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    size = len(bodies) + 1
    return data + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + tail % (size, len(bodies), len(data))


def minimal_pdf(*texts, title=""):
    """A PDF with one line of text on each page."""
    return pdf([f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b"" for text in texts], title=title)


def written_at(*places):
    """The content of a page with texts at these places: (x, y, text)."""
    lines = [b"1 0 0 1 %g %g Tm (%s) Tj" % (x, y, text.encode("cp1252")) for x, y, text in places]
    return b"BT /F1 11 Tf %s ET" % b" ".join(lines)


def to_unicode(letters):
    """The map of a font from codes to letters: these codes, and ASCII as it is."""
    names = " ".join(f"<{code:02X}> <{ord(letter):04X}>" for code, letter in letters.items())
    return stream(
        f"begincmap 1 begincodespacerange <00> <FF> endcodespacerange {len(letters)} beginbfchar {names} endbfchar "
        "1 beginbfrange <20> <7E> <0020> endbfrange endcmap".encode()
    )


def in_letters(lines):
    """A PDF whose codes are these lines' letters from right to left, as programs write Hebrew and Arabic."""
    code = {letter: number for number, letter in enumerate(sorted(set("".join(lines)) - {" "}), 128)}
    widths = b"600 " * 256
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /AAAAAA+X /ToUnicode 6 0 R /FirstChar 0 /LastChar 255 /Widths [%s] >>"
    shown = [bytes(code.get(letter, ord(letter)) for letter in line[::-1]).hex() for line in lines]
    content = " ".join(f"1 0 0 1 300 {720 - 14 * n} Tm <{text}> Tj" for n, text in enumerate(shown))
    letters = {number: letter for letter, number in code.items()}
    return pdf([f"BT /F1 12 Tf {content} ET".encode()], to_unicode(letters), font=font % widths)
