"""`scripts/soak_serve`: what it looks at and how it judges; and a quarter of a minute of the real thing."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import main
from soak_visitors import OWN, visitors

from _soak_serve import BREAKS, Held, Soak, broken, growth, look, references

MEGABYTE = 1 << 20


def looks(sizes: list[float]) -> list[Held]:
    return [Held(5.0 * i, int(size * MEGABYTE), 5, 10) for i, size in enumerate(sizes)]


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


def test_of_the_references_in_full_the_server_remembers_nothing() -> None:
    asked = list[dict[str, Any]]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["kvblend"])
        choice = {"message": {"content": "The bell"}, "logprobs": {"content": []}}
        return httpx.Response(200, json={"choices": [choice], "kvblend": OWN})

    found = asyncio.run(references(visitors(answer).client, {"model": "m"}))
    assert [one.answer.text for one in found] == ["The bell"] * 2
    assert asked == [{"method": "blend"}, {"method": "full", "cold": True}]


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
