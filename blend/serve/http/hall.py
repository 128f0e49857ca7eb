"""What every route stands in: the service, who may come in, how much they may bring, what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anyio import CapacityLimiter
from starlette.requests import Request

from blend.config import ANSWER_TOKENS, CorpusConfig
from blend.serve.budgets import BODY_BUDGET
from blend.serve.http.body import BodyBudget
from blend.serve.http.errors import closing, engine_failed, unavailable
from blend.serve.http.tracing import Tracing
from blend.serve.metrics import Metrics
from blend.serve.tenants import Tenants

if TYPE_CHECKING:
    from blend.serve.service import Service

_QUESTIONS = 40  # that are put into prompts at a time
_SHARE = 10  # of these at most a tenant with a name has


@dataclass(frozen=True)
class DoorLimits:
    """How much one request may bring, and how long it may take to.

    upload_bytes, upload_s: of a request that adds documents. all_bytes: of all bodies that are held at a time. corpora: of one
    tenant. answer_tokens, top_k: of an answer, and of chunks to retrieve, where the request does not say. body_s: seconds in
    which a request's body must have come. keep_alive_s: after so many seconds of silence
    a stream gets a comment, so that nobody between takes it for dead. any_host: whether who brings no key may call the server
    by any name. origins: of other sites whose pages may ask, as browsers write them.
    """

    body_bytes: int = 16 << 20
    upload_bytes: int = 64 << 20
    upload_s: float = 600.0
    all_bytes: int = BODY_BUDGET
    documents: int = 64
    messages: int = 1000
    corpora: int = 64
    answer_tokens: int = ANSWER_TOKENS
    top_k: int = CorpusConfig.top_k
    body_s: float = 60.0
    keep_alive_s: float = 10.0
    any_host: bool = False
    origins: tuple[str, ...] = ()


@dataclass
class Hall:
    """Shared by all requests.

    service: None while it is loading. tracing: where spans are wanted. closing: whether no request is taken any more.
    questions: the threads that put questions into prompts, which share none with requests about documents. shares: of
    them, by tenant.
    """

    service: Service | None
    tenants: Tenants
    limits: DoorLimits
    metrics: Metrics
    closing: bool = False
    tracing: Tracing | None = None
    questions: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_QUESTIONS))
    shares: dict[str, CapacityLimiter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits.all_bytes)

    def open(self) -> Service:
        """The service. Raises `DoorError` while there is none, and when it answers no more."""
        if self.closing:
            raise closing()
        if self.service is None or not self.service.ready:
            raise unavailable("the server is loading its model; try again in a moment", "loading", 2.0)
        if not self.service.alive:
            raise engine_failed()
        return self.service

    def share(self, tenant: str) -> CapacityLimiter:
        """The places in `questions` that a tenant may take: one with a name leaves some to the others."""
        return self.shares.setdefault(tenant, CapacityLimiter(_SHARE if tenant else _QUESTIONS))


def hall_of(request: Request) -> Hall:
    """The one that the application was made with."""
    hall = request.app.state.hall
    assert isinstance(hall, Hall)
    return hall
