"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    import torch

    from blend.model.decoder import Decoder

# The files that take longest. They start first: one that started last would leave a core idle. Their tests run whole commands,
# servers or real models, or wait for each other, and may take half an hour each; pyproject.toml gives every other test five.
LONGEST = (
    "examples/test_examples.py",  # its server holds the default model, and the test processes are still small
    "scripts/test_soak_serve.py",
    "cli/test_cli_ray.py",
    "serve/test_documents_killed.py",
    "serve/test_answers_under_load.py",
    "scripts/test_bench_serve_command.py",
    "kernels/test_ahead_of_time.py",
    "cli/test_cli_interrupted.py",
    "scripts/test_bench_selection.py",
    "page/test_page_answers.py",
    "weights/test_weights_hub.py",
    "scripts/test_bench_codecs.py",
    "cli/test_cli_precompute.py",
    "cli/test_cli_answer.py",
    "cli/test_cli_corpus.py",
    "cli/test_cli_hostile_text.py",
    "cli/test_cli_shared_store.py",
    "blend/test_many_threads.py",
    "cli/test_cli_drop.py",
    "blend/test_real_model.py",  # waits for the examples' server
)


gc.disable()  # until all test files are imported: the libraries' objects stay, and looking through them takes seconds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; scripts/test keeps pytest-xdist from sorting them by their number of tests."""
    gc.freeze()
    gc.unfreeze()  # moves everything to the oldest generation
    gc.enable()
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
    for item in items:
        if item.path in first or item.get_closest_marker("real"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def nan_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """New cache buffers hold NaN: a row that is read before it is written shows."""
    from blend.model.cache import BlendedLayer

    def poisoned(self: BlendedLayer, states: torch.Tensor) -> torch.Tensor:
        return states.new_full((*states.shape[:2], self.capacity, states.shape[3]), float("nan"))

    monkeypatch.setattr(BlendedLayer, "new_buffer", poisoned)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Holds a lock while a test has the default model in memory: the test processes take turns, because it takes gigabytes."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "large_model.lock"):
        yield


@pytest.fixture(scope="module")
def real_decoder(large_model: None) -> Decoder:
    """The default model: `$KVBLEND_TEST_MODEL` when set, else from the cache folder, fetched once."""
    from blend.config import DEFAULT_MODEL
    from blend.errors import WeightsError
    from blend.model.decoder import Decoder
    from blend.weights import resolve_model

    chosen = os.environ.get("KVBLEND_TEST_MODEL")
    try:
        location = Path(chosen) if chosen else resolve_model(DEFAULT_MODEL)
    except WeightsError as error:
        pytest.skip(f"the default model is not here and cannot be fetched: {error}")
    return Decoder.load(str(location), name=DEFAULT_MODEL, device="cpu", dtype="float32")
