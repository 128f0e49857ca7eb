"""The KV correction: a regression from stored KV to KV in context, added only where stored KV is stale."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blends import REUSE, assert_bits, assert_kv, context_error, empty_blender, filled, texts
from cases import cache_of, make_layout
from models import BASE, decoder

from blend.chunks import correction as correction_module
from blend.chunks.correction import LayerCorrection
from blend.config import BlendConfig
from blend.model.decoder import full_prefill
from blend.prefill.blender import Blender
from blend.store import open_store
from tests.store.reading import flip

CORRECTED = BlendConfig("none")
LAYOUT = make_layout()
CORPUS = [*LAYOUT.chunks, *texts(*[14] * 150, seed=1, below=60)]


def calibrated(name: str = "llama", location: str | Path = "memory:", codec: str = "native") -> Blender:
    blender = filled(decoder(name), LAYOUT, location=location, codec=codec)
    assert blender.calibrate(LAYOUT.prefix, CORPUS)
    return blender


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "glm4", "deepseek-v3"])
def test_the_map_brings_stored_kv_of_its_corpus_closer_to_full_recompute(family):
    blender = calibrated(family)
    assert context_error(blender, LAYOUT, corrected=True) < 0.95 * context_error(blender, LAYOUT, corrected=False)


def test_exact_rows_and_the_first_layer_stay_bit_for_bit():
    blender = calibrated()
    plain, mapped = (cache_of(blender.prefill(LAYOUT, config=config)) for config in (REUSE, CORRECTED))
    assert_kv(plain, mapped, slice(LAYOUT.chunk_spans[0].stop), assert_bits)
    assert_kv(plain[:1], mapped[:1], slice(LAYOUT.context.stop), assert_bits)
    assert not torch.equal(plain[-1][0], mapped[-1][0])


def test_full_recompute_and_the_switch_ignore_the_map():
    blender = filled(decoder("llama"), LAYOUT)
    plain = blender.prefill(LAYOUT, config=REUSE).logits
    blender.calibrate(LAYOUT.prefix, CORPUS)
    assert torch.equal(blender.prefill(LAYOUT, config=REUSE).logits, plain)
    full = full_prefill(blender.decoder, LAYOUT).logits
    assert torch.allclose(blender.prefill(LAYOUT, config=BlendConfig(ratio=1.0)).logits, full, atol=1e-4)


@pytest.mark.parametrize("codec", ["native", "bfloat16"])
def test_it_is_stored_and_measured_once(tmp_path, codec):
    measured = calibrated("llama", tmp_path, codec).correction(LAYOUT.prefix)
    again = Blender(decoder("llama"), open_store(tmp_path, codec=codec))
    assert again.calibrate(LAYOUT.prefix, ())
    found = again.correction(LAYOUT.prefix)
    assert found.before > found.length > 0
    assert found.to_bytes() == measured.to_bytes()


OF_INPUTS = ("centre", "scale", "down", "gauge")  # factors with a row for each input
CHANGES: dict[str, Callable[[LayerCorrection], dict[str, Any]]] = {
    "width": lambda part: {name: getattr(part, name)[1:] for name in OF_INPUTS} | {"up": part.up[:, 1:]},
    "rank": lambda part: {"up": part.up[1:]},
    "dtype": lambda part: {"up": part.up.half()},
    "gauge": lambda part: {"gauge": part.gauge[1:]},
    "keys": lambda part: {"keys": part.keys + 1},
    "no reach": lambda part: {"bounds": part.bounds._replace(reach=0.0)},
    "no gain": lambda part: {"bounds": part.bounds._replace(keys=0.0)},
    "not a number": lambda part: {"bounds": part.bounds._replace(values=math.nan)},
    "scale of 0": lambda part: {"scale": part.scale * 0},
}


@pytest.mark.parametrize("change", [*CHANGES, "depth", "nothing of it"])
def test_a_map_of_another_shape_is_reported_and_not_used(change):
    blender = calibrated()
    identity = blender.encoder(LAYOUT.prefix).identity
    correction = blender.correction(LAYOUT.prefix)
    layers = [*correction.layers, None] if change == "depth" else list(correction.layers)
    if change in CHANGES:
        layers[-1] = replace(layers[-1], **CHANGES[change](layers[-1]))
    changed = b"{}" if change == "nothing of it" else replace(correction, layers=tuple(layers)).to_bytes()
    blender.store.write_artifact(identity.correction_name, changed)
    blend = blender.prefill(LAYOUT, config=CORRECTED)
    assert len(blend.artifact_problems) == 1
    assert torch.equal(blend.logits, blender.prefill(LAYOUT, config=REUSE).logits)


def test_measuring_anew_replaces_the_map_and_forgets_it_where_nothing_is_found():
    blender = calibrated()
    before = blender.correction(LAYOUT.prefix)
    blender.calibrate(LAYOUT.prefix, texts(*[10] * 40), anew=True)
    assert blender.correction(LAYOUT.prefix).before != before.before
    assert not blender.calibrate(LAYOUT.prefix, [(5, 6, 7)], anew=True)
    assert blender.correction(LAYOUT.prefix) is None
    assert blender.prefill(LAYOUT, config=CORRECTED).artifact_problems == ()


LONG = BASE["max_position_embeddings"] - len(LAYOUT.prefix) - 1


@pytest.mark.parametrize(
    "chunks",
    [(), ((5, 6, 7),), ((5, 6, 7), (5, 6, 7)), ((7,) * LONG, (8,) * LONG)],
    ids=["none", "one", "one twice", "prompts longer than the context"],
)
def test_without_two_chunks_in_a_prompt_there_is_no_map(chunks):
    blender = empty_blender()
    assert not blender.calibrate(LAYOUT.prefix, chunks)
    assert blender.correction(LAYOUT.prefix) is None


def test_a_damaged_map_is_reported_and_not_used(tmp_path):
    blender = calibrated("llama", tmp_path)
    plain = blender.prefill(LAYOUT, config=REUSE).logits
    flip(tmp_path / "artifacts" / blender.encoder(LAYOUT.prefix).identity.correction_name, -5)
    again = Blender(decoder("llama"), open_store(tmp_path))
    blend = again.prefill(LAYOUT, config=CORRECTED)
    assert blend.artifact_problems
    assert blend.problems == ()
    assert torch.equal(blend.logits, plain)
    assert again.prefill(LAYOUT, config=REUSE).artifact_problems == ()
    assert again.calibrate(LAYOUT.prefix, CORPUS)
    assert again.prefill(LAYOUT, config=CORRECTED).artifact_problems == ()


def test_a_map_of_another_format_is_reported_and_fitted_again(monkeypatch):
    blender = calibrated()
    name = blender.encoder(LAYOUT.prefix).identity.correction_name
    with monkeypatch.context() as later:
        later.setattr(correction_module, "CORRECTION_FORMAT", 2)
        blender.store.write_artifact(name, blender.correction(LAYOUT.prefix).to_bytes())
    [problem] = blender.prefill(LAYOUT, config=CORRECTED).artifact_problems
    assert "format 2, not 1: fit it again with `blend precompute`" in problem
    assert blender.calibrate(LAYOUT.prefix, CORPUS)
    assert blender.prefill(LAYOUT, config=CORRECTED).artifact_problems == ()
