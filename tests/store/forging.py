"""Entries whose checksums are right and whose headers say something else: written by someone, not damaged."""

from __future__ import annotations

import json
import struct

import xxhash


def header_of(raw: bytes) -> dict:
    """The header of an entry, parsed."""
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def forge(raw: bytes, change) -> bytes:
    """`raw` with its header (and what `change(header, data)` returns as data) changed, and its checksum made right."""
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = header_of(raw), raw[8 + length :]
    changed = change(header, data) if change else None
    return sealed(header, data if changed is None else changed)


def sealed(header: object, data: bytes) -> bytes:
    """A file of this header and data with the checksum that it must have to be believed."""
    text = json.dumps(header, separators=(",", ":")).encode()
    size = struct.pack("<Q", len(text))
    at = len(b'{"__metadata__":{"checksum":"')
    checksum = xxhash.xxh3_128_hexdigest(size + text[at + 32 :]).encode()
    return size + text[:at] + checksum + text[at + 32 :] + data
