"""JSONL: records of `{"title", "text"}` with an optional `"id"`, or question records whose `"chunks"` are the documents."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from blend_retrieval.decoding import decode
from blend_retrieval.document import clean
from blend_retrieval.readers.base import TEXT_FIELD, Fault, Part, Parts, notes
from blend_retrieval.readers.progress import reported


def record_part(record: Any, text_field: str) -> Part:
    """A record as a document, named by its id or its content, so edits of other records keep its name."""
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'is not a record with a string under "{text_field}"')
    title = str(record.get("title") or "")
    name = record.get("id", record.get("_id"))
    if name is None or name == "":
        content = json.dumps([title, text])
        name = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Part(clean(str(name)), title, text, "plain")


def _parts(line: str, text_field: str) -> list[Part]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    chunks = record.get("chunks") if isinstance(record, dict) else None
    if isinstance(chunks, list):
        return [record_part(chunk, TEXT_FIELD) for chunk in chunks]
    return [record_part(record, text_field)]


def read_jsonl(data: bytes, title: str, text_field: str = TEXT_FIELD) -> Parts:
    """Read every record once: a chunk in many question records is one document. Bad lines are faults."""
    parts: dict[Part, None] = {}
    text, note = decode(data)
    faults = notes(note)
    lines = text.split("\n")
    for number, line in enumerate(reported(lines, len(lines), "lines"), start=1):
        if not line.strip():
            continue
        try:
            parts |= dict.fromkeys(_parts(line, text_field))
        except ValueError as error:
            faults.append(Fault(f"line {number}", str(error)))
    documents = [part._replace(title=part.title or f"{title} {part.name}") for part in parts]
    return [*documents, *faults]
