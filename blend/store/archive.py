"""A store in one file: a tar archive of its names and their bytes, as they are."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import CACHES, Backend, Range
from blend.store.base import ChunkStore
from blend.store.names import ARTIFACTS, DESCRIPTIONS, INDEXES, PINS, SOURCES, key_of
from blend.store.reader import ChunkReader

_ROOMS = (CACHES, ARTIFACTS, DESCRIPTIONS, SOURCES, PINS, INDEXES)
_LARGEST = 8 << 30


class Moved(NamedTuple):
    """names, nbytes: that were written. refused: names that were not, with the reason."""

    names: int
    nbytes: int
    refused: tuple[str, ...]


def export_store(store: ChunkStore, file: Path) -> Moved:
    """Write everything into a file, which must not be there. Raises `StoreError`."""
    names, nbytes = 0, 0
    try:
        with tarfile.open(file, "x") as archive:
            for name, content in _contents(store.backend):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
                names, nbytes = names + 1, nbytes + len(content)
    except FileExistsError:
        raise StoreError(f"{file} is there already: name another file") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror or error}): name another file") from None
    return Moved(names, nbytes, ())


def import_store(store: ChunkStore, file: Path) -> Moved:
    """Put everything that a file holds into a store, over what is there; caches that are not what was written are left out.

    Raises `StoreError`.
    """
    names, nbytes, refused = 0, 0, list[str]()
    try:
        with tarfile.open(file, "r:") as archive:
            for info in archive:
                opened = archive.extractfile(info) if info.isreg() and info.size <= _LARGEST else None
                if opened is None or not _is_ours(info.name):
                    refused.append(f"{info.name}: no name of a store")
                    continue
                content = opened.read()
                if info.name.startswith(CACHES) and (problem := _problem(store, info.name, content)):
                    refused.append(f"{info.name}: {problem}")
                    continue
                store.backend.put(info.name, [content])
                names, nbytes = names + 1, nbytes + len(content)
    except (OSError, tarfile.TarError) as error:
        raise StoreError(f"{file} cannot be read ({error}): name a file that `blend store export` wrote") from None
    store.advance()
    return Moved(names, nbytes, tuple(refused))


def verify_entry(store: ChunkStore, name: str) -> str:
    """What is wrong with a cache, every byte read; empty where nothing is. Raises `StoreError` for an outage."""
    try:
        reader = store.open(key_of(name))
        if reader is not None:
            reader.counts = False  # what is only verified must not push out of memory what prompts ask for
            with reader:
                _read_all(reader)
    except EntryDamagedError as error:
        return str(error)
    return ""


def _read_all(reader: ChunkReader) -> None:
    for index in range(reader.layers):
        reader.layer(index)


def _problem(store: ChunkStore, name: str, content: bytes) -> str:
    from blend.store.memory import MemoryBackend

    held = MemoryBackend()
    held.trusted = False
    held.put(name, [content])
    return verify_entry(store.over(held), name)


def _is_ours(name: str) -> bool:
    return name.startswith(_ROOMS) and ".." not in name.split("/") and name == name.strip("/")


def _contents(backend: Backend) -> Iterator[tuple[str, bytes]]:
    for room in _ROOMS:
        for page in backend.names(room):
            for name in page:
                content = _content(backend, name)
                if content is not None:
                    yield name, content


def _content(backend: Backend, name: str) -> bytes | None:
    """None where it has gone meanwhile, or is no file."""
    try:
        blob = backend.open(name, 0)
        if blob is None:
            return None
        try:
            content = bytearray(blob.nbytes)
            return bytes(content) if blob.read(Range(0, memoryview(content))) else None
        finally:
            blob.close()
    except EntryDamagedError:
        return None
