"""Documents that come over HTTP while questions are answered."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from changing import add, held_back, until
from rooms import serving
from served import Served, refusal

from blend.serve.documents.caches import CorpusUpdater
from blend.serve.request import GivenDocument
from blend_retrieval.errors import IndexMissingError

DOCUMENTS = "/v1/documents"
DOMES = "The observatory of Kell has nine domes. Its keeper is called Ilse, and she counts stars. " * 3


MILL = {"title": "The mill", "text": "The mill of Orr grinds rye on Mondays. " * 6, "id": "mill"}
GRINDS = [{"role": "user", "content": "What does the mill of Orr grind?"}]


@pytest.fixture
def mine(serve: Callable[..., Served]) -> Served:
    return serve({"upload_bytes": 200_000, "corpora": 3})


def post(served: Served, *texts: object, key: str = "", **fields: Any) -> httpx.Response:
    return served.send("POST", DOCUMENTS, key, json={"documents": texts, **fields})


def prepared(served: Served, **query: str) -> dict[str, Any]:
    """All documents by id, when none is on its way any more."""

    def listed() -> list[Any]:
        found: list[Any] = served.send("GET", DOCUMENTS, params=query).json()["data"]
        return found

    until(lambda: {one["status"] for one in listed()} <= {"ready", "failed"}, 90)
    return {one["id"]: one for one in listed()}


def titles(served: Served) -> set[str]:
    """Of the passages from which a question about the mill is answered."""
    response = served.ask(messages=GRINDS, kvblend={"retrieve": {"top_k": 3}})
    return {one["title"] for one in response.json()["kvblend"]["sources"]}


def test_files_and_texts_are_added_answered_from_and_removed(mine: Served) -> None:
    before = prepared(mine)
    assert len(before) == 8
    files = {
        "kell.md": f"# Kell\n\n{DOMES}".encode(),
        "notes/Ö.txt": b"The quay has two cranes. " * 9,
        "broken.pdf": b"not a PDF at all",
        "r.jsonl": b'{"id": "a", "body": "The mill of Orr grinds rye."}',
        "tool.exe": b"MZ",
    }
    added = mine.send("POST", DOCUMENTS, files=[("file", one) for one in files.items()], data={"text_field": "body"})
    assert added.status_code == 202
    assert [one["id"] for one in added.json()["data"]] == [*files]
    assert [one["status"] for one in added.json()["data"]] == ["queued"] * 4 + ["failed"]
    assert post(mine, MILL).status_code == 202
    found = prepared(mine)
    assert set(found) - set(before) == {"kell.md", "notes/Ö.txt", "mill", "r.jsonl#a", "broken.pdf", "tool.exe"}
    assert (found["r.jsonl#a"]["status"], found["r.jsonl#a"]["file"]) == ("ready", "r.jsonl")
    for name in ("broken.pdf", "tool.exe"):
        assert (found[name]["status"], bool(found[name]["reason"])) == ("failed", True)
    assert (found["mill"]["title"], found["mill"]["file"], found["kell.md"]["file"]) == ("The mill", None, "kell.md")
    assert found["mill"]["status"] == "ready"
    assert found["mill"]["progress"]["done"] == found["mill"]["progress"]["total"] > 0
    assert mine.send("GET", f"{DOCUMENTS}/notes/Ö.txt").json()["chunks"] >= 1
    assert "The mill" in titles(mine)
    gone = mine.send("DELETE", f"{DOCUMENTS}/mill")
    assert gone.json() == {"id": "mill", "object": "document", "deleted": True}
    assert "The mill" not in titles(mine)
    for method in ("DELETE", "GET"):
        assert refusal(mine.send(method, f"{DOCUMENTS}/mill")) == (404, "not_found")


def test_a_corpus_begins_with_its_first_document_and_is_asked_by_its_name(mine: Served) -> None:
    assert prepared(mine, corpus="kell") == {}
    assert refusal(mine.send("GET", f"{DOCUMENTS}/x", params={"corpus": "kell"})) == (404, "not_found")
    assert post(mine, {"id": "obs", "title": "Domes", "text": DOMES}, corpus="kell").status_code == 202
    chunks = prepared(mine, corpus="kell")["obs"]["chunks"]
    name = mine.send("GET", "/v1/models").json()["data"][-1]["id"]
    assert name.endswith("+corpus:kell")
    by_id = [{"id": "obs"}]
    ways: tuple[dict[str, Any], ...] = (
        {"kvblend": {"corpus": "kell"}},
        {"kvblend": {"corpus": "kell", "retrieve": {"top_k": 1, "corpus": "kell"}}},
        {"kvblend": {"retrieve": {"corpus": "kell"}}},
        {"model": name},
    )
    for fields in ways:
        found = mine.ask(documents=by_id, **fields).json()["kvblend"]["sources"]
        assert [one["kind"] for one in found] == ["document"] * chunks, "none is there twice"
    refused = mine.ask(documents=by_id)
    assert refusal(refused) == (400, "invalid_value")
    assert refused.json()["error"]["message"].startswith("no document of the corpus has the id 'obs'")


def test_corpora_have_a_limit(mine: Served) -> None:
    files = {"file": ("a.txt", b"A sentence. " * 9)}
    for corpus in ("second", "third"):
        assert mine.send("POST", DOCUMENTS, params={"corpus": corpus}, files=files).status_code == 202
    refused = post(mine, MILL, corpus="fourth")
    assert refusal(refused) == (400, "invalid_value")
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
        {"files": {"file": ("a.txt", b"x"), "corpus": (None, b"a"), "more": (None, b"b")}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_document_is_refused(http: httpx.Client, request_of: dict[str, Any]) -> None:
    response = http.post(DOCUMENTS, **request_of)
    assert response.status_code == 400, response.text
    assert "\n" not in response.json()["error"]["message"]


def test_uploads_have_a_limit_of_their_own(mine: Served) -> None:
    large = "word " * 60_000
    files = mine.send("POST", DOCUMENTS, files={"file": ("large.txt", large.encode())})
    for response in (files, post(mine, {"text": large})):
        assert refusal(response) == (413, "body_too_large")


def test_deletes_that_wait_hold_up_nobody(mine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"mill-{number}" for number in range(45)}  # more than a server has threads
    post(mine, *({"id": name, "text": f"The mill of Orr, {name}, grinds rye."} for name in names))
    prepared(mine)
    monkeypatch.setattr("blend.serve.http.documents.REMOVED_S", 60)
    with ThreadPoolExecutor(50) as pool:
        with held_back(monkeypatch):
            deleted = [pool.submit(mine.send, "DELETE", f"{DOCUMENTS}/{name}") for name in names]
            until(lambda: mine.state.service.documents("").leaving >= names)
            assert pool.submit(mine.ask).result(8).status_code == 200
            assert pool.submit(mine.send, "GET", "/v1/models").result(8).status_code == 200
            assert not any(one.done() for one in deleted), "they wait for the index, in case it cannot be written"
        assert all(one.result().json()["deleted"] for one in deleted)
    assert not names & prepared(mine).keys()


def test_a_deletion_is_answered_at_once_and_holds_from_then_on(mine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    post(mine, MILL)
    prepared(mine)
    assert "The mill" in titles(mine)
    with held_back(monkeypatch):  # the index is busy
        begin = time.monotonic()
        assert mine.send("DELETE", f"{DOCUMENTS}/mill").json()["deleted"]
        assert time.monotonic() - begin < 2
        assert mine.state.service.documents("").leaving == {"mill"}
        assert "The mill" not in titles(mine)
        assert mine.ask(documents=[{"id": "mill"}]).status_code == 400
        assert mine.send("GET", f"{DOCUMENTS}/mill").status_code == 404
    prepared(mine)
    assert "The mill" not in titles(mine)


def test_documents_are_their_tenants_own(locked: Served) -> None:
    refused = locked.ask("anns", kvblend={"retrieve": {}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("no document is indexed yet: add some")
    assert post(locked, {"id": "secret", "text": DOMES}, key="anns").status_code == 202
    assert [one["id"] for one in locked.send("GET", DOCUMENTS, "anns").json()["data"]] == ["secret"]
    assert locked.send("GET", DOCUMENTS, "bobs").json()["data"] == []
    for method in ("GET", "DELETE"):
        assert locked.send(method, f"{DOCUMENTS}/secret", "bobs").status_code == 404
    assert locked.send("GET", DOCUMENTS, "none").status_code == 401
    assert locked.send("DELETE", f"{DOCUMENTS}/secret", "anns").json()["deleted"]


def test_a_failed_document_is_tried_again(mine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CorpusUpdater, "divide", Mock(side_effect=RuntimeError("a bug")))
        post(mine, {"id": "kell/domes", "text": DOMES})
        assert prepared(mine)["kell/domes"]["status"] == "failed"
    again = mine.send("POST", f"{DOCUMENTS}/kell/domes/retry")
    assert (again.status_code, again.json()["id"]) == (202, "kell/domes")
    assert prepared(mine)["kell/domes"]["status"] == "ready"
    assert refusal(mine.send("POST", f"{DOCUMENTS}/kell/domes/retry")) == (409, "conflict")
    assert refusal(mine.send("POST", f"{DOCUMENTS}/nothing/retry")) == (404, "not_found")
