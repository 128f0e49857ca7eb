"""OpenDocument texts and presentations."""

import pytest
from office_files import zipped_files

from blend_retrieval.loading import load_bytes

_OASIS = "urn:oasis:names:tc:opendocument:xmlns"
_NAMES = {name: f"{_OASIS}:{name}:1.0" for name in ("office", "text", "table", "style", "form", "presentation")}
_NAMES |= {
    "draw": f"{_OASIS}:drawing:1.0",
    "svg": f"{_OASIS}:svg-compatible:1.0",
    "xlink": "http://www.w3.org/1999/xlink",
}
_NAMES |= {"dc": "http://purl.org/dc/elements/1.1/"}
_XMLNS = " ".join(f'xmlns:{name}="{address}"' for name, address in _NAMES.items())


def open_document(body, kind="text", automatic="", styles="", **files):
    content = (
        f"<office:document-content {_XMLNS}><office:automatic-styles>{automatic}</office:automatic-styles>"
        f"<office:body><office:{kind}>{body}</office:{kind}></office:body></office:document-content>"
    )
    parts = {
        "content.xml": content,
        "styles.xml": f"<office:document-styles {_XMLNS}>{styles}</office:document-styles>",
    }
    return zipped_files(parts | {name.replace("__", "/"): text for name, text in files.items()})


def read(body, name="a.odt", **options):
    (document,), skipped = load_bytes(name, open_document(body, **options))
    lines = [line.strip() for line in document.text.splitlines() if line.strip()]
    return lines, [entry.reason for entry in skipped]


def level(depth, form, suffix=".", more="", kind="list-level-style-number"):
    return f'<text:{kind} text:level="{depth}" style:num-format="{form}" style:num-suffix="{suffix}" {more}/>'


LIST = f'<text:list-style style:name="L">{level(1, "1")}{level(2, "a", ")")}</text:list-style>'
BULLETS = '<text:list-style style:name="B"><text:list-level-style-bullet text:level="1"/></text:list-style>'


def item(*content, more=""):
    inner = "".join(part if part.startswith("<") else f"<text:p>{part}</text:p>" for part in content)
    return f"<text:list-item {more}>{inner}</text:list-item>"


def listed(*items, more='text:style-name="L"'):
    return f"<text:list {more}>{''.join(items)}</text:list>"


def test_lists_go_on_nest_and_start_anew():
    first = listed(item("Drain", listed(item("Pump"), item("Wait"), more="")), item("Close"))
    on = listed(
        item("Open"),
        item("Gate", more='text:start-value="7"'),
        more='text:style-name="L" text:continue-numbering="true"',
    )
    dotted = listed(item("dot"), more='text:style-name="B"')
    body = f"{first}<text:p>Pause.</text:p>{on}{listed(item('Anew'))}{dotted}"
    lines, reasons = read(body, automatic=LIST + BULLETS)
    assert lines == ["1. Drain", "a) Pump", "b) Wait", "2. Close", "Pause.", "3. Open", "7. Gate", "1. Anew", "- dot"]
    assert reasons == []


def test_titles_by_their_style():
    own = '<style:style style:name="P1" style:family="paragraph" style:parent-style-name="Title"/>'
    lines, _ = read('<text:p text:style-name="P1">Rules</text:p><text:p>Text.</text:p>', automatic=own)
    assert lines == ["# Rules", "Text."]


def test_headings_are_numbered():
    outline = f"<text:outline-style>{level(1, 'I', kind='outline-level-style')}"
    outline += level(2, "1", "", 'text:display-levels="2"', "outline-level-style") + "</text:outline-style>"
    heads = (("Scope", 1), ("Piers", 2), ("Fees", 1), ("Boats", 2))
    body = "".join(f'<text:h text:outline-level="{depth}">{text}</text:h>' for text, depth in heads)
    body += '<text:h text:outline-level="1" text:is-list-header="true">Annex</text:h>'
    lines, _ = read(body, styles=outline)
    assert lines == ["# I. Scope", "## I.1 Piers", "# II. Fees", "## II.1 Boats", "# Annex"]


def style(name, properties):
    return f'<style:style style:name="{name}" style:family="text"><style:text-properties {properties}/></style:style>'


STYLES = style("up", 'style:text-position="super 58%"') + style("down", 'style:text-position="-33% 58%"')
STYLES += style("power", "").replace("<style:style", '<style:style style:parent-style-name="up"')
STYLES += style("gone", 'text:display="none"') + style("old", 'style:text-line-through-style="solid"')


PICTURE = "holds 1 picture, which is not read"


def span(name, text):
    return f'<text:span text:style-name="{name}">{text}</text:span>'


@pytest.mark.parametrize(
    ("inside", "shown", "reasons"),
    [
        (f"10{span('up', '6')} H{span('down', '2')}O", "10^6^ H~2~O", []),
        (f"10{span('power', '7')}", "10^7^", []),
        (f"{span('old', '98')} 31", "~~98~~ 31", []),
        (f"31{span('gone', '99')}", "31", ["its hidden text is not read"]),
        ('a<text:s text:c="2"/>b<text:tab/>c<text:line-break/>d', "a b c d", []),
        (
            "31<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>Since 2019.</text:p>"
            "</text:note-body></text:note>",
            "31 [note: Since 2019.]",
            [],
        ),
        (
            "31<office:annotation><dc:creator>Orm</dc:creator><dc:date>2020</dc:date><text:p>Ask.</text:p></office:annotation>",
            "31 [comment by Orm: Ask.]",
            [],
        ),
        (
            '31<draw:frame><draw:image xlink:href="p.png"/><svg:title>The pier</svg:title></draw:frame>',
            "31[picture: The pier]",
            [PICTURE],
        ),
        ('31<draw:frame draw:decorative="true"><svg:desc>A</svg:desc></draw:frame>', "31", [PICTURE]),
        ("31<draw:frame><svg:desc>pier 4.jpg</svg:desc></draw:frame>", "31", [PICTURE]),
        (
            "<draw:g><svg:title>Piers</svg:title><draw:rect><svg:desc>Two &lt; 3</svg:desc>"
            "<text:p>4</text:p></draw:rect></draw:g>",
            "[picture: Piers][picture: Two < 3] 4",
            [],
        ),
        (
            "<draw:frame><draw:object/><svg:title>Fees</svg:title><svg:desc>12 to 31</svg:desc></draw:frame>",
            "[picture: Fees: 12 to 31]",
            ["holds 1 embedded object, which is not read"],
        ),
        (
            "<text:ruby><text:ruby-base>東</text:ruby-base><text:ruby-text>とう</text:ruby-text></text:ruby>",
            "東(とう)",
            [],
        ),
    ],
)
def test_what_stands_in_a_line(inside, shown, reasons):
    lines, named = read(f"<text:p>{inside}</text:p>", automatic=STYLES)
    assert (" ".join(lines), named) == (shown, reasons)


def test_forms():
    forms = (
        '<form:checkbox form:id="c1" form:label="Paid" form:current-state="checked"/>'
        '<form:checkbox form:id="c2" form:label="Open"/>'
        '<form:radio form:id="c3" form:label="A" form:current-selected="true"/>'
        '<form:listbox form:id="c4"><form:option form:label="north"/>'
        '<form:option form:label="south" form:current-selected="true"/></form:listbox>'
        '<form:text form:id="c5" form:current-value="31"/>'
    )
    controls = " ".join(f'<draw:control draw:control="c{number}"/>' for number in range(1, 6))
    lines, _ = read(f"<office:forms><form:form>{forms}</form:form></office:forms><text:p>{controls}</text:p>")
    assert lines == ["[x] Paid [ ] Open (x) A south 31"]


def test_tables_frames_and_formulas():
    cells = (f"<table:table-cell><text:p>{text}</text:p></table:table-cell>" for text in ("Pier", "Fee", "Tax"))
    merged = (
        '<table:table-cell table:number-columns-spanned="2"><text:p>A</text:p></table:table-cell><table:covered-table-cell/>'
        '<table:table-cell table:number-columns-repeated="1"><text:p>31</text:p></table:table-cell>'
    )
    table = (
        f"<table:table><table:table-header-rows><table:table-row>{''.join(cells)}</table:table-row></table:table-header-rows>"
        f"<table:table-row>{merged}</table:table-row></table:table>"
    )
    box = "<draw:frame><draw:text-box><text:p>In the box.</text:p></draw:text-box></draw:frame>"
    formula = '<draw:frame><draw:object xlink:href="./Object 1"/></draw:frame>'
    math = '<math xmlns="http://www.w3.org/1998/Math/MathML"><mfrac><mi>a</mi><mn>2</mn></mfrac></math>'
    lines, reasons = read(
        f"{table}<text:p>Text{box}</text:p><text:p>It is {formula}</text:p>", **{"Object 1__content.xml": math}
    )
    assert lines[0] == "| Pier | Fee | Tax |"
    assert "31" in lines[2].split("|")[3]
    assert lines[3:] == ["Text", "In the box.", "It is a/2"]
    assert reasons == []


def test_headers_footers_titles_and_deleted_text():
    page = (
        "<style:master-page><style:header><text:p>Revision 12</text:p></style:header><style:footer>"
        "<text:p>Page <text:page-number>7</text:page-number></text:p></style:footer></style:master-page>"
    )
    deleted = (
        "<text:tracked-changes><text:changed-region><text:deletion><text:p>old</text:p></text:deletion></text:changed-region>"
        "</text:tracked-changes>"
    )
    meta = (
        f"<office:document-meta {_XMLNS}><office:meta><dc:title>Rules</dc:title></office:meta></office:document-meta>"
    )
    data = open_document(f"{deleted}<text:p>New.</text:p>", styles=page, **{"meta.xml": meta})
    (document,), (skipped,) = load_bytes("a.odt", data)
    assert (document.title, document.text) == ("Rules", "Revision 12\n\nNew.")
    assert skipped.reason == "its deleted text (tracked changes) is not read"


def test_slides():
    slide = (
        '<draw:page><draw:frame presentation:class="title"><draw:text-box><text:p>Fees</text:p></draw:text-box></draw:frame>'
        "<draw:frame><draw:text-box><text:list><text:list-item><text:p>A is 31</text:p></text:list-item></text:list>"
        "</draw:text-box></draw:frame><draw:custom-shape><text:p>In a shape</text:p></draw:custom-shape>"
        '<presentation:notes><draw:frame presentation:class="notes"><draw:text-box><text:p>Say it twice.</text:p>'
        "</draw:text-box></draw:frame></presentation:notes></draw:page>"
    )
    lines, reasons = read(slide, name="a.odp", kind="presentation")
    assert (lines, reasons) == (["## Fees", "- A is 31", "In a shape", "Say it twice."], [])


def test_titles_of_slides_and_headers_keep_their_values():
    power = f"<text:p>10{span('up', '6')} &lt; <text:line-break/>{span('old', '98')}</text:p>"
    slide = f'<draw:page><draw:frame presentation:class="title"><draw:text-box>{power}</draw:text-box></draw:frame></draw:page>'
    assert read(slide, name="a.odp", kind="presentation", automatic=STYLES) == (["## 10^6^ < ~~98~~"], [])
    pages = f"<style:master-page><style:header>{power}</style:header></style:master-page>"
    other_styles = style("up", "") + style("old", "")
    lines, _ = read("<text:p>31</text:p>", automatic=other_styles, styles=STYLES + pages)
    assert " ".join(lines) == "10^6^ < ~~98~~ 31"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            zipped_files({"META-INF/manifest.xml": "<manifest:encryption-data/>"}),
            "is encrypted; save it without a password",
        ),
        (zipped_files({"mimetype": "x"}), "is no OpenDocument file: it has no content"),
        (b"PK nothing", "is damaged: it is no zip archive"),
    ],
)
def test_what_cannot_be_read(data, reason):
    for name in ("a.odt", "a.odp"):
        _, (skipped,) = load_bytes(name, data)
        assert skipped.reason == reason
