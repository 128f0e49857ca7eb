"""KV held for vLLM, and the socket that it is fetched through: no vLLM is needed for these."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blend.errors import ConfigError
from blend.integrations.vllm import wire
from blend.integrations.vllm.check import distance
from blend.integrations.vllm.gate import Gate
from blend.integrations.vllm.middleware import strip
from blend.integrations.vllm.prefill import PrefillServer
from blend.integrations.vllm.shelf import Described, NoRoomError, Shelf, digest
from blend.model.cache import BlendedCache

IDS = tuple(range(5))


def cache_of(rows: int) -> BlendedCache:
    cache = BlendedCache(2, rows)
    for layer in cache.layers:
        layer.write_run(0, torch.randn(1, 2, rows, 4), torch.randn(1, 2, rows, 4))
    return cache


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Shelf, str]]:
    shelf, name = Shelf(1 << 20), f"@kvblend-test-{os.getpid()}"
    place = wire.bind(name)
    server = PrefillServer(None, shelf, place)  # type: ignore[arg-type]  # nobody asks it anything
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    yield shelf, name
    server.stop()
    thread.join(10)
    assert not thread.is_alive()
    wire.close(place, name)


def fetched(name: str, ticket: str) -> tuple[Described, mmap.mmap] | None:
    with wire.connect(name, 5) as sock:
        wire.send(sock, {"attach": ticket})
        answer, fd = wire.receive(sock)
    if fd is None:
        return None
    told = Described.of(answer["held"])
    try:
        return told, mmap.mmap(fd, told.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


def test_what_is_put_is_fetched_until_it_is_released(served: tuple[Shelf, str]) -> None:
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
    shelf = Shelf(1000)
    shelf.put(cache_of(5), IDS)
    with pytest.raises(NoRoomError):
        shelf.put(cache_of(5), IDS)
    assert (len(shelf), shelf.nbytes) == (1, 2 * 2 * 4 * 2 * 4 * 4)


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    code = (
        "import os, signal, sys, torch\n"
        "from blend.integrations.vllm import wire\n"
        "from blend.integrations.vllm.shelf import Shelf\n"
        "from blend.model.cache import BlendedCache\n"
        "places = [wire.bind(name) for name in sys.argv[1:]]\n"
        "[place.listen(1) for place in places]\n"
        "cache = BlendedCache(1, 9)\n"
        "cache.layers[0].write_run(0, torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4))\n"
        "Shelf(1 << 20).put(cache, range(9))\n"
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
    with pytest.raises(wire.WireError, match="does not answer at @nobody-is-here"):
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
        Gate(None)
