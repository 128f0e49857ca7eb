"""A store that goes away and comes back: what needs only text is answered, what needs the store is told to come again."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from changing import until
from rooms import QUESTION, settled
from served import CHAT, Served, logged

from blend.prompt_template import render_chunk
from blend.serve.http.keys import ApiKeys
from tests.towns import TOPICS, document


@contextmanager
def away(path: Path) -> Iterator[None]:
    """Moved beside; nobody may make anything in its place meanwhile."""
    aside = path.with_name(f"{path.name}.away")
    path.rename(aside)
    try:
        yield
        assert not path.exists()
    finally:
        aside.rename(path)


def put(served: Served, content: str = QUESTION, key: str = "none", **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **more}
    return httpx.post(f"{served.url}{CHAT}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def told(response: httpx.Response) -> tuple[str, dict[str, Any]]:
    assert response.status_code == 200, response.text
    content = response.json()
    return content["choices"][0]["message"]["content"], content["kvblend"]


RETRIEVE = {"kvblend": {"retrieve": {"top_k": 3}}}
BY_ID = {"documents": [{"id": f"{TOPICS[0]}.md"}]}
GIVEN = {"documents": [{"title": "The harbour", "text": document(TOPICS[0], 0)}]}
LEARNED = {"content": f"{document('windmill', 9)}\n\nWho keeps it?"}
WAYS: list[dict[str, Any]] = [GIVEN, LEARNED, {"content": "Tell me about the harbour."}, BY_ID, RETRIEVE]
LEARNS = {"learn_budget": 1 << 24}


@pytest.mark.parametrize("lost", ["", "kv"], ids=["everything", "caches"])
def test_questions_are_answered_in_full_meanwhile(store: Path, serve: Callable[..., Served], lost: str) -> None:
    served = serve(prefix_budget=0, **LEARNS)
    put(served, **RETRIEVE)  # the corpus has been read once
    full = [told(put(served, **{**more, "kvblend": {**more.get("kvblend", {}), "method": "full"}}))[0] for more in WAYS]
    with away(store / lost):
        for more, expected in zip(WAYS, full, strict=True):
            text, own = told(put(served, **more))
            assert text == expected
            assert (own["figures"]["method"], own["figures"]["reason"]) == ("full", "store_unreachable"), more
            assert own["figures"]["hits"] == 0
        passages = served.state.service.tenant("").view("").retrieved([QUESTION], 2)
        pasted = told(put(served, "".join(map(render_chunk, passages)) + QUESTION))[1]
        assert {one["kind"] for one in pasted["sources"]} == {"pasted"}
        assert httpx.get(f"{served.url}/ready").status_code == 200
    assert served.counts()['fallbacks_total{reason="store_unreachable"}'] == len(WAYS) + 1
    again = told(put(served, **RETRIEVE))[1]["figures"]
    assert (again["method"], again["hits"]) == ("blend", 3)


def test_what_needs_the_store_is_told_to_come_again(store: Path, serve: Callable[..., Served]) -> None:
    served = serve()
    text = {"documents": [{"title": "A", "text": "A text."}]}
    with away(store), httpx.Client(base_url=served.url) as client:
        for response in (
            put(served, model=f"{served.model}+corpus:other"),
            client.get("/v1/documents"),
            client.post("/v1/documents", json=text),
            client.delete("/v1/documents/harbour.md"),
        ):
            assert response.status_code == 503, response.text
            assert int(response.headers["retry-after"]) >= 1

    def lists_all() -> bool:
        response = httpx.get(f"{served.url}/v1/documents")
        if response.status_code == 503:  # what runs in the background may notice later that the store is back
            assert int(response.headers["retry-after"]) >= 1
            return False
        return len(response.json()["data"]) == len(TOPICS)

    until(lists_all)


def test_an_outage_is_told_once(store: Path, serve: Callable[..., Served], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvblend.serve")
    served = serve(**LEARNS)
    for _ in range(2):
        with away(store):
            for more in WAYS * 2:
                put(served, **more)
        put(served)
    lines = [record for record in caplog.records if record.getMessage() == "store_unreachable"]
    assert [record.levelname for record in lines] == ["WARNING", "WARNING"]
    assert all(str(store / "kv") in json.dumps(logged(record)) for record in lines)
    assert [record.getMessage() for record in caplog.records].count("store_back") == 2


def test_a_tenant_who_comes_first_while_the_store_is_gone_makes_none(store: Path, serve: Callable[..., Served]) -> None:
    served = serve({"tenants": ApiKeys([("alphas", "alpha"), ("betas", "beta")])}, prefix_budget=0, **LEARNS)
    with away(store):
        text, own = told(put(served, key="alphas", **GIVEN))
        assert own["figures"]["reason"] == "store_unreachable"
    put(served, key="alphas", **GIVEN)
    settled(served.state.service)
    assert told(put(served, key="alphas", **GIVEN))[1]["figures"]["hits"] > 0
    with away(store / "tenants" / "alpha" / "kv"):  # one tenant's store alone
        assert told(put(served, key="alphas", **GIVEN))[0] == text
        assert put(served, key="betas", **GIVEN).status_code == 200
