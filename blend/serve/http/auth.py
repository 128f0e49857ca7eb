"""Who may come in: API keys, and no page of another site in somebody's browser."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request

from blend.limits import shown
from blend.serve.addresses import is_loopback
from blend.serve.http.errors import refuse
from blend.serve.http.hall import DoorLimits, hall_of
from blend.serve.http.log import entry_of


def admitted(request: Request) -> str:
    """The tenant that a request comes from, "" for the common room. Raises `DoorError` for who may not come in."""
    hall = hall_of(request)
    _refuse_foreign_pages(request, hall.limits)
    if not (hall.tenants.required or hall.limits.any_host):
        _refuse_foreign_names(request)
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


def _refuse_foreign_pages(request: Request, limits: DoorLimits) -> None:
    """Other sites' pages run in the browsers of people who can reach this server, and may send it requests.

    A key does not make up for it: a proxy may add one to whatever reaches it. Sec-Fetch-Site, which no script can set, tells of
    a page that came through a proxy that it is the server's own, whatever the proxy makes of Host; browsers send it over TLS
    and to this machine.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin is None or origin in limits.origins or headers.get("sec-fetch-site") == "same-origin":
        return
    if _place(origin) != headers.get("host", "").lower():
        raise refuse(
            f"pages of {shown(origin)} may not ask this server, not with a key either: permit them with --allow-origin, or "
            "have the proxy in front of it pass on Host",
            *(None, "forbidden", 403),
        )


def _refuse_foreign_names(request: Request) -> None:
    """Where no keys are needed: a name that somebody points at this machine (DNS rebinding) makes a page the server's own."""
    if not is_loopback(_name(f"//{request.headers.get('host', '')}") or ""):
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
