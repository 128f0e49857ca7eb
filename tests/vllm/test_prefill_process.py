"""The prefill process at its limits: descriptors, memory for held KV, slow clients. No vLLM is needed."""

import asyncio
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from places import PYTHONPATH
from tiny import serving

from blend.cli import blend
from blend.integrations.vllm.server import MOST_CONNECTIONS, PrefillService, most_connections
from blend.integrations.vllm.transport import KVPool, address
from blend.serve.events import EngineStats, Failed, Figures, Finished, QueueFullError, Started
from blend.serve.prompt import Cited, Prompt
from blend.types import Place, PromptLayout


def unused() -> str:
    return f"@kvblend-{secrets.token_hex(6)}"


WITHOUT_DESCRIPTORS = """
import resource, secrets, socket, threading, time
from blend.integrations.vllm.server import PrefillServer
from blend.integrations.vllm.transport import KVPool, TransportError, address, bind, request

name = f"@kvblend-{secrets.token_hex(6)}"
server = PrefillServer(None, KVPool(1 << 20), bind(name))
serving = threading.Thread(target=server.serve_until_stopped)
serving.start()
files = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 20, files + 20))
clients = []
while len(clients) < 100:
    try:
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].connect(address(name))
    except OSError:
        break
assert len(clients) < 100
time.sleep(0.3)
assert serving.is_alive()
for one in clients:
    one.close()
end = time.monotonic() + 30
while True:
    try:
        assert request(name, {"attach": "no such ticket"}, 5)[0] == {"held": None}
        break
    except TransportError:
        assert time.monotonic() < end
server.stop()
serving.join()
print("answered")
"""


def test_a_process_without_descriptors_goes_on_when_there_are_some_again() -> None:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "answered\n", done.stderr[-2000:]
    assert done.stderr.count("Too many open files") <= 1, "logged once"


def test_as_many_connections_as_there_are_descriptors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, most in ((1024, 448), (64, 1), (1 << 20, MOST_CONNECTIONS), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, allowed=allowed: (allowed, allowed))
        assert most_connections() == most


def test_a_client_that_sends_a_byte_now_and_then_is_dropped() -> None:
    name = unused()
    with serving(None, KVPool(1 << 20), name, timeout_s=0.3), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address(name))
        sock.settimeout(0.05)
        end = time.monotonic() + 20
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < end:
                sock.sendall(b"0")
                with suppress(TimeoutError):
                    if sock.recv(1) == b"":
                        break
        assert time.monotonic() < end


PART = {"model": "m", "messages": [{"role": "user", "content": "How many gates?"}]}
PROMPT = replace(
    Prompt.of(PromptLayout.of_chunks((1,), ((2,),), (3,))),
    cited=(Cited(Place((2,)), "document", "", "", "", "a gate"),),
)


def service_over(take: Any = None, require_room: Callable[[], None] = lambda: None) -> PrefillService:
    """Over as much of a service as is looked at. take: of the engine."""
    decoder = SimpleNamespace(rotations=(), dtype=SimpleNamespace(itemsize=4), fingerprint="m")
    rag = SimpleNamespace(decoder=decoder, store=SimpleNamespace(generation=""))
    service: Any = SimpleNamespace(
        tenant=lambda tenant: SimpleNamespace(rag=lambda: rag),
        rag=lambda request: rag,
        engine=SimpleNamespace(require_room=require_room),
        prepare=lambda asked: PROMPT,
        corpora=lambda tenant: (),
        hand_over=take,
    )
    return PrefillService(service, KVPool(1 << 20))


def asked(service: PrefillService) -> list[dict[str, Any]]:
    """Messages about a request."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(service.ask(PART, send))
    return sent


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (QueueFullError(3, 1.0), {"plain": "busy", "shown": {}}),  # it costs no search
        (RuntimeError("a secret"), None),
    ],
)
def test_a_full_queue_is_busy_and_a_fault_is_reported_without_its_words(fault: Exception, found: Any) -> None:
    def require_room() -> None:
        raise fault

    [message] = asked(service_over(require_room=require_room))
    if found is None:
        assert message["error"][0] == 500
        assert "secret" not in str(message)
    else:
        assert message == found


def opened(reason: str = "", method: Any = "blend") -> Started:
    rows = {"rows": 100, "rows_computed": 20, "rows_reused": 5, "rows_inexact": 0}
    found = {"hits": 3, "chunks": 4, "bytes_loaded": 777, "missing": 1}
    return Started(Figures(method=method, reason=reason, **rows, **found, stages={}, waited_s=0.1, ttft_s=0.3))


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([opened("nothing to reuse", "full"), Finished("stop")], "nothing to reuse"),
        ([opened(), Finished("stop")], "busy"),  # the pool was full
        ([Failed(RuntimeError("a fault"))], "failed"),
        ([Finished("deadline")], "deadline"),
        ([opened("", "full"), Finished("stop")], ""),  # as was asked for
    ],
)
def test_a_prompt_that_is_left_to_vllm_has_a_reason(replies: Sequence[Any], reason: str) -> None:
    def take(prompt: Any, on_event: Any, handover: Any) -> Any:
        for one in replies:
            on_event(one)

    told, found = asked(service_over(take))
    assert told["prompt"] == [1, 2, 3]
    assert found["plain"] == reason


def test_a_client_that_leaves_while_the_engine_takes_its_prompt_cancels_it() -> None:
    taking, left, cancelled = threading.Event(), threading.Event(), threading.Event()

    def take(prompt: Any, on_event: Any, handover: Any) -> Any:
        taking.set()
        assert left.wait(30)
        if prompt.request.cancelled.wait(30):
            cancelled.set()

    async def send(message: dict[str, Any]) -> None:
        assert "prompt" in message

    async def leave() -> None:
        work = asyncio.ensure_future(service_over(take).ask(PART, send))
        await asyncio.to_thread(taking.wait, 30)
        work.cancel()
        await asyncio.wait({work})
        left.set()
        assert await asyncio.to_thread(cancelled.wait, 30)

    asyncio.run(leave())


def test_status_shows_what_is_held_and_fails_without_a_process() -> None:
    name = unused()
    holding = EngineStats(*range(1, len(EngineStats._fields) + 1))
    shown: dict[str, Any] = {"tickets": 0, "refused": "", **holding._asdict()}
    service = SimpleNamespace(holding=lambda: shown)
    with serving(service, KVPool(1 << 20), name):
        found = CliRunner().invoke(blend, ["vllm", "--status", "--socket", name])
        assert found.exit_code == 0, found.output
        assert json.loads(found.output) == shown
        shown["refused"] = "it differs"
        refused = CliRunner().invoke(blend, ["vllm", "--status", "--socket", name])
        assert refused.exit_code == 3
        assert json.loads(refused.stdout) == shown
        assert "vLLM does not use blended KV: it differs" in refused.stderr
    missing = CliRunner().invoke(blend, ["vllm", "--status", "--socket", name])
    assert missing.exit_code == 1
    assert "the prefill process does not answer at" in missing.output
