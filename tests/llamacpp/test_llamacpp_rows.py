"""Rows that llama.cpp computes over a prompt's cells equal those of transformers on the same weights."""

import numpy as np
import pytest
import torch
from torch import Tensor

from blend.errors import PromptError
from blend.integrations.llamacpp.cache import CellCache
from blend.model.cache import KV, Run
from blend.model.passes import RowRequest
from tests.llamacpp.llamacpp_engines import NAMES, Engines, Pair, token_ids

ROWS = 40
CLOSE = 0.01  # of the largest number: llama.cpp keeps KV in half precision
EXACT = 1e-9


def rows_of(ids: Tensor, rows: list[int], cache: object, outputs: int = 1) -> RowRequest:
    """A request for these rows of a prompt."""
    return RowRequest(ids[:, rows], Run.read(torch.tensor(rows)), cache, outputs=outputs)


def whole(pair: Pair, ids: Tensor) -> tuple[Tensor, list[KV]]:
    """Logits and KV of a prompt, computed by transformers; keys in the order of llama.cpp's file."""
    cache = pair.theirs.new_cache(ids.shape[1])
    logits = pair.theirs.prefill([rows_of(ids, [*range(ids.shape[1])], cache)])
    kvs = [cache.view(layer) for layer in range(len(pair.theirs.layers))]
    return logits, [(pair.as_ours(keys), values) for keys, values in kvs]


def difference(first: Tensor, second: Tensor) -> float:
    """The largest, as a share of the largest number."""
    return float((first.float() - second.float()).abs().amax() / second.float().abs().amax())


def in_cells(pair: Pair, kvs: list[KV], rows: int = ROWS) -> CellCache:
    """A cache with this KV of a prompt's first rows, as stored chunks leave it."""
    cache = pair.ours.new_cache(rows)
    for layer, (keys, values) in zip(cache.layers, kvs, strict=True):
        layer.write_run(0, keys[:, :, :rows].half(), values[:, :, :rows].half())
    return cache


def assert_holds(cache: CellCache, kvs: list[KV]) -> None:
    """The cache holds this KV, row by row."""
    for layer, kv in enumerate(kvs):
        for part, expected in zip(cache.view(layer), kv, strict=True):
            assert difference(part, expected) < CLOSE, layer


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_prompt_has_the_kv_and_logits_of_transformers(engines: Engines, name: str) -> None:
    """All rows in one pass, longer than a window."""
    pair = engines.pair(name)
    ids = token_ids(ROWS)
    logits, kvs = whole(pair, ids)
    cache = pair.ours.new_cache(ROWS)
    assert difference(pair.ours.prefill([rows_of(ids, [*range(ROWS)], cache)]), logits) < CLOSE
    assert_holds(cache, kvs)
    cache.free()


@pytest.mark.parametrize("name", NAMES)
def test_spoilt_rows_recomputed_in_waves_are_as_in_one_pass(engines: Engines, name: str) -> None:
    """Runs that hold other tokens' KV, a wave a run: exact, whatever was there, and the rows between stay bit for bit."""
    pair = engines.pair(name)
    ids = token_ids(ROWS)
    logits, kvs = whole(pair, ids)
    runs = [*range(3, 8), 12, *range(20, 31), *range(36, ROWS)]
    spoilt = [(keys.clone(), values.clone()) for keys, values in kvs]
    for keys, values in spoilt:
        keys[:, :, runs] = torch.randn(keys[:, :, runs].shape)
        values[:, :, runs] = torch.randn(values[:, :, runs].shape)
    cache = in_cells(pair, spoilt)
    assert difference(cache.compute(rows_of(ids, runs, cache), wave_rows=1), logits) < CLOSE
    assert_holds(cache, kvs)
    between = np.setdiff1d(np.arange(ROWS), runs)
    for layer, (keys, values) in enumerate(kvs):
        assert torch.equal(cache.view(layer)[0][:, :, between], keys.half()[:, :, between])
        assert torch.equal(cache.view(layer)[1][:, :, between], values.half()[:, :, between])
    cache.free()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_runs_of_a_wave_see_each_other_as_they_were_before(engines: Engines, name: str) -> None:
    """Two runs in one wave: the second one sees the stored KV of the first, as a dense reference computes it."""
    pair = engines.pair(name)
    ids = token_ids(ROWS)
    _, kvs = whole(pair, ids)
    stored = [(keys + torch.randn_like(keys), values + torch.randn_like(values)) for keys, values in kvs]
    runs = ([5, 6, 7], [20, 21])
    together, apart = in_cells(pair, stored), in_cells(pair, stored)
    together.compute(rows_of(ids, [*runs[0], *runs[1]], together, outputs=0), wave_rows=10)
    for rows in reversed(runs):  # the second before the first: it cannot see what is not there yet
        apart.compute(rows_of(ids, rows, apart, outputs=0))
    for layer in range(len(kvs)):
        for first, second in zip(together.view(layer), apart.view(layer), strict=True):
            assert difference(first, second) < 2e-3, layer
    together.free()
    apart.free()


def test_rows_without_kv_are_waves_by_themselves(engines: Engines) -> None:
    """What was never stored is there before any later row looks at it, and the question sees every fresh row."""
    pair = engines.pair("qwen2")
    ids = token_ids(ROWS)
    logits, kvs = whole(pair, ids)
    missing = [*range(10, 18), *range(30, ROWS)]
    cache = in_cells(pair, kvs, 30)
    cache.blank(torch.arange(10, 18))
    rows = sorted({4, 22, *missing})
    assert difference(cache.compute(rows_of(ids, rows, cache), wave_rows=1000), logits) < CLOSE
    assert_holds(cache, kvs)
    cache.free()


def test_tokens_behind_a_prompt_follow_it(engines: Engines) -> None:
    """Decoding, a copy that goes on by itself, and a return to the prompt."""
    pair = engines.pair("gemma3")
    ids = token_ids(ROWS)
    expected = pair.theirs.run_whole(input_ids=ids, use_cache=True).logits
    cache = pair.ours.new_cache(ROWS)
    pair.ours.prefill([rows_of(ids, [*range(30)], cache)])
    copy = cache.clone(10)
    for row in range(30, ROWS):
        step = pair.ours.decode([ids[:, row : row + 1]], [cache])
        assert difference(step, expected[:, row]) < CLOSE
    assert difference(pair.ours.append(ids[:, 30:], copy)[0], expected[0, 30:]) < CLOSE
    cache.truncate(30)
    assert cache.get_seq_length() == 30
    assert difference(pair.ours.append(ids[:, 30:], cache)[0], expected[0, 30:]) < CLOSE
    cache.free()
    copy.free()


def test_prompts_that_go_on_share_a_pass(engines: Engines) -> None:
    """A step of three prompts of other lengths, one of which goes on by two tokens."""
    pair = engines.pair("qwen3")
    expected = []
    requests = []
    for rows, count in ((20, 1), (31, 2), (25, 1)):
        ids = token_ids(rows + count, rows)
        cache = pair.ours.new_cache(rows)
        pair.ours.prefill([rows_of(ids, [*range(rows)], cache)])
        requests.append(rows_of(ids, [*range(rows, rows + count)], cache, outputs=count))
        expected.append(pair.theirs.run_whole(input_ids=ids, use_cache=True).logits[0, -count:])
    logits = pair.ours.prefill(requests)
    assert difference(logits, torch.cat(expected)) < CLOSE
    assert [request.cache.get_seq_length() for request in requests] == [21, 33, 26]


def test_cells_of_a_window_are_not_reused(engines: Engines) -> None:
    """A prompt many times the window, while other prompts take and free cells in a context that is nearly full."""
    pair = engines.pair("gemma3", tokens=256, ubatch=32)
    rows = 150
    ids = token_ids(rows)
    logits, kvs = whole(pair, ids)
    cache = pair.ours.new_cache(rows)
    assert difference(pair.ours.prefill([rows_of(ids, [*range(rows)], cache)]), logits) < CLOSE
    for seed in range(4):
        other = pair.ours.new_cache(60)
        pair.ours.prefill([rows_of(token_ids(60, seed), [*range(60)], other)])
        other.free()
        chosen = [2, 3, *range(40 + seed, 60), 100, *range(140, rows)]
        assert difference(cache.compute(rows_of(ids, chosen, cache), wave_rows=16), logits) < CLOSE
    assert_holds(cache, kvs)
    cache.free()


def test_a_full_context_says_so(engines: Engines) -> None:
    """One line, and the context serves the next prompt."""
    pair = engines.pair("llama", tokens=256)
    ids = token_ids(200)
    held = pair.ours.new_cache(200)
    pair.ours.prefill([rows_of(ids, [*range(200)], held)])
    other = pair.ours.new_cache(200)
    with pytest.raises(PromptError, match="context of 256 tokens is full") as failure:
        pair.ours.prefill([rows_of(ids, [*range(200)], other)])
    assert "\n" not in str(failure.value)
    held.free()
    other.free()
    again = pair.ours.new_cache(200)
    assert pair.ours.prefill([rows_of(ids, [*range(200)], again)]).shape == (1, 96)
    again.free()


def test_forgotten_prompts_free_their_cells(engines: Engines) -> None:
    """More prompts than a context has sequences and cells, one after another, none of them freed by hand."""
    pair = engines.pair("llama", tokens=256)
    for seed in range(70):
        ids = token_ids(100, seed)
        pair.ours.prefill([rows_of(ids, [*range(100)], pair.ours.new_cache(100))])


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_an_eight_bit_cache_recomputes_rows_as_it_keeps_them(engines: Engines, name: str) -> None:
    """Q8_0, whose keys and values llama.cpp turns by a Hadamard matrix: stored KV of transformers goes in and out."""
    pair = engines.pair(name, cache_type="q8_0", hidden_size=256, head_dim=64)
    ids = token_ids(ROWS)
    first = pair.ours.new_cache(ROWS)
    logits = pair.ours.prefill([rows_of(ids, [*range(ROWS)], first)])
    kvs = [first.view(layer) for layer in range(len(first.layers))]
    cache = pair.ours.new_cache(ROWS)
    for layer, kv in zip(cache.layers, kvs, strict=True):
        layer.write_run(0, *kv)
    chosen = [4, 5, *range(17, 22), *range(36, ROWS)]
    again = cache.compute(rows_of(ids, chosen, cache), wave_rows=1)
    assert difference(again, logits) < 0.05
    for layer, kv in enumerate(kvs):
        for part, expected in zip(cache.view(layer), kv, strict=True):
            assert difference(part, expected) < 0.05, layer
    cache.free()
