"""The process behind `blend vllm`: it blends prompts that vLLM's server sends, and holds their KV for vLLM's workers.

KV of a prompt is held as long as the connection on which the prompt came. So nothing is kept for a server that was killed, and
a client that hangs up cancels the work.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import PromptError
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.prompts import answer_request, source_of
from blend.integrations.vllm.transport import (
    BACKLOG,
    KVPool,
    Message,
    PoolFullError,
    TransportError,
    check_user,
    receive,
    send,
)
from blend.serve.failures import LOG, log_error
from blend.serve.http.completions import figures_of
from blend.serve.http.errors import failure_of
from blend.serve.limits import RequestLimits
from blend.serve.types import Event, Failed, Finished, Handle, QueueFullError, Request, Sampling, Started

if TYPE_CHECKING:
    from blend.blender import Blend
    from blend.rag import Rag
    from blend.serve.service import Service
    from blend.types import PromptLayout

CHECKED_ROWS = (33, 150, 190)
"""Lengths of the prompts by which the model is compared with vLLM's."""
TOO_LONG = "too long"
"""Why a prompt is never blended: its KV alone exceeds the budget."""
MOST_CONNECTIONS = 1024
_OTHER_FILES = 128
_POLL_S = 0.05  # how often a waiting connection is checked

Report = Callable[[Message], None]


class PrefillService:
    """Blends prompts with `service` and puts their KV into `pool`. Threads may share it.

    model: names the model and its dtype. refused: why vLLM's server does not use its KV, "" while it does.
    """

    def __init__(self, service: Service, pool: KVPool, limits: RequestLimits | None = None) -> None:
        self.service, self.pool, self._limits = service, pool, limits or RequestLimits()
        decoder = service.tenant("").rag().decoder
        self._decoder, self.model, self.refused = decoder, f"{decoder.fingerprint} {decoder.dtype}", ""
        self._row_bytes = sum(layer.width for layer in decoder.rotations) * decoder.dtype.itemsize

    def ask(self, part: Mapping[str, Any], report: Report, refused: Mapping[str, str] | None = None) -> PrefillRequest:
        """Take a request in. part: see `prompts.part_of`. refused: models whose KV the asking server does not use, and why.

        `report`, also called from other threads, gets the prompt, and then one message: "ready" with a ticket; "plain", for
        vLLM's own prefill; "pass" where kvblend has no part in the prompt; "error".
        """
        request = PrefillRequest(self.pool, report)
        try:
            self.service.engine.require_room()  # no search for a request that vLLM will prefill
            prepared = self.service.prepare(answer_request(part, self.service.corpora(""), self._limits))
        except QueueFullError:
            request.give_up("busy")
            return request
        except Exception as error:
            failure = failure_of(error)
            if failure.status >= 500:
                log_error(error, "")
            report({"error": [failure.status, failure.message, failure.code, failure.param]})
            return request
        if not prepared.cited:
            report({"pass": True})
            return request
        sources = [source_of(one) for one in prepared.cited]
        report({"prompt": list(prepared.layout.token_ids), "model": self.model, "sources": sources})
        if refused and self.model in refused:
            self.judge(refused[self.model])
            request.give_up("refused")
        else:
            self._blend(prepared, request)
        return request

    def judge(self, reason: str) -> None:
        """A server of vLLM's has compared: why it does not use KV of this model, or ""."""
        if reason and reason != self.refused:
            LOG.error("refused", extra={"why": reason})
        self.refused = reason

    def reason_against(self, dtype: str) -> str:
        """Why a vLLM that computes in this dtype must not use KV of this model, or ""."""
        mine = str(self._decoder.dtype).removeprefix("torch.")
        if dtype == mine:
            return ""
        return f"vLLM computes in {dtype}, blend vllm in {mine}: start blend vllm with --dtype {dtype}"

    def _blend(self, prepared: Request, request: PrefillRequest) -> None:
        need = prepared.layout.rows * self._row_bytes
        if self.pool.nbytes + need > self.pool.budget:
            request.give_up("busy" if need <= self.pool.budget else TOO_LONG)
            return
        try:
            rag = self.service.rag(prepared)
            generation = rag.store.generation  # before anything is read, so that no later one is named

            def handover(blend: Blend) -> None:
                request.hold(blend, salt_of(prepared.layout, rag, blend, generation))

            handed = replace(prepared, handover=handover, sampling=Sampling(max_tokens=1))
            request.follow(self.service.take(handed, request.on_reply))
        except QueueFullError:
            request.give_up("busy")
        except PromptError:  # more KV than --kv-budget holds
            request.give_up(TOO_LONG)
        except Exception as error:
            log_error(error, "")
            request.give_up("failed")

    def check(self, number: int) -> Message:
        """A prompt by which this model is compared with vLLM's: tickets for its exact KV and for wrong KV.

        Tokens are random; the wrong KV is of the same tokens in reverse. Raises `PoolFullError`, and then holds nothing.
        """
        decoder, rows = self._decoder, CHECKED_ROWS[number]
        random = torch.Generator().manual_seed(rows)
        low, high = decoder.vocabulary // 10, decoder.vocabulary * 9 // 10  # control tokens stand at the ends
        ids = torch.randint(low, max(high, low + 2), (rows,), generator=random).tolist()
        right = self.pool.put(self._prefilled(ids), ids)
        try:
            wrong = self.pool.put(self._prefilled(ids[::-1]), ids)
        except Exception:
            self.pool.release(right)
            raise
        return {"prompt": ids, "right": right, "wrong": wrong}

    def _prefilled(self, ids: list[int]) -> Any:
        cache = self._decoder.new_cache(len(ids))
        self._decoder.encode_rows(torch.tensor([ids], device=self._decoder.device), 0, cache)
        return cache

    def holding(self) -> Message:
        """What is held and computed, for `blend vllm --status`."""
        held = {"tickets": len(self.pool), "bytes": self.pool.nbytes, "model": self.model, "refused": self.refused}
        return {**held, **self.service.engine.stats()._asdict()}


class PrefillRequest:
    """One prompt on its way. Call `release` when it is not needed any more: it cancels the work and frees the KV."""

    def __init__(self, pool: KVPool, report: Report) -> None:
        self._pool, self._report = pool, report
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._ticket, self._salt, self._released, self._ended = "", "", False, False
        self._opened: Started | None = None

    def follow(self, handle: Handle) -> None:
        """The engine has taken it."""
        with self._lock:
            self._handle, released = handle, self._released
        if released:
            handle.cancel()

    def hold(self, blend: Blend, salt: str) -> None:
        """The prompt is blended: hold its KV unless it was released. In the engine's thread."""
        try:
            ticket = self._pool.put(blend.cache, blend.layout.token_ids)
        except PoolFullError:
            return  # vLLM prefills; `_close` says why
        with self._lock:
            if not self._released:
                self._ticket, self._salt = ticket, salt
                return
        self._pool.release(ticket)

    def on_reply(self, reply: Event) -> None:
        """Events of the engine."""
        if isinstance(reply, Started):
            self._opened = reply
        elif isinstance(reply, Failed):
            log_error(reply.error, "")
            self.give_up("failed")
        elif isinstance(reply, Finished):
            self._close(reply)

    def _close(self, reply: Finished) -> None:
        if self._opened is None:
            self.give_up(reply.reason)
            return
        shown, figures = figures_of(self._opened), self._opened.figures
        if self._ticket:
            self._end({"ready": {"ticket": self._ticket, "salt": self._salt}, "shown": shown})
            return
        if not figures.reason and figures.method == "blend":  # the pool was full, or it was released
            shown["figures"] |= {"method": "full", "reason": "busy"}
        self._end({"plain": shown["figures"]["reason"], "shown": shown})

    def give_up(self, reason: str) -> None:
        """Leave the prompt to vLLM's own prefill."""
        self._end({"plain": reason, "shown": {}})

    def _end(self, message: Message) -> None:
        if not self._ended:
            self._ended = True
            self._report(message)

    def release(self) -> None:
        """Cancel the work, and free the KV."""
        with self._lock:
            self._released = True
            handle, ticket = self._handle, self._ticket
            self._ticket = ""
        if handle is not None:
            handle.cancel()
        if ticket:
            self._pool.release(ticket)


def salt_of(layout: PromptLayout, rag: Rag, blend: Blend, generation: str) -> str:
    """Names everything that a blended prompt's KV depends on: vLLM's prefix cache shares it only with the same blend.

    Rows of the prefix are exact, computed or from memory, so they are not counted.
    """
    recomputed = int((blend.selection.rows >= len(layout.prefix)).sum())
    named = [
        (LayoutTicket(layout, rag.corpus_config.name).ticket(), layout.token_ids),
        (rag.blender.config.plain(), generation, rag.decoder.identity(layout.kept_behind).namespace),
        (blend.hits, recomputed, blend.notes),
    ]
    return sha256(json.dumps(named).encode()).hexdigest()


class PrefillServer:
    """Serves connections in threads until `stop`. place: a bound socket. timeout_s: for a message to be read or taken."""

    def __init__(self, service: PrefillService, pool: KVPool, place: socket.socket, *, timeout_s: float = 10.0) -> None:
        self._service, self._pool, self._place, self._timeout_s = service, pool, place, timeout_s
        self._stopping = threading.Event()
        self._places = threading.BoundedSemaphore(most_connections())
        self._logged = set[str]()
        place.listen(BACKLOG)  # from now on connections wait and are not refused

    def serve_until_stopped(self) -> None:
        """Accept connections."""
        self._place.settimeout(_POLL_S)
        while not self._stopping.is_set():
            try:
                sock, _ = self._place.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no descriptor or memory: connections wait until others have gone
                self._log_once(error)
                self._stopping.wait(_POLL_S)
                continue
            if not self._places.acquire(blocking=False):
                sock.close()  # vLLM prefills
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="kvblend-connection", daemon=True).start()
            except RuntimeError as error:  # no more threads
                self._log_once(error)
                sock.close()
                self._places.release()

    def stop(self) -> None:
        """End it; connections end with the process or their other end."""
        self._stopping.set()

    def _log_once(self, error: Exception) -> None:
        if str(error) not in self._logged:
            self._logged.add(str(error))
            log_error(error, "")

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(self._timeout_s)
                check_user(sock)
                self._answer(sock, receive(sock)[0])
        except TransportError:  # the other end has gone
            pass
        except Exception as error:  # of one connection; the others go on
            log_error(error, "")
        finally:
            self._places.release()

    def _answer(self, sock: socket.socket, message: Message) -> None:
        if "ask" in message:
            self._ask(sock, message["ask"], message.get("refused"))
        elif "attach" in message:
            self._attach(sock, str(message["attach"]))
        elif "check" in message:
            self._check(sock, str(message["check"]))
        elif "holding" in message:
            send(sock, self._service.holding())

    def _ask(self, sock: socket.socket, part: Message, refused: dict[str, str] | None) -> None:
        reports: queue.SimpleQueue[Message] = queue.SimpleQueue()
        request = self._service.ask(part, reports.put, refused)
        try:
            while (message := self._next(reports, sock)) is not None:
                send(sock, message)
                if "ready" in message:
                    _wait_until_gone(sock)
                if "prompt" not in message:
                    return
        finally:
            request.release()

    def _next(self, reports: queue.SimpleQueue[Message], sock: socket.socket) -> Message | None:
        """The next report; None when the other end has gone."""
        while not self._stopping.is_set():
            try:
                return reports.get(timeout=_POLL_S)
            except queue.Empty:
                if _gone(sock):
                    return None
        return None

    def _attach(self, sock: socket.socket, ticket: str) -> None:
        found = self._pool.get(ticket)
        if found is None:
            send(sock, {"held": None})
            return
        fd, held = found
        try:
            send(sock, {"held": held._asdict()}, fd)
        finally:
            os.close(fd)

    def _check(self, sock: socket.socket, dtype: str) -> None:
        """Prompts to compare by, held until the other end has compared. dtype: of vLLM."""
        if reason := self._service.reason_against(dtype):
            self._service.judge(reason)
            send(sock, {"refused": reason})
            return
        sock.settimeout(None)
        found: list[Message] = []
        try:
            for number in range(len(CHECKED_ROWS)):
                found.append(self._service.check(number))
            send(sock, {"checks": found})
            self._service.judge(str(receive(sock)[0]["verdict"]))
        except PoolFullError:
            return  # the other end asks again with the next request
        finally:
            for one in found:
                self._pool.release(one["right"])
                self._pool.release(one["wrong"])


def most_connections() -> int:
    """Connections that there are descriptors for: each may hold a memory file, and the store opens files too."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = allowed == resource.RLIM_INFINITY
    return MOST_CONNECTIONS if unlimited else max(1, min(MOST_CONNECTIONS, (allowed - _OTHER_FILES) // 2))


def _gone(sock: socket.socket) -> bool:
    """Whether the other end has closed."""
    polled = select.poll()
    polled.register(sock, select.POLLIN)
    try:
        return bool(polled.poll(0)) and sock.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def _wait_until_gone(sock: socket.socket) -> None:
    sock.settimeout(None)
    try:
        while sock.recv(1):
            pass
    except OSError:
        return
