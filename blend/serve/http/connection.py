"""Connections: on each a request must come in time, and there are no more of them than the process has descriptors for."""

from __future__ import annotations

import asyncio
import math
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from blend.serve.faults import LOG
from blend.serve.http.errors import refuse

ACCEPTED_AT_ONCE = 64  # before any of them is looked at
_MOST_DESCRIPTORS = 16_384
_LEAST = 16
_TELL_S = 60.0


@dataclass
class Crowd:
    """The connections of a server. most: of them. head_s: seconds in which a request's line and headers must have come.

    waiting: those on which a request is to come, the one that has waited longest first.
    """

    most: int
    head_s: float
    waiting: dict[Connection, None] = field(default_factory=dict)
    _told: float = -math.inf

    def tell(self, now: float) -> None:
        """Log that there are too many, once a minute."""
        if now - self._told > _TELL_S:
            self._told = now
            LOG.warning("connections", extra={"told": {"most": self.most, "waiting": len(self.waiting)}})


class Connection(H11Protocol):
    """uvicorn's, which itself closes one that is idle between two requests, and waits for the rest of a request for ever."""

    def __init__(self, *given: Any, crowd: Crowd, **named: Any) -> None:
        super().__init__(*given, **named)
        self._crowd = crowd
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, in the place of the one that has waited longest where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._crowd.most:
            self._crowd.tell(self.loop.time())
            next(iter(self._crowd.waiting), self).end()
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """More of a request, or of what follows one that was refused before all of it had come."""
        super().data_received(data)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        super().connection_lost(exc)
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of all other errors."""
        answer = refuse("this is no HTTP request that can be read", None, "invalid_request").failure.response
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def end(self) -> None:
        """Close it without an answer."""
        self._stop_waiting()
        self.transport.abort()

    def _await_request(self) -> None:
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._crowd.head_s, self.end)
            self._crowd.waiting[self] = None

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        self._crowd.waiting.pop(self, None)


def raise_descriptor_limit() -> None:
    """Have as many descriptors as the system allows, within reason: most systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Half of the descriptors that the process may have; files of the store and of the model take others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)
    return max(_LEAST, descriptors // 2 - ACCEPTED_AT_ONCE)
