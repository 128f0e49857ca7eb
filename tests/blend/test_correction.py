"""The KV correction: a regression from stored KV to KV in context, added only where stored KV is stale."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from cases import cache_chunks, make_layout

from blend.blender import Blender
from blend.chunks import regression
from blend.chunks.correction import Bounds, KVCorrection, LayerCorrection, position_features
from blend.chunks.regression import LayerRows, RowPlaces, fit_layer
from blend.config import BlendConfig
from blend.model.full_prefill import full_prefill
from blend.store import open_store
from blend.types import PromptLayout

FAMILIES = ("llama", "qwen3", "gemma3", "glm4", "deepseek-v3")
REUSE = BlendConfig(selector="none")
PLAIN = BlendConfig(selector="none", correction=False)


def blender_of(name: str, location: str | Path = "memory:", codec: str = "native") -> Blender:
    blender = Blender(models.decoder(name), open_store(location, codec=codec))
    cache_chunks(blender, make_layout())
    return blender


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
def test_the_map_brings_stored_kv_of_its_corpus_closer_to_full_recompute(family: str) -> None:
    blender = calibrated(family)
    truth = context_kv(blender, BlendConfig(selector="all"))
    errors = []
    for config in (PLAIN, REUSE):
        found = context_kv(blender, config)
        errors.append(
            sum((a - b).square().sum() for x, y in zip(found, truth, strict=True) for a, b in zip(x, y, strict=True))
        )
    assert errors[1] < 0.95 * errors[0]


def rows_seen(stored: torch.Tensor, gain: torch.Tensor, keys: int, groups: int = 4) -> LayerRows:
    """Rows of as many groups of chunks, each seen once, with features of no meaning but a constant."""
    count = stored.shape[0]
    features = torch.randn(count, 8, generator=torch.Generator().manual_seed(9))
    features[:, 0] = 1.0
    places = RowPlaces(features, torch.arange(count) * groups // count, torch.zeros(count).long())
    return LayerRows(stored, gain, places, keys, covered=1.0)


def test_a_linear_relation_is_found_and_unpredictable_parts_are_left_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 24, generator=draw) * 3 + 5
    linear = rows @ torch.randn(24, 10, generator=draw) + 1.0
    gain = torch.cat((linear, torch.randn(400, 14, generator=draw)), dim=1)
    seen = rows_seen(rows, gain, keys=10)
    found = fit_layer(seen)
    predicted = found.predict(rows, seen.places.features)
    spread = linear - linear.mean(0)
    assert (predicted[:, :10] - linear).square().sum() < 0.02 * spread.square().sum()
    assert not predicted[:, 10:].any()


def test_noise_gives_no_map() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, gain = (torch.randn(40, 24, generator=draw) for _ in range(2))
    assert fit_layer(rows_seen(rows, gain, keys=12)) is None


def test_the_factors_are_those_of_the_whole_regression_where_the_rank_allows() -> None:
    """Against the normal equations solved with numpy in float64."""
    import numpy as np

    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 20, generator=draw)
    gain = rows @ torch.randn(20, 20, generator=draw) + 0.1 * torch.randn(500, 20, generator=draw)
    seen = rows_seen(rows, gain, keys=10)
    found = fit_layer(seen)
    x = np.concatenate([((rows - found.centre) / found.scale).numpy(), seen.places.features.numpy()], 1).astype(
        np.float64
    )
    penalty = np.diag([min(regression.PENALTIES) * 500] * 20 + [1e-3 * 500] * 8)
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ gain.numpy())
    np.testing.assert_allclose(found.predict(rows, seen.places.features).numpy(), x @ weights, atol=2e-3)


def test_wide_kv_goes_through_a_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "WIDEST", 16)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 4, generator=draw)
    rows = hidden @ torch.randn(4, 40, generator=draw)
    gain = hidden @ torch.randn(4, 40, generator=draw)
    seen = rows_seen(rows, gain, keys=20)
    found = fit_layer(seen)
    assert found.down.shape[0] == 48
    assert (found.predict(rows, seen.places.features) - gain).square().sum() < 0.05 * gain.square().sum()


def test_position_features_by_hand() -> None:
    layout = PromptLayout((1, 2), ((3, 4, 5), (6, 7, 8, 9, 10, 11)), (12,))
    features = position_features(layout, torch.tensor([5, 6, 8, 10]))
    assert torch.equal(features[:, 0], torch.ones(4))
    assert torch.allclose(features[:, 1], torch.tensor([4 / 1, 5 / 2, 7 / 4, 9 / 6]).log())
    assert torch.allclose(features[:, 2], torch.full((4,), 4.0).log())
    assert features[:, 3:6].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert torch.allclose(features[:, 6], (-torch.tensor([0.0, 1, 3, 5]) / 8).exp())
    capped = position_features(layout, torch.tensor([5, 6, 8, 10]), before=1, length=4)
    assert torch.allclose(capped[:, 1], torch.tensor([2 / 1, 3 / 2, 5 / 4, 5 / 4]).log())
    assert torch.equal(capped[2], capped[3])


def test_exact_rows_and_the_first_layer_stay_bit_for_bit() -> None:
    blender = calibrated("llama")
    plain, mapped = context_kv(blender, PLAIN), context_kv(blender, REUSE)
    first = make_layout().chunk_spans[0].length
    for index, (old, new) in enumerate(zip(plain, mapped, strict=True)):
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a[:, :first], b[:, :first])
            assert index > 0 or torch.equal(a, b)
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(plain, mapped, strict=True))


def test_full_recompute_and_the_switch_ignore_the_map() -> None:
    blender, layout = blender_of("llama"), make_layout()
    plain = blender.prefill(layout, config=PLAIN).logits
    blender.calibrate(layout.prefix, [*layout.chunks, *corpus()])
    assert torch.equal(blender.prefill(layout, config=PLAIN).logits, plain)
    full = full_prefill(blender.decoder, layout).logits
    assert torch.allclose(blender.prefill(layout, config=BlendConfig(ratio=1.0)).logits, full, atol=1e-4)


def test_uncached_rows_are_computed_not_mapped() -> None:
    blender, layout = calibrated("llama"), make_layout()
    for chunk in layout.chunks:
        blender.store.delete(blender.encoder(layout.prefix).identity.key(chunk))
    full = full_prefill(blender.decoder, layout).logits
    assert torch.allclose(blender.prefill(layout, config=REUSE).logits, full, atol=1e-4)


@pytest.mark.parametrize("codec", ["native", "bfloat16"])
def test_it_is_stored_and_measured_once(tmp_path: Path, codec: str) -> None:
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
def test_a_map_of_another_shape_is_reported_and_not_used(change: str) -> None:
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


def test_measuring_anew_replaces_the_map() -> None:
    blender, layout = calibrated("llama"), make_layout()
    before = blender.correction(layout.prefix)
    blender.calibrate(layout.prefix, corpus(40, 10), anew=True)
    after = blender.correction(layout.prefix)
    assert after is not before
    assert after.before != before.before


def test_measuring_anew_and_finding_nothing_forgets_the_map() -> None:
    blender, layout = calibrated("llama"), make_layout()
    assert not blender.calibrate(layout.prefix, [(5, 6, 7)], anew=True)
    assert blender.correction(layout.prefix) is None
    assert blender.prefill(layout, config=REUSE).artifact_problems == ()


@pytest.mark.parametrize("chunks", [(), ((5, 6, 7),), ((5, 6, 7), (5, 6, 7))])
def test_without_two_chunks_there_is_no_map(chunks: tuple[tuple[int, ...], ...]) -> None:
    blender, layout = blender_of("llama"), make_layout()
    assert not blender.calibrate(layout.prefix, chunks)
    assert blender.correction(layout.prefix) is None


def test_a_damaged_map_is_reported_and_not_used(tmp_path: Path) -> None:
    layout = make_layout()
    blender = calibrated("llama", tmp_path / "kv")
    plain = blender.prefill(layout, config=PLAIN).logits
    entry = tmp_path / "kv" / "artifacts" / blender.encoder(layout.prefix).identity.correction_name
    data = bytearray(entry.read_bytes())
    data[-5] ^= 0xFF
    entry.write_bytes(data)
    again = Blender(models.decoder("llama"), open_store(tmp_path / "kv", codec="native"))
    blend = again.prefill(layout, config=REUSE)
    assert blend.artifact_problems
    assert blend.problems == ()
    assert torch.equal(blend.logits, plain)
    assert again.prefill(layout, config=PLAIN).artifact_problems == ()
    assert again.calibrate(layout.prefix, [*layout.chunks, *corpus()])
    assert again.prefill(layout, config=REUSE).artifact_problems == ()


def test_prompts_that_do_not_fit_the_model_are_not_made() -> None:
    blender, layout = blender_of("llama"), make_layout()
    longest = blender.decoder.context_length
    long_chunks = [tuple([7 + i] * (longest - len(layout.prefix) - 1)) for i in range(2)]
    assert not blender.calibrate(layout.prefix, long_chunks)


def test_a_layer_map_adds_what_its_formula_says() -> None:
    part, features = layer_map(Bounds(100.0, 100.0, 100.0))
    assert torch.equal(part.predict(torch.tensor([[5.0, 9.0]]), features), torch.tensor([[7.5, -2.5]]))


def layer_map(bounds: Bounds) -> tuple[LayerCorrection, torch.Tensor]:
    """A map of one key and one value, whose gauge is the first input, and the features of one row."""
    down, gauge, features = torch.zeros(10, 1), torch.zeros(10, 1), torch.zeros(1, 8)
    down[0, 0], down[2, 0], gauge[0, 0], features[0, 0] = 1.0, 0.5, 1.0, 1.0
    centre, scale, up = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]), torch.tensor([[3.0, -1.0]])
    return LayerCorrection(centre, scale, down, up, gauge, bounds, keys=1), features


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (Bounds(2.0, 100.0, 100.0), [7.5, -2.5]),  # as far as the farthest row seen
        (Bounds(4 / 3, 100.0, 100.0), [3.75, -1.25]),  # half as far again
        (Bounds(1.0, 100.0, 100.0), [0.0, 0.0]),  # twice as far
        (Bounds(100.0, 1.5, 100.0), [1.5, -0.5]),  # a larger gain of keys than any seen
        (Bounds(100.0, 100.0, 1.25), [3.75, -1.25]),  # of values
    ],
)
def test_what_lies_beyond_the_rows_seen_is_shrunk(bounds: Bounds, expected: list[float]) -> None:
    part, features = layer_map(bounds)
    found = part.predict(torch.tensor([[5.0, 9.0]]), features)
    assert torch.allclose(found, torch.tensor([expected]), atol=1e-5)
