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

from blend_retrieval.decoding import BinaryError, DecodingError, decode
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
from blend_retrieval.readers import KINDS, TEXT_FIELD, Fault, Parts, UnreadableError, is_template, kind_of, reader_for
from blend_retrieval.readers.xml_trees import TOO_DEEP

OUT_OF_MEMORY = "needs more memory to be read than it may have: divide it"
_NAMED_REASONS = 3
_HEAD = 1 << 16  # bytes that tell whether a file without a suffix is text

ReadFile = Callable[[Path, str], Parts]
"""(path, the field of JSONL records that holds their text) -> what the file holds. Raises `UnreadableError`."""


def load_documents(
    paths: str | Path | Iterable[str | Path], *, text_field: str = TEXT_FIELD, read: ReadFile | None = None
) -> LoadedDocuments:
    """Read every document in these files and folders.

    Folders are read recursively. Symbolic links are followed, but each folder is read once; `skipped` notes links that lead
    out of a folder. Hidden files in folders are ignored; everything else that is not read is in `skipped`. Ids are unique: if
    relative paths collide, the folder's name or the whole path comes first.

    Args:
        paths: files and folders.
        text_field: the field of JSONL records that holds their text.
        read: reads a file; by default in this process. `ReaderProcess.read` reads it in one with limits.

    Raises:
        DocumentsError: a path does not exist, or nothing could be read.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    roots = [Path(path) for path in paths]
    read_file = read or parts_of
    collection = _Collection()
    read_paths: set[Path] = set()
    taken: set[str] = set()
    for root in roots:
        for path in _files(root, collection.skipped):
            whole_path = path.absolute()
            if whole_path not in read_paths:
                read_paths.add(whole_path)
                name = _free_name(root, path, taken)
                collection.add(path, name, partial(read_file, path, text_field))
    if not collection.documents:
        raise DocumentsError(_nothing(roots, collection.skipped))
    return collection.loaded()


def load_bytes(name: str, data: bytes, text_field: str = TEXT_FIELD) -> LoadedDocuments:
    """Read every document in the bytes of a file. Its name gives the file type and the ids; no file is opened.

    Never raises: unreadable parts are in `skipped`.
    """
    path = PurePosixPath(name)
    collection = _Collection()
    collection.add(path, valid_name(name), lambda: _parts(path, lambda: data, text_field))
    return collection.loaded()


def parts_of(path: Path, text_field: str = TEXT_FIELD) -> Parts:
    """The documents of a file, and what could not be read of it. Raises `UnreadableError`."""
    return _parts(path, partial(_bytes, path), text_field)


def _parts(path: PurePath, content: Callable[[], bytes], text_field: str) -> Parts:
    kind = kind_of(path.name)
    reader = None if kind is None else reader_for(kind, text_field)
    if reader is None:
        raise UnreadableError(f"is none of the kinds that can be read ({KINDS})")
    data = content()
    if not data.strip():
        raise UnreadableError("is empty", is_there=False)
    try:
        return reader(data, _named(path))
    except UnreadableError:
        raise
    except MemoryError:
        raise UnreadableError(OUT_OF_MEMORY) from None
    except RecursionError:
        raise UnreadableError(TOO_DEEP) from None
    except Exception as error:  # one file that breaks a parser must not stop the others
        raise UnreadableError(f"cannot be parsed as {path.suffix} ({type(error).__name__})") from error


def _nothing(roots: list[Path], skipped: list[SkippedDocument]) -> str:
    where = ", ".join(map(_valid_path, roots)) or "an empty list of paths"
    named = summarized(skipped)[:_NAMED_REASONS]
    reasons = "".join(f"; {entry.source} {entry.reason}" for entry in named)
    return f"no readable document in {where}{reasons}; give files or a folder of {KINDS}"


def _valid_path(path: PurePath) -> str:
    return valid_name(str(path))


def _files(root: Path, skipped: list[SkippedDocument]) -> Iterator[Path]:
    """The file `root`, or the files below it."""
    try:
        mode = root.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise DocumentsError(f"no such file or folder: {_valid_path(root)}") from None
    except OSError as error:
        raise DocumentsError(f"{_valid_path(root)} cannot be read ({error.strerror})") from None
    if stat.S_ISDIR(mode):
        return _files_below(root, skipped)
    return iter([root])


def _files_below(root: Path, skipped: list[SkippedDocument]) -> Iterator[Path]:
    """Files of the kinds that are read, in a fixed order: a folder's own, then those of its folders by name.

    Hidden files and folders are ignored. Links are followed, but each folder is read once. Folders that cannot be listed
    (gone, forbidden, path too long), files of other kinds and links that lead out of `root` are added to `skipped`.
    """
    where = _valid_path(root)
    entered: set[tuple[int, int]] = set()
    kinds: Counter[str] = Counter()
    outside: list[str] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in entered:
                continue
            entered.add(identity)
            listing = _listing(folder)
        except OSError as error:
            reason = f"cannot be listed ({error.strerror})"
            unread = () if isinstance(error, FileNotFoundError) else _ids_below(root, folder)
            skipped.append(SkippedDocument(_valid_path(folder), reason, unread))
            continue
        for link in listing.links:
            outside += _links_out(root, link)
        kinds += listing.kinds
        yield from listing.files
        waiting += reversed(listing.folders)
    if outside:
        followed = f"links that lead out of it were followed: {valid_name(enumerated(outside))}"
        skipped.append(SkippedDocument(where, followed, lost=0))
    if kinds:
        counts = [f"{number:,} {kind or 'without a suffix'}" for kind, number in kinds.most_common()]
        reason = f"kinds that are not read: {', '.join(counts)}"
        skipped.append(SkippedDocument(where, reason, lost=kinds.total()))


class _Listing(NamedTuple):
    """What a folder holds: folders, files that are read, the links among both, and the number of other files of each kind."""

    folders: list[Path]
    files: list[Path]
    links: list[Path]
    kinds: Counter[str]


def _listing(folder: Path) -> _Listing:
    """A folder's content in the order of names, without hidden entries. Raises OSError."""
    listing = _Listing([], [], [], Counter())
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if _is_visible(entry)]
    for entry in sorted(visible, key=lambda entry: entry.name):
        path = folder / entry.name
        kind = kind_of(entry.name)
        if _is(entry.is_dir):
            listing.folders.append(path)
        elif kind or (kind == "" and _is(entry.is_file) and _may_be_text(path)):
            listing.files.append(path)
        else:
            if _is(entry.is_file):
                listing.kinds[valid_name(path.suffix.lower())] += 1
            continue
        if entry.is_symlink():
            listing.links.append(path)
    return listing


def _is_visible(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is not hidden. Templates such as .env.example are read."""
    return not entry.name.startswith(".") or (is_template(entry.name) and not _is(entry.is_dir))


def _may_be_text(path: Path) -> bool:
    """Whether a file without a suffix is not binary, by its beginning; one that cannot be opened is read to say why."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return True
    whole_lines = head[: head.rfind(b"\n") + 1] or head
    try:
        decode(whole_lines if len(head) == _HEAD else head)
    except BinaryError:
        return False
    except DecodingError:  # reading it says why
        return True
    return True


def _is(kind: Callable[[], bool]) -> bool:
    """Whether an entry of a folder is of a kind; a dangling or circular link, which reading reports, is of none."""
    try:
        return kind()
    except OSError:
        return False


def _links_out(root: Path, link: Path) -> Iterator[str]:
    """The link with its target, if it leads out of `root`."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # reading it says why
        return
    if not target.is_relative_to(root.resolve()):
        yield f"{link.relative_to(root)} -> {target}"


def _ids_below(root: Path, folder: Path) -> tuple[str, ...]:
    """Possible id prefixes of documents in a folder; the one in use depends on the other loaded paths."""
    relative = folder.relative_to(root).as_posix()
    inside = "" if relative == "." else relative
    names = (inside, f"{root.absolute().name}/{inside}", folder.absolute().as_posix())
    return tuple(valid_name(name).rstrip("/") + "/" for name in names)


def _free_name(root: Path, path: Path, taken: set[str]) -> str:
    """A name that no file has yet, now reserved."""
    name = root.name if path == root else path.relative_to(root).as_posix()
    whole = path.absolute().as_posix()
    numbered = (f"{whole}~{number}" for number in count(2))
    choices = chain((name, f"{root.absolute().name}/{name}", whole), numbered)
    free = next(choice for choice in map(valid_name, choices) if choice not in taken)
    taken.add(free)
    return free


class _Collection:
    """What was read, and what was skipped."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}
        self.skipped: list[SkippedDocument] = []

    def loaded(self) -> LoadedDocuments:
        """All of it."""
        documents = sorted(self.documents.values())  # by id
        return LoadedDocuments(tuple(documents), tuple(self.skipped))

    def add(self, path: PurePath, name: str, read: Callable[[], Parts]) -> None:
        """Read a file. name: of its documents."""
        where = _valid_path(path)
        try:
            parts = read()
        except UnreadableError as error:
            unread = (name,) if error.is_there else ()
            self.skipped.append(SkippedDocument(where, str(error), unread))
            return
        faults = [part for part in parts if isinstance(part, Fault)]
        self._note(where, faults, (name,))
        useless: list[Fault] = []
        for part in parts:
            if isinstance(part, Fault):
                continue
            record = f"#{part.name}" if part.name else ""
            text = clean(part.text)
            if not text.strip():
                useless.append(Fault(record, "is empty"))
            elif name + record in self.documents:
                reason = "has the id of another record with different text; give it its own"
                useless.append(Fault(record, reason))
            else:
                self.documents[name + record] = Document(
                    id=name + record,
                    title=clean_title(part.title) or clean_title(_named(path)),
                    text=text,
                    source=where + record,
                    markup=part.markup,
                )
        self._note(where, useless, ())

    def _note(self, source: str, faults: Sequence[Fault], unread: tuple[str, ...]) -> None:
        """Note the faults of a file, one entry a reason."""
        for reason in dict.fromkeys(fault.reason for fault in faults):
            same = [fault for fault in faults if fault.reason == reason]
            places = enumerated([fault.where for fault in same])
            where = f"{source} {places}".rstrip()
            lost = sum(fault.lost for fault in same)
            self.skipped.append(SkippedDocument(where, reason, unread, lost))


def _named(path: PurePath) -> str:
    """The title of a file that names none."""
    return valid_name(path.stem if kind_of(path.name) else path.name)


def _bytes(path: Path) -> bytes:
    """Content of a regular file. Other files are not opened, because opening may block or start a device."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableError("is not a regular file")
        return path.read_bytes()
    except OSError as error:
        is_there = not isinstance(error, FileNotFoundError)  # removed meanwhile, or a dangling link
        raise UnreadableError(f"cannot be read ({error.strerror})", is_there=is_there) from None
    except MemoryError:
        raise UnreadableError("is too large for the memory of this machine") from None
