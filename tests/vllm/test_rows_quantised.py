"""A corpus answered by a model that vLLM runs quantised; caches of the model as it was are not used."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import Machines, until
from places import PYTHONPATH
from quantised import save_int8

from tests.tiny_model import save_tiny_model

TOWNS = ("Aarhus", "Bergen", "Cadiz", "Delft")

pytestmark = pytest.mark.inside_vllm


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Machines]:
    """Over a corpus of which the store has the caches of the model as it was before it was quantised."""
    from blend.config import CorpusConfig
    from blend.rag import Rag

    texts = tmp_path / "texts"
    texts.mkdir()
    for town in TOWNS:
        (texts / f"{town}.txt").write_text(f"{town} has {len(town)} bridges and a mayor who rows. " * 6)
    written = "\n".join(one.read_text() for one in texts.iterdir())
    shape = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.2, "tie_word_embeddings": False}
    plain = save_tiny_model(tmp_path / "plain", written, **shape)
    corpus = CorpusConfig(codec="native", surrogate_tokens=0)
    Rag(tmp_path / "store", model=str(plain), device="cpu", dtype="float32", corpus=corpus).precompute(texts)
    found = Machines(tmp_path, tmp_path / "store", save_int8(plain, tmp_path / "int8"))
    try:
        found.start_server({"ratio": 0.15})
        yield found
    finally:
        found.end()


def test_a_corpus_of_the_model_as_it_was_is_answered_by_the_quantised_one(server: Machines) -> None:
    def ask(question: str, **kvblend: Any) -> tuple[str, dict[str, Any]]:
        return server.ask(question, model="tiny+corpus", kvblend={"retrieve": {"top_k": len(TOWNS)}, **kvblend})

    def files() -> int:
        return sum(one.is_file() for one in (server.store / "kv").rglob("*"))

    before, questions = files(), ("How many bridges has Bergen?", "Who is the mayor of Delft?")
    own = [ask(question, method="full")[0] for question in questions]
    first, shown = ask(questions[0])
    assert (first, shown["figures"]["reason"]) == (own[0], "cold"), "nothing that it may use is there yet"
    until(lambda: files() >= before + len(TOWNS))
    second, shown = ask(questions[1])
    assert second != own[1], "blended"
    assert shown["figures"]["method"] == "rows"
    assert {source["kind"] for source in shown["sources"]} == {"retrieved"}
    assert "Delft" in {source["title"] for source in shown["sources"]}


def test_caches_that_vllm_computed_ahead_are_the_servers(server: Machines, tmp_path: Path) -> None:
    """With their KV correction, so that no more rows are recomputed than is asked for."""
    command = [sys.executable, "-m", "blend", "precompute", str(tmp_path / "texts"), "--store", str(server.store)]
    command += ["--model", str(server.model), "--dtype", "float32", "--engine", "vllm", "--codec", "native"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 documents" in done.stdout
    question = "How many bridges has Bergen?"
    shown = server.ask(question, model="tiny+corpus", kvblend={"retrieve": {"top_k": len(TOWNS)}})[1]
    assert shown["figures"]["method"] == "rows"
    assert shown["figures"]["rows_computed"] < shown["figures"]["rows"]
