"""Tests of blending in llama.cpp run where its library and the package gguf are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.llamacpp.llamacpp_engines import Engines

MISSING = [name for name in ("xllamacpp", "gguf") if find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = pytest.mark.skip(reason=f"{' and '.join(MISSING)} not installed here")
    for item in items:
        if MISSING and item.path.is_relative_to(here) and "library" in getattr(item, "fixturenames", ()):
            item.add_marker(missing)


@pytest.fixture(scope="session")
def library() -> object:
    """llama.cpp's library; without it the test is skipped."""
    from blend.integrations.llamacpp.library import Library

    return Library()


@pytest.fixture(scope="session")
def engines(library: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Tiny models, each in transformers and in llama.cpp."""
    made = Engines(library, tmp_path_factory.mktemp("gguf"))
    yield made
    made.close()
