"""KV held for vLLM, and the socket that it is fetched through: no vLLM is needed for these."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blend.errors import ConfigError
from blend.integrations.vllm import network, wire
from blend.integrations.vllm.contract import Load, LoadFailedError
from blend.integrations.vllm.middleware import Rewriter, distance, strip
from blend.integrations.vllm.server import PrefillServer
from blend.integrations.vllm.stage import CopyStage
from blend.integrations.vllm.transport import HeldKV, KVPool, PoolFullError, digest
from blend.model.cache import BlendedCache

IDS = tuple(range(5))


def cache_of(rows: int) -> BlendedCache:
    cache = BlendedCache(2, rows)
    for layer in cache.layers:
        layer.write_run(0, torch.randn(1, 2, rows, 4), torch.randn(1, 2, rows, 4))
    return cache


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[KVPool, str]]:
    with serving(f"@kvblend-test-{os.getpid()}") as found:
        yield found


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    path.write_text("a key of at least sixteen bytes\n")
    path.chmod(0o600)
    monkeypatch.setenv(network.KEY_VARIABLE, str(path))
    return path


@pytest.fixture
def far(key: Path) -> Iterator[tuple[KVPool, str]]:
    """The same, for other machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving(f"tcp://127.0.0.1:{port}") as found:
        yield found


@contextmanager
def serving(name: str) -> Iterator[tuple[KVPool, str]]:
    shelf = KVPool(1 << 20)
    place = wire.bind(name)
    server = PrefillServer(None, shelf, place)  # type: ignore[arg-type]  # nobody asks it anything
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    yield shelf, name
    server.stop()
    thread.join(10)
    assert not thread.is_alive()
    wire.close(place, name)


def fetched(name: str, ticket: str) -> tuple[HeldKV, mmap.mmap] | None:
    with wire.connect(name, 5) as sock:
        wire.send(sock, {"attach": ticket})
        answer, fd = wire.receive(sock)
    if fd is None:
        return None
    told = HeldKV.of(answer["held"])
    try:
        return told, mmap.mmap(fd, told.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


def test_what_is_put_is_fetched_until_it_is_released(served: tuple[KVPool, str]) -> None:
    shelf, name = served
    cache = cache_of(len(IDS))
    ticket = shelf.put(cache, IDS)
    found = fetched(name, ticket)
    assert found is not None
    told, memory = found
    assert (told.rows, told.prompt) == (len(IDS) - 1, digest(IDS))
    for layer, (keys, values) in enumerate(told.views(memory)):
        here = cache.view(layer)
        for mine, theirs in zip((keys, values), here, strict=True):
            there = theirs[0, :, : len(IDS) - 1].transpose(0, 1)
            assert torch.allclose(mine, there, 0, 0, equal_nan=True)  # memory that nobody wrote may hold anything
    shelf.release(ticket)
    shelf.release(ticket)
    assert (len(shelf), shelf.nbytes) == (0, 0)
    assert fetched(name, ticket) is None
    assert torch.allclose(
        told.views(memory)[0][0], keys_of(cache), 0, 0, equal_nan=True
    )  # whoever has it goes on undisturbed


def keys_of(cache: BlendedCache) -> torch.Tensor:
    return cache.view(0)[0][0, :, : len(IDS) - 1].transpose(0, 1)


def test_no_more_is_held_than_may_be() -> None:
    shelf = KVPool(1000)
    shelf.put(cache_of(5), IDS)
    with pytest.raises(PoolFullError):
        shelf.put(cache_of(5), IDS)
    assert (len(shelf), shelf.nbytes) == (1, 2 * 2 * 4 * 2 * 4 * 4)


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    code = (
        "import os, signal, sys, torch\n"
        "from blend.integrations.vllm import wire\n"
        "from blend.integrations.vllm.transport import KVPool\n"
        "from blend.model.cache import BlendedCache\n"
        "places = [wire.bind(name) for name in sys.argv[1:]]\n"
        "[place.listen(1) for place in places]\n"
        "cache = BlendedCache(1, 9)\n"
        "cache.layers[0].write_run(0, torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4))\n"
        "KVPool(1 << 20).put(cache, range(9))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(Path("/dev/shm").iterdir())
    name = f"@kvblend-killed-{os.getpid()}"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, name, str(path)], env=variables, check=False)
    assert done.returncode == -9
    assert not set(Path("/dev/shm").iterdir()) - before
    for one in (name, str(path)):
        place = wire.bind(one)  # a socket's file that nobody listens at is no hindrance
        place.listen(1)
        with pytest.raises(ConfigError, match="--socket"):
            wire.bind(one)
        wire.close(place, one)
    assert not path.exists()


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(wire.TransportError, match="does not answer at @nobody-is-here"):
        wire.connect("@nobody-is-here", 1)


def test_what_clients_bring_of_ours_is_taken_out_wherever_vllm_would_read_it() -> None:
    theirs = {"kvblend": {"ticket": "0" * 32}}
    body = {
        "kv_transfer_params": theirs,
        "vllm_xargs": {"kv_transfer_params": theirs, "a": 1},
        "sampling_params": {"extra_args": {"kv_transfer_params": theirs}},
        "messages": [{"role": "user", "content": "kv_transfer_params"}],
    }
    strip(body)
    assert body == {
        "vllm_xargs": {"a": 1},
        "sampling_params": {"extra_args": {}},
        "messages": [{"role": "user", "content": "kv_transfer_params"}],
    }


def test_distances_of_log_probabilities() -> None:
    some = {1: -0.1, 2: -3.0}
    assert distance(some, some) == 0
    assert distance(some, {1: -0.1, 3: -4.0}) == pytest.approx((0 + 1.0 + 1.0) / 3)


def test_a_time_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_VLLM_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="KVBLEND_VLLM_TIMEOUT is 'soon'"):
        Rewriter(None)


class Layer:
    """An attention layer of vLLM as far as a stage looks at it."""

    head_size = 4

    def __init__(self, heads: int) -> None:
        self.num_kv_heads, self.kv_cache, self.impl = heads, torch.empty(0), self
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def do_kv_cache_update(self, *given: Any) -> None:
        raise AssertionError


def copied(name: str, processes: int, rank: int) -> tuple[CopyStage, list[Any]]:
    """The stage of one of so many workers, and what it writes."""
    written: list[Any] = []
    parallel = SimpleNamespace(tensor_parallel_size=processes, rank=rank)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
    site: Any = SimpleNamespace(
        names=("0", "1"),
        layers=tuple(Layer(max(1, 2 // processes)) for _ in range(2)),
        config=config,
        device=torch.device("cpu"),
        slots=lambda load, rows: rows,
        write=lambda index, keys, values, slots: written.append((index, keys, values, slots)),
    )
    return CopyStage(site, {"socket": name}), written


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("place", ["served", "far"])
def test_a_worker_gets_its_rows_and_heads(
    place: str, processes: int, rank: int, request: pytest.FixtureRequest
) -> None:
    shelf, name = request.getfixturevalue(place)
    cache = cache_of(len(IDS))
    for layer in cache.layers:
        layer.update(torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 4))
    ticket = shelf.put(cache, IDS)
    stage, written = copied(name, processes, rank)
    stage.fill(Load("r", ticket, IDS, (0,), 1, 4))
    assert [index for index, *_ in written] == [0, 1]
    heads = {1: slice(0, 2), 2: slice(rank, rank + 1), 4: slice(1, 2)}[processes]
    for index, keys, values, slots in written:
        assert slots.tolist() == [1, 2, 3]
        for found, whole in zip((keys, values), cache.view(index), strict=True):
            assert torch.equal(found, whole[0, heads, 1:4].transpose(0, 1))
    shelf.release(ticket)
    with pytest.raises(LoadFailedError, match="holds nothing under this ticket any more"):
        stage.fill(Load("r", ticket, IDS, (0,), 1, 4))


def test_whoever_lacks_the_key_is_told_nothing(far: tuple[KVPool, str], monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, name = far
    ticket = shelf.put(cache_of(len(IDS)), IDS)
    for said in (b"", b"x" * 64, wire.pack({"send": ticket, "rows": [0, 1], "share": [0, 1]}) * 9):
        with socket.create_connection(network.place_of(name), 5) as sock, suppress(OSError):  # it may have hung up
            found = bytearray()
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(1 << 16):
                found += part
        assert len(found) <= 32, "a challenge and nothing else"
    monkeypatch.delenv(network.KEY_VARIABLE)
    with pytest.raises(wire.TransportError, match="a key is needed"):
        wire.connect(name, 5)
    with pytest.raises(ConfigError, match="a key is needed"):
        wire.bind("tcp://127.0.0.1:1")


@pytest.mark.parametrize("name", ["tcp://", "tcp://host", "tcp://host:0", "tcp://host:70000", "tcp://host:1/path"])
def test_what_is_no_place_on_a_network_is_one_line(name: str, key: Path) -> None:
    with pytest.raises(ConfigError, match=r"write tcp://HOST:PORT"):
        wire.bind(name)


def test_another_key_is_refused_by_both_ends(far: tuple[KVPool, str], key: Path) -> None:
    _, name = far
    host, port = network.place_of(name)
    with socket.create_connection((host, port), 5) as sock:
        theirs = sock.recv(32)
        mine = os.urandom(32)
        sock.sendall(mine + network._proof(b"another key of sixteen bytes", b"asks", theirs, mine))
        assert sock.recv(64) == b"", "it hangs up"
    with socket.create_server(("127.0.0.1", 0)) as liar:

        def lie() -> None:
            sock, _ = liar.accept()
            with sock:
                sock.sendall(os.urandom(32))
                sock.recv(64)
                sock.sendall(os.urandom(32))

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(wire.TransportError, match="it does not know the key"):
            wire.connect(f"tcp://127.0.0.1:{liar.getsockname()[1]}", 5)
        thread.join(10)


def test_a_worker_that_stops_listening_in_the_middle_harms_nobody(far: tuple[KVPool, str]) -> None:
    shelf, name = far
    before = threading.active_count()
    ticket = shelf.put(cache_of(len(IDS)), IDS)
    for _ in range(20):
        with wire.connect(name, 5) as sock:
            wire.send(sock, {"send": ticket, "rows": [0, 4], "share": [0, 1]})
    stage, written = copied(name, 1, 0)
    stage.fill(Load("r", ticket, IDS, (0,), 0, 4))
    assert len(written) == 2
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before
