"""What selectors are shown inside a blended prefill, and what ratios mean, against the dense reference."""

from contextlib import ExitStack

import pytest
import torch
from cases import SELECTORS, blended, make_layout, recorded
from dense_reference import assert_close, dense_blend, dense_prefill, dense_reuse
from models import CORE, LAYERS, decoder, eager_model

from blend.config import BlendConfig
from blend.errors import ConfigError
from blend.select import HighDeviation, QueryGuided
from tests.blend.blends import assert_kv

LAYOUT = make_layout()
CONTEXT = LAYOUT.context.length


@pytest.mark.parametrize(
    ("name", "cached", "check_layer"),
    [*((name, range(4), 2) for name in CORE), ("llama", (1, 3), 1), ("mistral", (1, 3), LAYERS - 1)],
)
def test_hkvd_sees_fresh_and_stored_kv_of_the_check_layer(name, cached, check_layer):
    _, (evidence,), _ = recorded(
        decoder(name), LAYOUT, BlendConfig(HighDeviation(check_layer), ratio=0.3), cached=cached
    )
    stored = [torch.arange(*LAYOUT.chunk_spans[index]) for index in cached]
    rows = torch.cat([span for index, span in zip(cached, stored, strict=True) if index > 0])
    assert torch.equal(evidence.candidates, rows)
    assert evidence.layer == check_layer
    assert evidence.budget == round(0.3 * sum(map(len, stored)))
    fresh = dense_prefill(eager_model(name), LAYOUT.token_ids).layers[check_layer]
    reused = dense_reuse(eager_model(name), LAYOUT.prefix, LAYOUT.chunks, len(LAYOUT.suffix))[check_layer]
    expected = [[part[:, :, rows] for part in pair] for pair in (fresh, reused)]
    assert_kv((evidence.fresh, evidence.stored), expected)


@pytest.mark.parametrize("layers", ["all", "middle", "1-2", "0+2-3"])
def test_query_guided_sees_the_attention_of_the_suffix_over_stored_caches(layers):
    """The model's own attention weights of a plain reuse forward pass."""
    model, config = eager_model("llama"), BlendConfig(QueryGuided(layers), ratio=0.3)
    blend, (evidence,), _ = recorded(decoder("llama"), LAYOUT, config)
    reused = dense_reuse(model, LAYOUT.prefix, LAYOUT.chunks, len(LAYOUT.suffix))
    suffix = torch.arange(LAYOUT.context.stop, LAYOUT.rows)
    seen: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            hooks.enter_context(layer.self_attn.register_forward_hook(lambda _, args, out: seen.append(out[1])))
        dense_blend(model, LAYOUT.token_ids, reused, [suffix] * LAYERS)
    scoring = {"all": range(LAYERS), "middle": range(2, 4), "1-2": range(1, 3), "0+2-3": (0, 2, 3)}[layers]
    weights = torch.stack([seen[layer][0, :, suffix] for layer in scoring])
    peak, last, context = weights.amax(2).sum(1), weights[:, :, -1].sum(1), slice(*LAYOUT.context)
    expected = peak + last * peak[:, context].sum() / last[:, context].sum()
    assert_close(evidence.query_attention, expected[:, evidence.candidates])
    assert blend.selection.rows_per_layer == (blend.rows_recomputed,) * LAYERS


@pytest.mark.parametrize("selector", ["hkvd", "random", "query_guided", "mixed"])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.15, 0.5, 0.99, 1.0])
def test_the_ratio_is_a_share_of_cached_context_rows(selector, ratio):
    """None of it is spent on a stored first chunk, which is exact where it stands: 20 rows here."""
    for cached, rows, stale in ((None, CONTEXT, CONTEXT - 20), ((1, 3), 25, 25), ((0, 2), 21, 1), ((), 0, 0)):
        blend = blended(decoder("llama"), LAYOUT, BlendConfig(selector=selector, ratio=ratio), cached=cached)
        required = LAYOUT.rows - len(LAYOUT.prefix) - rows
        budget = round(ratio * rows)
        assert blend.rows_recomputed - required == (rows if budget == rows else min(budget, stale))


def test_a_share_of_rows_is_counted_over_layers():
    blend = blended(decoder("llama"), LAYOUT, BlendConfig("hkvd:check_layer=2", ratio=0.3))
    not_exact = LAYOUT.rows - LAYOUT.chunk_spans[0].stop
    counted = 2 * not_exact + 2 * (round(0.3 * CONTEXT) + len(LAYOUT.suffix))
    assert blend.rows_share == pytest.approx(counted / (LAYERS * LAYOUT.rows))


@pytest.mark.parametrize("selector", ["hkvd", "mixed"])
def test_a_check_layer_the_model_does_not_have_is_refused(selector):
    with pytest.raises(ConfigError, match=rf"layer {LAYERS} has no KV: the model keeps KV in layers 0 to {LAYERS - 1}"):
        blended(decoder("llama"), LAYOUT, BlendConfig(f"{selector}:check_layer={LAYERS}", ratio=0.3))


@pytest.mark.parametrize("layers", ["upper-most", "3-1", f"0-{LAYERS}", f"0+{LAYERS}", "1+", "1--2", ""])
def test_scoring_layers_the_model_does_not_have_are_refused(layers):
    with pytest.raises(ConfigError, match="layers is"):
        blended(decoder("llama"), LAYOUT, BlendConfig(f"query_guided:layers={layers}", ratio=0.3))


@pytest.mark.parametrize("config", SELECTORS.values(), ids=SELECTORS)
def test_a_stored_first_chunk_is_exact_and_only_recomputed_when_everything_is(config):
    blend = blended(decoder("llama"), LAYOUT, config)
    first = set(range(*LAYOUT.chunk_spans[0]))
    rows = set(blend.selection.rows.tolist())
    assert first <= rows if config.selector == "all" else not first & rows
