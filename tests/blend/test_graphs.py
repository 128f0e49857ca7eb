"""Passes over addressed caches, as a GPU repeats them in graphs. A stand-in for the graph repeats the work itself."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import make_layout
from models import decoder

from blend.config import BlendConfig
from blend.model.addressed_pass import AddressedPass, Part, Result, Watch
from blend.model.cache import BlendedCache, Run
from blend.model.decoder import Decoder
from blend.model.driver import RowDriver
from blend.model.generate import generate
from blend.model.graphs import EAGER_USES, Capture, RowGraphs
from blend.model.passes import RowRequest, run_steps
from blend.prefill.blender import Blend, Blender
from blend.select.base import scoring_layers
from blend.store import open_store

# Attention with a window, soft-caps, sinks, rotation of a part, of pairs; then two that no graph takes.
FAMILIES = ("llama", "mistral", "gemma2", "gpt-oss", "phi", "deepseek-v3", "gemma3n", "qwen3-next")
LAYOUT = make_layout(chunks=(20, 33, 7))


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


def graphed(name: str, capture: Capture = repeat) -> Decoder:
    """A decoder of its own with graphs."""
    made = Decoder(decoder(name).model)
    made.graphs = RowGraphs(made, made.rotations, capture)
    return made


def blended(dec: Decoder, **config: object) -> Blend:
    blender = Blender(dec, open_store("memory:"), BlendConfig(**config))  # type: ignore[arg-type]
    library = blender.library(LAYOUT.prefix)
    library.compute(library.missing(LAYOUT.chunks))
    return blender.prefill(LAYOUT)


def caches_of(dec: Decoder, lengths: tuple[int, ...], room: int = 4) -> list[BlendedCache]:
    """Full caches of random prompts."""
    made = []
    for number, length in enumerate(lengths):
        cache = dec.new_cache(length + room)
        ids = torch.randint(dec.vocabulary, (1, length), generator=torch.Generator().manual_seed(number))
        RowDriver.prefill(dec, [RowRequest(ids, Run.consecutive(0, length, dec.device), cache)])
        made.append(cache)
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_and_a_question_equal_ordinary_passes(name):
    dec = graphed(name)
    graphs = dec.graphs
    if graphs.off is not None or not dec.reads_caches:
        assert graphs.logits([]) is None
        pytest.skip(graphs.off or "the model changes what its cache returns")
    for bucket in (1, 4, 64):
        assert graphs.capture(bucket), graphs.off
    mine, others = caches_of(dec, (40, 11, 25)), caches_of(dec, (40, 11, 25))
    for step in range(3):
        ids = [torch.tensor([[3 + step + number]]) for number in range(3)]
        got = dec.decode(ids, mine)
        dec.graphs = None
        torch.testing.assert_close(got, dec.decode(ids, others), rtol=1e-4, atol=1e-5)
        dec.graphs = graphs
    question = torch.arange(30)[None] % dec.vocabulary
    for caches in (mine, others):
        caches[0].reserve(80)
        request = RowRequest(question, Run.consecutive(43, 73, dec.device), caches[0])
        want = dec.prefill([request]) if caches is mine else RowDriver.prefill(dec, [request])
        got = want if caches is mine else got
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for one, other in zip(mine, others, strict=True):
        for layer in range(dec.kv_layers):
            for kv, wanted in zip(one.view(layer), other.view(layer), strict=True):
                torch.testing.assert_close(kv, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "buckets"),
    [
        ({"selector": "none"}, {(1, False), (8, False)}),
        ({"selector": "query_guided", "ratio": 0.2}, {(1, False), (64, False), (8, True)}),
    ],
    ids=str,
)
def test_answers_are_the_same(config, buckets):
    replays = list[tuple[int, bool]]()

    def noting(forward: AddressedPass) -> tuple[Result, list[Part]]:
        result, parts = repeat(forward)
        size = (forward.rows, forward.watch is not None)
        return result, [*parts, Part(forward.depth, lambda: replays.append(size))]

    dec = graphed("llama", noting)
    graphs, ids = dec.graphs, LAYOUT.token_ids
    for _ in range(EAGER_USES + 1):
        blended(dec, **config)
    while 64 not in graphs.captured:
        assert graphs.capture_next()
    replays.clear()
    answer = generate(dec, blended(dec, **config), ids, max_new_tokens=40).token_ids
    assert replays.count((1, False)) == 39
    assert set(replays) == buckets
    dec.graphs = None
    assert generate(dec, blended(dec, **config), ids, max_new_tokens=40).token_ids == answer


def test_a_question_waits_for_the_layers_of_each_part():
    dec = graphed("llama")
    assert dec.kv_layers == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blend.model.addressed_pass.PART_LAYERS", 1)
        assert dec.graphs.capture(64, Watch((0, 1), peak=True))
        assert dec.graphs.capture(64)
        waited = list[int]()
        run, cache = Run.consecutive(12, 42, dec.device), caches_of(dec, (12,), room=30)[0]
        request = RowRequest(torch.ones(1, 30, dtype=torch.int64), run, cache, await_layer=waited.append)
        assert dec.graphs.watched(request, Watch((0, 1), peak=True)) is not None
        assert waited == [0, 1]
        assert dec.graphs.logits([request]) is not None
        assert waited == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", FAMILIES[:6])
def test_attention_of_a_question_equals_that_of_an_ordinary_pass(name):
    dec = graphed(name)
    graphs = dec.graphs
    config = {"selector": "query_guided", "ratio": 0.2}
    ordinary, uses = blended(dec, **config), 0
    if graphs.off is not None or not dec.reads_caches:
        pytest.skip(graphs.off or "the model changes what its cache returns")
    watched = graphs.watched
    with pytest.MonkeyPatch.context() as patch:

        def counting(*args: Any) -> Result | None:
            nonlocal uses
            found = watched(*args)
            uses += found is not None
            return found

        patch.setattr(graphs, "watched", counting)
        for _ in range(EAGER_USES + 1):
            got = blended(dec, **config)
    assert uses, graphs.off
    assert ordinary.selection.scores is not None
    torch.testing.assert_close(got.selection.scores, ordinary.selection.scores, rtol=1e-4, atol=1e-5)
    assert torch.equal(got.selection.rows, ordinary.selection.rows)
    torch.testing.assert_close(got.logits, ordinary.logits, rtol=1e-4, atol=1e-4)


def test_a_graph_is_captured_after_some_uses():
    dec = graphed("llama")
    cache = caches_of(dec, (12,), room=1)[0]  # grows on the way
    for use in range(EAGER_USES + 2):
        dec.append(torch.tensor([[5]]), cache)
        assert dec.graphs.captured == ((1,) if use >= EAGER_USES else ())
    assert cache.get_seq_length() == 12 + EAGER_USES + 2


def test_what_no_graph_computes():
    dec = graphed("llama")
    graphs = dec.graphs
    assert all(graphs.capture(bucket) for bucket in (16, 64))
    ids, run = torch.zeros(1, 9, dtype=torch.int64), Run.consecutive(0, 9, dec.device)
    assert graphs.logits([RowRequest(ids, run, dec.new_cache(9))]) is None, "a cache without buffers"
    caches = caches_of(dec, (12,) * 17)
    steps = [RowRequest(torch.tensor([[1]]), Run.consecutive(12, 13, dec.device), cache) for cache in caches]
    assert graphs.logits(steps[:16]) is not None
    assert graphs.logits(steps) is None
    assert graphs.logits([replace(steps[0], mask="bottom-right")]) is None


def test_beside_other_prompts_a_question_with_a_graph_runs_alone():
    dec = graphed("llama")
    assert dec.graphs is not None
    blender = Blender(dec, open_store("memory:"), BlendConfig("query_guided", ratio=0.2))
    library = blender.library(LAYOUT.prefix)
    library.compute(library.missing(LAYOUT.chunks))

    def prefill() -> tuple[Blend, list[RowRequest]]:
        passes = list[RowRequest]()

        def run(request: RowRequest) -> torch.Tensor:
            passes.append(request)
            return dec.prefill([request])

        return run_steps(blender.steps(LAYOUT, most_rows=1000), run), passes

    ordinary, passes = prefill()
    assert [request.observe is not None for request in passes] == [True, False]
    while len(dec.graphs.captured) < 6:
        assert dec.graphs.capture_next()
    watch = Watch(scoring_layers("middle", dec.attending), peak=True)
    assert dec.graphs.capture(8, watch)
    found, passes = prefill()
    assert [request.observe is not None for request in passes] == [False]
    assert torch.equal(found.selection.rows, ordinary.selection.rows)
    torch.testing.assert_close(found.logits, ordinary.logits, rtol=1e-4, atol=1e-4)


def test_a_question_may_give_logits_as_well():
    dec = graphed("llama")
    watch = Watch((1, 2), peak=False, logits=True)
    assert dec.graphs.capture(8, watch)
    run, cache, other = Run.consecutive(12, 17, dec.device), *(caches_of(dec, (12,), room=5)[0] for _ in range(2))
    ids = torch.arange(5)[None]
    found = dec.graphs.watched(RowRequest(ids, run, cache), watch)
    assert found.logits is not None
    assert found.masses.shape == (2, 1, 17)
    assert found.masses.sum(2).flatten().tolist() == pytest.approx([5 * dec.config.num_attention_heads] * 2, rel=1e-4)
    wanted = RowDriver.prefill(dec, [RowRequest(ids, run, other)])
    torch.testing.assert_close(found.logits, wanted, rtol=1e-4, atol=1e-5)


def wrong_by_a_bit(forward: AddressedPass) -> tuple[Result, list[Part]]:
    result, parts = repeat(forward)

    def slightly_wrong() -> None:
        result.logits.view(torch.int32)[0, 0] ^= 1

    return result, [*parts, Part(forward.depth, slightly_wrong)]


def refused(forward: AddressedPass) -> tuple[Result, list[Part]]:
    raise RuntimeError("operation not permitted when stream is capturing")


def forgets_the_caches(forward: AddressedPass) -> tuple[Result, list[Part]]:
    """A graph in which the first caches stay."""
    return repeat(forward)[0], [Part(forward.depth, lambda: None)]


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (wrong_by_a_bit, "differs from the eager pass"),
        (forgets_the_caches, "differs from the eager pass"),
        (refused, "not permitted"),
    ],
)
def test_what_is_wrong_is_switched_off_once(capture, reason, caplog):
    dec = graphed("llama", capture)
    cache = caches_of(dec, (12,))[0]
    with caplog.at_level(logging.WARNING, "kvblend.graphs"):
        for _ in range(EAGER_USES + 3):
            got = dec.append(torch.tensor([[5]]), cache)
    assert reason in (dec.graphs.off or "")
    assert len(caplog.records) == 1
    assert "blend env" in caplog.text
    assert got.isfinite().all()
    assert not dec.graphs.capture_next()


def test_a_capture_within_a_prefill_calls_none_of_its_hooks():
    """An event that a hook records on a stream under capture can never be waited for."""
    seen = list[str]()

    def noting(forward: AddressedPass) -> tuple[Result, list[Part]]:
        seen.append("begin")
        found = repeat(forward)
        seen.append("end")
        return found

    dec = graphed("llama", noting)
    cache = caches_of(dec, (12,))[0]
    with dec.before_head(lambda: seen.append("head")):
        for _ in range(EAGER_USES + 1):
            dec.append(torch.tensor([[5]]), cache)
    assert seen[:EAGER_USES] == ["head"] * EAGER_USES
    assert "end" in seen
    assert "head" not in seen[EAGER_USES : seen.index("end")]
