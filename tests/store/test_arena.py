"""Memory that is handed out in pieces: pieces never overlap, and come back whole."""

import random

import torch
from reading import in_threads

from blend.store.arena import ALIGNMENT, Arena


def arena(pieces: int) -> Arena:
    return Arena(torch.zeros(pieces * ALIGNMENT, dtype=torch.uint8))


def test_pieces_come_back_and_join():
    memory = arena(4)
    pieces = [memory.take(ALIGNMENT - 3) for _ in range(4)]
    assert memory.take(1) is None
    del pieces[1]
    assert memory.take(2 * ALIGNMENT) is None
    del pieces[1]
    both = memory.take(2 * ALIGNMENT)
    assert both is not None
    del pieces, both
    assert memory.take(4 * ALIGNMENT) is not None


def test_pieces_do_not_overlap():
    memory = arena(64)

    def work(seed: int) -> None:
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
