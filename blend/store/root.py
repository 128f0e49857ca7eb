"""The root directory of a disk store: what makes it one, and the words that describe its namespaces.

store.json                    {"kind": "kvblend store", "format": 1}; written first, so that its absence is telling
namespaces/<namespace>.json   description of a namespace
objects/                      entries, see `disk`
artifacts/, generation        small named things and the token that tells of their changes, see `artifacts`
tmp/                          files being written
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from blend.errors import StoreError

STORE_FORMAT = 1
STALE_AFTER_S = 3600.0
_MANIFEST = "store.json"
_KIND = "kvblend store"
_NOT_OURS_BUT_HARMLESS = ("lost+found",)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"


def open_root(root: Path) -> None:
    """Make `root` a store unless it is one; raises `StoreError`, and touches nothing, when it is something else."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in root.iterdir()]
        if _MANIFEST not in names and not (root / _MANIFEST).exists():
            _require_empty(root, names)
            write_atomically(root / _MANIFEST, [_dump({"kind": _KIND, "format": STORE_FORMAT})], root)
        _check_manifest(root, (root / _MANIFEST).read_bytes())
    except OSError as error:
        raise unusable(root, error) from None
    sweep(root / "tmp")


def write_description(root: Path, namespace: str, description: Mapping[str, str]) -> None:
    """Replace the description of `namespace`; raises `StoreError`."""
    try:
        (root / "namespaces").mkdir(exist_ok=True)
        write_atomically(root / "namespaces" / f"{namespace}.json", [_dump(dict(description))], root / "tmp")
    except OSError as error:
        raise unusable(root, error) from None


def read_descriptions(root: Path) -> dict[str, dict[str, str]]:
    """Every description that can be read; they inform only, so a damaged one reads as empty."""
    found: dict[str, dict[str, str]] = {}
    for path in (root / "namespaces").glob("*.json"):
        fields: object = None
        with suppress(OSError, ValueError, RecursionError):
            fields = json.loads(path.read_bytes())
        found[path.stem] = {k: str(v) for k, v in fields.items()} if isinstance(fields, dict) else {}
    return found


def write_atomically(path: Path, blobs: Iterable[bytes | memoryview], tmp: Path) -> None:
    """Write `blobs` to `path` so that it holds the old content or the new, whenever the process or the machine stops.

    `tmp` is a directory of the same file system. Raises OSError and leaves nothing behind.
    """
    tmp.mkdir(exist_ok=True)
    part = tmp / f".{_HOST}-{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp"
    try:
        with part.open("xb", buffering=0) as file:
            for blob in blobs:
                _write_fully(file.fileno(), memoryview(blob))
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sweep(tmp: Path) -> None:
    """Remove what killed writers left in `tmp`: files of dead processes of this machine, and files an hour old."""
    with suppress(OSError):
        for path in tmp.glob(".*.tmp"):
            if _is_abandoned(path):
                with suppress(OSError):
                    path.unlink()


def unusable(root: Path, error: OSError) -> StoreError:
    """The one-line error for a store that cannot be read or written, with the remedy."""
    if error.errno in _FULL:
        remedy = "free disk space or set a smaller budget"
    elif error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        remedy = "something else is in the way; choose another directory"
    else:
        remedy = "make the directory writable or choose another one"
    return StoreError(f"the store {root} cannot be written ({error.strerror or error}): {remedy}")


def _require_empty(root: Path, names: list[str]) -> None:
    foreign = sorted(n for n in names if n not in _NOT_OURS_BUT_HARMLESS and not (n[0] == "." and n.endswith(".tmp")))
    # Looked for once more: another process may have made the store between the two looks.
    if foreign and not (root / _MANIFEST).exists():
        raise StoreError(
            f"{root} is not a store and not empty (it holds {foreign[0]!r}): choose an empty or new directory"
        )


def _check_manifest(root: Path, raw: bytes) -> None:
    try:
        manifest = json.loads(raw)
        kind, version = manifest["kind"], int(manifest["format"])
    except (ValueError, KeyError, TypeError, RecursionError):
        kind, version = None, 0
    if kind != _KIND:
        raise StoreError(f"{root / _MANIFEST} is damaged or not of kvblend: delete {root} or choose another directory")
    if version != STORE_FORMAT:
        raise StoreError(
            f"the store {root} has format {version}, this kvblend reads {STORE_FORMAT}: "
            "upgrade kvblend or choose another store"
        )


def _dump(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"


def _write_fully(descriptor: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _is_abandoned(path: Path) -> bool:
    if time.time() - path.stat().st_mtime > STALE_AFTER_S:
        return True
    writer = re.fullmatch(rf"\.{_HOST}-(\d+)-\w+\.tmp", path.name)
    return writer is not None and not _is_alive(int(writer[1]))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
