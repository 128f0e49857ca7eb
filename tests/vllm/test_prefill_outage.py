"""What a prefill process that hangs, or a comparison that cannot be made, costs those who ask vLLM: next to nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from blend.integrations.vllm import gate as gates
from blend.integrations.vllm import outage, wire
from blend.integrations.vllm.gate import Gate, Rewritten
from blend.serve.http.errors import ApiError

CHAT = "/v1/chat/completions"
PLAIN = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
WANTED = {**PLAIN, "documents": [{"text": "The harbour has three gates."}]}
BLENDED = (
    {"prompt": [1, 2], "model": "m", "sources": [{"id": "a"}]},
    {"ready": {"ticket": "0" * 32, "salt": "s"}, "told": {"figures": {}}},
)


class Process:
    """What answers at a socket: `says` to each that asks, and then no more; the connection stays open unless it `leaves`."""

    def __init__(self, name: str) -> None:
        self.says: Sequence[wire.Message] = ()
        self.asked, self.leaves = 0, False
        self._place = wire.bind(name)
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
                message = wire.receive(sock)[0]
                self.asked += "ask" in message
                for one in self.says if "ask" in message else [{"checks": []}]:
                    wire.send(sock, one)
                if self.leaves:
                    sock.close()

    def stop(self, name: str) -> None:
        self._stopping = True
        wire.connect(name, 5).close()
        self._thread.join(10)
        wire.close(self._place, name)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    name = f"@kvblend-test-{secrets.token_hex(4)}"
    monkeypatch.setenv(wire.VARIABLE, name)
    monkeypatch.setenv("KVBLEND_VLLM_TIMEOUT", "30")
    monkeypatch.setattr(gates, "_PASS_S", 30.0)
    monkeypatch.setattr(outage, "_PAUSE_S", 600.0)
    monkeypatch.setattr(Gate, "_prompts", lambda self: SimpleNamespace(prompt=lambda part: None))
    found = Process(name)
    yield found
    found.stop(name)


def rewritten(gate: Gate, body: dict[str, Any]) -> tuple[Rewritten, float]:
    """What becomes of a request, and how long it took, in seconds."""

    async def run() -> tuple[Rewritten, float]:
        begin = time.monotonic()
        return await gate.rewritten(dict(body), CHAT), time.monotonic() - begin

    return asyncio.run(run())


def hung(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate that one request has found a process to hang through."""
    gate = Gate(None)
    with monkeypatch.context() as patch:
        patch.setattr(gates, "_PASS_S", 0.2)
        found, seconds = rewritten(gate, PLAIN)
    assert found == Rewritten(PLAIN)
    assert 0.2 <= seconds < 10
    return gate


def test_who_asks_nothing_of_kvblend_waits_a_moment_for_a_process_that_hangs(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = hung(monkeypatch)
    for body in (PLAIN, WANTED) * 3:  # now it is known to hang
        assert rewritten(gate, body)[0].body == PLAIN
    assert process.asked == 1
    assert [one.levelname for one in caplog.records if one.name == "vllm.kvblend"] == ["WARNING"]


def test_a_process_that_hung_is_asked_again_by_one_request_at_a_time(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "_PAUSE_S", 0.0)
    gate = hung(monkeypatch)

    async def together() -> list[Rewritten]:
        return await asyncio.gather(*(gate.rewritten(dict(PLAIN), CHAT) for _ in range(8)))

    with monkeypatch.context() as patch:
        patch.setattr(gates, "_PASS_S", 0.2)
        assert asyncio.run(together()) == [Rewritten(PLAIN)] * 8
    assert process.asked == 2
    process.says = ({"pass": True},)
    with caplog.at_level(logging.INFO, "vllm.kvblend"):
        assert rewritten(gate, PLAIN)[0] == Rewritten(PLAIN)
    assert "blended again" in caplog.messages[-1]
    assert asyncio.run(together()) == [Rewritten(PLAIN)] * 8
    assert process.asked == 11


def test_the_time_limit_for_documents_is_the_operators(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_VLLM_TIMEOUT", "0.4")
    gate = Gate(None)
    found, seconds = rewritten(gate, WANTED)
    assert found.body == PLAIN
    assert 0.4 <= seconds < 10
    assert rewritten(gate, WANTED)[0].body == PLAIN
    assert process.asked == 1


def test_whoever_leaves_while_looking_does_not_keep_others_from_it(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_PAUSE_S", 0.0)
    gate = hung(monkeypatch)

    async def left() -> None:
        task = asyncio.ensure_future(gate.rewritten(dict(WANTED), CHAT))
        while process.asked < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(left())
    process.says = ({"pass": True},)
    rewritten(gate, PLAIN)
    assert process.asked == 3


def test_an_outage_that_costs_no_time_is_over_at_once(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.says = ({"pass": True},)
    gate = Gate(None)
    here, gate._socket = gate._socket, "@kvblend-nobody-is-here"
    rewritten(gate, PLAIN)
    gate._socket = here
    rewritten(gate, PLAIN)
    assert process.asked == 1


def test_a_refusal_is_an_answer(process: Process) -> None:
    process.says = ({"error": [400, "no", "invalid_value", None]},)
    gate = Gate(None)
    for _ in range(2):
        with pytest.raises(ApiError):
            rewritten(gate, WANTED)
    assert process.asked == 2


def test_nonsense_of_another_version_is_answered_by_vllm(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.says = ({"something": "new"},)
    assert rewritten(Gate(None), WANTED)[0].body == PLAIN
    assert "a request could not be handed over" in caplog.text


def test_a_process_that_goes_between_prompt_and_kv_leaves_the_prompt_and_its_sources(process: Process) -> None:
    process.says, process.leaves = BLENDED[:1], True
    found = rewritten(Gate(None), WANTED)[0]
    assert found.body == {**PLAIN, "kv_transfer_params": {"prompt_token_ids": [1, 2]}}
    assert found.told == {"sources": [{"id": "a"}], "figures": {"method": "full", "reason": "no prefill process"}}


def test_a_comparison_that_vllm_refuses_is_a_reason_and_is_remembered(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared = []

    async def reason_against(*given: Any) -> str:
        compared.append(given)
        raise ValueError("Requested sample logprobs of 10, which is greater than max allowed: 5")

    monkeypatch.setattr(gates, "reason_against", reason_against)
    process.says = BLENDED
    gate = Gate(None)

    async def asked() -> list[Rewritten]:
        return [await gate.rewritten(dict(WANTED), CHAT) for _ in range(3)]

    for found in asyncio.run(asked()):
        assert found.body == {**PLAIN, "kv_transfer_params": {"prompt_token_ids": [1, 2]}}
        assert found.told == {"sources": [{"id": "a"}], "figures": {"method": "full", "reason": "refused"}}
    assert len(compared) == 1
    assert "greater than max allowed: 5" in caplog.text
