"""Transcripts with known answers: which tokens repeat, and why a prefix cache misses them."""

from typing import Any

import pytest
from logs import chat, count, message, tokens, words, write

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
    log = write(tmp_path / "log", *(chat(SYSTEM, *turns(0, length), tools=TOOLS) for length in (1, 3, 5)))
    census = count(log)
    before = 0
    for request in range(3):
        counts = tokens(census, request)
        assert counts["prefix"] == before
        assert counts["shifted"] == counts["near"] == 0
        before = sum(counts.values())
    assert census.causes.largest == []
    computed = census.ways["exact prefixes, no limit"]
    assert computed.rows == before  # each token once


def test_an_answer_in_the_log_is_known_to_the_next_request(tmp_path):
    reply = message("assistant", words(5, 70))
    first = {"request": chat(SYSTEM, ASK), "response": {"body": {"choices": [{"message": reply}]}}}
    census = count(write(tmp_path / "log", first, {"request": chat(SYSTEM, ASK, reply, message("user", words(6, 40)))}))
    assert tokens(census, 1) == {"prefix": 200 + 50 + 70, "shifted": 0, "near": 0, "new": 40}


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("Time: 10:15:30", "Time: 10:16:02", "the system prompt holds a time of day in line 2"),
        ("Today is 2026-11-26", "Today is 2026-11-27", "the system prompt holds a date in line 2"),
        ("session 9f8e7d6c5b4a", "session 0a1b2c3d4e5f", "the system prompt holds an id in line 2"),
        ("You have 25 dollars", "You have 24 dollars", "the system prompt holds a number that changes in line 2"),
        ("cwd: /home/ann", "cwd: /srv/build", "the system prompt holds a path that changes in line 2"),
        ("Be brief", "Be thorough", "the system prompt is changed in line 2"),
    ],
)
def test_a_header_that_changes(tmp_path, old, new, cause):
    """Both requests share 41 tokens in front of the value, and all behind it."""
    requests = (
        chat(message("system", f"{words(3, 40)}\n{line}\n{words(4, 160)}"), ASK, tools=TOOLS) for line in (old, new)
    )
    census = count(write(tmp_path / "log", *requests))
    counts = tokens(census, 1)
    assert 41 <= counts["prefix"] < 56
    assert counts["shifted"] >= 160 + 50 + 4 * 60
    [largest] = census.causes.largest
    assert largest.name.words == cause
    assert (largest.old, largest.new) == (old, new)
    assert largest.tokens == counts["shifted"]


def test_tools_in_another_order(tmp_path):
    requests = (chat(SYSTEM, ASK, tools=tools) for tools in (TOOLS, [*TOOLS[2:], *TOOLS[:2]]))
    census = count(write(tmp_path / "log", *requests))
    [cause] = census.causes.largest
    assert cause.name.words == "tools come in another order"
    assert cause.tokens == tokens(census, 1)["shifted"] >= 4 * 60 + 50


def test_a_compaction(tmp_path):
    summary = message("user", words(7, 90))
    log = write(tmp_path / "log", chat(SYSTEM, *turns(0, 9)), chat(SYSTEM, summary, *turns(5, 4)))
    census = count(log)
    assert tokens(census, 1) == {"prefix": 200, "shifted": 4 * 80, "near": 0, "new": 90}
    [cause] = census.causes.largest
    assert cause.name.words == "messages are replaced by fewer ones (compaction)"
    assert cause.tokens == 4 * 80


def test_a_file_that_is_read_again_after_an_edit(tmp_path):
    file = words(8, 300).split()
    edited = [*file[:150], "another", *file[151:]]
    read = [message("tool", " ".join(file)), *turns(1, 1)]
    again = [*read, message("tool", " ".join(edited))]
    census = count(write(tmp_path / "log", chat(SYSTEM, ASK, *read), chat(SYSTEM, ASK, *again)))
    assert tokens(census, 1) == {"prefix": 200 + 50 + 300 + 80, "shifted": 299, "near": 1, "new": 0}
    [cause] = census.causes.largest
    assert cause.name.words == "a result of a tool comes again after an edit"
    assert cause.tokens == 299
    assert "another" in cause.new


def test_passages_in_another_order(tmp_path):
    passages = [words(20 + number, 90) for number in range(4)]

    def question(number: int, order: tuple[int, ...]) -> dict[str, Any]:
        return chat(SYSTEM, message("user", "\n".join([*(passages[at] for at in order), words(30 + number, 20)])))

    census = count(write(tmp_path / "log", question(0, (0, 1, 2, 3)), question(1, (2, 0, 3, 1))))
    counts = tokens(census, 1)
    assert counts["prefix"] == 200
    assert 4 * 89 <= counts["shifted"] <= 4 * 90 + 4
    [cause] = census.causes.largest
    assert cause.name.words == "passages come in another order or choice in a message of the user"
    # Blending takes all but the leads of four passages, and recomputes 5 % of it.
    blended = census.ways["exact prefixes, 1,000,000 tokens, and blending at 5%"]
    assert blended.rows <= census.ways["exact prefixes, no limit"].rows


def test_a_prefix_that_has_left_the_cache(tmp_path):
    other = chat(message("system", words(40, 400)), ASK)
    log = write(tmp_path / "log", chat(SYSTEM, *turns(0, 1)), other, chat(SYSTEM, *turns(0, 3)))
    census = count(log, cache_tokens=400)
    small, large = (census.ways[f"exact prefixes, {size} tokens"] for size in (400, 800))
    assert small.rows - large.rows == 272  # 17 blocks of the 280 tokens of the first request
    assert [cause.name.words for cause in census.causes.largest] == ["a known prefix has left the cache"]


def test_memory_stays_within_its_budget(tmp_path):
    log = write(tmp_path / "log", *(chat(message("user", words(number, 500))) for number in [*range(200), 199, 0]))
    census = count(log, budget=400_000)
    assert census.memory.nbytes <= 0.7 * 400_000
    assert census.memory.evicted
    assert tokens(census, 200)["prefix"] == 500
    assert tokens(census, 201)["new"] == 500
