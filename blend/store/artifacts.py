"""Small named things that a store keeps beside its chunk caches, and the words that describe its namespaces.

artifacts/<name>              one line "kvblend artifact 1 <digest of name and content>", then the content as it was given
namespaces/<namespace>.json   what a namespace stands for; it informs only, so it has no digest
generation                    a token that is drawn anew by every change of an artifact, and by `advance`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import ARTIFACTS, DESCRIPTIONS, SEALED, SOURCES, Backend
from blend.store.seal import Seal

_OPENING = b"kvblend artifact 1 "
MOST_BYTES = 1 << 30
_MOST_OF_A_DESCRIPTION = 1 << 20


def pack_artifact(name: str, content: bytes, seal: Seal) -> tuple[bytes, bytes]:
    """What is kept of it; raises `StoreError` when it is too long."""
    if len(content) > MOST_BYTES // 2:
        raise StoreError(f"{name} takes {len(content)} bytes, an artifact {MOST_BYTES // 2} at most")
    digest = seal.digest("artifact", name.encode() + b"\n", content)
    return _OPENING + digest.encode() + b"\n", content


def unpack_artifact(name: str, raw: bytes, seal: Seal) -> bytes:
    """The content, its digest verified; raises `EntryDamagedError`."""
    opening, _, content = raw.partition(b"\n")
    digest = opening.removeprefix(_OPENING)
    if digest == opening or not seal.holds(digest, "artifact", name.encode() + b"\n", content):
        raise EntryDamagedError(seal.foreign)
    return content


def is_as_written(name: str, raw: bytes, seal: Seal) -> bool:
    """Whether what lies under a backend's name is what was put there; of names that have no digest nothing else is known."""
    if not name.startswith((ARTIFACTS, SOURCES, SEALED)):
        return True
    try:
        unpack_artifact(name.removeprefix(ARTIFACTS), raw, seal)
    except EntryDamagedError:
        return False
    return True


def pack_description(words: Mapping[str, str]) -> bytes:
    """What is kept of it."""
    return as_json(dict(words))


def read_descriptions(backend: Backend) -> dict[str, dict[str, str]]:
    """Every namespace's description; a damaged one reads as empty. Raises `StoreError`."""
    names = [name for page in backend.names(DESCRIPTIONS) for name in page if name.endswith(".json")]
    return {name.removeprefix(DESCRIPTIONS).removesuffix(".json"): _read_description(backend, name) for name in names}


def _read_description(backend: Backend, name: str) -> dict[str, str]:
    fields: object = None
    with suppress(EntryDamagedError, ValueError, RecursionError):
        fields = json.loads(backend.read(name, _MOST_OF_A_DESCRIPTION) or b"")
    return {k: str(v) for k, v in fields.items()} if isinstance(fields, dict) else {}


def as_json(fields: Mapping[str, object]) -> bytes:
    """JSON for people to read."""
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"
