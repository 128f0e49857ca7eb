"""Sheets of workbooks: merged cells, formulas, notes, what is hidden and what lies on the cells."""

import io

import openpyxl
import pytest
from openpyxl.chart import BarChart, Reference
from openpyxl.comments import Comment
from openpyxl.worksheet.formula import ArrayFormula
from rendered import chunked
from sheet_files import grid, xlsx

from blend_retrieval.loading import load_bytes


def workbook(rows, change=lambda book, sheet: None):
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Fees"
    for cells in rows:
        sheet.append(cells)
    change(book, sheet)
    data = io.BytesIO()
    book.save(data)
    return data.getvalue()


def read(data, name="a.xlsx"):
    """The text of a workbook, and what was named, by place."""
    (document,), skipped = load_bytes(name, data)
    return document.text, {entry.source.removeprefix(f"{name} "): entry.reason for entry in skipped}


def row(number, *cells):
    return f'<row r="{number}">{"".join(cells)}</row>'


def words(*texts):
    return "".join(f'<c t="inlineStr"><is><t>{text}</t></is></c>' for text in texts)


def test_a_workbook():
    def change(book, sheet):
        book.create_sheet("Draft").append(["secret"])
        book.create_sheet("Deep").append(["secret"])
        book["Draft"].sheet_state = "hidden"
        book["Deep"].sheet_state = "veryHidden"
        book.create_sheet("Empty")
        book.create_sheet("Boats | sails").append(["Boat"])
        book.create_chartsheet("Curve")

    text, named = read(workbook([["Harbour", "Fee"], ["Orm", 31.0], ["Brack|B", 0.5]], change))
    assert text.splitlines() == [
        *("# Fees", "", "| Harbour | Fee |", "| --- | --- |", "| Orm | 31 |", r"| Brack\|B | 0.5 |", ""),
        *(r"# Boats \| sails", "", "| Boat |", "| --- |"),
    ]
    assert named == {"sheet Draft, sheet Deep": "is hidden", "sheet Curve": "is a chart, which is not read"}


def test_a_merged_label_stands_in_each_row_that_it_covers():
    zones = {0: "North zone", 60: "South zone"}
    rows = [["Zone", "Pier", "Fee"], *([zones.get(number), f"Pier {number}", 100 + number] for number in range(120))]

    def change(_, sheet):
        sheet.merge_cells("A2:A61")
        sheet.merge_cells("A62:A121")

    text, _ = read(workbook(rows, change))
    zone = {cells[1]: cells[0] for cells in grid(text)[1:]}
    assert zone == {f"Pier {number}": "North zone" if number < 60 else "South zone" for number in range(120)}


def test_a_header_of_two_rows_stands_before_every_chunk():
    def change(_, sheet):
        sheet.merge_cells("B1:C1")
        sheet.merge_cells("A1:A2")

    rows = [["Pier", "Fee", None], [None, "summer", "winter"], *([f"Pier {number}", number, 2] for number in range(90))]
    text, _ = read(workbook(rows, change))
    header = "| Pier | Fee | Fee |\n| Pier | summer | winter |\n| --- | --- | --- |\n"
    assert text.startswith(f"# Fees\n\n{header}| Pier 0 | 0 | 2 |")
    chunks = chunked(text, 150)
    assert len(chunks) > 3
    assert all(header in chunk.text for chunk in chunks)


def test_titles_and_remarks_over_all_columns_stand_once():
    def change(_, sheet):
        sheet.merge_cells("A1:C1")
        sheet.merge_cells("A6:C7")

    rows = [["Fees 2026"], [], ["Pier", "Fee", "Tax"], ["A", 31, 2], ["B", 12, 1], ["Net prices"]]
    text, _ = read(workbook(rows, change))
    assert text.split("\n\n")[:2] == ["# Fees", "Fees 2026"]
    assert grid(text)[0] == ["Pier", "Fee", "Tax"]
    assert text.count("Net prices") == text.count("Fees 2026") == 1


def test_formulas_show_their_value_or_are_named():
    shared = (
        row(1, words("Pier", "Fee"))
        + row(2, words("A"), '<c r="B2"><f t="shared" ref="B2:B4" si="0">A2*$C$1&amp;"B2"+_xlfn.XX(A2)</f></c>')
        + row(3, words("B"), '<c r="B3"><f t="shared" si="0"/></c>')
        + row(4, words("C"), '<c r="B4"><f t="shared" si="0"/><v>7.5</v></c>')
        + row(5, words("D"), '<c r="B5" t="str"><f>IF(1,"")</f><v></v></c>')
        + row(6, words("E"), '<c r="B6"><f t="array" ref="B6:B6">SUM(B2:B4*2)</f><v>42</v></c>')
    )
    text, named = read(xlsx(f"<sheetData>{shared}</sheetData>"))
    values = [cells[1] for cells in grid(text)[1:]]
    assert values == ['=A2*$C$1&"B2"+XX(A2)', '=A3*$C$1&"B2"+XX(A3)', "7.5", "", "42"]
    reason = "holds a formula without a stored value: open the file in a spreadsheet program, and save it"
    assert named == {"sheet Fees: B2, B3": reason}

    def change(_, sheet):
        sheet["B2"] = ArrayFormula("B2", "=SUM(A1:A2*2)")

    assert "| A | =SUM(A1:A2*2) |" in read(workbook([["Pier", "Fee"], ["A"]], change))[0]


def test_hidden_rows_and_columns_are_read_and_named():
    def change(_, sheet):
        sheet.column_dimensions.group("B", "C", hidden=True)
        sheet.row_dimensions[3].hidden = True
        sheet.row_dimensions[9].hidden = True
        sheet.column_dimensions["F"].hidden = True

    rows = [["Pier", "Old", "Older", "Fee"], ["A", 1, 2, 31], ["Closed", 3, 4, 12]]
    text, named = read(workbook(rows, change))
    assert grid(text)[2] == ["Closed", "3", "4", "12"]
    assert named == {"sheet Fees: column B, column C, row 3": "is hidden, but read"}


def test_notes_stand_at_their_cells():
    def change(_, sheet):
        sheet["B2"].comment = Comment("37 from\nMay on", "office")
        sheet["A3"].comment = Comment("closed", "office")

    text, named = read(workbook([["Pier", "Fee"], ["A", 31]], change))
    assert grid(text)[1:] == [["A", "31 (note: 37 from May on)"], ["(note: closed)", ""]]
    assert not named


def test_conversations_at_cells_replace_their_copies():
    comments = '<comments><commentList><comment ref="A1"><text><t>[copy]</t></text></comment></commentList></comments>'
    threads = (
        '<ThreadedComments><threadedComment ref="A1"><text>Net?</text></threadedComment>'
        '<threadedComment ref="A1"><text>Yes.</text></threadedComment></ThreadedComments>'
    )
    data = xlsx(
        f"<sheetData>{row(1, words('Fee'))}</sheetData>",
        more={"xl/comments1.xml": comments, "xl/threads.xml": threads},
        sheet_relations={"r1": ("comments", "../comments1.xml"), "r2": ("threadedComment", "../threads.xml")},
    )
    assert "| Fee (note: Net?; Yes.) |" in read(data)[0]


def test_what_lies_on_the_cells_is_read_or_named():
    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")

    def change(_, sheet):
        chart = BarChart()
        chart.title = "Fees by pier"
        chart.add_data(Reference(sheet, min_col=2, min_row=1, max_row=2), titles_from_data=True)
        sheet.add_chart(chart, "D5")
        sheet.add_image(openpyxl.drawing.image.Image(picture), "F2")
        sheet.oddHeader.center.text = "Prices in &E EUR"
        sheet.oddFooter.right.text = "&P of &N"

    text, named = read(workbook([["Pier", "Fee"], ["A", 31]], change))
    assert text.split("\n\n")[2:] == ["Prices in EUR", "Fees by pier"]
    assert named == {
        "sheet Fees: chart at D5": "is a chart: its title is read, its curves are not",
        "sheet Fees: picture at F2": "is a picture, which is not read",
    }


def test_form_fields_and_diagrams():
    def field(kind, label, state=""):
        box = f"<v:textbox><div>{label}</div></v:textbox>"
        return f"<v:shape>{box}<x:ClientData ObjectType='{kind}'>{state}</x:ClientData></v:shape>"

    fields = (
        field("Checkbox", "Paid", "<x:Checked> 1 </x:Checked>")
        + field("Checkbox", "Moored")
        + field("Radio", "By card", "<x:Checked>1</x:Checked>")
        + field("Button", "Send")
        + field("Note", "a note's frame")
    )
    diagram = (
        "<d><twoCellAnchor><from><col>1</col><row>2</row></from><graphicData uri='a/diagram'/></twoCellAnchor></d>"
    )
    data = xlsx(
        f"<sheetData>{row(1, words('Fee'))}</sheetData>",
        more={
            "xl/fields.vml": f"<xml xmlns:v='v' xmlns:x='x'>{fields}</xml>",
            "xl/notes.vml": "<xml><br></xml>",
            "xl/drawing.xml": diagram,
        },
        sheet_relations={
            "r1": ("vmlDrawing", "../fields.vml"),
            "r2": ("vmlDrawing", "../notes.vml"),
            "r3": ("drawing", "../drawing.xml"),
            "r4": ("package", "../embeddings/plan.docx"),
        },
    )
    text, named = read(data)
    assert text.split("\n\n")[2:] == ["[x] Paid", "[ ] Moored", "[x] By card", "Send"]
    assert named == {
        "sheet Fees: diagram at B3": "is a diagram, which is not read",
        "sheet Fees: object plan.docx": "is an embedded file, which is not read",
    }


@pytest.mark.parametrize(
    ("rows", "captions"),
    [
        ([["Made by", "Orm"], ["On", "2026-01-01"], ["Pier", "Fee", "Tax", "Day"], ["A", 31, 2, 1]], 2),
        ([["Pier", "Fee"], ["A", 31, "dry", "new"], ["B", 12, "wet", "old"]], 0),
        ([["Pier", "Fee"], ["A", "x", "dry"], ["B", "y", "wet"]], 0),
        ([[None, "Fee", None, "Tax"], ["Pier", "net", "gross", "all"], ["A", 1, 2, 3]], 0),
    ],
)
def test_names_and_values_above_a_header_are_captions(rows, captions):
    text, _ = read(workbook(rows))
    assert text.split("\n\n")[1:-1] == [" ".join(row) for row in rows[:captions]]
    assert grid(text)[0][:2] == ["" if cell is None else cell for cell in rows[captions][:2]]


def test_captions_are_no_headings():
    text, _ = read(workbook([["# of boats"], ["Pier", "Fee"], ["A", 31]]))
    assert text.split("\n\n")[1] == r"\# of boats"


def test_strings_keep_their_powers_and_leave_out_pronunciations():
    runs = (
        "<si><r><t>10</t></r><r><rPr><vertAlign val='superscript'/></rPr><t>6</t></r><r><t> H</t></r>"
        "<r><rPr><vertAlign val='subscript'/></rPr><t>2</t></r></si>"
        "<si><t>東京</t><rPh sb='0' eb='2'><t>トウキョウ</t></rPh></si>"
        "<si><r><t>31 </t></r><r><rPr><strike/></rPr><t>30</t></r></si><si><t>a_x000D_\n_x005F_b</t></si>"
    )
    styles = "<fonts><font/><font><strike/></font></fonts><cellXfs><xf/><xf fontId='1'/></cellXfs>"
    cells = [f"<c t='s'><v>{number}</v></c>" for number in range(4)]
    struck = '<c s="1"><v>29</v></c>'
    text, _ = read(xlsx(f"<sheetData>{row(1, *cells, struck)}</sheetData>", runs, styles))
    assert grid(text) == [["10^6^ H~2~", "東京", "31 ~~30~~", "a _b", "~~29~~"]]


@pytest.mark.parametrize("strict", [False, True])
def test_workbooks_of_any_program(strict):
    cells = (
        "<row><c><v>1</v></c><c t='d'><v>2020-05-03T00:00:00</v></c><c t='b'><v>1</v></c><c><v>1.50E+25</v></c></row>"
    )
    pictured = "<row r='4'><c r='B4' t='e' vm='1'><v>#VALUE!</v></c><c t='e'><v>#REF!</v></c></row>"
    text, named = read(xlsx(f"<sheetData>{cells}{pictured}</sheetData>", strict=strict))
    assert grid(text) == [["1", "43954", "TRUE", "1.5E+25"], ["", "", "#REF!", ""]]
    assert named == {"sheet Fees: B4": "holds a picture or a linked record, which is not read"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (xlsx("<sheetData><row"), "is damaged: it is not read to its end"),
        (xlsx("<sheetData><row><c r='?'><v>1</v></c></row></sheetData>"), "is damaged: it is not read to its end"),
        (xlsx("<sheetData><row><c t='s'><v>9</v></c></row></sheetData>"), "is damaged: it is not read to its end"),
        (
            xlsx("", sheet_relations={"r1": ("comments", "c.xml")}),
            "is damaged: xl/worksheets/c.xml is missing or no XML",
        ),
        (xlsx("", kind="dialogsheet"), "is a dialog, which is not read"),
    ],
)
def test_a_sheet_that_cannot_be_read_is_named(data, reason):
    loaded = load_bytes("a.xlsx", data)
    assert ("a.xlsx sheet Fees", reason) in [(entry.source, entry.reason) for entry in loaded.skipped]


def test_a_workbook_whose_strings_are_damaged():
    for strings in ("<si>", "<si></t>"):
        documents, (skipped,) = load_bytes("a.xlsx", xlsx("<sheetData/>", strings))
        assert not documents
        assert skipped.reason == "is damaged: xl/SharedStrings.xml is missing or no XML"


def test_a_workbook_is_read_up_to_a_limit(monkeypatch):
    def change(book, sheet):
        book.copy_worksheet(sheet)
        book.copy_worksheet(sheet)

    monkeypatch.setattr("blend_retrieval.readers.sheets.xlsx.MOST_CELLS", 15)
    text, named = read(workbook([["Pier", "Fee"], ["A", 31], ["B", 12]], change))
    assert grid(text) == [["Pier", "Fee"], ["A", "31"], ["B", "12"]] * 2 + [["Pier", "Fee"]]
    assert named == {"sheet Fees Copy1": "has more than the 15 cells that are read"}


def test_dates_in_iso_8601_and_rows_without_height():
    styles = "<numFmts><numFmt numFmtId='200' formatCode='d.m.yyyy'/></numFmts><cellXfs><xf numFmtId='200'/></cellXfs>"
    cells = "<row r='1' ht='0' customHeight='1'><c t='d' s='0'><v>2020-05-03</v></c><c t='d'><v>soon</v></c></row>"
    data = xlsx(f"<sheetData>{cells}</sheetData>", styles=styles, properties="<workbookPr date1904='1'/>")
    text, named = read(data)
    assert grid(text) == [["3.5.2020", "soon"]]
    assert named == {"sheet Fees: row 1": "is hidden, but read"}


def test_a_merged_cell_beside_others_covers_its_columns():
    text, _ = read(workbook([["Boat", None, "Fee"], ["Orm", "blue", 31]], lambda _, sheet: sheet.merge_cells("A1:B1")))
    assert grid(text) == [["Boat", "Boat", "Fee"], ["Orm", "blue", "31"]]
    rows = [[None, "Fee", None], ["Pier", "summer", "winter"], ["A", 31, 12]]
    text, _ = read(workbook(rows, lambda _, sheet: sheet.merge_cells("B1:C1")))
    assert grid(text)[:2] == [["", "Fee", "Fee"], ["Pier", "summer", "winter"]]
