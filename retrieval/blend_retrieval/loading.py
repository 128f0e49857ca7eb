"""Reads documents from folders and files. Unreadable files are listed with a reason."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from blend_retrieval.decoding import DecodingError
from blend_retrieval.document import (
    Document,
    LoadedDocuments,
    SkippedDocument,
    clean,
    clean_title,
    enumerated,
    summarized,
    valid_name,
)
from blend_retrieval.errors import DocumentsError
from blend_retrieval.readers import KINDS, SUFFIXES, TEXT_FIELD, Fault, Part, UnreadableError, reader_for


class _Listing(NamedTuple):
    """A folder's files and folders, sorted by name. links: those of them that are symbolic links."""

    files: list[Path]
    folders: list[Path]
    links: list[Path]


def files_below(
    root: Path,
    suffixes: tuple[str, ...],
    skipped: list[SkippedDocument],
) -> Iterator[Path]:
    """Files with one of these suffixes in a fixed order: a folder's own, then those of its folders by name.

    Hidden files and folders are ignored. Links are followed, but each folder is read once. Folders that cannot be listed
    (gone, forbidden, path too long), files of other kinds and links that lead out of `root` are added to `skipped`.
    """
    entered: set[tuple[int, int]] = set()
    kinds: Counter[str] = Counter()
    outside: list[str] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            listing = _list(folder, suffixes, kinds)
        except OSError as error:
            unread = () if isinstance(error, FileNotFoundError) else _ids_below(root, folder)
            skipped.append(SkippedDocument(valid_name(str(folder)), f"cannot be listed ({error.strerror})", unread))
            continue
        yield from listing.files
        waiting += reversed(listing.folders)
        outside += _links_out(root, listing.links)
    if outside:
        followed = valid_name(enumerated(outside))
        skipped.append(
            SkippedDocument(valid_name(str(root)), f"links that lead out of it were followed: {followed}", (), 0)
        )
    if kinds:
        counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
        skipped.append(SkippedDocument(valid_name(str(root)), f"kinds that are not read: {counts}", (), kinds.total()))


def _links_out(root: Path, links: Iterable[Path]) -> Iterator[str]:
    """The links that lead out of `root`, each with its target."""
    for link in links:
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):  # reading it says why
            continue
        if not target.is_relative_to(root.resolve()):
            yield f"{link.relative_to(root)} -> {target}"


def _ids_below(root: Path, folder: Path) -> tuple[str, ...]:
    """Possible id prefixes of documents in a folder; the one in use depends on the other loaded paths."""
    relative = folder.relative_to(root).as_posix()
    inside = "" if relative == "." else relative
    names = (inside, f"{root.absolute().name}/{inside}", folder.absolute().as_posix())
    return tuple(valid_name(name).rstrip("/") + "/" for name in names)


def _list(
    folder: Path,
    suffixes: tuple[str, ...],
    kinds: Counter[str],
) -> _Listing:
    files = []
    folders = []
    links = []
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                folders.append(path)
            elif path.suffix.lower() in suffixes:
                files.append(path)
            elif _is_file(entry):
                kinds[valid_name(path.suffix.lower()) or "without a suffix"] += 1
                continue
            if entry.is_symlink():
                links.append(path)
    return _Listing(sorted(files, key=_name), sorted(folders, key=_name), sorted(links, key=_name))


def _name(path: Path) -> str:
    return path.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a dangling or circular link, which reading reports
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


OUT_OF_MEMORY = "needs more memory to be read than it may have: divide it"
_NAMED_REASONS = 3


def load_documents(paths: str | Path | Iterable[str | Path], *, text_field: str = TEXT_FIELD) -> LoadedDocuments:
    """Read every document in these files and folders.

    Folders are read recursively. Symbolic links are followed, but each folder is read once; `skipped` notes links that lead
    out of a folder. Hidden files in folders are ignored; everything else that is not read is in `skipped`. Ids are unique: if
    relative paths collide, the folder's name or the whole path comes first.

    Args:
        paths: files and folders.
        text_field: the field of JSONL records that holds their text.

    Raises:
        DocumentsError: a path does not exist, or nothing could be read.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    roots = [Path(path) for path in paths]
    documents: dict[str, Document] = {}
    skipped: list[SkippedDocument] = []
    read_paths: set[Path] = set()
    taken: set[str] = set()
    for root in roots:
        for path in _files(root, skipped):
            if path.absolute() in read_paths:
                continue
            read_paths.add(path.absolute())
            read = partial(_read, path, partial(_bytes, path), text_field)
            name = _free_name(root, path, taken)
            _load(path, read, name, documents, skipped)
    if not documents:
        raise DocumentsError(_nothing(roots, skipped))
    return LoadedDocuments(tuple(documents[name] for name in sorted(documents)), tuple(skipped))


def load_bytes(
    name: str,
    data: bytes,
    text_field: str = TEXT_FIELD,
) -> LoadedDocuments:
    """Read every document in the bytes of a file. Its name gives the file type and the ids; no file is opened.

    Never raises: unreadable parts are in `skipped`.
    """
    documents: dict[str, Document] = {}
    skipped: list[SkippedDocument] = []
    path = PurePosixPath(name)
    _load(path, partial(_read, path, lambda: data, text_field), valid_name(name), documents, skipped)
    return LoadedDocuments(tuple(documents[key] for key in sorted(documents)), tuple(skipped))


def _nothing(roots: list[Path], skipped: list[SkippedDocument]) -> str:
    where = ", ".join(valid_name(str(root)) for root in roots) or "an empty list of paths"
    reasons = "".join(f"; {entry.source} {entry.reason}" for entry in summarized(skipped)[:_NAMED_REASONS])
    return f"no readable document in {where}{reasons}; give files or a folder of {KINDS}"


def _files(root: Path, skipped: list[SkippedDocument]) -> Iterator[Path]:
    """The file `root`, or the files below it."""
    try:
        mode = root.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise DocumentsError(f"no such file or folder: {valid_name(str(root))}") from None
    except OSError as error:
        raise DocumentsError(f"{valid_name(str(root))} cannot be read ({error.strerror})") from None
    return files_below(root, SUFFIXES, skipped) if stat.S_ISDIR(mode) else iter((root,))


def _free_name(
    root: Path,
    path: Path,
    taken: set[str],
) -> str:
    """A name that no file has yet, now reserved."""
    name = root.name if path == root else path.relative_to(root).as_posix()
    whole = valid_name(path.absolute().as_posix())
    short = map(valid_name, (name, f"{root.absolute().name}/{name}"))
    numbered = (f"{whole}~{n}" for n in count(2))
    choices = chain(short, (whole,), numbered)
    free = next(choice for choice in choices if choice not in taken)
    taken.add(free)
    return free


def _load(
    path: PurePath,
    read: Callable[[], list[Part | Fault]],
    name: str,
    documents: dict[str, Document],
    skipped: list[SkippedDocument],
) -> None:
    where = valid_name(str(path))
    try:
        parts = read()
    except UnreadableError as error:
        unread = (name,) if error.is_there else ()
        skipped.append(SkippedDocument(where, str(error), unread))
        return
    faults = [part for part in parts if isinstance(part, Fault)]
    repeats: list[Fault] = []
    for part in parts:
        if isinstance(part, Fault):
            continue
        record = f"#{part.name}" if part.name else ""
        key = name + record
        text = clean(part.text)
        if not text.strip():
            repeats.append(Fault(record, "is empty"))
        elif key in documents:
            repeats.append(Fault(record, "has the id of another record with different text; give it its own"))
        else:
            title = clean_title(part.title) or clean_title(valid_name(path.stem))
            documents[key] = Document(key, title, text, where + record, part.markup)
    skipped += [*_grouped(where, faults, (name,)), *_grouped(where, repeats, ())]


def _grouped(
    source: str,
    faults: Sequence[Fault],
    unread: tuple[str, ...],
) -> Iterator[SkippedDocument]:
    """The faults of a file, one entry a reason."""
    for reason in dict.fromkeys(fault.reason for fault in faults):
        same = [fault for fault in faults if fault.reason == reason]
        places = enumerated([fault.where for fault in same])
        lost = sum(fault.lost for fault in same)
        yield SkippedDocument(f"{source} {places}".rstrip(), reason, unread, lost)


def _read(
    path: PurePath,
    content: Callable[[], bytes],
    text_field: str,
) -> list[Part | Fault]:
    reader = reader_for(path.suffix, text_field)
    if reader is None:
        raise UnreadableError(f"is none of the kinds that can be read ({KINDS})")
    data = content()
    if not data.strip():
        raise UnreadableError("is empty", is_there=False)
    try:
        return reader(data, valid_name(path.stem))
    except UnreadableError:
        raise
    except DecodingError as error:
        raise UnreadableError(str(error)) from None
    except MemoryError:
        raise UnreadableError(OUT_OF_MEMORY) from None
    except Exception as error:  # one file that breaks a parser must not stop the others
        raise UnreadableError(f"cannot be parsed as {path.suffix} ({type(error).__name__})") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _bytes(path: Path) -> bytes:
    """Content of a regular file. Other files are not opened, because opening may block or start a device."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableError("is not a regular file")
        # It may have been replaced since, so opening must not block.
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableError("is not a regular file")
            return file.read()
    except OSError as error:
        is_there = not isinstance(error, FileNotFoundError)  # removed meanwhile, or a dangling link
        raise UnreadableError(f"cannot be read ({error.strerror})", is_there=is_there) from None
    except MemoryError:
        raise UnreadableError("is too large for the memory of this machine") from None
