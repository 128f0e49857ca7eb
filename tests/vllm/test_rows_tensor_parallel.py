"""Rows recomputed by a model that two processes of vLLM hold: the same answers and chunk caches as kvblend's decoder gives.

`rows_split_proof.py` runs in a process of its own, once for this file; the model's two are its children.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from proofs import found_by

CLOSE = 1e-4  # relative to the largest entry: other summation orders in float32, nothing else

pytestmark = pytest.mark.inside_vllm


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("rows_split_proof.py", tmp_path_factory.mktemp("rows"))


def test_the_first_process_uses_caches_of_kvblends_decoder_and_the_other_has_no_store(proof: dict[str, Any]) -> None:
    assert proof["shared"]


@pytest.mark.parametrize("case", ["default", "all rows", "no rows", "deviation", "gradual"])
def test_prompts_together_are_answered_as_kvblend_does(proof: dict[str, Any], case: str) -> None:
    assert proof[case]


def test_all_rows_are_vllms_own_prefill(proof: dict[str, Any]) -> None:
    assert proof["native"], "kvblend's full prefill, which is that of the case of all rows"


def test_a_blend_of_some_rows_answers_otherwise(proof: dict[str, Any]) -> None:
    """On a random model stale KV shows in the answer, so that equal answers mean equal KV."""
    assert any(proof["differs"])


def test_blocks_that_vllm_holds_already_serve_again(proof: dict[str, Any]) -> None:
    assert proof["again"]


def test_blended_and_plain_prompts_run_together(proof: dict[str, Any]) -> None:
    assert proof["mixed"]


def test_what_a_prompt_lacked_is_stored_whole_and_serves_other_decoders(proof: dict[str, Any]) -> None:
    found = proof["learnt"]
    assert found["before"] >= 3
    assert found["full"]
    assert found["after"] == 0
    assert found["apart"] < CLOSE
    assert found["then"]


def test_damaged_and_missing_entries_are_computed(proof: dict[str, Any]) -> None:
    assert proof["damaged"]


def test_a_store_that_fails_for_a_moment_leaves_no_process_waiting(proof: dict[str, Any]) -> None:
    assert proof["outages"] == {"full": True, "again": True}


@pytest.mark.parametrize("sizes", [(4, 2, 1), (1, 1, 2), (4, 2, 2)])
def test_other_ways_of_splitting_a_model_are_refused(sizes: tuple[int, int, int]) -> None:
    from blend.integrations.vllm.contract import ModelRefusedError
    from blend.integrations.vllm.rows_stage import RecomputedRows

    world, tensor, data = sizes
    parallel = SimpleNamespace(world_size=world, tensor_parallel_size=tensor, data_parallel_size=data)
    config = SimpleNamespace(
        parallel_config=parallel,
        lora_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(is_multimodal_model=False),
    )
    with pytest.raises(ModelRefusedError, match="rows, because the model is split over several processes, and not by"):
        RecomputedRows(SimpleNamespace(config=config, layers=()), {"store": "s"})  # type: ignore[arg-type]
