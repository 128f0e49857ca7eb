"""The forms of requests of `scripts/soak_serve`: an answer in any protocol is read, and a wrong one is found."""

import asyncio
import json
import random

import httpx
import pytest

from _soak_forms import COMPLETIONS, MESSAGES, RESPONSES, FormVisitors, in_protocol, reply_of_stream, texts_of
from _soak_serve import Answer, Ledger, Question, Reference

CHAT = "/v1/chat/completions"
FULL = {"figures": {"method": "full", "rows": 90, "rows_reused": 5, "rows_computed": 85}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE = {
    CHAT: {"choices": [{"message": {"content": "The bell"}}]},
    COMPLETIONS: {"choices": [{"text": "The bell"}]},
    RESPONSES: {"output": [{"type": "message", "content": [{"type": "output_text", "text": "The bell"}]}]},
    MESSAGES: {"content": [{"type": "text", "text": "The bell"}]},
}
STREAMS = {
    CHAT: [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("The ", "bell")],
    COMPLETIONS: [{"choices": [{"index": 0, "text": text}]} for text in ("The ", "bell")],
    RESPONSES: [
        *({"type": "response.output_text.delta", "delta": text} for text in ("The ", "bell")),
        {"type": "response.completed", "response": {"kvblend": FULL}},
    ],
    MESSAGES: [
        *({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}} for text in ("The ", "bell")),
        {"type": "message_stop"},
    ],
}


def lines(events, *, ended=True):
    return [*(f"data: {json.dumps(event)}" for event in events), *(["data: [DONE]"] if ended else [])]


@pytest.mark.parametrize("path", WHOLE)
def test_an_answer_in_any_protocol(path):
    assert texts_of(WHOLE[path]) == ["The bell"]
    is_ended_by_event = path in (RESPONSES, MESSAGES)
    assert reply_of_stream(lines(STREAMS[path], ended=not is_ended_by_event)).texts == ["The bell"]
    with pytest.raises(ValueError, match="ended before its answer"):
        reply_of_stream(lines(STREAMS[path][:2], ended=False))
    with pytest.raises(ValueError, match="a stream failed"):
        reply_of_stream(lines([*STREAMS[path][:1], {"error": {"message": "no"}}]))


def test_calls_and_several_answers_are_answers_too():
    choices = [{"message": {"content": None, "tool_calls": [CALL]}}, {"message": {"content": "b"}}]
    assert texts_of({"choices": choices}) == ["f({})", "b"]
    deltas = [(1, {"content": "b"}), (0, {"tool_calls": [CALL]}), (1, {"content": "c"})]
    events = [{"choices": [{"index": index, "delta": delta}]} for index, delta in deltas]
    assert reply_of_stream(lines(events)).texts == ["f({})", "bc"]


def test_a_question_in_another_protocol():
    body = {"messages": [], "max_tokens": 4, "stop": ["x"]}
    assert in_protocol(CHAT, body) == body
    assert in_protocol(RESPONSES, body) == {"input": [], "max_output_tokens": 4, "stop": ["x"]}
    assert in_protocol(MESSAGES, body) == {"messages": [], "max_tokens": 4, "stop_sequences": ["x"]}


def asked(status, document):
    """The faults that one visitor notes who gets this reply."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=document))
    client = httpx.AsyncClient(transport=transport, base_url="http://here")
    tokens = (("The", 1.0), (" be", 1.0), ("ll", 1.0))
    question = Question("q", {"messages": []}, [Reference(Answer("The bell", ("full",)), tokens)])
    visitors = FormVisitors(client, "m", [question], Ledger(), random.Random(0), edits=[question])
    asyncio.run(visitors.visit(visitors.edit))
    return visitors.ledger.off


def test_a_wrong_answer_and_a_refusal_are_off_and_a_full_queue_is_not():
    right = {**WHOLE[CHAT], "kvblend": FULL}
    wrong = {**right, "choices": [{"message": {"content": "The bull"}}]}
    assert not asked(200, right)
    assert "'The bull' instead of 'The bell'" in asked(200, wrong)[0]
    assert "status 400" in asked(400, {"error": {"message": "no"}})[0]
    assert not asked(429, {"error": {"message": "later"}})
