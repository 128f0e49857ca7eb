"""The page for people at `/`, and the files it loads; it runs no script and loads nothing but its own."""

from __future__ import annotations

import mimetypes
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from blend.serve.http.errors import refuse

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    media_type: str


async def index(request: Request) -> Response:
    """GET /."""
    return _response("index.html")


async def file(request: Request) -> Response:
    """GET /page/{name}: one of the files that are there."""
    return _response(request.path_params["name"])


def _response(name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise refuse("there is nothing here", None, "not_found", 404)
    return Response(found.content, headers=_HEADERS, media_type=found.media_type)


@cache
def _files() -> dict[str, _File]:
    """All of them by name; they are few and small."""
    folder = files("blend.serve") / "page"
    if not folder.is_dir():
        return {}
    found = [entry for entry in folder.iterdir() if entry.is_file() and not entry.name.endswith((".py", ".pyc"))]
    return {entry.name: _File(entry.read_bytes(), _kind(entry.name)) for entry in found}


def _kind(name: str) -> str:
    return "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "application/octet-stream"
