"""Reads documents from folders and files. Unreadable files are listed with a reason."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path, PurePath, PurePosixPath

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
    roots = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    collection = _Collection(text_field)
    read_paths: set[Path] = set()
    taken: set[str] = set()
    for root in roots:
        for path in _files(root, collection.skipped):
            if path.absolute() not in read_paths:
                read_paths.add(path.absolute())
                collection.add(path, _free_name(root, path, taken), partial(_bytes, path))
    if not collection.documents:
        raise DocumentsError(_nothing(roots, collection.skipped))
    return collection.loaded()


def load_bytes(name: str, data: bytes, text_field: str = TEXT_FIELD) -> LoadedDocuments:
    """Read every document in the bytes of a file. Its name gives the file type and the ids; no file is opened.

    Never raises: unreadable parts are in `skipped`.
    """
    collection = _Collection(text_field)
    collection.add(PurePosixPath(name), valid_name(name), lambda: data)
    return collection.loaded()


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
    return _files_below(root, skipped) if stat.S_ISDIR(mode) else iter((root,))


def _files_below(root: Path, skipped: list[SkippedDocument]) -> Iterator[Path]:
    """Files of the kinds that are read, in a fixed order: a folder's own, then those of its folders by name.

    Hidden files and folders are ignored. Links are followed, but each folder is read once. Folders that cannot be listed
    (gone, forbidden, path too long), files of other kinds and links that lead out of `root` are added to `skipped`.
    """
    where = valid_name(str(root))
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
            with os.scandir(folder) as entries:
                listed = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            unread = () if isinstance(error, FileNotFoundError) else _ids_below(root, folder)
            skipped.append(SkippedDocument(valid_name(str(folder)), f"cannot be listed ({error.strerror})", unread))
            continue
        folders = [folder / entry.name for entry in listed if _is(entry.is_dir)]
        files = [folder / entry.name for entry in listed if not _is(entry.is_dir)]
        read = [path for path in files if path.suffix.lower() in SUFFIXES]
        kinds.update(valid_name(path.suffix.lower()) for path in files if path not in read and _is(path.is_file))
        links = [folder / entry.name for entry in listed if entry.is_symlink()]
        outside += filter(None, (_link_out(root, path) for path in links if path in folders or path in read))
        yield from read
        waiting += reversed(folders)
    if outside:
        followed = f"links that lead out of it were followed: {valid_name(enumerated(outside))}"
        skipped.append(SkippedDocument(where, followed, lost=0))
    if kinds:
        counts = ", ".join(f"{number:,} {kind or 'without a suffix'}" for kind, number in kinds.most_common())
        skipped.append(SkippedDocument(where, f"kinds that are not read: {counts}", lost=kinds.total()))


def _is(kind: Callable[[], bool]) -> bool:
    """Whether an entry of a folder is of a kind; a dangling or circular link, which reading reports, is of none."""
    try:
        return kind()
    except OSError:
        return False


def _link_out(root: Path, link: Path) -> str:
    """A link that leads out of `root`, with its target; "" for others."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # reading it says why
        return ""
    return "" if target.is_relative_to(root.resolve()) else f"{link.relative_to(root)} -> {target}"


def _ids_below(root: Path, folder: Path) -> tuple[str, ...]:
    """Possible id prefixes of documents in a folder; the one in use depends on the other loaded paths."""
    relative = folder.relative_to(root).as_posix()
    inside = "" if relative == "." else relative
    names = (inside, f"{root.absolute().name}/{inside}", folder.absolute().as_posix())
    return tuple(valid_name(name).rstrip("/") + "/" for name in names)


def _free_name(root: Path, path: Path, taken: set[str]) -> str:
    """A name that no file has yet, now reserved."""
    name = root.name if path == root else path.relative_to(root).as_posix()
    whole = valid_name(path.absolute().as_posix())
    short = map(valid_name, (name, f"{root.absolute().name}/{name}"))
    choices = chain(short, (whole,), (f"{whole}~{n}" for n in count(2)))
    free = next(choice for choice in choices if choice not in taken)
    taken.add(free)
    return free


class _Collection:
    """What was read, and what was skipped. text_field: of JSONL records, that holds their text."""

    def __init__(self, text_field: str) -> None:
        self._text_field = text_field
        self.documents: dict[str, Document] = {}
        self.skipped: list[SkippedDocument] = []

    def loaded(self) -> LoadedDocuments:
        """All of it."""
        return LoadedDocuments(tuple(self.documents[name] for name in sorted(self.documents)), tuple(self.skipped))

    def add(self, path: PurePath, name: str, content: Callable[[], bytes]) -> None:
        """Read a file. name: of its documents."""
        where = valid_name(str(path))
        try:
            parts = self._read(path, content)
        except UnreadableError as error:
            self.skipped.append(SkippedDocument(where, str(error), (name,) if error.is_there else ()))
            return
        self._note(where, [part for part in parts if isinstance(part, Fault)], (name,))
        repeats: list[Fault] = []
        for part in parts:
            if isinstance(part, Part):
                record = f"#{part.name}" if part.name else ""
                text = clean(part.text)
                if not text.strip():
                    repeats.append(Fault(record, "is empty"))
                elif name + record in self.documents:
                    reason = "has the id of another record with different text; give it its own"
                    repeats.append(Fault(record, reason))
                else:
                    title = clean_title(part.title) or clean_title(valid_name(path.stem))
                    document = Document(name + record, title, text, where + record, part.markup)
                    self.documents[document.id] = document
        self._note(where, repeats, ())

    def _read(self, path: PurePath, content: Callable[[], bytes]) -> list[Part | Fault]:
        reader = reader_for(path.suffix, self._text_field)
        if reader is None:
            raise UnreadableError(f"is none of the kinds that can be read ({KINDS})")
        data = content()
        if not data.strip():
            raise UnreadableError("is empty", is_there=False)
        try:
            return reader(data, valid_name(path.stem))
        except UnreadableError:
            raise
        except MemoryError:
            raise UnreadableError(OUT_OF_MEMORY) from None
        except Exception as error:  # one file that breaks a parser must not stop the others
            raise UnreadableError(f"cannot be parsed as {path.suffix} ({type(error).__name__})") from error

    def _note(self, source: str, faults: Sequence[Fault], unread: tuple[str, ...]) -> None:
        """Note the faults of a file, one entry a reason."""
        for reason in dict.fromkeys(fault.reason for fault in faults):
            same = [fault for fault in faults if fault.reason == reason]
            places = enumerated([fault.where for fault in same])
            lost = sum(fault.lost for fault in same)
            self.skipped.append(SkippedDocument(f"{source} {places}".rstrip(), reason, unread, lost))


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
