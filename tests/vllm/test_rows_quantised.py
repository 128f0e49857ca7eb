"""A corpus answered by a model that vLLM runs quantised; caches of the model as it was are not used."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import SHAPE, Server, about, precompute, serving, until
from places import PYTHONPATH
from quantised import save_int8

from tests.tiny_model import save_tiny_model

TOWNS = ("Aarhus", "Bergen", "Cadiz", "Delft")

pytestmark = pytest.mark.inside_vllm


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Over a corpus of which the store has the caches of the model as it was before it was quantised."""
    plain = save_tiny_model(tmp_path / "plain", "\n".join(map(about, TOWNS)), **SHAPE)
    precompute(tmp_path / "store", plain, tmp_path / "texts", TOWNS, surrogate_tokens=0)
    with serving(tmp_path / "store", save_int8(plain, tmp_path / "int8"), tmp_path / "log") as server:
        yield server


def ask(server: Server, question: str, **kvblend: Any) -> tuple[str, dict[str, Any]]:
    return server.ask(question, model="tiny+corpus", kvblend={"retrieve": {"top_k": len(TOWNS)}, **kvblend})


def test_a_corpus_of_the_model_as_it_was_is_answered_by_the_quantised_one(server: Server) -> None:
    def files() -> int:
        return sum(one.is_file() for one in (server.store / "kv").rglob("*"))

    before, questions = files(), ("How many bridges has Bergen?", "Who is the mayor of Delft?")
    own = [ask(server, question, method="full")[0] for question in questions]
    first, shown = ask(server, questions[0])
    assert (first, shown["figures"]["reason"]) == (own[0], "cold"), "nothing that it may use is there yet"
    until(lambda: files() >= before + len(TOWNS))
    second, shown = ask(server, questions[1])
    assert second != own[1], "blended"
    assert shown["figures"]["method"] == "rows"


def test_caches_that_vllm_computed_ahead_are_the_servers(server: Server, tmp_path: Path) -> None:
    """With their KV correction, so that no more rows are recomputed than is asked for."""
    command = [sys.executable, "-m", "blend", "precompute", str(tmp_path / "texts"), "--store", str(server.store)]
    command += ["--model", str(server.model), "--dtype", "float32", "--engine", "vllm", "--codec", "native"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    subprocess.run(command, env=environment, capture_output=True, timeout=600, check=True)
    figures = ask(server, "How many bridges has Bergen?")[1]["figures"]
    assert figures["method"] == "rows"
    assert figures["rows_computed"] < figures["rows"]
