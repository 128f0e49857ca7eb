"""The key between machines: the connector's options name it before the environment does, which not all processes are given."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blend.errors import ConfigError
from blend.integrations.vllm import network, wire
from blend.integrations.vllm.contract import Load, LoadFailedError, stages_of
from blend.integrations.vllm.middleware import PrefillConnection, Rewriter
from blend.integrations.vllm.server import PrefillServer
from blend.integrations.vllm.stage import CopyStage
from blend.integrations.vllm.transport import KVPool


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The key, which the environment names, and another."""
    found = []
    for number in range(2):
        path = tmp_path / f"key{number}"
        path.write_text(f"key {number} of at least sixteen bytes\n")
        path.chmod(0o600)
        found.append(str(path))
    monkeypatch.setenv(network.KEY_VARIABLE, found[0])
    return found[0], found[1]


@pytest.fixture
def far(keys: tuple[str, str]) -> Iterator[str]:
    """Where a prefill process of another machine is reached."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        name = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    place = wire.bind(name)
    server = PrefillServer(None, KVPool(1 << 20), place)  # type: ignore[arg-type]  # nobody asks it anything
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    yield name
    server.stop()
    thread.join(10)
    wire.close(place, name)


def fetch(options: dict[str, Any]) -> str:
    """Why a worker with these options gets no KV."""
    layer = SimpleNamespace(num_kv_heads=2, head_size=4)
    layer.impl = SimpleNamespace(do_kv_cache_update=lambda *given: None)
    parallel = SimpleNamespace(tensor_parallel_size=1, rank=0)
    site: Any = SimpleNamespace(
        names=("0",),
        layers=(layer,),
        config=SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32)),
        device=torch.device("cpu"),
        slots=lambda load, rows: rows,
    )
    with pytest.raises(LoadFailedError) as raised:
        CopyStage(site, options).fill(Load("r", "f" * 32, (1, 2), (0,), 0, 1))
    return str(raised.value)


def test_a_workers_options_name_its_key(far: str, keys: tuple[str, str]) -> None:
    assert "holds nothing under this ticket" in fetch({"socket": far})
    assert "holds nothing under this ticket" in fetch({"socket": far, "key": keys[0]})
    assert "holds nothing under this ticket" not in fetch({"socket": far, "key": keys[1]})
    assert "the socket key /nowhere cannot be read" in fetch({"socket": far, "key": "/nowhere"})


def test_the_middleware_has_the_key_of_its_engines_options(far: str, keys: tuple[str, str]) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config={"key": keys[1]}, engine_id="an engine")
    gate = Rewriter(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer)))

    async def take(path: str) -> None:
        (await PrefillConnection.take(far, {"holding": True}, path)).close()

    asyncio.run(take(keys[0]))
    with pytest.raises(wire.TransportError):
        asyncio.run(take(gate._key_path))


def test_every_stage_may_be_given_a_key() -> None:
    assert list(stages_of({"key": "/key", "socket": "tcp://host:1"})) == ["copied"]


def test_a_worker_without_a_key_says_what_ray_needs(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(network.KEY_VARIABLE)
    said = fetch({"socket": far})
    for words in ("between machines a key is needed", "kv_connector_extra_config", _RAY):
        assert words in said
    with pytest.raises(ConfigError, match="a key is needed"):
        network.shared_key()


_RAY = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVBLEND_"


@pytest.mark.inside_vllm
def test_ray_hands_on_what_the_message_says(keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    assert network.KEY_VARIABLE not in get_env_vars_to_copy()
    monkeypatch.setenv(*_RAY.split("="))
    assert network.KEY_VARIABLE in get_env_vars_to_copy()
