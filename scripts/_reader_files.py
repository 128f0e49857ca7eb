"""Files for `scripts/bench_readers`: the kinds that are written as text. A file and its facts are the same on every machine."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from email import policy
from email.message import EmailMessage
from html import escape
from typing import NamedTuple

from _reader_contents import (
    DOCUMENTS,
    FILLER,
    Block,
    Bullets,
    Content,
    Form,
    Pairs,
    Picture,
    Running,
    Sheet,
    Steps,
    Table,
    sheets,
)  # fmt: skip
from _reader_facts import Fact
from _reader_packages import packed


class ReaderFile(NamedTuple):
    """A file and the facts that it states."""

    name: str
    data: bytes
    facts: list[Fact]


def reader_files() -> list[ReaderFile]:
    """60 files, each with 20 facts."""
    from _reader_odf import ods, odt
    from _reader_office import pptx, xlsx
    from _reader_pdf import pdf
    from _reader_word import docx

    documents: list[tuple[str, int, Callable[[Content, int], bytes]]] = [
        ("html", 8, html), ("docx", 8, docx), ("pdf", 8, pdf), ("pptx", 4, pptx), ("epub", 4, epub), ("eml", 5, eml),
        ("rst", 4, rst), ("md", 4, markdown), ("txt", 1, txt), ("ipynb", 1, ipynb), ("odt", 1, odt),
    ]  # fmt: skip
    tables: list[tuple[str, int, Callable[[list[Sheet], int], bytes]]] = [
        ("xlsx", 6, xlsx), ("csv", 4, comma_separated), ("tsv", 1, tab_separated), ("ods", 1, ods),
    ]  # fmt: skip
    files: list[ReaderFile] = []
    for kind, count, write in documents:
        for number in range(count):
            content = DOCUMENTS[number % 4](100 * len(files) + number)
            files.append(ReaderFile(f"{kind}{number}.{kind}", write(content, number // 4), content.facts))
    for kind, count, write_sheets in tables:
        for number in range(count):
            contents = sheets(number) if kind == "xlsx" else [_one_sheet(number, kind)]
            facts = [fact for sheet in contents for fact in sheet.facts]
            files.append(ReaderFile(f"{kind}{number}.{kind}", write_sheets(contents, number), facts))
    return files


def _one_sheet(number: int, kind: str) -> Sheet:
    """A sheet for a file that holds one: of numbers, or of what people see."""
    [sheet, *_] = sheets((0, 3, 5, 3)[number], comma=kind == "csv" and number % 2 == 0)
    return sheet


class Html:
    """Content as HTML that is XML, too. variant: 0 as word processors save it, 1 as pages are written by hand."""

    def __init__(self, variant: int, mark: str = "") -> None:
        self.variant = variant
        self.mark = mark  # an attribute of marks of notes
        self.notes: list[tuple[str, str]] = []

    def body(self, content: Content) -> str:
        """The content of the element body."""
        parts = [f"<h1>{content.title}</h1>"]
        for number, block in enumerate(content.blocks):
            parts += [f"<p>{FILLER[number % len(FILLER)]}</p>", self.block(block)]
        if self.notes:
            items = "".join(f'<li id="fn{number}">{text}</li>' for number, (_, text) in enumerate(self.notes, 1))
            parts.append(f'<section class="footnotes"><hr/><ol>{items}</ol></section>')
        return "\n".join(parts)

    def block(self, block: Block) -> str:
        match block:
            case Pairs():
                return "\n".join(self.pairs(block))
            case Running(_, name, text):
                tag = {"Head": "header", "Foot": "footer"}[name]
                return f"<{tag}><p>{text}</p></{tag}>"
            case Table():
                return self.table(block)
            case Steps(_, start, items):
                return self.steps(start, items)
            case Bullets(_, items):
                inner = [(name, "".join(f"<li>{value}</li>" for value in values)) for name, values in items]
                return f"<ul>{''.join(f'<li>{name}<ul>{values}</ul></li>' for name, values in inner)}</ul>"
            case Form():
                return self.form(block)
            case Picture(_, caption, alt):
                return f'<figure><img src="mast.png" alt="{alt}"/><figcaption>{caption}</figcaption></figure>'
        raise TypeError(type(block))

    def pairs(self, block: Pairs) -> Iterable[str]:
        for number, (label, value) in enumerate(block.pairs):
            value = escape(value)
            match block.name:
                case "Fields" if self.variant:
                    yield f"<dl><dt>{label}</dt><dd>{value}</dd></dl>"
                case "Sections":
                    yield f"<h2>{label}</h2>\n<p>The quay is {value} cm long.</p>"
                case "Notes":
                    self.notes.append((label, f"Measured as {value} last summer."))
                    place = len(self.notes)
                    link = f'<a href="#fn{place}" {self.mark}>{place}</a>'
                    yield f"<p>The tide of {label}<sup>{link}</sup> is high.</p>"
                case "Comments":
                    yield f"<details><summary>{label}</summary><p>Ask for {value} first.</p></details>"
                case "Links":
                    yield f'<p>See <a href="{value}">{label}</a>.</p>'
                case "Edits":
                    yield f"<p>{label}: <del>{block.old[number]}</del><ins>{value}</ins></p>"
                case "Powers":
                    base, power = value.split("^")
                    yield f"<p>{label}: {base}<sup>{power}</sup></p>"
                case "Code":
                    yield f"<pre><code>[dock]\n{label} = {value}\n</code></pre>"
                case _:
                    yield f"<p><b>{label}:</b> {value}</p>"

    def table(self, block: Table) -> str:
        rows = []
        for level, cells in enumerate(block.header):
            heads = [
                f'<th{f" colspan={chr(34)}{span}{chr(34)}" if span > 1 else ""}>{label}</th>'
                for label, span in cells if label or self.variant
            ]  # fmt: skip
            if len(block.header) > 1 and not level and not self.variant:
                heads[0] = heads[0].replace("<th", '<th rowspan="2"')
            rows.append(f"<tr>{''.join(heads)}</tr>")
        head = "\n".join(rows)
        tag = "th" if self.variant else "td"
        body = "\n".join(
            f"<tr><{tag}>{row[0]}</{tag}>{''.join(f'<td>{value}</td>' for value in row[1:])}</tr>" for row in block.rows
        )
        if self.variant:
            return f"<table><caption>{block.caption}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
        return f"<p>{block.caption}</p><table>{head}\n{body}</table>"

    def steps(self, start: int, items: Sequence[str]) -> str:
        if self.variant:
            lines = "".join(f'<li value="{number}"><p>{item}</p></li>' for number, item in enumerate(items, start))
            return f"<ol>{lines}</ol>"
        return f'<ol start="{start}">{"".join(f"<li>{item}</li>" for item in items)}</ol>'

    def form(self, block: Form) -> str:
        lines = []
        for label, ticked in block.boxes:
            state = ' checked="checked"' if ticked else ""
            lines.append(f'<p><label><input type="checkbox"{state}/> {label}</label></p>')
        marks = [' selected="selected"' if name == block.chosen else "" for name in block.choices]
        options = [f"<option{mark}>{name}</option>" for name, mark in zip(block.choices, marks, strict=True)]
        return f"<form>{''.join(lines)}<p><label>{block.label}: <select>{''.join(options)}</select></label></p></form>"


def html(content: Content, variant: int) -> bytes:
    """A page."""
    page = Html(variant)
    style = "<style>p { margin: 1em }</style><script>var fee = 12;</script>"
    nav = '<nav><a href="/">Start</a></nav>' if variant else ""
    head = f'<head><meta charset="utf-8"/><title>{content.title}</title>{style}</head>'
    return f'<!DOCTYPE html>\n<html lang="en">{head}<body>{nav}\n{page.body(content)}\n</body></html>'.encode()


def epub(content: Content, variant: int) -> bytes:
    """A book with one chapter a part of the content, written as XML with elements that close at once."""
    page = Html(variant, 'epub:type="noteref"')
    container = (
        '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
    )
    half = len(content.blocks) // 2
    chapters = [Content(content.title, content.blocks[:half]), Content("Second part", content.blocks[half:])]
    names = [f"part{number}.xhtml" for number in range(len(chapters))]
    spaces = 'xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"'
    pages = []
    for name, chapter in zip(names, chapters, strict=True):
        page.notes = []
        head = '<head><title/><script src="a.js"/><style/></head>'
        text = f'<?xml version="1.0" encoding="utf-8"?>\n<html {spaces}>{head}<body>{page.body(chapter)}</body></html>'
        pages.append((f"OPS/{name}", text))
    items = "".join(f'<item id="{name}" href="{name}" media-type="application/xhtml+xml"/>' for name in names)
    order = "".join(f'<itemref idref="{name}"/>' for name in names)
    links = "".join(f'<li><a href="{name}">{name}</a></li>' for name in names)
    nav = f'<html {spaces}><head><title>Contents</title></head><body><nav epub:type="toc"><ol>{links}</ol></nav></body></html>'
    package = (
        '<?xml version="1.0"?><package version="3.0" unique-identifier="id" xmlns="http://www.idpf.org/2007/opf">'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier id="id">x</dc:identifier>'
        f"<dc:title>{content.title}</dc:title><dc:language>en</dc:language></metadata><manifest>"
        f'<item id="nav" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>{items}</manifest>'
        f"<spine>{order}</spine></package>"
    )
    inside = [("META-INF/container.xml", container), ("OPS/book.opf", package), ("OPS/nav.xhtml", nav), *pages]
    return packed(inside, "application/epub+zip")


def eml(content: Content, variant: int) -> bytes:
    """A mail: plain text in quoted-printable, or a page of HTML beside a blank plain part, in quoted-printable or base64."""
    mail = EmailMessage(policy=policy.SMTP.clone(max_line_length=76))
    mail["From"] = "Harbour Office <office@harbours.example>"
    mail["To"] = "master@ships.example"
    mail["Subject"] = content.title
    mail["Date"] = "Thu, 05 Mar 2031 10:00:00 +0100"
    plain_form = variant or any(isinstance(block, Running) for block in content.blocks)
    first = content.blocks[0]
    if plain_form and isinstance(first, Running):
        mail.set_content(txt(content, 0).decode(), cte="quoted-printable")
        return mail.as_bytes()
    mail.set_content("\n")
    coding = "base64" if isinstance(first, Table) else "quoted-printable"
    mail.add_alternative(html(content, 0).decode(), subtype="html", cte=coding, charset="utf-8")
    mail.make_mixed("=_harbour_")
    mail.set_boundary("=_mixed_")
    for number, part in enumerate(mail.walk()):
        if part.is_multipart():
            part.set_boundary(f"=_harbour_{number}_")
    return mail.as_bytes()


class Marks(NamedTuple):
    """How a light markup writes the parts of a document."""

    heading: Callable[[str, int], str]
    code: Callable[[str], str]
    link: Callable[[str, str], str]
    power: Callable[[str, str], str]
    picture: Callable[[str, str], str]
    table: Callable[[Table], str]
    note: tuple[str, str]  # mark, and what stands before the note's text
    bold: str
    edit: str


def light(content: Content, marks: Marks, *, wrap: bool = False) -> str:
    """A document in a light markup."""
    parts = [marks.heading(content.title, 1)]
    notes: list[str] = []
    for number, block in enumerate(content.blocks):
        parts += [FILLER[number % len(FILLER)], *_light_block(block, marks, notes)]
    return "\n\n".join([*parts, *notes]) + "\n"


def _light_block(block: Block, marks: Marks, notes: list[str]) -> Iterable[str]:
    match block:
        case Pairs():
            yield from _light_pairs(block, marks, notes)
        case Running(_, _, text):
            yield text
        case Table():
            yield marks.table(block)
        case Steps(_, start, items):
            yield "\n".join(f"{number}. {item}" for number, item in enumerate(items, start))
        case Bullets(_, items):
            yield "\n\n".join(f"- {name}\n\n" + "\n".join(f"  - {value}" for value in values) for name, values in items)
        case Form(_, boxes, label, _, chosen):
            yield "\n".join(f"- [{'x' if ticked else ' '}] {name}" for name, ticked in boxes)
            yield f"{label}: {chosen}"
        case Picture(_, caption, alt):
            yield marks.picture(caption, alt)


def _light_pairs(block: Pairs, marks: Marks, notes: list[str]) -> Iterable[str]:
    for number, (label, value) in enumerate(block.pairs):
        match block.name:
            case "Sections":
                yield marks.heading(label, 2)
                yield f"The quay is {value} cm long."
            case "Notes":
                place = len(notes) + 1
                yield f"The tide of {label}{marks.note[0].format(place)} is high."
                notes.append(f"{marks.note[1].format(place)} Measured as {value} last summer.")
            case "Links":
                yield f"See {marks.link(label, value)}."
            case "Edits":
                yield f"{label}: {marks.edit.format(block.old[number])}{value}"
            case "Powers":
                yield f"{label}: {marks.power(*value.split('^'))}"
            case "Code":
                yield marks.code(f"[dock]\n{label} = {value}")
            case "Comments":
                yield f"> {label}: ask for {value} first." if marks.bold else f"{label}: ask for {value} first."
            case _:
                yield f"{marks.bold}{label}:{marks.bold} {value}"


def _pipes(block: Table) -> str:
    """A Markdown table; of a header in two rows each label says both."""
    tops = [label for label, span in block.header[0] for _ in range(span)]
    below = [label for label, span in block.header[-1] for _ in range(span)]
    names = tops if len(block.header) == 1 else [f"{top} {name}".strip() for top, name in zip(tops, below, strict=True)]
    lines = [names, ["---"] * len(names), *block.rows]
    return f"{block.caption}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _list_table(block: Table) -> str:
    """A list-table of reStructuredText, or a grid where the header has two rows."""
    if len(block.header) > 1:
        return _grid(block)
    rows = [[label for label, _ in block.header[0]], *block.rows]
    lines = [
        "\n".join(f"   {'* -' if not place else '  -'} {cell}".rstrip() for place, cell in enumerate(row))
        for row in rows
    ]
    return f".. list-table:: {block.caption}\n   :header-rows: 1\n\n" + "\n".join(lines)


def _grid(block: Table) -> str:
    columns = len(block.rows[0])
    width = 13
    ruler = "+" + ("-" * width + "+") * columns
    lines = [ruler]
    for cells in block.header:
        lines.append("|" + "".join(f" {label}".ljust(width * span + span - 1) + "|" for label, span in cells))
        lines.append(ruler)
    lines[-1] = ruler.replace("-", "=")
    for row in block.rows:
        lines += ["|" + "".join(f" {cell}".ljust(width) + "|" for cell in row), ruler]
    return f"{block.caption}\n\n" + "\n".join(lines)


def _columns(block: Table) -> str:
    """A table of plain text: columns at fixed places."""
    width = 14
    rows = [[f"{label:<{width * span}}" for label, span in cells] for cells in block.header]
    rows += [[f"{cell:<{width}}" for cell in row] for row in block.rows]
    return f"{block.caption}\n\n" + "\n".join("".join(cells).rstrip() for cells in rows)


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.split("\n"))


_MARKDOWN = Marks(
    heading=lambda text, level: f"{'#' * level} {text}",
    code=lambda text: f"```ini\n{text}\n```",
    link=lambda text, url: f"[{text}]({url})",
    power=lambda base, power: f"{base}<sup>{power}</sup>",
    picture=lambda caption, alt: f"![{alt}](mast.png)\n\n*{caption}*",
    table=_pipes,
    note=("[^{}]", "[^{}]:"),
    bold="**",
    edit="~~{}~~ ",
)
_RST = Marks(
    heading=lambda text, level: f"{text}\n{'=-'[level - 1] * len(text)}",
    code=lambda text: f".. code-block:: ini\n   :caption: dock.ini\n   :linenos:\n\n{_indented(text)}",
    link=lambda text, url: f"`{text} <{url}>`_",
    power=lambda base, power: f"{base}\\ :sup:`{power}`",
    picture=lambda caption, alt: f".. figure:: mast.png\n   :alt: {alt}\n\n   {caption}",
    table=_list_table,
    note=(" [#n{}]_", ".. [#n{}]"),
    bold="**",
    edit="",
)
_PLAIN = Marks(
    heading=lambda text, level: f"{text}\n{'=-'[level - 1] * len(text)}",
    code=_indented,
    link=lambda text, url: f"{text}: {url}",
    power=lambda base, power: f"{base}^{power}",
    picture=lambda caption, alt: f"{caption} ({alt})",
    table=_columns,
    note=(" [{}]", "[{}]"),
    bold="",
    edit="",
)


def markdown(content: Content, variant: int) -> bytes:
    """Markdown as GitHub shows it."""
    return light(content, _MARKDOWN).encode()


def rst(content: Content, variant: int) -> bytes:
    """Write reStructuredText with options of Sphinx."""
    return light(content, _RST).encode()


def txt(content: Content, variant: int) -> bytes:
    """Plain text."""
    return light(content, _PLAIN).encode()


def ipynb(content: Content, variant: int) -> bytes:
    """A notebook: cells of Markdown, and the table as what a cell of code printed."""
    cells: list[dict[str, object]] = [{"cell_type": "markdown", "metadata": {}, "source": [f"# {content.title}"]}]
    for block in content.blocks:
        notes: list[str] = []
        if isinstance(block, Table):
            output = {"output_type": "stream", "name": "stdout", "text": _columns(block).splitlines(keepends=True)}
            source = ["show(harbours)"]
            cells.append(
                {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": source, "outputs": [output]}
            )
        else:
            text = "\n\n".join([*_light_block(block, _MARKDOWN, notes), *notes])
            cells.append({"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)})
    kernel = {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}).encode()


def _written_rows(sheet: Sheet) -> list[list[str]]:
    header = [[label for label, span in cells for _ in range(span)] for cells in sheet.header]
    return header + [[cell.shown for cell in row] for row in sheet.rows]


def comma_separated(contents: list[Sheet], number: int) -> bytes:
    """CSV: with semicolons and decimal commas (0), a title above the header (1), `sep=` (2), or UTF-16 (3)."""
    [sheet] = contents
    memory = io.StringIO()
    writer = csv.writer(memory, delimiter=",;"[number % 2 == 0], lineterminator="\r\n")
    if number == 1:
        memory.write("Register of harbours\r\n\r\n")
    if number == 2:
        memory.write("sep=;\r\n")
    writer.writerows(_written_rows(sheet))
    return memory.getvalue().encode("utf-16" if number == 3 else "utf-8-sig")


def tab_separated(contents: list[Sheet], number: int) -> bytes:
    """Columns divided by tabs."""
    return "".join("\t".join(row) + "\n" for row in _written_rows(contents[0])).encode()
