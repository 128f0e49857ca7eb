"""Chunk reuse for decoders with recurrent layers: what one chunk does to a state is stored, and composed in any order.

The families are tiny and random, their states last longer than a chunk. The reference is the model's own forward pass.
"""

from functools import partial
from typing import Any

import pytest
import torch
from blends import consecutive, filled, greedy, greedy_by_transformers, prefill_in_steps, refused
from cases import blended, make_layout
from dense_reference import assert_close
from layouts import marked
from models import HYBRIDS, build, decoder

from blend.chunks.encode import ChunkEncoder
from blend.config import BlendConfig
from blend.errors import ConfigError
from blend.layout import LEAST_LEAD, PromptLayout, lead_of
from blend.model.cache import BlendedCache, Run
from blend.model.decoder import Decoder, full_prefill
from blend.model.passes import RowRequest, run_steps
from blend.model.recurrent import Decay, Transform, find_kind
from blend.prefill.blender import Blend
from blend.select import SELECTORS
from blend.store.admin import verify_entry
from blend.types import ChunkCache
from blend.verified import keep_result
from tests.store.reading import flip, path_of

LENGTHS = (24, 15, 1, 30)
CLOSE = 2e-5  # of the largest entry; other orders of sums
# matrices, decays, both in one layer with attention, convolutions
ONE_OF_A_KIND = ("qwen3.5", "bamba", "falcon-h1", "lfm2")

assert_close = partial(assert_close, tolerance=CLOSE)
every_family = pytest.mark.parametrize("name", HYBRIDS)
each_kind = pytest.mark.parametrize("name", ONE_OF_A_KIND)
COMPOSED, LAST_CHUNK = {"states": "composed"}, {"states": "last-chunk"}
States = list[tuple[torch.Tensor, ...]]


def _states(cache: BlendedCache, rows: int) -> States:
    """The states of the recurrent layers behind these rows."""
    return [layer for layer in cache.states(rows) if layer]


def _true_states(dec: Decoder, layout: PromptLayout) -> States:
    """Those of the model's own cache."""
    cache, found = full_prefill(dec, layout).cache, []
    for index in dec.recurrent:
        layer = cache.layers[index]
        parts = [*layer.conv_states.values(), layer.recurrent_states[0]]
        found.append(tuple(part for part in parts if part is not None))
    return found


def _assert_states(found: States, expected: States) -> None:
    assert found
    for parts, expected_parts in zip(found, expected, strict=True):
        for part, expected_part in zip(parts, expected_parts, strict=True):
            assert_close(part, expected_part)


def _assert_first_state(blend: Blend, layout: PromptLayout) -> None:
    """Layer 0 is left as it is behind the whole of this prompt: its inputs do not depend on the rows before."""
    _assert_states(_states(blend.cache, blend.layout.rows)[:1], _true_states(blend.decoder, layout)[:1])


def _assert_exact(blend: Blend) -> None:
    assert_close(blend.logits, full_prefill(blend.decoder, blend.layout).logits)
    _assert_states(_states(blend.cache, blend.layout.rows), _true_states(blend.decoder, blend.layout))


@every_family
def test_kinds_are_measured(name):
    kinds = {layer.kind for layer in decoder(name).recurrent.values()}
    delta = name in ("qwen3.5", "qwen3.5-moe", "qwen3-next", "olmo-hybrid", "kimi-linear")
    assert kinds == {None if name == "lfm2" else Transform(right=False) if delta else Decay(a_head=True)}


@pytest.mark.parametrize(
    ("name", "chunks", "options"),
    [
        *((name, LENGTHS, {"ratio": 1.0}) for name in HYBRIDS),
        *((name, LENGTHS, {"ratio": 1.0, "states": "last-chunk"}) for name in ONE_OF_A_KIND),
        *((name, (30, 30, 30), {"ratio": 0.95, "states": "last-chunk"}) for name in ONE_OF_A_KIND),
        ("qwen3.5", (LEAST_LEAD, 1, 2), {}),  # no longer than their leads
    ],
    ids=str,
)
def test_where_all_chunks_are_computed_it_is_full_recompute(name, chunks, options):
    blend = blended(decoder(name), make_layout(chunks=chunks), BlendConfig(**options))
    assert all(blend.hits)
    _assert_exact(blend)


@every_family
def test_the_first_chunk_behind_its_prefix_is_exact(name):
    blend = blended(decoder(name), make_layout(chunks=(40,)))
    assert blend.rows_recomputed == lead_of(40) + len(blend.layout.suffix)
    _assert_exact(blend)
    assert blend.exact_rows == blend.layout.rows


@every_family
def test_composition_is_exact_at_layer_0(name):
    plain = make_layout(chunks=LENGTHS)
    chunks = tuple(plain.chunks[i] for i in (3, 1, 0, 2))
    layout = PromptLayout.of_chunks(plain.prefix, chunks, plain.suffix)
    blend = filled(decoder(name), plain).prefill(layout)
    assert blend.rows_recomputed < blend.layout.rows - 30
    _assert_first_state(blend, layout)


@each_kind
def test_a_part_from_the_lead_to_the_end_is_composed(name):
    plain = make_layout(chunks=(50, 60))
    blender, (first, last) = filled(decoder(name), plain), plain.chunks

    def prefilled(last_part: slice, first_part: slice) -> Blend:
        chosen = PromptLayout.of_chunks(plain.prefix, (last[last_part], first[first_part]), plain.suffix)
        return blender.prefill(marked(chosen, parts={0: (last, last_part.start), 1: (first, first_part.start)}))

    blend = prefilled(slice(2, None), slice(3, None))
    assert all(blend.hits)
    assert blend.rows_recomputed == (lead_of(60) - 2) + (lead_of(50) - 3) + len(plain.suffix)
    _assert_first_state(blend, blend.layout)
    blend = prefilled(slice(0, -1), slice(5, None))
    assert not any(blend.hits), "one lacks its last row, the other its whole lead"
    _assert_exact(blend)


@every_family
def test_the_default_computes_leads_and_question(name):
    blend = blended(decoder(name), make_layout(chunks=LENGTHS))
    expected = [torch.arange(span.start, span.start + lead_of(span.length)) for span in blend.layout.chunk_spans]
    expected.append(torch.arange(blend.layout.context.stop, blend.layout.rows))
    assert torch.equal(blend.selection.rows, torch.cat(expected))
    assert not blend.notes
    assert blend.logits.isfinite().all()


@each_kind
def test_a_larger_budget_computes_whole_chunks_nearer_to_full_recompute(name):
    layout = make_layout(chunks=(30, 30, 30))
    little, more, both = (blended(decoder(name), layout, BlendConfig(ratio=ratio)) for ratio in (0.15, 0.7, 0.95))
    rows = set(more.selection.rows.tolist())
    computed = sorted(len(rows & set(range(*span))) for span in layout.chunk_spans[1:])
    assert computed == [lead_of(30), 30], "the budget has room for one of the two stale chunks"
    assert rows & set(range(*layout.chunk_spans[0])) == set(range(len(layout.prefix), len(layout.prefix) + lead_of(30)))
    assert more.selection.scores is not None, "the question's attention chose"
    true = full_prefill(decoder(name), layout).logits
    assert_close(both.logits, true)
    assert (little.logits - true).abs().max() > CLOSE * true.abs().max()


@each_kind
def test_chosen_chunks_are_computed_from_true_states(name):
    """With the second chunk computed whole behind an exact first one, its end is exact, whatever the question's pass left."""
    layout = make_layout(chunks=(30, 30))
    blend = blended(decoder(name), layout, BlendConfig(ratio=0.9))
    assert blend.selection.scores is not None
    assert blend.rows_recomputed == lead_of(30) + 30 + len(layout.suffix)
    _assert_exact(blend)


@each_kind
@pytest.mark.parametrize("text_between", [False, True])
def test_the_last_chunks_state_alone(name, text_between):
    """Layer 0 behind the prompt is as if the chunks before the last had never been there."""
    layout = marked(make_layout(chunks=(24, 20, 9, 30)), plain=[2] if text_between else [])
    blender = filled(decoder(name), layout)
    blend = blender.prefill(layout, config=BlendConfig(states="last-chunk"))
    assert sum(blend.hits) == 4 - text_between
    last = PromptLayout.of_chunks(layout.prefix, layout.chunks[-1:], layout.suffix)
    _assert_first_state(blend, last)
    if name != "lfm2":  # convolutions forget the other chunks either way
        with pytest.raises(AssertionError):
            _assert_first_state(blender.prefill(layout, config=BlendConfig(states="composed")), last)


@each_kind
def test_a_prefix_that_runs_with_the_chunks_is_where_they_start(name):
    """Another prefix than the caches' has no known state before the pass."""
    plain = make_layout(chunks=(24, 20, 30))
    blender = filled(decoder(name), plain, BlendConfig("none", states="last-chunk"))
    prefix = (*plain.prefix[::-1], 9, 8, 7)
    layout = PromptLayout.of_chunks(prefix, plain.chunks, plain.suffix, plain.prefix)
    for most_rows in (None, 5):
        blend = prefill_in_steps(blender, layout, most_rows=most_rows)
        assert blend.rows_recomputed < layout.rows - 30
        _assert_first_state(blend, PromptLayout.of_chunks(prefix, plain.chunks[-1:], plain.suffix))


@each_kind
def test_the_states_that_verification_found_best_are_used(name, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path))
    layout, dec = make_layout(chunks=(24, 20, 30)), decoder(name)
    composed, last, before = (blended(dec, layout, BlendConfig(**states)) for states in (COMPOSED, LAST_CHUNK, {}))
    assert not torch.equal(composed.logits, last.logits)
    assert torch.equal(before.logits, composed.logits)
    keep_result(dec, {"decision": "kept", **LAST_CHUNK})
    assert torch.equal(blended(dec, layout).logits, last.logits)


@each_kind
def test_operators_of_pieces_join_to_that_of_the_whole(name):
    encoder = ChunkEncoder(decoder(name), tuple(range(3, 9)))

    def encoded(most_rows: int) -> ChunkCache:
        steps = encoder.steps(tuple(range(10, 50)), most_rows)
        return run_steps(steps, lambda request: decoder(name).prefill([request]))

    whole, pieces = encoded(100), encoded(7)
    assert whole.lead == pieces.lead == lead_of(40)
    _assert_states(pieces.operators, whole.operators)
    assert [bool(one) for one in whole.operators] == [i in decoder(name).recurrent for i in range(4)]


@each_kind
@pytest.mark.parametrize(("ratio", "states"), [(0.15, "composed"), (0.7, "composed"), (0.7, "last-chunk")])
def test_rows_in_pieces_are_rows_at_once(name, ratio, states):
    layout = make_layout(chunks=(30, 20, 25), suffix=12)
    blender = filled(decoder(name), layout, BlendConfig(ratio=ratio, states=states))
    once, pieces = (prefill_in_steps(blender, layout, most_rows=most_rows) for most_rows in (None, 5))
    assert torch.equal(pieces.selection.rows, once.selection.rows)
    assert_close(pieces.logits, once.logits)
    _assert_states(*(_states(blend.cache, layout.rows) for blend in (pieces, once)))


@each_kind
def test_prompts_in_one_pass_do_not_see_each_other(name):
    dec, generator = decoder(name), torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 90, (1, rows), generator=generator) for rows in (13, 1, 20)]

    def requests() -> list[RowRequest]:
        return [consecutive(one, 0, dec.new_cache(21)) for one in ids]

    alone, together = requests(), requests()
    assert_close(dec.prefill(together), torch.cat([dec.prefill([one]) for one in alone]))
    token = torch.tensor([[5]])
    steps = [dec.decode([token], [one.cache]) for one in alone]
    assert_close(dec.decode([token] * 3, [one.cache for one in together]), torch.cat(steps))


@every_family
def test_greedy_decoding_is_that_of_the_same_states_in_transformers(name):
    dec = decoder(name)
    blend = blended(dec, make_layout(chunks=LENGTHS))
    for _ in range(2):
        ours = greedy(blend, 8)
        blend.rewind()
        cache = {dec.cache_argument: dec.native_cache(blend.cache)}
        theirs = greedy_by_transformers(dec, (*blend.layout.token_ids, blend.first_token), 7, **cache)
        assert ours == (blend.first_token, *theirs)


@each_kind
def test_a_copy_of_a_cache_goes_on_by_itself(name):
    dec = decoder(name)
    blend = blended(dec, make_layout(chunks=LENGTHS))
    copy, token = blend.cache.clone(4), torch.tensor([[7]])
    first = dec.append(token, blend.cache)
    dec.append(token, blend.cache)
    copy.truncate(blend.layout.rows)
    assert torch.equal(dec.append(token, copy), first)


@each_kind
def test_a_state_that_is_not_kept_is_none(name):
    blend = blended(decoder(name), make_layout(chunks=(20,)))
    assert blend.cache.states(blend.layout.rows) is not None
    assert blend.cache.states(blend.layout.rows - 1) is None


def test_a_state_without_heads_can_only_decay():
    """Heads keep matrices small: one over all channels would be too large to store."""
    factors = torch.linspace(0.2, 0.9, 12).reshape(4, 3)
    assert find_kind(lambda states: factors * states, torch.ones(1, 4, 3)) == Decay(a_head=False)
    matrix = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert find_kind(lambda states: matrix @ states, torch.ones(1, 4, 3)) is None
    assert find_kind(lambda states: matrix @ states, torch.ones(1, 2, 4, 3)) == Transform(right=False)


def test_what_a_mixer_gets_besides_rows_reaches_it_whole():
    """A scale of its output, say, which the model hands to each of its recurrent layers."""
    model = build(HYBRIDS["bamba"])
    scale = torch.linspace(0.5, 1.5, model.config.hidden_size)

    def with_scale(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "scale": scale}

    def scaled(forward: Any, *args: Any, scale: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return forward(*args, **kwargs) * scale

    for layer in (model.model.layers[index] for index in decoder("bamba").recurrent):
        layer.mamba.forward = partial(scaled, layer.mamba.forward)
        layer.mamba.register_forward_pre_hook(with_scale, with_kwargs=True)
    blend = blended(Decoder(model), make_layout(chunks=LENGTHS), BlendConfig(ratio=1.0))
    assert_close(blend.logits, full_prefill(blend.decoder, blend.layout).logits)


@each_kind
def test_a_failed_row_can_run_again(name):
    """The engine repeats decoding steps of a pass that failed; a state must not have taken the row in twice."""
    dec = decoder(name)
    blend = blended(dec, make_layout(chunks=(20,)))
    token, rows = torch.tensor([[7]]), torch.tensor([blend.layout.rows + 1])
    dec.append(token, blend.cache)
    clone = blend.cache.clone(2)

    def fail(layer: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dec.prefill([RowRequest(token, Run.read(rows), clone, observe=fail)])
    clone.truncate(blend.layout.rows + 1)
    assert torch.equal(dec.append(token, clone), dec.append(token, blend.cache))


@each_kind
def test_chunks_kept_behind_another_prefix_serve(name):
    """The prompt's own prefix runs first; the question's pass and the recompute both go on behind it."""
    plain = make_layout(chunks=(30, 30, 30))
    layout = PromptLayout.of_chunks((9, 8, 7), plain.chunks, plain.suffix, canonical_prefix=plain.prefix)
    blend = filled(decoder(name), layout, BlendConfig(ratio=0.6)).prefill(layout)
    assert all(blend.hits)
    assert blend.selection.scores is not None
    assert blend.rows_recomputed < layout.rows - 20
    _assert_first_state(blend, layout)


@pytest.mark.parametrize("selector", SELECTORS)
def test_selectors_of_single_rows_are_refused(selector):
    def prefilled() -> Blend:
        return blended(decoder("bamba"), make_layout(chunks=(12, 12)), BlendConfig(selector, ratio=0.5))

    if SELECTORS[selector].takes_whole_chunks:
        assert prefilled().logits.isfinite().all()
        return
    with refused(ConfigError, rf"selector {selector}.*recurrent.*use query_guided, all, none"):
        prefilled()


def test_fewer_rows_than_the_leads_are_said():
    blend = blended(decoder("bamba"), make_layout(chunks=(40, 40)), BlendConfig(ratio=0.05))
    assert blend.rows_recomputed == 2 * lead_of(40) + len(blend.layout.suffix)
    assert "the first 15% of every chunk are always recomputed" in blend.notes[0]


# The store


@pytest.mark.parametrize(("name", "codec"), [*((name, "native") for name in ONE_OF_A_KIND), ("bamba", "int4")])
def test_operators_come_out_of_the_store_as_they_went_in(name, codec, tmp_path):
    layout = make_layout(chunks=(40,))
    library = filled(decoder(name), layout, location=tmp_path, codec=codec).library(layout.prefix)
    ((_, cache),) = library.isolated.encode(layout.chunks)
    (key,) = library.keys(layout.chunks)
    with library.store.open(key) as reader:  # type: ignore[union-attr]
        assert (reader.lead, reader.tokens, reader.layers) == (cache.lead, 40, 4)
        for index, parts in enumerate(cache.operators):
            stored = reader.operator(index)
            assert all(torch.equal(mine, true.flatten()) for mine, true in zip(stored, parts, strict=True))


@each_kind
def test_every_byte_of_an_entry_is_checked(name, tmp_path):
    """Damage anywhere, also in an operator, is found, computed again and replaced."""
    layout = make_layout(chunks=(24, 30))
    blender = filled(decoder(name), layout, location=tmp_path)
    expected = blender.prefill(layout)
    path = path_of(blender.store, blender.encoder(layout.prefix).identity.key(layout.chunks[1]))
    content = path.read_bytes()
    first = int.from_bytes(content[:8], "little") + 8
    for place in torch.linspace(first, len(content) - 1, 12).long().tolist():
        path.write_bytes(content)
        flip(path, place)
        assert "must be computed again" in verify_entry(blender.store, path.relative_to(tmp_path).as_posix())
        blend = blender.prefill(layout)
        assert blend.problems
        assert blend.hits == (True, False)
    assert blender.remember(blend) == 1
    again = blender.prefill(layout)
    assert again.hits == (True, True)
    assert torch.equal(again.logits, expected.logits)


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1"])
def test_corrections_are_fitted_to_layers_with_kv(name):
    layout = make_layout(chunks=(30,) * 12, seed=3)
    blender = filled(decoder(name), layout)
    assert blender.calibrate(layout.prefix, layout.chunks)
    with_kv = [bool(rotation.width) for rotation in blender.decoder.rotations]
    fitted = [part is not None for part in blender.correction(layout.prefix).layers]
    assert fitted == [False, *with_kv[1:]], "layer 0 is exact"
    chosen = PromptLayout.of_chunks(layout.prefix, layout.chunks[:4], layout.suffix)
    assert blender.prefill(chosen).logits.isfinite().all()


def test_entries_have_a_namespace_of_their_own():
    """What operators depend on besides the model changes the address."""
    assert "operators behind 0.15" in decoder("bamba").identity((3, 4)).model
    assert "operators" not in decoder("llama").identity((3, 4)).model
