"""The files below a folder, whatever its depth and whatever happens to it meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blend_retrieval.document import SkippedDocument, valid_name


class _Listing(NamedTuple):
    """What a folder holds, sorted by name."""

    files: list[Path]
    folders: list[Path]


def files_below(root: Path, suffixes: tuple[str, ...], skipped: list[SkippedDocument]) -> Iterator[Path]:
    """Files with one of these suffixes, in a fixed order: those of a folder, then those of its folders by name.

    Hidden files and folders are passed over. Links are followed, but each folder is entered once. A folder that cannot
    be listed (gone, forbidden, its path too long for the system) is put to `skipped`.
    """
    entered: set[tuple[int, int]] = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            listing = _list(folder, suffixes)
        except OSError as error:
            unread = () if isinstance(error, FileNotFoundError) else _ids_below(root, folder)
            skipped.append(SkippedDocument(valid_name(str(folder)), f"cannot be listed ({error.strerror})", unread))
            continue
        yield from listing.files
        waiting += reversed(listing.folders)


def _ids_below(root: Path, folder: Path) -> tuple[str, ...]:
    """What the ids of documents in a folder begin with; which of these is in use depends on what else was loaded."""
    name = folder.relative_to(root).as_posix()
    inside = "" if name == "." else name
    names = (inside, f"{root.absolute().name}/{inside}", folder.absolute().as_posix())
    return tuple(valid_name(one).rstrip("/") + "/" for one in names)


def _list(folder: Path, suffixes: tuple[str, ...]) -> _Listing:
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                folders.append(folder / entry.name)
            elif (path := folder / entry.name).suffix.lower() in suffixes:
                files.append(path)
    return _Listing(sorted(files, key=_name), sorted(folders, key=_name))


def _name(path: Path) -> str:
    return path.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads nowhere or in circles; reading it will say so
        return False
