"""Connections within the open files that the process may have: where they run out, those that wait longest make room."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

ACCEPTED_AT_ONCE = 4
"""Connections accepted before the first of them can be refused."""

_MOST_DESCRIPTORS = 16_384
_NO_REQUESTS = 0
_LOG = logging.getLogger("kvblend.connections")


def _used(limit: int) -> int:
    """How many of so many files the process would use."""
    return _MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, _MOST_DESCRIPTORS)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, at most 16,384: many systems start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _used(soft) < _used(hard):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (_used(hard), hard))


def most_connections() -> int:
    """Half of the open files that the process may have; the store and the model need the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _used(soft) // 2


class HttpConnection(H11Protocol):
    """One connection. If there are too many, it takes the place of the oldest idle one, or gets 503."""

    connections: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection."""
        self.since = time.monotonic()
        if len(self.connections) >= most_connections():
            idle = filter(_is_idle, self.connections)
            if oldest := min(idle, key=lambda connection: connection.since, default=None):
                oldest.shutdown()
                _LOG.warning("more connections than open files allow: idle ones are closed")
            else:
                self.limit_concurrency = _NO_REQUESTS  # uvicorn answers 503
        super().connection_made(transport)


def _is_idle(connection: HttpConnection) -> bool:
    has_request = connection.cycle is not None and not connection.cycle.response_complete
    return not has_request and not connection.transport.is_closing()
