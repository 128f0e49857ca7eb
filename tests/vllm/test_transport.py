"""KV held for vLLM, and the socket that workers fetch it through: no vLLM is needed for these."""

import asyncio
import mmap
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import PYTHONPATH
from tiny import serving

from blend.errors import ConfigError
from blend.integrations.vllm.contract import Load, LoadFailedError
from blend.integrations.vllm.stage import CopyStage
from blend.integrations.vllm.transport import (
    Connection,
    HeldKV,
    KVPool,
    Message,
    TransportError,
    bind,
    close,
    digest,
    request,
)
from blend.model.cache import BlendedCache

IDS = tuple(range(5))


def cache_of(rows: int) -> BlendedCache:
    cache = BlendedCache(2, rows)
    for layer in cache.layers:
        layer.write_run(0, torch.randn(1, 2, rows, 4), torch.randn(1, 2, rows, 4))
        layer.update(torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 4))
    return cache


@pytest.fixture
def served() -> Iterator[tuple[KVPool, str]]:
    pool, name = KVPool(1 << 20), f"@kvblend-test-{secrets.token_hex(4)}"
    with serving(None, pool, name):
        yield pool, name


def fetched(name: str, ticket: str) -> tuple[HeldKV, mmap.mmap] | None:
    answer, fd = request(name, {"attach": ticket}, 5)
    if fd is None:
        return None
    held = HeldKV.of(answer["held"])
    try:
        return held, mmap.mmap(fd, held.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


def test_kv_is_fetched_until_its_ticket_ends(served: tuple[KVPool, str]) -> None:
    pool, name = served
    cache = cache_of(len(IDS))
    with pool.ticket() as ticket:
        assert fetched(name, ticket) is None
        pool.put(ticket, cache, IDS)
        found = fetched(name, ticket)
    assert found is not None
    held, memory = found
    assert (held.rows, held.prompt) == (len(IDS) - 1, digest(IDS))
    assert fetched(name, ticket) is None
    pool.put(ticket, cache, IDS)  # a blend that ends after its client has gone
    assert (len(pool), pool.nbytes) == (0, 0)
    for layer, pair in enumerate(held.views(memory)):  # a worker that has it goes on undisturbed
        for mine, theirs in zip(pair, cache.view(layer), strict=True):
            assert torch.equal(mine, theirs[0, :, : len(IDS) - 1].transpose(0, 1))


def shared_memory() -> set[Path]:
    """Without what other processes' thread pools register there."""
    return {one for one in Path("/dev/shm").iterdir() if not one.name.startswith(("__KMP", "psm_", "sem."))}


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    code = (
        "import os, signal, sys, torch\n"
        "from blend.integrations.vllm.transport import KVPool, bind\n"
        "from blend.model.cache import BlendedCache\n"
        "places = [bind(name) for name in sys.argv[1:]]\n"
        "[place.listen(1) for place in places]\n"
        "cache = BlendedCache(1, 9)\n"
        "cache.layers[0].write_run(0, torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4))\n"
        "with (pool := KVPool(1 << 20)).ticket() as ticket:\n"
        "    pool.put(ticket, cache, range(9))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = shared_memory()
    name = f"@kvblend-killed-{os.getpid()}"
    variables = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", code, name, str(path)], env=variables, check=False)
    assert done.returncode == -9
    assert not shared_memory() - before
    for one in (name, str(path)):
        place = bind(one)  # a socket file without a listener is replaced
        place.listen(1)
        with pytest.raises(ConfigError, match="--socket"):
            bind(one)
        close(place, one)
    assert not path.exists()


def test_a_file_in_the_way_of_a_socket_stays_and_a_missing_process_is_one_line(tmp_path: Path) -> None:
    precious = tmp_path / "precious.json"
    precious.write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot listen at --socket .*precious\.json"):
        bind(str(precious))
    assert precious.read_text() == "{}"
    with pytest.raises(TransportError, match="does not answer at @nobody-is-here"):
        request("@nobody-is-here", {}, 1)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_connection_in_the_event_loop_of_vllms_server(served: tuple[KVPool, str], loop: str) -> None:
    """Which is uvloop's: it knows no abstract names."""

    async def ask() -> Message:
        with closing(await Connection.open(served[1], {"attach": "no such ticket"})) as connection:
            return await connection.receive()

    with asyncio.Runner(loop_factory=pytest.importorskip(loop).new_event_loop) as runner:
        assert runner.run(ask()) == {"held": None}
        with pytest.raises(TransportError, match="does not answer at @nobody-is-here"):
            runner.run(Connection.open("@nobody-is-here", {}))


@pytest.mark.parametrize("sent", [b"[]\n", b"{\n", b"\xff\n", b'{"held"', b""])
def test_what_is_no_message_is_one_line(sent: bytes) -> None:
    name = f"@kvblend-test-{secrets.token_hex(4)}"
    place = bind(name)
    place.listen(1)

    def answer() -> None:
        sock, _ = place.accept()
        with sock:
            sock.recv(100)
            sock.sendall(sent)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(TransportError, match="does not answer at @kvblend-test"):
        request(name, {"holding": True}, 5)
    thread.join(5)
    close(place, name)


class Layer:
    """An attention layer of vLLM as far as a stage looks at it."""

    head_size = 4

    def __init__(self, heads: int) -> None:
        self.num_kv_heads, self.impl = heads, self

    def do_kv_cache_update(self, *given: Any) -> None:
        raise AssertionError


def copied(name: str, workers: int, rank: int, layers: int = 2) -> tuple[CopyStage, list[Any]]:
    """The stage of one of so many workers, and what it writes."""
    written: list[Any] = []
    parallel = SimpleNamespace(tensor_parallel_size=workers, rank=rank)
    site: Any = SimpleNamespace(
        names=tuple(map(str, range(layers))),
        layers=tuple(Layer(max(1, 2 // workers)) for _ in range(layers)),
        kept=tuple(range(layers)),
        config=SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32)),
        device=torch.device("cpu"),
        block_size=16,
        write=lambda index, keys, values, slots: written.append((index, keys, values, slots)),
    )
    return CopyStage(site, {"socket": name}), written


@pytest.mark.parametrize(("workers", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_a_worker_gets_its_rows_and_heads(served: tuple[KVPool, str], workers: int, rank: int) -> None:
    pool, name = served
    cache = cache_of(len(IDS))
    stage, written = copied(name, workers, rank)
    with pool.ticket() as ticket:
        pool.put(ticket, cache, IDS)
        stage.fill(Load("r", ticket, IDS, (3,), 1, 4))
    assert [index for index, *_ in written] == [0, 1]
    heads = {1: slice(0, 2), 2: slice(rank, rank + 1), 4: slice(1, 2)}[workers]
    for index, keys, values, slots in written:
        assert slots.tolist() == [3 * 16 + row for row in (1, 2, 3)]
        for found, whole in zip((keys, values), cache.view(index), strict=True):
            assert torch.equal(found, whole[0, heads, 1:4].transpose(0, 1))
    with pytest.raises(LoadFailedError, match="holds nothing under this ticket any more"):
        stage.fill(Load("r", ticket, IDS, (0,), 1, 4))


@pytest.mark.parametrize(
    ("layers", "ids", "why"), [(2, IDS[::-1], "of another prompt"), (3, IDS, "it has 2 layers, vLLM's model 3")]
)
def test_kv_of_others_is_not_written(served: tuple[KVPool, str], layers: int, ids: tuple[int, ...], why: str) -> None:
    pool, name = served
    stage, written = copied(name, 1, 0, layers)
    with pool.ticket() as ticket:
        pool.put(ticket, cache_of(len(IDS)), IDS)
        with pytest.raises(LoadFailedError, match=why):
            stage.fill(Load("r", ticket, ids, (0,), 0, 4))
    assert not written


def test_an_answer_that_trickles_in_is_given_up_in_time() -> None:
    name = f"@kvblend-test-{secrets.token_hex(4)}"
    place, done = bind(name), threading.Event()
    place.listen()

    def trickle() -> None:
        taken, _ = place.accept()
        with taken, suppress(OSError):
            while not done.wait(0.02):
                taken.sendall(b".")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TransportError, match="timed out"):
        request(name, {"holding": True}, 0.3)
    done.set()
    thread.join(10)
    close(place, name)
