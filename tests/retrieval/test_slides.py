"""Slides: raised, lowered and struck-through text, numbers of lists, formulas, and texts of pictures."""

import io
import zipfile
from copy import deepcopy

import pytest
from pptx import Presentation
from pptx.util import Inches

from blend_retrieval.loading import load_bytes

_MAIN = "http://schemas.openxmlformats.org/drawingml/2006/main"
_SLIDE = "http://schemas.openxmlformats.org/presentationml/2006/main"
_MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
_DRAWING = "http://schemas.microsoft.com/office/drawing"
_COMPATIBLE = "http://schemas.openxmlformats.org/markup-compatibility/2006"
PIXEL = bytes.fromhex("4749463839610100010080000000000000000021f90401000000002c00000000010001000002024401003b")  # a GIF


def body(*paragraphs, styles="", name="p:txBody"):
    spaces = f'xmlns:a="{_MAIN}" xmlns:p="{_SLIDE}" xmlns:m="{_MATH}" xmlns:a14="{_DRAWING}/2010/main"'
    return f"<{name} {spaces}><a:bodyPr/><a:lstStyle>{styles}</a:lstStyle>{''.join(paragraphs)}</{name}>"


def run(text, look=""):
    return f"<a:r><a:rPr {look}/><a:t>{text}</a:t></a:r>"


def paragraph(*content, bullet="", level=0):
    return f'<a:p><a:pPr lvl="{level}">{bullet}</a:pPr>{"".join(content)}</a:p>'


def numbered(kind="arabicPeriod", start=1):
    first = f'startAt="{start}"' if start > 1 else ""
    return f'<a:buAutoNum type="{kind}" {first}/>'


def item(text, bullet, level=0):
    return paragraph(run(text), bullet=bullet, level=level)


def put(shape, xml):
    """Give a shape this text."""
    from pptx.oxml import parse_xml

    shape.element.replace(shape.element.txBody, parse_xml(xml))


def read(deck):
    data = io.BytesIO()
    deck.save(data)
    (document,), skipped = load_bytes("a.pptx", data.getvalue())
    return document.text, [entry.reason for entry in skipped]


def read_box(*paragraphs, styles=""):
    deck = Presentation()
    box = deck.slides.add_slide(deck.slide_layouts[6]).shapes.add_textbox(0, 0, Inches(4), Inches(1))
    put(box, body(*paragraphs, styles=styles))
    text, reasons = read(deck)
    return text.splitlines(), reasons


POWER = "<m:e><m:r><m:t>10</m:t></m:r></m:e><m:sup><m:r><m:t>6</m:t></m:r></m:sup>"
FORMULA = f"<a14:m><m:oMath><m:sSup>{POWER}</m:sSup></m:oMath></a14:m>"
RAISED, LOWERED, STRUCK = 'baseline="30000"', 'baseline="-25000"', 'strike="sngStrike"'


@pytest.mark.parametrize(
    ("content", "styles", "shown"),
    [
        (run("7.5·10") + run("1", RAISED) + run(" m"), "", "7.5·10^1^ m"),
        (run("10") + run("-", RAISED) + run("12", 'baseline="30%"') + run(" s"), "", "10^-12^ s"),
        (run("H") + run("2", LOWERED) + run("O"), "", "H~2~O"),
        (run("Fee: ") + run("98 ", STRUCK) + run("31"), "", "Fee: ~~98~~ 31"),
        (run("4") + run("5", f'{RAISED} strike="dblStrike"') + run("6"), "", "4^~~5~~^6"),
        (run("a", 'baseline="0" strike="noStrike"') + run("b"), "", "ab"),
        (run("10") + run("6"), f"<a:lvl1pPr><a:defRPr {STRUCK}/></a:lvl1pPr>", "~~106~~"),
        (run("10") + run("6", 'strike="noStrike"'), f"<a:lvl1pPr><a:defRPr {STRUCK}/></a:lvl1pPr>", "~~10~~6"),
        (run("about ") + FORMULA + run(" m"), "", "about 10^6 m"),
    ],
)
def test_text_keeps_its_value(content, styles, shown):
    assert read_box(paragraph(content), styles=styles) == ([shown], [])


def look_as(element, text, **look):
    """Give the run of this text these properties."""
    (run_element,) = element.xpath(f".//a:r[a:t='{text}']")
    for name, value in look.items():
        run_element.get_or_add_rPr().set(name, value)


def test_titles_cells_and_notes_keep_their_values():
    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    power = paragraph(run("10"), run("6", RAISED))
    put(slide.shapes.title, body(power))
    table = slide.shapes.add_table(2, 1, 0, Inches(3), Inches(4), Inches(1)).table
    table.cell(0, 0).text = "Fee"
    table.cell(1, 0).text_frame.text = "10"
    table.cell(1, 0).text_frame.paragraphs[0].add_run().text = "7"
    notes = slide.notes_slide.notes_text_frame.paragraphs[0]
    notes.add_run().text = "not 10"
    look_as(slide.shapes[1].element, "7", baseline="30000")
    look_as(slide.notes_slide.notes_placeholder.element, "not 10", strike="sngStrike")
    assert read(deck)[0] == "## 10^6^\n\n| Fee |\n| --- |\n| 10^7^ |\n\n~~not 10~~"


FIVE, LETTER, ROMAN = numbered(start=5), numbered("alphaLcParenR"), numbered("romanUcPeriod")


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        ([("A", FIVE, 0), ("B", FIVE, 0)], ["5. A", "6. B"]),
        ([("A", ROMAN, 0), ("B", LETTER, 1), ("C", LETTER, 1), ("D", ROMAN, 0), ("E", LETTER, 1)],
         ["I. A", "a) B", "b) C", "II. D", "a) E"]),
        ([("A", numbered(), 0), ("B", "<a:buNone/>", 1), ("C", numbered(), 0)], ["1. A", "B", "2. C"]),
        ([("A", numbered(), 0), ("B", '<a:buChar char="•"/>', 0), ("C", numbered(), 0)], ["1. A", "B", "1. C"]),
        ([("A", numbered(), 0), ("", numbered(), 0), ("C", numbered(), 0)], ["1. A", "2. C"]),
        ([("A", numbered(), 0), ("B", LETTER, 0), ("C", FIVE, 0)], ["1. A", "a) B", "5. C"]),
        ([("A", numbered(), 0), ("B", FIVE, 0), ("C", FIVE, 0)], ["1. A", "5. B", "6. C"]),
    ],
)  # fmt: skip
def test_lists_go_on_nest_and_start_anew(items, shown):
    assert read_box(*(item(*entry) for entry in items)) == (shown, [])


@pytest.mark.parametrize(
    ("kind", "shown", "named"),
    [
        ("arabicParenBoth", "(3) A", False),
        ("arabicPlain", "3 A", False),
        ("alphaUcPeriod", "C. A", False),
        ("romanLcParenR", "iii) A", False),
        ("circleNumWdWhitePlain", "③ A", False),
        ("ea1ChsPeriod", "三. A", False),
        ("arabicDbPlain", "３ A", False),
        ("thaiAlphaPeriod", "3. A", True),
    ],
)
def test_kinds_of_numbers(kind, shown, named):
    reason = f"has lists in the numerals {kind}, which are read as decimal numbers"
    assert read_box(item("A", numbered(kind, 3))) == ([shown], [reason] * named)


def test_numbers_that_a_layout_gives():
    deck = Presentation()
    layout = deck.slide_layouts[1]
    level = f"<a:lvl1pPr>{numbered('alphaUcParenR')}</a:lvl1pPr>"
    put(layout.placeholders[1], body("<a:p/>", styles=level))
    slide = deck.slides.add_slide(layout)
    put(slide.placeholders[1], body(paragraph(run("Drain")), paragraph(run("Note"), bullet="<a:buNone/>")))
    slide.shapes.add_textbox(0, Inches(6), 1, 1).text_frame.text = "Beside"
    assert read(deck)[0].split() == ["A)", "Drain", "Note", "Beside"]


def properties(shape, **attributes):
    """Set properties of a shape such as its description."""
    (element,) = shape.element.xpath(".//p:cNvPr[not(ancestor::p:cNvPr)]")[:1]
    for name, text in attributes.items():
        element.set(name, text)
    return element


@pytest.mark.parametrize(
    ("attributes", "shown"),
    [
        ({"descr": "Mast at Orm,\n31 cm"}, "[picture: Mast at Orm, 31 cm]"),
        ({"title": "Mast", "descr": "31 cm"}, "[picture: Mast: 31 cm]"),
        ({"descr": "A picture containing sky"}, "[picture: A picture containing sky]"),
        ({"descr": "old mast.PNG"}, ""),
        ({"descr": "Picture 3", "name": "Picture 3"}, ""),
        ({"descr": ""}, ""),
    ],
)
def test_texts_of_pictures(attributes, shown):
    deck = Presentation()
    shapes = deck.slides.add_slide(deck.slide_layouts[6]).shapes
    shapes.add_textbox(0, 0, 1, 1).text_frame.text = "Above"
    properties(shapes.add_picture(io.BytesIO(PIXEL), 0, Inches(1)), **attributes)
    shapes.add_textbox(0, Inches(2), 1, 1).text_frame.text = "Below"
    assert read(deck)[0].split("\n\n") == ["Above", *filter(None, [shown]), "Below"]


def test_texts_of_shapes_and_groups_but_not_of_decoration():
    from pptx.oxml import parse_xml

    deck = Presentation()
    shapes = deck.slides.add_slide(deck.slide_layouts[6]).shapes
    group = shapes.add_group_shape()
    properties(group, descr="Both piers")
    properties(group.shapes.add_picture(io.BytesIO(PIXEL), 0, 0), descr="North pier")
    decoration = properties(group.shapes.add_picture(io.BytesIO(PIXEL), 0, 0), descr="Waves")
    mark = f'<adec:decorative xmlns:adec="{_DRAWING}/2017/decorative" val="1"/>'
    decoration.append(parse_xml(f'<a:extLst xmlns:a="{_MAIN}"><a:ext uri="x">{mark}</a:ext></a:extLst>'))
    text, reasons = read(deck)
    assert text == "[picture: Both piers]\n\n[picture: North pier]"
    assert reasons == ["holds no text, only pictures; run it through OCR"]


def test_shapes_that_only_new_versions_know():
    from pptx.oxml import parse_xml

    deck = Presentation()
    shapes = deck.slides.add_slide(deck.slide_layouts[6]).shapes
    put(shapes.add_textbox(0, 0, 1, 1), body(paragraph(run("Volume: "), FORMULA)))
    shape = shapes[0].element
    only_new = parse_xml(
        f'<mc:AlternateContent xmlns:mc="{_COMPATIBLE}"><mc:Choice/><mc:Choice/></mc:AlternateContent>'
    )
    shape.addprevious(only_new)
    only_new[1].append(deepcopy(shape))
    only_new[0].append(shape)
    assert read(deck) == ("Volume: 10^6", [])
    frame = shapes.add_table(1, 1, 0, 0, 1, 1).element
    frame.graphic.graphicData.set("uri", "http://schemas.microsoft.com/office/drawing/2014/chartex")
    only_new[0].append(frame)
    assert read(deck) == ("Volume: 10^6", ["holds a diagram, which is not read"])


@pytest.mark.parametrize("part", ["ppt/slides/slide2.xml", "ppt/slides/_rels/slide2.xml.rels"])
def test_a_slide_that_is_missing_takes_no_other_with_it(part):
    deck = Presentation()
    for number in range(3):
        deck.slides.add_slide(deck.slide_layouts[5]).shapes.title.text = f"The code is 44{number}."
    whole, cut = io.BytesIO(), io.BytesIO()
    deck.save(whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(cut, "w") as target:
        for name in source.namelist():
            if name != part:
                target.writestr(name, source.read(name))
    loaded = load_bytes("a.pptx", cut.getvalue())
    assert loaded.documents[0].text == "## The code is 440.\n\n## The code is 442."
    (skipped,) = loaded.skipped
    assert "slide 2" in skipped.source
    assert "is missing" in skipped.reason
