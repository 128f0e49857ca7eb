"""The prefill process: a socket at which vLLM's server asks and vLLM's workers fetch.

A connection is a lease: what was blended for a question is held until the connection on which it was asked ends, however that
comes about. So nothing is kept for a server that was killed, and who hangs up is not computed for.
"""

from __future__ import annotations

import mmap
import os
import queue
import resource
import select
import socket
import threading

from blend.integrations.vllm import wire
from blend.integrations.vllm.desk import CHECKED_ROWS, Desk
from blend.integrations.vllm.metrics import PrefillMetrics
from blend.integrations.vllm.shelf import NoRoomError, Shelf, bytes_of
from blend.serve.failures import log_error

_LOOK_S = 0.05  # how often it is looked whether who waits is still there
_SLOW_S = 10.0  # for a message to be read or taken
MOST_CONNECTIONS = 1024
_OTHER_FILES = 128


class PrefillServer:
    """Serves connections in threads of their own until `stop`. place: a bound socket. metrics: those of `desk`."""

    def __init__(self, desk: Desk, shelf: Shelf, place: socket.socket, metrics: PrefillMetrics | None = None) -> None:
        self._desk, self._shelf, self._place = desk, shelf, place
        self._metrics = metrics or PrefillMetrics()
        self._stopping = threading.Event()
        self._room = threading.BoundedSemaphore(most_connections())
        self._told = set[str]()
        place.listen(wire.BACKLOG)  # from now on who comes waits, and is not refused

    def serve_until_stopped(self) -> None:
        """All of it."""
        self._place.settimeout(_LOOK_S)
        while not self._stopping.is_set():
            try:
                sock, _ = self._place.accept()
            except TimeoutError:
                continue
            except (
                OSError
            ) as error:  # no descriptor or no memory for one more: who waits is taken when another has gone
                self._told_of(error)
                self._stopping.wait(_LOOK_S)
                continue
            if not self._room.acquire(blocking=False):
                sock.close()  # who asks is answered by vLLM's own prefill
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="kvblend-connection", daemon=True).start()
            except RuntimeError as error:  # no thread more
                self._told_of(error)
                sock.close()
                self._room.release()

    def _told_of(self, error: Exception) -> None:
        """Once for each kind: it comes back as often as somebody connects."""
        if str(error) not in self._told:
            self._told.add(str(error))
            log_error(error, "")

    def stop(self) -> None:
        """End it; connections end with the process or their other end."""
        self._stopping.set()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(_SLOW_S)
                wire.admit(sock)
                self._answer(sock, wire.receive(sock)[0])
        except wire.WireError:  # the other end has gone, which is its way to say that it needs nothing more
            pass
        except Exception as error:  # of one connection; the others go on
            log_error(error, "")
        finally:
            self._room.release()

    def _answer(self, sock: socket.socket, message: wire.Message) -> None:
        if "ask" in message:
            self._ask(sock, message["ask"], message.get("refused"))
        elif "attach" in message:
            self._attach(sock, str(message["attach"]))
        elif "send" in message:
            self._send(sock, message)
        elif "check" in message:
            self._check(sock, str(message["check"]))
        elif "holding" in message:
            told = {"tickets": len(self._shelf), "bytes": self._shelf.nbytes}
            judged = {"model": self._desk.model, "refused": self._desk.refused}
            wire.send(sock, {**told, **judged, **self._desk.service.engine.stats()._asdict()})

    def _ask(self, sock: socket.socket, part: wire.Message, refused: dict[str, str] | None) -> None:
        told: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()
        question = self._desk.ask(part, told.put, refused)
        try:
            while (message := self._next(told, sock)) is not None:
                wire.send(sock, message)
                if "ready" in message:
                    self._until_gone(sock)
                    return
                if "prompt" not in message:
                    return
        finally:
            question.release()

    def _next(self, told: queue.SimpleQueue[wire.Message], sock: socket.socket) -> wire.Message | None:
        """What comes next for who asked; None when he has gone."""
        while not self._stopping.is_set():
            try:
                return told.get(timeout=_LOOK_S)
            except queue.Empty:
                if _gone(sock):
                    return None
        return None

    def _until_gone(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        try:
            while sock.recv(1):
                pass
        except OSError:
            return

    def _attach(self, sock: socket.socket, ticket: str) -> None:
        found = self._shelf.get(ticket)
        self._metrics.fetched(held=found is not None)
        if found is None:
            wire.send(sock, {"held": None})
            return
        fd, told = found
        try:
            wire.send(sock, {"held": told._asdict()}, fd)
        finally:
            os.close(fd)

    def _send(self, sock: socket.socket, message: wire.Message) -> None:
        """The KV itself, to another machine: of some rows, and of the heads that are one process's share."""
        found = self._shelf.get(str(message["send"]))
        self._metrics.fetched(held=found is not None)
        if found is None:
            wire.send(sock, {"held": None})
            return
        fd, told = found
        try:
            memory = mmap.mmap(fd, told.nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        wire.send(sock, {"held": told._asdict()})
        for pair in told.part(memory, *map(int, (*message["rows"], *message["share"]))):
            for part in pair:
                wire.send_bytes(sock, bytes_of(part.contiguous()))

    def _check(self, sock: socket.socket, dtype: str) -> None:
        """Prompts to compare by, held until the other end has compared. dtype: that vLLM computes in."""
        if reason := self._desk.reason_against(dtype):
            self._desk.judge(reason)
            wire.send(sock, {"refused": reason})
            return
        sock.settimeout(None)
        found: list[wire.Message] = []
        try:
            for number in range(len(CHECKED_ROWS)):
                found.append(self._desk.check(number))
            wire.send(sock, {"checks": found})
            self._desk.judge(str(wire.receive(sock)[0]["verdict"]))
        except NoRoomError:
            return  # the other end asks again with the next question
        finally:
            for one in found:
                self._shelf.release(one["right"])
                self._shelf.release(one["wrong"])


def most_connections() -> int:
    """As many as there are descriptors for: a connection may hold KV in a memory file, and the store has files open too."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = allowed == resource.RLIM_INFINITY
    return MOST_CONNECTIONS if unlimited else max(1, min(MOST_CONNECTIONS, (allowed - _OTHER_FILES) // 2))


def _gone(sock: socket.socket) -> bool:
    """Whether the other end has closed."""
    looked = select.poll()
    looked.register(sock, select.POLLIN)
    try:
        return bool(looked.poll(0)) and sock.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
