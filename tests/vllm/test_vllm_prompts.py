"""Prompts made in vLLM's own server: for its own model, and in its server's words; documents become a layout and a ticket."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from blend.errors import StoreError
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.middleware import Rewriter, Rewritten
from blend.integrations.vllm.prompts import LocalPrompts, part_of
from blend.integrations.vllm.transport import VARIABLE
from blend.serve.http.errors import ApiError
from blend.serve.prompts.tenant import StoreWatch
from blend.store import open_store
from blend.types import PlaceOrigin
from tests.tiny_model import save_tiny_model

DOCUMENTS = [{"title": f"Town {number}", "text": f"The harbour has {number} gates. " * 6} for number in range(3)]
CHAT = "/v1/chat/completions"
DEFAULTS = {"enable_thinking": False, "tone": "calm"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save_tiny_model(tmp_path_factory.mktemp("prompts") / "tiny", "\n".join(one["text"] for one in DOCUMENTS))
    found = AutoTokenizer.from_pretrained(model)
    found.chat_template += "{{ 'thinks' if enable_thinking else 'answers' }}"
    return found


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "How many gates are there?"}], **more}


def store_of(tokenizer: Any) -> str:
    return f"{tokenizer.name_or_path}-store"


def asked(tokenizer: Any, given: dict[str, Any], template: dict[str, Any] | None = None) -> Rewritten:
    """What becomes of a request to a vLLM with stage rows."""
    options = {"stage": "rows", "store": store_of(tokenizer)}
    transfer = SimpleNamespace(kv_connector_extra_config=options, engine_id="an engine")
    engine = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
        vllm_config=SimpleNamespace(kv_transfer_config=transfer),
    )
    return asyncio.run(Rewriter(engine, template).rewritten(given, CHAT))


def test_documents_become_a_ticket_and_a_salt(tokenizer: Any) -> None:
    given = body(documents=DOCUMENTS)
    prompt = LocalPrompts(tokenizer, {"store": store_of(tokenizer)}).prompt(part_of(given))
    found = asked(tokenizer, given)
    transfer = found.body["kv_transfer_params"]
    assert transfer["prompt_token_ids"] == prompt.ids
    ticket = LayoutTicket.read(transfer["kvblend"]["ticket"], prompt.ids)
    assert [place.origin for place in ticket.layout.places] == [PlaceOrigin.NEW] * 3
    assert (ticket.corpus, ticket.user) == ("", "")
    assert "documents" not in found.body
    assert found.shown["figures"] == {"method": "rows"}
    assert [one["title"] for one in found.shown["sources"]] == [one["title"] for one in DOCUMENTS]
    assert len(found.body["cache_salt"]) == 64


def test_only_the_same_layout_of_the_same_generation_has_the_same_salt(tokenizer: Any) -> None:
    def salt(**more: Any) -> str:
        return str(asked(tokenizer, body(**{"documents": DOCUMENTS, **more})).body["cache_salt"])

    first = salt()
    assert salt() == first
    others = {salt(documents=DOCUMENTS[::-1]), salt(cache_salt="mine")}
    open_store(f"{store_of(tokenizer)}/kv").advance()
    assert len({first, *others, salt()}) == 4


def test_a_request_without_documents_passes_unchanged_and_a_missing_corpus_is_refused(tokenizer: Any) -> None:
    assert asked(tokenizer, body()) == Rewritten(body())
    with pytest.raises(ApiError, match="corpus_not_found"):
        asked(tokenizer, body(kvblend={"retrieve": {"top_k": 3}}))


def test_full_prefill_on_demand_is_vllms_own(tokenizer: Any) -> None:
    found = asked(tokenizer, body(documents=DOCUMENTS, kvblend={"method": "full"}))
    ids = asked(tokenizer, body(documents=DOCUMENTS)).body["kv_transfer_params"]["prompt_token_ids"]
    assert found.body["kv_transfer_params"] == {"prompt_token_ids": ids}
    assert found.shown["figures"] == {"method": "full", "reason": ""}


def test_documents_are_answered_from_while_the_store_is_gone(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: StoreWatch) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(StoreWatch, "require", gone)
    found = asked(tokenizer, body(documents=DOCUMENTS))
    assert found.shown["figures"] == {"method": "full", "reason": "store_unreachable"}
    assert "kvblend" not in found.body["kv_transfer_params"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, DEFAULTS),
        ({}, DEFAULTS),
        ({"tone": "loud"}, {"enable_thinking": False, "tone": "loud"}),
        ({"enable_thinking": None, "tone": "auto"}, DEFAULTS),
        ({"enable_thinking": True, "more": 1}, {"enable_thinking": True, "tone": "calm", "more": 1}),
        ("nonsense", DEFAULTS),
    ],
)
def test_a_requests_template_arguments_override_the_servers(given: Any, expected: dict[str, Any]) -> None:
    assert part_of({"chat_template_kwargs": given}, DEFAULTS)["template"] == expected
    assert part_of({"chat_template_kwargs": {"tone": None}})["template"] == {"tone": None}


@pytest.mark.inside_vllm
@pytest.mark.parametrize("given", [{}, {"tone": "loud"}, {"tone": "auto", "more": 1}, {"enable_thinking": None}])
def test_template_arguments_are_merged_as_vllm_does(given: dict[str, Any]) -> None:
    from vllm.renderers.params import ChatParams

    theirs = ChatParams(chat_template_kwargs=given).with_defaults(DEFAULTS).chat_template_kwargs
    assert part_of({"chat_template_kwargs": given}, DEFAULTS)["template"] == theirs


@pytest.mark.parametrize("rows", [True, False])
def test_template_arguments_of_the_server_apply(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, rows: bool) -> None:
    """With stage rows, and where the prefill process is away."""
    monkeypatch.setenv(VARIABLE, "@kvblend-nobody-is-here")

    def ending(template: Any, **more: Any) -> str:
        given = body(documents=DOCUMENTS, **more)
        if rows:
            found = asked(tokenizer, given, template)
        else:
            engine = SimpleNamespace(renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer))
            found = asyncio.run(Rewriter(engine, template).rewritten(given, CHAT))
        text = str(tokenizer.decode(found.body["kv_transfer_params"]["prompt_token_ids"]))
        return text.rpartition("assistant\n")[2]

    assert ending(None) == "answers"
    assert ending({"enable_thinking": True}) == "thinks"
    assert ending({"enable_thinking": True}, chat_template_kwargs={"enable_thinking": False}) == "answers"
