"""Rows recomputed by a model that vLLM runs quantised: the answers are its own, and caches of other models are not used.

`rows_quantised_proof.py` runs in a process of its own, once for this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import Machines, until
from proofs import found_by
from quantised import save_int8

from tests.tiny_model import save_tiny_model

KINDS = ("int8", "online")
TOWNS = ("Aarhus", "Bergen", "Cadiz", "Delft")

pytestmark = pytest.mark.inside_vllm


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("rows_quantised_proof.py", tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_the_model_as_it_was_are_not_used(proof: dict[str, Any], kind: str) -> None:
    found = proof[kind]["learnt"]
    assert found["own name"]
    assert found["hits before"] == 0
    assert found["full"]
    assert found["hits after"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_are_its_own_prefill(proof: dict[str, Any], kind: str) -> None:
    assert proof[kind]["ratios"]["every"]


@pytest.mark.parametrize("kind", KINDS)
def test_of_some_rows_the_answer_is_blended(proof: dict[str, Any], kind: str) -> None:
    found = proof[kind]["ratios"]
    assert found["some differ"]
    assert found["share"] < 0.3


def test_kv_of_integers_is_that_of_transformers(proof: dict[str, Any]) -> None:
    """But for activations that are rounded the other way, which changes all that comes after."""
    found = proof["int8"]["distances"]
    assert found["full"] > 5 * found["kvblend"]


def test_a_deep_model_is_admitted(proof: dict[str, Any]) -> None:
    """In float32, where its KV at another position differs by more than other models' may."""
    assert proof["deep"]


def test_each_way_to_quantise_has_caches_of_its_own(proof: dict[str, Any]) -> None:
    assert len(set(proof["names"])) == 4


def test_a_checkpoint_that_quantises_its_kv_cache_is_refused(proof: dict[str, Any]) -> None:
    """By vLLM itself, where the processor has no such cache."""
    said = proof["cache of fp8"]
    assert "a quantised KV cache is not supported" in said or "FP8 KV cache on CPU requires" in said


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
        found.start_server({"stage": "rows", "store": str(found.store), "ratio": 0.15})
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
    assert {one["kind"] for one in shown["sources"]} == {"retrieved"}
    assert len(shown["sources"]) == len(TOWNS)
