"""The prefill process at its limits: descriptors, room for what is held, clients that take their time. No vLLM is needed."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import PYTHONPATH

from blend.errors import ConfigError
from blend.integrations.vllm import network, prefill, wire
from blend.integrations.vllm.desk import CHECKED_ROWS, Desk
from blend.integrations.vllm.metrics import PrefillMetrics
from blend.integrations.vllm.prefill import PrefillServer
from blend.integrations.vllm.shelf import NoRoomError, Shelf
from blend.serve.types import QueueFullError

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(desk: Any, name: str) -> Iterator[str]:
    place = wire.bind(name)
    server = PrefillServer(desk, Shelf(1 << 20), place)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        yield name
    finally:
        server.stop()
        thread.join()
        wire.close(place, name)


def unused() -> str:
    return f"@kvblend-{secrets.token_hex(6)}"


WITHOUT_DESCRIPTORS = """
import resource, secrets, socket, threading, time
from blend.integrations.vllm import wire
from blend.integrations.vllm.desk import Desk
from blend.integrations.vllm.prefill import PrefillServer
from blend.integrations.vllm.shelf import Shelf

name = f"@kvblend-{secrets.token_hex(6)}"
server = PrefillServer(None, Shelf(1 << 20), wire.bind(name))
serving = threading.Thread(target=server.serve_until_stopped)
serving.start()
files = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 20, files + 20))
clients = []
while len(clients) < 100:
    try:
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].connect(wire._address(name))
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
        with wire.connect(name, 5) as sock:
            wire.send(sock, {"attach": "no such ticket"})
            assert wire.receive(sock)[0] == {"held": None}
        break
    except (wire.WireError, OSError):
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
    assert done.stderr.count("Too many open files") <= 1, "told once"


def test_as_many_connections_as_there_are_descriptors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, most in ((1024, 448), (64, 1), (1 << 20, prefill.MOST_CONNECTIONS), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, allowed=allowed: (allowed, allowed))
        assert prefill.most_connections() == most


def test_a_check_that_finds_no_room_holds_nothing() -> None:
    """Or every API server that starts while much is held would take the rest for good."""
    taken: set[str] = set()

    def check(number: int) -> dict[str, str]:
        if number == len(CHECKED_ROWS) - 1:
            raise NoRoomError("full")
        taken.update({f"right{number}", f"wrong{number}"})
        return {"right": f"right{number}", "wrong": f"wrong{number}"}

    with serving(SimpleNamespace(check=check), unused()) as name:
        server_shelf = SimpleNamespace(release=taken.discard)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shelf, "release", lambda self, ticket: server_shelf.release(ticket))
            with wire.connect(name, 10) as sock:
                wire.send(sock, {"check": True})
                with pytest.raises(wire.WireError):
                    wire.receive(sock)
            end = time.monotonic() + 10
            while taken and time.monotonic() < end:
                time.sleep(0.01)
    assert taken == set()


def test_the_first_of_two_pieces_of_a_check_goes_when_there_is_no_room_for_the_second() -> None:
    released = []

    class OneMore:
        budget = nbytes = 0
        put_so_far = 0

        def put(self, cache: object, ids: object) -> str:
            self.put_so_far += 1
            if self.put_so_far == 2:
                raise NoRoomError("full")
            return "first"

        def release(self, ticket: str) -> None:
            released.append(ticket)

    desk = Desk.__new__(Desk)
    desk.shelf = OneMore()  # type: ignore[assignment]
    desk._decoder = SimpleNamespace(vocabulary=96)  # type: ignore[assignment]
    desk._prefilled = lambda ids: ids  # type: ignore[method-assign]
    with pytest.raises(NoRoomError):
        desk.check(0)
    assert released == ["first"]


def test_who_is_left_to_vllm_costs_no_search() -> None:
    def require_room() -> None:
        raise QueueFullError(3, 1.0)

    desk = Desk.__new__(Desk)
    desk.shelf, desk.metrics = Shelf(1 << 20), PrefillMetrics()
    engine = SimpleNamespace(require_room=require_room)
    desk.service = SimpleNamespace(engine=engine, prepare=lambda ask: pytest.fail("searched"))  # type: ignore[assignment]
    told: list[Any] = []
    desk.ask({}, told.append)
    assert told == [{"plain": "busy", "told": {}}]


def test_a_file_in_the_way_of_a_socket_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious.json"
    precious.write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot listen at --socket .*precious\.json"):
        wire.bind(str(precious))
    assert precious.read_text() == "{}"
    stale = tmp_path / "stale"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(stale))
    left.close()
    wire.close(wire.bind(str(stale)), str(stale))
    assert not stale.exists()


def test_a_stranger_who_sends_a_byte_now_and_then_has_no_more_time_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("a key of at least sixteen bytes\n")
    key.chmod(0o600)
    monkeypatch.setenv(network.KEY_VARIABLE, str(key))
    monkeypatch.setattr(prefill, "_SLOW_S", 0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving(None, f"tcp://127.0.0.1:{port}"), socket.create_connection(("127.0.0.1", port), 10) as sock:
        assert len(sock.recv(64)) == 32
        sent = 0
        try:
            while sent < 60:  # of the 64 that it would have to send, one in a tenth of a second
                sock.sendall(b"x")
                sent += 1
                time.sleep(0.1)
        except OSError:
            pass
        assert 0 < sent < 30
