"""Memory for a GPU: the chunks used last are there within a budget, and one that goes leaves what prompts hold alone."""

import random

import torch
from reading import in_threads

from blend.store.arena import ALIGNMENT, Arena
from blend.store.gpu import GpuTier
from blend.store.ready import ReadyChunk
from blend.types import CacheKey, CacheKind, ChunkKey
from blend_kernels import ChunkKV, ChunkShape, LayerShape

SHAPE = ChunkShape((LayerShape(2, 8, 2, 8),), torch.float32)
NBYTES = SHAPE.nbytes(4)


def chunk(number):
    memory = torch.full((NBYTES // 4,), float(number)).view(torch.uint8)
    return ReadyChunk(
        CacheKey((number,), CacheKind.ISOLATED), ChunkKey("n", str(number)), ChunkKV(SHAPE, 4, memory), start=0
    )


def copied(kv):
    return ChunkKV(kv.shape, kv.tokens, kv.memory.clone())


def brought(tier, chunks):
    tier.bring(chunks)
    tier.settle()


def test_the_chunks_used_last_are_there():
    tier, chunks = GpuTier(3 * NBYTES, copied), [chunk(number) for number in range(5)]
    brought(tier, chunks[:3])
    held = chunks[0].near
    assert all(one.near is not one.kv for one in chunks[:3])
    brought(tier, chunks[1:3])
    brought(tier, chunks[3:])
    assert [one.near is not one.kv for one in chunks] == [False, False, True, True, True]
    assert tier.nbytes == 3 * NBYTES
    assert float(held.keys[0].unique()) == 0.0


def test_a_chunk_larger_than_the_budget_stays_where_it_is():
    tier, one = GpuTier(NBYTES - 1, copied), chunk(1)
    brought(tier, [one])
    assert one.near is one.kv


def test_without_memory_nothing_more_is_brought():
    def full(kv):
        raise RuntimeError("CUDA out of memory")

    tier, one = GpuTier(9 * NBYTES, full), chunk(1)
    brought(tier, [one])
    assert one.near is one.kv
    assert tier.budget_bytes == 0


def test_many_threads_keep_to_the_budget():
    tier, chunks = GpuTier(2 * NBYTES, copied), [chunk(number) for number in range(6)]
    in_threads(4, lambda seed: [tier.bring(chunks[seed % 3 : seed % 3 + 3]) for _ in range(20)])
    tier.settle()
    assert sum(one.near is not one.kv for one in chunks) * NBYTES == tier.nbytes <= 2 * NBYTES


def test_pieces_do_not_overlap_and_come_back_whole():
    memory = Arena(torch.zeros(64 * ALIGNMENT, dtype=torch.uint8))

    def work(seed):
        draw, held = random.Random(seed), list[torch.Tensor]()
        for _ in range(300):
            piece = memory.take(draw.randrange(1, 6 * ALIGNMENT))
            if piece is not None:
                piece.fill_(seed)
                held.append(piece)
            if held and (piece is None or draw.random() < 0.5):
                gone = held.pop(draw.randrange(len(held)))
                assert (gone == seed).all()

    in_threads(4, work)
    assert memory.take(64 * ALIGNMENT) is not None
