"""Documents of a service: named by questions, added, waiting at the start, deleted."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

from changing import delete
from rooms import FEW, QUESTION, Answer, ask, serving, settled

from blend.serve.http.bodies import ChatBody, ModelNames, read_body, request_of
from blend.serve.limits import RequestLimits
from blend.serve.service import Service
from blend.serve.types import GivenDocument, Message, Request


def test_a_document_by_its_id(service: Service) -> None:
    told = ask(service, QUESTION, documents=(GivenDocument(id="orchard.md"),))
    assert {source.document for source in told.sources} == {"orchard.md"}
    assert {source.title.split(" > ")[0] for source in told.sources} == {"The orchard"}


def test_an_id_beside_a_text_names_it_among_the_sources(service: Service) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "documents": [{"id": "mine", "text": "The harbour is deep."}],
    }
    request = request_of(
        read_body(json.dumps(body).encode(), ChatBody, RequestLimits()), ModelNames("m", "", ("",)), RequestLimits()
    )
    told = Answer()
    service.submit(replace(request, sampling=FEW), told)
    assert told.done.wait(60)
    assert [(source.document, source.text) for source in told.sources] == [("mine", "The harbour is deep.")]


def test_documents_that_waited_on_disk_are_taken_up_at_the_start(filled: tuple[Path, Path], tmp_path: Path) -> None:
    store = shutil.copytree(filled[0], tmp_path / "store")
    with serving(store, filled[1]) as service:
        documents = service.documents("alpha")
        documents.close()  # as a kill would leave it: taken in, not indexed
        text = "The weir of Osk is opened by hand at dawn. " * 6
        documents.add(texts=[GivenDocument(text, "The weir", "weir")])
    with serving(store, filled[1]) as service:
        until = time.monotonic() + 60
        while "" not in service.corpora("alpha") and time.monotonic() < until:
            time.sleep(0.05)
        told = ask(service, "Who opens the weir?", top_k=1, tenant="alpha")
        assert [source.title for source in told.sources] == ["The weir"]


def test_a_deleted_documents_cache_does_not_come_back(service: Service) -> None:
    """A prompt that lacks it is being prefilled, slowly, while the document goes."""
    room, documents = service.tenant(""), service.documents("")
    rag = room.rag()
    assert documents.wait(60)
    library = rag.blender.library(rag.template.prefix)
    chunks = [rag.template.chunk_ids(chunk) for chunk in rag.index.chunks if chunk.document_id == "orchard.md"]
    keys = [library.key(one) for one in library.variants(chunks)]
    for key in keys:
        rag.store.delete(key)
    prefilling, go = threading.Event(), threading.Event()
    plain = rag.decoder.prefill

    def slow(requests, **options):  # type: ignore[no-untyped-def]
        prefilling.set()
        assert go.wait(60)
        return plain(requests, **options)

    rag.decoder.prefill = slow  # type: ignore[method-assign]
    told = Answer()
    by_id = (GivenDocument(id="orchard.md"), GivenDocument(id="harbour.md"))
    try:
        service.submit(Request((Message("user", QUESTION),), documents=by_id, sampling=FEW), told)
        assert prefilling.wait(60)
        assert delete(documents, "orchard.md")
    finally:
        go.set()
    assert told.done.wait(60)
    assert not all(source.hit for source in told.sources)
    settled(service)
    assert [key for key in keys if key in rag.store] == []
    text = "\n\n".join(chunk.text for chunk in rag.index.chunks[:1]) * 3
    documents.add(texts=[GivenDocument(text, "The orchard", "orchard.md")])
    assert documents.wait(60)
    assert all(source.hit for source in ask(service, QUESTION, documents=by_id).sources), "what comes anew is kept"
