"""What vLLM's server is asked where its own model recomputes rows: documents become a layout that goes with the request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from blend.errors import StoreError
from blend.integrations.vllm.gate import Gate, Rewritten
from blend.integrations.vllm.local import LocalPrompts
from blend.integrations.vllm.questions import part_of
from blend.integrations.vllm.rows_ticket import Told, told_by
from blend.serve.failures import StoreWatch
from blend.serve.http.errors import ApiError
from blend.store import open_store
from tests.tiny_model import save_tiny_model

DOCUMENTS = [{"title": f"Town {number}", "text": f"The harbour has {number} gates. " * 6} for number in range(3)]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save_tiny_model(tmp_path_factory.mktemp("door") / "tiny", "\n".join(one["text"] for one in DOCUMENTS))
    return AutoTokenizer.from_pretrained(model)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "How many gates are there?"}], **more}


def store_of(tokenizer: Any) -> str:
    return f"{tokenizer.name_or_path}-store"


def asked(tokenizer: Any, given: dict[str, Any], stage: str = "rows", path: str = CHAT) -> Rewritten:
    options = {"stage": stage, "store": store_of(tokenizer)}
    transfer = SimpleNamespace(kv_connector_extra_config=options, engine_id="an engine")
    engine = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
        vllm_config=SimpleNamespace(kv_transfer_config=transfer),
    )
    return asyncio.run(Gate(engine).rewritten(given, path))


def test_documents_become_a_ticket_and_a_salt(tokenizer: Any) -> None:
    given = body(documents=DOCUMENTS)
    prompt = LocalPrompts(tokenizer, {"store": store_of(tokenizer)}).prompt(part_of(given))
    assert prompt is not None
    layout, found = prompt.layout, asked(tokenizer, given)
    transfer = found.body["kv_transfer_params"]
    assert transfer["prompt_token_ids"] == list(layout.token_ids)
    assert told_by(transfer["kvblend"]["ticket"], layout.token_ids) == Told(layout, "", frozenset({0, 1, 2}))
    assert "documents" not in found.body
    assert found.told is not None
    assert found.told["figures"] == {"method": "rows"}
    assert [one["title"] for one in found.told["sources"]] == [one["title"] for one in DOCUMENTS]
    assert len(found.body["cache_salt"]) == 64


def test_only_the_same_layout_has_the_same_salt(tokenizer: Any) -> None:
    first = asked(tokenizer, body(documents=DOCUMENTS))
    again = asked(tokenizer, body(documents=DOCUMENTS))
    other = asked(tokenizer, body(documents=DOCUMENTS[::-1]))
    own = asked(tokenizer, body(documents=DOCUMENTS, cache_salt="mine"))
    assert first.body["cache_salt"] == again.body["cache_salt"]
    assert len({one.body["cache_salt"] for one in (first, other, own)}) == 3


def test_a_request_without_documents_is_left_alone(tokenizer: Any) -> None:
    assert asked(tokenizer, body()) == Rewritten(body())


def test_a_corpus_that_is_not_there_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ApiError, match="corpus_not_found"):
        asked(tokenizer, body(kvblend={"retrieve": {"top_k": 3}}))


def test_full_prefill_on_demand_is_vllms_own(tokenizer: Any) -> None:
    found = asked(tokenizer, body(documents=DOCUMENTS, kvblend={"method": "full"}))
    blended = asked(tokenizer, body(documents=DOCUMENTS))
    assert found.body["kv_transfer_params"] == {
        "prompt_token_ids": blended.body["kv_transfer_params"]["prompt_token_ids"]
    }
    assert found.told is not None
    assert found.told["figures"] == {"method": "full", "reason": ""}


def test_documents_are_answered_from_while_the_store_is_out_of_reach(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: StoreWatch) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(StoreWatch, "require", gone)
    found = asked(tokenizer, body(documents=DOCUMENTS))
    assert found.told is not None
    assert found.told["figures"] == {"method": "full", "reason": "store_unreachable"}
    assert "kvblend" not in found.body["kv_transfer_params"]


def test_another_generation_of_the_store_has_another_salt(tokenizer: Any) -> None:
    before = asked(tokenizer, body(documents=DOCUMENTS))
    open_store(f"{store_of(tokenizer)}/kv").advance()
    after = asked(tokenizer, body(documents=DOCUMENTS))
    assert before.body["cache_salt"] != after.body["cache_salt"]
    tickets = [one.body["kv_transfer_params"]["kvblend"]["ticket"] for one in (before, after)]
    assert tickets[0] == tickets[1]
