"""Workbooks written by hand, for what the libraries that write them do not offer, and the rows of what was read."""

from office_files import zipped_files

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_STRICT = "http://purl.oclc.org/ooxml/spreadsheetml/main"
_TYPES = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
_ODF = "urn:oasis:names:tc:opendocument:xmlns"


def _relations(**targets):
    """A list of relations: the id of each, and its type and target."""
    lines = [
        f'<Relationship Id="{number}" Type="{_TYPES}/{kind}" Target="{target}"/>'
        for number, (kind, target) in targets.items()
    ]
    return f'<Relationships xmlns="{_PACKAGE}">{"".join(lines)}</Relationships>'


def xlsx(sheet, strings="", styles="", properties="", strict=False, kind="worksheet", more=None, sheet_relations=None):
    """A workbook with one sheet, "Fees", whose content is this XML.

    properties: of the workbook, as XML. more: other files. sheet_relations: of the sheet, by id.
    """
    namespace = _STRICT if strict else _MAIN
    files = {
        "_rels/.rels": _relations(r1=("officeDocument", "/xl/workbook.xml")),
        "xl/workbook.xml": (
            f'<workbook xmlns="{namespace}" xmlns:r="{_TYPES}">{properties}<sheets><sheet name="Fees" sheetId="1" r:id="r1"/>'
            "</sheets></workbook>"
        ),
        "xl/_rels/workbook.xml.rels": _relations(
            r1=(kind, "worksheets/sheet1.xml"), r2=("sharedStrings", "SharedStrings.xml"), r3=("styles", "styles.xml")
        ),
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{namespace}" xmlns:r="{_TYPES}">{sheet}</worksheet>',
        "xl/sharedStrings.xml": f'<sst xmlns="{namespace}">{strings}</sst>',
        "xl/styles.xml": f'<styleSheet xmlns="{namespace}">{styles}</styleSheet>',
    }
    if sheet_relations:
        files["xl/worksheets/_rels/sheet1.xml.rels"] = _relations(**sheet_relations)
    return zipped_files({**files, **(more or {})})


def ods_content(tables, styles=""):
    """The content of an OpenDocument spreadsheet with these tables."""
    names = ("office", "table", "text", "style", "draw", "form")
    declared = " ".join(f'xmlns:{name}="{_ODF}:{name}:1.0"' for name in names)
    return (
        f"<office:document {declared}><office:automatic-styles>{styles}</office:automatic-styles>"
        f"<office:body><office:spreadsheet>{tables}</office:spreadsheet></office:body></office:document>"
    )


def grid(text):
    """The rows of the tables in a text, without rulers."""
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("|") and "| --- |" not in line]
    return [[cell.strip() for cell in row] for row in rows]
