"""Passes over addressed caches, as a GPU repeats them in graphs. A stand-in for the graph repeats the work itself."""

import logging
from collections.abc import Callable

import pytest
import torch
from cases import make_layout
from models import decoder

from blend.config import BlendConfig
from blend.model.cache import BlendedCache, Run
from blend.model.decoder import Decoder
from blend.model.forward import RowRequest
from blend.model.generate import generate
from blend.model.graphs import BUCKETS, EAGER_USES, Capture, RowGraphs
from blend.prefill.blender import Blend, Blender
from blend.store import open_store

# Attention with a window, soft-caps, sinks, rotation of a part, of pairs; then two that no graph takes.
FAMILIES = ("llama", "mistral", "gemma2", "gpt-oss", "phi", "deepseek-v3", "gemma3n", "qwen3-next")
LAYOUT = make_layout(chunks=(20, 33, 7))


def repeat(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """What a graph does: the same work on the same buffers, into the same result."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return result, replay


def graphed(name: str, capture: Capture = repeat) -> Decoder:
    """A decoder of its own with graphs."""
    made = Decoder(decoder(name).model)
    made.graphs = RowGraphs(made, capture)
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
        dec.prefill_eagerly([RowRequest.of(ids, Run.consecutive(0, length, dec.device), cache)])
        made.append(cache)
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_and_a_question_equal_ordinary_passes(name: str) -> None:
    dec = graphed(name)
    graphs = dec.graphs
    assert graphs is not None
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
        request = RowRequest.of(question, Run.consecutive(43, 73, dec.device), caches[0])
        want = dec.prefill([request]) if caches is mine else dec.prefill_eagerly([request])
        got = want if caches is mine else got
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for one, other in zip(mine, others, strict=True):
        for layer in range(dec.kv_layers):
            for kv, wanted in zip(one.view(layer), other.view(layer), strict=True):
                torch.testing.assert_close(kv, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "buckets"),
    [({"selector": "none"}, {1, 8}), ({"selector": "query_guided", "ratio": 0.2}, {1, 64})],
    ids=str,
)
def test_answers_are_the_same(config: dict[str, object], buckets: set[int]) -> None:
    replays: list[int] = []

    def noting(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        result, replay = repeat(run)
        bucket = BUCKETS[len(graphs.captured)]
        return result, lambda: (replays.append(bucket), replay())[1]

    dec = graphed("llama", noting)
    graphs, ids = dec.graphs, LAYOUT.token_ids
    assert graphs is not None
    while 64 not in graphs.captured:
        assert graphs.capture_next()
    assert graphs.captured == BUCKETS[:6]
    replays.clear()
    answer = generate(dec, blended(dec, **config), ids, max_new_tokens=40).token_ids
    assert replays.count(1) == 39
    assert set(replays) == buckets
    dec.graphs = None
    assert generate(dec, blended(dec, **config), ids, max_new_tokens=40).token_ids == answer


def test_a_graph_is_captured_after_some_uses() -> None:
    dec = graphed("llama")
    assert dec.graphs is not None
    cache = caches_of(dec, (12,), room=1)[0]  # grows on the way
    for use in range(EAGER_USES + 2):
        dec.append(torch.tensor([[5]]), cache)
        assert dec.graphs.captured == ((1,) if use >= EAGER_USES else ())
    assert cache.get_seq_length() == 12 + EAGER_USES + 2


def test_what_no_graph_computes() -> None:
    dec = graphed("llama")
    graphs = dec.graphs
    assert graphs is not None
    assert all(graphs.capture(bucket) for bucket in (16, 64))
    ids, run = torch.zeros(1, 9, dtype=torch.int64), Run.consecutive(0, 9, dec.device)
    assert graphs.logits([RowRequest.of(ids, run, dec.new_cache(9))]) is None, "a cache without buffers"
    caches = caches_of(dec, (12,) * 17)
    steps = [RowRequest.of(torch.tensor([[1]]), Run.consecutive(12, 13, dec.device), cache) for cache in caches]
    assert graphs.logits(steps[:16]) is not None
    assert graphs.logits(steps) is None
    assert graphs.logits(steps[:1], "bottom_right") is None


def wrong_by_a_bit(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    result, replay = repeat(run)

    def slightly_wrong() -> None:
        replay()
        result.view(torch.int32)[0, 0] ^= 1

    return result, slightly_wrong


def refused(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    raise RuntimeError("operation not permitted when stream is capturing")


def forgets_the_caches(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """A graph in which the first caches stay."""
    result = run().clone()
    return result, lambda: None


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (wrong_by_a_bit, "differs from the eager pass"),
        (forgets_the_caches, "differs from the eager pass"),
        (refused, "not permitted"),
    ],
)
def test_what_is_wrong_is_switched_off_once(capture: Capture, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    dec = graphed("llama", capture)
    cache = caches_of(dec, (12,))[0]
    with caplog.at_level(logging.WARNING, "kvblend.graphs"):
        for _ in range(EAGER_USES + 3):
            got = dec.append(torch.tensor([[5]]), cache)
    assert dec.graphs is not None
    assert reason in (dec.graphs.off or "")
    assert len(caplog.records) == 1
    assert "blend env" in caplog.text
    assert got.isfinite().all()
    assert not dec.graphs.capture_next()
