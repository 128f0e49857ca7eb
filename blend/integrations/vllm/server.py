"""The process behind `blend vllm`: it blends prompts that vLLM's server sends, and holds their KV for vLLM's workers.

KV of a prompt is held as long as the connection on which the prompt came. So nothing is kept for a server that was killed, and
a client that hangs up cancels the work.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import PromptError
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.prompts import answer_request, source_of
from blend.integrations.vllm.transport import (
    MOST_BYTES,
    Connection,
    KVPool,
    Message,
    PoolFullError,
    TransportError,
    check_user,
)
from blend.sampling import Sampling
from blend.serve.events import Event, Failed, Finished, OnEvent, QueueFullError, Started
from blend.serve.failures import LOG, log_error
from blend.serve.http.completions import figures_of
from blend.serve.http.errors import failure_of
from blend.serve.limits import RequestLimits
from blend.serve.prompt import Prompt

if TYPE_CHECKING:
    from blend.prefill.blender import Blend
    from blend.rag import Rag
    from blend.serve.service import Service
    from blend.types import PromptLayout

CHECKED_ROWS = (33, 150, 190)
"""Lengths of the prompts by which the model is compared with vLLM's."""
TOO_LONG = "too long"
"""Why a prompt is never blended: its KV alone exceeds the budget."""
MOST_CONNECTIONS = 1024
_OTHER_FILES = 128
_BACKLOG = 512
THREADS = 64  # in which prompts are made

Send = Callable[[Message], Awaitable[None]]


class PrefillService:
    """Blends prompts with `service` and puts their KV into `pool`. For one event loop.

    model: names the model and its dtype. refused: why vLLM's server does not use its KV, "" while it does.
    """

    def __init__(self, service: Service, pool: KVPool, limits: RequestLimits | None = None) -> None:
        self.service = service
        self.pool = pool
        self._limits = limits or RequestLimits()
        decoder = service.tenant("").rag().decoder
        self._decoder = decoder
        self.model = f"{decoder.fingerprint} {decoder.dtype}"
        self.refused = ""
        self._row_bytes = sum(layer.width for layer in decoder.rotations) * decoder.dtype.itemsize

    async def ask(self, part: Mapping[str, Any], send: Send, refused: Mapping[str, str] | None = None) -> None:
        """Blend a request's prompt. Its KV is held until this is cancelled, which also cancels the work.

        `send` gets the prompt, and then one message: "ready" with a ticket; "plain", for vLLM's own prefill; "pass" where
        kvblend has no part in the prompt; "error".

        Args:
            part: see `prompts.part_of`.
            send: sends a message to vLLM's server.
            refused: models whose KV that server does not use, and why.
        """
        prompt = await asyncio.to_thread(self._prompt, part)
        if not isinstance(prompt, Prompt):
            await send(prompt)
            return
        sources = [source_of(passage) for passage in prompt.cited]
        await send({"prompt": list(prompt.layout.token_ids), "model": self.model, "sources": sources})
        with self.pool.ticket() as ticket:
            if refused and self.model in refused:
                self.judge(refused[self.model])
                message = _plain("refused")
            else:
                message = await self._blended(prompt, ticket)
            await send(message)
            if "ready" in message:
                await asyncio.Event().wait()

    def judge(self, reason: str) -> None:
        """A server of vLLM's has compared: why it does not use KV of this model, or ""."""
        if reason and reason != self.refused:
            LOG.error("refused", extra={"why": reason})
        self.refused = reason

    async def check(self, connection: Connection, dtype: str) -> None:
        """Send prompts by which a vLLM that computes in `dtype` compares its model with this one; take its verdict.

        Each prompt is of random tokens, and has tickets for its exact KV and for wrong KV. Raises `PoolFullError`, after
        which the other end asks again with its next request.
        """
        decoder_dtype = str(self._decoder.dtype).removeprefix("torch.")
        if dtype != decoder_dtype:
            self.judge(
                f"vLLM computes in {dtype}, blend vllm in {decoder_dtype}: start blend vllm with --dtype {dtype}"
            )
            await connection.send({"refused": self.refused})
            return
        with ExitStack() as tickets:
            checks = []
            for rows in CHECKED_ROWS:
                right, wrong = (tickets.enter_context(self.pool.ticket()) for _ in range(2))
                ids = await asyncio.to_thread(self._check_prompt, rows, right, wrong)
                checks.append({"prompt": ids, "right": right, "wrong": wrong})
            await connection.send({"checks": checks})
            self.judge(str((await connection.receive())["verdict"]))

    def holding(self) -> Message:
        """What is held and computed, for `blend vllm --status`."""
        pool = {"tickets": len(self.pool), "bytes": self.pool.nbytes}
        return {**pool, "model": self.model, "refused": self.refused, **self.service.engine.stats()._asdict()}

    def _prompt(self, part: Mapping[str, Any]) -> Prompt | Message:
        """The prompt of a request, or the only message about it."""
        try:
            self.service.engine.require_room()  # no search for a request that vLLM will prefill
            prompt = self.service.prepare(answer_request(part, self.service.corpora(""), self._limits))
        except QueueFullError:
            return _plain("busy")
        except Exception as error:
            failure = failure_of(error)
            if failure.status >= 500:
                log_error(error, "")
            return {"error": [failure.status, failure.message, failure.code, failure.param]}
        return prompt if prompt.cited else {"pass": True}

    async def _blended(self, prompt: Prompt, ticket: str) -> Message:
        need = prompt.layout.rows * self._row_bytes
        if self.pool.nbytes + need > self.pool.budget:
            return _plain("busy" if need <= self.pool.budget else TOO_LONG)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ready: dict[str, str] = {}

        def report(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            await asyncio.to_thread(self._take, prompt, ticket, ready, report)
            return await _result(events, ready)
        except QueueFullError:
            return _plain("busy")
        except PromptError:  # more KV than --kv-budget holds
            return _plain(TOO_LONG)
        except Exception as error:
            log_error(error, "")
            return _plain("failed")
        finally:
            prompt.request.cancelled.set()

    def _take(
        self,
        prompt: Prompt,
        ticket: str,
        ready: dict[str, str],
        report: OnEvent,
    ) -> None:
        """Have the engine blend; `ready` gets ticket and salt once the KV is held."""
        rag = self.service.rag(prompt)
        generation = rag.store.generation  # before anything is read, so that no later one is named

        def handover(blend: Blend) -> None:
            with suppress(PoolFullError):  # vLLM prefills; `_result` says why
                self.pool.put(ticket, blend.cache, blend.layout.token_ids)
                ready.update(ticket=ticket, salt=salt_of(prompt.layout, rag, blend, generation))

        one_token = replace(prompt, sampling=Sampling(max_tokens=1))
        self.service.hand_over(one_token, report, handover)

    def _check_prompt(self, rows: int, right: str, wrong: str) -> list[int]:
        """Hold KV of a random prompt under `right`, that of the same tokens in reverse under `wrong`; the prompt."""
        random = torch.Generator().manual_seed(rows)
        low = self._decoder.vocabulary // 10  # control tokens stand at the ends
        high = self._decoder.vocabulary * 9 // 10
        ids = torch.randint(low, max(high, low + 2), (rows,), generator=random).tolist()
        for ticket, order in ((right, ids), (wrong, ids[::-1])):
            cache = self._decoder.new_cache(rows)
            self._decoder.encode_rows(torch.tensor([order], device=self._decoder.device), 0, cache)
            self.pool.put(ticket, cache, ids)
        return ids


def _plain(reason: str) -> Message:
    """VLLM prefills this prompt."""
    return {"plain": reason, "shown": {}}


async def _result(events: asyncio.Queue[Event], ready: dict[str, str]) -> Message:
    """The message for what the engine reports of a prompt."""
    started: Started | None = None
    while not isinstance(event := await events.get(), Finished):
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Failed):
            log_error(event.error, "")
            return _plain("failed")
    if started is None:
        return _plain(event.reason)
    shown = figures_of(started)
    if ready:
        return {"ready": ready, "shown": shown}
    if not started.figures.reason and started.figures.method == "blend":  # the pool was full
        shown["figures"] |= {"method": "full", "reason": "busy"}
    return {"plain": shown["figures"]["reason"], "shown": shown}


def salt_of(
    layout: PromptLayout,
    rag: Rag,
    blend: Blend,
    generation: str,
) -> str:
    """Names everything that a blended prompt's KV depends on: vLLM's prefix cache shares it only with the same blend.

    Rows of the prefix are exact, computed or from memory, so they are not counted.
    """
    recomputed = int((blend.selection.rows >= len(layout.prefix)).sum())
    parts = [
        (LayoutTicket(layout, rag.corpus_config.name).ticket(), layout.token_ids),
        (rag.blender.config.plain(), generation, rag.decoder.identity(layout.kept_behind).namespace),
        (blend.hits, recomputed, blend.notes),
    ]
    return sha256(json.dumps(parts).encode()).hexdigest()


class PrefillServer:
    """Serves connections until `stop`. place: a bound socket. timeout_s: for the first message to come."""

    def __init__(
        self,
        service: PrefillService,
        pool: KVPool,
        place: socket.socket,
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self._service = service
        self._pool = pool
        self._place = place
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._connections = 0
        self._logged: set[str] = set()
        place.listen(_BACKLOG)  # from now on connections wait and are not refused

    def serve_until_stopped(self) -> None:
        """Accept connections. Those that are left in the end are closed."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    def stop_at(self, *signals: signal.Signals) -> None:
        """End it at these signals. Call it in the main thread.

        The loop's own handlers wake it up. One of `signal.signal` would not run if the signal came right before the loop waits.
        """
        for number in signals:
            self._loop.add_signal_handler(number, self._stopped.set)

    def stop(self) -> None:
        """End it. Any thread may call it, before it serves and after it too."""
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._stopped.set)

    async def _run(self) -> None:
        self._loop.set_exception_handler(self._log_once)
        # Prompts wait for stores in threads. Few slow ones must not hold up the others.
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS, "kvblend-prefill"))
        server = await asyncio.start_unix_server(self._serve, sock=self._place, limit=MOST_BYTES, backlog=_BACKLOG)
        await self._stopped.wait()
        server.close()

    def _log_once(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log that there are no descriptors or memory: connections wait until others have gone."""
        error = context.get("exception") or RuntimeError(context["message"])
        if str(error) not in self._logged:
            self._logged.add(str(error))
            log_error(error, "")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= most_connections():
            writer.close()  # vLLM prefills
            return
        self._connections += 1
        try:
            with closing(Connection(reader, writer)) as connection:
                check_user(writer.get_extra_info("socket"))
                async with asyncio.timeout(self._timeout_s):
                    message = await connection.receive()
                await self._answer(connection, message)
        except (TransportError, TimeoutError, PoolFullError, asyncio.CancelledError):
            pass  # the other end has gone, or asks again later; or the server stops
        except Exception as error:  # of one connection; the others go on
            log_error(error, "")
        finally:
            self._connections -= 1

    async def _answer(self, connection: Connection, message: Message) -> None:
        if "ask" in message:
            work = asyncio.ensure_future(self._service.ask(message["ask"], connection.send, message.get("refused")))
            closing_watch = asyncio.ensure_future(connection.closed())
            closing_watch.add_done_callback(lambda _: work.cancel())
            try:
                await work
            finally:
                closing_watch.cancel()
        elif "attach" in message:
            await self._attach(connection, str(message["attach"]))
        elif "check" in message:
            await self._service.check(connection, str(message["check"]))
        elif "holding" in message:
            await connection.send(self._service.holding())

    async def _attach(self, connection: Connection, ticket: str) -> None:
        entry = self._pool.get(ticket)
        if entry is None:
            await connection.send({"held": None})
            return
        fd, kv = entry
        try:
            await connection.send({"held": kv._asdict()}, fd)
        finally:
            os.close(fd)


def most_connections() -> int:
    """Connections that there are descriptors for: each may hold a memory file, and the store opens files too."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, (allowed - _OTHER_FILES) // 2))
