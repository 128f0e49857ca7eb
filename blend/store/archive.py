"""A store in one file: a tar archive of its names and their bytes, as they are; the last member says how much it is.

kvblend-archive.json   {"format": 1, "names": ..., "bytes": ...}: of all members in front of it
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError
from blend.files import write_atomically
from blend.store.admin import PINNED
from blend.store.backend import ARTIFACTS, CACHES, DESCRIPTIONS, INDEXES, PINS, SOURCES, Backend, Range, is_name, key_of
from blend.store.base import ChunkStore
from blend.store.reader import ChunkReader
from blend.store.seal import MOST_BYTES

_ROOMS = (CACHES, ARTIFACTS, DESCRIPTIONS, SOURCES, PINS, INDEXES)
_END, _FORMAT = "kvblend-archive.json", 1
_LARGEST = 8 << 30
_MANIFEST = "/manifest.json"
_NOT_OURS = "name a file that `blend store export` wrote"


class Moved(NamedTuple):
    """names, nbytes: that were written. refused: names that were not, with the reason."""

    names: int
    nbytes: int
    refused: tuple[str, ...]


def export_store(store: ChunkStore, file: Path) -> Moved:
    """Write everything into a file, which must not be there: all of it, for its owner alone, or none. Raises `StoreError`."""
    sizes: list[int] = []
    try:
        with _still_free(file):
            write_atomically(file, _written(store.backend, sizes), placing=_still_free(file))
    except FileExistsError:
        raise StoreError(f"{file} is there already: name another file") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror or error}): name another file") from None
    return Moved(len(sizes), sum(sizes), ())


def import_store(open_store: Callable[[], ChunkStore], file: Path) -> Moved:
    """Put everything that a file holds into a store, over what is there; what is not as it was written is left out.

    open_store: called when the file has turned out to be whole. Nothing is put that this store, with its key, would not use
    itself; the manifests of indexes come last. Raises `StoreError`.
    """
    try:
        with tarfile.open(file, "r:") as archive:
            members = _members(archive, file)
            return _imported(open_store(), archive, members)
    except (OSError, tarfile.TarError) as error:
        raise StoreError(f"{file} cannot be read ({error}): {_NOT_OURS}") from None


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


def _written(backend: Backend, sizes: list[int]) -> Iterator[bytes | memoryview]:
    """The archive, piece by piece. sizes: gets that of each name."""
    for name, content in _contents(backend):
        sizes.append(content.nbytes)
        yield from _member(name, content)
    end = {"format": _FORMAT, "names": len(sizes), "bytes": sum(sizes)}
    yield from _member(_END, memoryview(json.dumps(end).encode()))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(name: str, content: memoryview) -> Iterator[bytes | memoryview]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = content.nbytes, 0o600
    yield info.tobuf()
    yield content
    yield bytes(-content.nbytes % tarfile.BLOCKSIZE)


def _contents(backend: Backend) -> Iterator[tuple[str, memoryview]]:
    for room in _ROOMS:
        for page in backend.names(room):
            for name in page:
                content = _content(backend, name)
                if content is not None:
                    yield name, content


def _content(backend: Backend, name: str) -> memoryview | None:
    """None where it has gone meanwhile, or is no file."""
    try:
        blob = backend.open(name, 0)
        if blob is None:
            return None
        try:
            content = memoryview(bytearray(blob.nbytes))
            return content if blob.read(Range(0, content)) else None
        finally:
            blob.close()
    except EntryDamagedError:
        return None


@contextmanager
def _still_free(file: Path) -> Iterator[None]:
    if file.exists() or file.is_symlink():
        raise FileExistsError
    yield


def _members(archive: tarfile.TarFile, file: Path) -> list[tarfile.TarInfo]:
    """All but the end record. Raises `StoreError` where that is not there, or is of another archive: nothing was put then."""
    *members, last = archive.getmembers() or [tarfile.TarInfo()]
    said = None
    if last.name == _END and last.isreg() and not last.issparse() and last.size < tarfile.BLOCKSIZE:
        said = _json(_bytes(archive, last))
    if said != {"format": _FORMAT, "names": len(members), "bytes": sum(one.size for one in members)}:
        raise StoreError(f"{file} is not whole, and nothing of it was taken: {_NOT_OURS}")
    return members


def _imported(store: ChunkStore, archive: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> Moved:
    put: dict[str, int] = {}
    refused: list[str] = []
    store.require_its_key()
    manifests = {one.name: one for one in members if one.name.endswith(_MANIFEST) and _may_be_read(one)}
    digests = _digests(store, {name: _bytes(archive, one) for name, one in manifests.items()})
    for info in (*(one for one in members if one.name not in manifests), *manifests.values()):
        problem = "no name of a store"
        if _may_be_read(info):
            content = _bytes(archive, info)
            problem = _problem(store, info.name, content, digests)
            if info.name in manifests and _lacking(info.name, digests, put):
                problem = problem or "files that it names were left out"
            if not problem and _put(store.backend, info.name, content):
                put[info.name] = info.size
        if problem:
            refused.append(f"{info.name}: {problem}")
    if put:
        store.tell_key()
        store.advance()
    return Moved(len(put), sum(put.values()), tuple(refused))


def _lacking(manifest: str, digests: Mapping[str, str], put: Mapping[str, int]) -> bool:
    folder = manifest.removesuffix(_MANIFEST) + "/"
    return any(name.startswith(folder) and name not in put for name in digests)


def _may_be_read(info: tarfile.TarInfo) -> bool:
    """Of a sparse member a few bytes stand for any number."""
    large = info.name.startswith((CACHES, INDEXES)) and not info.name.endswith(_MANIFEST)
    largest = _LARGEST if large else MOST_BYTES
    return info.isreg() and not info.issparse() and info.size <= largest and is_name(info.name)


def _bytes(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytearray:
    """Memory that may be written to, as tensors over it ask for."""
    opened = archive.extractfile(info)
    content = bytearray(info.size)
    if opened is None or opened.readinto(content) != info.size:  # type: ignore[attr-defined]
        raise tarfile.ReadError(f"{info.name} is not all there")
    return content


def _put(backend: Backend, name: str, content: bytearray) -> bool:
    """Descriptions and pins, which have no digest, replace nothing."""
    if name.startswith((DESCRIPTIONS, PINS)):
        return backend.swap(name, bytes(content), None)
    return backend.put(name, [memoryview(content)])


def _problem(store: ChunkStore, name: str, content: bytearray, digests: Mapping[str, str]) -> str:
    """Why the store itself would not use this; empty where it would."""
    from blend.store.memory import MemoryBackend

    held = MemoryBackend(trusted=False)
    held.put(name, [memoryview(content)])
    one = store.over(held)
    if name.startswith(CACHES):
        return verify_entry(one, name)
    if name.startswith((DESCRIPTIONS, PINS)):
        fine = type(_json(content)) is dict if name.startswith(DESCRIPTIONS) else content == PINNED
        return "" if fine else "it is not what a store writes there"
    if name.startswith(INDEXES) and not name.endswith(_MANIFEST):
        sound = hashlib.sha256(content).hexdigest() == digests.get(name)
        return "" if sound else "it is not what the index's manifest says, or that is left out"
    try:
        if name.startswith(ARTIFACTS):
            one.read_artifact(name.removeprefix(ARTIFACTS))
        elif one.read_manifest(name)[1] is None:
            return "it is not what was written, or was written with another store key or none"
    except EntryDamagedError as error:
        return str(error)
    return ""


def _digests(store: ChunkStore, manifests: Mapping[str, bytearray]) -> dict[str, str]:
    """The SHA-256 of every file that a manifest of an index names; of manifests that this store would use."""
    found: dict[str, str] = {}
    for name, raw in manifests.items():
        if not _problem(store, name, raw, {}):
            manifest = _json(raw.partition(b"\n")[2])
            files = manifest.get("files") if isinstance(manifest, dict) else None
            for file, entry in files.items() if isinstance(files, dict) else ():
                found[name.removesuffix(_MANIFEST) + f"/{file}"] = (
                    str(entry.get("sha256")) if isinstance(entry, dict) else ""
                )
    return found


def _json(content: bytes | bytearray) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
