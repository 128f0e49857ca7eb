"""A document is one by its id, however a client spells it: no other goes with it, and each can be asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from changing import states, words
from documents_made import LAST_S, make, model, rag

from blend import Rag
from blend.errors import PromptError
from blend.serve.documents import Documents, UploadedFile
from blend.serve.tenant import TenantState
from blend.serve.types import GivenDocument
from blend.serve.uploads import part_of

__all__ = ["make", "model", "rag"]  # fixtures

GUIDE, INSTALL = "https://example.com/guide", "https://example.com/guide#install"


def texts(*names: str) -> list[GivenDocument]:
    return [GivenDocument(words(f"harbour{n}", 2), f"Title {n}", name) for n, name in enumerate(names)]


def test_a_text_with_a_fragment_in_its_id_is_a_document_of_its_own(make: Callable[..., Documents]) -> None:
    documents = make()
    documents.add(texts=texts(GUIDE, INSTALL))
    assert documents.wait(LAST_S)
    held = documents.get(INSTALL)
    assert held is not None
    assert held.title == "Title 1"
    assert documents.delete(GUIDE)
    assert [one.title for one in documents.listing()] == ["Title 1"]
    assert documents.get(GUIDE) is None
    assert documents.delete(INSTALL)
    assert documents.listing() == ()


def test_a_text_never_looks_like_a_record_of_a_file(make: Callable[..., Documents]) -> None:
    documents = make()
    documents.add([UploadedFile("set.jsonl", b'{"id": "a", "text": "The harbour."}')], texts("set.jsonl#b"))
    assert documents.wait(LAST_S)
    assert set(states(documents.listing())) == {"set.jsonl#a", "set.jsonl_b"}
    assert documents.delete("set.jsonl")
    assert set(states(documents.listing())) == {"set.jsonl_b"}


def test_only_files_have_records() -> None:
    """Stores may hold texts whose ids have a # in them, of earlier versions and of `blend precompute`."""
    assert part_of("set.jsonl#a", "set.jsonl")
    assert part_of("a/set.JSONL#b#c", "a/set.JSONL")
    assert part_of(INSTALL, INSTALL)
    assert not part_of(INSTALL, GUIDE)
    assert not part_of("set.jsonl#a", "set")


def test_a_question_names_a_document_as_it_was_called_or_as_it_is(rag: Rag, make: Callable[..., Documents]) -> None:
    documents, room = make(), TenantState(rag, 0)
    names = (GUIDE, INSTALL, "a//b", "two  blanks", "C:\\c.txt")
    documents.add(
        [UploadedFile("set.jsonl", b'{"id": "a", "text": "The mill."}\n{"text": "The quarry."}')], texts(*names)
    )
    assert documents.wait(LAST_S)
    for number, name in enumerate(names):
        held = documents.get(name)
        assert held is not None
        for spelling in (name, held.id):
            found = room.given("", [GivenDocument(id=spelling)])
            assert {one.title for one in found} == {f"Title {number}"}
    assert [one.text for one in room.given("", [GivenDocument(id="set.jsonl#a")])] == ["The mill."]
    assert len(room.given("", [GivenDocument(id="set.jsonl")])) == 2, "all records of the file"
    for name in ("set", "a", "https://example.com"):
        with pytest.raises(PromptError, match="no document of the corpus has the id"):
            room.given("", [GivenDocument(id=name)])
