"""Word files: numbers, forms, formulas and what stands around the text, as a person sees them."""

import pytest
from office_files import docx, paragraph, row, zipped_files

from blend_retrieval.loading import load_bytes

_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_NAMESPACES = (
    f'xmlns:w="{_WORD}" xmlns:r="{_OFFICE}" xmlns:w14="http://schemas.microsoft.com/office/word/2010/wordml" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" xmlns:v="urn:schemas-microsoft-com:vml" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"'
)


def word_file(body, **parts):
    """A Word file with these parts (the inside of their roots) beside its body."""
    roots = {"numbering": "numbering", "styles": "styles", "comments": "comments", "settings": "settings"}
    roots |= {"header": "hdr", "footer": "ftr", "footnotes": "footnotes"}
    links = "".join(f'<Relationship Id="{name}" Type="{_OFFICE}/{name}" Target="{name}.xml"/>' for name in parts)
    files = {
        "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}"><Relationship Id="r" Type="{_OFFICE}/officeDocument" '
        'Target="word/document.xml"/></Relationships>',
        "word/_rels/document.xml.rels": f'<Relationships xmlns="{_PACKAGE}">{links}</Relationships>',
        "word/document.xml": f"<w:document {_NAMESPACES}><w:body>{body}</w:body></w:document>",
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
    }
    for name, content in parts.items():
        files[f"word/{name}.xml"] = f"<w:{roots[name]} {_NAMESPACES}>{content}</w:{roots[name]}>"
    return zipped_files(files)


def read(body, **parts):
    (document,), skipped = load_bytes("a.docx", word_file(body, **parts))
    return document.text, [entry.reason for entry in skipped]


def level(depth, shown, kind="decimal", start=1, more=""):
    return (
        f'<w:lvl w:ilvl="{depth}"><w:start w:val="{start}"/><w:numFmt w:val="{kind}"/>{more}'
        f'<w:lvlText w:val="{shown}"/></w:lvl>'
    )


def numbering(*levels, number=1, more="", override=""):
    return (
        f'<w:abstractNum w:abstractNumId="{number}">{more}{"".join(levels)}</w:abstractNum>'
        f'<w:num w:numId="{number}"><w:abstractNumId w:val="{number}"/>{override}</w:num>'
    )


def item(text, depth=0, number=1, style=""):
    style = f'<w:pStyle w:val="{style}"/>' if style else ""
    listed = f'<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="{number}"/></w:numPr>' if number is not None else ""
    return f"<w:p><w:pPr>{style}{listed}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def lines(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_lists_go_on_nest_and_start_anew():
    levels = [level(0, "%1."), level(1, "%2)", "lowerLetter"), level(2, "%1.%3", "lowerRoman", 4)]
    items = (("Drain", 0), ("Pump", 1), ("Wait", 1), ("Look", 2), ("Close", 0), ("Turn", 1))
    body = (
        "".join(item(*entry) for entry in items[:3])
        + paragraph("A pause.")
        + "".join(item(*entry) for entry in items[3:])
    )
    text, reasons = read(body, numbering=numbering(*levels))
    expected = ["1. Drain", "a) Pump", "b) Wait", "A pause.", "1.iv Look", "2. Close", "a) Turn"]
    assert (lines(text), reasons) == (expected, [])


@pytest.mark.parametrize(
    ("kind", "shown", "start", "numbers"),
    [
        ("upperRoman", "Article %1", 9, ["Article IX", "Article X"]),
        ("upperLetter", "(%1)", 26, ["(Z)", "(AA)"]),
        ("decimalZero", "%1.", 9, ["09.", "10."]),
        ("ordinal", "%1", 22, ["22nd", "23rd"]),
        ("ordinalText", "%1", 20, ["Twentieth", "Twenty-first"]),
        ("cardinalText", "Part %1:", 1, ["Part One:", "Part Two:"]),
        ("none", "Note:", 1, ["Note:", "Note:"]),
        ("russianLower", "%1)", 2, ["б)", "в)"]),
        ("japaneseCounting", "%1、", 10, ["十、", "十一、"]),
        ("decimalEnclosedCircle", "%1", 3, ["③", "④"]),
        ("chicago", "%1", 4, ["§", "**"]),
    ],
)
def test_formats_of_numbers(kind, shown, start, numbers):
    text, reasons = read(item("first") + item("second"), numbering=numbering(level(0, shown, kind, start)))
    assert lines(text) == [f"{number} {word}" for number, word in zip(numbers, ("first", "second"), strict=True)]
    assert reasons == []


def test_an_unknown_format_is_named():
    text, (reason,) = read(item("first"), numbering=numbering(level(0, "%1.", "bahtText")))
    assert text == "1. first"
    assert reason == "has lists in the numerals bahtText, which are read as decimal numbers"


def test_headings_are_numbered_by_their_styles():
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{name}"><w:name w:val="{shown}"/>{more}</w:style>'
        for name, shown, more in (
            ("H1", "heading 1", '<w:pPr><w:numPr><w:numId w:val="1"/></w:numPr><w:outlineLvl w:val="0"/></w:pPr>'),
            ("H2", "heading 2", '<w:basedOn w:val="H1"/><w:pPr><w:outlineLvl w:val="1"/></w:pPr>'),
            ("Rule", "Rule", '<w:pPr><w:outlineLvl w:val="2"/></w:pPr>'),
        )
    )
    levels = [
        level(0, "%1.", "upperRoman", more='<w:pStyle w:val="H1"/>'),
        level(1, "%1.%2", more='<w:pStyle w:val="H2"/><w:isLgl/>'),
    ]
    body = "".join(
        item(text, number=None, style=style) for text, style in (("Scope", "H1"), ("Fees", "H1"), ("Boats", "H2"))
    )
    body += item("Own rule", number=None, style="Rule") + item("Annex", number=0, style="H1")
    text, _ = read(body, numbering=numbering(*levels), styles=styles)
    assert lines(text) == ["# I. Scope", "# II. Fees", "## 2.1 Boats", "### Own rule", "# Annex"]


def test_two_lists_of_one_definition_and_a_list_that_starts_over():
    second = '<w:num w:numId="2"><w:abstractNumId w:val="1"/></w:num>'
    third = (
        '<w:num w:numId="3"><w:abstractNumId w:val="1"/>'
        '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride></w:num>'
    )
    body = item("a") + item("b", number=2) + item("c", number=3) + item("d", number=3) + item("e", number=1)
    text, _ = read(body, numbering=numbering(level(0, "%1.")) + second + third)
    assert lines(text) == ["1. a", "2. b", "7. c", "8. d", "9. e"]


def test_levels_that_go_on_over_chapters_and_bullets():
    levels = [level(0, "Chapter %1"), level(1, "§ %2", more='<w:lvlRestart w:val="0"/>'), level(2, "-", "bullet")]
    body = "".join(item(f"t{place}", depth) for place, depth in enumerate((0, 1, 1, 2, 0, 1)))
    text, _ = read(body, numbering=numbering(*levels))
    assert lines(text) == ["Chapter 1 t0", "§ 1 t1", "§ 2 t2", "- t3", "Chapter 2 t4", "§ 3 t5"]


def test_numbers_of_deleted_paragraphs_are_not_counted():
    gone = "<w:p><w:pPr><w:numPr><w:ilvl w:val='0'/><w:numId w:val='1'/></w:numPr><w:rPr><w:del/></w:rPr></w:pPr><w:del><w:r>"
    gone += "<w:delText>old</w:delText></w:r></w:del></w:p>"
    text, reasons = read(item("a") + gone + item("b"), numbering=numbering(level(0, "%1.")))
    assert lines(text) == ["1. a", "2. b"]
    assert reasons == ["its deleted text (tracked changes) is not read"]


def run(text):
    return f"<w:r><w:t xml:space='preserve'>{text}</w:t></w:r>"


def control(properties, content):
    return f"<w:sdt><w:sdtPr>{properties}</w:sdtPr><w:sdtContent>{content}</w:sdtContent></w:sdt>"


def form(data, instruction, result=""):
    return (
        f'<w:r><w:fldChar w:fldCharType="begin"><w:ffData>{data}</w:ffData></w:fldChar></w:r>'
        f'<w:r><w:instrText> {instruction} </w:instrText></w:r><w:r><w:fldChar w:fldCharType="separate"/></w:r>'
        f'{run(result)}<w:r><w:fldChar w:fldCharType="end"/></w:r>'
    )


def box(state):
    return f'<w14:checkbox><w14:checked w14:val="{state}"/></w14:checkbox>'


ENTRIES = "".join(f'<w:listEntry w:val="{name}"/>' for name in ("north", "south"))


@pytest.mark.parametrize(
    ("inside", "shown"),
    [
        (control(box(1), run("☒")), "[x]"),
        (control(box("true"), "<w:r><w:sym w:font='Wingdings' w:char='F0FE'/></w:r>"), "[x]"),
        (control(box(0), run("☐")), "[ ]"),
        (control("<w14:checkbox/>", run("☐")), "[ ]"),
        (form('<w:checkBox><w:default w:val="1"/></w:checkBox>', "FORMCHECKBOX"), "[x]"),
        (form('<w:checkBox><w:default w:val="1"/><w:checked w:val="0"/></w:checkBox>', "FORMCHECKBOX"), "[ ]"),
        (form("<w:checkBox><w:checked/></w:checkBox>", "FORMCHECKBOX"), "[x]"),
        (form(f'<w:ddList><w:result w:val="1"/>{ENTRIES}</w:ddList>', "FORMDROPDOWN"), "south"),
        (form(f"<w:ddList>{ENTRIES}</w:ddList>", "FORMDROPDOWN"), "north"),
        (form("<w:textInput/>", "FORMTEXT", "31 crowns"), "31 crowns"),
        (control(f"<w:dropDownList>{ENTRIES}</w:dropDownList>", run("south")), "south"),
        (control("<w:date/>", run("3 May 2020")), "3 May 2020"),
        ('<w:fldSimple w:instr="SEQ Table"><w:r><w:t>4</w:t></w:r></w:fldSimple>', "4"),
        ('<w:bdo w:val="rtl"><w:r><w:t>31</w:t></w:r></w:bdo>', "31"),
    ],
)
def test_forms_and_fields(inside, shown):
    assert read(f"<w:p>{run('Paid: ')}{inside}{run(' today')}</w:p>") == (f"Paid: {shown} today", [])


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        ("<m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f>", "It is (a+b)/2"),
        ("<m:sSup><m:e><m:r><m:t>10</m:t></m:r></m:e><m:sup><m:r><m:t>6</m:t></m:r></m:sup></m:sSup>", "It is 10^6"),
        ("<m:rad><m:radPr><m:degHide/></m:radPr><m:deg/><m:e><m:r><m:t>2</m:t></m:r></m:e></m:rad>", "It is √(2)"),
        (
            "<m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr><m:sub><m:r><m:t>i=1</m:t></m:r></m:sub><m:sup><m:r><m:t>n</m:t>"
            "</m:r></m:sup><m:e><m:r><m:t>i</m:t></m:r></m:e></m:nary>",
            "It is ∑_(i=1)^n i",
        ),
        (
            "<m:d><m:dPr><m:begChr m:val='['/><m:endChr m:val=']'/></m:dPr><m:e><m:r><m:t>x</m:t></m:r></m:e></m:d>",
            "It is [x]",
        ),
    ],
)
def test_formulas_in_one_line(formula, text):
    assert read(f"<w:p>{run('It is ')}<m:oMath>{formula}</m:oMath></w:p>") == (text, [])


def test_what_stands_around_the_text():
    page = form("", "PAGE", "7")
    header = f"<w:p>{run('Revision 12')}</w:p><w:p>{run('Page ')}{page}</w:p>"
    footer = f"<w:tbl>{row('Harbour office', 'Pier 4')}</w:tbl>"
    comment = f'<w:comment w:id="3" w:author="Anna"><w:p>{run("Ask Orm.")}</w:p></w:comment>'
    section = (
        '<w:sectPr><w:headerReference w:type="default" r:id="header"/><w:footerReference r:id="footer"/></w:sectPr>'
    )
    body = f"<w:p>{run('Fees are 31.')}<w:r><w:commentReference w:id='3'/></w:r></w:p>{section}"
    text, reasons = read(body, header=header, footer=footer, comments=comment)
    assert lines(text) == ["Revision 12", "Fees are 31. [comment by Anna: Ask Orm.]", "Harbour office | Pier 4"]
    assert reasons == []


def test_text_boxes_are_read_once():
    box_text = f"<w:txbxContent><w:p>{run('In the box.')}</w:p></w:txbxContent>"
    new = f"<mc:Choice Requires='wps'><w:drawing><wps:wsp><wps:txbx>{box_text}</wps:txbx></wps:wsp></w:drawing></mc:Choice>"
    old = f"<mc:Fallback><w:pict><v:oval><v:textbox>{box_text}</v:textbox></v:oval></w:pict></mc:Fallback>"
    for alternatives in (new, new + old):
        content = f"<mc:AlternateContent>{alternatives}</mc:AlternateContent>"
        assert lines(read(f"<w:p>{run('Before.')}<w:r>{content}</w:r></w:p>")[0]) == ["Before.", "In the box."]


def test_what_is_not_read_is_named():
    hidden = "<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>secret</w:t></w:r></w:p>"
    chart = "<w:p><w:r><w:drawing><c:chart xmlns:c='http://schemas.openxmlformats.org/drawingml/2006/chart'/></w:drawing></w:r></w:p>"
    symbol = "<w:p><w:r><w:sym w:font='Odd' w:char='F0AA'/></w:r></w:p>"
    text, reasons = read(paragraph("Text.") + hidden + chart + symbol + "<w:altChunk r:id='x'/>")
    assert text == "Text."
    assert reasons[:2] == ["holds 1 chart, which is not read", "its hidden text is not read"]
    assert "char F0AA in font Odd" in reasons[2]
    assert reasons[3] == "is of a kind that is not read"


def test_numbers_that_are_typed_stay_as_they_are():
    (document,), _ = load_bytes("a.docx", docx(paragraph("1. Drain.") + paragraph("12) Close.")))
    assert lines(document.text) == ["1. Drain.", "12) Close."]
