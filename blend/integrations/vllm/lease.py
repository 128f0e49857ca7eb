"""vLLM's server asks the prefill process: one connection a question, held as long as the answer is wanted."""

from __future__ import annotations

import asyncio
from types import TracebackType

from blend.integrations.vllm import wire

_CONNECT_S = 2.0


class Lease:
    """A connection; when it closes, the prefill process lets go of everything that it held for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def take(cls, name: str, message: wire.Message) -> Lease:
        """Connect, and say what is wanted. Raises `WireError`."""
        sock = await asyncio.to_thread(wire.connect, name, _CONNECT_S)
        sock.setblocking(False)
        lease = cls(*await asyncio.open_unix_connection(sock=sock))
        try:
            await lease.say(message)
        except wire.WireError:
            lease.close()
            raise
        return lease

    async def say(self, message: wire.Message) -> None:
        """Send it. Raises `WireError`."""
        self._writer.write(wire.pack(message))
        try:
            await self._writer.drain()
        except OSError as error:
            raise wire.WireError(f"the prefill process has gone ({error})") from None

    async def next(self) -> wire.Message:
        """The next message. Raises `WireError` at the end."""
        try:
            size = wire.size_of(await self._reader.readexactly(4))
            return wire.unpack(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise wire.WireError("the prefill process has gone") from None

    def close(self) -> None:
        """Give everything back."""
        self._writer.close()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
