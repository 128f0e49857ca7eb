"""Receives bodies of requests within limits of size and time, and of memory for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from starlette.requests import Request as HttpRequest
from starlette.types import Message as AsgiMessage
from starlette.types import Receive

from blend.serve.http.errors import ApiError, closing, refuse, unavailable
from blend.serve.limits import RequestLimits

_DRAIN_FACTOR = 4  # times the limit: a client reads its refusal only after it has sent everything
_DRAIN_S = 5.0
_FREE = 1 << 16  # bytes of each body that the budget does not count: ordinary questions always pass
_OLDEST = 32  # bodies among which the slowest is looked for
_SLOW_S = 5.0  # after which a body makes room for one of the same client


class BodyBudget:
    """Memory for the bodies of all requests, and those that are still arriving. Used by the event loop alone.

    client_of: who has sent a request. used: bytes.
    """

    def __init__(self, limits: RequestLimits, client_of: Callable[[HttpRequest], str]) -> None:
        self.limits = limits
        self.used = 0
        self._client_of = client_of
        self._arriving = dict[str, dict[ArrivingBody, None]]()  # of each client, the oldest first
        self._closed = False

    @contextmanager
    def receiving(self, request: HttpRequest, *, uploads: bool = False) -> Iterator[HttpRequest]:
        """The request. Reading its body raises `ApiError` beyond the limits, and when the budget is exhausted.

        The end of the context returns the bytes to the budget.
        """
        limits = self.limits
        most, seconds = (limits.upload_bytes, limits.upload_s) if uploads else (limits.body_bytes, limits.body_s)
        body = ArrivingBody(self._client_of(request), seconds, limits.first_s)
        self._arriving.setdefault(body.client, {})[body] = None

        async def receive() -> AsgiMessage:
            if self._closed:
                raise closing()
            message = await body.next(request.receive)
            continues = message.get("more_body", False)
            if not continues:
                self._remove(body)
            if body.size > most:
                if continues:
                    await _drain(request.receive, most * _DRAIN_FACTOR)
                words = f"the body is larger than {most:,} bytes, all that a request may bring"
                raise refuse(words, None, "body_too_large", 413)
            self._count(body)
            return message

        try:
            yield HttpRequest(request.scope, receive)
        finally:
            self._remove(body)
            self._free(body)

    def end_slowest(self) -> bool:
        """End one of the bodies that arrive; whether there was one.

        It is the slowest of the oldest ones of the client with the most of them.
        """
        if not self._arriving:
            return False
        bodies = max(self._arriving.values(), key=len)
        self._end(min(islice(bodies, _OLDEST), key=ArrivingBody.speed))
        return True

    def close(self) -> None:
        """End all bodies that arrive: the server is shutting down."""
        self._closed = True
        for bodies in self._arriving.values():
            for body in bodies:
                body.end(closing())

    def _count(self, body: ArrivingBody) -> None:
        """Take memory for what has come of a body, from the slowest of others if need be."""
        increase = max(0, body.size - _FREE) - body.counted
        if increase <= 0:
            return
        while self.used + increase > self.limits.all_bytes:
            slowest = self._slowest_large(body)
            if slowest is None:
                raise _too_many()
            self._end(slowest)
        self.used += increase
        body.counted += increase

    def _slowest_large(self, body: ArrivingBody) -> ArrivingBody | None:
        """The slowest arriving body of the client whose bodies take the most memory.

        If that is the client of this body: only one that has been arriving for a while.
        """
        if not self._arriving:
            return None
        sizes = {client: sum(candidate.counted for candidate in bodies) for client, bodies in self._arriving.items()}
        client = max(sizes, key=lambda name: sizes[name])
        large = [candidate for candidate in self._arriving[client] if candidate.counted and candidate is not body]
        if client == body.client:
            large = [candidate for candidate in large if candidate.age > _SLOW_S]
        return min(large, key=ArrivingBody.speed, default=None)

    def _remove(self, body: ArrivingBody) -> None:
        """Count a body no longer among those that arrive."""
        bodies = self._arriving.get(body.client, {})
        bodies.pop(body, None)
        if not bodies:
            self._arriving.pop(body.client, None)

    def _end(self, body: ArrivingBody) -> None:
        body.end(_too_many())
        self._remove(body)
        self._free(body)

    def _free(self, body: ArrivingBody) -> None:
        self.used -= body.counted
        body.counted = 0


class ArrivingBody:
    """A body and its time.

    Args:
        client: who sends it.
        seconds: in which it must arrive.
        first_s: in which its first bytes must.

    Attributes:
        size: bytes that have come.
        counted: bytes for which the budget has given memory.

    """

    def __init__(self, client: str, seconds: float, first_s: float) -> None:
        self.client = client
        self.size = self.counted = 0
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._until = self._begun + seconds
        self._first_until = self._begun + min(seconds, first_s)
        self._refusal: ApiError | None = None
        self._wait: asyncio.Timeout | None = None

    @property
    def age(self) -> float:
        """Seconds since its head came."""
        return self._loop.time() - self._begun

    def speed(self) -> tuple[float, float]:
        """Bytes a second, and when it began: the smallest is the slowest."""
        return self.size / (self.age + 1), self._begun

    async def next(self, receive: Receive) -> AsgiMessage:
        """The next message. Raises `ApiError` if it does not come in time, or the body was ended."""
        if self._refusal is not None:
            raise self._refusal
        try:
            async with asyncio.timeout_at(self._until if self.size else self._first_until) as self._wait:
                message = await receive()
        except TimeoutError:
            late = refuse("the body did not come in time", None, "timeout", 408).and_close()
            raise self._refusal or late from None
        finally:
            self._wait = None
        self.size += len(message.get("body", b""))
        return message

    def end(self, refusal: ApiError) -> None:
        """Refuse the rest of it."""
        self._refusal = refusal
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(self._loop.time())


async def _drain(receive: Receive, most: int) -> None:
    """Discard the rest of a body, up to `most` bytes and for a few seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while most > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                most -= len(message["body"])


def _too_many() -> ApiError:
    words = "the server is receiving too many requests that are large or come slowly; try again later"
    return unavailable(words, retry_s=5.0).and_close()
