"""Connections within the open files that the process may have: where they run out, those that wait longest make room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Iterator, MutableSet
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

ACCEPTED_AT_ONCE = 4
"""Connections accepted before the first of them can be refused."""

_MOST_DESCRIPTORS = 16_384
_RESERVE = 32  # descriptors for the store, and for connections that are accepted or closed just now
_NO_REQUESTS = 0
_LOG = logging.getLogger("kvblend.connections")


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, at most 16,384: many systems start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def most_descriptors() -> int:
    """Open files that the process may have, of which it uses 16,384 at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)


def most_connections() -> int:
    """Half of the open files that the process may have; the store and the model need the others."""
    return most_descriptors() // 2


class OpenConnections(MutableSet[H11Protocol]):
    """The open connections, oldest first; in the place of uvicorn's set."""

    def __init__(self) -> None:
        self._connections: dict[H11Protocol, None] = {}
        self._most = most_connections()
        self._highest_descriptor = most_descriptors() - min(_RESERVE, most_descriptors() // 2)

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def __iter__(self) -> Iterator[H11Protocol]:
        return iter(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, value: H11Protocol) -> None:
        """Add a new connection."""
        self._connections[value] = None

    def discard(self, value: H11Protocol) -> None:
        """Remove a closed connection."""
        self._connections.pop(value, None)

    def are_too_many(self, newest: int) -> bool:
        """Whether there is no room for the newest. newest: its descriptor; systems give the lowest that is free."""
        return len(self) >= self._most or newest > self._highest_descriptor

    def close_oldest_idle(self) -> bool:
        """Close the oldest connection without a request. Returns False if all have one."""
        idle = (connection for connection in self if _is_idle(connection) and not connection.transport.is_closing())
        oldest = next(idle, None)
        if oldest is None:
            return False
        oldest.shutdown()
        return True


class HttpConnection(H11Protocol):
    """One connection. If there are too many, it takes the place of an idle one, or gets 503."""

    connections: Any  # `OpenConnections`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection."""
        make_room = self.connections.are_too_many(transport.get_extra_info("socket").fileno())
        if make_room and self.connections.close_oldest_idle():
            _LOG.warning("more connections than open files allow: idle ones are closed")
        elif make_room:
            self.limit_concurrency = _NO_REQUESTS  # uvicorn answers 503
        super().connection_made(transport)


def _is_idle(connection: H11Protocol) -> bool:
    return connection.cycle is None or connection.cycle.response_complete
