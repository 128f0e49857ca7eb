"""Entries whose checksums are right and whose headers say something else: written by someone, not damaged."""

import json
import struct

from blake3 import blake3


def header_of(raw: bytes) -> dict:
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
    size, at = struct.pack("<Q", len(text)), len(b'{"__metadata__":{"blake3":"')
    return size + text[:at] + digest(size + text[at + 32 :]).encode() + text[at + 32 :] + data


def digest(content: bytes) -> str:
    """Of a store without a key."""
    return blake3(content).hexdigest(length=16)
