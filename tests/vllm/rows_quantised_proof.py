"""Rows by quantised models in vLLM compared with transformers computing the same: caches of other models are not used.

`test_rows.py` runs this file in a process of its own, in which vLLM's engine is.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import int8_in_transformers, save_int8
from rows_proof import Proof, blended, drain
from tiny import save_model
from vllm import EngineArgs

from blend.integrations.vllm.admission import fingerprints
from blend.model.decoder import Decoder
from blend.prefill.prefill import NothingStoredError

LENGTHS = (128, 517)


def check_learnt_by_vllm(proof: Proof) -> None:
    """What all prompts lack is computed by vLLM, and then stored: the store's caches, and its probe, are of others alone.

    Over these chunks answers are vLLM's own prefill's with all rows recomputed, and others with some.
    """
    assert proof.rows.decoder.fingerprint != proof.decoder.fingerprint
    proof.configured()
    for layout in proof.layouts:
        with pytest.raises(NothingStoredError):
            blended(proof.rows, layout)
    plain = proof.plain()
    assert proof.decoded() == plain
    drain(proof.rows)
    proof.configured(ratio=1.0)
    assert proof.decoded() == plain
    proof.configured(ratio=0.15)
    blends = [blended(proof.rows, layout) for layout in proof.layouts]
    assert all(hit for blend in blends for hit in blend.hits)
    assert max(blend.selection.rows.shape[0] / blend.selection.rows[-1].item() for blend in blends) < 0.3
    assert proof.decoded() != plain


def most_apart(some: Any, others: Any, rows: int) -> float:
    """Norm of the difference, relative to the norm, in the layer where it is largest."""
    layers = range(len(some.layers))
    pairs = [pair for layer in layers for pair in zip(some.view(layer), others.view(layer), strict=True)]
    cut = [(one[:, :, :rows], two[:, :, :rows]) for one, two in pairs]
    return max(float((one - two).norm() / one.norm()) for one, two in cut)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("plain") / "plain", initializer_range=0.08)


def test_a_checkpoint_of_integers(plain: Path, tmp_path: Path) -> None:
    decoder = Decoder(int8_in_transformers(plain), None, "int8")
    proof = Proof(tmp_path, save_int8(plain, tmp_path / "int8"), decoder, LENGTHS)
    check_learnt_by_vllm(proof)
    # Activations that are rounded the other way change all that comes after: nearer to the same rows than to all of them.
    for layout in proof.layouts:
        config = proof.configured(selector="random", ratio=0.15)
        mine, theirs = proof.blender.prefill(layout, config=config), blended(proof.rows, layout)
        assert mine.selection.rows.tolist() == theirs.selection.rows.tolist()
        full = proof.blender.prefill(layout, config=proof.configured(ratio=1.0))
        near = most_apart(mine.cache, theirs.cache, layout.rows - 1)
        assert most_apart(full.cache, theirs.cache, layout.rows - 1) > 5 * near


def test_a_model_that_vllm_rounds_as_it_loads(plain: Path, tmp_path: Path) -> None:
    """The store has the caches and the probe of the files as they are."""
    decoder = Decoder.load(str(plain), device="cpu", dtype="bfloat16")
    proof = Proof(tmp_path, plain, decoder, LENGTHS, dtype="bfloat16", quantization="fp8_per_channel")
    check_learnt_by_vllm(proof)


def test_a_deep_model_is_admitted(tmp_path: Path) -> None:
    """In some of its many layers an activation is rounded the other way at another position."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8}
    plain = save_model(tmp_path / "plain", initializer_range=0.04, **shape)
    decoder = Decoder.load(str(plain), device="cpu", dtype="float32")
    deep = Proof(tmp_path, save_int8(plain, tmp_path / "int8"), decoder, ())
    assert len(deep.rows.decoder.rotations) == 12


def test_each_way_to_quantise_has_caches_of_its_own(plain: Path) -> None:
    linear = {"linear": "fp8_per_channel"}
    options: tuple[dict[str, Any], ...] = (
        {},
        {"quantization": "fp8_per_channel"},
        {"quantization": "online", "quantization_config": linear},
        {"quantization": "online", "quantization_config": {**linear, "ignore": ["*.o_proj"]}},
    )
    configs = [EngineArgs(str(plain), skip_tokenizer_init=True, **one).create_engine_config() for one in options]
    assert len({fingerprints(one)[0] for one in configs}) == 4
