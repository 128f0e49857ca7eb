"""Between vLLM's processes and `blend vllm` on one machine: lines of JSON over a Unix socket, and KV in shared memory.

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
MOST_BYTES = 256 << 20  # of a message
_CREDENTIALS = struct.Struct("3i")  # process, user, group

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


def address(name: str) -> str:
    """A socket's name as the kernel takes it."""
    return f"\0{name[1:]}" if name.startswith("@") else name


def request(name: str, message: Message, seconds: float) -> tuple[Message, int | None]:
    """Send one message to the prefill process; its answer, and the file descriptor that came with it.

    Takes at most `seconds` for the answer. Raises `TransportError`.
    """
    fds: list[int] = []
    until = time.monotonic() + seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(seconds)
            sock.connect(address(name))
            check_user(sock)
            sock.sendall(_line(message))
            line, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
            while not line.endswith(b"\n") and len(line) <= MOST_BYTES:
                if (remaining_s := until - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                sock.settimeout(remaining_s)
                if not (piece := sock.recv(1 << 16)):
                    break
                line += piece
        return _message(line), fds[0] if fds else None
    except (OSError, TransportError) as error:
        for fd in fds:
            os.close(fd)
        raise TransportError(f"the prefill process does not answer at {name} ({error})") from None


def check_user(sock: Any) -> None:
    """Raise `TransportError` unless the other end's process belongs to this user or root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(credentials)[1]
    if user not in (os.geteuid(), 0):
        raise TransportError(f"its process belongs to user {user}, not to {os.geteuid()}")


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> Message:
    """Raises `TransportError` for what is no whole message."""
    if not line.endswith(b"\n"):
        raise TransportError("the other end has gone")
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise TransportError("what came is no message of ours")
    return message


class Connection:
    """Messages both ways, at either end. The prefill process cancels its work and frees its KV when a client closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, name: str, message: Message) -> Connection:
        """Connect to the prefill process, and send a message. Raises `TransportError`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(address(name))  # at once or never; uvloop knows no abstract names
            check_user(sock)
        except (OSError, TransportError) as error:
            sock.close()
            raise TransportError(f"the prefill process does not answer at {name} ({error})") from None
        connection = cls(*await asyncio.open_unix_connection(sock=sock, limit=MOST_BYTES))
        try:
            await connection.send(message)
        except BaseException:
            connection.close()
            raise
        return connection

    async def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message, and with a short one a file descriptor. Raises `TransportError`."""
        try:
            if fd is None:
                self._writer.write(_line(message))
                await self._writer.drain()
            else:
                with self._writer.get_extra_info("socket").dup() as sock:
                    socket.send_fds(sock, [_line(message)], [fd])
        except OSError as error:
            raise TransportError(f"the other end has gone ({error})") from None

    async def receive(self) -> Message:
        """The next message. Raises `TransportError`, also at the end."""
        try:
            return _message(await self._reader.readline())
        except (OSError, ValueError) as error:  # the latter for a line that is too long
            raise TransportError(f"the other end has gone ({error})") from None

    async def closed(self) -> None:
        """Wait until the other end closes."""
        with contextlib.suppress(OSError):
            while await self._reader.read(1 << 16):
                pass

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
    def of(cls, fields: dict[str, Any]) -> HeldKV:
        """From `_asdict()` that went through JSON."""
        return cls(fields["rows"], fields["dtype"], tuple(map(tuple, fields["layers"])), fields["prompt"])

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(self.rows * heads * (key + value) for heads, key, value in self.layers) * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def part(
        self,
        memory: mmap.mmap,
        start: int,
        stop: int,
        rank: int,
        workers: int,
    ) -> Iterator[KVPair]:
        """Some rows and heads of each layer.

        Args:
            memory: the memory file.
            start: the first row.
            stop: the row behind the last one.
            rank: the tensor-parallel worker whose heads are taken.
            workers: how many there are. Several share a head where there are fewer heads than workers.
        """
        for keys, values in self.views(memory):
            heads = keys.shape[1]
            first = rank * heads // workers
            part = slice(first, first + max(1, heads // workers))
            yield keys[start:stop, part], values[start:stop, part]

    def views(self, memory: mmap.mmap) -> list[KVPair]:
        """The tensors in a memory file, layer by layer."""
        import torch

        flat = torch.frombuffer(memory, dtype=self._dtype)
        at = 0
        layers = []
        for heads, *widths in self.layers:
            pair = []
            for width in widths:
                size = self.rows * heads * width
                pair.append(flat[at : at + size].view(self.rows, heads, width))
                at += size
            layers.append((pair[0], pair[1]))
        return layers


class KVPool:
    """KV of prompts held for vLLM under random tickets, within `budget` bytes. Threads may share it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._held: dict[str, tuple[HeldKV, int] | None] = {}

    def __len__(self) -> int:
        return len(self._holding())

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(kv.nbytes for kv, _ in self._holding())

    @contextlib.contextmanager
    def ticket(self) -> Iterator[str]:
        """A new ticket. KV is held under it until the context ends; workers that read it then finish undisturbed."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._held[ticket] = None
        try:
            yield ticket
        finally:
            with self._lock:
                entry = self._held.pop(ticket)
                if entry is not None:
                    os.close(entry[1])

    def put(self, ticket: str, cache: BlendedCache, token_ids: Sequence[int]) -> None:
        """Hold a copy of the KV of all rows but the last, which vLLM computes; nothing if the ticket's context has ended.

        Raises `PoolFullError`.
        """
        pairs = [cache.view(layer) for layer in range(len(cache.layers))]
        layers = tuple((keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs)
        dtype = str(pairs[0][0].dtype).removeprefix("torch.")
        kv = HeldKV(len(token_ids) - 1, dtype, layers, digest(token_ids))
        with self._lock:
            if self.nbytes + kv.nbytes > self.budget:
                raise PoolFullError(f"{self.nbytes >> 20} MiB of {self.budget >> 20} are held")
            if ticket not in self._held:
                return
        fd = _written(pairs, kv)
        with self._lock:
            if ticket in self._held:
                self._held[ticket] = kv, fd
            else:
                os.close(fd)

    def get(self, ticket: str) -> tuple[int, HeldKV] | None:
        """A descriptor, which the caller closes, and what lies in its file; None for an unknown ticket."""
        with self._lock:
            entry = self._held.get(ticket)
            return None if entry is None else (os.dup(entry[1]), entry[0])

    def _holding(self) -> list[tuple[HeldKV, int]]:
        return [entry for entry in list(self._held.values()) if entry is not None]


def digest(token_ids: Sequence[int]) -> str:
    """Names a prompt by its token ids."""
    return sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def _written(pairs: Sequence[KVPair], kv: HeldKV) -> int:
    """The descriptor of a new memory file with this KV."""
    fd = os.memfd_create("kvblend", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, kv.nbytes)  # fail now instead of with a signal during the write
        for source, target in zip(pairs, kv.views(mmap.mmap(fd, kv.nbytes)), strict=True):
            for states, part in zip(source, target, strict=True):
                part.copy_(states[0, :, : kv.rows].transpose(0, 1))
    except BaseException:
        os.close(fd)
        raise
    return fd
