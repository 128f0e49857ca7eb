"""The command line in real processes, a tiny model and a precomputed store that tests copy."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from blend_process import ASK, CHUNKS, SHORT_CONTEXT, Blend, Undisturbed, contents, preloaded

from tests import towns
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    with preloaded() as process:
        yield process


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """One Markdown document a topic, several chunks of 64 tokens each."""
    return towns.documents()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "\n".join(texts.values()))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "other", "\n".join(texts.values()), seed=1)


@pytest.fixture(scope="session")
def short_model(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("model") / "short"
    return save_tiny_model(folder, "\n".join(texts.values()), max_position_embeddings=SHORT_CONTEXT)


@pytest.fixture(scope="session")
def _documents(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def documents(_documents: Path, tmp_path: Path) -> Path:
    """A copy of the documents, the test's own."""
    return Path(shutil.copytree(_documents, tmp_path / "documents"))


@pytest.fixture
def blend(server: subprocess.Popen[str], model: Path, tmp_path: Path) -> Blend:
    """The command line with the tiny model and an empty place for a store."""
    return Blend(server, tmp_path, model, tmp_path / "store")


@pytest.fixture(scope="session")
def _precomputed(
    server: subprocess.Popen[str], model: Path, _documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("precomputed")
    result = Blend(server, folder, model, folder / "store")("precompute", _documents, "--chunk-tokens", "64")
    assert result.code == 0, result.err
    return folder / "store"


@pytest.fixture
def filled(blend: Blend, _precomputed: Path, tmp_path: Path) -> Blend:
    """The command line with a store of its own that holds all documents."""
    shutil.copytree(_precomputed, tmp_path / "store")
    return blend


@pytest.fixture(scope="session")
def parcels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents, some eighty chunks of 32 tokens."""
    folder = tmp_path_factory.mktemp("parcels")
    for number in range(4):
        lines = (f"Lot {number}.{line} holds {number * line} crates of slate and {line} bells." for line in range(20))
        (folder / f"{number}.md").write_text("\n\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def undisturbed(
    server: subprocess.Popen[str], model: Path, parcels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    alone = Blend(server, folder, model, folder / "store")
    assert alone("precompute", parcels, *CHUNKS).code == 0
    return Undisturbed(contents(folder / "store"), alone(*ASK).json)


@pytest.fixture
def lots(blend: Blend, parcels: Path, tmp_path: Path) -> Blend:
    """The command line over an empty store, with a copy of the documents in "lots" beside it."""
    shutil.copytree(parcels, tmp_path / "lots")
    return blend
