"""A service over a precomputed corpus, for every test of serving."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms import make_rag, serving, write_corpus

from blend.serve.service import Service


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A precomputed store, which tests copy, and its model."""
    folder = tmp_path_factory.mktemp("served")
    model, documents = write_corpus(folder)
    make_rag(folder / "store", model).precompute(documents)
    return folder / "store", model


@pytest.fixture
def service(filled: tuple[Path, Path], tmp_path: Path) -> Iterator[Service]:
    store = shutil.copytree(filled[0], tmp_path / "store")
    with serving(store, filled[1]) as made:
        yield made
