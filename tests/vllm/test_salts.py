"""Which prompts share blended blocks of vLLM's prefix cache."""

from dataclasses import replace

import pytest

from blend.integrations.vllm import prompts
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.prompts import ConversationSalts
from blend.layout import PromptLayout

PREFIX, CHUNKS = (1, 2), ((3, 4), (5, 6))


def turn(*suffix: int) -> LayoutTicket:
    return LayoutTicket(PromptLayout.of_chunks(PREFIX, CHUNKS, suffix))


QUESTION, ANSWER = (7, 8), (20, 21)
FIRST = turn(*QUESTION)
SECOND = turn(*QUESTION, *ANSWER, 9)
THIRD = turn(*QUESTION, *ANSWER, 9, 22, 10)
WITH_MORE_TEXT = LayoutTicket(PromptLayout.of_chunks((*PREFIX, 3, 4, 5, 6, *QUESTION, *ANSWER), ((30, 31),), (9,)))


def test_the_turns_of_a_conversation_share_their_blocks() -> None:
    """Also a turn that brings more text."""
    known = ConversationSalts()
    assert len({known.salt(prompt, "1") for prompt in (FIRST, SECOND, THIRD, FIRST, THIRD)}) == 1
    known = ConversationSalts()
    assert known.salt(FIRST, "1") == known.salt(WITH_MORE_TEXT, "1")


@pytest.mark.parametrize(
    "other",
    [
        turn(7, 9),
        LayoutTicket(PromptLayout.of_chunks(PREFIX, CHUNKS[::-1], QUESTION)),
        FIRST._replace(corpus="towns"),
        FIRST._replace(quality=0.05),
        FIRST._replace(user="ada"),
    ],
)
def test_other_prompts_do_not(other: LayoutTicket) -> None:
    known = ConversationSalts()
    assert known.salt(FIRST, "1") != known.salt(other, "1")


def test_another_generation_of_the_store_has_other_salts_and_another_server_the_same() -> None:
    """Several API servers share an engine."""
    known = ConversationSalts()
    assert known.salt(FIRST, "1") != known.salt(FIRST, "2") != known.salt(SECOND, "1")
    assert ConversationSalts().salt(FIRST, "1") == known.salt(FIRST, "1")


def test_two_prompts_that_go_on_with_one_share_no_blocks_of_their_own_text() -> None:
    """Rows of text that came with the first one's question were chosen for that question."""
    known = ConversationSalts()
    first = known.salt(FIRST, "1")
    assert known.salt(SECOND, "1") == first
    other = turn(*QUESTION, *ANSWER, 11)
    branch = known.salt(other, "1")
    assert branch != first
    assert known.salt(other, "1") == branch
    assert known.salt(turn(*QUESTION, *ANSWER, 11, 23, 12), "1") == branch, "the branch goes on"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 3)
    known = ConversationSalts()
    first = known.salt(FIRST, "1")
    for number in range(4):
        known.salt(FIRST._replace(layout=replace(FIRST.layout, suffix=(100 + number,))), "1")
    assert known.salt(SECOND, "1") != first, "forgotten"
