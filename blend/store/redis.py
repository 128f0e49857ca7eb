"""A store in Redis or Valkey: one string a name.

Caches carry a time to live of ten years, all else none, so that a server with `maxmemory-policy volatile-lru` (or another
`volatile-` policy) evicts caches and nothing else. The server's eviction is the only budget. An evicted cache is a miss: it is
found in a tier behind, or computed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from blend.errors import EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.store.backend import CACHES, Blob, Buffer, Found, Stored, in_batches, is_of_kvblend
from blend.store.breaker import Timeouts
from blend.store.lease import LEASE, ServerBackend

LARGEST = 512 << 20
"""Bytes of one string, by Redis's own default (`proto-max-bulk-len`)."""

_HEAD = 64 << 10
_VERSION_BYTES = 512  # they tell two versions of an entry apart: the header's digest is among the first hundred
_READ_BYTES = 1 << 20  # of a socket at once
_PAGE = 1000
_DECADE_S = 10 * 365 * 86400
_LOST = -1  # the answer of a script whose caller has lost its lease
_UNDER_LEASE = f"""
local lease, owner = redis.pcall('GET', KEYS[2]) or '', ARGV[1]
if type(lease) == 'table' then lease = '' end
if string.sub(lease, 1, #owner) ~= owner then return {_LOST} end
"""
_PUT = """
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""
_SWAP = """
local content = redis.pcall('GET', KEYS[1])
if type(content) == 'table' then content = '' end
if (ARGV[2] == '0' and (content == false or content == '')) or (ARGV[2] == '1' and content == ARGV[3]) then
  redis.call('SET', KEYS[1], ARGV[4])
  return 1
end
return 0
"""
_DELETE = """
return redis.call('UNLINK', KEYS[1])
"""


class RedisBlob(Blob):
    """What a name held; later bytes come with the first ones again, which tell one version from another.

    Args:
        backend: reads the later bytes.
        key: of the name in the database.
        nbytes: its length.
        head: its first bytes.

    """

    def __init__(self, backend: RedisBackend, key: bytes, nbytes: int, head: bytes) -> None:
        self._backend = backend
        self._key = key
        self.nbytes = nbytes
        self.head = head

    def _fetch(self, offset: int, into: memoryview) -> None:
        """In one exchange."""
        beginning = bytes(self.head[:_VERSION_BYTES])
        with self._backend.exchange("read"), self._backend.client.pipeline(transaction=False) as pipe:
            pipe.getrange(self._key, offset, offset + into.nbytes - 1)
            pipe.strlen(self._key)
            pipe.getrange(self._key, 0, len(beginning) - 1)
            content, *version = _answers(pipe)
            is_string = isinstance(content, bytes)
            if not is_string or len(content) != into.nbytes or version != [self.nbytes, beginning]:
                raise EntryDamagedError("it was replaced or evicted while it was read")
            into[:] = content


def _answers(pipe: Any) -> list[Any]:
    """The answers of a pipeline; an error in place of one whose name holds no string, and raises other errors."""
    answers: list[Any] = pipe.execute(raise_on_error=False)
    for answer in answers:
        is_wrong_type = isinstance(answer, redis.ResponseError) and str(answer).startswith("WRONGTYPE")
        if isinstance(answer, Exception) and not is_wrong_type:
            raise answer
    return answers


class RedisBackend(ServerBackend):
    """Names of a database of a server.

    Args:
        url: of the database.
        prefix: begins every name in it.
        place: for messages.
        timeouts: how long the server is waited for.

    """

    def __init__(self, url: str, prefix: str, place: str, timeouts: Timeouts) -> None:
        # Once more for a connection that the server has closed since; not for one that does not answer, which would wait twice.
        again: Any = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        self.client: redis.Redis = redis.Redis.from_url(
            url,
            socket_connect_timeout=timeouts.connect_s,
            socket_timeout=timeouts.answer_s,
            retry=again,
            socket_read_size=_READ_BYTES,
        )
        self._prefix = prefix.encode()
        self.place = place

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """Open all names in one exchange."""
        # No transaction: a server that is full refuses even to read in one. Digests find out what was replaced meanwhile.
        with self.exchange("read"), self.client.pipeline(transaction=False) as pipe:
            keys = [self._key(name) for name in names]
            for key in keys:
                pipe.strlen(key)
                pipe.getrange(key, 0, _HEAD - 1)
            answers = _answers(pipe) if keys else []
        return [self._found(*answer) for answer in zip(keys, answers[::2], answers[1::2], strict=True)]

    def _found(self, key: bytes, nbytes: object, head: object) -> Found:
        if not isinstance(nbytes, int) or not isinstance(head, bytes):
            return EntryDamagedError("it is no string")
        return RedisBlob(self, key, nbytes, head) if nbytes else None

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Put in one exchange."""
        content = b"".join(blobs)
        if len(content) > LARGEST:
            raise EntryTooLargeError(f"{self.place} takes entries of {LARGEST >> 20} MiB at most: use smaller chunks")
        is_cache = name.startswith(CACHES)
        if self.lease_owner and not is_cache:
            self._run(_PUT, name, content)
            return
        self.require_lease()
        lives_s = _DECADE_S if is_cache else None
        with self.exchange("written"):
            self.client.set(self._key(name), content, ex=lives_s)

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Swap by a script on the server."""
        condition = (b"0", b"") if was is None else (b"1", was)
        return self._run(_SWAP, name, *condition, content)

    def delete(self, name: str) -> None:
        """Delete by a script on the server."""
        self._run(_DELETE, name)

    def _run(self, script: str, name: str, *arguments: bytes) -> bool:
        """Run a script on a name if this thread has not lost its lease; the server looks and writes in one step."""
        with self.exchange("written"):
            keys = (self._key(name), self._key(LEASE))
            answer: Any = self.client.eval(_UNDER_LEASE + script, 2, *keys, self.lease_owner, *arguments)
        if answer == _LOST:
            raise self.lease_is_lost()
        return bool(answer)

    def require_lasting(self) -> None:
        """Look at the server's policy of eviction, where this user may."""
        memory: Any = {}
        with self.exchange("read"), suppress(redis.ResponseError):
            memory = self.client.info("memory")
        policy = memory.get("maxmemory_policy", "")
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            raise StoreError(
                f"{self.place} evicts indexes too (its maxmemory-policy is {policy}): set it to volatile-lru, which evicts "
                "caches only"
            )

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List names; `used` is by the server's idle time where its policy keeps one, else now."""
        for names in in_batches(sorted(self.names(prefix)), _PAGE):
            now = time.time()
            pipe: Any
            with self.exchange("read"), self.client.pipeline(transaction=False) as pipe:
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
        """Names, in the order in which Redis scans them, each once."""
        with self.exchange("read"):
            keys = dict.fromkeys(self.client.scan_iter(match=self._key(prefix) + b"*", count=_PAGE))
        names = (key.removeprefix(self._prefix).decode(errors="replace") for key in keys)
        return filter(is_of_kvblend, names)

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _failed(self, error: Exception, doing: str) -> StoreError:
        # What it refuses it refuses on a connection that is well. Else those that are not in use go too: they may be as dead.
        # Those in use are other threads', who see for themselves.
        if not isinstance(error, redis.ResponseError):
            self.client.connection_pool.disconnect(inuse_connections=False)
        line = str(error).partition("\n")[0][:120]
        if line.startswith("OOM") or isinstance(error, redis.exceptions.OutOfMemoryError):
            return StoreError(
                f"{self.place} is full: raise its maxmemory, or set maxmemory-policy to volatile-lru so that it evicts"
            )
        if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
            return StoreError(f"{self.place} refuses to be {doing} ({line}): give a user and password in its address")
        return StoreUnreachableError(f"{self.place} cannot be {doing} ({line}): see that it is up and reachable")
