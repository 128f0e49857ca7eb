"""The corpora of one store: where their indexes lie, and how machines share them.

    <store>/index/                   the corpus without a name
    <store>/corpora/<name>/index/    a corpus with a name
    <store>/kv/                      the chunk caches of all corpora

A shared store also keeps every index next to the caches. Who changes an index publishes it there; who asks fetches it:

    indexes/<corpus>/manifest.json   sealed like an artifact; a writer swaps it for the one it began with, or fails
    indexes/<corpus>/<file>          the files that the manifest names, with digests; written before it

There the corpus without a name is called `_`. `<replica>/shared/` remembers which manifest was fetched last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from blend.errors import ConfigError, EntryDamagedError, StoreChangedError, StoreError, StoreUnreachableError
from blend.files import make_private_folder, write_atomically
from blend.store.addresses import root_of, store_name
from blend.store.admin import Sources, read_sources
from blend.store.backend import INDEXES
from blend.text import check_corpus_name, is_corpus_name
from blend_retrieval.errors import ChunkIndexError, RetrievalError
from blend_retrieval.generations import forget_index, generation_files, install_generation, is_begun, write_lock

if TYPE_CHECKING:
    from blend.store.base import ChunkStore

_FOLDER, _INDEX, _MANIFEST = "corpora", "index", "manifest.json"
_UNNAMED = "_"
_FETCH_EVERY_S = 5.0
_KEEP_S = 3600.0  # files of an earlier generation, for readers that still fetch them


def index_dir(root: Path, name: str) -> Path:
    """The directory of a corpus's index in the store `root`."""
    check_corpus_name(name)
    return root / _FOLDER / name / _INDEX if name else root / _INDEX


def corpora(root: Path) -> tuple[str, ...]:
    """Names of the corpora in the store `root` that have an index, sound or damaged, the one without a name first."""
    names = ("", *sorted(named_folders(root / _FOLDER)))
    return tuple(name for name in names if is_begun(index_dir(root, name)))


def named_folders(folder: Path) -> Iterator[str]:
    """The folders in this one that are called as corpora and tenants are."""
    with suppress(OSError):  # there is none, or one without access: reading the store will say so
        yield from (path.name for path in folder.iterdir() if is_corpus_name(path.name))


def require_corpus(root: Path, name: str) -> None:
    """Raise `ConfigError` with a list of the corpora if the store has some, but not this one."""
    names = corpora(root)
    if names and name not in names:
        missing = f"no corpus {name!r}" if name else "no corpus without a name"
        raise ConfigError(f"the store {store_name(root)} has {missing}; there are: {', '.join(map(in_words, names))}")


@contextmanager
def indexes_named(root: Path) -> Iterator[None]:
    """Errors of indexes in the store `root` name the store as its user does."""
    try:
        yield
    except RetrievalError as error:
        error.args = (name_store(str(error), root),)
        raise


def name_store(words: str, root: Path) -> str:
    """A message with the store `root` as its user names it."""
    return words.replace(str(root), store_name(root))


def in_words(name: str) -> str:
    """The corpus's name for a message."""
    return name or "the one without a name"


class Sharing:
    """Publishes and fetches the indexes of the store in `root`. For a store that is not shared, every method does nothing.

    store: returns the chunk caches; called only for a shared store.
    """

    def __init__(self, root: Path, store: Callable[[], ChunkStore]) -> None:
        self._root = root
        self._store = store
        self._shared = root_of(root) is not None
        self._lock = Lock()
        self._after = float("-inf")

    def refresh(self, *, now: bool = False) -> None:
        """Fetch indexes that others have published, at most every few seconds unless `now`.

        If the store does not answer, the fetched indexes stay in use. Raises `StoreError`, also if there are none.
        """
        if not self._shared:
            return
        with self._lock:
            if not now and time.monotonic() < self._after:
                return
            self._after = time.monotonic() + _FETCH_EVERY_S
            store = self._store()
            fetched = {path.stem for path in (self._root / "shared").glob("*.manifest")}
            try:
                for corpus in sorted({*store.backend.folders(INDEXES), *fetched}):
                    if corpus == _UNNAMED or is_corpus_name(corpus):
                        self._fetch(store, _named(corpus))
            except StoreUnreachableError:
                if not fetched:
                    raise

    def _fetch(self, store: ChunkStore, corpus: str) -> None:
        place = _place(corpus)
        directory = index_dir(self._root, corpus)
        raw, manifest = store.read_manifest(place + _MANIFEST)
        known = self.begun_with(corpus)
        if raw is None and known is not None:
            self._forget(corpus)
        if raw is None or (raw == known and (directory / _MANIFEST).is_file()):
            return
        if manifest is None:
            raise StoreError(
                f"the index of {store.backend.place} is damaged, or sealed with another store key: run `blend precompute` again"
            )
        try:
            with write_lock(directory):
                install_generation(directory, manifest, lambda name: _content(store, place + name))
        except ChunkIndexError as error:
            raise StoreError(f"the index of {store.backend.place} cannot be fetched: {error}") from None
        self._remember(corpus, raw)

    def begun_with(self, corpus: str) -> bytes | None:
        """The manifest that was fetched or published last, for `publish`. Ask before reading the index, as it may change."""
        try:
            return self._remembered(corpus).read_bytes()
        except OSError:
            return None

    def publish(self, corpus: str, was: bytes | None) -> None:
        """Publish the corpus's index in place of `was`, the manifest that `begun_with` returned.

        Raises `StoreChangedError` when another machine has published one since, and `StoreError` when the store cannot be
        written; the next `refresh` then fetches the published index.
        """
        if not self._shared:
            return
        try:
            self._publish(corpus, was)
        except StoreError:
            with suppress(StoreError):
                if self.begun_with(corpus) is not None:
                    self._remember(corpus, b"")  # the index here is not the published one
            raise

    def _publish(self, corpus: str, was: bytes | None) -> None:
        place = _place(corpus)
        store = self._store()
        manifest, files = generation_files(index_dir(self._root, corpus))
        raw, content = store.read_manifest(place + _MANIFEST)
        if content != manifest:
            changed = raw is not None and raw != was
            for file, path in () if changed else files.items():
                store.backend.put(place + file, [path.read_bytes()])
            if changed or not store.swap_manifest(place + _MANIFEST, manifest, raw):
                raise StoreChangedError(
                    f"another machine has changed the index in {store.backend.place} meanwhile: run the same command again"
                )
            raw, _ = store.read_manifest(place + _MANIFEST)
            _sweep(store, place, {place + file for file in (*files, _MANIFEST)})
        self._remember(corpus, raw or b"")

    def require_published(self, corpus: str) -> None:
        """Raise `StoreError` if the corpus's index, which was published just now, is gone."""
        if not self._shared:
            return
        store = self._store()
        raw, _ = store.read_manifest(_place(corpus) + _MANIFEST)
        if raw is None:
            raise StoreError(
                f"{store.backend.place} has evicted the index that was just written: set the maxmemory-policy of a Redis to "
                "volatile-lru, which evicts caches only, and raise its maxmemory"
            )

    def withdraw(self, corpus: str) -> None:
        """Delete the corpus's index from the shared store. Raises `StoreError`."""
        if not self._shared:
            return
        place = _place(corpus)
        store = self._store()
        store.backend.delete(place + _MANIFEST)  # first: it names the others
        for file in store.backend.names(place):
            store.backend.delete(file)
        self._forget(corpus)

    def _forget(self, corpus: str) -> None:
        with suppress(OSError):
            forget_index(index_dir(self._root, corpus))
            self._remembered(corpus).unlink(missing_ok=True)

    def _remembered(self, corpus: str) -> Path:
        return self._root / "shared" / f"{corpus or _UNNAMED}.manifest"

    def _remember(self, corpus: str, raw: bytes) -> None:
        path = self._remembered(corpus)
        try:
            make_private_folder(path.parent)
            write_atomically(path, [raw])
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror or error}): make the directory writable"
            ) from None


def published(store: ChunkStore) -> set[str]:
    """Corpora that have an index in a shared store, the one without a name as "". Raises `StoreError`."""
    names = store.backend.names(INDEXES)
    return {_named(name.removeprefix(INDEXES).partition("/")[0]) for name in names if name.endswith(f"/{_MANIFEST}")}


def complete_sources(store: ChunkStore, root: Path, outcome: str) -> Sources:
    """`read_sources`, with a readable note of every corpus. root: the store's folder. outcome: ends the message of the error.

    Raises `StoreError`.
    """
    sources = read_sources(store)
    if sources.unread:
        raise StoreError(
            f"{sources.unread[0]}, the note of a corpus's caches, is damaged or of another --store-key: "
            f"{outcome}; run `blend precompute` for it again"
        )
    names = set(corpora(root)) if root_of(root) is None else published(store)
    for name in sorted(names - sources.corpora):
        raise StoreError(
            f"the store says nowhere which caches the corpus ({in_words(name)}) uses: {outcome}; run `blend precompute` for "
            "it again"
        )
    return sources


def _place(corpus: str) -> str:
    return f"{INDEXES}{corpus or _UNNAMED}/"


def _named(corpus: str) -> str:
    return "" if corpus == _UNNAMED else corpus


def _sweep(store: ChunkStore, place: str, current: set[str]) -> None:
    """Delete files of earlier generations once no reader can still be fetching them."""
    with suppress(StoreError):
        for stored in store.backend.listing(place):
            if stored.name not in current and time.time() - stored.used > _KEEP_S:
                store.backend.delete(stored.name)


def _content(store: ChunkStore, name: str) -> bytes:
    try:
        content = store.backend.read(name)
    except EntryDamagedError as error:
        raise StoreError(f"{name} in {store.backend.place} cannot be read: {error}") from None
    if content is None:
        raise StoreError(f"{store.backend.place} lacks {name}, which its index names: run `blend precompute` again")
    return content
