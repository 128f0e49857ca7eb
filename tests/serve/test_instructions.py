"""What the server adds to a conversation: one sentence in front of documents, which an operator may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from served import Served

from blend.config import PromptConfig

LONG = "Explain in at least five sentences how the harbour is guarded."
DOCUMENTS = [{"title": "Harbour", "text": "The harbour has two gates, and a guard at each."}]


def prompt(served: Served, *before: dict[str, str], **more: Any) -> tuple[str, dict[str, Any]]:
    """The text that the model reads, and what was found out about it."""
    kvblend = {"trace": True, **more.pop("kvblend", {})}
    body = {"messages": [*before, {"role": "user", "content": LONG}], "max_tokens": 4, "kvblend": kvblend, **more}
    told = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60).json()["kvblend"]
    return "".join(token["text"] for token in told["trace"]), told


@pytest.mark.parametrize("context", [{"documents": DOCUMENTS}, {"kvblend": {"retrieve": {"top_k": 2}}}])
@pytest.mark.parametrize("before", [(), ({"role": "system", "content": "You are a guide."},)])
def test_a_question_reaches_the_model_as_it_was_sent(
    serve: Callable[..., Served], context: dict[str, Any], before: tuple[dict[str, str], ...]
) -> None:
    served = serve(instructions=PromptConfig.chat_instructions)
    text, told = prompt(served, *before, **context)
    documents = "".join(f"{one['title']}\n{one['text'].strip()}\n\n" for one in told["sources"])
    opening, *rest = text.split(f"{PromptConfig.chat_instructions}\n\n{documents}{LONG}")
    assert len(rest) == 1, text
    without = prompt(served, *before)[0]
    assert opening + LONG + rest[0] == without, "nothing else is added"


def test_an_operator_changes_it(serve: Callable[..., Served]) -> None:
    served = serve(instructions="Answer like a sailor.")
    text, told = prompt(served, documents=DOCUMENTS)
    assert "Answer like a sailor.\n\nHarbour\nThe harbour has two gates" in text
    assert PromptConfig.chat_instructions not in text
    assert told["figures"]["chunks"] == 1


def test_caches_that_precompute_has_stored_serve_behind_every_instruction(serve: Callable[..., Served]) -> None:
    for instructions in (PromptConfig.chat_instructions, "Answer like a sailor."):
        _, told = prompt(serve(instructions=instructions), kvblend={"retrieve": {"top_k": 3}})
        assert [source["hit"] for source in told["sources"]] == [True] * 3
        assert told["figures"]["method"] == "blend"
        assert told["figures"]["bytes_loaded"] > 0


def test_without_instructions_nothing_stands_in_front_of_the_documents(serve: Callable[..., Served]) -> None:
    served = serve(instructions="")
    text, _ = prompt(served, documents=DOCUMENTS)
    assert text.endswith(prompt(served)[0].replace(LONG, f"Harbour\n{DOCUMENTS[0]['text']}\n\n{LONG}"))
