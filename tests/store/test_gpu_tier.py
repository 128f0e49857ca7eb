"""Memory for a GPU: the chunks used last are there within a budget, and one that goes leaves what prompts hold alone."""

import random

import pytest
import torch
from reading import in_threads

from blend.store import ChunkPool
from blend.store.arena import ALIGNMENT, Arena
from blend.store.gpu import GpuTier
from blend.store.ready import ReadyChunk
from blend.types import CacheKey, CacheKind, ChunkKey
from blend_kernels import ChunkKV, ChunkShape, LayerShape

SHAPE = ChunkShape((LayerShape(2, 8, 2, 8),), torch.float32)
NBYTES = SHAPE.nbytes(4)


def chunk(number, memory=None):
    if memory is None:
        memory = torch.full((NBYTES // 4,), float(number)).view(torch.uint8)
    key, address = CacheKey((number,), CacheKind.ISOLATED), ChunkKey("n", str(number))
    return ReadyChunk(key, address, ChunkKV(SHAPE, 4, memory), start=0, nbytes=NBYTES)


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


@pytest.fixture
def device(monkeypatch):
    """A GPU, or what stands for one: memory whose pages are not locked."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(GpuTier, "on", lambda device, budget_bytes: GpuTier(budget_bytes or 0, copied))
    return torch.device("cpu")


def test_chunks_of_a_pool_take_the_place_of_those_used_least(device):
    pool, store = ChunkPool(2 * NBYTES, gpu_budget_bytes=0), object()
    pool.use_gpu(device)
    pool.table(store, "n", "")

    def kept(number):
        """The address of the memory of a chunk that is held from now on."""
        memory, lease = pool.page_locked(NBYTES), pool.lease([])
        pool.keep(store, chunk(number, memory), generation="", lease=lease)
        pool.release(lease)
        return memory.data_ptr()

    addresses = [kept(number) for number in range(3)]
    assert addresses[2] == addresses[0]
    assert addresses[1] == addresses[0] + NBYTES
    assert pool.stats[2:5] == (1, 2, 2 * NBYTES)
    assert pool.page_locked(3 * NBYTES).shape == (3 * NBYTES,), "there is no more in the pool's own"


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
