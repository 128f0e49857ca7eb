"""vLLM's own server whose model recomputes the rows: no other process, and documents in requests as ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from machines import HEADERS, Machines, until

from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.inside_vllm
TOKENS = 12
DOCUMENTS = [
    {
        "title": f"The {topic}",
        "text": " ".join(f"Gate {gate} of the {topic} opened in {1800 + 7 * gate + number}." for gate in range(9)),
    }
    for number, topic in enumerate(("harbour", "orchard", "glacier", "library"))
]
QUESTIONS = ("When did gate 3 of the orchard open?", "Which gate of the glacier is the oldest?")
SETTINGS: dict[str, Any] = {"ratio": 0.15}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("rows-server")
    shape = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.2, "tie_word_embeddings": False}
    model = save_tiny_model(folder / "tiny", "\n".join(one["text"] for one in DOCUMENTS), **shape)
    found = Machines(folder, folder / "store", model)
    try:
        found.start_server({"stage": "rows", "store": str(folder / "store"), **SETTINGS})
        yield found
    finally:
        found.end()


def body(question: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **more,
    }


def ask(server: Machines, question: str, **more: Any) -> tuple[str, dict[str, Any]]:
    url = f"{server.url}/v1/chat/completions"
    response = httpx.post(url, json=body(question, **more), headers=HEADERS, timeout=300)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["message"]["content"], found.get("kvblend", {})


class Own:
    """What kvblend's decoder answers, over caches that it is given by the server's store."""

    def __init__(self, server: Machines) -> None:
        from blend.blender import Blender
        from blend.config import BlendConfig
        from blend.integrations.vllm.local import LocalPrompts
        from blend.integrations.vllm.rows_identity import Fingerprints
        from blend.model.decoder import Decoder
        from blend.store import open_store

        self.decoder = Decoder.load(str(server.model), device="cpu", dtype="float32")
        own = Fingerprints.of(self.decoder.fingerprint).own
        self.decoder.__dict__["fingerprint"] = (
            own  # the server's caches have a name of their own; here they are compared
        )
        self.blender = Blender(self.decoder, open_store(str(server.store)), BlendConfig(**SETTINGS))
        self.prompts = LocalPrompts(self.decoder.tokenizer)

    def layout(self, question: str) -> Any:
        from blend.integrations.vllm.questions import part_of

        return self.prompts.layout(part_of(body(question, documents=DOCUMENTS)))

    def lacking(self, layout: Any) -> int:
        return len(self.blender.library(layout.kept_behind).missing([one for one in layout.stored if one is not None]))

    def answer(self, layout: Any) -> str:
        from blend.model.generate import generate

        blend = self.blender.prefill(layout)
        return generate(self.decoder, blend, layout.token_ids, max_new_tokens=TOKENS, eos_token_id=None).text


def test_documents_are_blended_by_vllms_own_model(server: Machines) -> None:
    own = Own(server)
    first, second = map(own.layout, QUESTIONS)
    assert own.lacking(first) >= len(DOCUMENTS)
    full = own.answer(first)  # nothing is stored yet
    text, told = ask(server, QUESTIONS[0], documents=DOCUMENTS)
    assert (text.strip(), told["figures"]["method"]) == (full.strip(), "rows")

    def learnt() -> bool:
        ask(server, "Good morning!")  # later steps store what the prompt lacked
        return own.lacking(second) == 0

    until(learnt)
    blended = own.answer(second)
    assert own.blender.prefill(second).rows_share < 0.6
    assert ask(server, QUESTIONS[1], documents=DOCUMENTS)[0].strip() == blended.strip()
    assert ask(server, QUESTIONS[1], documents=DOCUMENTS)[0].strip() == blended.strip()


def test_plain_requests_are_vllms_own(server: Machines) -> None:
    """Also with the very token ids of a blended prompt: its blocks are under a salt."""
    layout = Own(server).layout(QUESTIONS[1])
    plain = {
        "model": "tiny",
        "prompt": list(layout.token_ids),
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }

    def answer() -> str:
        given = httpx.post(f"{server.url}/v1/completions", json=plain, headers=HEADERS, timeout=300)
        return str(given.json()["choices"][0]["text"])

    before = answer()
    ask(server, QUESTIONS[1], documents=DOCUMENTS)
    assert answer() == before


def test_a_corpus_cannot_be_asked_here(server: Machines) -> None:
    url = f"{server.url}/v1/chat/completions"
    given = httpx.post(url, json=body("x", kvblend={"retrieve": True}), headers=HEADERS, timeout=60)
    assert given.status_code in (400, 503)


def test_a_folder_is_needed() -> None:
    from blend.integrations.vllm.rows_stage import row_blender

    with pytest.raises(ValueError, match="needs the option store"):
        row_blender(None, None, {})  # type: ignore[arg-type]  # refused before anything is looked at


def test_a_stage_has_options_of_its_own() -> None:
    from blend.integrations.vllm.connector import _chosen

    make, apart = _chosen({"stage": "rows", "store": "kv", "ratio": 0.2})
    assert (make.__name__, apart) == ("RecomputedRows", False)
    with pytest.raises(ValueError, match="stage rows has no option 'socket'"):
        _chosen({"stage": "rows", "socket": "@x"})
    with pytest.raises(ValueError, match="stage copied has no option 'store'"):
        _chosen({"store": "kv"})
