"""Files for `scripts/bench_readers`: a text and a sheet of OpenDocument."""

from __future__ import annotations

from collections.abc import Iterable

from _reader_contents import Block, Cell, Content, Pairs, Running, Sheet, Steps, Table
from _reader_packages import XML, packed

_URN = "urn:oasis:names:tc:opendocument:xmlns"
_SPACES = " ".join(f'xmlns:{name}="{_URN}:{name}:1.0"' for name in ("office", "text", "table", "style"))
_LIST = (
    '<text:list-style style:name="L"><text:list-level-style-number text:level="1" style:num-suffix="." '
    'style:num-format="1"/></text:list-style>'
)
_KINDS = {"0.0%": "percentage", "dd/mm/yyyy": "date", "[h]:mm": "time"}


def _package(kind: str, body: str, styles: str = "", running: str = "") -> bytes:
    """An archive of OpenDocument. running: headers and footers of its pages."""
    mime = f"application/vnd.oasis.opendocument.{kind}"
    root = f'{_SPACES} office:version="1.3"'
    inside = f"<office:automatic-styles>{styles}</office:automatic-styles><office:body>{body}</office:body>"
    page = f'<style:master-page style:name="Standard" style:page-layout-name="P">{running}</style:master-page>'
    pages = f"<office:master-styles>{page}</office:master-styles>"
    types = {"/": mime, "content.xml": "text/xml", "styles.xml": "text/xml"}
    entries = "".join(
        f'<manifest:file-entry manifest:full-path="{path}" manifest:media-type="{media}"/>'
        for path, media in types.items()
    )
    manifest = (
        f'<manifest:manifest xmlns:manifest="{_URN}:manifest:1.0" manifest:version="1.3">{entries}</manifest:manifest>'
    )
    files = {
        "content.xml": f"<office:document-content {root}>{inside}</office:document-content>",
        "styles.xml": f"<office:document-styles {root}>{pages}</office:document-styles>",
        "META-INF/manifest.xml": manifest,
    }
    return packed(((name, XML + text) for name, text in files.items()), mime)


def _paragraph(text: str) -> str:
    return f"<text:p>{text}</text:p>"


def _row(cells: Iterable[str]) -> str:
    return f"<table:table-row>{''.join(cells)}</table:table-row>"


def _cell(shown: str, attributes: str = 'office:value-type="string"') -> str:
    return f"<table:table-cell {attributes}>{_paragraph(shown)}</table:table-cell>"


def odt(content: Content, variant: int) -> bytes:
    """A text: fields, notes, a table, steps, sections, code, a header and a footer."""
    running = ""
    body = [f'<text:h text:outline-level="1">{content.title}</text:h>']
    for block in content.blocks:
        if isinstance(block, Running):
            name = {"Head": "header", "Foot": "footer"}[block.name]
            running += f"<style:{name}>{_paragraph(block.text)}</style:{name}>"
        else:
            body += _parts(block)
    return _package("text", f"<office:text>{''.join(body)}</office:text>", _LIST, running)


def _parts(block: Block) -> Iterable[str]:
    match block:
        case Table():
            rows = [[label for label, _ in block.header[0]], *block.rows]
            columns = f'<table:table-column table:number-columns-repeated="{len(rows[0])}"/>'
            lines = "".join(_row(map(_cell, row)) for row in rows)
            yield _paragraph(block.caption)
            yield f'<table:table table:name="T">{columns}{lines}</table:table>'
        case Steps(_, start, items):
            first = f'<text:list-item text:start-value="{start}">{_paragraph(items[0])}</text:list-item>'
            later = "".join(f"<text:list-item>{_paragraph(item)}</text:list-item>" for item in items[1:])
            yield f'<text:list text:style-name="L">{first}{later}</text:list>'
        case Pairs():
            for number, (label, value) in enumerate(block.pairs, 1):
                yield _pair(block.name, label, value, number)


def _pair(name: str, label: str, value: str, number: int) -> str:
    match name:
        case "Sections":
            return f'<text:h text:outline-level="2">{label}</text:h>' + _paragraph(f"The quay is {value} cm long.")
        case "Notes":
            body = f"<text:note-body>{_paragraph(f'Measured as {value} last summer.')}</text:note-body>"
            mark = f"<text:note-citation>{number}</text:note-citation>"
            note = f'<text:note text:id="n{number}" text:note-class="footnote">{mark}{body}</text:note>'
            return _paragraph(f"The tide of {label}{note} is high.")
        case "Code":
            return _paragraph(f"[dock]<text:line-break/>{label} = {value}")
    return _paragraph(f"{label}:<text:tab/>{value}")


def ods(contents: list[Sheet], number: int) -> bytes:
    """Sheets: each cell with its value, and with the text that a person sees."""
    tables = []
    for sheet in contents:
        header = [_cell(label) for heads in sheet.header for label, _ in heads]
        rows = [_row(header), *(_row(map(_sheet_cell, row)) for row in sheet.rows)]
        tables.append(f'<table:table table:name="{sheet.name}">{"".join(rows)}</table:table>')
    return _package("spreadsheet", f"<office:spreadsheet>{''.join(tables)}</office:spreadsheet>")


def _sheet_cell(cell: Cell) -> str:
    kind = _KINDS.get(cell.number_format, "string" if isinstance(cell.value, str) else "float")
    hours, _, minutes = cell.shown.partition(":")
    values = {
        "string": "",
        "date": f'office:date-value="{cell.value}"',
        "time": f'office:time-value="PT{hours}H{minutes}M00S"',
    }
    value = values.get(kind, f'office:value="{cell.value}"')
    return _cell(cell.shown, f'office:value-type="{kind}" {value}')
