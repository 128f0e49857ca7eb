"""Which prompts share blended blocks of vLLM's prefix cache."""

from dataclasses import replace

import pytest

from blend.integrations.vllm import salts
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.salts import ConversationSalts
from blend.types import PromptLayout

PREFIX, CHUNKS = (1, 2), ((3, 4), (5, 6))


def turn(*suffix: int) -> LayoutTicket:
    return LayoutTicket(PromptLayout.of_chunks(PREFIX, CHUNKS, suffix))


QUESTION, ANSWER = (7, 8), (20, 21)
FIRST = turn(*QUESTION)
SECOND = turn(*QUESTION, *ANSWER, 9)
THIRD = turn(*QUESTION, *ANSWER, 9, 22, 10)


def test_the_turns_of_a_conversation_share_their_blocks() -> None:
    given = ConversationSalts()
    found = [given.salt(prompt, "1") for prompt in (FIRST, SECOND, THIRD, FIRST, THIRD)]
    assert len(set(found)) == 1


def test_a_turn_that_brings_more_text_goes_on_with_the_conversation() -> None:
    given = ConversationSalts()
    layout = PromptLayout.of_chunks((*PREFIX, 3, 4, 5, 6, *QUESTION, *ANSWER), ((30, 31),), (9,))
    assert given.salt(FIRST, "1") == given.salt(LayoutTicket(layout), "1")


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
    given = ConversationSalts()
    assert given.salt(FIRST, "1") != given.salt(other, "1")


def test_another_generation_of_the_store_has_other_salts() -> None:
    given = ConversationSalts()
    assert given.salt(FIRST, "1") != given.salt(FIRST, "2") != given.salt(SECOND, "1")


def test_two_prompts_that_go_on_with_one_share_no_blocks_of_their_own_text() -> None:
    """Rows of text that came with the first one's question were chosen for that question."""
    given = ConversationSalts()
    first = given.salt(FIRST, "1")
    assert given.salt(SECOND, "1") == first
    other = turn(*QUESTION, *ANSWER, 11)
    branch = given.salt(other, "1")
    assert branch != first
    assert given.salt(other, "1") == branch
    assert given.salt(turn(*QUESTION, *ANSWER, 11, 23, 12), "1") == branch, "the branch goes on"


def test_a_server_that_did_not_see_a_prompt_gives_it_the_same_salt() -> None:
    """Several API servers share an engine."""
    assert ConversationSalts().salt(FIRST, "1") == ConversationSalts().salt(FIRST, "1")


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salts, "MOST_PROMPTS", 3)
    given = ConversationSalts()
    first = given.salt(FIRST, "1")
    for number in range(4):
        given.salt(replace_suffix(number), "1")
    assert given.salt(SECOND, "1") != first, "forgotten"


def replace_suffix(number: int) -> LayoutTicket:
    return FIRST._replace(layout=replace(FIRST.layout, suffix=(100 + number,)))
