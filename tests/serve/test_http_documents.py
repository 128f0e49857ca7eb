"""Documents that come over HTTP while questions are answered."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from changing import add, until
from rooms import serving
from served import CHAT, Served, listening

from blend.serve.documents.caches import CorpusUpdater
from blend.serve.http.requests import ApiKeys
from blend.serve.request import GivenDocument
from blend_retrieval.errors import IndexMissingError

DOCUMENTS = "/v1/documents"
DOMES = "The observatory of Kell has nine domes. Its keeper is called Ilse, and she counts stars. " * 3


@pytest.fixture
def mine(serve: Callable[..., Served]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve({"upload_bytes": 200_000, "corpora": 3}).url, timeout=60) as client:
        yield client


def prepared(http: httpx.Client, **query: str) -> dict[str, Any]:
    """All documents by id, when none is on its way any more."""
    deadline = time.monotonic() + 90
    while True:
        response = http.get(DOCUMENTS, params=query)
        assert response.status_code == 200
        found = {one["id"]: one for one in response.json()["data"]}
        if all(one["status"] in ("ready", "failed") for one in found.values()):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def listed(http: httpx.Client) -> set[str]:
    return {one["id"] for one in http.get(DOCUMENTS).json()["data"]}


def sources(http: httpx.Client, question: str, **retrieve: Any) -> list[Any]:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 2, "kvblend": {"retrieve": retrieve}}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    found: list[Any] = response.json()["kvblend"]["sources"]
    return found


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_files_and_texts_are_added_answered_from_and_removed(mine: httpx.Client) -> None:
    before = prepared(mine)
    assert len(before) == 8
    files = [
        ("file", ("kell.md", f"# Kell\n\n{DOMES}".encode())),
        ("file", ("notes/Ö.txt", b"The quay has two cranes. " * 9)),
        ("file", ("broken.pdf", b"not a PDF at all")),
        ("file", ("r.jsonl", b'{"id": "a", "body": "The mill of Orr grinds rye."}')),
        ("file", ("tool.exe", b"MZ")),
    ]
    added = mine.post(DOCUMENTS, files=files, data={"text_field": "body"})
    assert added.status_code == 202
    assert [one["id"] for one in added.json()["data"]] == [name for _, (name, _) in files]
    assert [one["status"] for one in added.json()["data"]] == ["queued"] * 4 + ["failed"]
    text = {"title": "The mill", "text": "The mill of Orr grinds rye on Mondays. " * 6, "id": "mill"}
    assert mine.post(DOCUMENTS, json={"documents": [text]}).status_code == 202
    found = prepared(mine)
    assert set(found) - set(before) == {"kell.md", "notes/Ö.txt", "mill", "r.jsonl#a", "broken.pdf", "tool.exe"}
    assert (found["r.jsonl#a"]["status"], found["r.jsonl#a"]["file"]) == ("ready", "r.jsonl")
    for name in ("broken.pdf", "tool.exe"):
        assert (found[name]["status"], bool(found[name]["reason"])) == ("failed", True)
    assert (found["mill"]["title"], found["mill"]["file"], found["kell.md"]["file"]) == ("The mill", None, "kell.md")
    assert found["mill"]["status"] == "ready"
    assert found["mill"]["progress"]["done"] == found["mill"]["progress"]["total"] > 0
    assert "The mill" in {one["title"] for one in sources(mine, "What does the mill of Orr grind?", top_k=3)}
    assert mine.get(f"{DOCUMENTS}/notes/Ö.txt").json()["chunks"] >= 1
    by_id = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 2, "documents": [{"id": "mill"}]}
    assert {one["title"] for one in mine.post(CHAT, json=by_id).json()["kvblend"]["sources"]} == {"The mill"}
    gone = mine.delete(f"{DOCUMENTS}/mill")
    assert gone.json() == {"id": "mill", "object": "document", "deleted": True}
    assert "The mill" not in {one["title"] for one in sources(mine, "What does the mill of Orr grind?", top_k=3)}
    assert error(mine.delete(f"{DOCUMENTS}/mill")) == error(mine.get(f"{DOCUMENTS}/mill")) == (404, "not_found")
    assert mine.post(CHAT, json=by_id).status_code == 400


def test_a_corpus_begins_with_its_first_document_and_is_asked_by_its_name(mine: httpx.Client) -> None:
    assert prepared(mine, corpus="kell") == {}
    assert error(mine.get(f"{DOCUMENTS}/x", params={"corpus": "kell"})) == (404, "not_found")
    body = {"documents": [{"id": "obs", "title": "Domes", "text": DOMES}], "corpus": "kell"}
    assert mine.post(DOCUMENTS, json=body).status_code == 202
    chunks = prepared(mine, corpus="kell")["obs"]["chunks"]
    name = mine.get("/v1/models").json()["data"][-1]["id"]
    assert name.endswith("+corpus:kell")

    def ask(**fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "How many domes?"}]
        return mine.post(CHAT, json={"messages": messages, "max_tokens": 2, "documents": [{"id": "obs"}], **fields})

    ways = (
        {"kvblend": {"corpus": "kell"}},
        {"kvblend": {"corpus": "kell", "retrieve": {"top_k": 1, "corpus": "kell"}}},
        {"kvblend": {"retrieve": {"corpus": "kell"}}},
        {"model": name},
    )
    for fields in ways:
        found = ask(**fields).json()["kvblend"]["sources"]
        assert [one["kind"] for one in found] == ["document"] * chunks, "none is there twice"
    refused = ask()
    assert error(refused) == (400, "invalid_value")
    assert refused.json()["error"]["message"].startswith("no document of the corpus has the id 'obs'")
    third = mine.post(DOCUMENTS, params={"corpus": "third"}, files={"file": ("a.txt", b"A sentence. " * 9)})
    assert third.status_code == 202
    refused = mine.post(DOCUMENTS, json={"documents": [{"text": DOMES}], "corpus": "fourth"})
    assert error(refused) == (400, "invalid_value")
    assert "3 corpora" in refused.json()["error"]["message"]


def test_who_asks_named_corpora_alone_is_not_told_where_they_lie(filled: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(tmp_path / "secret", filled[1], learn_budget=0) as service:
        add(service.documents("", "kell"), texts=[GivenDocument(DOMES, "Domes", "obs")])
        with pytest.raises(IndexMissingError) as caught:
            service.tenant("").view("").retrieved(["How many?"], 1)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "request_of",
    [
        {"json": {}},
        *({"json": {"documents": wrong}} for wrong in ([], [{"title": "x"}], [{"text": " "}], [{"text": "x"}] * 101)),
        {"json": {"documents": [{"text": "x", "url": "http://a"}]}},
        {"json": {"documents": [{"text": "x"}], "corpus": "../up"}},
        {"json": {"documents": [{"text": "x"}], "corpus": "a"}, "params": {"corpus": "b"}},
        {"json": {"documents": [{"text": "x"}]}, "params": {"corpse": "b"}},
        {"json": {"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "x"}]}},
        {"json": {"documents": [{"id": "a#", "text": "x"}, {"id": "a_", "text": "y"}]}},
        {"files": [("file", ("a.txt", b"x")), ("file", ("a.txt", b"y"))]},
        {"content": b"x"},
        {"content": b"--a\r\n", "headers": {"content-type": "multipart/form-data; boundary=a"}},
        {"content": b"--a\r\n", "headers": {"content-type": "multipart/form-data"}},
        {"files": {"other": ("a.txt", b"x")}},
        {"files": {"file": ("a.exe", b"x")}},
        {"files": {"file": ("", b"x")}},
        {"files": {"corpus": (None, b"a")}},
        {"files": {"file": ("a.txt", b"x"), "corpus": (None, b"a"), "more": (None, b"b")}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_document_is_refused(http: httpx.Client, request_of: dict[str, Any]) -> None:
    response = http.post(DOCUMENTS, **request_of)
    assert response.status_code == 400, response.text
    assert "\n" not in response.json()["error"]["message"]


def test_uploads_have_a_limit_of_their_own(mine: httpx.Client) -> None:
    files = {"file": ("large.txt", b"word " * 60_000)}
    assert error(mine.post(DOCUMENTS, files=files)) == (413, "body_too_large")
    assert error(mine.post(DOCUMENTS, json={"documents": [{"text": "word " * 60_000}]})) == (413, "body_too_large")


def test_deletes_that_wait_hold_up_nobody(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    served, go_on, apply = serve(), threading.Event(), CorpusUpdater.apply
    documents = served.state.service.documents("")
    names = [f"mill-{number}" for number in range(45)]  # more than a server has threads
    with httpx.Client(base_url=served.url, timeout=60) as http, ThreadPoolExecutor(len(names)) as pool:
        texts = [{"id": name, "text": f"The mill of Orr, {name}, grinds rye."} for name in names]
        assert http.post(DOCUMENTS, json={"documents": texts}).status_code == 202
        prepared(http)

        def later(*given: Any) -> Any:
            assert go_on.wait(60)
            return apply(*given)

        monkeypatch.setattr(CorpusUpdater, "apply", later)
        monkeypatch.setattr("blend.serve.http.documents.REMOVED_S", 60)
        try:
            deleted = [pool.submit(httpx.delete, f"{served.url}{DOCUMENTS}/{name}", timeout=60) for name in names]
            until(lambda: documents.leaving >= {*names})
            body = {"messages": [{"role": "user", "content": "What does it grind?"}], "max_tokens": 2}
            assert http.post(CHAT, json=body, timeout=8).status_code == 200
            assert http.get("/v1/models", timeout=8).status_code == 200
            assert not any(one.done() for one in deleted), "they wait for the index, in case it cannot be written"
        finally:
            go_on.set()
        assert all(one.result().json()["deleted"] for one in deleted)
        assert not {*names} & prepared(http).keys()


def test_documents_are_their_tenants_own(served: Served) -> None:
    with listening(served.state.service, ApiKeys([("anns", "ann"), ("bobs", "bob")]), shared=True) as locked:

        def call(key: str, method: str, path: str = "", **more: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.request(method, f"{locked.url}{DOCUMENTS}{path}", headers=headers, timeout=60, **more)

        body = {"messages": [{"role": "user", "content": "How many domes?"}], "kvblend": {"retrieve": {}}}
        headers = {"authorization": "Bearer anns"}
        refused = httpx.post(f"{locked.url}{CHAT}", json=body, headers=headers, timeout=60)
        assert error(refused)[0] == 400
        assert refused.json()["error"]["message"].startswith("no document is indexed yet: add some")
        added = call("anns", "POST", json={"documents": [{"id": "secret", "text": DOMES}]})
        assert added.status_code == 202
        assert [one["id"] for one in call("anns", "GET").json()["data"]] == ["secret"]
        assert call("bobs", "GET").json()["data"] == []
        assert call("bobs", "GET", "/secret").status_code == 404
        assert call("bobs", "DELETE", "/secret").status_code == 404
        assert call("none", "GET").status_code == 401
        assert call("anns", "DELETE", "/secret").json()["deleted"]


def test_a_failed_document_is_tried_again(mine: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CorpusUpdater, "divide", Mock(side_effect=RuntimeError("a bug")))
        mine.post(DOCUMENTS, json={"documents": [{"id": "kell/domes", "text": DOMES}]})
        assert prepared(mine)["kell/domes"]["status"] == "failed"
    again = mine.post(f"{DOCUMENTS}/kell/domes/retry")
    assert (again.status_code, again.json()["id"]) == (202, "kell/domes")
    assert prepared(mine)["kell/domes"]["status"] == "ready"
    assert error(mine.post(f"{DOCUMENTS}/kell/domes/retry")) == (409, "conflict")
    assert error(mine.post(f"{DOCUMENTS}/nothing/retry")) == (404, "not_found")
