"""Rows of real weights, recomputed in a prompt's cells, equal those of a true prefill as far as llama.cpp equals itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from blend.integrations.llamacpp.cache import CellCache
from blend.integrations.llamacpp.context import ContextOptions
from blend.integrations.llamacpp.decoder import CellDecoder
from blend.integrations.llamacpp.library import Library
from blend.integrations.llamacpp.model import GGUFModel
from blend.model.cache import KV
from blend.weights import resolve_model
from tests.llamacpp.gguf_files import save_gguf
from tests.llamacpp.test_llamacpp_rows import rows_of

ROWS = 96
CHOSEN = [*range(4, 9), 15, 16, 30, *range(41, 44), 57, 70, *range(80, 84), ROWS - 1]
TEXT = (
    "The harbour of the old town has seven gates. Each one weighs two tonnes, and its keeper closes it at night. " * 6
)


@pytest.fixture(scope="module")
def file(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's weights in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    return save_gguf(tmp_path_factory.mktemp("real") / "smol.gguf", model, AutoTokenizer.from_pretrained(place))


def off(kvs: list[KV], expected: list[KV]) -> float:
    """The largest distance of a layer's keys or values at the chosen rows, as a share of their norm."""
    shares = []
    for kv, expected_kv in zip(kvs, expected, strict=True):
        for part, expected_part in zip(kv, expected_kv, strict=True):
            fresh, true = (tensor[:, :, CHOSEN].float() for tensor in (part, expected_part))
            shares.append(float((fresh - true).norm() / true.norm()))
    return max(shares)


def kv_of(cache: CellCache) -> list[KV]:
    """A copy of a cache's KV."""
    return [(keys.clone(), values.clone()) for keys, values in (layer.view() for layer in cache.layers)]


def logits_off(logits: Tensor, expected: Tensor) -> float:
    """The distance of logits, as a share of their norm."""
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("cache_type", "bound"), [("f16", 0.01), ("q8_0", 0.03)])
def test_recomputed_rows_are_those_of_a_true_prefill(
    library: Library, file: Path, cache_type: str, bound: float
) -> None:
    """Rows of other tokens take the place of the chosen ones, and are recomputed with the right tokens, a wave a run.

    Half precision rounds as it does when llama.cpp runs the prompt in other batches. Eight bits round by a step of 1/127.
    """
    decoder = CellDecoder(GGUFModel(library, file), ContextOptions(512, threads=1, cache_type=cache_type))
    ids = torch.tensor([decoder.tokenizer(TEXT).input_ids[:ROWS]])
    cache = decoder.new_cache(ROWS)
    logits = decoder.prefill([rows_of(ids, [*range(ROWS)], cache)])
    true = kv_of(cache)
    wrong = ids.flip(1)
    cache.compute(rows_of(wrong, CHOSEN, cache), 1)
    assert off(kv_of(cache), true) > 0.3
    again = cache.compute(rows_of(ids, CHOSEN, cache), 1)
    fresh = kv_of(cache)
    assert off(fresh, true) < bound
    assert logits_off(again, logits) < bound
    between = [row for row in range(ROWS) if row not in CHOSEN]
    for kv, true_kv in zip(fresh, true, strict=True):
        for part, true_part in zip(kv, true_kv, strict=True):
            assert torch.equal(part[:, :, between], true_part[:, :, between])
    decoder.close()
