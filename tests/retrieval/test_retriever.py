"""Search by words, fused with search by meaning, and what the retriever makes of both."""

import re

import numpy as np
import pytest
from places import REPOSITORY

from blend.cli.answer import command
from blend.config import CorpusConfig
from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import Embedder
from blend_retrieval.embedders.base import MINILM_FLOOR
from blend_retrieval.errors import IndexMismatchError, QueryError
from blend_retrieval.index import ChunkIndex
from blend_retrieval.lexical import LexicalIndex
from blend_retrieval.retriever import Retriever


def test_coverage_is_a_share_of_the_questions_words():
    index = LexicalIndex(["the release captain is Ann", "birds of the coast", ""])
    coverage = index.coverage("Who is the release captain?")
    assert coverage.argmax() == 0
    assert 0 < coverage[0] < 1
    assert coverage[0] > 3 * coverage[1] > 0
    assert coverage[2] == 0
    assert not index.coverage("xyzzy").any()
    assert not index.coverage("...").any()
    assert index.coverage("captain")[0] > index.coverage("captain xyzzy")[0] > 0
    assert LexicalIndex([]).coverage("captain").shape == (0,)
    assert not LexicalIndex(["", " "]).coverage("captain").any()


class Blurred(Embedder):
    """Knows the topic of a text, which is its first word, and no other word."""

    name, dimension = "blurred", 8

    def embed(self, texts, progress=None):
        vectors = np.full((len(texts), 8), 0.1, np.float32)
        for row, text in enumerate(texts):
            vectors[row, sum(text.split()[0].encode()) % 8] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def retriever(*texts, **options):
    chunks = [Chunk(str(number), f"d{number}", "", text, 5) for number, text in enumerate(texts)]
    return Retriever(ChunkIndex(chunks, Blurred().embed(texts), "blurred"), Blurred(), **options)


def texts_of(ranked):
    return [chunk.text for chunk, _ in ranked]


def test_an_exact_name_is_found_among_what_is_as_similar():
    parts = retriever(*(f"part {number} weighs {number % 7} grams" for number in range(1000, 1400)))
    assert texts_of(parts.search("part 1234", 3))[0] == "part 1234 weighs 2 grams"


def test_all_that_have_words_of_the_question_compete_with_what_is_similar():
    parts = [f"part weighs {number} grams" for number in range(400)]
    named = ["part with zebra and lion stripes", "part with zebra stripes", "part with lion stripes"]
    best = texts_of(retriever(*parts, *named).search("part zebra lion", 3))
    assert best[0] == named[0]
    assert set(best) == set(named)


def test_what_is_second_by_words_and_by_meaning_is_first_of_all():
    """Neither search alone has it among its first."""
    by_meaning = [f"harbour {number}" for number in range(9)]
    by_words = [f"boats pay fee fee fee {number}" for number in range(9)]
    both = "harbour long text on the fee of all"
    assert texts_of(retriever(*by_meaning, *by_words, both).search("harbour fee", 1)) == [both]


def test_equal_texts_count_once():
    passes = retriever(*["the pass costs money"] * 150, " The pass  costs MONEY", "pass: 84 crowns", "other")
    found = texts_of(passes.search("the pass", 3))
    assert len(found) == 3
    assert len({text.split()[0] for text in found}) == 3


def test_hidden_documents_make_room_for_others():
    piers = retriever(*(f"the pier {number}" for number in range(300)), "the old pier")
    assert texts_of(piers.search("the pier", 2, hidden=lambda name: name != "d300")) == ["the old pier"]


def test_an_earlier_question_brings_its_words():
    fees = retriever(*(f"fee of pier {number}" for number in range(50)))
    assert texts_of(fees.search("fee of it", 1, before=["where is pier 31"])) == ["fee of pier 31"]


class Longest:
    """Prefers long passages."""

    asked = 0

    def scores(self, query, passages):
        self.asked = len(passages)
        return np.array([len(passage) for passage in passages], np.float32)


def test_a_reranker_orders_the_best_anew():
    reranker, others = Longest(), ("other" + "x" * n for n in range(30))
    bees = retriever("bees", "bees and more", "bees and much more", *others, reranker=reranker)
    assert "much more" in texts_of(bees.search("bees", 1))[0]
    assert reranker.asked == 4
    assert len(bees.search("bees", 100)) == 33


def test_the_score_is_the_similarity(bag):
    texts = ["cats purr", "dogs bark", "birds sing"]
    chunks = [Chunk(text, text, "", text, 2) for text in texts]
    index = ChunkIndex(chunks, bag.embed(texts), bag.name)
    (best, *_) = Retriever(index, bag).search("cats purr", 1)
    assert best.score == pytest.approx(1.0, abs=1e-6)
    assert Retriever(index, bag, min_score=0.9).search("dogs sing", 3) == ()


def test_questions_without_direction_find_as_many_as_others(bag):
    """Their vectors add up to zero."""
    texts = ["cats", "dogs"]
    index = ChunkIndex([Chunk(text, text, "", text, 2) for text in texts], bag.embed(texts), bag.name)
    assert [score for _, score in Retriever(index, bag).search("?", 2, before=["!"])] == [0, 0]


def test_a_vector_that_is_no_number_finds_nothing(monkeypatch):
    piers = retriever("pier", "mill")
    monkeypatch.setattr(Blurred, "embed_query", lambda embedder, text: np.full(8, np.nan, np.float32))
    assert piers.search("boat", 1) == ()


def test_an_empty_index_gives_nothing():
    assert retriever().search("cat", 3) == ()


@pytest.mark.parametrize(("query", "k"), [("", 3), (" \n", 3), ("cat", 0), ("cat", -1)])
def test_senseless_queries_are_refused(query, k):
    with pytest.raises(QueryError):
        retriever("the cat").search(query, k)


def test_another_embedder_is_refused(other_bag):
    with pytest.raises(IndexMismatchError, match="blurred, not other"):
        Retriever(ChunkIndex([], Blurred().embed([]), "blurred"), other_bag)


def test_the_default_of_the_least_similarity_is_the_same_everywhere():
    option = next(option for option in command.params if option.name == "min_score")
    texts = {
        "the command line": option.help,
        "Python": CorpusConfig.__doc__.partition("min_score:")[2].partition("embedder:")[0],
        "the retriever": Retriever.__doc__.partition("min_score:")[2].partition("reranker:")[0],
    }
    for page in ("serving", "retrieval"):
        text = (REPOSITORY / "docs" / f"{page}.md").read_text()
        (texts[page],) = [part for part in text.split("\n\n") if "minilm" in part and "default is" in part]
    said = {where: re.findall(r"\d\.\d\d", text) for where, text in texts.items()}
    assert set(map(tuple, said.values())) == {(str(MINILM_FLOOR),)}, said
