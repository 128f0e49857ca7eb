"""Models with recurrent layers in `Rag`, the engine and the service."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from cases import blended, make_layout
from engines import Answer, MakeEngine, ask, passes_of
from models import decoder
from rooms import FEW, QUESTION, make_rag, put, serving, settled
from rooms import ask as put_question

from blend.config import BlendConfig
from blend.errors import ConfigError
from blend.layout import PromptLayout
from blend.model.generate import generate
from blend.prefill.blender import Blender
from blend.sampling import Sampling
from blend.serve.engine.profile import PrefillProfile
from blend.serve.engine.savings import reason_against
from blend.serve.events import ONLY_PARTS
from blend.serve.request import Message, Request
from blend.store import open_store
from blend.verified import UNCHECKED, keep_result, may_blend
from tests.tiny_model import BAMBA, save_tiny_model
from tests.towns import write_documents

KINDS = ("qwen3.5", "bamba", "falcon-h1", "lfm2")


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `blend verify` had passed."""
    monkeypatch.setattr("blend.prefill.resources.may_blend", lambda decoder: True)


OPTIONS = {"ratio": 0.6, "prefix_budget": 1 << 30}


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_goes_on_from_its_state(name: str, make_engine: MakeEngine) -> None:
    """The second turn begins with the first prompt and its answer; a third one with part of them cannot go on there."""
    engine, first = make_engine(name, **OPTIONS), make_layout(chunks=(), suffix=30)
    given = engine.blender.decoder

    def true(layout: PromptLayout) -> list[int]:
        blend = Blender(given, open_store("memory:")).prefill(layout)
        return list(generate(given, blend, layout.token_ids, max_new_tokens=6, eos_token_id=None).token_ids)

    sampling = Sampling(max_tokens=6, ignore_eos=True)
    told = ask(engine, first, sampling).wait().tokens
    assert told == true(first)
    for ids, reused in (
        ((*first.suffix, *told, 7, 8, 9), first.rows + len(told) - 1),
        ((*first.suffix[:20], 11, 12), len(first.prefix)),
        ((*first.suffix, 40, 41), first.rows),  # the state behind the first prompt is kept, too
        ((*first.suffix, *told[:2], 50, 51), first.rows),  # there is no state inside the answer
    ):
        turn = PromptLayout.of_chunks(first.prefix, (), ids)
        answer = ask(engine, turn, sampling).wait()
        assert (answer.tokens, answer.figures.rows_reused) == (true(turn), reused)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("right", [0, 7, 20])
def test_a_draft_takes_fewer_passes_and_changes_nothing(
    name: str, right: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layout = make_engine(name, **OPTIONS), make_layout(chunks=(20, 20))
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    expected = ask(engine, layout, sampling, cold=True).wait().tokens
    wrong = [(token + 1) % engine.decoder.vocabulary for token in expected]
    passes = passes_of(engine, monkeypatch)
    answer = ask(engine, layout, sampling, draft=(*expected[:right], *wrong[right:], 1, 2)).wait()
    assert answer.tokens == expected
    assert len(passes) <= 24 - right
    second = PromptLayout.of_chunks(layout.prefix, (), (*layout.token_ids[len(layout.prefix) :], *expected, 7, 8, 9))
    went_on = ask(engine, second, sampling).wait()
    assert went_on.figures.rows_reused == layout.rows + len(expected) - 1


def test_operators_that_take_longer_to_read_than_rows_to_compute_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    blender, layout = Blender(decoder("bamba"), open_store("memory:")), make_layout(chunks=(60, 60))
    library = blender.library(layout.prefix)
    library.compute(library.missing(layout.chunks))
    assert blender.decoder.operator_rows > 0
    for rows, reason in ((20.0, ""), (60.0, "short")):
        monkeypatch.setattr(blender.decoder, "operator_rows", rows)
        assert reason_against(blender, layout, BlendConfig(), 0) == reason


def test_a_layer_without_attention_cannot_choose_rows() -> None:
    config = BlendConfig("query_guided:layers=2", ratio=0.6)
    with pytest.raises(ConfigError, match="among 1, 3"):
        blended(decoder("bamba"), make_layout(), config)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A precomputed store and its model, Bamba."""
    folder = tmp_path_factory.mktemp("recurrent")
    texts = write_documents(folder / "documents")
    model = save_tiny_model(folder / "tiny", "\n".join(texts.values()), family="Bamba", **BAMBA)
    make_rag(folder / "store", model).precompute(folder / "documents")
    return folder / "store", model


def test_the_service_answers_over_a_corpus(corpus: tuple[Path, Path]) -> None:
    with serving(*corpus) as service:
        answer = put_question(service, QUESTION, top_k=3)
        assert answer.figures.method == "blend"
        assert answer.figures.hits == answer.figures.chunks > 0
        again = put_question(service, QUESTION, answer.text, "And the harbour?", top_k=3)
        assert again.end_reason == "length"
        texts = [file.read_text() for file in sorted((corpus[0].parent / "documents").iterdir())]
        pasted = put_question(service, "\n\n".join([*reversed(texts), QUESTION]))
        assert pasted.figures.method == "blend"
        assert pasted.figures.hits > 0
        middle = put_question(service, f"{texts[0][300:500]}\n\n{QUESTION}")
        assert (middle.figures.method, middle.figures.reason) == ("full", ONLY_PARTS)


def _tale(seed: int, sentences: int) -> str:
    """New text with as many paragraphs as a third of its sentences."""
    draw = random.Random(seed)
    words = [f"{draw.choice('bdklmt')}{draw.choice('aeiou')}{draw.choice('nrst')}" for _ in range(60)]
    said = [" ".join(draw.choices(words, k=12)).capitalize() + "." for _ in range(sentences)]
    return "".join(one + ("\n\n" if place % 3 == 2 else " ") for place, one in enumerate(said))


def test_text_of_requests_is_learned(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = _tale(1, 30), _tale(2, 30)
    with serving(tmp_path / "store", corpus[1], learn_budget=1 << 26) as service:
        assert put_question(service, f"{first}{second}{QUESTION}").figures.hits == 0
        settled(service)
        moved = f"Here is what I know.\n\n{second}And this.\n\n{first}{QUESTION}"
        answer = put_question(service, moved)
        assert answer.figures.method == "blend"
        assert answer.figures.rows_computed < 0.6 * answer.figures.rows
        assert all(source.hit for source in answer.sources if len(source.text) > 400)
        settled(service)
        assert put_question(service, moved, cold=True).text == answer.text


def test_requests_that_come_together_compute_shared_text_once(
    corpus: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators of text apart are composed in any order; answers are those of learned text."""
    monkeypatch.setattr(PrefillProfile, "seconds", lambda profile, rows: 60.0)  # a tiny model is faster than any store
    tales = [_tale(seed, 30) for seed in (11, 12)]
    with serving(tmp_path / "store", corpus[1], learn_budget=1 << 26, least_gain=32) as service:
        requests = [
            Request((Message("user", f"Task {number}.\n\n{one}{other}{QUESTION}"),), sampling=FEW)
            for number, (one, other) in enumerate((tales, tales[::-1], tales))
        ]
        prompts = [service.prepare(request) for request in requests]
        answers = [Answer() for _ in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            service.take(prompt, answer)
        first, *others = [answer.wait().figures for answer in answers]
        assert first.rows_ahead > 0.7 * first.rows
        assert all(figures.rows_ahead < 0.2 * figures.rows for figures in others)
        assert all(figures.rows_shared > 0.6 * figures.rows for figures in (first, *others))
        settled(service)
        for request, answer in zip(requests, answers, strict=True):
            assert put(service, replace(request, cold=True)).text == answer.text


def test_edited_text_is_learned_anew_where_it_changed(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    """The pieces around an edit are new; the others serve on."""
    text = _tale(3, 90)
    sentences = text.split(". ")
    sentences[20] = "This sentence is new"
    edited = ". ".join(sentences)
    asked = "{}\n\nSo far the tale.\n\n" + QUESTION
    with serving(tmp_path / "store", corpus[1], learn_budget=1 << 26) as service:
        put_question(service, asked.format(text))
        settled(service)
        figures = []
        for _ in range(3):
            figures.append(put_question(service, asked.format(edited), cold=True).figures)
            settled(service)
    assert 0 < figures[0].hits < figures[0].chunks, "only the pieces around the edit are new"
    assert figures[1].hits == figures[1].chunks
    assert figures[2].chunks == figures[1].chunks, "nothing more is cut"


def test_learned_operators_count_against_the_budget(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(tmp_path / "store", corpus[1], learn_budget=400_000) as service:
        for seed in range(4):
            put_question(service, f"{_tale(seed, 40)}{QUESTION}")
            settled(service)
        tenant = service.tenant("")
        assert 0 < tenant.learned.nbytes <= 400_000
        assert tenant.rag().store.stats().nbytes == tenant.learned.nbytes


def test_unverified_is_full_prefill(corpus: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blend.prefill.resources.may_blend", may_blend)
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path / "cache"))
    rag = make_rag(*corpus)
    answer = rag.answer(QUESTION, max_new_tokens=4, compare=True)
    assert answer.text == answer.full.text
    assert f"full prefill: {UNCHECKED}" in answer.problems
    with serving(*corpus) as service:
        figures = put_question(service, QUESTION, top_k=4).figures
    assert (figures.method, figures.reason) == ("full", UNCHECKED)
    keep_result(rag.decoder, {"decision": "kept"})
    assert any(make_rag(*corpus).answer(QUESTION, max_new_tokens=4).blend.hits)
