"""The command line in real processes, a tiny model and a precomputed store that tests copy."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blend_process import CHUNKS, SHORT_CONTEXT, Blend, Request, preloaded, record

from tests import towns
from tests.tiny_model import save_tiny_model

SaveModel = Callable[..., Path]


@pytest.fixture(scope="session")
def process() -> Iterator[Request]:
    with preloaded() as request:
        yield request


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """Saves a tiny model under a name, with a tokenizer trained on the documents."""
    text = "\n".join(towns.documents().values())
    return lambda name, **options: save_tiny_model(tmp_path_factory.mktemp("model") / name, text, **options)


@pytest.fixture(scope="session")
def model(save_model: SaveModel) -> Path:
    return save_model("tiny")


@pytest.fixture(scope="session")
def other_model(save_model: SaveModel) -> Path:
    return save_model("other", seed=1)


@pytest.fixture(scope="session")
def short_model(save_model: SaveModel) -> Path:
    return save_model("short", max_position_embeddings=SHORT_CONTEXT)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """One Markdown document a topic, several chunks of 64 tokens each."""
    towns.write_documents(tmp_path / "documents")
    return tmp_path / "documents"


@pytest.fixture
def blend(process: Request, model: Path, tmp_path: Path) -> Blend:
    return Blend(process, tmp_path, model, tmp_path / "store")


@pytest.fixture(scope="session")
def apart(process: Request, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Blend]:
    """Makes a command line in a folder of its own, for what several tests share."""

    def apart() -> Blend:
        folder = tmp_path_factory.mktemp("apart")
        return Blend(process, folder, model, folder / "store")

    return apart


@pytest.fixture(scope="session")
def _precomputed(apart: Callable[[], Blend]) -> Path:
    blend = apart()
    towns.write_documents(blend.folder / "documents")
    blend.precompute("documents")
    return blend.store


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
def undisturbed(apart: Callable[[], Blend], parcels: Path) -> Blend:
    """The command line with what one process makes of the documents."""
    blend = apart()
    blend.done("precompute", parcels, *CHUNKS)
    return blend


@pytest.fixture
def lots(blend: Blend, parcels: Path, tmp_path: Path) -> Blend:
    """The command line over an empty store, with a copy of the documents in "lots" beside it."""
    shutil.copytree(parcels, tmp_path / "lots")
    return blend


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A file of three questions, each with three chunks of its own."""
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(record(number)) for number in range(3)))
    return path
