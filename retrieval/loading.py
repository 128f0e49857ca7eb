"""Folders and files to documents: what can be read is, the rest is named with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from retrieval.document import Document, LoadedDocuments, SkippedDocument
from retrieval.errors import DocumentsError
from retrieval.readers import SUFFIXES, Fault, Part, UnreadableError, reader_for
from retrieval.readers.text import clean

_KINDS = " ".join(SUFFIXES)


def load_documents(paths: str | Path | Iterable[str | Path]) -> LoadedDocuments:
    """Read every document in these files and folders.

    Folders are read recursively, through symbolic links but each folder once; hidden files and files of other kinds in
    them are passed over in silence, while a file that is named but cannot be read is reported. Two documents never
    share an id: where relative paths collide, the folder's name, or else the whole path, is put in front.

    Raises `DocumentsError` when a path does not exist or nothing at all could be read.
    """
    roots = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    documents: dict[str, Document] = {}
    skipped: list[SkippedDocument] = []
    seen: set[Path] = set()
    taken: set[str] = set()
    for root in roots:
        if not root.exists():
            raise DocumentsError(f"no such file or folder: {root}")
        for path, name in _files(root, skipped):
            if (where := path.absolute()) not in seen:
                seen.add(where)
                _load_file(path, _free_name(name, root, path, taken), documents, skipped)
    if not documents:
        raise DocumentsError(_nothing(roots, skipped))
    return LoadedDocuments(tuple(documents[name] for name in sorted(documents)), tuple(skipped))


def _nothing(roots: list[Path], skipped: list[SkippedDocument]) -> str:
    where = ", ".join(map(str, roots)) or "an empty list of paths"
    first = f"; {skipped[0].source} {skipped[0].reason}" if skipped else ""
    more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
    return f"no readable document in {where}{first}{more}; give files or a folder of {_KINDS}"


def _files(root: Path, skipped: list[SkippedDocument]) -> Iterator[tuple[Path, str]]:
    """Files with their names below `root`, in a fixed order. A folder that a link leads back to is entered once."""
    if root.is_file():
        yield root, root.name
        return

    def unlistable(error: OSError) -> None:
        skipped.append(SkippedDocument(str(error.filename), f"cannot be listed ({error.strerror})"))

    entered: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=unlistable):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.suffix.lower() in SUFFIXES:
                yield path, path.relative_to(root).as_posix()


def _free_name(name: str, root: Path, path: Path, taken: set[str]) -> str:
    """A name that no file has yet, which is then taken."""
    choices = (name, f"{root.absolute().name}/{name}", path.absolute().as_posix())
    free = next((choice for choice in choices if choice not in taken), choices[-1])
    taken.add(free)
    return free


def _load_file(path: Path, name: str, documents: dict[str, Document], skipped: list[SkippedDocument]) -> None:
    try:
        parts = _read(path)
    except UnreadableError as error:
        skipped.append(SkippedDocument(str(path), str(error)))
        return
    for part in parts:
        if isinstance(part, Fault):
            skipped.append(SkippedDocument(f"{path} {part.where}", part.reason))
            continue
        source = f"{path}#{part.name}" if part.name else str(path)
        key = f"{name}#{part.name}" if part.name else name
        if not (text := clean(part.text)).strip():
            skipped.append(SkippedDocument(source, "is empty"))
        elif key in documents:
            skipped.append(SkippedDocument(source, "has the id of another record with different text; give it its own"))
        else:
            documents[key] = Document(key, " ".join(clean(part.title).split()), text, source)


def _read(path: Path) -> list[Part | Fault]:
    reader = reader_for(path.suffix)
    if reader is None:
        raise UnreadableError(f"is none of the kinds that can be read ({_KINDS})")
    if not path.is_file():
        raise UnreadableError("is not a regular file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror})") from None
    if not data.strip():
        raise UnreadableError("is empty")
    try:
        return reader(data, path.stem)
    except UnreadableError:
        raise
    except Exception as error:  # one file that a parser trips over must not cost the others
        raise UnreadableError(f"cannot be parsed as {path.suffix} ({type(error).__name__})") from error
