"""Chunks -> chunk caches: batches change nothing, padding never shows, what does not fit is refused."""

import pytest
import torch
from cases import make_layout
from dense_reference import assert_close, dense_prefill
from models import CORE, FAMILIES, decoder, eager_model

from blend.chunks.encode import ChunkEncoder
from blend.errors import PromptError
from blend.types import ChunkCache

LAYOUT = make_layout(chunks=(20, 3, 1, 11, 12, 30))


def _encoded(name: str, batch_tokens: int, dtype: torch.dtype = torch.float32) -> dict[int, ChunkCache]:
    return dict(ChunkEncoder(decoder(name, dtype), LAYOUT.prefix, batch_tokens).encode(LAYOUT.chunks))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chunk_cache_is_the_models_own_kv_behind_the_prefix(name):
    start = len(LAYOUT.prefix)
    for index, cache in _encoded(name, 1024).items():
        chunk = LAYOUT.chunks[index]
        dense = dense_prefill(eager_model(name), [*LAYOUT.prefix, *chunk])
        assert (cache.start, cache.tokens, cache.layers) == (start, len(chunk), len(dense.layers))
        for keys, values, expected in zip(cache.keys, cache.values, dense.layers, strict=True):
            assert_close(keys, expected[0][0, :, start:])
            assert_close(values, expected[1][0, :, start:])


@pytest.mark.parametrize(
    ("name", "batch_tokens", "dtype"),
    [*((name, 40, torch.float32) for name in CORE), *(("mistral", tokens, torch.bfloat16) for tokens in (24, 60))],
)
def test_batches_of_any_size_equal_one_by_one(name, batch_tokens, dtype):
    """The shorter chunks of a batch are padded; no padding leaks into them."""
    batched, alone = _encoded(name, batch_tokens, dtype), _encoded(name, 1, dtype)
    assert batched.keys() == alone.keys() == set(range(len(LAYOUT.chunks)))
    for index, cache in batched.items():
        for got, expected in zip((*cache.keys, *cache.values), (*alone[index].keys, *alone[index].values), strict=True):
            assert got.shape == expected.shape
            assert_close(got, expected)


def test_caches_come_one_by_one_in_order_of_length_and_own_their_memory():
    """Whoever stops in the middle keeps what came out so far; no cache holds on to its batch."""
    order = [index for index, _ in ChunkEncoder(decoder("llama"), LAYOUT.prefix, 40).encode(LAYOUT.chunks)]
    assert order == sorted(range(len(LAYOUT.chunks)), key=lambda i: len(LAYOUT.chunks[i]))
    stream = ChunkEncoder(decoder("llama"), LAYOUT.prefix, 1).encode(LAYOUT.chunks)
    _, first = next(stream)
    stream.close()
    assert first.nbytes == sum(t.untyped_storage().nbytes() for t in (*first.keys, *first.values))


def test_a_batch_stays_within_its_tokens_unless_one_chunk_alone_exceeds_them():
    shapes: list[tuple[int, int]] = []
    dec = decoder("llama")
    encoder = ChunkEncoder(dec, LAYOUT.prefix, 24)
    _ = encoder.prefix  # its own pass is not one of the chunks'
    handle = dec.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    try:
        list(encoder.encode(LAYOUT.chunks))
    finally:
        handle.remove()
    assert sum(batch for batch, _ in shapes) == len(LAYOUT.chunks)
    assert all(batch * longest <= 24 or batch == 1 for batch, longest in shapes)
    assert len(shapes) < len(LAYOUT.chunks)


def test_an_empty_chunk_is_refused_before_anything_runs():
    stream = ChunkEncoder(decoder("llama"), LAYOUT.prefix).encode([(3, 4), (), (5,)])
    with pytest.raises(PromptError, match="chunk 1 is empty"):
        next(stream)


def test_a_chunk_that_does_not_fit_behind_the_prefix_is_refused_before_anything_runs():
    encoder = ChunkEncoder(decoder("llama"), LAYOUT.prefix)
    limit = 512 - len(LAYOUT.prefix)
    (pair,) = encoder.encode([(3,) * limit])
    assert pair[1].tokens == limit
    with pytest.raises(PromptError, match=r"513 tokens but llama reads at most 512"):
        next(encoder.encode([(3, 4), (3,) * (limit + 1)]))


def test_a_prefix_longer_than_the_context_is_refused():
    with pytest.raises(PromptError, match=r"513 tokens but llama reads at most 512"):
        ChunkEncoder(decoder("llama"), (3,) * 513)
