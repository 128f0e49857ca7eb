"""Caches kept in few bits, their keys without positions, put into prompts like any others."""

from collections.abc import Mapping

import pytest
import torch
from blends import REUSE, assert_kv, empty_blender, filled, texts
from cases import cache_of, make_layout
from dense_reference import assert_close
from layouts import marked
from models import FAMILIES, decoder

from blend.chunks.encode import without_positions
from blend.chunks.opened import open_chunks
from blend.config import BlendConfig
from blend.prefill.blender import Blender
from blend.store import Codec, open_store

BASE = make_layout()
CONTEXT = slice(*BASE.context)
PARTS = marked(BASE, plain={1}, parts={2: ((11, 12, *BASE.chunks[2], 13), 2)})


class Exact(Codec):
    """Everything as it is, but keys without positions."""

    name, parts, unrotated = "exact-unrotated-test", ("k", "v"), True

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"k": keys.clone(), "v": values.clone()}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        return parts["k"], parts["v"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, BASE) for name in FAMILIES), *((name, PARTS) for name in ("llama", "cohere", "gpt-neox", "deepseek-v3"))],
)
def test_keys_without_positions_turn_to_where_they_belong(name, layout):
    unrotated, turned = (filled(decoder(name), layout, REUSE, codec=codec) for codec in (Exact(), "native"))
    assert_kv(cache_of(unrotated.prefill(layout)), cache_of(turned.prefill(layout)), CONTEXT)
    for blender in (unrotated, turned):
        readers = map(blender.store.open, blender.store.keys())
        assert {reader.unrotated for reader in readers} == {blender is unrotated}


def test_one_chunk_without_positions_is_what_the_model_computes_at_position_zero():
    """Layer 0's keys depend on token and position alone: equal tokens have equal keys wherever they stand."""
    encoder = empty_blender("qwen2").encoder(BASE.prefix)
    ((_, cache),) = encoder.encode([BASE.chunks[0][:3] * 2])
    unrotated = without_positions(cache, decoder("qwen2").rotations)
    assert (unrotated.unrotated, unrotated.start) == (True, cache.start)
    assert_close(unrotated.keys[0][:, :3], unrotated.keys[0][:, 3:])
    assert (cache.keys[0][:, :3] - cache.keys[0][:, 3:]).abs().max() > 0.1


def assert_near(found: torch.Tensor, expected: torch.Tensor, most: float = 0.2) -> None:
    assert (found - expected).norm() <= most * expected.norm()


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.01), ("int4", 0.2)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "cohere", "gpt-neox", "deepseek-v3"])
def test_what_is_blended_is_near_the_exact_store(name, codec, most):
    rounded = filled(decoder(name), BASE, REUSE, codec=codec).prefill(BASE)
    exact = filled(decoder(name), BASE, REUSE, codec="native").prefill(BASE)
    assert_kv(cache_of(rounded), cache_of(exact), CONTEXT, lambda part, true: assert_near(part, true, most))
    assert_near(rounded.logits, exact.logits, 2 * most)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_store_of_bfloat16_goes_on_in_another_codec(codec, tmp_path):
    """Half of the caches are of before; with the KV correction, which sees rows with positions and rows without beside."""
    before = Blender(decoder("llama"), open_store(tmp_path, codec="bfloat16")).library(BASE.prefix)
    before.compute(before.missing(BASE.chunks[:2]))
    after = Blender(decoder("llama"), open_store(tmp_path, codec=codec))
    library = after.library(BASE.prefix)
    assert {one.chunk for one in library.missing(BASE.chunks)} == set(BASE.chunks[2:])
    library.compute(library.missing(BASE.chunks))
    assert after.calibrate(BASE.prefix, [*BASE.chunks, *texts(*[14] * 150, seed=1, below=60)])
    with open_chunks(library, BASE) as opened:
        kept = [(one.kv.shape.packing, one.unrotated, one.lossless) for one in opened.chunks if one]
    assert kept == [("plain", False, False)] * 2 + [(codec, True, False)] * 2
    exact = filled(decoder("llama"), BASE)
    for name in after.store.artifacts():
        exact.store.write_artifact(name, after.store.read_artifact(name) or b"")
    for config in (REUSE, BlendConfig("none"), BlendConfig("random", ratio=0.4)):  # the last one judges the correction
        blends = [blender.prefill(BASE, config=config) for blender in (after, exact)]
        assert all(blends[0].hits)
        assert_kv(*map(cache_of, blends), CONTEXT, assert_near)
