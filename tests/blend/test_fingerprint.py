"""Which model a cache belongs to: told from the checkpoint's files, without passing over its parameters at every start."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from models import CORE, build, tokenizer

from blend.model import decoder, fingerprint
from blend.model.decoder import Decoder
from blend.model.fingerprint import CACHED, checkpoint_digest
from tests.store.reading import flip


def saved(folder: Path, *, seed: int = 0, **options: str) -> Path:
    build(CORE["llama"], seed=seed).save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path / "cache"))


def load(folder: Path) -> Decoder:
    return Decoder.load(str(folder), device="cpu")


def test_the_same_weights_are_the_same_model_wherever_they_lie(tmp_path: Path) -> None:
    first = saved(tmp_path / "first")
    copy, other = Path(shutil.copytree(first, tmp_path / "copy")), saved(tmp_path / "other", seed=1)
    assert load(first).fingerprint == load(copy).fingerprint != load(other).fingerprint


def test_files_are_read_once_and_parameters_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = saved(tmp_path / "model", max_shard_size="20KB"), []
    digest = fingerprint.file_digest
    monkeypatch.setattr(fingerprint, "file_digest", lambda file: read.append(file.name) or digest(file))
    monkeypatch.setattr(decoder, "parameters_digest", lambda model: pytest.fail("the parameters were passed over"))
    before = load(folder).fingerprint
    assert len(read) > 1
    assert len(set(read)) == len(read)
    assert load(folder).fingerprint == before
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("kept", ["beside the files", "in the cache folder", "nowhere"])
def test_a_file_that_changes_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    folder = saved(tmp_path / "model")
    if kept != "beside the files":
        monkeypatch.setattr(fingerprint, "CACHED", "no/such/place")
    if kept == "nowhere":
        (tmp_path / "cache").write_text("in the way")
    before = checkpoint_digest(str(folder))
    assert checkpoint_digest(str(folder)) == before
    file = folder / "model.safetensors"
    about = file.stat()
    flip(file, -1)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert checkpoint_digest(str(folder)) != before


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model.safetensors": 3}'])
def test_damaged_notes_are_made_again(tmp_path: Path, content: str) -> None:
    folder = saved(tmp_path / "model")
    before = checkpoint_digest(str(folder))
    (folder / CACHED).write_text(content)
    assert checkpoint_digest(str(folder)) == before


def test_the_configuration_counts_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    before, config = load(folder).fingerprint, folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert load(folder).fingerprint != before


def test_what_has_no_weight_files_has_no_digest(tmp_path: Path) -> None:
    assert checkpoint_digest(str(tmp_path)) is None
    assert checkpoint_digest("nobody/no-such-model") is None
    folder = saved(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text("{}")
    assert checkpoint_digest(str(folder)) is None


def test_files_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    """As transformers: model.safetensors first, then an index's files, then the older format."""
    other, folder = saved(tmp_path / "other", seed=1), saved(tmp_path / "model")
    before = checkpoint_digest(str(folder))
    shutil.copy(other / "model.safetensors", folder / "consolidated.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    assert checkpoint_digest(str(folder)) == before
    (folder / "model.safetensors").unlink()
    of_the_older = checkpoint_digest(str(folder))
    torch.save({"a": torch.zeros(3)}, folder / "pytorch_model.bin")
    assert checkpoint_digest(str(folder)) != of_the_older


def test_a_divided_checkpoint_counts_with_all_that_its_index_names(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", max_shard_size="20KB")
    assert checkpoint_digest(str(folder)) is not None
    max(folder.glob("model-*.safetensors")).unlink()
    assert checkpoint_digest(str(folder)) is None
    (folder / "model.safetensors.index.json").write_text("[]")
    assert checkpoint_digest(str(folder)) is None


def test_weights_that_are_replaced_while_they_are_loaded_are_known_as_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    old, new = saved(tmp_path / "old"), saved(tmp_path / "new", seed=1)
    of_the_new, load_model = load(new).fingerprint, transformers.AutoModelForCausalLM.from_pretrained

    def replaced(*args: object, **options: object) -> object:
        model = load_model(*args, **options)
        Path(shutil.copy(new / "model.safetensors", tmp_path / "copy")).replace(old / "model.safetensors")
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", replaced)
    loaded = load(old)
    assert loaded.fingerprint != of_the_new
    built = Decoder(build(CORE["llama"], seed=0), tokenizer())
    pairs = zip(loaded.model.parameters(), built.model.parameters(), strict=True)
    assert all(torch.equal(mine.to_dense() if mine.is_mkldnn else mine, theirs) for mine, theirs in pairs)
