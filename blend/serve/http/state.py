"""What all requests share: the service, the checks of who may send requests, and the limits of bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.types import Message, Receive

from blend.limits import shown
from blend.serve.access import ApiKeys, is_loopback
from blend.serve.http.errors import ApiError, closing, ended_early, engine_failed, refuse, unavailable
from blend.serve.http.log import entry_of
from blend.serve.http.tracing import Tracing
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics

if TYPE_CHECKING:
    from blend.serve.service import Service

_QUESTIONS = 40  # that are tokenised at a time
_TENANT_QUESTIONS = 10  # of one tenant with a name
_DRAIN_FACTOR = 4  # times the limit: a client reads its refusal only after it has sent everything
_DRAIN_S = 5.0
_FREE = 1 << 16  # bytes of each body that the budget does not count: ordinary questions always pass
_RETRY_S = 5.0


@dataclass
class BodyBudget:
    """Memory for the bodies of all requests. most: bytes. Used by the event loop alone."""

    most: int
    held: int = 0

    def take(self, nbytes: int) -> None:
        """Count so many more bytes. Raises `ApiError` if the budget is exhausted."""
        if nbytes and self.held + nbytes > self.most:
            raise unavailable("the server is receiving too many large requests; try again later", retry_s=_RETRY_S)
        self.held += nbytes


@dataclass
class AppState:
    """Shared by all requests.

    service: None while it is loading.
    closing: no more requests are accepted.
    questions: threads that tokenise questions; requests about documents use others.
    """

    service: Service | None
    keys: ApiKeys
    limits: RequestLimits
    metrics: Metrics
    closing: bool = False
    tracing: Tracing | None = None
    questions: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_QUESTIONS))
    tenant_questions: dict[str, CapacityLimiter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits.all_bytes)

    def require_service(self) -> Service:
        """The service. Raises `ApiError` while it is loading, closing or failed."""
        if self.closing:
            raise closing()
        if self.service is None or not self.service.ready:
            raise unavailable("the server is loading its model; try again in a moment", "loading", 2.0)
        if not self.service.alive:
            raise engine_failed()
        return self.service

    def share(self, tenant: str) -> CapacityLimiter:
        """The threads of `questions` that one tenant may use."""
        return self.tenant_questions.setdefault(tenant, CapacityLimiter(_TENANT_QUESTIONS if tenant else _QUESTIONS))


def state_of(request: Request) -> AppState:
    """The state of the application that serves this request."""
    state = request.app.state.shared
    assert isinstance(state, AppState)
    return state


def admitted(request: Request) -> str:
    """The tenant of a request, "" without tenants. Raises `ApiError` for an unknown key or a foreign page."""
    state = state_of(request)
    _refuse_foreign_pages(request, state.limits)
    if not (state.keys.required or state.limits.any_host):
        _refuse_foreign_hosts(request)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    tenant = state.keys.tenant_of(key.strip() if scheme.lower() == "bearer" else None)
    if tenant is None:
        raise refuse("the API key is missing or unknown; send Authorization: Bearer KEY", None, "invalid_api_key", 401)
    entry_of(request).tenant = tenant
    return tenant


def require_operator(request: Request) -> None:
    """Raise `ApiError` unless the request may see what concerns all tenants: its key has none."""
    if admitted(request):
        raise refuse("this needs an API key without a tenant", None, "forbidden", 403)


def _refuse_foreign_pages(request: Request, limits: RequestLimits) -> None:
    """Refuse pages of other sites, which run in browsers that can reach this server.

    An API key does not help: a proxy may add one to every request. Sec-Fetch-Site, which no script can set, identifies
    the server's own page behind a proxy that changes Host. Browsers send it over TLS and to loopback.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin is None or origin in limits.origins or headers.get("sec-fetch-site") == "same-origin":
        return
    if _authority(origin) != headers.get("host", "").lower():
        raise refuse(
            f"pages of {shown(origin)} may not ask this server, not with a key either: permit them with --allow-origin, or "
            "have the proxy in front of it pass on Host",
            *(None, "forbidden", 403),
        )


def _refuse_foreign_hosts(request: Request) -> None:
    """Refuse other names than loopback if no key is needed: DNS rebinding would make any page the server's own."""
    if not is_loopback(_hostname(f"//{request.headers.get('host', '')}")):
        raise refuse("this server answers to localhost alone; give others a key (--api-key)", None, "forbidden", 403)


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


async def receive_all(receive: Receive) -> bytes:
    """All of a body that `limited` receives."""
    return b"".join([part async for part in _parts(receive)])


@contextmanager
def limited(request: Request, most: int, seconds: float, budget: BodyBudget) -> Iterator[Receive]:
    """Receive the request's body within limits of size and time, and within the budget of all bodies.

    The receiver raises `ApiError` beyond `most` bytes, after `seconds`, and when the budget is exhausted. The budget gets the
    bytes back at the end of the context.
    """
    until = asyncio.get_running_loop().time() + seconds
    announced = request.headers.get("content-length", "")
    over = announced.isascii() and announced.isdigit() and len(announced) < 20 and int(announced) > most
    taken = counted = 0

    async def receive() -> Message:
        nonlocal taken, counted
        message = await _receive_until(request.receive, until)
        taken += len(message.get("body", b""))
        if over or taken > most:
            if message.get("more_body", False):
                await _drain(request.receive, most * _DRAIN_FACTOR)
            raise refuse(
                f"the body is larger than {most:,} bytes, all that a request may bring",
                *(None, "body_too_large", 413),
            )
        more = max(0, taken - _FREE) - counted
        budget.take(more)
        counted += more
        return message

    try:
        yield receive
    finally:
        budget.held -= counted


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(ended_early("cancelled"))
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _receive_until(receive: Receive, until: float) -> Message:
    try:
        async with asyncio.timeout_at(until):
            return await receive()
    except TimeoutError:
        raise refuse("the body did not come in time", None, "timeout", 408) from None


async def _drain(receive: Receive, most: int) -> None:
    """Discard the rest of a body, up to `most` bytes and for a few seconds."""
    seen = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while seen < most:
                message = await receive()
                seen += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
