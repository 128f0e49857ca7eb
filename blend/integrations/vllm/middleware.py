"""For vLLM's own server: `--middleware blend.integrations.vllm.middleware.KVBlend`.

Its authentication, streams, tools and metrics stay vLLM's: a request's body is rewritten when vLLM reads it, which it does
after the key was checked, and what vLLM answers goes out as it is, with `kvblend` beside it where something was blended.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.integrations.vllm.gate import Gate, Rewritten
from blend.integrations.vllm.replies import Telling
from blend.serve.http.errors import ApiError, Failure, failure_of, refuse

_LOG = logging.getLogger("vllm.kvblend")
_PATHS = ("/v1/chat/completions", "/v1/completions")
_FOREIGN = "kv_transfer_params"
_HOLDERS = ("vllm_xargs", "sampling_params", "extra_args")


class KVBlend:
    """An ASGI middleware; vLLM makes one a server process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gate: Gate | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, its body rewritten. At the server's start, see that the settings are right."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        kinds = _content_types(scope)
        if scope["type"] == "http" and len(kinds) > 1:  # which of them counts is not to depend on who reads
            await refuse("a request has one header content-type, not several").failure.response(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST" or kinds[0].startswith("multipart/"):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(self._gate_of(scope), scope, receive, send)
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        try:
            await self._app({**scope, "headers": headers}, exchange.receive, exchange.send)
        except Exception:
            if exchange.failure is None:
                raise
        finally:
            exchange.close()
        if exchange.failure is not None:
            await exchange.failure.response(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._gate_of(scope).begin()
        except Exception as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"kvblend: {error}"})
            return
        await self._app(scope, receive, send)

    def _gate_of(self, scope: Scope) -> Gate:
        if self._gate is None:
            state = scope["app"].state
            template = getattr(getattr(state, "args", None), "default_chat_template_kwargs", None)
            self._gate = Gate(state.engine_client, template)
        return self._gate


class Exchange:
    """One request and its reply. failure: set where we refuse it; nothing of vLLM's own reply is sent then."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate, self._receive, self._send = gate, receive, send
        self._path, self._kind = scope["path"].removeprefix(scope.get("root_path", "")), _content_types(scope)[0]
        self._begun = False
        self._next: asyncio.Future[Message] | None = None
        self._found = Rewritten({})
        self._telling: Telling | None = None
        self.failure: Failure | None = None

    async def receive(self) -> Message:
        """For vLLM: the rewritten body, then whatever the client does."""
        if not self._begun:
            self._begun = True
            return await self._first()
        if self._next is None:
            return await self._receive()
        message = await asyncio.shield(self._next)
        self._next = None
        return message

    async def send(self, message: Message) -> None:
        """For vLLM's reply."""
        if self.failure is not None:
            return
        for one in self._telling.passed(message) if self._telling is not None else [message]:
            await self._send(one)

    def close(self) -> None:
        """The exchange has ended."""
        if self._next is not None:
            self._next.cancel()
        if self._found.lease is not None:
            self._found.lease.close()

    async def _first(self) -> Message:
        raw = bytearray()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            raw += message.get("body", b"")
            if not message.get("more_body", False):
                break
        try:
            body = _object(bytes(raw), self._kind)
            if body is None:
                return {"type": "http.request", "body": bytes(raw), "more_body": False}
            strip(body)
            if self._path in _PATHS:
                gone = await self._rewrite(body)
                if gone is not None:
                    return gone
                body = self._found.body
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        except RecursionError:
            raise self._failed(refuse("the body is nested too deeply")) from None
        except ApiError as error:
            raise self._failed(error) from None

    async def _rewrite(self, body: dict[str, Any]) -> Message | None:
        """Have the body rewritten; what the client did instead of waiting for it, if he left."""
        work = asyncio.ensure_future(self._gate.rewritten(body, self._path))
        self._next = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({work, self._next}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            work.cancel()
            raise
        if not work.done():
            work.cancel()
            return self._next.result()
        try:
            self._found = work.result()
        except ApiError:
            raise
        except Exception as error:
            _LOG.error("kvblend: a request could not be rewritten", exc_info=True)
            raise ApiError(failure_of(error)) from error
        if self._found.told is not None:
            self._telling = Telling(self._found.told)
        return None

    def _failed(self, error: ApiError) -> HTTPException:
        """For vLLM, so that it goes no further; what it makes of it is not sent."""
        self.failure = error.failure
        return HTTPException(error.failure.status)


def strip(body: dict[str, Any]) -> None:
    """Take out what only we may say: a client's own would name what is held for others."""
    body.pop(_FOREIGN, None)
    for name in _HOLDERS:
        if isinstance(held := body.get(name), dict):
            strip(held)


def _content_types(scope: Scope) -> list[str]:
    """Of all headers of this name, at least one."""
    found = [value for name, value in scope.get("headers", ()) if name == b"content-type"]
    return [value.decode("latin-1").lower().strip() for value in found] or [""]


def _object(raw: bytes, kind: str) -> dict[str, Any] | None:
    """The JSON object that a body of this content type is, as vLLM reads it; None for what is none, which goes through.

    Raises `ApiError` for a body that should be JSON and cannot be read, and `RecursionError`: what we cannot read we cannot
    clean, and vLLM might read it after all.
    """
    try:
        body = json.loads(raw)
    except ValueError:
        if raw.strip() and "json" in kind.partition(";")[0]:
            raise refuse("the body is no JSON") from None
        return None
    return body if isinstance(body, dict) else None
