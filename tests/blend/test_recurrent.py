"""Chunk reuse for decoders with recurrent layers: what one chunk does to a state is stored, and composed in any order.

The families are tiny and random, their states last longer than a chunk. The reference is the model's own forward pass.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import blended, cache_chunks, make_layout
from layouts import marked
from models import HYBRIDS, build, decoder, tokenizer

from blend.checked import keep_result
from blend.chunks.encode import ChunkEncoder
from blend.config import BlendConfig
from blend.errors import ConfigError, PromptError
from blend.model.cache import BlendedCache, Run
from blend.model.decoder import Decoder, full_prefill
from blend.model.generate import generate
from blend.model.passes import RowRequest, run_steps
from blend.model.recurrent import Decay, Transform
from blend.prefill.blender import Blend, Blender
from blend.select import SELECTORS
from blend.store import ChunkStore, open_store
from blend.store.admin import verify_entry
from blend.types import LEAST_LEAD, ChunkCache, PromptLayout, lead_of

NEW = 8
LENGTHS = (24, 15, 1, 30)
CLOSE = 2e-5  # of the largest entry; other orders of sums
ONE_OF_A_KIND = (
    "qwen3.5",
    "bamba",
    "falcon-h1",
    "lfm2",
)  # matrices, decays, both in one layer with attention, convolutions

every_family = pytest.mark.parametrize("name", HYBRIDS)
each_kind = pytest.mark.parametrize("name", ONE_OF_A_KIND)


def _far(mine: torch.Tensor, true: torch.Tensor) -> float:
    assert mine.shape == true.shape
    return float((mine - true).abs().max() / true.abs().max().clamp_min(1e-6))


def _states(cache: BlendedCache, rows: int) -> list[tuple[torch.Tensor, ...]]:
    found = cache.states(rows)
    assert found
    return [layer for layer in found if layer]


def _true_states(given: Decoder, layout: PromptLayout) -> list[tuple[torch.Tensor, ...]]:
    """The states of the model's own cache behind the prompt, by recurrent layer."""
    cache, found = full_prefill(given, layout).cache, []
    for index in given.recurrent:
        layer = cache.layers[index]
        parts = [*layer.conv_states.values(), layer.recurrent_states[0]]
        found.append(tuple(part for part in parts if part is not None))
    return found


def _assert_states(blend: Blend, layers: int | None = None) -> None:
    mine, true = _states(blend.cache, blend.layout.rows), _true_states(blend.decoder, blend.layout)
    for some, others in list(zip(mine, true, strict=True))[:layers]:
        assert max(map(_far, some, others)) < CLOSE


def _assert_exact(blend: Blend) -> None:
    assert _far(blend.logits, full_prefill(blend.decoder, blend.layout).logits) < CLOSE
    _assert_states(blend)


@every_family
def test_kinds_are_measured(name):
    kinds = {layer.kind for layer in decoder(name).recurrent.values()}
    delta = name in ("qwen3.5", "qwen3.5-moe", "qwen3-next", "olmo-hybrid", "kimi-linear")
    assert kinds == {None if name == "lfm2" else Transform(right=False) if delta else Decay(a_head=True)}


@every_family
def test_ratio_1_is_full_recompute(name):
    blend = blended(decoder(name), make_layout(chunks=LENGTHS), BlendConfig(ratio=1.0))
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
    """The inputs of layer 0 do not depend on the rows before: what is composed there is what would have been computed."""
    plain = make_layout(chunks=LENGTHS)
    blender = cache_chunks(Blender(decoder(name), open_store("memory:", codec="native")), plain)
    chunks = tuple(plain.chunks[i] for i in (3, 1, 0, 2))
    blend = blender.prefill(PromptLayout.of_chunks(plain.prefix, chunks, plain.suffix))
    assert blend.rows_recomputed < blend.layout.rows - 30
    _assert_states(blend, layers=1)


@each_kind
def test_a_part_from_the_lead_to_the_end_is_composed(name):
    plain = make_layout(chunks=(50, 60))
    blender = cache_chunks(Blender(decoder(name), open_store("memory:", codec="native")), plain)
    first, last = plain.chunks
    chosen = PromptLayout.of_chunks(plain.prefix, (last[2:], first[3:]), plain.suffix)
    layout = marked(chosen, parts={0: (last, 2), 1: (first, 3)})
    blend = blender.prefill(layout)
    assert all(blend.hits)
    assert blend.rows_recomputed == (lead_of(60) - 2) + (lead_of(50) - 3) + len(plain.suffix)
    _assert_states(blend, layers=1)
    chosen = PromptLayout.of_chunks(plain.prefix, (last[:-1], first[5:]), plain.suffix)
    cut = marked(chosen, parts={0: (last, 0), 1: (first, 5)})
    blend = blender.prefill(cut)
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
    little, more = (blended(decoder(name), layout, BlendConfig(ratio=ratio)) for ratio in (0.15, 0.7))
    first, second, third = layout.chunk_spans
    rows = set(more.selection.rows.tolist())
    whole = [span for span in (second, third) if rows >= set(range(*span))]
    assert len(whole) == 1, "the budget has room for one of the two stale chunks"
    (other,) = {second, third} - set(whole)
    assert rows & set(range(*other)) == set(range(other.start, other.start + lead_of(30)))
    assert rows & set(range(*first)) == set(range(first.start, first.start + lead_of(30)))
    assert more.selection.scores is not None, "the question's attention chose"
    both = blended(decoder(name), layout, BlendConfig(ratio=0.95))
    true = full_prefill(decoder(name), layout).logits
    assert _far(both.logits, true) < CLOSE < _far(little.logits, true)


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
    layout = make_layout(chunks=(24, 20, 9, 30))
    layout = marked(layout, plain=[2] if text_between else [])
    blender = cache_chunks(Blender(decoder(name), open_store("memory:", codec="native")), layout)
    blend = blender.prefill(layout, config=BlendConfig(states="last-chunk"))
    assert sum(blend.hits) == 4 - text_between
    last = PromptLayout.of_chunks(layout.prefix, layout.chunks[-1:], layout.suffix)
    (mine, *_), (true, *_) = _states(blend.cache, layout.rows), _true_states(decoder(name), last)
    assert max(map(_far, mine, true)) < CLOSE
    if name != "lfm2":  # convolutions forget the other chunks either way
        composed = blender.prefill(layout, config=BlendConfig(states="composed"))
        assert max(map(_far, _states(composed.cache, layout.rows)[0], true)) > CLOSE


@each_kind
@pytest.mark.parametrize(("chunks", "ratio"), [((30, 30, 30), 0.95), (LENGTHS, 1.0)])
def test_the_last_chunks_state_is_the_true_one_where_all_chunks_are_computed(name, chunks, ratio):
    _assert_exact(blended(decoder(name), make_layout(chunks=chunks), BlendConfig(ratio=ratio, states="last-chunk")))


@each_kind
def test_a_prefix_that_runs_with_the_chunks_is_where_they_start(name):
    """Another prefix than the caches' has no known state before the pass."""
    plain = make_layout(chunks=(24, 20, 30))
    config = BlendConfig("none", states="last-chunk")
    blender = cache_chunks(Blender(decoder(name), open_store("memory:", codec="native"), config), plain)
    prefix = (*plain.prefix[::-1], 9, 8, 7)
    layout = PromptLayout.of_chunks(prefix, plain.chunks, plain.suffix, plain.prefix)
    true = _true_states(decoder(name), PromptLayout.of_chunks(prefix, plain.chunks[-1:], plain.suffix))[0]
    once = blender.prefill(layout)
    pieces = run_steps(blender.steps(layout, most_rows=5), lambda request: decoder(name).prefill([request]))
    for blend in (once, pieces):
        assert blend.rows_recomputed < layout.rows - 30
        assert max(map(_far, _states(blend.cache, layout.rows)[0], true)) < CLOSE


@each_kind
def test_the_states_that_verification_found_best_are_used(name, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path))
    layout, given, store = make_layout(chunks=(24, 20, 30)), decoder(name), open_store("memory:")

    def logits(config: BlendConfig | None = None) -> torch.Tensor:
        blender = cache_chunks(Blender(given, store), layout)
        return blender.prefill(layout, config=config).logits

    composed, last = (logits(BlendConfig(states=states)) for states in ("composed", "last-chunk"))
    assert not torch.equal(composed, last)
    assert torch.equal(logits(), composed)
    keep_result(given, {"decision": "kept", "states": "last-chunk"})
    assert torch.equal(logits(), last)


@each_kind
def test_operators_of_pieces_join_to_that_of_the_whole(name):
    encoder = ChunkEncoder(decoder(name), tuple(range(3, 9)))
    chunk = tuple(range(10, 50))

    def encoded(most_rows: int) -> ChunkCache:
        return run_steps(encoder.steps(chunk, most_rows), lambda request: decoder(name).prefill([request]))

    whole, pieces = encoded(100), encoded(7)
    assert whole.lead == pieces.lead == lead_of(40)
    for mine, true in zip(pieces.operators, whole.operators, strict=True):
        assert all(_far(*pair) < CLOSE for pair in zip(mine, true, strict=True))
    assert [bool(one) for one in whole.operators] == [i in decoder(name).recurrent for i in range(4)]


@each_kind
@pytest.mark.parametrize(("ratio", "states"), [(0.15, "composed"), (0.7, "composed"), (0.7, "last-chunk")])
def test_rows_in_pieces_are_rows_at_once(name, ratio, states):
    layout, config = make_layout(chunks=(30, 20, 25), suffix=12), BlendConfig(ratio=ratio, states=states)
    blender = cache_chunks(Blender(decoder(name), open_store("memory:"), config), layout)
    once = blender.prefill(layout)
    pieces = run_steps(blender.steps(layout, most_rows=5), lambda request: decoder(name).prefill([request]))
    assert torch.equal(pieces.selection.rows, once.selection.rows)
    assert _far(pieces.logits, once.logits) < CLOSE
    for mine, true in zip(_states(pieces.cache, layout.rows), _states(once.cache, layout.rows), strict=True):
        assert max(map(_far, mine, true)) < CLOSE


@each_kind
def test_prompts_in_one_pass_do_not_see_each_other(name):
    given, generator = decoder(name), torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 90, (1, rows), generator=generator) for rows in (13, 1, 20)]

    def request(one: torch.Tensor) -> RowRequest:
        return RowRequest(one, Run.consecutive(0, one.shape[1], one.device), given.new_cache(one.shape[1] + 1))

    alone, together = [request(one) for one in ids], [request(one) for one in ids]
    expected = torch.cat([given.prefill([one]) for one in alone])
    assert _far(given.prefill(together), expected) < CLOSE
    token = torch.tensor([[5]])
    steps = [given.decode([token], [one.cache]) for one in alone]
    assert _far(given.decode([token] * 3, [one.cache for one in together]), torch.cat(steps)) < CLOSE


@every_family
def test_greedy_decoding_is_that_of_the_same_states_in_transformers(name):
    given = decoder(name)
    blend = blended(given, make_layout(chunks=LENGTHS))
    ours = generate(given, blend, blend.layout.token_ids, max_new_tokens=NEW, eos_token_id=None).token_ids
    blend.rewind()
    assert generate(given, blend, blend.layout.token_ids, max_new_tokens=NEW, eos_token_id=None).token_ids == ours
    blend.rewind()
    ids = torch.tensor([[*blend.layout.token_ids, blend.first_token]])
    theirs = given.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW - 1,
        do_sample=False,
        eos_token_id=None,
        **{given.cache_argument: given.native_cache(blend.cache)},
    )
    assert ours == (blend.first_token, *theirs[0, ids.shape[1] :].tolist())


@each_kind
def test_a_copy_of_a_cache_goes_on_by_itself(name):
    given = decoder(name)
    blend = blended(given, make_layout(chunks=LENGTHS))
    copy, token = blend.cache.clone(4), torch.tensor([[7]])
    first = given.append(token, blend.cache)
    given.append(token, blend.cache)
    copy.truncate(blend.layout.rows)
    assert torch.equal(given.append(token, copy), first)


@each_kind
def test_a_failed_row_can_run_again(name):
    """The engine repeats decoding steps of a pass that failed; a state must not have taken the row in twice."""
    given = decoder(name)
    blend = blended(given, make_layout(chunks=(20,)))
    token, rows = torch.tensor([[7]]), torch.tensor([blend.layout.rows + 1])
    given.append(token, blend.cache)
    clone = blend.cache.clone(2)

    def fail(layer: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        given.prefill([RowRequest(token, Run.read(rows), clone, observe=fail)])
    clone.truncate(blend.layout.rows + 1)
    assert torch.equal(given.append(token, clone), given.append(token, blend.cache))


@each_kind
def test_chunks_kept_behind_another_prefix_serve(name):
    """The prompt's own prefix runs first; the question's pass and the recompute both go on behind it."""
    plain = make_layout(chunks=(30, 30, 30))
    layout = PromptLayout.of_chunks((9, 8, 7), plain.chunks, plain.suffix, canonical_prefix=plain.prefix)
    blender = Blender(decoder(name), open_store("memory:", codec="native"), BlendConfig(ratio=0.6))
    library = blender.library(layout.kept_behind)
    library.compute(library.missing(layout.chunks))
    blend = blender.prefill(layout)
    assert all(blend.hits)
    assert blend.selection.scores is not None
    assert blend.rows_recomputed < layout.rows - 20
    _assert_states(blend, layers=1)


def test_rows_without_a_state_before_them_are_refused():
    given = decoder("bamba")
    with pytest.raises(PromptError, match="no state in front of row 3"):
        given.prefill([RowRequest(torch.tensor([[5, 6]]), Run.read(torch.tensor([0, 3])), given.new_cache(4))])


@pytest.mark.parametrize("selector", SELECTORS)
def test_selectors_of_single_rows_are_refused_in_one_line(selector):
    config = BlendConfig(selector, ratio=0.5)
    layout = make_layout(chunks=(12, 12))
    if SELECTORS[selector].takes_whole_chunks:
        assert blended(decoder("bamba"), layout, config).logits.isfinite().all()
        return
    with pytest.raises(ConfigError, match=rf"selector {selector}.*recurrent.*use query_guided, all, none") as caught:
        blended(decoder("bamba"), layout, config)
    assert "\n" not in str(caught.value)


def test_fewer_rows_than_the_leads_are_said():
    blend = blended(decoder("bamba"), make_layout(chunks=(40, 40)), BlendConfig(ratio=0.05))
    assert blend.rows_recomputed == 2 * lead_of(40) + len(blend.layout.suffix)
    assert "the first 15% of every chunk are always recomputed" in blend.notes[0]


def test_chunks_as_short_as_their_lead_are_computed():
    blend = blended(decoder("qwen3.5"), make_layout(chunks=(LEAST_LEAD, 1, 2)))
    assert all(blend.hits)
    _assert_exact(blend)


# The store


@pytest.mark.parametrize(("name", "codec"), [*((name, "native") for name in ONE_OF_A_KIND), ("bamba", "int4")])
def test_operators_come_out_of_the_store_as_they_went_in(name, codec, tmp_path):
    blender = Blender(decoder(name), open_store(tmp_path / "kv", codec=codec))
    library = blender.library(tuple(range(3, 9)))
    chunk = tuple(range(10, 50))
    library.compute(library.missing([chunk]))
    ((_, cache),) = library.isolated.encode([chunk])
    (key,) = library.keys([chunk])
    with library.store.open(key) as reader:  # type: ignore[union-attr]
        assert (reader.lead, reader.tokens, reader.layers) == (cache.lead, 40, 4)
        for index, parts in enumerate(cache.operators):
            stored = reader.operator(index)
            assert all(torch.equal(mine, true.flatten()) for mine, true in zip(stored, parts, strict=True))


@each_kind
def test_every_byte_of_an_entry_is_checked(name, tmp_path):
    """Damage anywhere, also in an operator, is found, computed again and replaced."""
    layout = make_layout(chunks=(24, 30))
    store = open_store(tmp_path / "kv", codec="native")
    blender = Blender(decoder(name), store)
    library = blender.library(layout.prefix)
    library.compute(library.missing(layout.chunks))
    expected = blender.prefill(layout)
    (path,) = (tmp_path / "kv").rglob(f"{library.isolated.identity.key(layout.chunks[1]).digest}*")
    content = bytearray(path.read_bytes())
    first = int.from_bytes(content[:8], "little") + 8
    for place in torch.linspace(first, len(content) - 1, 12).long().tolist():
        _flip(path, content, place)
        assert "must be computed again" in verify_entry(store, path.relative_to(tmp_path / "kv").as_posix())
        blend = blender.prefill(layout)
        assert blend.problems
        assert blend.hits == (True, False)
        path.write_bytes(content)
    _flip(path, content, len(content) - 1)
    assert blender.remember(blender.prefill(layout)) == 1
    again = blender.prefill(layout)
    assert again.hits == (True, True)
    assert torch.equal(again.logits, expected.logits)


def _flip(path: Path, content: bytearray, place: int) -> None:
    damaged = bytearray(content)
    damaged[place] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1"])
def test_corrections_are_fitted_to_layers_with_kv(name):
    given = decoder(name)
    layout = make_layout(chunks=(30,) * 12, seed=3)
    blender = Blender(given, open_store("memory:"), BlendConfig())
    library = blender.library(layout.prefix)
    library.compute(library.missing(layout.chunks))
    blender.calibrate(layout.prefix, layout.chunks)
    found = blender.correction(layout.prefix)
    if found is not None:
        with_kv = [bool(rotation.width) for rotation in given.rotations]
        assert all(kv for part, kv in zip(found.layers, with_kv, strict=True) if part is not None)
    chosen = PromptLayout.of_chunks(layout.prefix, layout.chunks[:4], layout.suffix)
    assert blender.prefill(chosen).logits.isfinite().all()


def _store(folder: Path) -> ChunkStore:
    return open_store(folder / "kv", codec="native")


def test_another_process_reads_what_one_wrote(tmp_path):
    layout = make_layout(chunks=LENGTHS)
    first = Blender(decoder("qwen3.5"), _store(tmp_path))
    assert first.remember(first.prefill(layout)) == len(LENGTHS)
    again = Decoder(build(HYBRIDS["qwen3.5"]), tokenizer(), "again")
    blend = Blender(again, _store(tmp_path)).prefill(layout)
    assert all(blend.hits)
    assert torch.equal(blend.logits, first.prefill(layout).logits)


def test_entries_have_a_namespace_of_their_own():
    """What operators depend on besides the model changes the address."""
    given = decoder("bamba")
    assert "operators behind 0.15" in given.identity((3, 4)).model
    assert "operators" not in decoder("llama").identity((3, 4)).model
