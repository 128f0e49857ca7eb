"""Connections to Redis on which an exchange ends in time.

The client's own time-out counts from one piece of an answer to the next, so a server that sends a few bytes now and then could
keep a thread for hours.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from blend.store.backend import Patience


class _Ends(threading.local):
    """When the exchange of this thread must be over, by the monotonic clock."""

    at = float("inf")


_ENDS = _Ends()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Around an exchange of this thread: its sockets raise `TimeoutError` when it takes longer."""
    before, _ENDS.at = _ENDS.at, time.monotonic() + seconds
    try:
        yield
    finally:
        _ENDS.at = before


def connect(url: str, patience: Patience) -> redis.Redis:
    """A client that waits as long as `patience` says; nothing is exchanged yet."""
    # Once more for a connection that the server has closed since; not for one that does not answer, which would wait twice.
    again: Any = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    client: redis.Redis = redis.Redis.from_url(
        url,
        socket_connect_timeout=patience.connect_s,
        socket_timeout=patience.answer_s,
        retry=again,
        connection_class=_SecureConnection if url.startswith("rediss") else _Connection,
    )
    return client


class _Socket:
    """A socket as the client uses it: each call takes what is left of the exchange at most."""

    def __init__(self, held: socket.socket) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    def recv(self, *given: Any) -> bytes:
        with self._in_time():
            return self._held.recv(*given)

    def recv_into(self, *given: Any) -> int:
        with self._in_time():
            return self._held.recv_into(*given)

    def sendall(self, content: bytes) -> None:
        # Not the socket's own, which begins to count anew with each piece where there is TLS.
        left = memoryview(content)
        while left.nbytes:
            with self._in_time():
                left = left[self._held.send(left) :]

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        usual, left = self._held.gettimeout(), _ENDS.at - time.monotonic()
        if usual == 0 or left >= (float("inf") if usual is None else usual):  # it looks without waiting, or has time
            yield
            return
        if left <= 0:
            raise TimeoutError("it answers too slowly")
        self._held.settimeout(left)
        try:
            yield
        finally:
            self._held.settimeout(usual)


class _Connection(redis.Connection):
    def _connect(self) -> Any:
        return _Socket(super()._connect())  # type: ignore[no-untyped-call]


class _SecureConnection(redis.SSLConnection):
    def _connect(self) -> Any:
        return _Socket(super()._connect())  # type: ignore[no-untyped-call]
