"""The root directory of a disk store: what makes it one.

store.json                    {"kind": "kvblend store", "format": 1}; written first, so that its absence is telling; one on a
                              file system that machines share has an id besides, see `mounted`
objects/, artifacts/, namespaces/, generation, sealed, ...   what a backend keeps, see `backend`
tmp/, .writing                files being written; locked by whoever chooses and writes artifacts
uses.sqlite3                  how often caches were used on this machine, see `uses`
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import nullcontext, suppress
from pathlib import Path

from blend.errors import EntryDamagedError, StoreError
from blend.files import make_private_folder, sweep, write_atomically
from blend.store.files import MANIFEST, StoreFiles, linked, unusable
from blend.store.seal import as_json

STORE_FORMAT = 1
_KIND = "kvblend store"
_NOT_OURS_BUT_HARMLESS = ("lost+found",)
_MOST_BYTES = 1 << 20


def open_root(root: Path) -> StoreFiles:
    """Make `root` a store unless it is one; raises `StoreError`, and touches nothing, when it is something else.

    Nothing is written to a store that exists, apart from two things where this user may: rights of other users to a folder
    of ours are withdrawn, and what killed writers left is removed.
    """
    files = StoreFiles(root)
    try:
        make_root(files)
        store_id(root, _manifest(files))
    except OSError as error:
        raise unusable(root, error) from None
    tidy(files)
    return files


def make_root(files: StoreFiles, new_id: str = "") -> None:
    """Make the root a store unless it is one. Raises `StoreError` when it is something else, and OSError."""
    root = files.root
    make_private_folder(root)
    names = [path.name for path in root.iterdir()]
    if MANIFEST not in names and not (root / MANIFEST).exists():
        _require_empty(root, names)
        manifest = as_json({"kind": _KIND, "format": STORE_FORMAT, **({"id": new_id} if new_id else {})})
        if not (new_id and _come_first(files, manifest)):
            write_atomically(root / MANIFEST, [manifest], root, files.file_mode(), nullcontext())


def _come_first(files: StoreFiles, manifest: bytes) -> bool:
    """Of several machines that make a store at the same time one gives it its id; False where there are no hard links."""
    spare = files.spare(files.root)
    write_atomically(spare, [manifest], files.root, files.file_mode(), nullcontext())
    try:
        linked(spare, files.root / MANIFEST)
    except OSError:
        return False
    finally:
        spare.unlink(missing_ok=True)
    return True


def tidy(files: StoreFiles) -> None:
    """Withdraw other users' rights, and remove what killed writers left, as far as this user may."""
    _close_to_others(files.root)
    sweep(files.root)
    sweep(files.tmp)


def _close_to_others(root: Path) -> None:
    # The root alone keeps everybody out of all that is below. A folder that the rest of the world may not enter was made so on
    # purpose, and its group's rights with it. Where the setgid bit is set, the group is who shares the store.
    with suppress(OSError):
        info = root.stat()
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid == os.geteuid() and mode & 0o007:
            root.chmod(mode & ~(0o007 if mode & stat.S_ISGID else 0o077))


def _require_empty(root: Path, names: list[str]) -> None:
    foreign = sorted(n for n in names if n not in _NOT_OURS_BUT_HARMLESS and not (n[0] == "." and n.endswith(".tmp")))
    # Looked for once more: another process may have made the store between the two looks.
    if foreign and not (root / MANIFEST).exists():
        raise StoreError(
            f"{root} is not a store and not empty (it holds {foreign[0]!r}): choose an empty or new directory"
        )


def _manifest(files: StoreFiles) -> bytes | None:
    root = files.root
    try:
        return files.read(root / MANIFEST, _MOST_BYTES)
    except EntryDamagedError as error:
        raise StoreError(f"the store {root} cannot be opened, {MANIFEST}: {error}; choose another directory") from None


def store_id(root: Path, raw: bytes | None) -> str:
    """What tells a store with this manifest from others, empty where it has no id.

    Raises `StoreError` for one that cannot be used.
    """
    try:
        manifest = json.loads(raw or b"")
        kind, version, found = manifest["kind"], manifest["format"], manifest.get("id", "")
    except (ValueError, KeyError, TypeError, RecursionError):
        kind, version, found = None, 0, ""
    if kind != _KIND or type(version) is not int:
        raise StoreError(f"{root / MANIFEST} is damaged or not of kvblend: delete {root} or choose another directory")
    if version != STORE_FORMAT:
        raise StoreError(
            f"the store {root} has format {version}, this kvblend reads {STORE_FORMAT}: "
            "upgrade kvblend or choose another store"
        )
    return str(found)
