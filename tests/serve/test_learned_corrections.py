"""KV corrections of learned text: fitted in idle time on text that no client brought, until a corpus brings its own."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from changing import until, words
from rooms import ask, serving, settled

from blend.chunks.library import ChunkLibrary
from blend.config import BlendConfig
from blend.layout import PlaceOrigin, PromptLayout
from blend.prefill.blender import Blender
from blend.rag import Rag
from blend.serve.request import GivenDocument, Message, Request
from blend.serve.service import Service
from blend.types import CacheKind


@pytest.fixture
def empty(tmp_path: Path, model: Path) -> Iterator[Service]:
    with serving(tmp_path / "empty", model, prefix_budget=0, corrects_learned=True) as service:
        yield service


def learn(service: Service, text: str) -> PromptLayout:
    """The layout of a prompt with this text once the server has learned it and fitted what it can."""
    question = f"{text}\n\nHow many gates?"
    ask(service, question)
    settled(service)
    until(lambda: "" in service.corrector.done)
    return service.prepare(Request((Message("user", question),))).layout


def artifacts(rag: Rag) -> dict[str, bytes | None]:
    """What serves every prompt of the store: its surrogate context and KV corrections."""
    library = rag.blender.library(rag.template.prefix)
    names = [library.encoder(kind).identity.correction_name for kind in CacheKind]
    return {name: rag.store.read_artifact(name) for name in (*names, library.isolated.identity.surrogate_name)}


def test_learned_text_is_corrected_and_that_of_the_fit_is_not_stored(empty: Service) -> None:
    layout, rag = learn(empty, words("mill", 22)), empty.tenant("").rag()
    assert PlaceOrigin.LEARNED in {place.origin for place in layout.places}
    corrected, plain = (
        rag.blender.prefill(layout, config=BlendConfig("none", correction=correction)) for correction in (True, False)
    )
    assert corrected.correction_fits
    assert all(corrected.hits)
    assert not torch.equal(corrected.logits, plain.logits)
    with closing(sqlite3.connect(rag.root / "learned.sqlite")) as file:
        listed = {digest for (digest,) in file.execute("SELECT digest FROM caches")}
    assert {key.digest for key in list(rag.store.keys())} == listed != set()


def test_caches_of_learned_text_come_before_its_corrections(empty: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit takes the model for minutes on a slow machine."""
    keep = ChunkLibrary.keep
    calibrate = Blender.calibrate
    waiting = list[int]()

    def slow_keep(*arguments: Any) -> Any:
        if not waiting:
            time.sleep(0.7)  # longer than the thread that fits waits between two looks
        return keep(*arguments)

    def watched_calibrate(*arguments: Any, **fields: Any) -> Any:
        waiting.append(empty.engine.stats().encoding)
        return calibrate(*arguments, **fields)

    monkeypatch.setattr(ChunkLibrary, "keep", slow_keep)
    monkeypatch.setattr(Blender, "calibrate", watched_calibrate)
    learn(empty, words("mill", 22))
    assert waiting == [0]


def test_no_clients_text_has_part_in_what_serves_all_prompts(tmp_path: Path, model: Path) -> None:
    found = []
    for topic in ("mill", "quarry"):
        with serving(tmp_path / topic, model, prefix_budget=0, corrects_learned=True) as service:
            learn(service, words(topic, 22))
            found.append(artifacts(service.tenant("").rag()))
    assert found[0] == found[1]
    assert all(found[0].values())


def test_a_corpus_that_comes_later_brings_its_own_fit(empty: Service) -> None:
    learn(empty, words("mill", 22))
    rag = empty.tenant("").rag()

    def provisional() -> list[bool]:
        found = [rag.blender.correction(rag.template.prefix, kind) for kind in CacheKind]
        return [one is not None and one.provisional for one in found]

    assert all(provisional())
    documents = empty.documents("")
    documents.add(texts=[GivenDocument(words(topic, 22), topic, topic) for topic in ("quarry", "orchard", "library")])
    assert documents.wait(120)
    until(lambda: not any(provisional()))


def test_the_corrections_of_a_corpus_stay(store: Path, model: Path) -> None:
    """Its few chunks gave no surrogate context, so that learned text alone has contextual caches."""
    with serving(store, model, prefix_budget=0, corrects_learned=True) as service:
        rag = service.tenant("").rag()
        name = rag.blender.library(rag.template.prefix).isolated.identity.correction_name
        before = artifacts(rag)[name]
        learn(service, words("mill", 22))
        assert before is not None
        assert artifacts(rag)[name] == before
        assert rag.blender.correction(rag.template.prefix, CacheKind.CONTEXTUAL) is not None
