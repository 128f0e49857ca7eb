"""Corpora over a tiny model that change while questions are asked, and what their stores hold."""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blend import BlendConfig, CorpusConfig, Rag
from blend.chunks.library import ChunkLibrary
from blend.serve.documents.caches import CorpusUpdater
from blend.serve.documents.documents import Documents
from blend.serve.documents.uploads import DocumentStatus, UploadedFile
from blend.serve.engine.background import OnDone
from blend.serve.removed import removed_from
from blend.serve.request import GivenDocument
from blend.types import CacheKey
from blend_retrieval.embedders import Embedder, Progress

Make = Callable[..., Documents]
LAST_S = 120
CONFIG = CorpusConfig(chunk_tokens=64, top_k=3, surrogate_tokens=96)


class WordCounts(Embedder):
    """Unit vectors of hashed words. before: called for each text."""

    name, dimension = "word-counts", 64
    before: Callable[[str], object] = staticmethod(lambda text: None)

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            self.before(text)
            for word in re.findall(r"\w+", text.lower()):
                vectors[row, zlib.crc32(word.encode()) % self.dimension] += 1
            vectors[row] /= max(float(np.linalg.norm(vectors[row])), 1e-9)
            if progress is not None:
                progress("embed", row + 1, len(texts))
        return vectors


def open_corpus(store: Path, model: Path, *, corpus: str = "", **blend: float) -> Rag:
    """A corpus in this directory; nothing is loaded yet."""
    config = CorpusConfig(**{**CONFIG.__dict__, "name": corpus})
    rag = Rag(store, model=str(model), device="cpu", corpus=config, blend=BlendConfig(**blend))  # type: ignore[arg-type]
    rag.embedder = WordCounts()
    return rag


def words(topic: str, lines: int = 8) -> str:
    """A document about one thing, of about one chunk for two lines."""
    return "\n\n".join(
        f"The {topic} number {n} opened in {1800 + n}. Its bell weighs {n * 7} kilograms." for n in range(lines)
    )


def page(topic: str, lines: int = 8) -> UploadedFile:
    """The same as a file."""
    return UploadedFile(f"{topic}.md", f"# The {topic}\n\n{words(topic, lines)}".encode())


class Engine:
    """Computes caches in threads of its own, when it is let."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, *given: Any) -> None:
        self.threads.append(threading.Thread(target=self._run, args=given))
        self.threads[-1].start()

    def _run(self, library: ChunkLibrary, variants: Sequence[CacheKey], on_done: OnDone) -> None:
        for one in variants:
            assert self.go.wait(60)
            removed_from(library.store).unless_removed(library.key(one), inf, partial(library.compute, [one]))
            on_done(one, None)


def compute_here(library: ChunkLibrary, variants: Sequence[CacheKey], on_done: OnDone) -> None:
    """Compute caches one after another in the calling thread; the error of one does not stop the others."""
    for one in variants:
        try:
            library.compute([one])
        except Exception as error:
            on_done(one, error)
        else:
            on_done(one, None)


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No index takes a change meanwhile."""
    apply, go_on = CorpusUpdater.apply, threading.Event()

    def later(*given: Any) -> Any:
        assert go_on.wait(LAST_S)
        return apply(*given)

    monkeypatch.setattr(CorpusUpdater, "apply", later)
    try:
        yield
    finally:
        go_on.set()


def until(happened: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def states(documents: Documents) -> dict[str, str]:
    """State by id."""
    return {one.id: one.state for one in documents.listing()}


def add(documents: Documents, files: Sequence[UploadedFile] = (), texts: Sequence[GivenDocument] = ()) -> None:
    """Add documents and wait until everything is computed."""
    documents.add(files, texts)
    assert documents.wait(LAST_S)


def delete(documents: Documents, name: str) -> bool:
    """Delete a document and wait until it is out of the index; whether it was there."""
    removed = documents.delete(name)
    until(lambda: removed not in documents.leaving, LAST_S)
    return removed is not None


def status_of(documents: Documents, name: str) -> DocumentStatus:
    found = documents.get(name)
    assert found is not None
    return found


def left(rag: Rag) -> list[str]:
    """Documents that are kept to be indexed, and other files that should not be there."""
    folder = rag.index_dir.parent / "incoming"
    kept = {"uploads.sqlite", "uploads.sqlite-journal", ".owner"}
    return sorted({path.name for path in folder.iterdir()} - kept) if folder.is_dir() else []


def caches(rag: Rag) -> int:
    """How many the store holds."""
    return rag.store.stats().entries


def ids(rag: Rag) -> set[str]:
    return {chunk.document_id for chunk in rag.index.chunks}
