"""Chunks -> chunk caches: batches change nothing, padding never shows, what does not fit is refused."""

import pytest
import torch
from blends import assert_kv
from cases import make_layout
from dense_reference import dense_prefill
from models import CORE, IN_BOTH_DTYPES, decoder, eager_model

from blend.chunks.encode import ChunkEncoder
from blend.errors import PromptError

LAYOUT = make_layout(chunks=(20, 3, 1, 11, 12, 30))


@pytest.mark.parametrize(
    ("name", "dtype", "batch_tokens"),
    [
        *((*case.values, 1024) for case in IN_BOTH_DTYPES),
        *((name, torch.float32, tokens) for name in CORE for tokens in (1, 40)),
        *(("mistral", torch.bfloat16, tokens) for tokens in (1, 24, 60)),
    ],
)
def test_a_chunk_cache_is_the_models_own_kv_behind_the_prefix(name, dtype, batch_tokens):
    """In batches of any size. Their shorter chunks are padded; no padding leaks into them."""
    start = len(LAYOUT.prefix)
    caches = dict(ChunkEncoder(decoder(name, dtype), LAYOUT.prefix, batch_tokens).encode(LAYOUT.chunks))
    for index, chunk in enumerate(LAYOUT.chunks):
        cache, dense = caches[index], dense_prefill(eager_model(name, dtype), [*LAYOUT.prefix, *chunk])
        assert (cache.start, cache.tokens) == (start, len(chunk))
        expected = [(keys[0, :, start:], values[0, :, start:]) for keys, values in dense.layers]
        assert_kv(zip(cache.keys, cache.values, strict=True), expected)


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
    embeddings = dec.model.get_input_embeddings()
    with embeddings.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape)):
        list(encoder.encode(LAYOUT.chunks))
    assert sum(batch for batch, _ in shapes) == len(LAYOUT.chunks)
    assert all(batch * longest <= 24 or batch == 1 for batch, longest in shapes)
    assert len(shapes) < len(LAYOUT.chunks)


def test_an_empty_chunk_is_refused_before_anything_runs():
    stream = ChunkEncoder(decoder("llama"), LAYOUT.prefix).encode([(3, 4), (), (5,)])
    with pytest.raises(PromptError, match="chunk 1 is empty"):
        next(stream)


def test_what_does_not_fit_is_refused_before_anything_runs():
    """A chunk behind the prefix, and a prefix alone."""
    encoder, limit = ChunkEncoder(decoder("llama"), LAYOUT.prefix), 512 - len(LAYOUT.prefix)
    ((_, cache),) = encoder.encode([(3,) * limit])
    assert cache.tokens == limit
    with pytest.raises(PromptError, match=r"513 tokens but llama reads at most 512"):
        next(encoder.encode([(3, 4), (3,) * (limit + 1)]))
    with pytest.raises(PromptError, match=r"513 tokens but llama reads at most 512"):
        ChunkEncoder(decoder("llama"), (3,) * 513)
