"""The prefill process at its limits: descriptors, memory for held KV, slow clients. No vLLM is needed."""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from places import PYTHONPATH
from tiny import serving

from blend.cli import blend
from blend.integrations.vllm.server import (
    CHECKED_ROWS,
    MOST_CONNECTIONS,
    PrefillRequest,
    PrefillService,
    most_connections,
)
from blend.integrations.vllm.transport import KVPool, PoolFullError, TransportError, address, connect, receive, send
from blend.serve.types import EngineStats, Failed, Figures, Finished, QueueFullError, Started


def unused() -> str:
    return f"@kvblend-{secrets.token_hex(6)}"


WITHOUT_DESCRIPTORS = """
import resource, secrets, socket, threading, time
from blend.integrations.vllm.server import PrefillServer
from blend.integrations.vllm.transport import KVPool, TransportError, address, bind, connect, receive, send

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
        with connect(name, 5) as sock:
            send(sock, {"attach": "no such ticket"})
            assert receive(sock)[0] == {"held": None}
        break
    except (TransportError, OSError):
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
    with serving(None, KVPool(1 << 20), name, timeout_s=0.5), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address(name))
        sent = 0
        try:
            while sent < 60:
                sock.sendall(b"\0")
                sent += 1
                time.sleep(0.1)
        except OSError:
            pass
        assert 0 < sent < 30


def test_a_check_without_memory_holds_nothing() -> None:
    """Or every API server that starts while much is held would take the rest for good."""
    pool = KVPool(1 << 20)

    def check(number: int) -> dict[str, str]:
        if number == len(CHECKED_ROWS) - 1:
            raise PoolFullError("full")
        return {"right": f"right{number}", "wrong": f"wrong{number}"}

    released = set[str]()
    pool.release = released.add  # type: ignore[method-assign]
    service, name = SimpleNamespace(check=check, reason_against=lambda dtype: ""), unused()
    with serving(service, pool, name):
        with connect(name, 10) as sock:
            send(sock, {"check": "float32"})
            with pytest.raises(TransportError):
                receive(sock)
        end = time.monotonic() + 10
        while len(released) < 4 and time.monotonic() < end:
            time.sleep(0.01)
    assert released == {"right0", "wrong0", "right1", "wrong1"}


def service_over(engine: Any = None, prepare: Any = None) -> Any:
    """As much of a service as `PrefillService` looks at before it blends."""
    decoder = SimpleNamespace(rotations=(), dtype=SimpleNamespace(itemsize=4), fingerprint="m")
    room = SimpleNamespace(rag=lambda: SimpleNamespace(decoder=decoder))
    return SimpleNamespace(tenant=lambda tenant: room, engine=engine, prepare=prepare, corpora=lambda tenant: ())


def test_a_full_queue_costs_no_search() -> None:
    def require_room() -> None:
        raise QueueFullError(3, 1.0)

    service = service_over(SimpleNamespace(require_room=require_room), lambda asked: pytest.fail("searched"))
    reports: list[Any] = []
    PrefillService(service, KVPool(1 << 20)).ask({}, reports.append)
    assert reports == [{"plain": "busy", "shown": {}}]


def test_a_fault_is_reported_without_its_words() -> None:
    def require_room() -> None:
        raise RuntimeError("a secret")

    reports: list[Any] = []
    PrefillService(service_over(SimpleNamespace(require_room=require_room)), KVPool(1)).ask({}, reports.append)
    assert reports[0]["error"][0] == 500
    assert "secret" not in str(reports)


def opened(reason: str = "", method: Any = "blend") -> Started:
    rows = {"rows": 100, "rows_computed": 20, "rows_reused": 5, "rows_inexact": 0}
    found = {"hits": 3, "chunks": 4, "bytes_loaded": 777, "missing": 1, "notes": ()}
    times: dict[str, Any] = {"stages": {}, "waited_s": 0.1, "ttft_s": 0.3}
    times |= {"full_estimated_s": None, "full_measured_s": None}
    return Started(Figures(method=method, reason=reason, **rows, **found, **times))


class Pool:
    """Holds one prompt."""

    released = False

    def put(self, cache: Any, ids: Any) -> str:
        return "t"

    def release(self, ticket: str) -> None:
        self.released = True


BLEND: Any = SimpleNamespace(cache=None, layout=SimpleNamespace(token_ids=()))


def test_a_blended_prompt_is_ready_until_it_is_released() -> None:
    reports, pool = list[Any](), Pool()
    mine = PrefillRequest(pool, reports.append)  # type: ignore[arg-type]
    mine.hold(BLEND, "salt")
    mine.on_reply(opened())
    mine.on_reply(Finished("stop"))
    assert [one["ready"] for one in reports] == [{"ticket": "t", "salt": "salt"}]
    assert reports[0]["shown"]["figures"]["rows_computed"] == 20
    mine.release()
    assert pool.released


def test_a_prompt_that_was_released_first_is_cancelled_and_not_held() -> None:
    reports, pool, cancelled = list[Any](), Pool(), list[bool]()
    mine = PrefillRequest(pool, reports.append)  # type: ignore[arg-type]
    mine.release()
    mine.follow(SimpleNamespace(cancel=lambda: cancelled.append(True)))  # type: ignore[arg-type]
    mine.hold(BLEND, "salt")
    assert (cancelled, pool.released) == ([True], True)


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
def test_a_prompt_that_is_left_to_vllm_has_a_reason(replies: list[Any], reason: str) -> None:
    reports: list[Any] = []
    mine = PrefillRequest(KVPool(1), reports.append)
    for one in replies:
        mine.on_reply(one)
    assert [one["plain"] for one in reports] == [reason]


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
