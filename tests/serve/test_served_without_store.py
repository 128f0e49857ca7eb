"""A store that goes away and comes back: what needs only text is answered, what needs the store is told to come again."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rooms import QUESTION, serving, settled
from served import listening, logged

from blend.prompt import render_chunk
from blend.serve.http.requests import ApiKeys
from tests.towns import TOPICS, document

PASSAGE = "\n\n".join(
    f"The lantern of tower {n} is lit by keeper Anselm at seven, and it is put out by keeper Berta at dawn, who writes the "
    f"hour into book {n} of the harbour office and hangs the key of the tower on hook {n * 3} behind the door."
    for n in range(4)
)


@contextmanager
def away(*paths: Path) -> Iterator[None]:
    """Moved beside; nobody may make anything in their place meanwhile."""
    for path in paths:
        path.rename(path.with_name(f"{path.name}.away"))
    try:
        yield
        assert [path for path in paths if path.exists()] == []
    finally:
        for path in paths:
            path.with_name(f"{path.name}.away").rename(path)


@contextmanager
def client_of(store: Path, model: Path, tenants: ApiKeys | None = None, **options: int) -> Iterator[httpx.Client]:
    with (
        serving(store, model, **options) as service,
        listening(service, tenants) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        client.served = served  # type: ignore[attr-defined]
        yield client


def put(client: httpx.Client, content: str = QUESTION, key: str = "", **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **more}
    return client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"} if key else {})


def told(response: httpx.Response) -> tuple[str, dict[str, Any]]:
    assert response.status_code == 200, response.text
    content = response.json()
    return content["choices"][0]["message"]["content"], content["kvblend"]


def ways() -> dict[str, dict[str, Any]]:
    """Questions that need nothing but what they bring."""
    chunk = f"{TOPICS[0]}.md"
    return {
        "documents": {"documents": [{"title": "The harbour", "text": document(TOPICS[0], 0)}]},
        "learned": {"content": f"{PASSAGE}\n\nWho lights the lantern?"},
        "plain": {"content": "Tell me about the harbour."},
        "by id": {"documents": [{"id": chunk}]},
        "retrieved": {"kvblend": {"retrieve": {"top_k": 3}}},
    }


@pytest.mark.parametrize("whole", [True, False], ids=["everything", "caches"])
def test_questions_are_answered_in_full_and_the_store_is_used_again(store: Path, model: Path, whole: bool) -> None:
    lost = store if whole else store / "kv"
    with client_of(store, model, prefix_budget=0) as client:
        put(client, **ways()["retrieved"])  # the corpus has been read once
        full = {name: told(put(client, **_full(more)))[0] for name, more in ways().items()}
        with away(lost):
            for name, more in ways().items():
                text, own = told(put(client, **more))
                assert text == full[name]
                assert (own["figures"]["method"], own["figures"]["reason"]) == ("full", "store_unreachable"), name
                assert own["figures"]["hits"] == 0
            pasted = make_pasted(client)
            assert {one["kind"] for one in told(put(client, pasted))[1]["sources"]} == {"pasted"}
            assert client.get("/ready").status_code == 200
        page = client.get("/metrics").text
        assert f'kvblend_fallbacks_total{{reason="store_unreachable"}} {float(len(ways()) + 1)}' in page
        again = told(put(client, **ways()["retrieved"]))[1]["figures"]
        assert (again["method"], again["hits"]) == ("blend", 3)


def _full(more: dict[str, Any]) -> dict[str, Any]:
    return {**more, "kvblend": {**more.get("kvblend", {}), "method": "full"}}


def make_pasted(client: httpx.Client) -> str:
    tenant = client.served.state.service.tenant("")  # type: ignore[attr-defined]
    return "".join(map(render_chunk, tenant.view("").retrieved(["How many gates?"], 2))) + "\n\nHow many gates?"


def test_what_needs_the_store_is_told_to_come_again(store: Path, model: Path) -> None:
    with client_of(store, model) as client:
        with away(store):
            for known in ({"kvblend": {"retrieve": {"top_k": 2}}}, {"documents": [{"id": "harbour.md"}]}):
                figures = told(put(client, **known))[1]["figures"]  # the corpus was read at the start
                assert figures["reason"] == "store_unreachable"
            for response in (
                put(client, model=f"{client.served.model}+corpus:other"),  # type: ignore[attr-defined]
                client.get("/v1/documents"),
                client.post("/v1/documents", json={"documents": [{"title": "A", "text": "A text."}]}),
                client.delete("/v1/documents/harbour.md"),
            ):
                assert response.status_code == 503, response.text
                assert int(response.headers["retry-after"]) >= 1
        assert put(client, kvblend={"retrieve": {"top_k": 2}}).status_code == 200
        assert len(client.get("/v1/documents").json()["data"]) == len(TOPICS)


def test_an_outage_is_told_once(store: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvblend.serve")
    with client_of(store, model) as client:
        for _ in range(2):
            with away(store):
                for more in (*ways().values(), *ways().values()):
                    put(client, **more)
            put(client)
    lines = [record for record in caplog.records if record.getMessage() == "store_unreachable"]
    assert [record.levelname for record in lines] == ["WARNING", "WARNING"]
    assert all(str(store / "kv") in json.dumps(logged(record)) for record in lines)
    assert [record.getMessage() for record in caplog.records].count("store_back") == 2


def test_a_tenant_who_comes_first_while_the_store_is_gone_makes_none(store: Path, model: Path) -> None:
    tenants = ApiKeys([("secret-of-alpha", "alpha"), ("secret-of-beta", "beta")])
    with client_of(store, model, tenants, prefix_budget=0) as client:
        with away(store):
            text, own = told(put(client, key="secret-of-alpha", **ways()["documents"]))
            assert own["figures"]["reason"] == "store_unreachable"
        put(client, key="secret-of-alpha", **ways()["documents"])
        settled(client.served.state.service)  # type: ignore[attr-defined]
        own = told(put(client, key="secret-of-alpha", **ways()["documents"]))[1]
        assert own["figures"]["hits"] > 0
        with away(store / "tenants" / "alpha" / "kv"):  # one tenant's store alone
            assert told(put(client, key="secret-of-alpha", **ways()["documents"]))[0] == text
            assert put(client, key="secret-of-beta", **ways()["documents"]).status_code == 200
