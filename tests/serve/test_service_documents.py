"""Documents of a service: named by questions, added, waiting at the start, deleted."""

import threading
from pathlib import Path

from changing import delete, until
from rooms import FEW, QUESTION, Answer, ask, serving, settled

from blend.serve.request import GivenDocument, Message, Request
from blend.serve.service import Service


def test_documents_that_waited_on_disk_are_taken_up_at_the_start(store: Path, model: Path) -> None:
    with serving(store, model) as service:
        documents = service.documents("alpha")
        documents.close()  # as a kill would leave it: taken in, not indexed
        text = "The weir of Osk is opened by hand at dawn. " * 6
        documents.add(texts=[GivenDocument(text, "The weir", "weir")])
    with serving(store, model) as service:
        until(lambda: "" in service.corpora("alpha"))
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
