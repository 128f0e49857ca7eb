"""What vLLM's server is asked where its own model recomputes rows: documents become a layout that goes with the request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from blend.integrations.vllm.gate import Gate, Rewritten
from blend.integrations.vllm.local import LocalPrompts
from blend.integrations.vllm.questions import part_of
from blend.integrations.vllm.rows_ticket import layout_of
from blend.serve.door.errors import DoorError
from tests.tiny_model import save_tiny_model

DOCUMENTS = [{"title": f"Town {number}", "text": f"The harbour has {number} gates. " * 6} for number in range(3)]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save_tiny_model(tmp_path_factory.mktemp("door") / "tiny", "\n".join(one["text"] for one in DOCUMENTS))
    return AutoTokenizer.from_pretrained(model)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "How many gates are there?"}], **more}


def asked(tokenizer: Any, given: dict[str, Any], stage: str = "rows", path: str = CHAT) -> Rewritten:
    transfer = SimpleNamespace(kv_connector_extra_config={"stage": stage})
    engine = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
        vllm_config=SimpleNamespace(kv_transfer_config=transfer),
    )
    return asyncio.run(Gate(engine).rewritten(given, path))


def test_documents_become_a_ticket_and_a_salt(tokenizer: Any) -> None:
    given = body(documents=DOCUMENTS)
    layout = LocalPrompts(tokenizer).layout(part_of(given))
    found = asked(tokenizer, given)
    transfer = found.body["kv_transfer_params"]
    assert transfer["prompt_token_ids"] == list(layout.token_ids)
    assert layout_of(transfer["kvblend"]["ticket"], layout.token_ids) == layout
    assert "documents" not in found.body
    assert found.told == {"sources": [], "figures": {"method": "rows"}}
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


def test_a_corpus_cannot_be_asked(tokenizer: Any) -> None:
    with pytest.raises(DoorError):
        asked(tokenizer, body(kvblend={"retrieve": {"top_k": 3}}))
