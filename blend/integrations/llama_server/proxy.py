"""What is done for a request: its prompt is blended into a slot of llama-server, and the request goes on as it came."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from blend.errors import BlendError, PromptError, first_line
from blend.integrations.llama_server.prompt_ids import ReadPrompt, read_prompt
from blend.integrations.llama_server.sent import SentPrompts
from blend.integrations.llama_server.slot_files import SlotFile, SlotFiles
from blend.integrations.llama_server.trial import POLL_S, ServerIdentity, Trial, tokens_in
from blend.integrations.llama_server.upstream import Headers, Upstream, as_json
from blend.serve.failures import LOG, log_error
from blend.serve.http.messages import user_without_session
from blend.serve.http.to_requests import digest_of_user

LEAST_KEPT = 256  # tokens of a slot that are worth a pass over one token, which makes llama-server keep them elsewhere
_TAKEN_S = 0.25  # in which llama-server has read a request and given it a slot
_PAUSE_S = 1.0  # of silence before text is learned: an agent's next request comes sooner
_REST_S = 5.0  # of more silence before the KV correction is fitted
_RETRY_S = 60.0  # between two trials of a server that was refused
_CACHED = re.compile(rb'"(?:cache_n|cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')


class ClientRequest(NamedTuple):
    """A request as it came.

    Attributes:
        id: its name in the log.
        method: of HTTP.
        path: without the query.
        target: path and query.
        headers: all.
        body: its bytes.
        client: the holder of the key that it carries; "" without one.

    """

    id: str
    method: str
    path: str
    target: bytes
    headers: Headers
    body: bytes
    client: str = ""

    @property
    def key_headers(self) -> dict[str, str]:
        """Those that carry the client's key."""
        named = {name.lower(): value for name, value in self.headers}
        return {
            name.decode(): named[name].decode("latin-1") for name in (b"authorization", b"x-api-key") if name in named
        }


@dataclass
class Passed:
    """A request that llama-server answers.

    Attributes:
        ids: of the prompt; () if they are not known.
        reason: why nothing was blended; "" if it was.
        reused: rows of the prompt that were not computed in every layer.
        reusable: first rows that llama-server should not compute.
        reply: llama-server's, its body still to be read.

    """

    ids: tuple[int, ...] = ()
    reason: str = ""
    reused: int = 0
    reusable: int = 0
    reply: httpx.Response = field(default_factory=lambda: httpx.Response(500))

    @property
    def said(self) -> list[tuple[bytes, bytes]]:
        """The headers that say what was done."""
        rows = f"{self.reused} of {len(self.ids)}" if self.ids else "0"
        headers = [(b"x-kvblend-rows", rows.encode())]
        return [*headers, (b"x-kvblend-reason", self.reason.encode())] if self.reason else headers


class Proxy:
    """Puts blended prompts into the slots of one llama-server, for all its clients.

    Everything that fails here leaves the request to llama-server alone. `close` ends its connections and its thread.

    Args:
        upstream: the server.

    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._files: SlotFiles | None = None
        self._identity: ServerIdentity | None = None
        self._sent = SentPrompts(1)
        self._slots_are_filled = asyncio.Lock()  # one at a time, and no other request meanwhile
        self._has_room = asyncio.Event()  # an answer has ended
        self._under_way = 0
        self._ended = 0  # requests, to tell one silence from another
        self._chores = set[asyncio.Task[None]]()
        self._is_trying = False
        self._refused: ServerIdentity | None = None
        self._refused_until = 0.0

    def begin(self, files: SlotFiles, identity: ServerIdentity) -> None:
        """Blend from now on, by these files, for the server that was tried."""
        self._sent = SentPrompts(identity.slots)
        self._identity = identity
        self._files = files

    async def close(self) -> None:
        """End connections and chores."""
        for chore in self._chores:
            chore.cancel()
        await self._upstream.close()

    # Requests

    async def pass_on(self, request: ClientRequest) -> httpx.Response:
        """Pass a request on that begins no answer. Raises `UpstreamError`."""
        if request.path == "/lora-adapters" and request.method == "POST":
            self._identity = None  # other weights: the next prompt has the server tried again
        return await self._upstream.send(request.method, request.target, request.headers, request.body)

    async def answer(self, request: ClientRequest) -> Passed:
        """Have a request answered, its prompt blended if that gains. Call `ended` when the reply was read.

        Raises `UpstreamError` if llama-server does not answer.
        """
        self._under_way += 1
        try:
            passed, file = await self._blended(request)
            try:
                await self._send(request, passed, file)
            finally:
                if file is not None:
                    file.remove()
        except BaseException:
            self._count_end()
            raise
        return passed

    async def ended(self, passed: Passed, tail: bytes = b"") -> None:
        """A reply was read, or given up. tail: its last bytes, which may say how many rows llama-server had."""
        await passed.reply.aclose()
        self._count_end()
        counts = _CACHED.findall(tail)
        if counts and passed.reusable >= LEAST_KEPT and int(counts[-1]) < passed.reusable // 2:
            self._sent.forget()
            LOG.warning("rows_not_used", extra={"rows": passed.reusable, "used": int(counts[-1])})

    def _count_end(self) -> None:
        self._under_way -= 1
        self._ended += 1
        self._has_room.set()
        if self._under_way == 0 and self._files is not None:
            self._begin_chore(self._use_silence(self._files, self._ended))

    async def _use_silence(self, files: SlotFiles, ended: int) -> None:
        """Learn, and after a while fit, until the next request comes."""

        def is_silent() -> bool:
            return self._under_way == 0 and self._ended == ended

        await asyncio.sleep(_PAUSE_S)
        await files.learn(is_silent)
        await asyncio.sleep(_REST_S)
        await files.fit(is_silent)

    def _begin_chore(self, work: Coroutine[Any, Any, None]) -> None:
        chore = asyncio.create_task(work)
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    # Blending

    async def _blended(self, request: ClientRequest) -> tuple[Passed, SlotFile | None]:
        """What is known of a request's prompt, and its file if it was blended."""
        files, identity = self._files, self._identity
        if files is None:
            return Passed(reason="kvblend is loading"), None
        body = as_json(request.body)
        prompt = await read_prompt(
            self._upstream, request.path, body, request.key_headers, identity.media if identity else ""
        )
        if prompt.reason or body is None:
            return Passed(reason=prompt.reason), None
        passed = Passed(prompt.ids, reusable=self._sent.reusable_rows(prompt.ids))
        try:
            passed.reason = await self._reason_against(prompt)
            if passed.reason:
                return passed, None
            written = await files.write(prompt.ids, _user_of(request, body), passed.reusable)
        except PromptError as error:  # of kvblend's context
            passed.reason = first_line(error)
        except (BlendError, OSError, RuntimeError, MemoryError) as error:
            log_error(error, request.id)
            passed.reason = "kvblend failed; its log says where"
        else:
            if isinstance(written, SlotFile):
                return passed, written
            passed.reason = written
        return passed, None

    async def _reason_against(self, prompt: ReadPrompt) -> str:
        """Why the server's slots are left alone, or "". Raises `UpstreamError` and `ConfigError`."""
        if self._identity is None:
            return await self._changed()
        return "the prompt fills llama-server's slot" if len(prompt.ids) >= self._identity.longest else ""

    async def _changed(self) -> str:
        """Why a server is not the one that was tried, or "". Raises `UpstreamError` and `ConfigError`."""
        identity = await ServerIdentity.read(self._upstream)
        if identity == self._identity:
            return ""
        self._try_again(identity)
        return "llama-server has changed, and is tried again"

    def _try_again(self, identity: ServerIdentity) -> None:
        """Try a server in the background: it was started anew, or has other adapters."""
        self._identity = None
        is_refused = identity == self._refused and time.monotonic() < self._refused_until
        if not (self._is_trying or is_refused):
            self._is_trying = True
            self._begin_chore(self._retry(identity))

    async def _retry(self, identity: ServerIdentity) -> None:
        files = self._files
        assert files is not None
        try:
            async with self._slots_are_filled:
                self.begin(files, await Trial(self._upstream, files).run())
            LOG.info("upstream_changed", extra={"model": identity.words[0]})
        except (BlendError, OSError) as error:
            self._refused = identity
            self._refused_until = time.monotonic() + _RETRY_S
            LOG.error("upstream_refused", extra={"why": str(error)})
        finally:
            self._is_trying = False

    # Sending

    async def _send(self, request: ClientRequest, passed: Passed, file: SlotFile | None) -> None:
        """Send a request, behind a slot that was filled from its file. Raises `UpstreamError`."""
        async with self._slots_are_filled:
            if file is not None:
                passed.reason = await self._fill(file)
            sending = asyncio.ensure_future(
                self._upstream.send(request.method, request.target, request.headers, request.body)
            )
            try:
                if file is not None and not passed.reason:
                    passed.reused, passed.reusable = file.reused, file.restored
                    await asyncio.wait({sending}, timeout=_TAKEN_S)
            except BaseException:
                sending.cancel()
                raise
        try:
            passed.reply = await sending
        except asyncio.CancelledError:
            sending.cancel()
            raise
        if passed.ids and passed.reply.status_code == 200:
            self._sent.add(passed.ids)
        self._log(request, passed, file)

    async def _fill(self, file: SlotFile) -> str:
        """Fill a slot; why that failed, or "". The lock is held: no other request takes the slot."""
        try:
            if reason := await self._changed():
                return reason
            slot = await self._free_slot()
            restored = await self._upstream.restore(slot, file.path.name)
        except (BlendError, LookupError, TypeError, ValueError) as error:
            LOG.warning("slot_not_filled", extra={"why": str(error)})
            return "llama-server did not take the blended rows"
        return "" if restored == file.restored else "llama-server took other rows than were written"

    async def _free_slot(self) -> int:
        """The idle slot that holds least; what it holds is kept in llama-server's prompt cache."""
        while True:
            slots = await self._upstream.slots()
            idle = [slot for slot in slots if not slot["is_processing"]]
            if idle:
                break
            self._has_room.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_room.wait(), POLL_S)
        emptiest = min(idle, key=tokens_in)
        if tokens_in(emptiest) > LEAST_KEPT:
            # A prompt of one token makes llama-server put what its slot holds into its prompt cache; a restored slot would not.
            await self._upstream.complete([1], n_predict=0)
        return int(emptiest["id"])

    def _log(self, request: ClientRequest, passed: Passed, file: SlotFile | None) -> None:
        fields = {"id": request.id, "rows": len(passed.ids), "reused": passed.reused, "reason": passed.reason}
        seconds = {"blend_s": round(file.seconds, 3)} if file is not None else {}
        LOG.info("prompt", extra={**{name: value for name, value in fields.items() if value}, **seconds})


def _user_of(request: ClientRequest, body: Mapping[str, object]) -> str:
    """Whose learned text a prompt may use: of this key, and of the end user that the request names."""
    metadata = body.get("metadata")
    agent = user_without_session(str(metadata.get("user_id") or "")) if isinstance(metadata, dict) else ""
    end_user = body.get("safety_identifier") or body.get("user") or agent
    return digest_of_user(f"{request.client}\n{end_user}") if request.client or end_user else ""
