"""No work on rows that are not needed, counted through the model's linear layers; no copy of the cache, no mask in memory."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from blends import Counts, counted_rows, filled, greedy, views
from cases import SELECTORS, make_layout
from dense_reference import assert_close
from models import CORE, LAYERS, build, decoder, tokenizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from blend.config import BlendConfig
from blend.eval.estimates import FixedRatio
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.model.passes import RowRequest, run_steps
from blend.prefill.blender import Blend, Blender
from blend.stopwatch import STAGES, Stopwatch

LAYOUT = make_layout()
# The first chunk stands where it was computed, right behind the prefix: its stored KV is exact, none of its rows is run.
OPEN = LAYOUT.rows - LAYOUT.chunk_spans[0].stop


def _prefill(name: str, config: BlendConfig) -> tuple[Blend, Counts]:
    blender = filled(decoder(name), LAYOUT, config)
    with counted_rows(blender.decoder) as counts:
        blend = blender.prefill(LAYOUT)
    return blend, counts


def _requests(blender: Blender, layout: PromptLayout) -> tuple[Blend, list[RowRequest]]:
    """A prefill in steps, and the rows that it asked for."""
    requests = list[RowRequest]()

    def run(request: RowRequest) -> torch.Tensor:
        requests.append(request)
        return blender.decoder.prefill([request])

    return run_steps(blender.steps(layout), run), requests


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
REST = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize("check_layer", [1, 2])
@pytest.mark.parametrize("name", CORE)
def test_hkvd_runs_all_rows_only_below_the_check_layer_and_in_its_qkv_projection(name, check_layer):
    blend, counts = _prefill(name, BlendConfig(f"hkvd:check_layer={check_layer}", ratio=0.2))
    chosen = blend.rows_recomputed
    assert chosen == round(0.2 * LAYOUT.context.length) + len(LAYOUT.suffix)
    for layer in range(LAYERS - 1):
        qkv, rest = ([counts[f"{layer}.{part}"] for part in parts] for parts in (QKV, REST))
        if layer == check_layer:
            assert all(seen in ([OPEN, chosen], [OPEN]) for seen in qkv)
            assert all(seen == [chosen] for seen in rest)
        else:
            rows = OPEN if layer < check_layer else chosen
            assert all(seen == [rows] for seen in (*qkv, *rest))
    assert counts["head"] == [1]
    assert counts["embed"] == [OPEN]


@pytest.mark.parametrize("selector", ["first_k", "none", "hkvd", "query_guided"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_last_layer_computes_keys_of_the_chosen_rows_and_the_rest_of_one(name, selector):
    blend, counts = _prefill(name, SELECTORS[selector])
    last = LAYERS - 1
    assert max(counts[f"{last}.self_attn.k_proj"]) == blend.rows_recomputed
    assert [counts[f"{last}.{part}"] for part in REST] == [[1]] * len(REST)
    assert counts["head"] == [1]


@pytest.mark.parametrize("selector", ["first_k", "random", "none"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_selectors_that_need_nothing_never_run_more_than_the_chosen_rows(name, selector):
    blend, counts = _prefill(name, SELECTORS[selector])
    assert blend.rows_recomputed < OPEN
    assert {max(seen) for seen in counts.values()} <= {blend.rows_recomputed, 1}
    assert all(seen == [blend.rows_recomputed] for name, seen in counts.items() if name[0] in "012")


@pytest.mark.parametrize("selector", ["first_k", "query_guided"])
def test_a_share_of_less_than_half_a_row_runs_the_question_alone(selector):
    _, counts = _prefill("llama", BlendConfig(selector, ratio=0.01))
    assert counts["embed"] == [len(LAYOUT.suffix)]


@pytest.mark.parametrize("config", [SELECTORS["all"], BlendConfig("query_guided", ratio=1.0)])
def test_rows_of_full_recompute_are_written_as_a_slice(config):
    """They follow each other, which the pass is told."""
    _, requests = _requests(filled(decoder("llama"), LAYOUT, config), LAYOUT)
    assert [request.run.start for request in requests] == [LAYOUT.context.start]


@pytest.mark.parametrize("name", ["qwen3.5", "bamba", "falcon-h1", "lfm2"])
def test_where_the_leads_of_chunks_are_enough_they_run_once_with_the_question(name):
    """As recurrent layers need it; an estimate of the quality then says that no more is to be recomputed."""
    layout = make_layout(chunks=(30, 30, 30))
    blender = filled(decoder(name), layout, BlendConfig(quality=1.0))
    blender.estimators = FixedRatio(0.05)
    blend, requests = _requests(blender, layout)
    assert [request.run.rows for request in requests] == [blend.rows_recomputed]
    assert_close(blend.logits, blender.prefill(layout, config=BlendConfig()).logits)


def test_the_query_looks_only_up_to_the_last_layer_it_scores():
    blend, counts = _prefill("llama", BlendConfig("query_guided:layers=0-1", ratio=0.2))
    suffix = len(LAYOUT.suffix)
    assert counts["0.mlp.up_proj"] == [suffix, blend.rows_recomputed]
    assert counts["1.self_attn.k_proj"] == [suffix, blend.rows_recomputed]
    assert counts["1.mlp.up_proj"] == [blend.rows_recomputed]
    assert counts["2.self_attn.k_proj"] == [blend.rows_recomputed]


@pytest.mark.parametrize("name", CORE)
def test_encoding_runs_the_prefix_once_and_stops_at_the_last_keys(name):
    dec = decoder(name)
    with counted_rows(dec) as counts:
        blender = filled(dec, LAYOUT, SELECTORS["none"])
        blender.prefill(LAYOUT)
        blender.prefill(LAYOUT)
    assert counts["embed"][0] == len(LAYOUT.prefix)
    assert counts["embed"].count(len(LAYOUT.prefix)) == 1
    assert counts["head"] == [1, 1], "encoding needs no logits"
    padded = len(LAYOUT.chunks) * max(map(len, LAYOUT.chunks))
    last = LAYERS - 1
    assert counts["embed"][1] <= padded
    assert counts[f"{last}.self_attn.k_proj"][:2] == [len(LAYOUT.prefix), counts["embed"][1]]
    assert counts[f"{last}.mlp.up_proj"] == [1, 1], "the last layer's MLP feeds no cache"


@pytest.mark.parametrize("name", CORE)
def test_decoding_runs_one_row_a_token_and_never_copies_the_cache(name):
    blend = filled(decoder(name), LAYOUT, SELECTORS["hkvd"]).prefill(LAYOUT, room=16)
    buffers = [tensor.data_ptr() for pair in views(blend.cache) for tensor in pair]
    with counted_rows(blend.decoder) as counts:
        greedy(blend, 16)
    assert [tensor.data_ptr() for pair in views(blend.cache) for tensor in pair] == buffers
    assert all(seen == [1] * 15 for seen in counts.values())


def test_decoding_past_the_room_moves_the_cache_rarely():
    blend = filled(decoder("llama"), LAYOUT, SELECTORS["hkvd"]).prefill(LAYOUT, room=0)
    places = list[tuple[int, ...]]()
    for _ in range(60):
        blend.append(torch.tensor([[3]]))
        places.append(tuple(tensor.data_ptr() for pair in views(blend.cache) for tensor in pair))
    assert blend.cache.get_seq_length() == LAYOUT.rows + 60
    moves = sum(before != after for before, after in pairwise(places))
    assert moves <= 2, "each time it grows by half"


class _Sizes(TorchDispatchMode):
    """How many numbers each result of each operation of this thread has; a view counts as what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [value.numel() for value in pytree.tree_leaves(out) if isinstance(value, torch.Tensor)]
        return out


@pytest.mark.parametrize("selector", ["hkvd", "random"])
def test_no_mask_of_rows_by_keys_is_ever_in_memory(selector):
    """With 2 x 16 numbers a row and layer in the cache, such a mask would be by far the largest tensor."""
    dec = Decoder(build(CORE["llama"], max_position_embeddings=4096), tokenizer(), "llama")
    layout = make_layout(chunks=(700, 700, 700, 700))
    blender = filled(dec, layout, replace(SELECTORS[selector], ratio=0.3))
    with _Sizes() as sizes:
        blend = blender.prefill(layout)
    assert max(sizes.seen) < blend.rows_recomputed * layout.rows / 2


def test_bytes_loaded_count_each_stored_chunk_once():
    blend = filled(decoder("llama"), LAYOUT, SELECTORS["none"]).prefill(LAYOUT)
    per_row = LAYERS * 2 * 2 * 16 * 4  # layers x (keys, values) x heads x head dim x float32
    assert blend.bytes_loaded == LAYOUT.context.length * per_row


@pytest.mark.parametrize("selector", SELECTORS)
def test_stages_hold_the_work_until_the_first_token(selector):
    blender = filled(decoder("llama"), LAYOUT, SELECTORS[selector])
    with _Sizes() as sizes:  # what is computed is the clock
        blend = blender.prefill(LAYOUT, watch=Stopwatch(clock=lambda: float(sum(sizes.seen))))
    assert set(blend.stages) <= set(STAGES)
    assert {"load", "reposition", "recompute", "first_token"} <= set(blend.stages)
    assert all(amount >= 0 for amount in blend.stages.values())
    assert 0.95 * blend.ttft_s < sum(blend.stages.values()) <= blend.ttft_s
