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
from blend.prompt import render_chunk
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
        _four_ways(service)
        assert len(ask(service, "Hello.", "Yes?", QUESTION, top_k=2).sources) == 2
        if template is None:
            _with_a_system_message(service)
            first = ask(service, QUESTION)
            later = ask(service, QUESTION, first.text, "And how many towers?")
            assert later.figures.rows_reused >= first.figures.rows - 1, "the conversation goes on where it was"


def _with_a_system_message(service: Service) -> None:
    """As somebody pastes who puts a question as `blend answer` does."""
    rag = service.tenant("").rag()
    expected, config = rag.answer(QUESTION, top_k=4, max_new_tokens=8), rag.prompt_config
    chunks = "".join(render_chunk(hit.chunk) for hit in expected.chunks)
    user = config.instruction + chunks + config.question.replace("{question}", QUESTION)
    told = put(service, Request((Message("system", config.system), Message("user", user)), sampling=FEW))
    assert told.text.strip() == expected.text
    assert told.figures.rows == expected.blend.layout.rows


def _four_ways(service: Service) -> None:
    rag = service.tenant("").rag()
    expected = rag.answer(QUESTION, top_k=4, max_new_tokens=8)
    retrieved = ask(service, QUESTION, top_k=4)
    chunks = [hit.chunk for hit in expected.chunks]
    assert retrieved.text.strip() == expected.text
    assert [source.id for source in retrieved.sources] == [chunk.id for chunk in chunks]
    assert all(source.hit and source.kind == "retrieved" for source in retrieved.sources)
    assert retrieved.figures.rows_computed == expected.blend.rows_recomputed
    given = tuple(GivenDocument(chunk.text, chunk.title) for chunk in chunks)
    documents = ask(service, QUESTION, documents=given)
    assert [source.hit for source in documents.sources] == [True] * 4
    assert documents.text == retrieved.text
    config = rag.prompt_config
    asked = config.question.replace("{question}", QUESTION)
    pasted = config.instruction + "".join(map(render_chunk, chunks)) + asked
    told = put(service, Request((Message("user", f"{config.system}\n\n{pasted}"),), sampling=FEW))
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


def test_a_question_reaches_the_model_as_it_was_sent(serve: Callable[..., Served]) -> None:
    served = serve(instructions=PromptConfig.chat_instructions)
    contexts: Any = ({"documents": DOCUMENTS}, {"kvblend": {"retrieve": {"top_k": 2}}})
    for context, before in product(contexts, ((), ({"role": "system", "content": "You are a guide."},))):
        text, told = prompt(served, *before, **context)
        documents = "".join(f"{one['title']}\n{one['text'].strip()}\n\n" for one in told["sources"])
        opening, *rest = text.split(f"{PromptConfig.chat_instructions}\n\n{documents}{LONG}")
        assert len(rest) == 1, text
        assert sum(token["recomputed"] for token in told["trace"]) == told["figures"]["rows_computed"]
        assert opening + LONG + rest[0] == prompt(served, *before)[0], "nothing else is added"


@pytest.mark.parametrize("instructions", ["Answer like a sailor.", ""])
def test_an_operator_changes_what_stands_before_documents(serve: Callable[..., Served], instructions: str) -> None:
    """Caches that precompute has stored serve behind every instruction."""
    served = serve(instructions=instructions)
    text, _ = prompt(served, documents=DOCUMENTS)
    front = f"{instructions}\n\n" if instructions else ""
    assert text.endswith(prompt(served)[0].replace(LONG, f"{front}Harbour\n{DOCUMENTS[0]['text']}\n\n{LONG}"))
    _, told = prompt(served, kvblend={"retrieve": {"top_k": 3}})
    assert [source["hit"] for source in told["sources"]] == [True] * 3
    assert told["figures"]["method"] == "blend"
    assert told["figures"]["bytes_loaded"] > 0
