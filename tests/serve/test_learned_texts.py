"""Learned text gets a surrogate context and corrections, tenant by tenant; removed caches stay removed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from changing import until
from rooms import QUESTION, ask, serving

from blend.blender import Blender
from blend.model.decoder import full_prefill
from blend.rag import Rag
from blend.serve.learned import KEEP_S, RemovedKeys
from blend.serve.service import Service
from blend.serve.types import GivenDocument
from blend.store import open_store
from blend.types import ChunkKey, PromptLayout
from tests.tiny_model import save_tiny_model
from tests.towns import TOPICS, document


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "\n".join(text.text for text in texts(8)))


def texts(count: int, seed: int = 0) -> list[GivenDocument]:
    """Of a chunk or two each."""
    draw = random.Random(seed)
    return [
        GivenDocument(document(TOPICS[draw.randrange(len(TOPICS))], draw.randrange(10_000))[:600], f"Text {n}")
        for n in range(count)
    ]


def settled(service: Service) -> None:
    until(lambda: service.engine.stats().idle and service.learning.quiet, 200)


def tell(service: Service, given: list[GivenDocument], tenant: str = "") -> None:
    for at in range(0, len(given), 3):
        ask(service, QUESTION, documents=tuple(given[at : at + 3]), tenant=tenant)
    settled(service)


def layouts(rag: Rag, service: Service, given: list[GivenDocument], tenant: str = "") -> list[PromptLayout]:
    """Prompts of three texts each, in orders that nobody has asked in."""
    draw, room, found = random.Random(7), service.tenant(tenant), []
    for _ in range(8):
        cited = room.given("", draw.sample(given, 3))
        chunks = tuple(one.passage.ids for one in cited)
        found.append(PromptLayout(rag.template.prefix, chunks, rag.template.layout(QUESTION, []).suffix))
    return found


def distance(blender: Blender, prompts: list[PromptLayout]) -> float:
    """Mean KL of the first token from full recompute."""
    found = []
    for layout in prompts:
        truth = full_prefill(blender.decoder, layout).logits[0].log_softmax(-1)
        blended = blender.prefill(layout)
        assert all(blended.hits)
        found.append(float((truth.exp() * (truth - blended.logits[0].log_softmax(-1))).sum()))
    return sum(found) / len(found)


def isolated(rag: Rag, prompts: list[PromptLayout]) -> Blender:
    """With a cache of each chunk alone, and no corrections."""
    alone = Blender(rag.decoder, open_store("memory:"), rag.blend_config)
    library = alone.library(rag.template.prefix)
    library.compute(library.missing([chunk for layout in prompts for chunk in layout.chunks]))
    return alone


def test_learned_text_is_blended_nearer_to_full_recompute(tmp_path: Path, model: Path) -> None:
    given = texts(10)
    with serving(tmp_path / "store", model) as service:
        rag = service.tenant("").rag()
        prompts = layouts(rag, service, given)
        before = distance(isolated(rag, prompts), prompts)
        tell(service, given)
        library = rag.blender.library(rag.template.prefix)
        assert library.surrogate
        assert rag.blender.correction(rag.template.prefix, contextual=True) is not None
        opened = library.open(prompts[0])
        assert [one.contextual for one in opened.used] == [
            place > 0 and one.chunk not in library.surrogate for place, one in enumerate(opened.used)
        ]
        opened.close()
        after = distance(rag.blender, prompts)
        assert after < before, (before, after)


def test_nonsense_that_was_learned_does_other_texts_no_harm(tmp_path: Path, model: Path) -> None:
    """The surrogate context and the corrections are made of one client's texts alone; then another's are learned."""
    draw, honest = random.Random(1), texts(10)
    nonsense = [GivenDocument(" ".join(draw.choices(["gate", "bell"], k=120)), f"Nonsense {n}") for n in range(24)]
    with serving(tmp_path / "store", model) as service:
        rag = service.tenant("").rag()
        prompts = layouts(rag, service, honest)
        before = distance(isolated(rag, prompts), prompts)
        tell(service, nonsense)
        library = rag.blender.library(rag.template.prefix)
        assert library.surrogate
        assert set(library.surrogate) <= chunks_of(service, nonsense, "")
        assert rag.blender.correction(rag.template.prefix, contextual=True) is not None
        tell(service, honest)
        after = distance(rag.blender, prompts)
        assert after < 1.15 * before, (before, after)


def test_tenants_learn_apart_and_decide_once(tmp_path: Path, model: Path) -> None:
    mine, others = texts(5), texts(1, seed=1)
    with serving(tmp_path / "store", model) as service:
        tell(service, mine, "alpha")
        tell(service, [GivenDocument(others[0].text[:300], "Little")], "beta")  # too little
        libraries = {}
        for tenant in ("alpha", "beta", ""):
            rag = service.tenant(tenant).rag()
            libraries[tenant] = rag.blender.library(rag.template.prefix)
        assert set(libraries["alpha"].surrogate) <= chunks_of(service, mine, "alpha")
        assert libraries["alpha"].surrogate
        assert not libraries["beta"].surrogate
        assert not libraries[""].surrogate
        assert not list(libraries[""].store.artifacts())
        first = libraries["alpha"].surrogate
        tell(service, texts(18, seed=2), "alpha")
        library = libraries["alpha"].reread()
        assert library.surrogate == first, "however much is learned later"
        assert service.tenant("alpha").rag().blender.correction(library.prefix, contextual=True) is not None
    with serving(tmp_path / "store", model) as service:  # what was decided is remembered
        tell(service, mine, "alpha")
        rag = service.tenant("alpha").rag()
        assert rag.blender.library(rag.template.prefix).surrogate == library.surrogate


def chunks_of(service: Service, given: list[GivenDocument], tenant: str) -> set[tuple[int, ...]]:
    room = service.tenant(tenant)
    return {one.passage.ids for text in given for one in room.given("", [text])}


def test_documents_decide_for_themselves(tmp_path: Path, model: Path) -> None:
    """Where there are documents, texts that come with questions neither choose a surrogate context nor replace theirs."""
    with serving(tmp_path / "store", model) as service:
        documents = service.documents("")
        documents.add(texts=[GivenDocument("One line about a weir.", "Weir", "weir")])
        assert documents.wait(60)
        tell(service, texts(5))
        rag = service.tenant("").rag()
        assert not rag.blender.library(rag.template.prefix).surrogate


def test_texts_that_are_larger_than_the_budget_leave_nothing(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "store", model, learn_budget=20_000) as service:
        tell(service, texts(3))
        assert service.tenant("").rag().store.stats().entries == 0


def test_a_removed_cache_stays_removed_and_is_forgotten_in_time() -> None:
    now, kept = [1000.0], list[str]()
    removed = RemovedKeys(clock=lambda: now[0])
    first, *others = (ChunkKey("space", f"{number:032x}") for number in range(100))
    removed.add([first])
    began = now[0] - 1
    for other in others:
        now[0] += KEEP_S / 2
        removed.unless_removed(other, now[0], lambda: kept.append("never removed"))
        removed.add([other])
        assert len(removed) <= 4
        removed.unless_removed(other, now[0], lambda: pytest.fail("it was removed just now"))
        removed.unless_removed(first, began, lambda: pytest.fail("this prompt began before it was removed"))
    assert kept == ["never removed"] * len(others)
    removed.unless_removed(first, now[0], lambda: kept.append("brought anew"))
    assert kept[-1] == "brought anew"
