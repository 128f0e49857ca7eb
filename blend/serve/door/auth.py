"""Who may come in: API keys, and no page of another site in somebody's browser."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request

from blend.serve.door.errors import refuse
from blend.serve.door.hall import hall_of
from blend.serve.door.log import entry_of

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def admitted(request: Request) -> str:
    """The tenant that a request comes from, "" for the common room. Raises `DoorError` for who may not come in."""
    hall = hall_of(request)
    _refuse_foreign_pages(request, bare=not (hall.tenants.required or hall.limits.any_host))
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    tenant = hall.tenants.of(key.strip() if scheme.lower() == "bearer" else None)
    if tenant is None:
        raise refuse("the API key is missing or unknown; send Authorization: Bearer KEY", None, "invalid_api_key", 401)
    entry_of(request).tenant = tenant
    return tenant


def operator(request: Request) -> None:
    """Raise `DoorError` for who may not see what concerns everybody: where keys are needed, who has none without a tenant."""
    if admitted(request):
        raise refuse("this needs an API key without a tenant", None, "forbidden", 403)


def _refuse_foreign_pages(request: Request, *, bare: bool) -> None:
    """Other sites' pages run in the browsers of people who can reach this server, and may send it requests.

    bare: no keys are needed. Then also a name that somebody else points at this machine (DNS rebinding) is refused.
    """
    host = _name(f"//{request.headers.get('host', '')}")
    if (origin := request.headers.get("origin")) is not None and _place(origin) != request.headers.get(
        "host", ""
    ).lower():
        raise refuse("pages of other sites may not ask this server", None, "forbidden", 403)
    server = request.scope.get("server")
    if bare and server and server[0] in _LOOPBACK and host not in _LOOPBACK:
        raise refuse("this server answers to localhost alone; give others a key (--api-key)", None, "forbidden", 403)


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _place(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
