"""Readers of file formats, by suffix. Each reader and its parser are loaded for the first such file."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from blend_retrieval.readers.base import Fault, Part, Reader, UnreadableError

__all__ = ["SUFFIXES", "Fault", "Part", "Reader", "UnreadableError", "reader_for"]

_READERS = {
    ".md": ("text", "read_markdown"),
    ".markdown": ("text", "read_markdown"),
    ".txt": ("text", "read_text"),
    ".text": ("text", "read_text"),
    ".rst": ("rst", "read_rst"),
    ".html": ("html", "read_html"),
    ".htm": ("html", "read_html"),
    ".pdf": ("pdf", "read_pdf"),
    ".jsonl": ("jsonl", "read_jsonl"),
}
SUFFIXES = tuple(_READERS)


def reader_for(suffix: str) -> Reader | None:
    """The reader of files with this suffix (such as ".md", in any case), or None."""
    entry = _READERS.get(suffix.lower())
    if entry is None:
        return None
    module, name = entry
    return cast(Reader, getattr(import_module(f"blend_retrieval.readers.{module}"), name))
