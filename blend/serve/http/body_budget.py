"""Receives bodies of requests within limits of size and time, and of memory for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.types import Message as AsgiMessage
from starlette.types import Receive

from blend.serve.http.errors import refuse, unavailable

_DRAIN_FACTOR = 4  # times the limit: a client reads its refusal only after it has sent everything
_DRAIN_S = 5.0
_FREE = 1 << 16  # bytes of each body that the budget does not count: ordinary questions always pass


@dataclass
class BodyBudget:
    """Memory for the bodies of all requests. most: bytes. Used by the event loop alone."""

    most: int
    used: int = 0

    @contextmanager
    def receiving(self, request: HttpRequest, most: int, seconds: float) -> Iterator[HttpRequest]:
        """The request with a body of at most `most` bytes, which must arrive in so many seconds.

        Reading it raises `ApiError` beyond these limits, and when the budget is exhausted. The end of the context returns the
        bytes to the budget.
        """
        until = asyncio.get_running_loop().time() + seconds
        announced = request.headers.get("content-length", "")
        over = announced.isascii() and announced.isdigit() and len(announced) < 20 and int(announced) > most
        taken = counted = 0

        async def receive() -> AsgiMessage:
            nonlocal taken, counted
            try:
                async with asyncio.timeout_at(until):
                    message = await request.receive()
            except TimeoutError:
                raise refuse("the body did not come in time", None, "timeout", 408) from None
            taken += len(message.get("body", b""))
            if over or taken > most:
                if message.get("more_body", False):
                    await _drain(request.receive, most * _DRAIN_FACTOR)
                words = f"the body is larger than {most:,} bytes, all that a request may bring"
                raise refuse(words, None, "body_too_large", 413)
            increase = max(0, taken - _FREE) - counted
            if increase and self.used + increase > self.most:
                raise unavailable("the server is receiving too many large requests; try again later", retry_s=5.0)
            self.used += increase
            counted += increase
            return message

        try:
            yield HttpRequest(request.scope, receive)
        finally:
            self.used -= counted


async def _drain(receive: Receive, most: int) -> None:
    """Discard the rest of a body, up to `most` bytes and for a few seconds."""
    nbytes = 0
    message: AsgiMessage = {"more_body": True}
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while message.get("more_body", False) and nbytes < most:
                message = await receive()
                nbytes += len(message.get("body", b""))
