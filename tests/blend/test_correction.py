"""The KV correction: a regression from stored KV to KV in context, added only where stored KV is stale."""

import math
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from cases import cache_chunks, make_layout

from blend.chunks.correction import KVCorrection
from blend.config import BlendConfig
from blend.model.decoder import full_prefill
from blend.prefill.blender import Blender
from blend.store import open_store
from tests.store.reading import flip

FAMILIES = ("llama", "qwen3", "gemma3", "glm4", "deepseek-v3")
REUSE = BlendConfig(selector="none")
PLAIN = BlendConfig(selector="none", correction=False)


def blender_of(name: str, location: str | Path = "memory:", codec: str = "native") -> Blender:
    return cache_chunks(Blender(models.decoder(name), open_store(location, codec=codec)), make_layout())


def corpus(count: int = 150, length: int = 14) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(3, 60, (length,), generator=draw).tolist()) for _ in range(count)]


def calibrated(name: str, location: str | Path = "memory:", codec: str = "native") -> Blender:
    blender, layout = blender_of(name, location, codec), make_layout()
    assert blender.calibrate(layout.prefix, [*layout.chunks, *corpus()])
    return blender


def context_kv(blender: Blender, config: BlendConfig) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """KV of the context rows after a prefill, `[kv_heads, rows, head_dim]` a layer."""
    layout = make_layout()
    cache = blender.prefill(layout, config=config).cache
    span = slice(layout.context.start, layout.context.stop)
    return [tuple(part[0, :, span].clone() for part in cache.view(i)) for i in range(len(cache.layers))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_map_brings_stored_kv_of_its_corpus_closer_to_full_recompute(family):
    blender = calibrated(family)
    truth = context_kv(blender, BlendConfig(selector="all"))
    errors = []
    for config in (PLAIN, REUSE):
        found = context_kv(blender, config)
        errors.append(
            sum((a - b).square().sum() for x, y in zip(found, truth, strict=True) for a, b in zip(x, y, strict=True))
        )
    assert errors[1] < 0.95 * errors[0]


def test_exact_rows_and_the_first_layer_stay_bit_for_bit():
    blender = calibrated("llama")
    plain, mapped = context_kv(blender, PLAIN), context_kv(blender, REUSE)
    first = make_layout().chunk_spans[0].length
    for index, (old, new) in enumerate(zip(plain, mapped, strict=True)):
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a[:, :first], b[:, :first])
            assert index > 0 or torch.equal(a, b)
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(plain, mapped, strict=True))


def test_full_recompute_and_the_switch_ignore_the_map():
    blender, layout = blender_of("llama"), make_layout()
    plain = blender.prefill(layout, config=PLAIN).logits
    blender.calibrate(layout.prefix, [*layout.chunks, *corpus()])
    assert torch.equal(blender.prefill(layout, config=PLAIN).logits, plain)
    full = full_prefill(blender.decoder, layout).logits
    assert torch.allclose(blender.prefill(layout, config=BlendConfig(ratio=1.0)).logits, full, atol=1e-4)


@pytest.mark.parametrize("codec", ["native", "bfloat16"])
def test_it_is_stored_and_measured_once(tmp_path, codec):
    layout = make_layout()
    first = calibrated("llama", tmp_path / "kv", codec)
    again = Blender(models.decoder("llama"), open_store(tmp_path / "kv", codec=codec))
    assert again.calibrate(layout.prefix, ())
    found, measured = again.correction(layout.prefix), first.correction(layout.prefix)
    assert (found.before, found.length) == (measured.before, measured.length)
    assert found.before > found.length > 0
    for a, b in zip(found.layers, measured.layers, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.keys == b.keys and a.bounds == pytest.approx(b.bounds))
        assert a is None or all(torch.equal(getattr(a, n), getattr(b, n)) for n in FACTORS)


FACTORS = ("centre", "scale", "down", "up", "gauge")
CHANGES = (
    "depth",
    "width",
    "rank",
    "dtype",
    "gauge",
    "keys",
    "no reach",
    "not a number",
    "scale of 0",
    "nothing of it",
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_map_of_another_shape_is_reported_and_not_used(change):
    blender, layout = calibrated("llama"), make_layout()
    plain = blender.prefill(layout, config=PLAIN).logits
    name, found = blender.encoder(layout.prefix).identity.correction_name, blender.correction(layout.prefix)
    blender.store.write_artifact(name, _reshaped(found, change))
    blend = blender.prefill(layout, config=REUSE)
    assert len(blend.artifact_problems) == 1
    assert torch.equal(blend.logits, plain)


def _reshaped(found: KVCorrection, change: str) -> bytes:
    parts = list(found.layers)
    at = next(index for index, part in enumerate(parts) if part is not None)
    part = parts[at]
    if change == "nothing of it":
        return b"{}"
    if change == "depth":
        return replace(found, layers=(*parts, None)).to_bytes()
    wide = {
        name: torch.cat((getattr(part, name), getattr(part, name)[..., :1]), -1) for name in ("centre", "scale", "up")
    }
    tall = {name: torch.cat((getattr(part, name), getattr(part, name)[:1])) for name in ("down", "gauge")}
    changed = {
        "width": {**wide, **tall},
        "rank": {"up": part.up[1:]},
        "dtype": {"up": part.up.half()},
        "gauge": {"gauge": part.gauge[1:]},
        "keys": {"keys": part.keys + 1},
        "no reach": {"bounds": part.bounds._replace(reach=0.0)},
        "not a number": {"bounds": part.bounds._replace(values=math.nan)},
        "scale of 0": {"scale": part.scale * 0},
    }[change]
    parts[at] = replace(part, **changed)
    return replace(found, layers=tuple(parts)).to_bytes()


def test_measuring_anew_replaces_the_map():
    blender, layout = calibrated("llama"), make_layout()
    before = blender.correction(layout.prefix)
    blender.calibrate(layout.prefix, corpus(40, 10), anew=True)
    after = blender.correction(layout.prefix)
    assert after is not before
    assert after.before != before.before


def test_measuring_anew_and_finding_nothing_forgets_the_map():
    blender, layout = calibrated("llama"), make_layout()
    assert not blender.calibrate(layout.prefix, [(5, 6, 7)], anew=True)
    assert blender.correction(layout.prefix) is None
    assert blender.prefill(layout, config=REUSE).artifact_problems == ()


@pytest.mark.parametrize("chunks", [(), ((5, 6, 7),), ((5, 6, 7), (5, 6, 7))])
def test_without_two_chunks_there_is_no_map(chunks):
    blender, layout = blender_of("llama"), make_layout()
    assert not blender.calibrate(layout.prefix, chunks)
    assert blender.correction(layout.prefix) is None


def test_a_damaged_map_is_reported_and_not_used(tmp_path):
    layout = make_layout()
    blender = calibrated("llama", tmp_path / "kv")
    plain = blender.prefill(layout, config=PLAIN).logits
    entry = tmp_path / "kv" / "artifacts" / blender.encoder(layout.prefix).identity.correction_name
    flip(entry, -5)
    again = Blender(models.decoder("llama"), open_store(tmp_path / "kv", codec="native"))
    blend = again.prefill(layout, config=REUSE)
    assert blend.artifact_problems
    assert blend.problems == ()
    assert torch.equal(blend.logits, plain)
    assert again.prefill(layout, config=PLAIN).artifact_problems == ()
    assert again.calibrate(layout.prefix, [*layout.chunks, *corpus()])
    assert again.prefill(layout, config=REUSE).artifact_problems == ()


def test_prompts_that_do_not_fit_the_model_are_not_made():
    blender, layout = blender_of("llama"), make_layout()
    longest = blender.decoder.context_length
    long_chunks = [tuple([7 + i] * (longest - len(layout.prefix) - 1)) for i in range(2)]
    assert not blender.calibrate(layout.prefix, long_chunks)
