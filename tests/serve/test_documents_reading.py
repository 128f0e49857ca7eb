"""Documents that take long to read or to divide: they fail alone, and whoever closes their corpus does not wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from changing import page, states, until
from documents_made import LAST_S, left, make, model, rag

from blend import Rag
from blend.prompt import PromptTemplate
from blend.serve.documents import DocumentLimits, Documents, UploadedFile
from blend.serve.types import GivenDocument
from blend_retrieval.apart import ReadingLimits

__all__ = ["make", "model", "rag"]  # fixtures

SLOW = UploadedFile("slow.html", b"<p>a <b>word</b></p>\n" * 600_000)


def test_a_file_that_takes_long_to_read_fails_alone(make: Callable[..., Documents]) -> None:
    documents = make(limits=DocumentLimits(reading=ReadingLimits(seconds=1)))
    documents.add([SLOW, page("harbour")])
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == {"slow.html": "failed", "harbour.md": "ready"}
    held = documents.get("slow.html")
    assert held is not None
    assert held.reason == "slow.html takes more than 1 s to be read: divide it"


def test_closing_does_not_wait_for_a_file_that_is_read(rag: Rag, make: Callable[..., Documents]) -> None:
    documents = make()
    documents.add([page("harbour", 2), SLOW, page("mill", 2)])
    until(lambda: states(documents.listing())["slow.html"] == "reading")
    closed_quickly(documents)
    assert [name[-9:] for name in left(rag)] == ["-0.upload"] * 3, "none of them has failed"
    again = make(limits=DocumentLimits(reading=ReadingLimits(seconds=1)))
    assert again.wait(LAST_S)
    assert states(again.listing()) == {"harbour.md": "ready", "mill.md": "ready", "slow.html": "failed"}


def test_closing_does_not_wait_for_a_text_that_is_divided(
    rag: Rag, make: Callable[..., Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, texts, plan = make(), list[str](), PromptTemplate.encode

    def encode(template: PromptTemplate, text: str) -> list[int]:
        texts.append(text)
        return plan(template, text)

    monkeypatch.setattr(PromptTemplate, "encode", encode)
    documents.add(texts=[GivenDocument("The mill of Orr grinds rye on Mondays.\n\n" * 50_000, "Orr", "orr")])
    until(lambda: bool(texts))
    closed_quickly(documents)
    assert [name[-9:] for name in left(rag)] == ["-0.upload"]


def closed_quickly(documents: Documents) -> None:
    begin = time.monotonic()
    documents.close()
    assert not any(thread.name == "kvblend-documents" for thread in threading.enumerate())
    assert time.monotonic() - begin < 8
