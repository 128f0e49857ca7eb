"""A store in Redis or Valkey: one string a name.

Caches carry a time to live of ten years, all else none, so that a server with `maxmemory-policy volatile-lru` (or another
`volatile-` policy) evicts caches and nothing else. The server's eviction is the only budget. An evicted cache is a miss: it is
found in a tier behind, or computed again.

The client's timeout counts from one piece of an answer to the next: a server that sends a few bytes now and then could keep a
thread for hours. Sockets here end with their exchange.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from blend.errors import EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.store.backend import (
    CACHES,
    Backend,
    Blob,
    Buffer,
    Found,
    Range,
    Stored,
    Timeouts,
    require_lease,
)

LARGEST = 512 << 20
"""Bytes of one string, by Redis's own default (`proto-max-bulk-len`)."""

_HEAD = 64 << 10
_TELLING_BYTES = 512  # they tell two versions of an entry apart: the header's digest is among the first hundred
_PAGE = 1000
_DECADE_S = 10 * 365 * 86400
_SLOWEST = 4 << 20  # bytes a second: who sends them more slowly is waited for as if it did not answer
_SWAP = """
local held = redis.call('GET', KEYS[1])
if (ARGV[1] == '0' and held == false) or (ARGV[1] == '1' and held == ARGV[2]) then
  redis.call('SET', KEYS[1], ARGV[3])
  return 1
end
return 0
"""


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


def connect(url: str, timeouts: Timeouts) -> redis.Redis:
    """A client that waits as long as `timeouts` says; nothing is exchanged yet."""
    # Once more for a connection that the server has closed since; not for one that does not answer, which would wait twice.
    again: Any = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    client: redis.Redis = redis.Redis.from_url(
        url,
        socket_connect_timeout=timeouts.connect_s,
        socket_timeout=timeouts.answer_s,
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

    def recv(self, *given: Any) -> Any:
        return self._in_time(self._held.recv, *given)

    def recv_into(self, *given: Any) -> Any:
        return self._in_time(self._held.recv_into, *given)

    def sendall(self, content: bytes) -> None:
        # Not the socket's own, which begins to count anew with each piece where there is TLS.
        left = memoryview(content)
        while left.nbytes:
            left = left[self._in_time(self._held.send, left) :]

    def _in_time(self, call: Callable[..., Any], *given: Any) -> Any:
        usual, left = self._held.gettimeout(), _ENDS.at - time.monotonic()
        if usual == 0 or left >= (float("inf") if usual is None else usual):  # it looks without waiting, or has time
            return call(*given)
        if left <= 0:
            raise TimeoutError("it answers too slowly")
        self._held.settimeout(left)
        try:
            return call(*given)
        finally:
            self._held.settimeout(usual)


class _Connection(redis.Connection):
    def _connect(self) -> Any:
        return _Socket(super()._connect())  # type: ignore[no-untyped-call]


class _SecureConnection(redis.SSLConnection):
    def _connect(self) -> Any:
        return _Socket(super()._connect())  # type: ignore[no-untyped-call]


class RedisBlob(Blob):
    """What a name held; later bytes come with the first ones again, which tell one version from another."""

    def __init__(self, backend: RedisBackend, name: str, nbytes: int, head: bytes) -> None:
        self._backend, self._name, self._telling = backend, name, head[:_TELLING_BYTES]
        self.nbytes, self.head = nbytes, head

    def read(self, *ranges: Range) -> bool:
        """One exchange for all."""
        if any(one.offset + one.into.nbytes > self.nbytes for one in ranges):
            return False
        rest = [one for one in ranges if one.offset + one.into.nbytes > len(self.head)]
        for one in ranges:
            if one not in rest:
                one.into[:] = self.head[one.offset : one.offset + one.into.nbytes]
        if rest:
            self._backend.get_ranges(self._name, self.nbytes, self._telling, rest)
        return True


class RedisBackend(Backend):
    """Names of a database of a server, behind `prefix`. client: of `connect`. place: for messages."""

    def __init__(self, client: redis.Redis, prefix: str, place: str, timeouts: Timeouts | None = None) -> None:
        self._client, self._prefix, self.place = client, prefix.encode(), place
        self._timeouts = timeouts or Timeouts()

    def open(self, name: str, head: int) -> Blob | None:
        """One exchange."""
        (found,) = self.open_many([name], head)
        assert not isinstance(found, EntryDamagedError)
        return found

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """One exchange for all."""
        # No transaction: a server that is full refuses even to read in one. Digests find out what was replaced meanwhile.
        most = max(head, _HEAD)
        with self._exchange("read", most * len(names)), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.strlen(self._key(name))
                pipe.getrange(self._key(name), 0, most - 1)
                pipe.exists(self._key(name))
            answers = pipe.execute() if names else []
            if any(len(beginning) > nbytes for nbytes, beginning in zip(answers[::3], answers[1::3], strict=True)):
                raise ValueError("an answer that contradicts itself")
        return [
            RedisBlob(self, name, nbytes, bytes(beginning)) if there else None
            for name, nbytes, beginning, there in zip(names, answers[::3], answers[1::3], answers[2::3], strict=True)
        ]

    def get_ranges(self, name: str, nbytes: int, telling: bytes, ranges: Sequence[Range]) -> None:
        """Fill them from what has this length and these first bytes. Raises `EntryDamagedError` where that is gone."""
        key, most = self._key(name), sum(one.into.nbytes for one in ranges)
        with self._exchange("read", most), self._client.pipeline(transaction=False) as pipe:
            for look in (0, 1):
                pipe.strlen(key)
                pipe.getrange(key, 0, len(telling) - 1)
                for one in ranges if look == 0 else ():
                    pipe.getrange(key, one.offset, one.offset + one.into.nbytes - 1)
            length, first, *pieces, length_after, first_after = pipe.execute()
            if {(length, first), (length_after, first_after)} != {(nbytes, telling)}:
                raise EntryDamagedError("it was replaced or evicted while it was read")
            for one, piece in zip(ranges, pieces, strict=True):
                one.into[:] = piece

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """One exchange."""
        require_lease(self, name)
        content = b"".join(blobs)
        if len(content) > LARGEST:
            raise EntryTooLargeError(f"{self.place} takes entries of {LARGEST >> 20} MiB at most: use smaller chunks")
        lives_s = _DECADE_S if name.startswith(CACHES) else None
        with self._exchange("written", len(content)):
            self._client.set(self._key(name), content, ex=lives_s)

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """A script on the server."""
        require_lease(self, name)
        with self._exchange("written"):
            given = ("0", "") if was is None else ("1", was)
            answer: Any = self._client.eval(_SWAP, 1, self._key(name), *given, content)
            return bool(answer)

    def delete(self, name: str) -> bool:
        """One exchange."""
        require_lease(self, name)
        with self._exchange("written"):
            return bool(self._client.unlink(self._key(name)))

    def listing(self, prefix: str) -> Iterator[Stored]:
        """`used` by the server's idle time where its policy keeps one, else now."""
        for names in self._pages(prefix):
            now = time.time()
            pipe: Any
            with self._exchange("read"), self._client.pipeline(transaction=False) as pipe:
                # What is looked at here has not been used: servers from Redis 7.2 and Valkey 7 on can be told so.
                pipe.execute_command("CLIENT", "NO-TOUCH", "ON")
                for name in names:
                    pipe.object("IDLETIME", self._key(name))
                    pipe.strlen(self._key(name))
                pipe.execute_command("CLIENT", "NO-TOUCH", "OFF")
                answers = pipe.execute(raise_on_error=False)[1:-1]
            pairs = zip(names, answers[::2], answers[1::2], strict=True)
            for name, idle, size in pairs:
                if isinstance(size, int) and idle is not None:
                    yield Stored(name, size, now - (idle if isinstance(idle, int) else 0))

    def names(self, prefix: str) -> Iterator[str]:
        """As a scan finds them."""
        return chain.from_iterable(self._pages(prefix))

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        """Names page by page, each once."""
        seen: set[bytes] = set()
        cursor: int | None = None
        while cursor != 0:
            with self._exchange("read"):
                answer: Any = self._client.scan(cursor or 0, match=self._key(prefix) + b"*", count=_PAGE)
                cursor, keys = int(answer[0]), set(answer[1]) - seen
                names = sorted(key.removeprefix(self._prefix).decode() for key in keys)
            seen |= keys
            if names:
                yield names

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    @contextmanager
    def _exchange(self, doing: str, nbytes: int = 0) -> Iterator[None]:
        """Of about so many bytes, in time. Whatever goes wrong as one line of ours."""
        try:
            with within(self._timeouts.connect_s + self._timeouts.answer_s + nbytes / _SLOWEST):
                yield
        except (StoreError, GeneratorExit):
            raise
        except Exception as error:
            # What it refuses it refuses on a connection that is well. Else those that are not in use go too: they may be
            # as dead. Those in use are other threads', who see for themselves.
            if not isinstance(error, redis.ResponseError):
                self._client.connection_pool.disconnect(inuse_connections=False)
            raise self._failed(error, doing) from None

    def _failed(self, error: Exception, doing: str) -> StoreError:
        line = str(error).partition("\n")[0][:120]
        if line.startswith("OOM") or isinstance(error, redis.exceptions.OutOfMemoryError):
            return StoreError(
                f"{self.place} is full: raise its maxmemory, or set maxmemory-policy to volatile-lru so that it evicts"
            )
        if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
            return StoreError(f"{self.place} refuses to be {doing} ({line}): give a user and password in its address")
        return StoreUnreachableError(f"{self.place} cannot be {doing} ({line}): see that it is up and reachable")
