"""Sheets of OpenDocument: values as they are shown, merged cells, notes, what is hidden."""

import pytest
from office_files import zipped_files
from sheet_files import grid, ods_content

from blend_retrieval.loading import load_bytes


def read(tables, styles="", name="a.fods"):
    """The text of a spreadsheet, and what was named, by place."""
    (document,), skipped = load_bytes(name, ods_content(tables, styles).encode())
    return document.text, {entry.source.removeprefix(f"{name} "): entry.reason for entry in skipped}


def cell(text="", attributes="", notes=""):
    paragraph = f"<text:p>{text}</text:p>" if text else ""
    return f"<table:table-cell {attributes}>{notes}{paragraph}</table:table-cell>"


def row(*cells, attributes=""):
    return f"<table:table-row {attributes}>{''.join(cells)}</table:table-row>"


def table(*rows, name="Fees", attributes=""):
    return f'<table:table table:name="{name}" {attributes}>{"".join(rows)}</table:table>'


def test_a_spreadsheet():
    styles = (
        '<style:style style:name="up"><style:text-properties style:text-position="super 58%"/></style:style>'
        '<style:style style:name="low"><style:text-properties style:text-position="sub 58%"/></style:style>'
        '<style:style style:name="out"><style:text-properties style:text-line-through-style="solid"/></style:style>'
        '<style:style style:name="ta2"><style:table-properties table:display="false"/></style:style>'
    )
    fees = table(
        row(cell("Pier"), cell("Fee"), cell("Area")),
        row(
            cell("A<text:s text:c='2'/>1"),
            cell("7.5 %", 'office:value="0.075"'),
            cell("10<text:span text:style-name='up'>6</text:span> x<text:span text:style-name='low'>1</text:span>"),
        ),
        row(attributes='table:number-rows-repeated="1000000"'),
        row(cell("B"), cell("30", 'table:style-name="out"'), cell("", 'table:number-columns-repeated="1000"')),
    )
    deleted = (
        "<table:tracked-changes><table:table-cell><text:p>gone</text:p></table:table-cell></table:tracked-changes>"
    )
    hidden = table(row(cell("secret")), name="Draft", attributes='table:style-name="ta2"')
    text, named = read(deleted + fees + hidden, styles)
    assert text.startswith("# Fees\n\n| Pier | Fee | Area |\n| --- | --- | --- |\n")
    assert grid(text)[1:] == [["A 1", "7.5 %", "10^6^ x~1~"], ["B", "~~30~~", ""]]
    assert named == {"sheet Draft": "is hidden"}


def test_merged_cells_repeats_and_groups():
    covered = "<table:covered-table-cell/>"
    tables = table(
        "<table:table-header-rows>" + row(cell("Pier"), cell("Fee", 'table:number-columns-spanned="2"'), covered),
        row(cell(), cell("summer"), cell("winter")) + "</table:table-header-rows>",
        "<table:table-row-group>" + row(cell("North", 'table:number-rows-spanned="2"'), cell("31"), cell("12")),
        row(covered, cell("5", 'table:number-columns-repeated="2"'), attributes='table:number-rows-repeated="1"'),
        row(cell("South"), cell("7"), cell("8"), attributes='table:number-rows-repeated="2"')
        + "</table:table-row-group>",
    )
    text, _ = read(tables)
    assert grid(text) == [
        *(["Pier", "Fee", "Fee"], ["", "summer", "winter"], ["North", "31", "12"], ["North", "5", "5"]),
        *(["South", "7", "8"], ["South", "7", "8"]),
    ]


@pytest.mark.parametrize(
    ("attributes", "shown"),
    [
        ('office:value-type="float" office:value="31"', "31"),
        ('office:value-type="float" office:value="0.30000000000000004"', "0.3"),
        ('office:value-type="percentage" office:value="0.075"', "7.5%"),
        ('office:value-type="currency" office:value="31.5" office:currency="EUR"', "31.5 EUR"),
        ('office:value-type="date" office:date-value="2020-05-03"', "2020-05-03"),
        ('office:value-type="time" office:time-value="PT26H05M09S"', "26:05:09"),
        ('office:value-type="boolean" office:boolean-value="true"', "TRUE"),
        ('office:value-type="string" office:string-value="Orm"', "Orm"),
    ],
)
def test_values_that_a_program_stored_without_a_text(attributes, shown):
    text, named = read(table(row(cell("Pier"), cell("Fee")), row(cell("A"), cell("", attributes))))
    assert grid(text)[1] == ["A", shown]
    assert not named


def test_what_is_hidden_or_lies_on_the_cells_is_named():
    note = "<office:annotation><text:p>37 from May</text:p></office:annotation>"
    fields = (
        '<form:checkbox form:label="Paid" form:current-state="checked"/><form:checkbox form:label="Moored"/>'
        '<form:radio form:label="By card" form:current-selected="true"/><form:button form:label="Send"/>'
    )
    box = "<draw:custom-shape><text:p>Net prices</text:p></draw:custom-shape>"
    picture = "<draw:frame draw:name='Map'><draw:image/></draw:frame>"
    tables = table(
        '<table:table-column/><table:table-column table:visibility="collapse"/><table:table-column/>',
        row(cell("Pier"), cell("Old"), cell("Fee")),
        row(cell("A"), cell("1"), cell("31", notes=note)),
        row(cell("B"), cell("2"), cell("", 'office:value="5"', "<text:p/>"), attributes='table:visibility="filter"'),
        row(cell("C"), cell("3"), cell("", 'table:formula="of:=[.A1]*2"')),
        f"<table:shapes>{box}{picture}</table:shapes><office:forms>{fields}</office:forms>",
    )
    text, named = read(tables)
    assert grid(text)[1:] == [["A", "1", "31 (note: 37 from May)"], ["B", "2", ""], ["C", "3", "=[.A1]*2"]]
    assert text.split("\n\n")[2:] == ["Net prices", "[x] Paid", "[ ] Moored", "[x] By card", "Send"]
    assert named == {
        "sheet Fees: row 3, column B": "is hidden, but read",
        "sheet Fees: C3": "is hidden by its number format",
        "sheet Fees: C4": "holds a formula without a stored value: open the file in a spreadsheet program, and save it",
        "sheet Fees: picture Map": "is a picture, which is not read",
    }


def test_archives():
    content = ods_content(
        table(row(cell("Fee")), attributes='table:style-name="ta1"'),
        "<style:style style:name='ta1' style:master-page-name='p'/>",
    )
    header = "<style:header><text:p>Prices in EUR, page <text:page-number>1</text:page-number></text:p></style:header>"
    footer = "<style:footer><text:p>Page <text:page-number>1</text:page-number></text:p></style:footer>"
    pages = ods_content("", f"<style:master-page style:name='p'>{header}{footer}</style:master-page>")
    files = {"content.xml": content, "styles.xml": pages}
    (document,), _ = load_bytes("a.ods", zipped_files(files))
    assert document.text == "# Fees\n\n| Fee |\n| --- |\n\nPrices in EUR, page"
    for damaged, reason in [
        ({**files, "META-INF/manifest.xml": "<m><encryption-data/></m>"}, "is encrypted; save it without a password"),
        ({"styles.xml": pages}, "is no OpenDocument file: it has no content"),
        ({"content.xml": "<a>"}, "is damaged: its content is no XML"),
        ({"content.xml": "<a/>"}, "is no spreadsheet"),
    ]:
        _, (skipped,) = load_bytes("a.ods", zipped_files(damaged))
        assert skipped.reason == reason


def test_a_spreadsheet_is_read_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("blend_retrieval.readers.sheets.ods.MOST_CELLS", 1000)
    many = row(cell("x", 'table:number-columns-repeated="500"'), attributes='table:number-rows-repeated="1000000000"')
    text, named = read(table(row(cell("Fee"))) + table(many, name="Many"))
    assert len(grid(text)) == 3
    assert named == {"sheet Many": "has more than the 1,000 cells that are read"}
