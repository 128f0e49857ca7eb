"""`scripts/soak_serve`: how it judges what comes back and what it looks at; and a quarter of a minute of the real thing."""

import argparse
import asyncio
import json
import math
import os
import random
import time
from pathlib import Path

import httpx
import pytest
from commands import main

from _soak_serve import (
    BREAKS,
    TIE,
    Answer,
    Ledger,
    ProcessUse,
    Question,
    Reference,
    Soak,
    Visitors,
    broken,
    growth,
    look,
)

OWN = {"figures": {"method": "blend", "missing": 0}, "sources": [{"hit": True}] * 2}
USAGE = {"completion_tokens": 3, "prompt_tokens": 9}
MADE, OTHERWISE = ("blend", (True, True), 0, 0, 0), ("blend", (True, False), 1, 0, 0)
CLEAR = b'{"error": {"message": "no", "type": "server_error", "param": null, "code": "x"}}'
MEGABYTE = 1 << 20


def reference(*distances):
    tokens = tuple(zip(("The", " be", "ll"), distances or (1.0, 1.0, 1.0), strict=True))
    return Reference(Answer("The bell", MADE), tokens)


def visitors(status, content):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
    client = httpx.AsyncClient(transport=transport, base_url="http://here")
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    return Visitors(client, "m", [Question("q", body, [reference()])], Ledger(), random.Random(0))


def stream(*events):
    return visitors(200, "".join(f"data: {event}\n\n" for event in events).encode())


def test_a_reference_out_of_a_whole_answer():
    content = [
        {"token": "The", "top_logprobs": [{"logprob": -0.5}, {"logprob": -2.0}]},
        {"token": " end", "top_logprobs": [{"logprob": -1.0}, {"logprob": -1.0001}]},
    ]
    own = {"figures": {"method": "blend", "missing": 1}, "sources": [{"hit": True}, {"hit": False}]}
    choice = {"message": {"content": "The end"}, "logprobs": {"content": content}}
    answer, tokens = Reference.of({"choices": [choice], "kvblend": own})
    assert answer == Answer("The end", OTHERWISE)
    assert [name for name, _ in tokens] == ["The", " end"]
    assert [distance for _, distance in tokens] == pytest.approx([1.5, 0.0001])


def test_only_where_rounding_decides_another_token_is_right():
    assert reference(1.0, 1e-4, 1.0).margin("The bird") < TIE
    assert reference(1.0, 1e-4, 1.0).margin("That bird") >= TIE, "it differs before"
    assert reference(1.0, 1.0, 1e-4).margin("The bird") >= TIE, "it differs before"
    assert reference(1.0, 1.0, 1e-4).margin("The be") < TIE, "it ends there"


def test_the_ledger_finds_what_is_off():
    ledger = Ledger()
    for answer in (Answer("The bell", MADE), Answer("Another", OTHERWISE), Answer("The bull", MADE)):
        assert not ledger.off
        ledger.judge("q", answer, [reference()])
    assert len(ledger.off) == 1
    assert "'The bull' instead of 'The bell'" in ledger.off[0]
    assert ledger.counts == {"same answer": 1, "made of other caches": 1, "blended": 3}


@pytest.mark.parametrize(
    ("status", "content", "off"),
    [
        (400, CLEAR, ""),
        (429, CLEAR, ""),
        (200, b"{}", "status 200"),
        (400, b"Bad request", "without a clear error"),
        (500, CLEAR, "while nothing was broken"),
        (503, b"", "without a clear error"),
        (400, b'{"error": {"message": "", "type": "x"}}', "without a clear error"),
    ],
)
def test_nonsense_is_to_be_refused_clearly(status, content, off):
    someone = visitors(status, content)
    asyncio.run(someone.nonsense())
    assert [off in line for line in someone.ledger.off] == ([True] if off else [])


def test_a_failing_store_excuses_an_error_but_no_wrong_answer():
    said = {"choices": [{"delta": {"content": "The bull"}}], "kvblend": OWN, "usage": USAGE}
    refused, wrong = visitors(503, CLEAR), stream(json.dumps(said), "[DONE]")
    for someone in (refused, wrong):
        someone.failing_until = math.inf
        asyncio.run(someone.ask())
    assert not refused.ledger.off
    assert len(wrong.ledger.off) == 1
    refused.failing_until = time.monotonic()
    asyncio.run(refused.ask())
    assert "while nothing was broken" in refused.ledger.off[0]


def test_a_stream_is_judged_by_its_end():
    opened = json.dumps({"choices": [{"delta": {"role": "assistant"}}], "kvblend": OWN})
    said = json.dumps({"choices": [{"delta": {"content": "The bell"}}], "usage": USAGE})
    whole, cut, failed = stream(opened, said, "[DONE]"), stream(opened, said), stream(opened, CLEAR.decode())
    for someone in (whole, cut, failed):
        asyncio.run(someone.ask())
    assert whole.ledger.counts == {"same answer": 1, "blended": 1}
    assert cut.ledger.off == ["ask: ended without [DONE]"]
    assert "while nothing was broken" in failed.ledger.off[0]


def test_a_source_that_was_removed_before_is_found_out():
    sources = [{"text": "x notice number 3 of the harbour office y"}]
    someone = visitors(200, json.dumps({"kvblend": {"sources": sources}}).encode())
    someone.oldest = 3
    asyncio.run(someone.retrieve())
    assert not someone.ledger.off
    someone.oldest = 4
    asyncio.run(someone.retrieve())
    assert "removed before" in someone.ledger.off[0]


def test_what_is_remembered_whole_is_as_good_as_full_prefill():
    sources = [{"hit": True}, {"hit": False}]
    blended = {"method": "blend", "rows": 90, "rows_reused": 5, "missing": 1}

    def made(figures):
        return Answer.of("", {"figures": figures, "sources": sources})[1:]

    assert made(blended) == (("blend", (True, False), 1, 5, 0), "blended")
    assert made({**blended, "rows_reused": 89}) == (("full",), "remembered")
    assert made({**blended, "method": "full", "reason": "short"}) == (("full",), "computed")


@pytest.mark.parametrize("reason", ["", "store_unreachable"])
def test_what_could_not_be_blended_does_not_count_against_a_soak(reason):
    ledger = Ledger()
    full = Answer.of("The bell", {"figures": {"method": "full", "reason": reason, "rows": 90}})
    for answer in (full, full, Answer("The bell", MADE)):
        ledger.judge("q", answer, [])
    assert not ledger.too_few_blended()
    ledger.judge("q", Answer.of("The bell", {"figures": {"method": "full", "reason": "new", "rows": 90}}), [])
    assert ledger.too_few_blended() == "too few answers were blended: 1 blended, 1 computed, 0 remembered"


def looks(sizes):
    return [ProcessUse(5.0 * i, int(size * MEGABYTE), 5, 10) for i, size in enumerate(sizes)]


def test_growth_is_that_of_the_line_not_of_single_large_requests():
    draws = random.Random(0)
    flat = [700 + draws.uniform(-3, 3) + (300 if i % 17 == 0 else 0) for i in range(200)]
    assert abs(growth(looks(flat))) < 5 * MEGABYTE
    leak = [size + i for i, size in enumerate(flat)]  # 1 MB a look
    assert growth(looks(leak)) == pytest.approx(180 * MEGABYTE, rel=0.05)


@pytest.fixture
def store(tmp_path):
    for number in range(20):
        entry = tmp_path / "store" / "kv" / "objects" / f"{number % 3}" / f"{number}.safetensors"
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(bytes([number]) * 100)
    return tmp_path / "store"


def contents(store):
    return {path.name: path.read_bytes() for path in store.rglob("*.safetensors")}


@pytest.mark.parametrize("name", ["gone", "blocked"])
def test_a_store_that_fails_is_whole_again_whatever_was_written_meanwhile(store, name):
    before = contents(store)
    objects = store / "kv" / "objects"
    with broken(name, store, random.Random(0)):
        assert not (objects / "0" / "0.safetensors").exists()
        with pytest.raises(OSError, match=r"Not a directory|No such file"):
            (objects / "0" / "new.safetensors").write_bytes(b"")
        if name == "gone":  # a server that goes on makes its folders anew
            objects.mkdir(parents=True)
            (objects / "new.safetensors").write_bytes(b"new")
    assert contents(store) == before


def test_damage_stays_for_the_server_to_mend(store):
    before = contents(store)
    with broken("damaged", store, random.Random(0)):
        pass
    halves = [name for name, content in contents(store).items() if content != before[name]]
    assert len(halves) == 2
    assert all(contents(store)[name] == before[name][:50] for name in halves)


def verdict(change):
    """Of a soak that went well but for this."""
    options = argparse.Namespace(minutes=0.25, grow=64)
    soak = Soak(options, visitors(200, b""), os.getpid(), Path(), quiet_s=0.1)
    soak.looks = looks([700.0] * 4)
    soak.visitors.ledger.counts["blended"] = 9

    async def run():
        soak.before = look(os.getpid(), 0.0)  # inside of the loop, which has files of its own
        change(soak)
        return await soak.verdict()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "off"),
    [
        (lambda soak: None, ""),
        (lambda soak: soak.visitors.ledger.wrong("an answer"), "OFF an answer"),
        (
            lambda soak: soak.visitors.ledger.counts.update(remembered=8, computed=2),
            "OFF too few answers were blended: 9 blended, 2 computed, 8 remembered",
        ),
        (lambda soak: setattr(soak, "looks", looks([700.0, 800.0, 900.0, 1000.0])), "OFF memory grew by"),
        (lambda soak: setattr(soak, "before", soak.before._replace(threads=0)), "OFF left over in quiet: "),
    ],
    ids=["nothing", "answer", "few blended", "memory", "threads"],
)
def test_the_verdict(change, off, capsys):
    assert verdict(change) == int(bool(off))
    assert (off or "PASS") in capsys.readouterr().out


def test_a_short_soak_of_a_real_server(capfd):
    status, said = main("soak_serve", "--tiny"), capfd.readouterr()
    assert status == 0, said
    *_, counts, last = said.out.splitlines()
    assert last.startswith("PASS")
    kinds = ("blended", "same answer", "left", "corpus changed", "status 400", *(f"store {name}" for name in BREAKS))
    assert [kind for kind in kinds if f"{kind} " not in counts] == [], counts
