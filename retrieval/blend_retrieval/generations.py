"""An index on disk, as generations of files that only their owner may read. A manifest names the current one.

    .lock                     held while one process writes
    manifest.json             format, embedder, dimension, form of texts, and for each file its name, size and SHA-256
    chunks-<generation>.jsonl one chunk a line
    index-<generation>.faiss  the vector of line i is vector i
    .first                    there before the first manifest and behind the last: files without one are then no damage

A writer writes and flushes a new generation, then replaces the manifest in one step, so readers see a whole generation.
The previous generation stays until the next write, because readers may still be opening it.

The name of a generation is a digest of both files. So the chunks of a damaged index can be trusted if their digest in the
manifest is right, or if there is no manifest and both files of the latest generation have the digest of their name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from blend_retrieval.errors import (
    ChunkIndexError,
    IndexBusyError,
    IndexDamagedError,
    IndexMissingError,
    IndexNewerError,
)

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_OTHERS = 0o077


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents, each for its owner alone. Raises OSError.

    `Path.mkdir` leaves the modes of parents to the umask.
    """
    if not path.parent.exists():
        make_private_folder(path.parent)
    path.mkdir(PRIVATE_FOLDER, exist_ok=True)


def make_private(path: Path) -> None:
    """Remove group's and others' rights from a file or folder of this user. Leaves links and other users' files as they are."""
    with suppress(OSError):
        status = path.lstat()
        mode = status.st_mode
        is_ours = hasattr(os, "geteuid") and status.st_uid == os.geteuid()
        if is_ours and not stat.S_ISLNK(mode) and mode & _OTHERS:
            path.chmod(stat.S_IMODE(mode) & ~_OTHERS)


FORMAT_VERSION = 1
MANIFEST, LOCK, FIRST = "manifest.json", ".lock", ".first"
LOCK_TIMEOUT = 10.0  # seconds
_SINGLE = (MANIFEST, MANIFEST + ".part", LOCK, FIRST)
_REMEDY = "run `blend precompute` again"
_GENERATION = re.compile(r"(?:chunks|index)-(?P<name>[0-9a-f]{16})\.(?:jsonl|faiss)(?:\.part)?")
_FILES = 2  # of a generation
_PART = ".part"


class Generation(NamedTuple):
    """A generation's content: the embedder's name, the vectors' length, and the bytes of both files.

    form: in which texts were embedded (`words.FORM`).
    """

    embedder: str
    dimension: int
    chunks: bytes
    vectors: bytes
    form: int


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Hold the write lock, which ends with the process. Raises `IndexBusyError` if another process keeps it."""
    from filelock import FileLock, Timeout

    try:
        make_private_folder(directory)
        keep_private(directory)
        lock = directory / LOCK
        if lock.is_dir():
            lock.rename(f"{lock}.damaged-{time.time_ns()}")
        with FileLock(lock, timeout=LOCK_TIMEOUT, mode=PRIVATE_FILE):
            yield
    except Timeout:
        raise IndexBusyError(
            f"another process is writing the index in {directory}; wait for it and try again"
        ) from None
    except OSError as error:
        raise ChunkIndexError(f"the index in {directory} cannot be written ({error.strerror or error})") from error


def keep_private(directory: Path) -> None:
    """Remove other users' access to the index, also to one of an earlier version.

    The folder's own modes stay if it holds other files, because then it is not the index's folder.
    """
    try:
        paths = list(directory.iterdir())
    except OSError:  # no index yet, or an unreadable one, which reading reports
        return
    ours = [path for path in paths if path.name in _SINGLE or _GENERATION.fullmatch(path.name)]
    for path in ours:
        make_private(path)
    if len(ours) == len(paths):
        make_private(directory)


def is_begun(directory: Path) -> bool:
    """Whether an index lies here, sound or damaged; not one whose first generation is being written."""
    if os.path.lexists(directory / MANIFEST):
        return True
    return not os.path.lexists(directory / FIRST) and bool(_generations(directory))


def _generations(directory: Path) -> list[str]:
    """The names of the generations that have files here, the latest last; none if the latest lacks one of both."""
    ages: dict[str, int] = {}
    counts = Counter[str]()
    with suppress(OSError):
        for path in directory.iterdir():
            match = _GENERATION.fullmatch(path.name)
            if match and not path.name.endswith(_PART):
                name = match["name"]
                ages[name] = max(ages.get(name, 0), path.stat().st_mtime_ns)
                counts[name] += 1
    names = sorted(ages, key=ages.__getitem__)
    return names if names and counts[names[-1]] == _FILES else []


def salvaged_chunks(directory: Path) -> bytes | None:
    """The chunks of a damaged index as they were written; None if they are damaged, too. Raises `IndexNewerError`."""
    names = _generations(directory)[-1:]
    try:
        manifest = _read_manifest(directory)
    except IndexNewerError:
        raise
    except ChunkIndexError:
        pass
    else:
        file, digest = manifest.files[0]
        data = _bytes_of(directory / file)
        if _sha256(data) == digest:
            return data
        names = [name for name in names if file == f"chunks-{name}.jsonl"]
    for name in names:
        data = _bytes_of(directory / f"chunks-{name}.jsonl")
        vectors = _bytes_of(directory / f"index-{name}.faiss")
        if _sha256(data + vectors).startswith(name):
            return data
    return None


def _bytes_of(path: Path) -> bytes:
    """A file's content; none of a file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def set_index_aside(directory: Path) -> None:
    """Move the files of a damaged index into a folder `damaged-<time>` next to them. The caller holds the lock."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    names = (f"damaged-{stamp}{end}" for end in ("", *(f"-{number}" for number in range(2, 1000))))
    folder = next(place for name in names if not (place := directory / name).exists())
    make_private_folder(folder)
    for path in list(directory.iterdir()):
        if path.name == MANIFEST or _GENERATION.fullmatch(path.name):
            path.replace(folder / path.name)


def forget_index(directory: Path) -> None:
    """Delete an index. Raises OSError."""
    if not directory.is_dir():
        return
    _write(directory / FIRST, b"")  # what is left meanwhile is no damage
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in list(directory.glob("*")):
        if _GENERATION.fullmatch(path.name):
            path.unlink(missing_ok=True)
    (directory / FIRST).unlink(missing_ok=True)


def write_generation(directory: Path, generation: Generation) -> None:
    """Make this generation the current one. The caller holds the lock."""
    name = _sha256(generation.chunks + generation.vectors)[:16]
    contents = {f"chunks-{name}.jsonl": generation.chunks, f"index-{name}.faiss": generation.vectors}
    fields = {
        "format": FORMAT_VERSION,
        "embedder": generation.embedder,
        "dimension": generation.dimension,
        "form": generation.form,
        "files": {file: {"bytes": len(data), "sha256": _sha256(data)} for file, data in contents.items()},
    }
    manifest = json.dumps(fields, indent=1)
    _install(directory, manifest.encode(), contents.items())


def _install(directory: Path, manifest: bytes, contents: Iterable[tuple[str, bytes]]) -> None:
    """Write the files of a generation, and then its manifest."""
    _remove_others(directory)
    is_first = not os.path.lexists(directory / MANIFEST)
    if is_first:
        _write(directory / FIRST, b"")
    for name, data in contents:
        _write(directory / name, data)
    _write(directory / MANIFEST, manifest)
    (directory / FIRST).unlink(missing_ok=True)


def read_generation(directory: Path) -> Generation:
    """Read the current generation and check every byte. Raises `IndexMissingError` or `IndexDamagedError`."""
    keep_private(directory)
    manifest = _read_manifest(directory)
    try:
        return _read_files(directory, manifest)
    except FileNotFoundError:  # a writer may have replaced this generation meanwhile
        if _read_manifest(directory) != manifest:
            return read_generation(directory)
        raise IndexDamagedError(f"the index in {directory} lacks files that it names; {_REMEDY}") from None
    except IsADirectoryError:
        raise IndexDamagedError(f"a file of the index in {directory} is a folder; {_REMEDY}") from None
    except OSError as error:
        raise ChunkIndexError(f"the index in {directory} cannot be read ({error.strerror})") from error


def generation_files(directory: Path) -> tuple[bytes, dict[str, Path]]:
    """The bytes of the current manifest, and the files that it names. Raises `IndexMissingError` or `IndexDamagedError`."""
    content = _manifest_bytes(directory)
    manifest = _parse_manifest(content, directory)
    paths = {name: directory / name for name, _ in manifest.files}
    return content, paths


def install_generation(directory: Path, manifest: bytes, read: Callable[[str], bytes]) -> None:
    """Copy a generation from elsewhere and make it the current one.

    read: the content of a file by its name in the manifest. Every byte and every name is checked before it is written.
    Raises `IndexDamagedError`, and what `read` raises; the index is then unchanged. The caller holds the lock.
    """

    def contents() -> Iterator[tuple[str, bytes]]:
        for name, digest in parsed.files:
            data = read(name)
            if _sha256(data) != digest:
                raise IndexDamagedError(f"{name} of the index for {directory} is not as it was written; {_REMEDY}")
            yield name, data

    parsed = _parse_manifest(manifest, directory)
    _install(directory, manifest, contents())


def manifest_digest(directory: Path) -> str:
    """A digest that changes with the current generation; empty if the manifest is missing or unreadable."""
    try:
        return _sha256((directory / MANIFEST).read_bytes())
    except OSError:  # reading the index reports it
        return ""


class _Manifest(NamedTuple):
    embedder: str
    dimension: int
    files: tuple[tuple[str, str], ...]  # (name, SHA-256): the chunks, then the index
    form: int


def _read_manifest(directory: Path) -> _Manifest:
    content = _manifest_bytes(directory)
    return _parse_manifest(content, directory)


def _manifest_bytes(directory: Path) -> bytes:
    try:
        with suppress(FileNotFoundError):
            return (directory / MANIFEST).read_bytes()
        is_first = os.path.lexists(directory / FIRST)
        with suppress(FileNotFoundError):  # the first one may have been written meanwhile
            return (directory / MANIFEST).read_bytes()
        if _generations(directory) and not is_first:
            raise IndexDamagedError(f"the index in {directory} has lost its {MANIFEST}; {_REMEDY}")
        raise IndexMissingError(f"no index in {directory}; run `blend precompute` on your documents first")
    except IsADirectoryError:
        raise IndexDamagedError(f"the {MANIFEST} of the index in {directory} is a folder; {_REMEDY}") from None
    except OSError as error:
        raise ChunkIndexError(f"the index in {directory} cannot be read ({error.strerror})") from error


def _parse_manifest(content: bytes, directory: Path) -> _Manifest:
    try:
        raw = json.loads(content)
        version = raw["format"]
        if type(version) is int and version > FORMAT_VERSION:
            raise IndexNewerError(
                f"the index in {directory} was written by a later version of kvblend: update this one, or {_REMEDY}"
            )
        if version != FORMAT_VERSION:
            raise IndexDamagedError(
                f"the index in {directory} has format {raw['format']}, not {FORMAT_VERSION}; {_REMEDY}"
            )
        names = raw["files"].keys()
        if len(names) != 2 or not all(map(_GENERATION.fullmatch, names)):
            raise ValueError("files")
        files = tuple((name, str(entry["sha256"])) for name, entry in raw["files"].items())
        form = int(raw.get("form", 1))  # versions before wrote none
        return _Manifest(str(raw["embedder"]), int(raw["dimension"]), files, form)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise IndexDamagedError(f"the manifest of the index in {directory} is damaged; {_REMEDY}") from None


def _read_files(directory: Path, manifest: _Manifest) -> Generation:
    contents = []
    for name, digest in manifest.files:
        data = (directory / name).read_bytes()
        if _sha256(data) != digest:
            raise IndexDamagedError(f"{directory / name} is not as it was written; {_REMEDY}")
        contents.append(data)
    chunks, vectors = contents
    return Generation(manifest.embedder, manifest.dimension, chunks, vectors, manifest.form)


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically and sync it before later writes."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a killed writer, perhaps readable by all
    try:
        with open(part, "xb", opener=partial(os.open, mode=PRIVATE_FILE)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # after a full disk


def _remove_others(directory: Path) -> None:
    """Remove files of generations before the current one, and leftovers of failed writers, to make room on a full disk."""
    try:
        current = {name for name, _ in _read_manifest(directory).files}
    except ChunkIndexError:
        return
    for path in directory.iterdir():
        if _GENERATION.fullmatch(path.name) and path.name not in current:
            path.unlink(missing_ok=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
