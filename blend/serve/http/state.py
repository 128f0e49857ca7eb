"""The application's state, which all HTTP requests share, and who may send them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from blend.serve.events import EngineFailedError
from blend.serve.http.body_budget import BodyBudget
from blend.serve.http.errors import ApiError, closing, failure_of, refuse, unavailable
from blend.serve.http.keys import ApiKeys, digest_of_key
from blend.serve.http.tracing import Tracing, entry_of
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics
from blend.serve.turns import Turns
from blend.text import is_loopback, shown

if TYPE_CHECKING:
    from blend.serve.service import Service

_MOST_QUESTIONS = 512  # accepted
_QUESTIONS = 40  # prepared at a time
_SHARE = 10  # of these, of one client
_MOST_FORMS = 64
_FORMS = 2  # each compiles in a process with limits, and then here
_MOST_EMBEDDINGS = 64
_MOST_DOCUMENTS = 256
_DOCUMENTS = 16  # requests about documents
_PORT = re.compile(r":[0-9]*$")
_FORWARDING = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_HOLDER_DIGITS = 16  # of the digest of a key, in the name of a session


@dataclass
class AppState:
    """The application's state, shared by all requests.

    Attributes:
        service: None while it is loading.
        closing: no more requests are accepted.
        resting: connections that rest because they keep the event loop busy.
        questions, forms, embeddings, documents: turns of clients that have questions prepared, the forms of their answers
            compiled, texts embedded, and documents accepted, listed and deleted.

    """

    service: Service | None
    keys: ApiKeys
    limits: RequestLimits
    metrics: Metrics
    closing: bool = False
    resting: int = 0
    tracing: Tracing | None = None
    questions: Turns = field(default_factory=lambda: Turns(_QUESTIONS, _SHARE, _MOST_QUESTIONS))
    forms: Turns = field(default_factory=lambda: Turns(_FORMS, 1, _MOST_FORMS))
    embeddings: Turns = field(default_factory=lambda: Turns(1, 1, _MOST_EMBEDDINGS))
    documents: Turns = field(default_factory=lambda: Turns(_DOCUMENTS, _DOCUMENTS // 4, _MOST_DOCUMENTS))

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits, client_of)

    def require_service(self) -> Service:
        """The service. Raises `ApiError` while it is loading, closing or failed."""
        if self.closing:
            raise closing()
        if self.service is None or not self.service.ready:
            message = "the server is not ready: it loads its model, or completes its store; try again in a moment"
            raise unavailable(message, "loading", 2.0)
        if not self.service.engine.alive:
            raise failure_of(EngineFailedError())
        return self.service

    def close(self) -> None:
        """Accept nothing more, and end what has not reached the engine."""
        self.closing = True
        self.bodies.close()
        for turns in (self.questions, self.forms, self.embeddings, self.documents):
            turns.close(closing)


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
    tenant = state.keys.tenant_of(_key_of(request))
    if tenant is None:
        raise refuse("the API key is missing or unknown; send Authorization: Bearer KEY", None, "invalid_api_key", 401)
    entry_of(request).tenant = tenant
    return tenant


async def disconnected(request: Request) -> None:
    """Wait until the client leaves; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_of(request: Request) -> str:
    """Who takes turns with others, of an admitted request: a tenant, else the holder of a key, else a peer's address."""
    if tenant := entry_of(request).tenant:
        return f"tenant {tenant}"
    if state_of(request).keys.required:
        return f"key {digest_of_key(_key_of(request) or '').hex()}"
    return f"address {request.client.host if request.client else ''}"


def session_of(request: Request, name: str) -> str:
    """A session's name among those of all holders of keys without a tenant, who do not know each other; "" for none."""
    if not name or entry_of(request).tenant or not state_of(request).keys.required:
        return name
    return f"{digest_of_key(_key_of(request) or '').hex()[:_HOLDER_DIGITS]}.{name}"


def holder_of(request: Request) -> str:
    """A digest of the key that a request carries, whether it is known here or not; "" without one."""
    key = _key_of(request)
    return digest_of_key(key).hex() if key else ""


def is_forwarded(request: Request) -> bool:
    """Whether a proxy has passed the request on, behind which there may be many end users."""
    return any(name in request.headers for name in _FORWARDING)


def _key_of(request: Request) -> str | None:
    """OpenAI's header, or Anthropic's."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")


def require_operator(request: Request) -> None:
    """Raise `ApiError` if the request's key belongs to a tenant, for endpoints that concern all tenants."""
    if admitted(request):
        raise _forbidden("this needs an API key without a tenant")


def _refuse_foreign_pages(request: Request, limits: RequestLimits) -> None:
    """Refuse pages of other sites, which run in browsers that can reach this server.

    An API key does not help: a proxy may add one to every request. Sec-Fetch-Site, which no script can set, identifies
    the server's own page behind a proxy that changes Host. Browsers send it over TLS and to loopback.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin is None or origin in limits.origins or headers.get("sec-fetch-site") == "same-origin":
        return
    if origin.lower().partition("://")[2] != headers.get("host", "").lower():
        words = "permit them with --allow-origin, or have the proxy in front of it pass on Host"
        raise _forbidden(f"pages of {shown(origin)} may not ask this server, not with a key either: {words}")


def _refuse_foreign_hosts(request: Request) -> None:
    """Refuse other names than loopback if no key is needed: DNS rebinding would make any page the server's own."""
    if not is_loopback(_PORT.sub("", request.headers.get("host", "")).strip("[]").lower()):
        raise _forbidden("this server answers to localhost alone; give others a key (--api-key)")


def _forbidden(message: str) -> ApiError:
    return refuse(message, None, "forbidden", 403)
