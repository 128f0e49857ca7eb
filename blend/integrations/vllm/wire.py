"""Messages between vLLM's processes and the one that blends: JSON with its length in front.

A name such as "@kvblend" is a socket in Linux's abstract namespace: nothing is left of it when its process has ended, however.
Any other name is the path of a Unix socket. Both ends talk to processes of their own user or root alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Any

from blend.errors import ConfigError

SOCKET = "@kvblend"
VARIABLE = "KVBLEND_VLLM_SOCKET"
_HEAD = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MOST = 256 << 20  # bytes of a message
BACKLOG = 512

Message = dict[str, Any]


class WireError(Exception):
    """The other end is not there, has gone, or is not to be talked to. The message is one line."""


def bind(name: str) -> socket.socket:
    """A socket that has this name, and takes connections from its `listen` on.

    Raises `ConfigError` where another process has it already.
    """
    try:
        return _bound(name)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at --socket {name} ({error.strerror or error}): end what listens there, or choose another name"
        ) from None


def _bound(name: str) -> socket.socket:
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not name.startswith("@"):
            _remove_stale(name)
        before = os.umask(0o177)  # a file of this user's alone
        try:
            place.bind(_address(name))
        finally:
            os.umask(before)
    except OSError:
        place.close()
        raise
    return place


def _remove_stale(name: str) -> None:
    """Of a process that was killed a file is left; nobody answers there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.lstat(name).st_mode):  # a file of somebody's is refused the same way
                Path(name).unlink()
        except OSError:
            return


def close(place: socket.socket, name: str) -> None:
    """Take no more connections, and leave nothing behind."""
    if not name.startswith("@"):
        with contextlib.suppress(OSError):
            Path(name).unlink()
    place.close()


def connect(name: str, seconds: float) -> socket.socket:
    """A connection on which nothing may take longer than this. Raises `WireError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(_address(name))
        check_user(sock)
    except (OSError, WireError) as error:
        sock.close()
        raise WireError(f"the prefill process does not answer at {name} ({error})") from None
    return sock


def check_user(sock: socket.socket) -> None:
    """Raise `WireError` unless the other end's process belongs to this user or root."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(found)[1]
    if user not in (os.geteuid(), 0):
        raise WireError(f"its process belongs to user {user}, not to {os.geteuid()}")


def send(sock: socket.socket, message: Message, fd: int | None = None) -> None:
    """Send one message, and with it a file descriptor. Raises `WireError`."""
    try:
        packed = pack(message)
        if fd is not None:
            socket.send_fds(sock, [packed[:1]], [fd])
            packed = packed[1:]
        sock.sendall(packed)
    except OSError as error:
        raise WireError(f"the other end has gone ({error})") from None


def receive(sock: socket.socket) -> tuple[Message, int | None]:
    """The next message, and the file descriptor that came with it. Raises `WireError`, also at the end."""
    try:
        first, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise WireError(f"no answer ({error})") from None
    fd = fds[0] if fds else None
    try:
        size = size_of(first + _exactly(sock, _HEAD.size - 1))
        return unpack(_exactly(sock, size)), fd
    except (OSError, WireError) as error:
        if fd is not None:
            os.close(fd)
        raise WireError(f"no answer ({error})") from None


def pack(message: Message) -> bytes:
    """A message as bytes, its length in front."""
    body = json.dumps(message).encode()
    return _HEAD.pack(len(body)) + body


def size_of(head: bytes) -> int:
    """Bytes of the message behind its first four. Raises `WireError` for what is none."""
    if len(head) < _HEAD.size:
        raise WireError("the other end has gone")
    size = int(_HEAD.unpack(head)[0])
    if size > _MOST:
        raise WireError(f"a message of {size} bytes is none of ours")
    return size


def unpack(body: bytes) -> Message:
    """The message that these bytes are. Raises `WireError`."""
    try:
        message = json.loads(body)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise WireError("what came is no message of ours")
    return message


def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes, all of them within the connection's time: one who sends a byte now and then has no more of it."""
    parts, allowed = bytearray(), sock.gettimeout()
    end = None if allowed is None else time.monotonic() + allowed
    try:
        while len(parts) < size:
            if end is not None:
                sock.settimeout(max(end - time.monotonic(), 1e-3))
            part = sock.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise WireError("the other end has gone")
            parts += part
    finally:
        sock.settimeout(allowed)
    return bytes(parts)


def _address(name: str) -> str:
    return f"\0{name[1:]}" if name.startswith("@") else name
