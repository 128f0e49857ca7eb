"""Passes over addressed caches, as a GPU repeats them in graphs. A stand-in for the graph repeats the work itself."""

import logging
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from blends import assert_kv, consecutive, filled, greedy, views
from cases import make_layout
from models import decoder

from blend.config import BlendConfig
from blend.model.addressed_pass import AddressedPass, Part, Result, Watch
from blend.model.cache import BlendedCache
from blend.model.decoder import Decoder
from blend.model.driver import RowDriver
from blend.model.graphs import EAGER_USES, Capture, RowGraphs
from blend.model.passes import RowRequest, run_steps
from blend.prefill.blender import Blend
from blend.select.base import scoring_layers

# Attention with a window, soft-caps, sinks, rotation of a part.
FAMILIES = ("llama", "mistral", "gemma2", "gpt-oss", "phi")
LAYOUT = make_layout(chunks=(20, 33, 7))
GUIDED = BlendConfig("query_guided", ratio=0.2)
assert_near = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def into(result: Result, computed: Result) -> None:
    for target, source in zip(result, computed, strict=True):
        if target is not None and source is not None:
            target.copy_(source)


def repeat(forward: AddressedPass) -> tuple[Result, list[Part]]:
    """What a graph does: the same work on the same buffers, into the same result. All but the last part do nothing here."""
    result = Result(*(None if tensor is None else tensor.clone() for tensor in forward.run()))
    ends = [*forward.cuts, forward.depth]
    idle = [Part(end, lambda: None) for end in ends[:-1]]
    return result, [*idle, Part(ends[-1], lambda: into(result, forward.run()))]


def noting(replays: list[tuple[int, bool]]) -> Capture:
    """Graphs that note when they run: their rows, and whether they watch a question."""

    def capture(forward: AddressedPass) -> tuple[Result, list[Part]]:
        result, parts = repeat(forward)
        size = (forward.rows, forward.watch is not None)
        return result, [*parts, Part(forward.depth, lambda: replays.append(size))]

    return capture


def graphed(name: str = "llama", capture: Capture = repeat) -> Decoder:
    """A decoder of its own with graphs."""
    made = Decoder(decoder(name).model)
    made.graphs = RowGraphs(made, made.rotations, capture)
    return made


def blended(dec: Decoder, config: BlendConfig = GUIDED) -> Blend:
    return filled(dec, LAYOUT, config).prefill(LAYOUT)


def caches_of(dec: Decoder, lengths: tuple[int, ...], room: int = 4) -> list[BlendedCache]:
    """Full caches of random prompts."""
    made = []
    for number, length in enumerate(lengths):
        made.append(dec.new_cache(length + room))
        ids = torch.randint(dec.vocabulary, (1, length), generator=torch.Generator().manual_seed(number))
        RowDriver.prefill(dec, [consecutive(ids, 0, made[-1])])
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_and_a_question_equal_ordinary_passes(name):
    dec, plain = graphed(name), decoder(name)
    for bucket in (1, 4, 64):
        assert dec.graphs.capture(bucket), dec.graphs.off
    mine, others = (caches_of(one, (40, 11, 25)) for one in (dec, plain))
    for step in range(3):
        ids = [torch.tensor([[3 + step + number]]) for number in range(3)]
        assert_near(dec.decode(ids, mine), plain.decode(ids, others))
    logits, question = [], torch.arange(30)[None] % dec.vocabulary
    for one, caches in ((dec, mine), (plain, others)):
        caches[0].reserve(80)
        logits.append(one.prefill([consecutive(question, 43, caches[0])]))
    assert_near(*logits)
    for one, other in zip(mine, others, strict=True):
        assert_kv(views(one), views(other), compare=assert_near)


def test_a_prompt_may_begin_in_a_graph():
    dec, ids = graphed(), torch.arange(3, 8)[None]
    assert dec.graphs.capture(8)
    alone, plain = caches_of(dec, (12, 12))
    for cache in (alone, plain):
        cache.truncate(0)
    logits = dec.graphs.logits([consecutive(ids, 0, alone)])
    assert_near(logits, RowDriver.prefill(dec, [consecutive(ids, 0, plain)]))
    assert_kv(views(alone), views(plain), compare=assert_near)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek-v3", None),  # the model changes what its cache returns
        ("gemma3n", "layers of the model share keys and values"),
        ("qwen3-next", "the model has recurrent layers"),
    ],
)
def test_models_that_no_graph_takes(name, reason):
    dec = graphed(name)
    assert dec.graphs.logits([]) is None
    assert dec.graphs.off == reason
    assert reason or not dec.reads_caches


@pytest.mark.parametrize(
    ("config", "buckets"),
    [(BlendConfig("none"), {(1, False), (8, False)}), (GUIDED, {(1, False), (64, False), (8, True)})],
    ids=["none", "query_guided"],
)
def test_answers_are_the_same(config, buckets):
    replays = list[tuple[int, bool]]()
    dec, plain = graphed("llama", noting(replays)), decoder("llama")
    for _ in range(EAGER_USES + 1):
        blended(dec, config)
    while 64 not in dec.graphs.captured:
        assert dec.graphs.capture_next()
    replays.clear()
    answer = greedy(blended(dec, config), 40)
    assert replays.count((1, False)) == 39
    assert set(replays) == buckets
    assert greedy(blended(plain, config), 40) == answer


def test_a_question_waits_for_the_layers_of_each_part(monkeypatch):
    dec = graphed()
    assert dec.kv_layers == 4
    monkeypatch.setattr("blend.model.addressed_pass.PART_LAYERS", 1)
    assert dec.graphs.capture(64, Watch((0, 1), peak=True))
    assert dec.graphs.capture(64)
    waited, (cache,) = list[int](), caches_of(dec, (12,), room=30)
    request = consecutive(torch.ones(1, 30, dtype=torch.int64), 12, cache, await_layer=waited.append)
    assert dec.graphs.watched(request, Watch((0, 1), peak=True)) is not None
    assert waited == [0, 1]
    assert dec.graphs.logits([request]) is not None
    assert waited == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_a_question_equals_that_of_an_ordinary_pass(name):
    replays = list[tuple[int, bool]]()
    dec, ordinary = graphed(name, noting(replays)), blended(decoder(name))
    for _ in range(EAGER_USES + 1):
        found = blended(dec)
    assert (8, True) in replays
    assert_near(found.selection.scores, ordinary.selection.scores)
    assert torch.equal(found.selection.rows, ordinary.selection.rows)
    assert_near(found.logits, ordinary.logits)


def test_a_graph_is_captured_after_some_uses():
    dec = graphed()
    cache = caches_of(dec, (12,), room=1)[0]  # grows on the way
    for use in range(EAGER_USES + 2):
        dec.append(torch.tensor([[5]]), cache)
        assert dec.graphs.captured == ((1,) if use >= EAGER_USES else ())
    assert cache.get_seq_length() == 12 + EAGER_USES + 2


def test_what_no_graph_computes():
    dec = graphed()
    graphs = dec.graphs
    assert all(map(graphs.capture, (16, 64)))
    ids = torch.zeros(1, 9, dtype=torch.int64)
    assert graphs.logits([consecutive(ids, 0, dec.new_cache(9))]) is None, "a cache without buffers"
    steps = [consecutive(torch.tensor([[1]]), 12, cache) for cache in caches_of(dec, (12,) * 17)]
    assert graphs.logits(steps[:16]) is not None
    assert graphs.logits(steps) is None
    assert graphs.logits([replace(steps[0], mask="bottom-right")]) is None


def test_beside_other_prompts_a_question_with_a_graph_runs_alone():
    dec = graphed()
    blender = filled(dec, LAYOUT, GUIDED)

    watched = list[bool]()

    def run(request: RowRequest) -> torch.Tensor:
        watched.append(request.observe is not None)
        return dec.prefill([request])

    ordinary = run_steps(blender.steps(LAYOUT, most_rows=1000), run)
    assert watched == [True, False]
    while len(dec.graphs.captured) < 6:
        assert dec.graphs.capture_next()
    watch = Watch(scoring_layers("middle", dec.attending), peak=True)
    assert dec.graphs.capture(8, watch)
    found = run_steps(blender.steps(LAYOUT, most_rows=1000), run)
    assert watched[2:] == [False]
    assert torch.equal(found.selection.rows, ordinary.selection.rows)
    assert_near(found.logits, ordinary.logits)


def test_a_question_may_give_logits_as_well():
    dec = graphed()
    watch = Watch((1, 2), peak=False, logits=True)
    assert dec.graphs.capture(8, watch)
    request, same = (consecutive(torch.arange(5)[None], 12, *caches_of(dec, (12,), room=5)) for _ in range(2))
    found = dec.graphs.watched(request, watch)
    assert found.logits is not None
    assert found.masses.shape == (2, 1, 17)
    assert found.masses.sum(2).flatten().tolist() == pytest.approx([5 * dec.config.num_attention_heads] * 2, rel=1e-4)
    assert_near(found.logits, RowDriver.prefill(dec, [same]))


def wrong_by_a_bit(forward: AddressedPass) -> tuple[Result, list[Part]]:
    result, parts = repeat(forward)

    def slightly_wrong() -> None:
        result.logits.view(torch.int32)[0, 0] ^= 1

    return result, [*parts, Part(forward.depth, slightly_wrong)]


def forgets_the_caches(forward: AddressedPass) -> tuple[Result, list[Part]]:
    """A graph in which the first caches stay."""
    return repeat(forward)[0], [Part(forward.depth, lambda: None)]


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (wrong_by_a_bit, "differs from the eager pass"),
        (forgets_the_caches, "differs from the eager pass"),
        (Mock(side_effect=RuntimeError("not permitted while capturing")), "not permitted"),
    ],
)
def test_what_is_wrong_is_switched_off_once(capture, reason, caplog):
    dec = graphed("llama", capture)
    cache = caches_of(dec, (12,))[0]
    with caplog.at_level(logging.WARNING, "kvblend.graphs"):
        for _ in range(EAGER_USES + 3):
            logits = dec.append(torch.tensor([[5]]), cache)
    assert reason in (dec.graphs.off or "")
    assert len(caplog.records) == 1
    assert "blend env" in caplog.text
    assert logits.isfinite().all()
    assert not dec.graphs.capture_next()


def test_a_capture_within_a_prefill_calls_none_of_its_hooks():
    """An event that a hook records on a stream under capture can never be waited for."""
    heads, heads_at_end = list[str](), list[int]()

    def capture(forward: AddressedPass) -> tuple[Result, list[Part]]:
        captured = repeat(forward)
        heads_at_end.append(len(heads))
        return captured

    dec = graphed("llama", capture)
    cache = caches_of(dec, (12,))[0]
    with dec.before_head(lambda: heads.append("head")):
        for _ in range(EAGER_USES + 1):
            dec.append(torch.tensor([[5]]), cache)
    assert heads_at_end == [EAGER_USES]
