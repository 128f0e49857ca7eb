"""A TCP proxy on loopback that does to a connection what networks do: refuse, hang, be slow, cut it off, change its bytes.

"dripping" besides: a few bytes at a time, for ever, so that no single wait is long.
"""

import random
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

FAULTS = ("refused", "hanging", "slow", "cut", "wrong bytes")
_CHUNK, _DROP = 1 << 16, 64


class _Fault:
    """What is wrong from one `Proxy.set` to the next. met: how many answers met it."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.met, self.draws = kind, 0, random.Random(seed)


class _Listener(socketserver.ThreadingTCPServer):
    """Calls `serve` with each connection, in a thread of its own."""

    allow_reuse_address, daemon_threads, request_queue_size = True, True, 64

    def __init__(self, port: int, serve: Callable[[socket.socket], None]) -> None:
        super().__init__(("127.0.0.1", port), lambda connection, *_: serve(connection))
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def shutdown_request(self, connection: socket.socket) -> None:
        """Nothing: `serve` closes it, unless it hangs."""


class Proxy:
    """Forwards to `upstream`, a port of this machine, with the fault that is set; `""` is none.

    Setting one ends all connections. What goes wrong goes wrong on the way back, since a server checks what it is sent.
    """

    def __init__(self, upstream: int, seed: int = 0) -> None:
        self._upstream = upstream
        self._now, self._live = _Fault("", seed), set[socket.socket]()
        self._lock = threading.Lock()
        self._listener = _Listener(0, self._serve)
        self.port: int = self._listener.server_address[1]

    @property
    def met(self) -> int:
        """How often what is set was done to a request. None that is refused comes here: who asks must count those."""
        return self._now.met

    def set(self, fault: str, seed: int = 0) -> None:
        """From now on. seed: of what is drawn for it."""
        with self._lock:
            before, self._now = self._now, _Fault(fault, seed)
            live, self._live = self._live, set()
        for connection in live:
            _reset(connection)
        if fault == "refused" != before.kind:
            self._listener.shutdown()
            self._listener.server_close()
        elif before.kind == "refused" != fault:
            self._listener = _Listener(self.port, self._serve)

    def close(self) -> None:
        self.set("refused")

    def _serve(self, near: socket.socket) -> None:
        far = socket.socket()
        with self._lock:
            now = self._now
            self._live |= {near, far}
        if now.kind == "hanging":
            with suppress(OSError):
                now.met += bool(near.recv(1, socket.MSG_PEEK))
            return
        with suppress(OSError):
            far.connect(("127.0.0.1", self._upstream))
            threading.Thread(target=self._ask, args=(near, far), daemon=True).start()
            self._answer(far, near, now)
        _reset(far)
        _reset(near)
        with self._lock:
            self._live -= {near, far}

    def _ask(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(_CHUNK):
                far.sendall(data)
        _reset(near)
        _reset(far)

    def _answer(self, far: socket.socket, near: socket.socket, now: _Fault) -> None:
        left = now.draws.randrange(3000)  # bytes until it is cut
        while data := far.recv(_CHUNK):
            if now.kind == "slow":
                time.sleep(0.005)
            elif now.kind == "dripping":
                data = _dripped(data, near, now)
            elif now.kind == "wrong bytes":
                data = _changed(data, now.draws)
            elif now.kind == "cut":
                data, left = data[:left], left - len(data)
            now.met += now.kind in ("", "slow", "wrong bytes") or (now.kind == "cut" and left <= 0)
            near.sendall(data)
            if now.kind == "cut" and left <= 0:
                break


def _dripped(data: bytes, target: socket.socket, now: _Fault) -> bytes:
    """All but the last bytes."""
    now.met += len(data) > _DROP
    while len(data) > _DROP:
        target.sendall(data[:_DROP])
        data = data[_DROP:]
        time.sleep(0.1)
    return data


def _changed(data: bytes, draws: random.Random) -> bytes:
    changed = bytearray(data)
    changed[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    return bytes(changed)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
