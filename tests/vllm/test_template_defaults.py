"""`--default-chat-template-kwargs` of vLLM's server holds for prompts that kvblend puts together as for vLLM's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoTokenizer

from blend.integrations.vllm import wire
from blend.integrations.vllm.middleware import KVBlend
from blend.integrations.vllm.prompts import part_of
from tests.tiny_model import save_tiny_model

CHAT = "/v1/chat/completions"
DEFAULTS = {"enable_thinking": False, "tone": "calm"}
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How many gates are there?"}],
    "documents": [{"text": "The harbour has three gates."}],
}


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
def test_a_requests_arguments_are_laid_over_the_servers(given: Any, expected: dict[str, Any]) -> None:
    assert part_of({"chat_template_kwargs": given}, DEFAULTS)["template"] == expected


def test_without_defaults_a_requests_arguments_are_what_they_are() -> None:
    assert part_of({"chat_template_kwargs": {"tone": None}})["template"] == {"tone": None}


@pytest.mark.inside_vllm
@pytest.mark.parametrize("given", [{}, {"tone": "loud"}, {"tone": "auto", "more": 1}, {"enable_thinking": None}])
def test_as_vllm_lays_them(given: dict[str, Any]) -> None:
    from vllm.renderers.params import ChatParams

    theirs = ChatParams(chat_template_kwargs=given).with_defaults(DEFAULTS).chat_template_kwargs
    assert part_of({"chat_template_kwargs": given}, DEFAULTS)["template"] == theirs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save_tiny_model(tmp_path_factory.mktemp("defaults") / "tiny", "The harbour has three gates.")
    found = AutoTokenizer.from_pretrained(model)
    found.chat_template += "{{ 'thinks' if enable_thinking else 'answers' }}"
    return found


def prompt(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, defaults: Any, **more: Any) -> str:
    """What vLLM's server is asked where no prefill process is."""

    async def asked(request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    app = Starlette(routes=[Route(CHAT, asked, methods=["POST"])])
    app.add_middleware(KVBlend)
    app.state.engine_client = SimpleNamespace(renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer))
    app.state.args = SimpleNamespace(default_chat_template_kwargs=defaults)
    monkeypatch.setenv(wire.VARIABLE, "@kvblend-nobody-is-here")

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post(CHAT, json={**BODY, **more}, timeout=60)

    ids = asyncio.run(post()).json()["kv_transfer_params"]["prompt_token_ids"]
    return str(tokenizer.decode(ids))


def test_the_servers_arguments_reach_the_prompt(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(defaults: Any, **more: Any) -> str:
        return prompt(tokenizer, monkeypatch, defaults, **more).rpartition("assistant\n")[2]

    assert ending(None) == "answers"
    assert ending({"enable_thinking": True}) == "thinks"
    assert ending({"enable_thinking": True}, chat_template_kwargs={"enable_thinking": False}) == "answers"
