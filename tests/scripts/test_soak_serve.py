"""`scripts/soak_serve`: how it judges what comes back and what it looks at; and a quarter of a minute of the real thing."""

import argparse
import asyncio
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable
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
    made_of,
    margin,
    reference,
)  # fmt: skip

OWN = {"figures": {"method": "blend", "missing": 0}, "sources": [{"hit": True}] * 2}

MADE, OTHERWISE = ("blend", (True, True), 0, 0, 0), ("blend", (True, False), 1, 0, 0)


def held(text: str = "The bell", *distances: float) -> Reference:
    tokens = tuple(zip(("The", " be", "ll"), distances or (1.0, 1.0, 1.0), strict=True))
    return Reference(Answer(text, MADE), tokens)


def visitors(answer: Callable[[httpx.Request], httpx.Response]) -> Visitors:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://here")
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    return Visitors(client, "m", [Question("q", body, [held()])], Ledger(), random.Random(0))


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
    ("response", "off"),
    [
        ((400, CLEAR), ""),
        ((429, CLEAR), ""),
        ((200, b"{}"), "status 200"),
        ((400, b"Bad request"), "without a clear error"),
        ((500, CLEAR), "while nothing was broken"),
        ((503, b""), "without a clear error"),
        ((400, b'{"error": {"message": "", "type": "x"}}'), "without a clear error"),
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


MEGABYTE = 1 << 20


def looks(sizes: list[float]) -> list[ProcessUse]:
    return [ProcessUse(5.0 * i, int(size * MEGABYTE), 5, 10) for i, size in enumerate(sizes)]


def test_growth_is_that_of_the_line_not_of_single_large_requests() -> None:
    draws = random.Random(0)
    noise = [draws.uniform(-3, 3) for _ in range(200)]
    flat = [700 + one + (300 if i % 17 == 0 else 0) for i, one in enumerate(noise)]
    leak = [one + i for i, one in enumerate(flat)]  # 1 MB a look
    assert abs(growth(looks(flat))) < 5 * MEGABYTE
    assert growth(looks(leak)) == pytest.approx(199 * MEGABYTE, rel=0.05)
    assert growth(looks([1.0])) == 0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for number in range(20):
        entry = tmp_path / "store" / "kv" / "objects" / f"{number % 3}" / f"{number}.safetensors"
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(bytes([number]) * 100)
    return tmp_path / "store"


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.rglob("*.safetensors")}


@pytest.mark.parametrize("name", ["gone", "blocked"])
def test_a_store_that_fails_is_whole_again_whatever_was_written_meanwhile(store: Path, name: str) -> None:
    before, objects = contents(store), store / "kv" / "objects"
    with broken(name, store, random.Random(0)):
        assert not (objects / "0" / "0.safetensors").exists()
        with pytest.raises(OSError, match=r"Not a directory|No such file"):
            (objects / "0" / "new.safetensors").write_bytes(b"")
        if name == "gone":  # a server that goes on makes its folders anew
            objects.mkdir(parents=True)
            (objects / "new.safetensors").write_bytes(b"new")
    assert contents(store) == before


def test_damage_stays_for_the_server_to_mend(store: Path) -> None:
    before = contents(store)
    with broken("damaged", store, random.Random(0)):
        pass
    halves = [name for name, content in contents(store).items() if content != before[name]]
    assert len(halves) == 2
    assert all(contents(store)[name] == before[name][:50] for name in halves)
    assert set(BREAKS) == {"gone", "blocked", "damaged"}


def soaked(minutes: float = 0.1, grow: float = 64) -> Soak:
    options = argparse.Namespace(minutes=minutes, grow=grow)
    soak = Soak(options, visitors(lambda request: httpx.Response(200)), os.getpid(), Path(), quiet_s=0.1)
    soak.looks = looks([700.0] * 3)
    soak.visitors.ledger.counts["blended"] = 9
    return soak


def verdict(soak: Soak, meanwhile: Callable[[], object] = lambda: None) -> int:
    async def run() -> int:
        soak.before = look(os.getpid(), 0.0)  # inside of the loop, which has files of its own
        meanwhile()
        return await soak.verdict()

    return asyncio.run(run())


def test_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(soaked()) == 0
    assert "PASS" in capsys.readouterr().out

    wrong = soaked()
    wrong.visitors.ledger.wrong("an answer")
    assert verdict(wrong) == 1
    assert "OFF an answer" in capsys.readouterr().out

    remembered = soaked()
    remembered.visitors.ledger.counts.update(remembered=8, computed=2)
    assert verdict(remembered) == 1
    assert "OFF too few answers were blended: 9 blended, 2 computed, 8 remembered" in capsys.readouterr().out

    grown = soaked()
    grown.looks = looks([700.0, 800.0, 900.0, 1000.0])
    grown.options.minutes = 0.25
    assert verdict(grown) == 1
    assert "OFF memory grew by" in capsys.readouterr().out


def test_a_thread_that_stays_is_left_over(capsys: pytest.CaptureFixture[str]) -> None:
    soak, done = soaked(), threading.Event()
    thread = threading.Thread(target=done.wait)
    try:
        assert verdict(soak, thread.start) == 1
    finally:
        done.set()
        thread.join()
    assert "left over" in capsys.readouterr().out


def test_a_short_soak_of_a_real_server(capfd: pytest.CaptureFixture[str]) -> None:
    status, said = main("soak_serve", "--tiny"), capfd.readouterr()
    assert status == 0, said
    *_, counts, verdict = said.out.splitlines()
    assert verdict.startswith("PASS")
    for kind in (
        "blended",
        "same answer",
        "left",
        "corpus changed",
        *(f"store {name}" for name in BREAKS),
        "status 400",
    ):
        assert f"{kind} " in counts, counts
