"""Files for `scripts/bench_readers`: documents of Word, written as its XML, which no library writes whole."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from _reader_contents import FILLER, Block, Bullets, Content, Form, Pairs, Picture, Running, Steps, Table
from _reader_packages import PIXEL, XML, packed

_OFFICE = "http://schemas.openxmlformats.org"
_R = f"{_OFFICE}/officeDocument/2006/relationships"
_DRAWING = f"{_OFFICE}/drawingml/2006"
_SPACES = " ".join(
    f'xmlns:{name}="{space}"'
    for name, space in {
        "w": f"{_OFFICE}/wordprocessingml/2006/main",
        "r": _R,
        "w14": "http://schemas.microsoft.com/office/word/2010/wordml",
        "wp": f"{_DRAWING}/wordprocessingDrawing",
        "a": f"{_DRAWING}/main",
        "pic": f"{_DRAWING}/picture",
    }.items()
)
_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml"
_BY_ANN = {"author": "Ann", "date": "2031-03-05T10:00:00Z"}
_RAISED = '<w:vertAlign w:val="superscript"/>'
_STYLES = {
    "Normal": "Normal", "Title": "Title", "Heading2": "heading 2", "Caption": "caption", "ListParagraph": "List Paragraph",
    "Header": "header", "Footer": "footer", "FootnoteText": "footnote text",
}  # fmt: skip


def _w(name: str, *inside: str, **attributes: object) -> str:
    """An element of Word's namespace."""
    words = "".join(f' w:{key}="{value}"' for key, value in attributes.items())
    content = "".join(inside)
    return f"<w:{name}{words}>{content}</w:{name}>" if content else f"<w:{name}{words}/>"


def _run(text: str, style: str = "", name: str = "t") -> str:
    properties = _w("rPr", style) if style else ""
    return _w("r", properties, f'<w:{name} xml:space="preserve">{escape(text)}</w:{name}>')


def _paragraph(inside: str, style: str = "", numbers: str = "") -> str:
    named = _w("pStyle", val=style) if style else ""
    return _w("p", _w("pPr", named, numbers), inside)


def _numbered(level: int, number: int) -> str:
    """The properties of a paragraph at this level of a list."""
    return _w("numPr", _w("ilvl", val=level), _w("numId", val=number))


def _grid(rows: Iterable[str], columns: int) -> str:
    """A table, and the empty paragraph behind it."""
    properties = _w("tblPr", _w("tblStyle", val="TableGrid"), _w("tblW", w=0, type="auto"))
    grid = _w("tblGrid", *[_w("gridCol", w=1800)] * columns)
    return _w("tbl", properties, grid, *rows) + _w("p")


def _cell(text: str, span: int = 1, merge: str = "") -> str:
    wide = _w("gridSpan", val=span) if span > 1 else ""
    return _w("tc", _w("tcPr", wide, merge), _paragraph(_run(text)))


def _table(block: Table) -> str:
    rows = []
    for level, heads in enumerate(block.header):
        cells = [_cell(label, span) for label, span in heads]
        if len(block.header) > 1:
            cells[0] = _cell(heads[0][0], 1, _w("vMerge") if level else _w("vMerge", val="restart"))
        rows.append(_w("tr", _w("trPr", _w("tblHeader")), *cells))
    rows += [_w("tr", *map(_cell, row)) for row in block.rows]
    name, number, text = block.caption.replace(":", " :", 1).split(" ", 2)
    field = _w("fldSimple", _run(number), instr=" SEQ Table ")
    return _paragraph(_run(f"{name} ") + field + _run(text), "Caption") + _grid(rows, len(block.rows[0]))


def _picture(block: Picture) -> str:
    size = '<a:ext cx="914400" cy="914400"/>'
    place = f'<a:xfrm><a:off x="0" y="0"/>{size}</a:xfrm><a:prstGeom prst="rect"><a:avLst/></a:prstGeom>'
    fill = '<pic:blipFill><a:blip r:embed="picture"/><a:stretch><a:fillRect/></a:stretch></pic:blipFill>'
    names = '<pic:nvPicPr><pic:cNvPr id="7" name="mast.png"/><pic:cNvPicPr/></pic:nvPicPr>'
    picture = f"<pic:pic>{names}{fill}<pic:spPr>{place}</pic:spPr></pic:pic>"
    graphic = f'<a:graphic><a:graphicData uri="{_DRAWING}/picture">{picture}</a:graphicData></a:graphic>'
    inline = f'<wp:extent cx="914400" cy="914400"/><wp:docPr id="7" name="Picture 7" descr="{block.alt}"/>{graphic}'
    drawing = _w("drawing", f"<wp:inline>{inline}</wp:inline>")
    return _paragraph(_w("r", drawing)) + _paragraph(_run(block.caption), "Caption")


def _box(ticked: bool, variant: int) -> str:
    """A box: a content control, or the field of older versions."""
    if variant:
        state = _w("ffData", _w("checkBox", _w("default", val=int(ticked))))
        begin = _w("r", _w("fldChar", state, fldCharType="begin"))
        return begin + _run(" FORMCHECKBOX ", name="instrText") + _w("r", _w("fldChar", fldCharType="end"))
    state = f'<w14:checkbox><w14:checked w14:val="{int(ticked)}"/></w14:checkbox>'
    return _w("sdt", _w("sdtPr", state), _w("sdtContent", _run("☒" if ticked else "☐")))


def _form(block: Form, variant: int) -> str:
    lines = [_paragraph(_box(ticked, variant) + _run(f" {label}")) for label, ticked in block.boxes]
    items = [_w("listItem", displayText=name, value=name) for name in block.choices]
    choice = _w("sdt", _w("sdtPr", _w("dropDownList", *items)), _w("sdtContent", _run(block.chosen)))
    return "".join([*lines, _paragraph(_run(f"{block.label}: ") + choice)])


class _Word:
    """The body of a document, and the other parts that it needs.

    variant: 0 writes fields with tabs, 1 in tables; 1 has numbers before headings, boxes of older versions, and its notes at
        the end.
    """

    def __init__(self, variant: int) -> None:
        self.variant = variant
        self.note = ("footnote", "endnote")[variant]
        self.notes: list[str] = []
        self.comments: list[str] = []
        self.links: list[str] = []
        self.running: dict[str, str] = {}
        self.starts: list[int] = []  # the first number of each numbered list

    def block(self, block: Block) -> str:
        """A part of the body."""
        match block:
            case Pairs(name="Fields") if self.variant:
                return _grid([_w("tr", *map(_cell, pair)) for pair in block.pairs], 2)
            case Pairs():
                write = getattr(self, f"_{block.name.lower()}", self._field)
                texts = [write(label, value) for label, value in block.pairs if not block.old]
                texts += [_edit(*pair, old) for pair, old in zip(block.pairs, block.old, strict=False)]
                return "".join(texts)
            case Running(_, name, text):
                self.running[name] = text
            case Table():
                return _table(block)
            case Steps(_, start, items):
                self.starts.append(start)
                numbers = _numbered(0, 2 + len(self.starts))
                return "".join(_paragraph(_run(item), "ListParagraph", numbers) for item in items)
            case Bullets(_, items):
                lines = [(0, name, values) for name, values in items]
                flat = [
                    (level, text)
                    for level, name, values in lines
                    for level, text in [(0, name), *((1, value) for value in values)]
                ]
                return "".join(_paragraph(_run(text), "ListParagraph", _numbered(level, 1)) for level, text in flat)
            case Form():
                return _form(block, self.variant)
            case Picture():
                return _picture(block)
        return ""

    def _field(self, label: str, value: str) -> str:
        return _paragraph(_run(f"{label}:", _w("b")) + _w("r", _w("tab")) + _run(value))

    def _sections(self, label: str, value: str) -> str:
        numbers = _numbered(0, 2) if self.variant else ""
        return _paragraph(_run(label), "Heading2", numbers) + _paragraph(_run(f"The quay is {value} cm long."))

    def _notes(self, label: str, value: str) -> str:
        self.notes.append(f"Measured as {value} last summer.")
        mark = _w("r", _w("rPr", _RAISED), _w(f"{self.note}Reference", id=len(self.notes)))
        return _paragraph(_run(f"The tide of {label}") + mark + _run(" is high."))

    def _comments(self, label: str, value: str) -> str:
        number = len(self.comments)
        self.comments.append(f"Ask for {value} first.")
        marked = _w("commentRangeStart", id=number) + _run(label) + _w("commentRangeEnd", id=number)
        return _paragraph(
            _run("The master of ") + marked + _w("r", _w("commentReference", id=number)) + _run(" comes.")
        )

    def _links(self, label: str, value: str) -> str:
        self.links.append(value)
        link = f'<w:hyperlink r:id="link{len(self.links)}">{_run(label)}</w:hyperlink>'
        return _paragraph(_run("See ") + link + _run("."))

    def _powers(self, label: str, value: str) -> str:
        base, power = value.split("^")
        return _paragraph(_run(f"{label}: {base}") + _run(power, _RAISED))

    def _code(self, label: str, value: str) -> str:
        font = _w("rFonts", ascii="Consolas", hAnsi="Consolas")
        return _paragraph(_run("[dock]", font)) + _paragraph(_run(f"{label} = {value}", font))

    def parts(self) -> dict[str, str]:
        """The parts beside the document, by the names of their files and relationships."""
        styles = [_w("style", _w("name", val=name), type="paragraph", styleId=key) for key, name in _STYLES.items()]
        styles[0] = styles[0].replace(" ", ' w:default="1" ', 1)
        styles.append(_w("style", _w("name", val="Table Grid"), type="table", styleId="TableGrid"))
        parts = {"styles": f"<w:styles {_SPACES}>{''.join(styles)}</w:styles>", "numbering": self._numbering()}
        for name, text in self.running.items():
            part, root = {"Head": ("header", "hdr"), "Foot": ("footer", "ftr")}[name]
            parts[part] = f"<w:{root} {_SPACES}>{_paragraph(_run(text), part.title())}</w:{root}>"
        if self.notes:
            lines = [(-1, "separator"), (0, "continuationSeparator")]
            notes = [_w(self.note, _w("p", _w("r", _w(name))), type=name, id=number) for number, name in lines]
            for number, text in enumerate(self.notes, 1):
                inside = _w("r", _w(f"{self.note}Ref")) + _run(f" {text}")
                notes.append(_w(self.note, _paragraph(inside, "FootnoteText"), id=number))
            parts[f"{self.note}s"] = f"<w:{self.note}s {_SPACES}>{''.join(notes)}</w:{self.note}s>"
        if self.comments:
            texts = enumerate(self.comments)
            comments = [_w("comment", _paragraph(_run(text)), id=number, **_BY_ANN) for number, text in texts]
            parts["comments"] = f"<w:comments {_SPACES}>{''.join(comments)}</w:comments>"
        return parts

    def _numbering(self) -> str:
        levels = [_level(0, "bullet", "•") + _level(1, "bullet", "o"), _level(0, "decimal", "§ %1")]
        levels += [_level(0, "decimal", "%1.", start) for start in self.starts]
        kinds = [_w("abstractNum", level, abstractNumId=place) for place, level in enumerate(levels)]
        lists = [_w("num", _w("abstractNumId", val=place), numId=place + 1) for place in range(len(levels))]
        return f"<w:numbering {_SPACES}>{''.join(kinds)}{''.join(lists)}</w:numbering>"


def _edit(label: str, value: str, old: str) -> str:
    """A tracked change."""
    deleted = _w("del", _run(old, name="delText"), id=old, **_BY_ANN)
    return _paragraph(_run(f"{label}: ") + deleted + _w("ins", _run(value), id=value, **_BY_ANN))


def _level(number: int, kind: str, text: str, start: int = 1) -> str:
    return _w("lvl", _w("start", val=start), _w("numFmt", val=kind), _w("lvlText", val=text), ilvl=number)


def docx(content: Content, variant: int) -> bytes:
    """A document of Word."""
    word = _Word(variant)
    body = [_paragraph(_run(content.title), "Title")]
    for number, block in enumerate(content.blocks):
        body += [_paragraph(_run(FILLER[number % len(FILLER)])), word.block(block)]
    parts = word.parts()
    pages = [f'<w:{part}Reference w:type="default" r:id="{part}"/>' for part in ("header", "footer") if part in parts]
    document = f"<w:document {_SPACES}>{_w('body', *body, _w('sectPr', *pages))}</w:document>"
    related = [(part, part, f"{part}.xml", "") for part in parts]
    related += [
        (f"link{number}", "hyperlink", url, ' TargetMode="External"') for number, url in enumerate(word.links, 1)
    ]
    related.append(("picture", "image", "media/mast.png", ""))
    types = [("document.main", "document"), *((part, part) for part in parts)]
    overrides = [f'<Override PartName="/word/{name}.xml" ContentType="{_TYPE}.{kind}+xml"/>' for kind, name in types]
    ends = {
        "rels": "application/vnd.openxmlformats-package.relationships+xml",
        "xml": "application/xml",
        "png": "image/png",
    }
    defaults = [f'<Default Extension="{end}" ContentType="{kind}"/>' for end, kind in ends.items()]
    content_types = f'<Types xmlns="{_OFFICE}/package/2006/content-types">{"".join(defaults + overrides)}</Types>'
    return packed([
        ("[Content_Types].xml", XML + content_types),
        ("_rels/.rels", _relationships([("main", "officeDocument", "word/document.xml", "")])),
        ("word/document.xml", XML + document),
        ("word/_rels/document.xml.rels", _relationships(related)),
        *((f"word/{part}.xml", XML + text) for part, text in parts.items()),
        ("word/media/mast.png", PIXEL),
    ])  # fmt: skip


def _relationships(related: Iterable[tuple[str, str, str, str]]) -> str:
    """Relationships of a part: (id, type, target, more attributes)."""
    entries = [
        f'<Relationship Id="{key}" Type="{_R}/{kind}" Target="{path}"{more}/>' for key, kind, path, more in related
    ]
    return f'{XML}<Relationships xmlns="{_OFFICE}/package/2006/relationships">{"".join(entries)}</Relationships>'
