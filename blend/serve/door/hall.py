"""What every route stands in: the service, who may come in, how much they may bring, what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from blend.config import ANSWER_TOKENS
from blend.serve.ask import Ask, Reply
from blend.serve.door.errors import unavailable
from blend.serve.engine import Engine, Handle
from blend.serve.metrics import Metrics
from blend.serve.tenants import Tenants

BODY_BYTES = 16 << 20


class Service(Protocol):
    """What the door needs of the service behind it."""

    model: str
    ready: bool
    alive: bool
    engine: Engine

    def submit(self, ask: Ask, on_reply: Callable[[Reply], None]) -> Handle:
        """Take a question in; its replies go to `on_reply`, from another thread."""

    def corpora(self, tenant: str) -> tuple[str, ...]:
        """The corpora of a tenant."""

    def close(self, finish_s: float = 0.0) -> None:
        """Finish what runs if it takes no longer than that, and end."""


@dataclass(frozen=True)
class DoorLimits:
    """How much one request may bring, and how long it may take to.

    answer_tokens: of an answer where the request does not say. body_s: seconds in which a body must have come. keep_alive_s:
    after so many seconds of silence a stream gets a comment, so that nobody between takes it for dead. any_host: whether who
    brings no key may call the server by any name.
    """

    body_bytes: int = BODY_BYTES
    documents: int = 64
    messages: int = 1000
    answer_tokens: int = ANSWER_TOKENS
    body_s: float = 60.0
    keep_alive_s: float = 10.0
    any_host: bool = False


@dataclass
class Hall:
    """Shared by all requests. service: None while it is loading. closing: whether no request is taken any more."""

    service: Service | None
    tenants: Tenants
    limits: DoorLimits
    metrics: Metrics
    closing: bool = False

    def open(self) -> Service:
        """The service. Raises `DoorError` while there is none."""
        if self.closing:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.service is None or not self.service.ready:
            raise unavailable("the server is loading its model; try again in a moment", "loading", 2.0)
        return self.service


def hall_of(request: Request) -> Hall:
    """The one that the application was made with."""
    hall = request.app.state.hall
    assert isinstance(hall, Hall)
    return hall
