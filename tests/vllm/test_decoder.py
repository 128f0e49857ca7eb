"""The parts of stage rows that need no vLLM: rotary frequencies, scratch memory, runs of rows, names of caches."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blend.cli.vllm import dtype_of_vllm
from blend.integrations.vllm.admission import fingerprints
from blend.integrations.vllm.row_model import ScratchBlocks, block_dimension, from_table, runs
from blend.model.fingerprint import files_fingerprint
from tests.tiny_model import save_tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [1e4, 1e6])
def test_frequencies_from_cosines_and_sines(dtype: torch.dtype, base: float) -> None:
    true = 1.0 / base ** (torch.arange(0, 64, 2).float() / 64)
    angles = torch.arange(32768).float()[:, None] * true
    table = 1.3 * torch.cat((angles.cos(), angles.sin()), -1)  # a factor on both, as YaRN has it
    far = (from_table(table.to(dtype)) - true.double()).abs()
    assert float(far.max()) < (1e-8 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize(
    ("positions", "found"), [([], []), ([5], [(5, 5)]), ([0, 1, 2], [(0, 2)]), ([0, 2, 3, 7], [(0, 0), (2, 3), (7, 7)])]
)
def test_consecutive_rows_are_one_run(positions: list[int], found: list[tuple[int, int]]) -> None:
    assert runs(torch.tensor(positions, dtype=torch.int64)) == found


def layer_with(cache: torch.Tensor) -> Any:
    return SimpleNamespace(kv_cache=cache)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3)])
def test_scratch_memory_is_laid_out_as_the_cache(order: tuple[int, ...]) -> None:
    back = sorted(range(4), key=order.__getitem__)
    shape = [(40, 2, 16, 8)[one] for one in order]
    layers = [layer_with(torch.empty(shape).permute(back)) for _ in range(3)]
    own = [layer.kv_cache for layer in layers]
    with ScratchBlocks(layers, 40).bound(3):
        scratch = layers[0].kv_cache
        assert scratch.shape == (3, 2, 16, 8)
        assert all(layer.kv_cache is scratch for layer in layers)
        assert sorted(range(4), key=scratch.stride, reverse=True) == sorted(range(4), key=own[0].stride, reverse=True)
        assert not scratch.any()
    assert all(a.kv_cache is b for a, b in zip(layers, own, strict=True))


def test_the_cache_comes_back_after_an_error() -> None:
    layer = layer_with(torch.empty(40, 2, 16, 8))
    own = layer.kv_cache
    with pytest.raises(RuntimeError), ScratchBlocks([layer], 40).bound(3):
        raise RuntimeError
    assert layer.kv_cache is own


def test_a_cache_whose_shape_does_not_show_its_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="which dimension counts its 16 blocks"):
        block_dimension(torch.empty(16, 2, 16, 8), 16)


def test_what_vllm_changes_about_a_model_keeps_its_caches_apart(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", "some words")

    def names(form: str = "auto", **changes: Any) -> tuple[str, str]:
        given = {"model": str(model), "quantization": None, "quantization_config": None, "hf_overrides": {}, **changes}
        return fingerprints(
            SimpleNamespace(model_config=SimpleNamespace(**given), load_config=SimpleNamespace(load_format=form))
        )

    plain = names()
    assert plain[0] == files_fingerprint(str(model))
    changed = [names(quantization="fp8"), names(hf_overrides={"rope_theta": 5e5}), names("dummy")]
    assert all(shared == own for shared, own in changed)
    assert len({*plain, *(own for _, own in changed)}) == 5


TEXT = "The harbour has three gates and a bell. Its keeper counts forty visitors a day. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dtypes") / "tiny", TEXT)


@pytest.mark.parametrize(("kept", "found"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")])
def test_auto_is_what_vllm_takes_for_a_checkpoint(model: Path, tmp_path: Path, kept: str, found: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": kept}))
    assert dtype_of_vllm(str(tmp_path)) == found
