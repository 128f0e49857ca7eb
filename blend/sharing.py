"""The indexes of a store that machines share: published to it by who changes one, fetched from it by who asks.

    indexes/<corpus>/manifest.json   sealed like an artifact; swapped for the one that the writer began with, or not at all
    indexes/<corpus>/<file>          what the manifest names, with digests; written before it

The corpus without a name is called `_` there. A store in a directory of its own shares nothing, and all of this does nothing.
What was fetched last is remembered in `<replica>/shared/`, so that a writer knows what it began with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from blend.corpora import index_dir, is_corpus_name
from blend.errors import EntryDamagedError, StoreChangedError, StoreError, StoreUnreachableError
from blend.files import make_private_folder, write_atomically
from blend.store.addresses import root_of
from blend.store.backend import INDEXES
from blend.store.base import ChunkStore
from blend_retrieval.errors import ChunkIndexError
from blend_retrieval.generations import generation_files, install_generation, write_lock

UNNAMED = "_"
_MANIFEST = "manifest.json"
_MOST = 1 << 40
_KEEP_S = 3600.0


class Sharing:
    """Of the store whose directory is `root`; `store` gives its caches, and is called where something is shared alone."""

    def __init__(self, root: Path, store: Callable[[], ChunkStore], *, every_s: float = 5.0) -> None:
        self._root, self._store, self._every_s = root, store, every_s
        self._lock = Lock()
        self._after = float("-inf")

    @property
    def shared(self) -> bool:
        """Whether the directory stands for a store elsewhere."""
        return root_of(self._root) is not None

    def refresh(self, *, now: bool = False) -> None:
        """Fetch what others have published since, at most every few seconds unless it is to be `now`.

        A store that does not answer leaves what is here, as long as that is anything. Raises `StoreError`.
        """
        if not self.shared:
            return
        with self._lock:
            if not now and time.monotonic() < self._after:
                return
            self._after = time.monotonic() + self._every_s
            self._fetch_all()

    def _fetch_all(self) -> None:
        store = self._store()
        try:
            for corpus in sorted({*store.backend.folders(INDEXES), *self._fetched()}):
                if corpus == UNNAMED or is_corpus_name(corpus):
                    self._fetch(store, corpus)
        except StoreUnreachableError:
            if not self._fetched():
                raise

    def _fetch(self, store: ChunkStore, corpus: str) -> None:
        place, directory = f"{INDEXES}{corpus}/", index_dir(self._root, _named(corpus))
        raw, manifest = store.read_manifest(place + _MANIFEST)
        if raw is None and self._known(corpus) is not None:
            self._unlearn(corpus, directory)
        if raw is None or (raw == self._known(corpus) and (directory / _MANIFEST).is_file()):
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
        self._learn(corpus, raw)

    def begun_with(self, corpus: str) -> bytes | None:
        """What `publish` is to replace: to be asked before the index here is looked at, which a `refresh` may change."""
        return self._known(corpus or UNNAMED)

    def publish(self, corpus: str, was: bytes | None) -> None:
        """What the corpus's index here is becomes what all have, in place of what it was when the change of it began.

        was: of `begun_with`. Raises `StoreChangedError` when another machine has published one since, `StoreError` when the
        store cannot be written; the next `refresh` then brings what all have, if there is any.
        """
        if not self.shared:
            return
        name = corpus or UNNAMED
        try:
            self._publish(corpus, name, was)
        except StoreError:
            with suppress(StoreError):
                if self._known(name) is not None:
                    self._learn(name, b"")  # what is here is not what all have
            raise

    def _publish(self, corpus: str, name: str, was: bytes | None) -> None:
        place, store = f"{INDEXES}{name}/", self._store()
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
            self._sweep(store, place, {place + file for file in files})
        self._learn(name, raw or b"")

    def withdraw(self, corpus: str) -> None:
        """The corpus is nobody's any more: its index goes, from where all have it. Raises `StoreError`."""
        if not self.shared:
            return
        name = corpus or UNNAMED
        place, store = f"{INDEXES}{name}/", self._store()
        store.backend.delete(place + _MANIFEST)  # first: it names the others
        for page in store.backend.names(place):
            for file in page:
                store.backend.delete(file)
        self._unlearn(name, index_dir(self._root, corpus))

    def _sweep(self, store: ChunkStore, place: str, current: set[str]) -> None:
        """Files of earlier generations, an hour later: readers may still be fetching them."""
        with suppress(StoreError):
            for page in store.backend.listing(place):
                for stored in page:
                    if stored.name not in {*current, place + _MANIFEST} and time.time() - stored.used > _KEEP_S:
                        store.backend.delete(stored.name)

    def _fetched(self) -> set[str]:
        """Corpora that were fetched or published from here."""
        return {path.stem for path in (self._root / "shared").glob("*.manifest")}

    def _unlearn(self, corpus: str, directory: Path) -> None:
        """It was withdrawn: what is here of it answers nothing any more."""
        for path in (directory / _MANIFEST, self._memory(corpus)):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _memory(self, corpus: str) -> Path:
        return self._root / "shared" / f"{corpus}.manifest"

    def _known(self, corpus: str) -> bytes | None:
        try:
            return self._memory(corpus).read_bytes()
        except OSError:
            return None

    def _learn(self, corpus: str, raw: bytes) -> None:
        path = self._memory(corpus)
        try:
            make_private_folder(path.parent)
            write_atomically(path, [raw])
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror or error}): make the directory writable"
            ) from None


def begun_with(directory: Path, store: ChunkStore) -> bytes | None:
    """`Sharing.begun_with` for the index in a directory of a store; None where nothing is shared."""
    sharing, corpus = _sharing_of(directory, store)
    return sharing.begun_with(corpus)


def publish_index(directory: Path, store: ChunkStore, was: bytes | None) -> None:
    """`Sharing.publish` for the index in a directory of a store; nothing where nothing is shared."""
    sharing, corpus = _sharing_of(directory, store)
    sharing.publish(corpus, was)


def _sharing_of(directory: Path, store: ChunkStore) -> tuple[Sharing, str]:
    named = directory.parent.parent.name == "corpora"
    root = directory.parent.parent.parent if named else directory.parent
    return Sharing(root, lambda: store), directory.parent.name if named else ""


def published(store: ChunkStore) -> set[str]:
    """Corpora that have an index in a shared store, the one without a name as "". Raises `StoreError`."""
    names = (name for page in store.backend.names(INDEXES) for name in page if name.endswith(f"/{_MANIFEST}"))
    return {_named(name.removeprefix(INDEXES).removesuffix(f"/{_MANIFEST}")) for name in names}


def _named(corpus: str) -> str:
    return "" if corpus == UNNAMED else corpus


def _content(store: ChunkStore, name: str) -> bytes:
    try:
        content = store.backend.read(name, _MOST)
    except EntryDamagedError as error:
        raise StoreError(f"{name} in {store.backend.place} cannot be read: {error}") from None
    if content is None:
        raise StoreError(f"{store.backend.place} lacks {name}, which its index names: run `blend precompute` again")
    return content
