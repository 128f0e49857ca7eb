"""Transcripts with known answers: which tokens repeat, and why a prefix cache misses them."""

from typing import Any

import pytest
from logs import cause, chat, count, message, tokens, words

ASK = message("user", words(1, 50))
SYSTEM = message("system", words(2, 200))
TOOLS = [
    {"type": "function", "function": {"name": f"tool{number}", "description": words(10 + number, 60)}}
    for number in range(4)
]


def turns(first: int, count: int) -> list[dict[str, Any]]:
    """Questions and answers of 80 tokens each."""
    roles = ("user", "assistant")
    return [message(roles[number % 2], words(100 + number, 80)) for number in range(first, first + count)]


def test_a_conversation_that_grows_is_all_prefix(tmp_path):
    census = count(tmp_path, *(chat(SYSTEM, *turns(0, length), tools=TOOLS) for length in (1, 3, 5)))
    before = 0
    for request in range(3):
        counts = tokens(census, request)
        assert counts["prefix"] == before
        assert counts["shifted"] == counts["near"] == 0
        before = sum(counts.values())
    assert census.causes.largest == []
    assert census.ways["exact prefixes, no limit"].rows == before  # each token once


def test_an_answer_in_the_log_is_known_to_the_next_request(tmp_path):
    reply = message("assistant", words(5, 70))
    first = {"request": chat(SYSTEM, ASK), "response": {"body": {"choices": [{"message": reply}]}}}
    census = count(tmp_path, first, {"request": chat(SYSTEM, ASK, reply, message("user", words(6, 40)))})
    assert tokens(census, 1) == {"prefix": 200 + 50 + 70, "shifted": 0, "near": 0, "new": 40}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("Time: 10:15:30", "Time: 10:16:02", "the system prompt holds a time of day in line 2"),
        ("Today is 2026-11-26", "Today is 2026-11-27", "the system prompt holds a date in line 2"),
        ("session 9f8e7d6c5b4a", "session 0a1b2c3d4e5f", "the system prompt holds an id in line 2"),
        ("You have 25 dollars", "You have 24 dollars", "the system prompt holds a number that changes in line 2"),
        ("cwd: /home/ann", "cwd: /srv/build", "the system prompt holds a path that changes in line 2"),
        ("Be brief", "Be thorough", "the system prompt is changed in line 2"),
    ],
)
def test_a_header_that_changes(tmp_path, old, new, why):
    """Both requests share 41 tokens in front of the value, and all behind it."""
    prompts = (message("system", f"{words(3, 40)}\n{line}\n{words(4, 160)}") for line in (old, new))
    census = count(tmp_path, *(chat(prompt, ASK, tools=TOOLS) for prompt in prompts))
    counts = tokens(census, 1)
    assert 41 <= counts["prefix"] < 56
    assert counts["shifted"] >= 160 + 50 + 4 * 60
    assert cause(census) == (why, counts["shifted"])
    [largest] = census.causes.largest
    assert (largest.old, largest.new) == (old, new)


def test_tools_in_another_order(tmp_path):
    census = count(tmp_path, *(chat(SYSTEM, ASK, tools=tools) for tools in (TOOLS, [*TOOLS[2:], *TOOLS[:2]])))
    shifted = tokens(census, 1)["shifted"]
    assert shifted >= 4 * 60 + 50
    assert cause(census) == ("tools come in another order", shifted)


def test_a_compaction(tmp_path):
    summary = message("user", words(7, 90))
    census = count(tmp_path, chat(SYSTEM, *turns(0, 9)), chat(SYSTEM, summary, *turns(5, 4)))
    assert tokens(census, 1) == {"prefix": 200, "shifted": 4 * 80, "near": 0, "new": 90}
    assert cause(census) == ("messages are replaced by fewer ones (compaction)", 4 * 80)


def test_a_file_that_is_read_again_after_an_edit(tmp_path):
    file = words(8, 300).split()
    edited = [*file[:150], "another", *file[151:]]
    read = [message("tool", " ".join(file)), *turns(1, 1)]
    again = [*read, message("tool", " ".join(edited))]
    census = count(tmp_path, chat(SYSTEM, ASK, *read), chat(SYSTEM, ASK, *again))
    assert tokens(census, 1) == {"prefix": 200 + 50 + 300 + 80, "shifted": 299, "near": 1, "new": 0}
    assert cause(census) == ("a result of a tool comes again after an edit", 299)
    assert "another" in census.causes.largest[0].new


def test_passages_in_another_order(tmp_path):
    passages = [words(20 + number, 90) for number in range(4)]

    def question(number: int, order: tuple[int, ...]) -> dict[str, Any]:
        return chat(SYSTEM, message("user", "\n".join([*(passages[at] for at in order), words(30 + number, 20)])))

    census = count(tmp_path, question(0, (0, 1, 2, 3)), question(1, (2, 0, 3, 1)))
    counts = tokens(census, 1)
    assert counts["prefix"] == 200
    assert 4 * 89 <= counts["shifted"] <= 4 * 90 + 4
    assert cause(census)[0] == "passages come in another order or choice in a message of the user"
    # Blending takes all but the leads of four passages, and recomputes 5 % of it.
    blended = census.ways["exact prefixes, 1,000,000 tokens, and blending at 5%"]
    assert blended.rows <= census.ways["exact prefixes, no limit"].rows


def test_a_prefix_that_has_left_the_cache(tmp_path):
    other = chat(message("system", words(40, 400)), ASK)
    census = count(tmp_path, chat(SYSTEM, *turns(0, 1)), other, chat(SYSTEM, *turns(0, 3)), cache_tokens=400)
    small, large = (census.ways[f"exact prefixes, {size} tokens"] for size in (400, 800))
    assert small.rows - large.rows == 272  # 17 blocks of the 280 tokens of the first request
    assert cause(census)[0] == "a known prefix has left the cache"


def test_memory_stays_within_its_budget(tmp_path):
    numbers = [*range(200), 199, 0]
    census = count(tmp_path, *(chat(message("user", words(number, 500))) for number in numbers), budget=400_000)
    assert census.memory.nbytes <= 0.7 * 400_000
    assert census.memory.evicted
    assert tokens(census, 200)["prefix"] == 500
    assert tokens(census, 201)["new"] == 500


def test_marks_and_settings_of_tools_are_no_change(tmp_path):
    def marked(number: int) -> list[dict[str, Any]]:
        setting = {"cache_control": {"type": "ephemeral"}, "defer_loading": False}
        return [{**tool, **setting} if place == number else tool for place, tool in enumerate(TOOLS)]

    census = count(tmp_path, *(chat(SYSTEM, ASK, tools=marked(number)) for number in (2, 1)))
    assert tokens(census, 1)["shifted"] == 0
    assert census.causes.largest == []
