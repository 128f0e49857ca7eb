"""Rows recomputed by vLLM's own model: the same KV, scores and answers as kvblend's decoder gives.

`rows_proof.py` runs in a process of its own, once for this file.
"""

from __future__ import annotations

from typing import Any

import pytest
from proofs import found_by

CLOSE = 1e-4  # relative to the largest entry: other summation orders in float32, nothing else

pytestmark = pytest.mark.inside_vllm


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("rows_proof.py", tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("case", ["default", "all rows", "no rows", "random", "deviation", "gradual", "in context"])
def test_the_same_rows_kv_and_answer(proof: dict[str, Any], case: str) -> None:
    found = proof[case]
    assert found["rows"] == [True] * 5
    assert found["kv"] < CLOSE
    assert found["equal"]


def test_some_rows_are_left_as_stored(proof: dict[str, Any]) -> None:
    pairs = zip(proof["default"]["recomputed"], proof["all rows"]["recomputed"], strict=True)
    assert all(some < every for some, every in pairs)


def test_the_question_scores_rows_alike(proof: dict[str, Any]) -> None:
    assert proof["default"]["scores"] < CLOSE


def test_all_rows_are_full_prefill(proof: dict[str, Any]) -> None:
    assert proof["native is full"]


def test_a_blend_of_some_rows_answers_otherwise(proof: dict[str, Any]) -> None:
    """On a random model stale KV shows in the answer, so that equal answers mean equal KV."""
    assert any(proof["blended differs"])


def test_chunk_caches_are_those_of_the_encoder(proof: dict[str, Any]) -> None:
    assert proof["encoded"] < CLOSE


def test_caches_are_shared_only_where_a_probe_shows_them_alike(proof: dict[str, Any]) -> None:
    assert proof["identities"] == {"with probe": True, "in another dtype": True, "without": False}


def test_a_worker_fits_a_correction_for_caches_of_its_own(proof: dict[str, Any]) -> None:
    """In pieces that running answers can wait for; until then more rows are recomputed."""
    found = proof["fitted"]
    assert found["uncorrected"][0]
    assert found["figures"]["notes"] == ["there is no KV correction for these caches yet: 30% of the rows recomputed"]
    assert found["figures"]["uncorrected"]
    assert found["figures"]["rows_computed"] == found["recomputed"][0]
    assert not found["uncorrected"][-1]
    assert found["recomputed"][-1] < 0.7 * found["recomputed"][0]
    assert found["maps"] == [True, True]
    assert 300 < found["surrogate"] <= 512
    assert found["hits"]
    assert found["missing"] == 0
    assert found["most rows"] <= 32


def test_a_prompt_in_vllms_prefix_cache_is_answered_alike(proof: dict[str, Any]) -> None:
    """The second time vLLM's own prefix cache has its first blocks, and only rows behind them are filled."""
    assert proof["again"]


def test_missing_caches_are_computed_at_once_and_stored_later(proof: dict[str, Any]) -> None:
    found = proof["unknown"]
    assert found["nothing there"]
    assert found["full"] < CLOSE
    assert found["computed"] >= 3
    assert found["hits"]
    assert found["then"] < CLOSE


def test_an_idle_engine_stores_missing_caches_and_then_rests(proof: dict[str, Any]) -> None:
    found = proof["learnt"]
    assert found["full"]
    assert found["before"] >= 3
    assert found["before"] >= found["during"] > 0, "while the answer ran a few rows were computed at a time"
    assert found["after"] == 0
    assert found["steps"] > 0
    assert found["again"] == 0


def test_texts_of_clients_are_stored_only_where_learning_is_on(proof: dict[str, Any]) -> None:
    found = proof["brought"]
    assert found["off"] >= found["before"]
    assert found["on"] == 0


def test_a_damaged_entry_is_reported_and_computed(proof: dict[str, Any]) -> None:
    assert proof["damaged"]["problems"] == 1
    assert proof["damaged"]["kv"] < CLOSE


def test_a_damaged_entry_is_counted_and_not_shown_to_clients(proof: dict[str, Any]) -> None:
    found = proof["damaged"]
    assert found["counted"]["damaged_entries"] == 1
    assert found["counted"]["prompts_blended"] == 1
    assert found["reply"].keys() == {"rows", "rows_computed"}
