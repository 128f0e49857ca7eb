"""Caches kept in few bits, their keys without positions, put into prompts like any others."""

from collections.abc import Mapping

import pytest
import torch
from cases import cache_of, make_layout
from dense_reference import assert_close
from layouts import marked
from models import FAMILIES, decoder

from blend.chunks.encode import without_positions
from blend.chunks.opened import open_chunks
from blend.config import BlendConfig
from blend.prefill.blender import Blend, Blender
from blend.store import ChunkStore, Codec, open_store
from blend.types import PromptLayout

REUSE = BlendConfig(selector="none", correction=False)
CODECS = ("int8", "int4")
BASE = make_layout()
PARTS = marked(BASE, plain={1}, parts={2: ((11, 12, *BASE.chunks[2], 13), 2)})


class Exact(Codec):
    """Everything as it is, but keys without positions."""

    name, parts, unrotated = "exact-unrotated-test", ("k", "v"), True

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"k": keys.clone(), "v": values.clone()}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        return parts["k"], parts["v"]


def blended(name: str, store: ChunkStore, layout: PromptLayout, config: BlendConfig = REUSE) -> Blend:
    blender = Blender(decoder(name), store)
    library = blender.library(layout.prefix)
    library.compute(library.missing([chunk for chunk in layout.stored if chunk is not None]))
    blend = blender.prefill(layout, config=config)
    assert not blend.problems
    return blend


def context_of(blend: Blend) -> list[tuple[torch.Tensor, ...]]:
    span = blend.layout.context
    return [tuple(part[:, :, span.start : span.stop] for part in layer) for layer in cache_of(blend)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, BASE) for name in FAMILIES), *((name, PARTS) for name in ("llama", "cohere", "gpt-neox", "deepseek-v3"))],
)
def test_keys_without_positions_turn_to_where_they_belong(name, layout):
    unrotated, turned = (open_store("memory:", codec=codec) for codec in (Exact(), "native"))
    for got, want in zip(*(context_of(blended(name, store, layout)) for store in (unrotated, turned)), strict=True):
        for mine, theirs in zip(got, want, strict=True):
            assert_close(mine, theirs)
    keys = list(unrotated.keys())
    assert all(unrotated.open(key).unrotated for key in keys)  # type: ignore[union-attr]
    assert not any(turned.open(key).unrotated for key in keys)  # type: ignore[union-attr]


def test_one_chunk_without_positions_is_what_the_model_computes_at_position_zero():
    encoder = Blender(decoder("qwen2"), open_store("memory:")).encoder(BASE.prefix)
    ((_, cache),) = encoder.encode([BASE.chunks[0]])
    unrotated = without_positions(cache, decoder("qwen2").rotations)
    assert (unrotated.unrotated, unrotated.start) == (True, cache.start)
    # Layer 0's keys depend on token and position alone: equal tokens have equal keys wherever they stand.
    twice = (*BASE.chunks[0][:3], *BASE.chunks[0][:3])
    ((_, cache),) = encoder.encode([twice])
    keys = without_positions(cache, decoder("qwen2").rotations).keys[0]
    assert_close(keys[:, :3], keys[:, 3:])
    assert (cache.keys[0][:, :3] - cache.keys[0][:, 3:]).abs().max() > 0.1


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.01), ("int4", 0.2)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "cohere", "gpt-neox", "deepseek-v3"])
def test_what_is_blended_is_near_the_exact_store(name, codec, most):
    got, want = (blended(name, open_store("memory:", codec=one), BASE) for one in (codec, "native"))
    for mine, theirs in zip(context_of(got), context_of(want), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one - other).norm() <= most * other.norm()
    assert (got.logits - want.logits).norm() <= 2 * most * want.logits.norm()


@pytest.mark.parametrize("codec", CODECS)
def test_a_store_of_bfloat16_goes_on_in_another_codec(codec, tmp_path):
    """Half of the caches are of before; with the KV correction, which sees rows with positions and rows without beside."""
    draw = torch.Generator().manual_seed(1)
    corpus = [tuple(torch.randint(3, 60, (14,), generator=draw).tolist()) for _ in range(150)]
    before = Blender(decoder("llama"), open_store(tmp_path, codec="bfloat16"))
    before.library(BASE.prefix).compute(before.library(BASE.prefix).missing(BASE.chunks[:2]))
    after = Blender(decoder("llama"), open_store(tmp_path, codec=codec))
    library = after.library(BASE.prefix)
    assert {one.chunk for one in library.missing(BASE.chunks)} == set(BASE.chunks[2:])
    library.compute(library.missing(BASE.chunks))
    assert after.calibrate(BASE.prefix, [*BASE.chunks, *corpus])
    with open_chunks(library, BASE) as opened:
        kept = [(one.kv.shape.packing, one.unrotated, one.lossless) for one in opened.chunks if one]
    assert kept == [("plain", False, False)] * 2 + [(codec, True, False)] * 2
    exact = open_store("memory:")
    for name in after.store.artifacts():
        exact.write_artifact(name, after.store.read_artifact(name) or b"")
    for config in (REUSE, BlendConfig(selector="none")):
        got, want = after.prefill(BASE, config=config), blended("llama", exact, BASE, config)
        assert all(got.hits)
        for mine, theirs in zip(context_of(got), context_of(want), strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert (one - other).norm() <= 0.2 * other.norm()
