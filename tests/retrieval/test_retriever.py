import pytest

from blend_retrieval.chunking import Chunk
from blend_retrieval.errors import IndexMismatchError, QueryError
from blend_retrieval.index import ChunkIndex
from blend_retrieval.retriever import Retriever

TEXTS = ("the cat sat on the mat", "a dog in the fog", "stocks fell on monday")


@pytest.fixture
def index(bag):
    chunks = [Chunk(str(n), "d", "", text, 5) for n, text in enumerate(TEXTS)]
    return ChunkIndex(chunks, bag.embed(TEXTS), bag.name)


def test_empty_index_gives_nothing(bag):
    assert Retriever(ChunkIndex([], bag.embed([]), bag.name), bag).search("cat", 3) == ()


@pytest.mark.parametrize(("query", "k"), [("", 3), (" \n", 3), ("cat", 0), ("cat", -1)])
def test_senseless_queries_are_refused(index, bag, query, k):
    with pytest.raises(QueryError):
        Retriever(index, bag).search(query, k)


def test_another_embedder_is_refused(index, other_bag):
    with pytest.raises(IndexMismatchError, match="bag, not other"):
        Retriever(index, other_bag)
