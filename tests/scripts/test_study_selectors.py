"""The study's own selectors against plain loops and the model's own attention weights."""

from contextlib import ExitStack

import pytest
import torch
from cases import blended, cache_chunks, make_layout
from dense_reference import assert_close, dense_blend, dense_prefill, dense_reuse
from models import LAYERS, decoder, eager_model

from blend.config import BlendConfig
from blend.errors import ConfigError
from blend.prefill.blender import Blender
from blend.select import Evidence
from blend.store import open_store
from study.selectors import Blocks, Floors, Oracle, Sums, studied_selector

LAYOUT = make_layout()
SUFFIX = torch.arange(LAYOUT.context.stop, LAYOUT.rows)
CANDIDATES = torch.arange(LAYOUT.chunk_spans[0].stop, LAYOUT.context.stop)


def _blender(name: str) -> Blender:
    return cache_chunks(Blender(decoder(name), open_store("memory:")), LAYOUT)


def _scores(selector: Oracle | Sums) -> torch.Tensor:
    """What a selector gives every candidate, read off a selection of everything: scores are remembered by prompt."""
    selector.select(Evidence(LAYOUT, CANDIDATES, 3))
    (scores,) = selector.remembered.values()
    return scores[CANDIDATES]


def _weights(name: str, *, reused: bool) -> list[torch.Tensor]:
    """The model's own attention weights of the question's rows, `[heads, question, rows]` of each layer."""
    model = eager_model(name)
    stored = dense_reuse(model, LAYOUT.prefix, LAYOUT.chunks, len(LAYOUT.suffix))
    weights: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            hooks.enter_context(
                layer.self_attn.register_forward_hook(lambda _, args, out: weights.append(out[1][0, :, SUFFIX]))
            )
        if reused:
            dense_blend(model, LAYOUT.token_ids, stored, [SUFFIX] * LAYERS)
        else:
            dense_prefill(model, LAYOUT.token_ids)
    return weights


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_oracle_weighs_true_deviation_by_true_attention(name):
    exact = dense_prefill(eager_model(name), LAYOUT.token_ids).layers
    reused = dense_reuse(eager_model(name), LAYOUT.prefix, LAYOUT.chunks, 0)
    expected = torch.zeros(LAYOUT.rows)
    for layer, weights in enumerate(_weights(name, reused=False)):
        attention = weights.sum((0, 1))
        for row in CANDIDATES.tolist():
            distance = 0.0
            for true, stored in zip(exact[layer], reused[layer], strict=True):
                size = true[0].square().sum() / LAYOUT.rows
                distance += float((true[0, :, row] - stored[0, :, row]).square().sum() / size)
            expected[row] += attention[row] * distance**0.5
    assert_close(_scores(Oracle(blender=_blender(name))), expected[CANDIDATES])


@pytest.mark.parametrize("last", [0, 1])
def test_sums_score_by_attention_over_stored_caches(last):
    weights = torch.stack(_weights("llama", reused=True))[2:4]  # the middle band of four layers
    expected = weights[:, :, -last:].sum((0, 1, 2))
    assert_close(_scores(Sums(last=last, blender=_blender("llama"))), expected[CANDIDATES])


def _attention(budget: int) -> Evidence:
    attention = torch.rand(3, len(CANDIDATES), generator=torch.Generator().manual_seed(budget))
    return Evidence(LAYOUT, CANDIDATES, budget, query_attention=attention)


@pytest.mark.parametrize("budget", [1, 7, 12, 26])
def test_blocks_are_taken_whole_by_their_sums(budget):
    evidence = _attention(budget)
    scores = dict(zip(CANDIDATES.tolist(), evidence.query_attention.sum(0).tolist(), strict=True))
    ranked = []
    for span in LAYOUT.chunk_spans[1:]:
        for start in range(span.start, span.stop, 4):
            block = range(start, min(start + 4, span.stop))
            ranked += [(-sum(scores[row] for row in block), row) for row in block]
    expected = sorted(row for _, row in sorted(ranked)[:budget])
    assert Blocks(block=4, lead=0).select(evidence).tolist() == expected


def test_floors_give_every_chunk_its_part_first():
    """Of 12 rows, three chunks get two each; the last chunk but one has a single row."""
    evidence = _attention(12)
    scores = dict(zip(CANDIDATES.tolist(), evidence.query_attention.sum(0).tolist(), strict=True))
    chosen: list[int] = []
    for span in LAYOUT.chunk_spans[1:]:
        chosen += sorted(range(*span), key=lambda row: -scores[row])[:2]
    others = sorted(set(scores) - set(chosen), key=lambda row: -scores[row])
    expected = sorted([*chosen, *others][:12])
    assert Floors(floor=0.5, lead=0).select(evidence).tolist() == expected


@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_a_blend_by_the_oracle_recomputes_its_best_rows(ratio):
    """The store that the oracle reads is the one of the blend."""
    blender = _blender("llama")
    oracle = Oracle(blender=blender)
    blend = blender.prefill(LAYOUT, config=BlendConfig(oracle, ratio=ratio))
    budget = round(ratio * LAYOUT.context.length)
    scores = _scores(Oracle(blender=blender))
    best = CANDIDATES[scores.argsort(descending=True)[:budget].sort().values].tolist()
    assert blend.selection.rows.tolist() == [*best, *SUFFIX.tolist()]


def test_specs_name_the_studys_selectors_and_built_in_ones():
    blender = _blender("llama")
    assert studied_selector("oracle:lead=2", blender) == Oracle(lead=2, blender=blender)
    assert studied_selector("hkvd:of=k", blender).spec == "hkvd:of=k"
    assert studied_selector("blocks:layers=upper,block=8", blender) == Blocks("upper", block=8)
    with pytest.raises(ConfigError, match="unknown selector 'orakel'"):
        studied_selector("orakel", blender)
    assert blended(decoder("llama"), LAYOUT, BlendConfig(studied_selector("zsum", blender), ratio=0.3)).rows_recomputed
