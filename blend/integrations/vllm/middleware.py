"""ASGI middleware for vLLM's own server: `--middleware blend.integrations.vllm.middleware.KVBlend`.

Authentication, streams, tools and metrics stay vLLM's. A request's body is rewritten when vLLM reads it, which is after it
checked the key. vLLM's reply goes out unchanged, with the field `kvblend` added where kvblend made the prompt.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.integrations.vllm.contract import PARAMETER, PREFILLS_ITSELF, Options, OutageLog, Signer
from blend.integrations.vllm.prompts import (
    CHAT,
    LocalPrompts,
    PromptForVLLM,
    another_prompt,
    plain_body,
    wants_context,
    whose,
)
from blend.serve.flights import Flight
from blend.serve.http.bodies import END_USER
from blend.serve.http.errors import ApiError, failure_of, refuse

_PATHS = (CHAT, "/v1/completions")
_TRANSFER = "kv_transfer_params"
_HOLDERS = ("vllm_xargs", "sampling_params", "extra_args")
_DOCUMENT = "application/json"
_EVENT = b"data: "


class PromptMaking:
    """Makes prompts in threads, so that those of an end user that come together find each other's text. For one event loop."""

    def __init__(self) -> None:
        self._going: defaultdict[str, set[asyncio.Future[Any]]] = defaultdict(set)

    async def prompt(self, user: str, make: Callable[[], PromptForVLLM | None]) -> PromptForVLLM | None:
        """The prompt, compared with others in flight.

        One with new text waits for the user's prompts that are being made by then, at most as long as it was made itself.
        """
        begun = time.monotonic()
        task = asyncio.ensure_future(asyncio.to_thread(make))
        going = self._going[user]
        going.add(task)
        try:
            prompt = await task
        finally:
            going.discard(task)
            if not going:
                self._going.pop(user, None)
        if prompt is None or prompt.flight is None:
            return prompt
        if others := set(going):
            await asyncio.wait(others, timeout=time.monotonic() - begun)
        return await asyncio.to_thread(prompt.compared)


class Rewriter:
    """Decides what vLLM is asked instead of a request. For one server process.

    state: of vLLM's application. Raises `ConfigError`.
    """

    def __init__(self, state: Any) -> None:
        engine = state.engine_client
        options = Options.of(engine.vllm_config)
        self._signer = Signer(engine.vllm_config)
        self._longest = engine.vllm_config.model_config.max_model_len
        template = getattr(state.args, "default_chat_template_kwargs", None)
        self._prompts = LocalPrompts(engine.renderer.get_tokenizer(), options, template or {})
        self._making = PromptMaking()
        self._outage = OutageLog("kvblend: prompts are blended again")

    async def rewritten(self, body: dict[str, Any], path: str) -> tuple[dict[str, Any], PromptForVLLM | None]:
        """What vLLM is to be asked instead, and the prompt, if kvblend made it. Raises `ApiError`."""
        has_context = wants_context(body)
        if field := another_prompt(body, path):
            if has_context:
                raise refuse(f"{field} does not go together with documents or kvblend; leave one of them out", field)
            return body, None
        plain = plain_body(body)
        try:
            user = next((str(body[name]) for name in END_USER if body.get(name)), "")
            make = partial(self._prompts.prompt, body)
            prompt = await self._making.prompt(whose(user, body.get("cache_salt")), make)
        except Exception as error:
            failure = failure_of(error)
            if has_context:
                raise failure from error
            if failure.status >= 500:
                self._outage.failed(PREFILLS_ITSELF, f"passages in a prompt could not be looked for ({error})")
            return plain, None  # it may be right for vLLM
        self._outage.works()
        if prompt is None:
            return plain, None
        rows = len(prompt.ids)
        if has_context and rows >= self._longest:
            raise refuse(
                f"the prompt has {rows} tokens with its passages; this model's maximum context length is {self._longest} "
                "tokens. Send fewer or shorter documents, or retrieve fewer passages",
                code="context_length_exceeded",
            )
        return prompt.put_into(plain, path, self._signer), prompt


class KVBlend:
    """The middleware; vLLM makes one a server process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._rewriter: Rewriter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its body rewritten. At the server's start, check the settings."""
        if scope["type"] == "lifespan":
            try:
                self._rewriter = Rewriter(scope["app"].state)
            except Exception as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": f"kvblend: {error}"})
                return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if len(Headers(scope=scope).getlist("content-type")) > 1:  # readers could disagree about which one counts
            await refuse("a request has one header content-type, not several").response()(scope, receive, send)
            return
        exchange = RewrittenExchange(self._rewriter, Request(scope, receive), send)
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        try:
            await self._app({**scope, "headers": headers}, exchange.receive, exchange.send)
        except Exception:
            if exchange.failure is None:
                raise
        finally:
            exchange.land()
        if exchange.failure is not None:
            await exchange.failure.response()(scope, receive, send)


class RewrittenExchange:
    """One request and its reply. failure: set where kvblend refuses it; nothing of vLLM's reply is sent then."""

    def __init__(self, rewriter: Rewriter, request: Request, send: Send) -> None:
        self._rewriter = rewriter
        self._request = request
        self._send = send
        self._begun = False
        self._shown: dict[str, Any] | None = None
        self._flight: Flight | None = None
        self._kind = ""  # of a reply to which that is to be added
        self._start: Message = {}  # of a document, held until it is whole
        self._body = bytearray()
        self.failure: ApiError | None = None

    async def receive(self) -> Message:
        """For vLLM: the rewritten body, then whatever the client does."""
        if self._begun:
            return await self._request.receive()
        self._begun = True
        raw = await self._request.body()
        try:
            return {"type": "http.request", "body": await self._rewritten(raw), "more_body": False}
        except RecursionError:
            self.failure = refuse("the body is nested too deeply")
        except ApiError as error:
            self.failure = error
        raise HTTPException(self.failure.status)  # for vLLM, so that it stops; its own reply to this is not sent

    def land(self) -> None:
        """Its prompt is prefilled, or it has ended: it brings no text to others any more."""
        if self._flight is not None:
            self._flight.end()

    async def send(self, message: Message) -> None:
        """For vLLM's reply: the field `kvblend` is added to the whole document, or to the first event of a stream."""
        if self.failure is not None:
            return
        if message.get("body"):
            self.land()
        if message["type"] == "http.response.start":
            if self._shown is not None and message["status"] == 200:
                self._kind = Headers(raw=message["headers"])["content-type"].partition(";")[0]
            if self._kind == _DOCUMENT:
                self._start = message
                return
        elif self._kind == _DOCUMENT:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            message = {**message, "body": self._added(bytes(self._body))}
            MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(message["body"]))
            await self._send(self._start)
        elif self._kind == "text/event-stream":
            self._kind = ""
            event, mark, later = message.get("body", b"").partition(b"\n\n")
            if event.startswith(_EVENT):
                message = {**message, "body": _EVENT + self._added(event.removeprefix(_EVENT)) + mark + later}
        await self._send(message)

    def _added(self, document: bytes) -> bytes:
        """With the connector's figures of this prompt, which a stream begins without."""
        reply = json.loads(document)
        shown = {**(self._shown or {})}
        if transfer := reply.get(_TRANSFER):
            shown["figures"] = {**shown["figures"], **transfer[PARAMETER]}
            reply[_TRANSFER] = None
        return json.dumps({**reply, "kvblend": shown}).encode()

    async def _rewritten(self, raw: bytes) -> bytes:
        """The body for vLLM. Raises `ApiError`.

        Raises `RecursionError`, too: a body that cannot be read here cannot be stripped, and vLLM might still read it.
        """
        try:
            body = json.loads(raw)
        except ValueError:
            kind = self._request.headers.get("content-type", "").lower()
            if raw.strip() and "json" in kind.partition(";")[0]:
                raise refuse("the body is no JSON") from None
            return raw
        if not isinstance(body, dict):
            return raw
        strip(body)
        path = self._request.scope["path"].removeprefix(self._request.scope.get("root_path", ""))
        if path in _PATHS:
            body, prompt = await self._rewriter.rewritten(body, path)
            if prompt is not None:
                self._shown = prompt.shown
                self._flight = prompt.flight
        elif "kvblend" in body or (path == "/v1/responses" and wants_context(body)):
            field = "kvblend" if "kvblend" in body else "documents"
            raise refuse(f"{path} takes no field of kvblend; use {' or '.join(_PATHS)}", field)
        return json.dumps(body).encode()


def strip(body: dict[str, Any]) -> None:
    """Remove the fields that only kvblend may set: a client's own could name other clients' KV."""
    body.pop(_TRANSFER, None)
    for name in _HOLDERS:
        if isinstance(holder := body.get(name), dict):
            strip(holder)
