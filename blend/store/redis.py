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
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from math import inf
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
)
from blend.store.breaker import Timeouts
from blend.store.lease import leased, require_lease

LARGEST = 512 << 20
"""Bytes of one string, by Redis's own default (`proto-max-bulk-len`)."""

_HEAD = 64 << 10
_VERSION_BYTES = 512  # they tell two versions of an entry apart: the header's digest is among the first hundred
_PIECE = 2 << 20  # the client copies an answer several times
_READ_BYTES = 1 << 20  # of a socket at once
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

    at = inf


_ENDS = _Ends()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Around an exchange of this thread: its sockets raise `TimeoutError` when it takes longer."""
    before = _ENDS.at
    _ENDS.at = time.monotonic() + seconds
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
        socket_read_size=_READ_BYTES,
        connection_class=_SecureConnection if url.startswith("rediss") else _Connection,
    )
    return client


class _Socket:
    """A socket as the client uses it: each call takes what is left of the exchange at most."""

    def __init__(self, below: socket.socket) -> None:
        self._below = below

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def recv(self, *args: Any) -> Any:
        return self._in_time(self._below.recv, *args)

    def recv_into(self, *args: Any) -> Any:
        return self._in_time(self._below.recv_into, *args)

    def sendall(self, content: bytes) -> None:
        # Not the socket's own, which begins to count anew with each piece where there is TLS.
        unsent = memoryview(content)
        while unsent.nbytes:
            unsent = unsent[self._in_time(self._below.send, unsent) :]

    def _in_time(self, call: Callable[..., Any], *args: Any) -> Any:
        timeout_s = self._below.gettimeout()
        remaining_s = _ENDS.at - time.monotonic()
        has_time = remaining_s >= (inf if timeout_s is None else timeout_s)
        if has_time or timeout_s == 0:  # 0: it looks without waiting
            return call(*args)
        if remaining_s <= 0:
            raise TimeoutError("it answers too slowly")
        self._below.settimeout(remaining_s)
        try:
            return call(*args)
        finally:
            self._below.settimeout(timeout_s)


class _Connection(redis.Connection):
    def _connect(self) -> Any:
        return _Socket(super()._connect())  # type: ignore[no-untyped-call]


class _SecureConnection(redis.SSLConnection):
    def _connect(self) -> Any:
        return _Socket(super()._connect())  # type: ignore[no-untyped-call]


class RedisBlob(Blob):
    """What a name held; later bytes come with the first ones again, which tell one version from another.

    Args:
        backend: reads the later bytes.
        name: the name.
        nbytes: its length.
        head: its first bytes.

    """

    def __init__(
        self,
        backend: RedisBackend,
        name: str,
        nbytes: int,
        head: bytes,
    ) -> None:
        self._backend = backend
        self._name = name
        self.nbytes = nbytes
        self.head = head

    def read(self, *ranges: Range) -> bool:
        """Read all in one exchange; in none what came along."""
        if any(part.end > self.nbytes for part in ranges):
            return False
        if any(part.end > len(self.head) for part in ranges):
            self._backend.fill(self._name, self.nbytes, bytes(self.head[:_VERSION_BYTES]), ranges)
        else:
            for part in ranges:
                part.into[:] = self.head[part.offset : part.end]
        return True


class RedisBackend(Backend):
    """Names of a database of a server.

    Args:
        client: of `connect`.
        prefix: begins every name in the database.
        place: for messages.
        timeouts: how long an exchange may take.

    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        place: str,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._client = client
        self._prefix = prefix.encode()
        self.place = place
        self._timeouts = timeouts or Timeouts()

    def open(self, name: str, head: int) -> Blob | None:
        """Read the first bytes, in one exchange."""
        (blob,) = self.open_many([name], head)
        assert not isinstance(blob, EntryDamagedError)
        return blob

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """Open all names in one exchange."""
        # No transaction: a server that is full refuses even to read in one. Digests find out what was replaced meanwhile.
        most = max(head, _HEAD)
        with self._exchange("read", most * len(names)), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                key = self._key(name)
                pipe.strlen(key)
                pipe.getrange(key, 0, most - 1)
                pipe.exists(key)
            answers = pipe.execute() if names else []
            blobs: list[Found] = []
            for index, name in enumerate(names):
                nbytes, beginning, exists = answers[3 * index : 3 * index + 3]
                if len(beginning) > nbytes:
                    raise ValueError("an answer that contradicts itself")
                blobs.append(RedisBlob(self, name, nbytes, bytes(beginning)) if exists else None)
        return blobs

    def fill(
        self,
        name: str,
        nbytes: int,
        beginning: bytes,
        ranges: Sequence[Range],
    ) -> None:
        """Fill buffers from one version.

        Args:
            name: whose content it is.
            nbytes: the length of the version.
            beginning: its first bytes.
            ranges: what to fill.

        Raises:
            EntryDamagedError: the version is gone.

        """
        key = self._key(name)
        pieces = [piece for part in ranges for piece in part.pieces(_PIECE)]
        most = sum(piece.into.nbytes for piece in pieces)
        with self._exchange("read", most), self._client.pipeline(transaction=False) as pipe:
            pipe.strlen(key)
            pipe.getrange(key, 0, len(beginning) - 1)
            for piece in pieces:
                pipe.getrange(key, piece.offset, piece.end - 1)
            pipe.strlen(key)
            pipe.getrange(key, 0, len(beginning) - 1)
            length, first, *contents, length_after, first_after = pipe.execute()
            if {(length, first), (length_after, first_after)} != {(nbytes, beginning)}:
                raise EntryDamagedError("it was replaced or evicted while it was read")
            for piece, content in zip(pieces, contents, strict=True):
                piece.into[:] = content

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Put in one exchange."""
        require_lease(self, name)
        content = b"".join(blobs)
        if len(content) > LARGEST:
            raise EntryTooLargeError(f"{self.place} takes entries of {LARGEST >> 20} MiB at most: use smaller chunks")
        lives_s = _DECADE_S if name.startswith(CACHES) else None
        with self._exchange("written", len(content)):
            self._client.set(self._key(name), content, ex=lives_s)

    def swap(
        self,
        name: str,
        content: bytes,
        was: bytes | None,
    ) -> bool:
        """Swap by a script on the server."""
        require_lease(self, name)
        with self._exchange("written"):
            condition = ("0", "") if was is None else ("1", was)
            answer: Any = self._client.eval(_SWAP, 1, self._key(name), *condition, content)
            return bool(answer)

    def delete(self, name: str) -> bool:
        """Delete in one exchange."""
        require_lease(self, name)
        with self._exchange("written"):
            return bool(self._client.unlink(self._key(name)))

    def require_lasting(self) -> None:
        """Look at the server's policy of eviction, where this user may."""
        memory: Any = {}
        with self._exchange("read"), suppress(redis.ResponseError):
            memory = self._client.info("memory")
        policy = memory.get("maxmemory_policy", "")
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            raise StoreError(
                f"{self.place} evicts indexes too (its maxmemory-policy is {policy}): set it to volatile-lru, which evicts "
                "caches only"
            )

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List names; `used` is by the server's idle time where its policy keeps one, else now."""
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
            for name, idle_s, size in zip(names, answers[::2], answers[1::2], strict=True):
                if isinstance(size, int) and idle_s is not None:
                    used = now - idle_s if isinstance(idle_s, int) else now
                    yield Stored(name, size, used)

    def names(self, prefix: str) -> Iterator[str]:
        """Names, in the order in which Redis scans them."""
        return chain.from_iterable(self._pages(prefix))

    def writing(self) -> AbstractContextManager[None]:
        """The lease of this store."""
        return leased(self)

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        """Names page by page, each once."""
        returned: set[bytes] = set()
        cursor: int | None = None
        while cursor != 0:
            with self._exchange("read"):
                answer: Any = self._client.scan(cursor or 0, match=self._key(prefix) + b"*", count=_PAGE)
                cursor = int(answer[0])
                keys = set(answer[1]) - returned
                names = sorted(key.removeprefix(self._prefix).decode() for key in keys)
            returned |= keys
            if names:
                yield names

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    @contextmanager
    def _exchange(self, doing: str, nbytes: int = 0) -> Iterator[None]:
        """Around an exchange of about so many bytes: it ends in time, and its errors are a line of ours."""
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
