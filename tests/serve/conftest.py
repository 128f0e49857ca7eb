"""A service over a precomputed corpus, for every test of serving."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from changing import compute_here, open_corpus
from models import decoder
from rooms import make_rag, serving
from served import Served, listening
from tool_rooms import families

from blend import Rag
from blend.config import BlendConfig
from blend.prefill.blender import Blender
from blend.serve.documents.documents import Documents
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.http.keys import ApiKeys
from blend.serve.service import Service
from blend.store import open_store
from tests.tiny_model import save_tiny_model
from tests.towns import write_documents


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A precomputed store, which tests copy, and its model."""
    folder = tmp_path_factory.mktemp("served")
    texts = write_documents(folder / "documents")
    model = save_tiny_model(folder / "tiny", "\n".join(texts.values()))
    make_rag(folder / "store", model).precompute(folder / "documents")
    return folder / "store", model


@pytest.fixture
def store(filled: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled[0], tmp_path / "store"))


@pytest.fixture(scope="session")
def model(filled: tuple[Path, Path]) -> Path:
    return filled[1]


@pytest.fixture
def service(store: Path, model: Path) -> Iterator[Service]:
    with serving(store, model) as made:
        yield made


@pytest.fixture(scope="module")
def served(filled: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a copy of the store, shared by the tests of a module."""
    store = shutil.copytree(filled[0], tmp_path_factory.mktemp("module") / "store")
    with serving(store, filled[1], learn_budget=0) as made, listening(made, body_bytes=100_000, top_k=4) as found:
        yield found


@pytest.fixture(scope="module")
def served_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Servers of models whose chat templates have tools."""
    with families(tmp_path_factory.mktemp("families")) as start:
        yield start


@pytest.fixture
def listen(served: Served) -> Iterator[Callable[..., Served]]:
    """Starts servers over the shared service with limits, counts and connections of a test's own."""
    with ExitStack() as stack:

        def start(*tenants: ApiKeys, **limits: Any) -> Served:
            return stack.enter_context(listening(served.state.service, *tenants, shared=True, **limits))

        yield start


@pytest.fixture
def locked(listen: Callable[..., Served]) -> Served:
    """One with keys: of the operator, and of two tenants."""
    return listen(ApiKeys([("common", ""), ("anns", "ann"), ("bobs", "bob")]))


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as made:
        yield made


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture
def serve(store: Path, model: Path) -> Iterator[Callable[..., Served]]:
    """Starts servers of a test's own; http: options of `listening`, others: of `serving`."""
    with ExitStack() as stack:

        def start(http: dict[str, Any] | None = None, **options: Any) -> Served:
            made = stack.enter_context(serving(store, model, **{"learn_budget": 0, **options}))
            return stack.enter_context(listening(made, **(http or {})))

        yield start


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., EmbeddedEngine]]:
    made: list[EmbeddedEngine] = []
    before = set(threading.enumerate())

    def make(name: str = "llama", codec: str = "native", ratio: float = 0.3, **options: int) -> EmbeddedEngine:
        store = open_store(tmp_path / f"store{len(made)}", codec=codec)
        blender = Blender(decoder(name), store, BlendConfig(ratio=ratio))
        # Unless a test says otherwise every prompt is blended, however short, and leaves nothing to later ones.
        usual = {"prefix_budget": 0, "least_gain": -(10**6), "remember": False}
        made.append(EmbeddedEngine(blender, **{**usual, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("kvblend")]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For corpora of `changing`."""
    text = "The harbour mill quarry orchard number opened in. Its bell weighs kilograms."
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", text)


@pytest.fixture
def rag(tmp_path: Path, small_model: Path) -> Rag:
    """An empty corpus."""
    return open_corpus(tmp_path / "store", small_model, ratio=1.0)


@pytest.fixture
def make(rag: Rag) -> Iterator[Callable[..., Documents]]:
    """Opens the corpus's documents; a second call is the next process."""
    made: list[Documents] = []

    def new(**options: Any) -> Documents:
        made.append(Documents(options.pop("rag", rag), options.pop("compute", compute_here), **options))
        return made[-1]

    yield new
    for one in made:
        one.close()


@pytest.fixture
def documents(make: Callable[..., Documents]) -> Documents:
    return make()
