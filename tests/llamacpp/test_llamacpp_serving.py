"""The server's engine over llama.cpp: more prompts at once than its cells hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blend import BlendConfig, Blender, open_store
from blend.errors import ContextLengthError
from blend.integrations.llamacpp.context import SEQUENCES
from blend.layout import PromptLayout
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import Finished
from tests.llamacpp.llamacpp_engines import Engines, Pair, token_ids
from tests.llamacpp.test_llamacpp_rows import CLOSE, difference, rows_of
from tests.serve.engines import ask

CELLS = 512
SAMPLING = Sampling(max_tokens=24, ignore_eos=True)
PREFIX = (5, 6, 7)


def prompts(count: int) -> list[PromptLayout]:
    """Prompts of 90 to 130 rows: chunks of each other in other orders, and one that is new."""
    chunks = [tuple(token_ids(28, seed)[0].tolist()) for seed in range(count + 3)]
    layouts = []
    for number in range(count):
        order = [chunks[number + 1], chunks[number], chunks[number + 2]][: 2 + number % 2 + 1]
        layouts.append(PromptLayout.of_chunks(PREFIX, order, tuple(token_ids(5 + number, 90 + number)[0].tolist())))
    return layouts


def alone(blender: Blender, layout: PromptLayout) -> Tensor:
    """The logits that lead to each token of its answer when nothing else runs, `[tokens, vocab]`."""
    blend = blender.prefill(layout)
    logits = [blend.logits]
    while len(logits) < SAMPLING.max_tokens:
        token = int(logits[-1].argmax())
        logits.append(blend.append(torch.tensor([[token]]))[:, -1])
    blend.cache.free()
    return torch.cat(logits)


def require_answer(tokens: list[int], logits: Tensor) -> None:
    """The tokens must be the likeliest ones, up to where two are as likely: passes of other sizes round otherwise."""
    assert len(tokens) == len(logits)
    for token, row in zip(tokens, logits, strict=True):
        if token != int(row.argmax()):
            assert row.max() - row[token] < CLOSE * row.std()
            return


def require_free_cells(pair: Pair) -> None:
    """A prompt of nearly all cells must fit."""
    ids = token_ids(CELLS - 16)
    cache = pair.ours.new_cache(ids.shape[1])
    pair.ours.prefill([rows_of(ids, [*range(ids.shape[1])], cache)])
    cache.free()


@pytest.fixture(params=["qwen2", "gemma3"])
def pair(request: pytest.FixtureRequest, engines: Engines) -> Pair:
    """A model in few cells that recomputes a run at a time: then it does not matter in which pieces rows run."""
    made = engines.pair(request.param, tokens=CELLS)
    made.ours.wave_rows = 1
    return made


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_prompts_wait_for_cells_and_each_gets_what_it_gets_alone(pair: Pair, ratio: float) -> None:
    """Fourteen prompts with nineteen answers want four times the cells.

    At ratio 1 every other chunk is missing: its cache is computed while prompts run and wait. Their rows are kept.
    """
    layouts = prompts(14)
    blender = Blender(pair.ours, open_store("memory:"), BlendConfig(ratio=ratio))
    library = blender.library(PREFIX)
    missing = library.missing([chunk for layout in layouts for chunk in layout.chunks])
    late = missing[1::2] if ratio == 1 else []
    library.compute([variant for variant in missing if variant not in late])
    expected = [alone(blender, layout) for layout in layouts]
    engine = EmbeddedEngine(blender, least_gain=-(10**6))
    errors: list[Exception | None] = []
    counts = [2 if number % 3 == 0 else 1 for number in range(len(layouts))]
    try:
        answers = [
            ask(engine, layout, replace(SAMPLING, n=count)) for layout, count in zip(layouts, counts, strict=True)
        ]
        engine.encode(library, late, lambda variant, error: errors.append(error))
        for answer, logits, count in zip(answers, expected, counts, strict=True):
            assert isinstance(answer.wait().last, Finished), answer.last
            for index in range(count):
                require_answer(answer.tokens_of(index), logits)
        assert engine.wait_idle(120)
        assert errors == [None] * len(late)
        assert engine.prefixes.nbytes
    finally:
        engine.close()
    require_free_cells(pair)


def test_a_prompt_beyond_all_cells_is_refused(pair: Pair) -> None:
    """At once, in one line, with the length that fits."""
    engine = EmbeddedEngine(Blender(pair.ours, open_store("memory:")))
    layout = PromptLayout.of_chunks(PREFIX, (), tuple(token_ids(CELLS // 2)[0].tolist()))
    try:
        with pytest.raises(ContextLengthError, match="need 547 rows of the context, which has 511") as failure:
            ask(engine, layout, replace(SAMPLING, n=12))
        assert "\n" not in str(failure.value)
        assert len(ask(engine, layout, replace(SAMPLING, max_tokens=8, n=6)).wait().tokens_of(5)) == 8
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_prompts_wait_for_sequences(engines: Engines, name: str) -> None:
    """Eighty long answers want more sequences than llama.cpp has, though the server may run as many and cells are there."""
    pair = engines.pair(name, tokens=6144)
    engine = EmbeddedEngine(Blender(pair.ours, open_store("memory:")), most_running=1000)
    sampling = Sampling(max_tokens=SEQUENCES + 6, ignore_eos=True, n=16)
    try:
        suffixes = [tuple(token_ids(2, seed)[0].tolist()) for seed in range(5)]
        answers = [ask(engine, PromptLayout.of_chunks(PREFIX, (), suffix), sampling) for suffix in suffixes]
        assert {answer.wait().end_reason for answer in answers} == {"length"}
    finally:
        engine.close()


def test_recomputed_rows_fit_into_the_last_cells(engines: Engines) -> None:
    """A nearly full context: waves become smaller until their fresh rows fit, and give the same KV."""
    pair = engines.pair("qwen2", tokens=CELLS)
    ids = token_ids(CELLS - 2)
    rows = ids.shape[1]
    full = pair.ours.new_cache(rows)
    logits = pair.ours.prefill([rows_of(ids, [*range(rows)], full)])
    chosen = [*range(10, 200), *range(220, 400, 3), rows - 1]
    again = full.compute(rows_of(ids, chosen, full), wave_rows=24)
    assert difference(again, logits) < CLOSE
    full.free()


def test_rows_without_kv_take_the_cells_of_their_zeros(engines: Engines) -> None:
    """A prompt of most cells of which only the beginning and the end are stored."""
    pair = engines.pair("qwen2", tokens=CELLS)
    rows = 400
    ids = token_ids(rows)
    full = pair.ours.new_cache(rows)
    logits = pair.ours.prefill([rows_of(ids, [*range(rows)], full)])
    kvs = [tuple(part.clone() for part in layer.view()) for layer in full.layers]
    full.free()
    cache = pair.ours.new_cache(rows)
    for layer, (keys, values) in zip(cache.layers, kvs, strict=True):
        layer.write_run(0, keys, values)
    cache.blank(torch.arange(100, 300))
    again = cache.compute(rows_of(ids, [*range(100, 300), rows - 1], cache))
    assert difference(again, logits) < CLOSE
    cache.free()
