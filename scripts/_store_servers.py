"""Real servers on loopback for tests and soaks, started when they are first needed and stopped at the end of the process."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
BUCKET = "kvblend-test"
REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


def given_bucket(folder: Path) -> str | None:
    """An address of its own for each folder, in the bucket that KVBLEND_TEST_BUCKET names; None where that is not set."""
    bucket = os.environ.get("KVBLEND_TEST_BUCKET")
    return f"{bucket.rstrip('/')}/{hashlib.sha256(bytes(folder)).hexdigest()[:16]}" if bucket else None


class NoServerError(Exception):
    """What lacks here, and how it is installed."""


class S3(NamedTuple):
    """port: of the server. fault: the file that says what it does wrong."""

    port: int
    fault: Path

    @property
    def met(self) -> int:
        """How many requests it has done wrong by, so far."""
        with suppress(FileNotFoundError):
            return self.fault.with_name("met").stat().st_size
        return 0


def s3_environment(port: int) -> dict[str, str]:
    """Where the server is and how it is entered, as S3's clients look for it."""
    return {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


@cache
def s3() -> S3:
    """The S3 server. Raises `NoServerError`."""
    missing = [name for name in ("obstore", "moto", "flask") if find_spec(name) is None]
    if missing:
        raise NoServerError(f"no S3 server here: pip install {' '.join(missing)}")
    fault = Path(tempfile.mkdtemp()) / "fault"
    log = fault.with_name("log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_s3_server.py")), BUCKET],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "KVBLEND_S3_FAULT": str(fault)},
            preexec_fn=_end_with_parent,
        )
    _stop_at_exit(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log.read_text()
    return S3(int(line), fault)


@cache
def redis_port(*options: str) -> int:
    """The port of a Redis started with these options. Raises `NoServerError`."""
    if REDIS is None or find_spec("redis") is None:
        raise NoServerError("no Redis here: apt-get install redis-server (or valkey), pip install redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
    _stop_at_exit(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tempfile.mkdtemp(), preexec_fn=_end_with_parent)
    )
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return port
        time.sleep(0.02)
    raise AssertionError("the Redis of the tests does not come up")


def _end_with_parent() -> None:
    """In the new process: nobody else ends it when the one that started it is killed. Linux alone has that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop_at_exit(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    def stop() -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    atexit.register(stop)
