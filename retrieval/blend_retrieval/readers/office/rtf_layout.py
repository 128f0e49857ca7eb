"""Paragraphs, lists and tables of an RTF file as HTML."""

from __future__ import annotations

from html import escape

from blend_retrieval.readers.office.numbered import marked_number

PAGE_NUMBER = "\0"  # stands for the number of a page
_FEW = 2  # words such as "Page of"
_HEADING_LEVELS = 6
_BULLETS = "•·▪◦‣●○■□–-*\uf0b7o§ü"


class RtfLayout:
    """Collects text in paragraphs, cells and rows."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._words: list[str] = []
        self._cells: list[str] = []
        self._rows: list[list[str]] = []
        self._frames: dict[str, dict[str, None]] = {"header": {}, "footer": {}}
        self._is_in_table = False
        self._is_in_row = False
        self._level = 0
        self._number: str | None = None

    def text(self, text: str, tag: str, *, is_struck: bool) -> None:
        """Add text to the paragraph. tag: "sup", "sub" or ""."""
        inner = escape(text, quote=False)
        for name in filter(None, (tag, "s" if is_struck else "")):
            inner = f"<{name}>{inner}</{name}>"
        self._words.append(inner)

    def number(self, text: str) -> None:
        """Set the number or bullet of the paragraph."""
        self._number = text

    def frame(self, side: str, text: str) -> None:
        """Add the lines of a header or footer."""
        for line in text.split("\n"):
            words = line.replace(PAGE_NUMBER, "").split()
            is_page_number = PAGE_NUMBER in line and len(words) <= _FEW
            if any(map(str.isalnum, "".join(words))) and not is_page_number:
                self._frames[side][" ".join(words)] = None

    def control(self, word: str, number: int | None, styles: dict[int, int]) -> None:
        """Follow a word of the layout. styles: levels of headings by the number of their style."""
        match word:
            case "line" | "softline":
                self._words.append("<br>")
            case "par" | "sect" | "page" | "column":
                self._end_paragraph()
            case "cell":
                self._cells.append(self._take_words())
            case "row":
                self._rows.append(self._cells)
                self._cells = []
                self._is_in_row = False
            case "trowd":
                self._is_in_row = True
            case "nestcell" | "nestrow":
                self._words.append("; ")
            case _:
                self._set(word, number, styles)

    def _set(self, word: str, number: int | None, styles: dict[int, int]) -> None:
        """Set a property of paragraphs."""
        match word:
            case "pard":
                self._is_in_table = False
                self._level = 0
            case "intbl":
                self._is_in_table = True
            case "s":
                self._level = styles.get(number or 0, 0)
            case "outlinelevel":
                self._level = (number or 0) + 1

    def html(self) -> str:
        """All of it."""
        self._end_row()
        self._end_paragraph()
        self._end_table()
        header, footer = (
            "".join(f"<p>{escape(line, quote=False)}</p>" for line in self._frames[side]) for side in self._frames
        )
        return header + "".join(self._blocks).replace("</ul><ul>", "") + footer

    def _take_words(self) -> str:
        html = "".join(self._words).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self._words = []
        number, self._number = self._number, None
        if number is None or not html.strip():
            return html
        return (f"- {html}" if number in _BULLETS else f"{marked_number(number)}{html}") if self._is_in_table else html

    def _end_row(self) -> None:
        """End the row that the file leaves open, in a table that nothing closes."""
        if self._is_in_table or self._is_in_row:
            self._cells.append(self._take_words())
        if any(map(str.strip, self._cells)):
            self._rows.append(self._cells)
        self._cells = []
        self._is_in_table = False
        self._is_in_row = False

    def _end_paragraph(self) -> None:
        if self._is_in_table or self._is_in_row:
            self._words.append("<br>")
            return
        number = self._number
        html = self._take_words()
        if not html.strip():
            return
        self._end_table()
        has_number = number is not None and number not in _BULLETS
        mark = marked_number(number or "") if has_number else ""
        if 0 < self._level <= _HEADING_LEVELS:
            self._blocks.append(f"<h{self._level}>{mark}{html}</h{self._level}>")
        elif number is not None:
            self._blocks.append(f"<ul><li>{mark}{html}</li></ul>")
        else:
            self._blocks.append(f"<p>{html}</p>")

    def _end_table(self) -> None:
        if not self._rows:
            return
        rows = ("".join(f"<td>{cell.strip().removesuffix('<br>')}</td>" for cell in row) for row in self._rows)
        self._blocks.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
        self._rows = []
