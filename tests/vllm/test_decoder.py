"""The parts that need no vLLM: rotary frequencies, scratch memory, runs of rows, names of caches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blend.integrations.vllm.admission import fingerprints
from blend.integrations.vllm.row_model import alike, from_table, replaced_caches, runs
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
    ("positions", "expected"), [([], []), ([5], [(5, 5)]), ([0, 2, 3, 7], [(0, 0), (2, 3), (7, 7)])]
)
def test_consecutive_rows_are_one_run(positions: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(torch.tensor(positions, dtype=torch.int64)) == expected


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3)])
def test_scratch_memory_is_laid_out_as_the_cache(order: tuple[int, ...]) -> None:
    back = sorted(range(4), key=order.__getitem__)
    cache = torch.empty([(40, 2, 16, 8)[axis] for axis in order]).permute(back)
    scratch = alike(cache, 0, 3)
    assert scratch.shape == (3, 2, 16, 8)
    assert sorted(range(4), key=scratch.stride, reverse=True) == sorted(range(4), key=cache.stride, reverse=True)
    assert not scratch.any()


def test_the_caches_come_back_also_after_an_error() -> None:
    layers = [SimpleNamespace(kv_cache=number) for number in range(3)]
    with replaced_caches(layers, torch.empty(1)):
        assert all(isinstance(layer.kv_cache, torch.Tensor) for layer in layers)
    assert [layer.kv_cache for layer in layers] == [0, 1, 2]
    with pytest.raises(RuntimeError), replaced_caches(layers, torch.empty(1)):
        raise RuntimeError
    assert [layer.kv_cache for layer in layers] == [0, 1, 2]


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
