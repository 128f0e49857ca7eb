"""A cross-encoder with random weights, as users name it."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from blend_retrieval.errors import EmbeddingError
from blend_retrieval.rerank import Reranker

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "bees", "birds", "boats", "where", "are", "the")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("reranker")
    core = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), WORDS, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(place)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), num_labels=1, **sizes)).save_pretrained(place)
    return place


def test_scores_depend_on_question_and_passage(folder):
    reranker = Reranker(str(folder))
    scores = reranker.scores("where are the bees", ["bees", "birds", "boats"])
    assert scores.shape == (3,)
    assert len(set(scores.tolist())) == 3
    assert reranker.scores("where are the boats", ["bees"])[0] != scores[0]


@pytest.mark.parametrize("name", ["/nowhere/reranker", "nobody/reranker"])
def test_an_unknown_reranker_is_one_line(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EmbeddingError, match="the reranker") as caught:
        Reranker(name)
    assert "\n" not in str(caught.value)


def test_a_reranker_that_was_fetched_before_needs_no_hub(folder, monkeypatch, tmp_path):
    commit = "0" * 40
    cached = tmp_path / "models--some--reranker"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("blend_retrieval.hub.why_not", lambda name: pytest.fail("asked the hub"))
    assert Reranker("some/reranker").scores("where are the bees", ["bees"]).shape == (1,)
