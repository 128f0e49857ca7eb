"""Two ways of running a model share caches only where a probe in the store shows that they give the same KV."""

import models
import torch

from blend.chunks.encode import gives_same_kv, leave_probe
from blend.model.decoder import Decoder
from blend.store import open_store


def fresh() -> Decoder:
    return Decoder(models.build(models.FAMILIES["qwen2"]))


def test_a_probe_is_written_once():
    store, decoder = open_store("memory:"), fresh()
    leave_probe(store, decoder)
    before = store.generation
    leave_probe(store, decoder)
    assert store.generation == before


def test_a_probe_of_other_values_is_not_matched(monkeypatch):
    """As of an engine that runs the same files quantised: the name is the same, and the KV is not."""
    store, decoder = open_store("memory:"), fresh()
    leave_probe(store, decoder)
    with torch.no_grad():
        decoder.model.get_input_embeddings().weight.mul_(1.01)
        decoder.layers[0].self_attn.k_proj.weight.add_(0.01)
    assert not gives_same_kv(store, decoder)


def test_a_damaged_probe_counts_as_none():
    store, decoder = open_store("memory:"), fresh()
    leave_probe(store, decoder)
    (name,) = store.artifacts()
    store.write_artifact(name, b"no tensors")
    assert not gives_same_kv(store, decoder)
    leave_probe(store, decoder)
    assert gives_same_kv(store, decoder)
