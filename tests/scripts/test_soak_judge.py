"""How the soak of a server judges what comes back: right answers, clear errors, nonsense, sources that were removed."""

from __future__ import annotations

import asyncio
import json
import math
import time

import httpx
import pytest
from soak_visitors import MADE, OTHERWISE, OWN, held, visitors

from _soak_serve import TIE, Answer, Ledger, Visitors, is_clear_error, made_of, margin, reference


def test_a_reference_out_of_a_whole_answer() -> None:
    content = [
        {"token": "The", "top_logprobs": [{"logprob": -0.5}, {"logprob": -2.0}]},
        {"token": " end", "top_logprobs": [{"logprob": -1.0}, {"logprob": -1.0001}]},
    ]
    own = {"figures": {"method": "blend", "missing": 1}, "sources": [{"hit": True}, {"hit": False}]}
    found = reference(
        {"choices": [{"message": {"content": "The end"}, "logprobs": {"content": content}}], "kvblend": own}
    )
    assert found.answer == Answer("The end", OTHERWISE)
    assert [name for name, _ in found.tokens] == ["The", " end"]
    assert [distance for _, distance in found.tokens] == pytest.approx([1.5, 0.0001])


def test_only_where_rounding_decides_another_token_is_right() -> None:
    assert margin(held("The bell", 1.0, 1e-4, 1.0), "The bird") < TIE
    assert margin(held("The bell", 1.0, 1e-4, 1.0), "That bird") >= TIE, "it differs before"
    assert margin(held("The bell", 1.0, 1.0, 1e-4), "The bird") >= TIE, "it differs before"
    assert margin(held("The bell", 1.0, 1.0, 1e-4), "The be") < TIE, "it ends there"


def test_the_ledger_finds_what_is_off() -> None:
    ledger = Ledger()
    references = [held()]
    ledger.judge("q", Answer("The bell", MADE), references)
    ledger.judge("q", Answer("Another", OTHERWISE), references)
    assert not ledger.off
    ledger.judge("q", Answer("The bull", MADE), references)
    assert len(ledger.off) == 1
    assert "'The bull' instead of 'The bell'" in ledger.off[0]
    assert ledger.counts == {"same answer": 1, "made of other caches": 1, "OFF": 1, "blended": 3}


CLEAR = b'{"error": {"message": "no", "type": "server_error", "param": null, "code": "x"}}'


@pytest.mark.parametrize(
    "content", [b"", b"no", b"{}", b'{"error": "no"}', b'{"error": {"message": "", "type": "x"}}', b"[1]"]
)
def test_what_is_no_clear_error(content: bytes) -> None:
    assert is_clear_error(CLEAR)
    assert not is_clear_error(content)


@pytest.mark.parametrize(
    ("response", "off"),
    [
        ((400, CLEAR), ""),
        ((429, CLEAR), ""),
        ((200, b"{}"), "status 200"),
        ((400, b"Bad request"), "without a clear error"),
        ((500, CLEAR), "while nothing was broken"),
        ((503, b""), "without a clear error"),
    ],
)
def test_nonsense_is_to_be_refused_clearly(response: tuple[int, bytes], off: str) -> None:
    someone = visitors(lambda request: httpx.Response(response[0], content=response[1]))
    asyncio.run(someone.nonsense())
    assert [off in line for line in someone.ledger.off] == ([True] if off else [])


def test_a_failing_store_excuses_an_error_but_no_wrong_answer() -> None:
    refused = visitors(lambda request: httpx.Response(503, content=CLEAR))
    opened = json.dumps({"choices": [{"delta": {"content": "The bull"}}], "kvblend": OWN, "usage": USAGE})
    wrong = stream(opened, "[DONE]")
    for one in (refused, wrong):
        one.failing_until = math.inf
        asyncio.run(one.ask())
    assert not refused.ledger.off
    assert len(wrong.ledger.off) == 1
    refused.failing_until = time.monotonic()
    asyncio.run(refused.ask())
    assert "while nothing was broken" in refused.ledger.off[0]


USAGE = {"completion_tokens": 3, "prompt_tokens": 9}


def stream(*events: str) -> Visitors:
    content = "".join(f"data: {event}\n\n" for event in events).encode()
    return visitors(lambda request: httpx.Response(200, content=content))


def test_a_stream_is_judged_by_its_end() -> None:
    opened = json.dumps({"choices": [{"delta": {"role": "assistant"}}], "kvblend": OWN})
    said = json.dumps({"choices": [{"delta": {"content": "The bell"}}], "usage": USAGE})
    whole, cut, failed = stream(opened, said, "[DONE]"), stream(opened, said), stream(opened, CLEAR.decode())
    for one in (whole, cut, failed):
        asyncio.run(one.ask())
    assert whole.ledger.counts == {"same answer": 1, "blended": 1}
    assert cut.ledger.off == ["ask: ended without [DONE]"]
    assert "while nothing was broken" in failed.ledger.off[0]


def test_a_source_that_was_removed_before_is_found_out() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, json={"kvblend": {"sources": [{"text": "x notice number 3 of the harbour office y"}]}}
        )

    someone = visitors(answer)
    someone.documents, someone.removed = {"4": "notice-4"}, {"2"}
    asyncio.run(someone.retrieve())
    assert not someone.ledger.off
    someone.removed = {"3"}
    asyncio.run(someone.retrieve())
    assert "removed before" in someone.ledger.off[0]


def test_what_is_remembered_whole_is_as_good_as_full_prefill() -> None:
    sources = [{"hit": True}, {"hit": False}]
    blended = {"method": "blend", "rows": 90, "rows_reused": 5, "missing": 1}
    assert made_of({}) == (None, (), None, 0, 0)
    assert made_of({"figures": blended, "sources": sources}) == ("blend", (True, False), 1, 5, 0)
    assert made_of({"figures": {**blended, "rows_reused": 89}, "sources": sources}) == ("full",)
    assert made_of({"figures": {**blended, "method": "full"}, "sources": sources}) == ("full",)
