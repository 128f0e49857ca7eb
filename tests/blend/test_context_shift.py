"""The context shift: measured as the mean difference of KV in context and alone, added only where stored KV is inexact."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from cases import cache_chunks, make_layout

from blend.blender import Blender
from blend.config import BlendConfig
from blend.errors import ConfigError
from blend.reference import full_prefill
from blend.store import open_store

FAMILIES = ("llama", "qwen3", "gemma3", "glm4", "deepseek-v3")
REUSE = BlendConfig(selector="none", shift=1.0)


def blender_of(name: str, location: str | Path = "memory:") -> Blender:
    blender = Blender(models.decoder(name), open_store(location))
    cache_chunks(blender, make_layout())
    return blender


def context_kv(blender: Blender, config: BlendConfig) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """KV of the context rows after a prefill, `[kv_heads, rows, head_dim]` a layer."""
    layout = make_layout()
    cache = blender.prefill(layout, config=config).cache
    span = slice(layout.context.start, layout.context.stop)
    return [tuple(part[0, :, span].clone() for part in cache.view(i)) for i in range(len(cache.layers))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shift_is_the_mean_difference_with_positions_taken_out(family: str) -> None:
    blender, layout = blender_of(family), make_layout()
    assert blender.calibrate(layout.prefix, layout.chunks)
    shift = blender.context_shift(layout.prefix)
    first = layout.chunk_spans[0].length
    rows = torch.arange(layout.chunk_spans[1].start, layout.context.stop)
    together = context_kv(blender, BlendConfig(selector="all"))
    apart = context_kv(blender, BlendConfig(selector="none", shift=0.0))
    for index, rotation in enumerate(blender.decoder.rotations):
        for part, turn, measured in ((0, rotation.keys, shift.keys), (1, rotation.values, shift.values)):
            difference = (together[index][part] - apart[index][part])[None, :, first:]
            expected = turn.apply(difference.contiguous(), -rows)[0].mean(1, keepdim=True)
            assert torch.allclose(measured[index], expected, atol=2e-5), (index, part)
    assert not shift.keys[0].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shift_brings_plain_reuse_of_its_own_chunks_closer_to_full_recompute(family: str) -> None:
    blender, layout = blender_of(family), make_layout()
    blender.calibrate(layout.prefix, layout.chunks)
    full = full_prefill(blender.decoder, layout).logits
    without, with_shift = (
        (blender.prefill(layout, config=BlendConfig(selector="none", shift=s)).logits - full).norm() for s in (0.0, 1.0)
    )
    assert with_shift < 0.7 * without


def test_exact_rows_are_not_shifted() -> None:
    blender, layout = blender_of("llama"), make_layout()
    plain = context_kv(blender, BlendConfig(selector="none", shift=0.0))
    blender.calibrate(layout.prefix, layout.chunks)
    shifted = context_kv(blender, REUSE)
    first = layout.chunk_spans[0].length
    for index, (old, new) in enumerate(zip(plain, shifted, strict=True)):
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a[:, :first], b[:, :first])
            assert torch.equal(a[:, first:], b[:, first:]) is (index == 0)


def test_full_recompute_and_strength_zero_ignore_the_shift() -> None:
    blender, layout = blender_of("llama"), make_layout()
    plain = blender.prefill(layout, config=BlendConfig(selector="none", shift=0.0)).logits
    blender.calibrate(layout.prefix, layout.chunks)
    assert torch.equal(blender.prefill(layout, config=BlendConfig(selector="none", shift=0.0)).logits, plain)
    full = full_prefill(blender.decoder, layout).logits
    assert torch.allclose(blender.prefill(layout, config=BlendConfig(ratio=1.0, shift=1.0)).logits, full, atol=1e-4)


def test_uncached_rows_are_computed_not_shifted() -> None:
    blender, layout = blender_of("llama"), make_layout()
    blender.calibrate(layout.prefix, layout.chunks)
    for chunk in layout.chunks:
        blender.store.delete(blender.encoder(layout.prefix).identity.key(chunk))
    full = full_prefill(blender.decoder, layout).logits
    assert torch.allclose(blender.prefill(layout, config=REUSE).logits, full, atol=1e-4)


def test_it_is_stored_and_measured_once(tmp_path: Path) -> None:
    layout = make_layout()
    first = blender_of("llama", tmp_path / "kv")
    first.calibrate(layout.prefix, layout.chunks)
    again = Blender(models.decoder("llama"), open_store(tmp_path / "kv"))
    found, measured = again.context_shift(layout.prefix), first.context_shift(layout.prefix)
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found.values, measured.values, strict=True))
    assert again.calibrate(layout.prefix, ())


def test_a_single_chunk_gives_no_shift() -> None:
    blender, layout = blender_of("llama"), make_layout()
    assert not blender.calibrate(layout.prefix, layout.chunks[:1])
    assert blender.context_shift(layout.prefix) is None


@pytest.mark.parametrize("strength", [-0.1, 1.5])
def test_a_strength_outside_its_range_is_refused(strength: float) -> None:
    with pytest.raises(ConfigError, match="shift"):
        BlendConfig(shift=strength)
