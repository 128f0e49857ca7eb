"""Number formats: the dtype that auto takes on a CPU, weights of 8 bits, and caches of another dtype."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from models import FAMILIES, build
from towns import write_documents

from blend.chunks.probe import gives_same_kv, leave_probe, take_held_dtype
from blend.config import BlendConfig, CorpusConfig
from blend.errors import ConfigError, StoreError
from blend.model import precision
from blend.model.decoder import Decoder, full_prefill
from blend.model.precision import Int8Linear, bfloat16_gain, pick_dtype
from blend.prefill.blender import Blender
from blend.rag import Rag
from blend.store import ChunkStore, open_store

CPU = torch.device("cpu")
needs_vnni = pytest.mark.skipif(not precision.has_vnni(), reason="this processor has no VNNI")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    write_documents(tmp_path / "documents")
    return tmp_path / "documents"


def rag_of(model: str, store: Path, **options: str) -> Rag:
    return Rag(store, model=model, device="cpu", corpus=CorpusConfig(surrogate_tokens=0), **options)


LARGE, SMALL = (transformers.LlamaConfig(hidden_size=size, intermediate_size=2 * size) for size in (512, 64))
LAYERS_DIFFER = SimpleNamespace(hidden_size=512, intermediate_size=[64, 1024])


def test_auto_takes_what_was_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path))
    measured = bfloat16_gain(LARGE)
    held = json.loads((tmp_path / "speed.json").read_text())
    assert list(held.values()) == [measured]
    for gain, dtype in ((1.5, torch.bfloat16), (1.0, torch.float32)):
        (tmp_path / "speed.json").write_text(json.dumps(dict.fromkeys(held, gain)))
        assert pick_dtype("auto", CPU, LARGE) is dtype
        assert pick_dtype("auto", CPU, LAYERS_DIFFER) is dtype, "the largest layer counts"
    (tmp_path / "speed.json").write_text("no JSON")
    again = bfloat16_gain(LARGE)
    assert list(json.loads((tmp_path / "speed.json").read_text()).values()) == [again], "measured again"
    assert pick_dtype("auto", CPU, SMALL) is torch.float32, "too small to gain"


def test_without_a_writable_folder_it_is_measured_each_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path / "file" / "below"))
    assert bfloat16_gain(LARGE) > 0.0


@needs_vnni
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_an_8_bit_layer_is_the_rounded_product(dtype, bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 160, bias=bias)
    x = (torch.randn(2, 300, 96) * torch.logspace(-3, 3, 300)[:, None]).to(dtype)
    x[0, 0] = 0
    found = Int8Linear(layer)(x)
    rows, weight = x.reshape(-1, 96).double(), layer.weight.double()
    x_scale = (rows.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
    w_scale = weight.abs().amax(1, keepdim=True) / 127
    want = (rows / x_scale).round() * x_scale @ ((weight / w_scale).round() * w_scale).T
    want = want + (layer.bias.double() if bias else 0)
    assert (found.shape, found.dtype) == ((2, 300, 160), dtype)
    off = (found.reshape(-1, 160).double() - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-9)
    assert float(off.max()) < (0.02 if dtype == torch.bfloat16 else 0.004), "a half may round the other way"
    alone = Int8Linear(layer)(x[1, 7:9])
    assert torch.equal(alone, found[1, 7:9]), "a row does not depend on the others"


@needs_vnni
def test_a_model_is_admitted_before_its_weights_are_rounded(model, monkeypatch):
    """In deep models such as SmolLM2-135M rounding grows until no rotation fits. Here it is all that is left."""
    plain = Decoder.load(model, device="cpu")
    monkeypatch.setattr(Int8Linear, "forward", lambda self, x: torch.randn(*x.shape[:-1], self.out_features))
    rounded = Decoder.load(model, device="cpu", weights="int8")
    for expected, found in zip(plain.rotations, rounded.rotations, strict=True):
        assert torch.equal(found.keys.inv_freq, expected.keys.inv_freq)
        assert (found.values, found.key_shape) == (None, expected.key_shape)


@needs_vnni
def test_blending_with_8_bit_weights(model, documents, tmp_path):
    rag = rag_of(model, tmp_path / "store", weights="int8")
    rag.precompute(documents)
    plain = Decoder.load(model, device="cpu")
    assert rag.decoder.fingerprint != plain.fingerprint, "its caches are its own"
    assert any(isinstance(one, Int8Linear) for one in rag.decoder.model.modules())
    answer = rag.answer("How many gates?", max_new_tokens=4)
    assert set(answer.blend.hits) == {True}
    layout = rag.template.layout("How many gates?", [hit.chunk for hit in answer.chunks])
    whole, native = full_prefill(rag.decoder, layout).logits, full_prefill(plain, layout).logits
    exact = Blender(rag.decoder, rag.store, BlendConfig(ratio=1.0)).prefill(layout).logits
    assert float((exact - whole).norm() / whole.norm()) < 0.02, "ratio 1 is full recompute, up to rounding"
    assert 0 < float((whole - native).norm() / native.norm()) < 0.1


def test_where_8_bit_weights_are_refused(model, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="are for CPUs; leave --weights"):
        precision.check_weights("int8", torch.device("cuda"))
    with pytest.raises(ConfigError, match="unknown weights 'int3'; choose native or int8"):
        Decoder.load(model, weights="int3")
    monkeypatch.setattr(precision, "has_vnni", lambda: False)
    with pytest.raises(ConfigError, match="need a processor with VNNI"):
        Decoder.load(model, device="cpu", weights="int8")
    with pytest.raises(ConfigError, match=r"leave --weights \(or KVBLEND_WEIGHTS\) out here"):
        Rag(tmp_path / "store", model=model, device="cpu", weights="int8").precompute(tmp_path)
    assert not (tmp_path / "store").exists()


def test_caches_of_another_dtype_serve_where_a_probe_agrees(model, documents, tmp_path):
    first = rag_of(model, tmp_path / "store", dtype="float32").precompute(documents)
    other = rag_of(model, tmp_path / "store", dtype="bfloat16")
    assert (other.decoder.dtype, other.decoder.kept_as) == (torch.bfloat16, "float32")
    again = other.precompute(documents)
    assert (first.computed > 0, again.computed) == (True, 0)
    assert set(other.answer("How many gates?", max_new_tokens=4).blend.hits) == {True}
    assert rag_of(model, tmp_path / "empty", dtype="bfloat16").decoder.kept_as == "bfloat16", "nothing to share"
    different = Decoder.load(model, device="cpu", dtype="bfloat16")
    different.model.get_input_embeddings().weight.data.neg_()
    take_held_dtype(other.store, different)
    assert different.kept_as == "bfloat16", "other KV"


def test_a_store_that_is_lost_confirms_no_dtype(model):
    dec, reads = Decoder.load(model, device="cpu", dtype="float16"), Mock(side_effect=[None, StoreError("gone")])
    with pytest.raises(StoreError):
        take_held_dtype(Mock(read_artifact=reads), dec)
    assert dec.kept_as == "float16"


def probed() -> tuple[ChunkStore, Decoder]:
    store, decoder = open_store("memory:"), Decoder(build(FAMILIES["qwen2"]), weights="known")
    leave_probe(store, decoder)
    return store, decoder


def test_a_probe_is_written_once():
    store, decoder = probed()
    before = store.generation
    leave_probe(store, decoder)
    assert store.generation == before


def test_a_probe_of_other_values_is_not_matched():
    """As of an engine that runs the same files quantised: the name is the same, and the KV is not."""
    store, decoder = probed()
    model = build(FAMILIES["qwen2"])
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)
        model.model.layers[0].self_attn.k_proj.weight.add_(0.01)
    quantised = Decoder(model, weights="known")
    assert quantised.identity(()) == decoder.identity(())
    assert gives_same_kv(store, decoder, "float32")
    assert not gives_same_kv(store, quantised, "float32")


def test_a_damaged_probe_counts_as_none():
    store, decoder = probed()
    (name,) = store.artifacts()
    store.write_artifact(name, b"no tensors")
    assert not gives_same_kv(store, decoder, "float32")
    leave_probe(store, decoder)
    assert gives_same_kv(store, decoder, "float32")
