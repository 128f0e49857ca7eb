"""Prompts of chat templates with and without system messages, and the sentence that the server adds to documents."""

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from rooms import FEW, QUESTION, ask, make_rag, put, serving
from served import Served

from blend.config import PromptConfig
from blend.prompt_template import render_chunk
from blend.serve.request import GivenDocument, Message, Request
from blend.serve.service import Service

NO_SYSTEM_ROLE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
DROPS_SYSTEM = NO_SYSTEM_ROLE.replace(
    "{{ raise_exception('System role not supported') }}", "{% set messages = messages[1:] %}"
)

AS_BLEND_ANSWER = f"{PromptConfig.system}\n\nAnswer from these."
"""What stands in front of the documents in a prompt of `blend answer`, where the template has no place for a system message."""


@pytest.mark.parametrize("template", [NO_SYSTEM_ROLE, DROPS_SYSTEM, None])
def test_four_ways_without_a_system_role(filled: tuple[Path, Path], tmp_path: Path, template: str | None) -> None:
    store, model = (shutil.copytree(one, tmp_path / one.name) for one in filled)
    (model / "chat_template.jinja").unlink()
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    make_rag(store, model).precompute(filled[0].parent / "documents")
    with serving(store, model, learn_budget=0, instructions=AS_BLEND_ANSWER) as service:
        _four_ways(service, template)
        assert len(ask(service, "Hello.", "Yes?", QUESTION, top_k=2).sources) == 2
        if template is None:
            first = ask(service, QUESTION)
            later = ask(service, QUESTION, first.text, "And how many towers?")
            assert later.figures.rows_reused >= first.figures.rows - 1, "the conversation goes on where it was"


def _four_ways(service: Service, template: str | None) -> None:
    rag = service.tenant("").rag()
    expected, config = rag.answer(QUESTION, top_k=4, max_new_tokens=8), rag.prompt_config
    chunks = [hit.chunk for hit in expected.chunks]
    retrieved = ask(service, QUESTION, top_k=4)
    assert retrieved.text.strip() == expected.text
    assert [source.id for source in retrieved.sources] == [chunk.id for chunk in chunks]
    assert all(source.hit and source.kind == "retrieved" for source in retrieved.sources)
    assert retrieved.figures.rows_computed == expected.blend.rows_recomputed
    documents = ask(service, QUESTION, documents=tuple(GivenDocument(chunk.text, chunk.title) for chunk in chunks))
    assert [source.hit for source in documents.sources] == [True] * 4
    assert documents.text == retrieved.text
    pasted = config.instruction + "".join(map(render_chunk, chunks)) + config.question.replace("{question}", QUESTION)
    conversations = [(Message("user", f"{config.system}\n\n{pasted}"),)]
    if template is None:
        conversations.append((Message("system", config.system), Message("user", pasted)))
    for messages in conversations:
        told = put(service, Request(messages, sampling=FEW))
        assert [(source.kind, source.id) for source in told.sources] == [("pasted", chunk.id) for chunk in chunks]
        assert told.text == retrieved.text
        assert told.figures.rows == expected.blend.layout.rows


LONG = "Explain in at least five sentences how the harbour is guarded."
DOCUMENTS = [{"title": "Harbour", "text": "The harbour has two gates, and a guard at each."}]


def prompt(served: Served, *before: dict[str, str], **more: Any) -> tuple[str, dict[str, Any]]:
    """The text that the model reads, and what was found out about it."""
    kvblend = {"trace": True, **more.pop("kvblend", {})}
    body = {"messages": [*before, {"role": "user", "content": LONG}], "max_tokens": 4, "kvblend": kvblend, **more}
    told = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60).json()["kvblend"]
    return "".join(token["text"] for token in told["trace"]), told


@pytest.mark.parametrize("instructions", [PromptConfig.chat_instructions, "Answer like a sailor.", ""])
def test_only_instructions_and_documents_are_added(serve: Callable[..., Served], instructions: str) -> None:
    """Caches that precompute has stored serve behind all instructions."""
    served = serve(instructions=instructions)
    contexts: Any = ({"documents": DOCUMENTS}, {"kvblend": {"retrieve": {"top_k": 2}}})
    for before, context in product(((), ({"role": "system", "content": "You are a guide."},)), contexts):
        text, told = prompt(served, *before, **context)
        front = f"{instructions}\n\n" if instructions else ""
        documents = "".join(f"{one['title']}\n{one['text'].strip()}\n\n" for one in told["sources"])
        assert text == prompt(served, *before)[0].replace(LONG, f"{front}{documents}{LONG}")
        assert sum(token["recomputed"] for token in told["trace"]) == told["figures"]["rows_computed"]
    assert [source["hit"] for source in told["sources"]] == [True] * 2
    assert told["figures"]["method"] == "blend"
    assert told["figures"]["bytes_loaded"] > 0
