"""`blend.attach` with the store of `blend precompute`: a model that transformers loaded finds the caches there."""

from pathlib import Path

import pytest
import torch
import transformers

import blend
from blend import CorpusConfig, Rag
from blend.store import ChunkStore
from tests import towns
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, and a store that the model of the files has filled with documents."""
    folder = tmp_path_factory.mktemp("attached")
    texts = towns.write_documents(folder / "documents")
    model = save_tiny_model(folder / "tiny", "\n".join(texts.values()))
    corpus = CorpusConfig(embedder="words")
    rag = Rag(folder / "store", model=str(model), device="cpu", dtype="float32", corpus=corpus)
    rag.precompute(folder / "documents")
    return folder


@pytest.mark.parametrize("is_changed", [False, True], ids=["as in its files", "changed since"])
def test_the_store_of_precompute_is_known_to_a_model_of_the_same_weights_alone(folder, is_changed):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    if is_changed:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    texts = [f"{file.read_text(encoding='utf-8')}\n\n" for file in sorted((folder / "documents").iterdir())[:4]]
    inputs = tokenizer(
        "".join([*texts[::-1], "How many gates does the harbour have, and who closes them at night?"]),
        return_tensors="pt",
    )
    with blend.attach(model, tokenizer, folder / "store") as attached:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    last = attached.last
    assert last.rows_stored > last.rows / 2, last
    assert (last.learned > 0) is is_changed, "caches of other weights are computed anew"


def test_the_second_prompt_reads_nothing_from_the_store(folder, monkeypatch):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    texts = [f"{file.read_text(encoding='utf-8')}\n\n" for file in sorted((folder / "documents").iterdir())[:4]]
    opened = []
    open_many = ChunkStore.open_many

    def recorded(store, keys):
        opened.extend(keys)
        return open_many(store, keys)

    monkeypatch.setattr(ChunkStore, "open_many", recorded)
    counts = []
    with blend.attach(model, tokenizer, folder / "store") as attached:
        for question in ("How many gates does the harbour have, and who closes them?", "Who rings the bell at night?"):
            inputs = tokenizer("".join([*texts, question]), return_tensors="pt")
            model.generate(**inputs, max_new_tokens=1, do_sample=False)
            assert attached.last.rows_stored > attached.last.rows / 2
            counts.append(len(opened))
    assert counts[0] > 0
    assert counts[1] == counts[0]
