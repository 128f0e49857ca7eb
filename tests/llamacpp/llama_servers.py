"""llama.cpp's own HTTP server in processes of their own, as xllamacpp brings it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

_CODE = """
import enum, json, sys, xllamacpp
parameters = xllamacpp.CommonParams()
options = json.loads(sys.argv[1])
parameters.model.path = options.pop("model")
parameters.cpuparams.n_threads = 1
parameters.warmup = False
for name, value in options.items():
    kind = type(getattr(parameters, name))
    setattr(parameters, name, kind(value) if issubclass(kind, enum.Enum) else value)
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama_server(model: Path, slots: Path | None, **options: Any) -> Iterator[httpx.Client]:
    """A client of a server of this model, with this `--slot-save-path`. options: of xllamacpp's `CommonParams`."""
    values: dict[str, Any] = {"model": str(model), "port": 0, "n_ctx": 2048, "n_parallel": 1, **options}
    if slots is not None:
        values["slot_save_path"] = f"{slots}/"
    with process(values) as url, httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        yield client


@contextmanager
def process(values: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a server, while it runs."""
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    env = {**os.environ, "PYTHONPATH": str(Path(spec.origin).parents[1])}
    command = [sys.executable, "-c", _CODE, json.dumps(values)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()
