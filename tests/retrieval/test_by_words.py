"""Retrieval without an embedding model: by words alone, and only where no model can be had."""

import logging

import numpy as np
import pytest

from blend_retrieval import ChunkIndex, Retriever, load_embedder, load_embedder_or_words, update_index
from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import sentence
from blend_retrieval.errors import EmbeddingError

PASSAGES = {
    "ferry": "The ferry to Skarholm leaves at seven, and costs 40 crowns.",
    "ferry copy": "The ferry to Skarholm leaves at seven, and costs 40 crowns!",
    "mill": "The old mill grinds rye on Tuesdays.",
    "lamp": "Error E417B: the lamp controller reports low voltage. Restart it.",
    "school": "Lessons at the school begin in August.",
}


@pytest.fixture
def by_words(tmp_path):
    embedder = load_embedder("words")
    chunks = [Chunk(name, f"{name}.md", "", text, 0) for name, text in PASSAGES.items()]
    update_index(tmp_path, chunks, embedder)
    return Retriever(ChunkIndex.load(tmp_path, embedder), embedder)


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sentence, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: None)


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What does E417B mean?", "lamp"), ("When does the mill grind RYE?", "mill"), ("the ferry's price", "ferry")],
)
def test_the_passage_with_the_rare_words_comes_first(by_words, question, expected):
    hits = by_words.search(question, 3)
    assert hits[0].chunk.id == expected
    assert 0 < hits[0].score <= 1
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_similarity_is_the_share_of_the_questions_words(by_words):
    question = "Which lamp controller reports low voltage?"
    shares = by_words.index.lexical.coverage(question).tolist()
    hits = by_words.search(question, 5)
    assert {hit.chunk.id: hit.score for hit in hits} == {
        name: pytest.approx(share) for name, share in zip(PASSAGES, shares, strict=True) if share
    }


def test_a_question_without_a_common_word_finds_nothing(by_words):
    assert by_words.search("Quantum chromodynamics?", 3) == ()
    assert len(Retriever(by_words.index, load_embedder("words"), min_score=0).search("Quantum?", 3)) == 3


def test_earlier_questions_count_less(by_words):
    hits = by_words.search("And on Tuesdays?", 2, before=["Is there a ferry to Skarholm?"])
    assert [hit.chunk.id for hit in hits] == ["mill", "ferry"]


def test_vectors_of_words_are_unit_vectors_and_tell_texts_apart():
    vectors = load_embedder("words").embed([*PASSAGES.values(), "", "?!"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    broken, mill = load_embedder("words").embed(["mill\ud800", "mill"])
    np.testing.assert_array_equal(broken, mill)
    assert vectors[0] @ vectors[1] > 0.99 > 0.6 > vectors[0] @ vectors[2]


def test_a_word_that_is_repeated_counts_more_but_not_as_often():
    several, mill, lamp = load_embedder("words").embed(["Mill, mill, mill and mill, lamp!", "mill and", "lamp and"])
    assert several @ mill > several @ lamp
    single, twice = load_embedder("words").embed(["mill lamp", "mill mill mill mill lamp"])
    assert single @ twice == pytest.approx(3 / (2**0.5 * 5**0.5), abs=1e-5)


def test_texts_without_a_common_word_are_not_alike_however_long_they_are():
    first, second = load_embedder("words").embed([" ".join(f"{name}{n}" for n in range(200)) for name in ("a", "b")])
    assert abs(first @ second) < 0.25


def test_progress_has_a_begin_and_an_end():
    steps = []
    embedder = load_embedder("words")
    embedder.embed(["mill", "lamp"], progress=lambda *step: steps.append(step))
    assert steps == [("embed", 0, 2), ("embed", 2, 2)]
    assert embedder.embed([], progress=lambda *step: steps.append(step)).shape == (0, embedder.dimension)
    assert steps[2:] == [("embed", 0, 0)]


def test_the_default_gives_way_to_words_and_says_so(no_model, caplog):
    with caplog.at_level(logging.WARNING):
        embedder = load_embedder_or_words("minilm")
    assert (embedder.name, embedder.knows_meaning) == ("words", False)
    assert "found by their words alone" in caplog.messages[-1]
    assert "--embedder minilm" in caplog.messages[-1]


def test_an_embedder_that_is_named_never_gives_way(no_model):
    with pytest.raises(EmbeddingError, match="words"):
        load_embedder("minilm")


def test_a_model_that_is_damaged_does_not_give_way(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EmbeddingError):
        load_embedder_or_words(str(tmp_path))
