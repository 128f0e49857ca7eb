"""The examples in the docstrings of public classes and functions run as they stand."""

import doctest
from pathlib import Path
from typing import NamedTuple

import pytest

import blend
from tests import towns
from tests.tiny_model import save_tiny_model

EXAMPLES = (
    *("BlendConfig", "Blender", "CorpusConfig", "Decoder", "PromptConfig", "PromptLayout", "PromptTemplate", "Rag"),
    *("Selector", "generate", "open_store"),
)
"""What a program names. The others are what it gets."""


class Passage(NamedTuple):
    """What a retriever of the user's own returns."""

    title: str
    text: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in `docs`, a model in `my-model`."""
    folder = tmp_path_factory.mktemp("docstrings")
    texts = towns.write_documents(folder / "docs")
    save_tiny_model(folder / "my-model", "\n".join(texts.values()))
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    finder = doctest.DocTestFinder(recurse=False)
    [example] = finder.find(getattr(blend, name), name, globs={"Passage": Passage})
    lines: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=lines.append)
    assert result.attempted, "it has no example"
    assert not result.failed, "".join(lines)
