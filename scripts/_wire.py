"""A TCP proxy on loopback that does to a connection what networks do: refuse, hang, be slow, cut it off, change its bytes.

"dripping" besides: a few bytes at a time, for ever, so that no single wait is long.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from contextlib import suppress

FAULTS = ("refused", "hanging", "slow", "cut", "wrong bytes")
_CHUNK, _DROP = 4096, 64


class Proxy:
    """Forwards to `upstream`, a port of this machine, with the fault that is set; `""` is none.

    Setting one ends all connections. What goes wrong goes wrong on the way back, since a server checks what it is sent.
    """

    def __init__(self, upstream: int, seed: int = 0) -> None:
        self._upstream, self._draws = upstream, random.Random(seed)
        self._fault, self._live = "", set[socket.socket]()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.port = self._listen(0)

    def set(self, fault: str) -> None:
        """From now on."""
        with self._lock:
            before, self._fault = self._fault, fault
            live, self._live = self._live, set()
        for connection in live:
            _reset(connection)
        if fault == "refused":
            self._stop_listening()
        elif before == "refused":
            self._listen(self.port)

    def close(self) -> None:
        """Refuse for ever."""
        self.set("refused")

    def _listen(self, port: int) -> int:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        bound: int = listener.getsockname()[1]
        return bound

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with self._lock:
            fault = self._fault
            self._live.add(near)
        if fault == "hanging":
            return
        far = socket.socket()
        try:
            far.connect(("127.0.0.1", self._upstream))
        except OSError:
            _reset(near)
            return
        with self._lock:
            self._live.add(far)
        threading.Thread(target=self._pump, args=(near, far, ""), daemon=True).start()
        self._pump(far, near, fault)
        with self._lock:
            self._live -= {near, far}

    def _pump(self, source: socket.socket, target: socket.socket, fault: str) -> None:
        left = self._draws.randrange(3000) if fault == "cut" else 0
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                if fault == "slow":
                    time.sleep(0.005)
                elif fault == "dripping":
                    data = self._dripped(data, target)
                elif fault == "wrong bytes":
                    data = self._changed(data)
                elif fault == "cut":
                    data, left = data[:left], left - len(data)
                    if left <= 0:
                        target.sendall(data)
                        break
                target.sendall(data)
        _reset(source)
        _reset(target)

    def _dripped(self, data: bytes, target: socket.socket) -> bytes:
        """All but the last bytes."""
        while len(data) > _DROP:
            target.sendall(data[:_DROP])
            data = data[_DROP:]
            time.sleep(0.1)
        return data

    def _changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self._draws.randrange(len(data))] ^= 1 << self._draws.randrange(8)
        return bytes(changed)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
