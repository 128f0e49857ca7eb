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
from blend.serve.limits import RequestLimits

_DRAIN_FACTOR = 4  # times the limit: a client reads its refusal only after it has sent everything
_DRAIN_S = 5.0
_FREE = 1 << 16  # bytes of each body that the budget does not count: ordinary questions always pass


@dataclass
class BodyBudget:
    """Memory for the bodies of all requests. Used by the event loop alone."""

    limits: RequestLimits
    used: int = 0

    @contextmanager
    def receiving(self, request: HttpRequest, *, uploads: bool = False) -> Iterator[HttpRequest]:
        """The request. Reading its body raises `ApiError` beyond the limits, and when the budget is exhausted.

        The end of the context returns the bytes to the budget.
        """
        limits = self.limits
        most, seconds = (limits.upload_bytes, limits.upload_s) if uploads else (limits.body_bytes, limits.body_s)
        until = asyncio.get_running_loop().time() + seconds
        taken = counted = 0

        async def receive() -> AsgiMessage:
            nonlocal taken, counted
            try:
                async with asyncio.timeout_at(until):
                    message = await request.receive()
            except TimeoutError:
                raise refuse("the body did not come in time", None, "timeout", 408) from None
            taken += len(message.get("body", b""))
            if taken > most:
                if message.get("more_body", False):
                    await _drain(request.receive, most * _DRAIN_FACTOR)
                words = f"the body is larger than {most:,} bytes, all that a request may bring"
                raise refuse(words, None, "body_too_large", 413)
            increase = max(0, taken - _FREE) - counted
            if increase and self.used + increase > limits.all_bytes:
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
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while most > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                most -= len(message["body"])
