"""What tests of documents share: corpora over a tiny model, and what their stores hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from changing import open_corpus

from blend import Rag
from blend.serve.documents import Documents
from blend.serve.types import GivenDocument
from blend.serve.uploads import DocumentStatus, UploadedFile
from tests.tiny_model import save_tiny_model

TEXT = "The harbour mill quarry orchard number opened in. Its bell weighs kilograms."
LAST_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", TEXT)


@pytest.fixture
def rag(tmp_path: Path, model: Path) -> Rag:
    return open_corpus(tmp_path / "store", model, ratio=1.0)


@pytest.fixture
def make(rag: Rag) -> Iterator[Callable[..., Documents]]:
    made: list[Documents] = []

    def new(**options: object) -> Documents:
        made.append(Documents(options.pop("rag", rag), **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for one in made:
        one.close()


def add(documents: Documents, files: Sequence[UploadedFile] = (), texts: Sequence[GivenDocument] = ()) -> None:
    """Add documents and wait until everything is computed."""
    documents.add(files, texts)
    assert documents.wait(LAST_S)


def status_of(documents: Documents, name: str) -> DocumentStatus:
    found = documents.get(name)
    assert found is not None
    return found


def left(rag: Rag) -> list[str]:
    """What still waits on disk."""
    folder = rag.index_dir.parent / "incoming"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def caches(rag: Rag) -> int:
    return rag.store.stats().entries


def ids(rag: Rag) -> set[str]:
    return {chunk.document_id for chunk in rag.index.chunks}
