"""Between vLLM's processes and `blend vllm` on one machine: JSON messages over a Unix socket, and KV in shared memory.

A name such as "@kvblend" is a socket in Linux's abstract namespace: it disappears with its process. Any other name is the path
of a Unix socket. Both ends talk only to processes of their own user or root.

KV lies in memory files without a name (`memfd_create`), whose descriptors are sent to vLLM's workers. The kernel frees the
memory when the last process that has a descriptor ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.errors import ConfigError

if TYPE_CHECKING:  # a status probe runs often, and needs no torch
    import torch

    from blend.model.cache import BlendedCache

SOCKET = "@kvblend"
VARIABLE = "KVBLEND_VLLM_SOCKET"
BACKLOG = 512
_HEAD = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MOST = 256 << 20  # bytes of a message
_CONNECT_S = 2.0

Message = dict[str, Any]
KVPair = tuple["torch.Tensor", "torch.Tensor"]


class TransportError(Exception):
    """The other end is missing, has gone, or is not trusted. The message is one line."""


class PoolFullError(Exception):
    """The pool's budget has no room for more KV."""


def bind(name: str) -> socket.socket:
    """A bound socket, which accepts connections from its `listen` on. Raises `ConfigError` where the name is in use."""
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not name.startswith("@"):
            _remove_stale(name)
        before = os.umask(0o177)  # readable by this user only
        try:
            place.bind(address(name))
        finally:
            os.umask(before)
    except OSError as error:
        place.close()
        raise ConfigError(
            f"cannot listen at --socket {name} ({error.strerror or error}): end what listens there, or choose another name"
        ) from None
    return place


def _remove_stale(name: str) -> None:
    """Remove the socket file of a process that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.lstat(name).st_mode):  # other files refuse connections in the same way
                Path(name).unlink()
        except OSError:
            return


def close(place: socket.socket, name: str) -> None:
    """Accept no more connections, and remove the socket's file."""
    if not name.startswith("@"):
        with contextlib.suppress(OSError):
            Path(name).unlink()
    place.close()


def connect(name: str, seconds: float) -> socket.socket:
    """A connection on which no call takes longer than this. Raises `TransportError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(address(name))
        check_user(sock)
    except (OSError, TransportError) as error:
        sock.close()
        raise TransportError(f"the prefill process does not answer at {name} ({error})") from None
    return sock


def check_user(sock: socket.socket) -> None:
    """Raise `TransportError` unless the other end's process belongs to this user or root."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(found)[1]
    if user not in (os.geteuid(), 0):
        raise TransportError(f"its process belongs to user {user}, not to {os.geteuid()}")


def send(sock: socket.socket, message: Message, fd: int | None = None) -> None:
    """Send one message, and with it a file descriptor. Raises `TransportError`."""
    try:
        packed = pack(message)
        if fd is not None:
            socket.send_fds(sock, [packed[:1]], [fd])
            packed = packed[1:]
        sock.sendall(packed)
    except OSError as error:
        raise TransportError(f"the other end has gone ({error})") from None


def receive(sock: socket.socket) -> tuple[Message, int | None]:
    """The next message, and the file descriptor that came with it. Raises `TransportError`, also at the end."""
    try:
        first, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise TransportError(f"no answer ({error})") from None
    fd = fds[0] if fds else None
    try:
        size = size_of(first + _exactly(sock, _HEAD.size - 1))
        return unpack(_exactly(sock, size)), fd
    except (OSError, TransportError) as error:
        if fd is not None:
            os.close(fd)
        raise TransportError(f"no answer ({error})") from None


def pack(message: Message) -> bytes:
    """A message as bytes, its length in front."""
    body = json.dumps(message).encode()
    return _HEAD.pack(len(body)) + body


def size_of(head: bytes) -> int:
    """Length of the message behind its first four bytes. Raises `TransportError` for bytes that are no head."""
    if len(head) < _HEAD.size:
        raise TransportError("the other end has gone")
    size = int(_HEAD.unpack(head)[0])
    if size > _MOST:
        raise TransportError(f"a message of {size} bytes is none of ours")
    return size


def unpack(body: bytes) -> Message:
    """The message in these bytes. Raises `TransportError`."""
    try:
        message = json.loads(body)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise TransportError("what came is no message of ours")
    return message


def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes within the connection's timeout, however slowly they trickle in."""
    parts, allowed = bytearray(), sock.gettimeout()
    end = None if allowed is None else time.monotonic() + allowed
    try:
        while len(parts) < size:
            if end is not None:
                sock.settimeout(max(end - time.monotonic(), 1e-3))
            part = sock.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise TransportError("the other end has gone")
            parts += part
    finally:
        sock.settimeout(allowed)
    return bytes(parts)


def address(name: str) -> str:
    """A socket's name as the kernel takes it."""
    return f"\0{name[1:]}" if name.startswith("@") else name


class PrefillConnection:
    """A connection to the prefill process. When it closes, the process cancels its work and frees its KV."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, name: str, message: Message) -> PrefillConnection:
        """Connect, and send a message. Raises `TransportError`."""
        sock = await asyncio.to_thread(connect, name, _CONNECT_S)
        sock.setblocking(False)
        found = cls(*await asyncio.open_unix_connection(sock=sock))
        try:
            await found.send(message)
        except TransportError:
            found.close()
            raise
        return found

    async def send(self, message: Message) -> None:
        """Raises `TransportError`."""
        self._writer.write(pack(message))
        try:
            await self._writer.drain()
        except OSError as error:
            raise TransportError(f"the prefill process has gone ({error})") from None

    async def next(self) -> Message:
        """The next message. Raises `TransportError` at the end."""
        try:
            size = size_of(await self._reader.readexactly(4))
            return unpack(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise TransportError("the prefill process has gone") from None

    def close(self) -> None:
        """Free everything."""
        self._writer.close()


class HeldKV(NamedTuple):
    """Contents of one memory file: for each layer the keys, then the values, `[rows, kv_heads, head_dim]`.

    layers: kv_heads, head_dim of keys, head_dim of values. prompt: digest of the rows' token ids.
    """

    rows: int
    dtype: str
    layers: tuple[tuple[int, int, int], ...]
    prompt: str

    @classmethod
    def of(cls, given: dict[str, Any]) -> HeldKV:
        """From `_asdict()` that went through JSON."""
        return cls(given["rows"], given["dtype"], tuple(map(tuple, given["layers"])), given["prompt"])

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(self.rows * heads * (key + value) for heads, key, value in self.layers) * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def part(self, memory: mmap.mmap, start: int, stop: int, rank: int, workers: int) -> Iterator[KVPair]:
        """Rows `start` to `stop - 1` of each layer, and the heads of one of so many tensor-parallel workers.

        Several workers share a head where there are fewer heads than workers.
        """
        for keys, values in self.views(memory):
            heads = keys.shape[1]
            first = rank * heads // workers
            mine = slice(first, first + max(1, heads // workers))
            yield keys[start:stop, mine], values[start:stop, mine]

    def views(self, memory: mmap.mmap) -> list[KVPair]:
        """The tensors in a memory file, layer by layer."""
        import torch

        flat, at = torch.frombuffer(memory, dtype=self._dtype), 0
        found = []
        for heads, *widths in self.layers:
            pair = []
            for width in widths:
                size = self.rows * heads * width
                pair.append(flat[at : at + size].view(self.rows, heads, width))
                at += size
            found.append((pair[0], pair[1]))
        return found


class KVPool:
    """KV of prompts held for vLLM under random tickets, within `budget` bytes. Threads may share it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, HeldKV]] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._nbytes

    def put(self, cache: BlendedCache, token_ids: Sequence[int]) -> str:
        """Hold a copy of the KV of all rows but the last, which vLLM computes; the ticket. Raises `PoolFullError`."""
        pairs = [cache.view(layer) for layer in range(len(cache.layers))]
        layers = tuple((keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs)
        dtype = str(pairs[0][0].dtype).removeprefix("torch.")
        held = HeldKV(len(token_ids) - 1, dtype, layers, digest(token_ids))
        with self._lock:
            if self._nbytes + held.nbytes > self.budget:
                raise PoolFullError(
                    f"{len(self._held)} prompts hold {self._nbytes >> 20} MiB of {self.budget >> 20}; "
                    "this one is left to vLLM's own prefill"
                )
            self._nbytes += held.nbytes
        try:
            fd = _written(pairs, held)
        except BaseException:
            with self._lock:
                self._nbytes -= held.nbytes
            raise
        ticket = secrets.token_hex(16)
        with self._lock:
            self._held[ticket] = fd, held
        return ticket

    def get(self, ticket: str) -> tuple[int, HeldKV] | None:
        """A descriptor, which the caller closes, and what lies in its file; None for an unknown ticket."""
        with self._lock:
            found = self._held.get(ticket)
            return None if found is None else (os.dup(found[0]), found[1])

    def release(self, ticket: str) -> None:
        """Hold it no longer. Workers that read it at this moment finish undisturbed."""
        with self._lock:
            found = self._held.pop(ticket, None)
            if found is not None:
                os.close(found[0])
                self._nbytes -= found[1].nbytes


def digest(token_ids: Sequence[int]) -> str:
    """Names a prompt by its token ids."""
    return sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def _written(pairs: Sequence[KVPair], held: HeldKV) -> int:
    """The descriptor of a new memory file with this KV."""
    fd = os.memfd_create("kvblend", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, held.nbytes)  # fail now instead of with a signal during the write
        for source, target in zip(pairs, held.views(mmap.mmap(fd, held.nbytes)), strict=True):
            for states, here in zip(source, target, strict=True):
                here.copy_(states[0, :, : held.rows].transpose(0, 1))
    except BaseException:
        os.close(fd)
        raise
    return fd
