"""Which model a cache belongs to: told from the checkpoint's files, without passing over its parameters at every start."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from models import CORE, build, tokenizer
from torch.testing._internal.two_tensor import TwoTensor

from blend.layout import PromptLayout
from blend.model import decoder, fingerprint
from blend.model.decoder import Decoder
from blend.model.fingerprint import DIGESTS, checkpoint_digest, parameters_digest
from blend.prefill.blender import Blender
from blend.store import open_store
from tests.store.reading import flip

LAYOUT = PromptLayout.of_chunks((1, 3), ((10, 11, 12), (13, 14)), (7, 8))


def saved(folder: Path, *, seed: int = 0, **options: str) -> Path:
    build(CORE["llama"], seed=seed).save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


def load(folder: Path) -> Decoder:
    return Decoder.load(str(folder), device="cpu")


def test_the_same_weights_are_the_same_model_wherever_they_lie(tmp_path):
    first = saved(tmp_path / "first")
    copy, other = Path(shutil.copytree(first, tmp_path / "copy")), saved(tmp_path / "other", seed=1)
    assert load(first).fingerprint == load(copy).fingerprint != load(other).fingerprint


def test_files_are_read_once_and_parameters_never(tmp_path, monkeypatch):
    folder, read = saved(tmp_path / "model", max_shard_size="20KB"), []
    file_digest = fingerprint.file_digest
    monkeypatch.setattr(fingerprint, "file_digest", lambda file: read.append(file.name) or file_digest(file))
    monkeypatch.setattr(decoder, "parameters_digest", lambda model: pytest.fail("the parameters were passed over"))
    before = load(folder).fingerprint
    assert len(read) > 1
    assert len(set(read)) == len(read)
    assert load(folder).fingerprint == before
    assert len(set(read)) == len(read)


def digest(folder: Path) -> str | None:
    return checkpoint_digest(str(folder))


@pytest.mark.parametrize("writable", [True, False])
def test_a_file_that_changes_is_read_anew(folder, tmp_path, writable):
    if not writable:
        (tmp_path / "cache").write_text("in the way")
    before = digest(folder)
    assert digest(folder) == before
    file = folder / "model.safetensors"
    about = file.stat()
    flip(file, -1)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert digest(folder) != before


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model.safetensors": 3}'])
def test_damaged_notes_are_made_again(folder, tmp_path, content):
    before = digest(folder)
    (tmp_path / "cache" / DIGESTS).write_text(content)
    assert digest(folder) == before


def test_the_configuration_counts_too(folder):
    before, config = load(folder).fingerprint, folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert load(folder).fingerprint != before


def test_what_has_no_weight_files_has_no_digest(folder, tmp_path):
    assert digest(tmp_path) is None
    assert digest(Path("nobody/no-such-model")) is None
    (folder / "adapter_config.json").write_text("{}")
    assert digest(folder) is None


def test_files_that_are_not_loaded_do_not_count(folder, tmp_path):
    """As transformers: model.safetensors first, then an index's files, then the older format."""
    other = saved(tmp_path / "other", seed=1)
    before = digest(folder)
    shutil.copy(other / "model.safetensors", folder / "consolidated.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    assert digest(folder) == before
    (folder / "model.safetensors").unlink()
    of_the_older = digest(folder)
    torch.save({"a": torch.zeros(3)}, folder / "pytorch_model.bin")
    assert digest(folder) != of_the_older


def test_a_divided_checkpoint_counts_with_all_that_its_index_names(tmp_path):
    folder = saved(tmp_path / "model", max_shard_size="20KB")
    assert digest(folder) is not None
    max(folder.glob("model-*.safetensors")).unlink()
    assert digest(folder) is None
    (folder / "model.safetensors.index.json").write_text("[]")
    assert digest(folder) is None


def test_weights_that_are_replaced_while_they_are_loaded_are_known_as_themselves(tmp_path, monkeypatch):
    old, new = saved(tmp_path / "old"), saved(tmp_path / "new", seed=1)
    of_the_new, load_model = load(new).fingerprint, transformers.AutoModelForCausalLM.from_pretrained

    def replaced(*args: object, **options: object) -> object:
        model = load_model(*args, **options)
        Path(shutil.copy(new / "model.safetensors", tmp_path / "copy")).replace(old / "model.safetensors")
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", replaced)
    loaded = load(old)
    assert loaded.fingerprint != of_the_new
    assert parameters_digest(loaded.model) == parameters_digest(build(CORE["llama"]))


def _step(model: Any) -> None:
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _load(model: Any) -> None:
    model.load_state_dict(build(CORE["llama"], seed=1).state_dict())


def _replace_parameter(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.ones(80, 64))


def _replace_module(model: Any) -> None:
    """As libraries of adapters do."""
    attention = model.model.layers[3].self_attn
    attention.q_proj = torch.nn.Linear(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)


@pytest.mark.parametrize("change", [_step, _load, _replace_parameter, _replace_module])
def test_caches_of_weights_that_have_changed_are_not_used(change):
    model, store = build(CORE["llama"]).requires_grad_(True), open_store("memory:")
    blender = Blender(Decoder(model, tokenizer(), "tiny"), store)
    blender.remember(blender.prefill(LAYOUT))
    assert all(blender.prefill(LAYOUT).hits)
    unfinished = blender.prefill(PromptLayout.of_chunks((1, 3), ((20, 21, 22),), (7, 8)))
    change(model)
    blender.remember(unfinished)
    after = blender.prefill(LAYOUT)
    assert not any(after.hits)
    made_anew = Blender(Decoder(model, tokenizer(), "tiny"), store)
    assert made_anew.decoder.fingerprint == blender.decoder.fingerprint
    assert all(made_anew.prefill(unfinished.layout).hits)
    torch.testing.assert_close(after.logits, made_anew.prefill(LAYOUT).logits)


def test_a_model_made_in_inference_mode_is_no_obstacle():
    with torch.inference_mode():
        model = build(CORE["llama"])
    made = Decoder(model, tokenizer(), "tiny")
    before = made.identity(())
    assert made.identity(()) == before
    _replace_module(model)
    assert made.identity(()) != before


def test_a_name_of_the_catalog_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(decoder, "resolve_model", {"smollm2-135m": folder}.__getitem__)
    loaded = Decoder.load("smollm2-135m", device="cpu")
    assert loaded.name == "smollm2-135m"
    assert loaded.model.config.name_or_path == str(folder)


def loaded_by_others(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_others_loaded_has_the_caches_of_the_files_until_it_differs_from_them(tmp_path, options, tied):
    build(CORE["llama"], tie_word_embeddings=tied).save_pretrained(tmp_path / "model", **options)
    tokenizer().save_pretrained(tmp_path / "model")
    model = loaded_by_others(tmp_path / "model")
    of_files = load(tmp_path / "model").fingerprint
    decoder = Decoder(model, tokenizer())
    assert decoder.fingerprint == of_files
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    decoder.follow_weights()
    assert decoder.fingerprint != of_files
    assert Decoder(model, tokenizer()).fingerprint == decoder.fingerprint


def test_files_that_changed_or_have_gone_are_not_taken_for_the_model(tmp_path):
    folder = saved(tmp_path / "model")
    model = loaded_by_others(folder)
    of_files = load(folder).fingerprint
    saved(folder, seed=1)
    of_parameters = Decoder(model, tokenizer()).fingerprint
    assert of_parameters not in (of_files, load(folder).fingerprint)
    shutil.rmtree(folder)
    assert Decoder(model, tokenizer()).fingerprint == of_parameters


def test_a_checkpoint_that_lacks_a_tensor_does_not_name_the_model(tmp_path):
    folder = saved(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]  # transformers draws it at random
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    decoders = [Decoder(loaded_by_others(folder), tokenizer()) for _ in range(2)]
    assert decoders[0].fingerprint != decoders[1].fingerprint


def test_a_tensor_of_parts_counts_with_all_of_them():
    """As torchao's quantised weights: numbers, scales and zero points."""

    class Quantised(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.register_buffer("weight", TwoTensor(torch.ones(2, 3), torch.full((2, 3), scale)))

    def digest_of(scale: float) -> str:
        return parameters_digest(Quantised(scale))

    assert digest_of(0.5) == digest_of(0.5)
    assert digest_of(0.5) != digest_of(0.25)
