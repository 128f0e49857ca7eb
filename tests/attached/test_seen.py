"""Text of prompts that came once: the latest pieces are known, and long parts of them are found in later prompts."""

import numpy as np
import pytest

from blend.attached import seen
from blend.attached.seen import SeenTexts
from blend.serve.token_index import LEAST_PIECE, LEAST_RUN

PIECES = [tuple(np.random.default_rng(number).integers(3, 9000, 90).tolist()) for number in range(6)]


def found(texts: SeenTexts, *prompts: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tuple(piece) for piece in texts.recurring(prompts)]


@pytest.mark.parametrize("at_once", [True, False])
def test_the_latest_pieces_are_known(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "MOST_SEEN", 4)
    texts = SeenTexts()
    for pieces in (PIECES,) if at_once else (PIECES[:3], PIECES[3:]):
        texts.add(pieces)
    assert found(texts, *PIECES) == PIECES[2:]
    texts.add(PIECES[:1])
    assert found(texts, *PIECES) == [PIECES[0], *PIECES[3:]]


def test_pieces_of_a_prompt_come_in_its_order() -> None:
    texts = SeenTexts()
    texts.add(PIECES)
    prompt = (1, 2, *PIECES[3], 1, 2, *PIECES[1], 2)
    assert found(texts, prompt) == [PIECES[3], PIECES[1]]


def test_a_part_is_found_that_is_long_enough_to_be_learned() -> None:
    texts = SeenTexts()
    texts.add(PIECES[:1])
    least = PIECES[0][:LEAST_PIECE]
    assert LEAST_RUN < LEAST_PIECE
    assert found(texts, (1, *least, 1)) == [least]
    assert found(texts, (1, *least[:-1], 1)) == []
