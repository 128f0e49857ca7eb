"""What a prefill process that hangs, or a comparison that cannot be made, costs vLLM's clients: next to nothing."""

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from blend.integrations.vllm.middleware import PrefillTimeouts, Rewriter, Rewritten
from blend.integrations.vllm.transport import VARIABLE, Message, address, bind, close
from blend.serve.http.errors import ApiError

CHAT = "/v1/chat/completions"
PLAIN = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
WANTED = {**PLAIN, "documents": [{"text": "The harbour has three gates."}]}
BLENDED = (
    {"prompt": [1, 2], "model": "m", "sources": [{"id": "a"}]},
    {"ready": {"ticket": "0" * 32, "salt": "s"}, "shown": {"figures": {}}},
)
SHORT, PATIENT = PrefillTimeouts(0.3, 0.1, pause=600.0), PrefillTimeouts(30.0, 30.0, pause=600.0)


class Process:
    """What answers at a socket: `says` to each that asks, and then no more; the connection stays open unless it `leaves`."""

    def __init__(self, name: str) -> None:
        self.says: Sequence[Message] = ()
        self.asked, self.leaves = 0, False
        self._place = bind(name)
        self._place.listen(50)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with ExitStack() as held:
            while True:
                sock = held.enter_context(self._place.accept()[0])
                if self._stopping:
                    return
                message = json.loads(sock.makefile().readline())
                self.asked += "ask" in message
                for one in self.says if "ask" in message else [{"checks": []}]:
                    sock.sendall(json.dumps(one).encode() + b"\n")
                if self.leaves:
                    sock.close()

    def stop(self, name: str) -> None:
        self._stopping = True
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(address(name))
        self._thread.join(10)
        close(self._place, name)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    name = f"@kvblend-test-{secrets.token_hex(4)}"
    monkeypatch.setenv(VARIABLE, name)
    found = Process(name)
    yield found
    found.stop(name)


def rewriter(timeouts: PrefillTimeouts = PATIENT, **more: Any) -> Rewriter:
    """Where no prompt is made in vLLM's server."""
    prompts: Any = SimpleNamespace(prompt=lambda part: None)
    return Rewriter(None, timeouts=timeouts, prompts=prompts, **more)


def rewritten(given: Rewriter, body: dict[str, Any]) -> tuple[Rewritten, float]:
    """What becomes of a request, and how long it took, in seconds."""

    async def run() -> tuple[Rewritten, float]:
        begin = time.monotonic()
        return await given.rewritten(dict(body), CHAT), time.monotonic() - begin

    return asyncio.run(run())


@pytest.mark.parametrize(("asked", "waits"), [(PLAIN, 0.1), (WANTED, 0.3)])
def test_a_process_that_hangs_costs_one_request_its_time(
    process: Process, caplog: pytest.LogCaptureFixture, asked: dict[str, Any], waits: float
) -> None:
    mine = rewriter(SHORT)
    found, seconds = rewritten(mine, asked)
    assert found == Rewritten(PLAIN)
    assert waits <= seconds
    for body in (PLAIN, WANTED) * 3:  # now it is known to hang
        assert rewritten(mine, body)[0].body == PLAIN
    assert process.asked == 1
    assert [one.levelname for one in caplog.records if one.name == "vllm.kvblend"] == ["WARNING"]


def together(given: Rewriter, body: dict[str, Any]) -> list[Rewritten]:
    """Of eight requests at once."""

    async def run() -> list[Rewritten]:
        return await asyncio.gather(*(given.rewritten(dict(body), CHAT) for _ in range(8)))

    return asyncio.run(run())


def test_a_process_that_hung_is_asked_again_one_by_one(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    mine = rewriter(SHORT._replace(pause=0.0))
    assert rewritten(mine, PLAIN)[0] == Rewritten(PLAIN)
    assert together(mine, PLAIN) == [Rewritten(PLAIN)] * 8
    assert process.asked == 2
    process.says = ({"pass": True},)
    with caplog.at_level(logging.INFO, "vllm.kvblend"):
        assert rewritten(mine, PLAIN)[0] == Rewritten(PLAIN)
    assert "blended again" in caplog.messages[-1]
    assert together(mine, PLAIN) == [Rewritten(PLAIN)] * 8
    assert process.asked == 11


def test_a_time_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_VLLM_TIMEOUT", "0.4")
    assert PrefillTimeouts.from_environment() == PrefillTimeouts(0.4)


def test_a_client_that_leaves_while_it_tries_does_not_keep_others_from_it(process: Process) -> None:
    mine = rewriter(PrefillTimeouts(30.0, 0.2, pause=0.0))
    rewritten(mine, PLAIN)

    async def left() -> None:
        task = asyncio.ensure_future(mine.rewritten(dict(WANTED), CHAT))
        while process.asked < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(left())
    process.says = ({"pass": True},)
    rewritten(mine, PLAIN)
    assert process.asked == 3


def test_an_outage_that_costs_no_time_is_over_at_once(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.leaves = True  # at once, as one that is being started anew
    mine = rewriter()
    assert rewritten(mine, PLAIN)[0].body == PLAIN
    process.says, process.leaves = ({"pass": True},), False
    with caplog.at_level(logging.INFO, "vllm.kvblend"):
        rewritten(mine, PLAIN)
    assert process.asked == 2
    assert "blended again" in caplog.messages[-1]


def test_a_refusal_is_an_answer(process: Process) -> None:
    process.says = ({"error": [400, "no", "invalid_value", None]},)
    mine = rewriter()
    for _ in range(2):
        with pytest.raises(ApiError):
            rewritten(mine, WANTED)
    assert process.asked == 2


FULL = {**PLAIN, "kv_transfer_params": {"prompt_token_ids": [1, 2]}}


def shown(reason: str) -> dict[str, Any]:
    return {"sources": [{"id": "a"}], "figures": {"method": "full", "reason": reason}}


def test_a_process_that_goes_between_prompt_and_kv_leaves_the_prompt_and_its_sources(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.says, process.leaves = BLENDED[:1], True
    assert rewritten(rewriter(), WANTED)[0] == Rewritten(FULL, shown("no prefill process"))
    assert rewritten(rewriter(), PLAIN)[0] == Rewritten(PLAIN, shown("no prefill process")), "pasted passages"
    process.says, process.leaves = ({"something": "new"},), False
    assert rewritten(rewriter(), WANTED)[0].body == PLAIN, "an unknown message"
    assert "a request could not be handed over" in caplog.text


def test_a_comparison_that_vllm_refuses_is_remembered(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    compared = []

    async def compare(*given: Any) -> str:
        compared.append(given)
        raise ValueError("Requested sample logprobs of 10, which is greater than max allowed: 5")

    process.says = BLENDED
    mine = rewriter(compare=compare)

    async def asked() -> list[Rewritten]:
        return [await mine.rewritten(dict(WANTED), CHAT) for _ in range(3)]

    assert asyncio.run(asked()) == [Rewritten(FULL, shown("refused"))] * 3
    assert len(compared) == 1
    assert "greater than max allowed: 5" in caplog.text
