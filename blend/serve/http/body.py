"""The body of a request, read within its limits of size and time, and within what all bodies together may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Message, Receive

from blend.serve.http.errors import DoorError, ended_early, refuse, unavailable

_READ_ON = 4  # times the limit: who sends a little too much is to read the answer, which he does only after sending
_READ_ON_S = 5.0
_FREE = 1 << 16  # bytes of each body that no budget counts: ordinary questions pass while large bodies fill it
_RETRY_S = 5.0


@dataclass
class BodyBudget:
    """Memory for the bodies of all requests. most: bytes. Used by the event loop alone."""

    most: int
    held: int = 0

    def take(self, nbytes: int) -> None:
        """Count so many more bytes. Raises `DoorError` where that would be too many."""
        if nbytes and self.held + nbytes > self.most:
            raise unavailable("the server is receiving too many large requests; try again later", retry_s=_RETRY_S)
        self.held += nbytes


async def read(receive: Receive) -> bytes:
    """All of a body; see `limited`."""
    return b"".join([part async for part in _parts(receive)])


@contextmanager
def limited(request: Request, most: int, seconds: float, budget: BodyBudget) -> Iterator[Receive]:
    """What receives the request's body as `request.receive` does, and raises `DoorError` when it is too large or too slow.

    Also when it takes more than the budget has left; what it took is returned at the end of the context.

    most: bytes that it may have. seconds: in which it must come.
    """
    until = asyncio.get_running_loop().time() + seconds
    announced = request.headers.get("content-length", "")
    over = announced.isascii() and announced.isdigit() and len(announced) < 20 and int(announced) > most
    taken = counted = 0

    async def receive() -> Message:
        nonlocal taken, counted
        message = await _within(request.receive, until)
        taken += len(message.get("body", b""))
        if over or taken > most:
            if message.get("more_body", False):
                await _read_on(request.receive, most * _READ_ON)
            raise refuse(
                f"the body is larger than {most:,} bytes, all that a request may bring",
                *(None, "body_too_large", 413),
            )
        more = max(0, taken - _FREE) - counted
        budget.take(more)
        counted += more
        return message

    try:
        yield receive
    finally:
        budget.held -= counted


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DoorError(ended_early("cancelled"))
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _within(receive: Receive, until: float) -> Message:
    try:
        async with asyncio.timeout_at(until):
            return await receive()
    except TimeoutError:
        raise refuse("the body did not come in time", None, "timeout", 408) from None


async def _read_on(receive: Receive, most: int) -> None:
    """Throw away the rest, as far as that is soon done."""
    seen = 0
    try:
        async with asyncio.timeout(_READ_ON_S):
            while seen < most:
                message = await receive()
                seen += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
