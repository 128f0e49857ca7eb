"""An S3 server on loopback, a process of its own: requests one after another, as conditional puts need.

python _s3_server.py BUCKET...   prints its port. A file named in KVBLEND_S3_FAULT says what it does wrong: "stale" answers
listings as they were at first, "full" refuses puts, "busy" asks to come again, "list" and "read" refuse what the
credentials of a policy with no more than that are refused; "full 1234" does it to those
alone who came by that port, of a proxy. Every request that this was done to is a byte in the file `met` beside it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_ERROR = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>m</Message></Error>'

_POLICIES: dict[str, Callable[[str, bool], bool]] = {
    "list": lambda method, listing: listing,
    "read": lambda method, listing: method in ("GET", "HEAD"),
}


class OneAtATime:
    """One request after another, and what the file `fault` says is wrong."""

    def __init__(self, app: Callable[..., Iterable[bytes]], fault: Path | None) -> None:
        self._app, self._fault, self._lock = app, fault, threading.Lock()
        self._listings: dict[str, tuple[str, list[tuple[str, str]], bytes]] = {}

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
            if "list-type=2" in query:
                return self._listed(environ, start, query, stale=fault == "stale")
            return list(self._app(environ, start))

    def _listed(self, environ: dict[str, Any], start: Callable[..., Any], query: str, *, stale: bool) -> list[bytes]:
        if stale and query in self._listings:
            self._met()
            status, headers, body = self._listings[query]
            start(status, headers)
            return [body]
        seen: list[Any] = []
        body = b"".join(self._app(environ, lambda status, headers, info=None: seen.extend((status, headers))))
        self._listings.setdefault(query, (seen[0], seen[1], body))
        start(*seen)
        return [body]

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
    """Serve until the process is killed."""
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    fault = os.environ.get("KVBLEND_S3_FAULT")
    app = OneAtATime(DomainDispatcherApplication(create_backend_app), Path(fault) if fault else None)
    server = make_server("127.0.0.1", 0, app, threaded=True)  # type: ignore[arg-type]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.server_port}",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        region_name="us-east-1",
    )
    for bucket in sys.argv[1:]:
        client.create_bucket(Bucket=bucket)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
