"""A TCP proxy on loopback that does to a connection what networks do: refuse, hang, be slow, cut it off, change its bytes.

"dripping" besides: a few bytes at a time, for ever, so that no single wait is long; and kinds of the caller's own, which hold
every answer back for so many seconds.
"""

import random
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

FAULTS = ("refused", "hanging", "slow", "cut", "wrong bytes")
_CHUNK, _DROP = 1 << 16, 64


class _Fault:
    """What is wrong from one `Proxy.set` to the next. met: how many requests met it."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.met, self.draws = kind, 0, random.Random(seed)


class _Talk:
    """One connection. asked_at: when the last request came. owed: whether no byte of its answer has come."""

    def __init__(self, left: int) -> None:
        self.asked_at, self.owed = time.monotonic(), False
        self.left = left  # bytes until it is cut


class Proxy:
    """Forwards to `upstream`, a port of this machine, with the fault that is set; `""` is none.

    Setting one ends all connections, unless it is one of `delays`: kind -> seconds that every answer is held back. What goes
    wrong goes wrong on the way back, since a server checks what it is sent.

    slowest_s: what the server itself took for an answer, until it was taken.
    """

    def __init__(self, upstream: int, seed: int = 0, delays: Mapping[str, float] | None = None) -> None:
        self._upstream, self._delays = upstream, dict(delays or {})
        self._now, self._live = _Fault("", seed), set[socket.socket]()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.slowest_s = 0.0
        self.port = self._listen(0)

    @property
    def met(self) -> int:
        """How often what is set was done to a request. None that is refused comes here: who asks must count those."""
        return self._now.met

    def set(self, fault: str, seed: int = 0) -> None:
        """From now on. seed: of what is drawn for it."""
        with self._lock:
            before, self._now, self.slowest_s = self._now, _Fault(fault, seed), 0.0
            live, self._live = (self._live, set()) if fault not in self._delays else (set(), self._live)
        for connection in live:
            _reset(connection)
        if fault == "refused":
            self._stop_listening()
        elif before.kind == "refused":
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
            now = self._now
            self._live.add(near)
        if now.kind == "hanging":
            with suppress(OSError):
                now.met += bool(near.recv(1, socket.MSG_PEEK))
            return
        far = socket.socket()
        try:
            far.connect(("127.0.0.1", self._upstream))
        except OSError:
            _reset(near)
            return
        with self._lock:
            self._live.add(far)
        talk = _Talk(now.draws.randrange(3000))
        threading.Thread(target=self._ask, args=(near, far, talk), daemon=True).start()
        self._answer(far, near, talk)
        with self._lock:
            self._live -= {near, far}

    def _ask(self, near: socket.socket, far: socket.socket, talk: _Talk) -> None:
        with suppress(OSError):
            while data := near.recv(_CHUNK):
                if not talk.owed:
                    talk.asked_at, talk.owed = time.monotonic(), True
                far.sendall(data)
        if talk.owed:
            self._took(talk)
        _reset(near)
        _reset(far)

    def _answer(self, far: socket.socket, near: socket.socket, talk: _Talk) -> None:
        with suppress(OSError):
            while data := far.recv(_CHUNK):
                now = self._now
                self._took(talk)
                if talk.owed:
                    talk.owed = False
                    self._hold_back(now, talk)
                data = self._spoilt(data, near, now, talk)
                near.sendall(data)
                if not now.kind:
                    self._took(talk)  # who asked was slow to take it
                if now.kind == "cut" and talk.left <= 0:
                    break
        _reset(far)
        _reset(near)

    def _took(self, talk: _Talk) -> None:
        self.slowest_s = max(self.slowest_s, time.monotonic() - talk.asked_at)

    def _hold_back(self, now: _Fault, talk: _Talk) -> None:
        if now.kind in self._delays:
            now.met += 1
            time.sleep(self._delays[now.kind])
            talk.asked_at += self._delays[now.kind]

    def _spoilt(self, data: bytes, near: socket.socket, now: _Fault, talk: _Talk) -> bytes:
        """What is sent of `data`, as the fault has it."""
        if now.kind == "slow":
            time.sleep(0.005)
        elif now.kind == "dripping":
            data = _dripped(data, near, now)
        elif now.kind == "wrong bytes":
            data = _changed(data, now.draws)
        elif now.kind == "cut":
            data, talk.left = data[: talk.left], talk.left - len(data)
        now.met += now.kind in ("slow", "wrong bytes") or (now.kind == "cut" and talk.left <= 0)
        return data


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
