"""`blend serve` as a process that may open few files."""

import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from places import PYTHONPATH

from blend.serve.http.requests import OncePerMinute

FEW = 64
SILENT = 200


@pytest.fixture
def url(model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a server that may open 64 files; its log goes to `log`."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "blend", "serve", "--port=0", f"--model={model}", f"--store={tmp_path / 'store'}"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW)),
        ) as process,
    ):
        ready = re.fullmatch(r"Ready at (http://.*)\n", process.stdout.readline())
        assert ready is not None, (tmp_path / "log").read_text()
        yield ready[1]
        process.terminate()


def test_silent_connections_keep_nobody_out(url: str, tmp_path: Path) -> None:
    host, port = url.removeprefix("http://").split(":")
    question = {"messages": [{"role": "user", "content": "When did the harbour open?"}], "max_tokens": 1}
    with ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        for _ in range(20):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json=question, timeout=60).status_code == 200
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    [warning] = [line["event"] for line in lines if line["event"] != "request"]
    assert warning == "kvblend.connections: more connections than open files allow: idle ones are closed"


def test_each_message_is_logged_once_in_a_minute() -> None:
    now = [0.0]
    once = OncePerMinute(clock=lambda: now[0])

    def passes(message: str, at: float) -> logging.LogRecord | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), None)
        now[0], record.created = at, -60 * at  # the system's clock is set back meanwhile
        return record if once.filter(record) else None

    assert passes("no descriptor", 0.0)
    assert passes("another fault", 1.0)
    assert [passes("no descriptor", second) for second in (1.0, 30.0, 59.0)] == [None] * 3
    assert passes("no descriptor", 61.0)
