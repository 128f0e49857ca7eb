"""ASGI middleware for vLLM's own server: `--middleware blend.integrations.vllm.middleware.KVBlend`.

Authentication, streams, tools and metrics stay vLLM's. A request's body is rewritten when vLLM reads it, which is after it
checked the key. vLLM's reply goes out unchanged, with the field `kvblend` added where kvblend made the prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.errors import ConfigError
from blend.integrations.vllm.contract import (
    LOG,
    PARAMETER,
    PREFILLS_ITSELF,
    OutageLog,
    Signer,
    connector_options,
)
from blend.integrations.vllm.prompts import (
    LocalPrompts,
    PromptForVLLM,
    another_prompt,
    blended,
    part_of,
    plain_body,
    wants_context,
    with_ids,
)
from blend.serve.http.errors import ApiError, failure_of, refuse

_PATHS = ("/v1/chat/completions", "/v1/completions")
_RESPONSES = "/v1/responses"
_TRANSFER = "kv_transfer_params"
_HOLDERS = ("vllm_xargs", "sampling_params", "extra_args")
_EVENT = b"data: "


class Rewritten(NamedTuple):
    """A request for vLLM. shown: for the reply's field `kvblend`."""

    body: dict[str, Any]
    shown: dict[str, Any] | None = None


class Rewriter:
    """Decides what vLLM is asked instead of a request. For one server process.

    engine: vLLM's client of its engine. template: default arguments of the chat template. Raises `ConfigError`.
    """

    def __init__(self, engine: Any, template: Mapping[str, Any] | None = None) -> None:
        self._engine = engine
        self._template = template or {}
        config = getattr(engine, "vllm_config", None)
        self._signer = Signer.of(config)
        self._options = connector_options(config)
        if "store" not in self._options:
            raise ConfigError("this vLLM has no connector of kvblend; add --kv-transfer-config, as docs/vllm.md says")
        self._model_config = getattr(config, "model_config", None)
        self._prompts: LocalPrompts | None = None
        self._outage = OutageLog("kvblend: prompts are blended again")

    async def rewritten(self, body: dict[str, Any], path: str) -> Rewritten:
        """What vLLM is to be asked instead. Raises `ApiError`."""
        has_context = wants_context(body)
        field = another_prompt(body, path)
        if field and has_context:
            raise refuse(f"{field} does not go together with documents or kvblend; leave one of them out", field)
        if field:
            return Rewritten(body)
        plain = plain_body(body) if has_context else body
        try:
            prompt = await self._prompt(part_of(body, self._template), has_context)
        except ApiError as error:
            if has_context:
                raise
            if error.status >= 500:
                self._outage.failed(
                    PREFILLS_ITSELF, f"passages in a prompt could not be looked for ({error.__cause__})"
                )
            return Rewritten(plain)  # it may be right for vLLM
        if prompt is None:
            return Rewritten(plain)
        if prompt.ready:
            return Rewritten(blended(plain, prompt.ids, prompt.ready, path, self._signer), prompt.shown)
        return Rewritten(with_ids(plain, prompt.ids, path) if has_context else plain, prompt.shown)

    async def _prompt(self, part: dict[str, Any], has_context: bool) -> PromptForVLLM | None:
        """The prompt with its passages; None without. Raises `ApiError`."""
        try:
            if self._prompts is None:
                self._prompts = LocalPrompts(self._engine.renderer.get_tokenizer(), self._options)
            prompt = await asyncio.to_thread(self._prompts.prompt, part)
        except ApiError:
            raise
        except Exception as error:
            raise failure_of(error) from error
        self._outage.works()
        if has_context and prompt is not None:
            self._require_fit(prompt.ids)
        return prompt

    def _require_fit(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that vLLM can never take, before it is blended."""
        longest = getattr(self._model_config, "max_model_len", None)
        if longest is not None and len(ids) >= longest:
            raise refuse(
                f"the prompt has {len(ids)} tokens with its passages; this model's maximum context length is {longest} tokens. "
                "Send fewer or shorter documents, or retrieve fewer passages",
                code="context_length_exceeded",
            )


class KVBlend:
    """The middleware; vLLM makes one a server process. make_rewriter: from vLLM's engine client and template arguments."""

    def __init__(self, app: ASGIApp, make_rewriter: Callable[[Any, Any], Rewriter] = Rewriter) -> None:
        self._app = app
        self._make_rewriter = make_rewriter
        self._rewriter: Rewriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its body rewritten. At the server's start, check the settings."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        kinds = _content_types(scope)
        if scope["type"] == "http" and len(kinds) > 1:  # readers could disagree about which one counts
            await refuse("a request has one header content-type, not several").response()(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST" or kinds[0].startswith("multipart/"):
            await self._app(scope, receive, send)
            return
        exchange = RewrittenExchange(self._rewriter_of(scope), scope, receive, send)
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        try:
            await self._app({**scope, "headers": headers}, exchange.receive, exchange.send)
        except Exception:
            if exchange.failure is None:
                raise
        finally:
            exchange.close()
        if exchange.failure is not None:
            await exchange.failure.response()(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._rewriter_of(scope)
        except Exception as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"kvblend: {error}"})
            return
        await self._app(scope, receive, send)

    def _rewriter_of(self, scope: Scope) -> Rewriter:
        if self._rewriter is None:
            state = scope["app"].state
            template = getattr(getattr(state, "args", None), "default_chat_template_kwargs", None)
            self._rewriter = self._make_rewriter(state.engine_client, template)
        return self._rewriter


class RewrittenExchange:
    """One request and its reply. failure: set where kvblend refuses it; nothing of vLLM's reply is sent then."""

    def __init__(
        self,
        rewriter: Rewriter,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._rewriter = rewriter
        self._receive = receive
        self._send = send
        self._path = scope["path"].removeprefix(scope.get("root_path", ""))
        self._kind = _content_types(scope)[0]
        self._begun = False
        self._next: asyncio.Future[Message] | None = None
        self._rewritten = Rewritten({})
        self._reply: _Reply | None = None
        self.failure: ApiError | None = None

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
        if self.failure is None:
            messages = [message] if self._reply is None else self._reply.passed(message)
            for outgoing in messages:
                await self._send(outgoing)

    def close(self) -> None:
        """The exchange has ended."""
        if self._next is not None:
            self._next.cancel()

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
                disconnect = await self._rewrite(body)
                if disconnect is not None:
                    return disconnect
                body = self._rewritten.body
            elif "kvblend" in body or (self._path == _RESPONSES and wants_context(body)):
                field = "kvblend" if "kvblend" in body else "documents"
                raise refuse(f"{self._path} takes no field of kvblend; use {' or '.join(_PATHS)}", field)
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        except RecursionError:
            self.failure = refuse("the body is nested too deeply")
        except ApiError as error:
            self.failure = error
        raise HTTPException(self.failure.status)  # for vLLM, so that it stops; its own reply to this is not sent

    async def _rewrite(self, body: dict[str, Any]) -> Message | None:
        """Have the body rewritten. Returns the client's message if it hung up meanwhile."""
        work = asyncio.ensure_future(self._rewriter.rewritten(body, self._path))
        self._next = asyncio.ensure_future(cast(Any, self._receive()))
        try:
            await asyncio.wait({work, self._next}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up = work.cancel()  # it is done otherwise
        if hung_up:
            return self._next.result()
        try:
            self._rewritten = work.result()
        except ApiError:
            raise
        except Exception as error:
            LOG.error("kvblend: a request could not be rewritten", exc_info=True)
            raise failure_of(error) from error
        if self._rewritten.shown is not None:
            self._reply = _Reply(self._rewritten.shown)
        return None


def strip(body: dict[str, Any]) -> None:
    """Remove the fields that only kvblend may set: a client's own could name other clients' KV."""
    body.pop(_TRANSFER, None)
    for name in _HOLDERS:
        if isinstance(holder := body.get(name), dict):
            strip(holder)


def _content_types(scope: Scope) -> list[str]:
    """Of all headers of this name, at least one."""
    values = [value for name, value in scope.get("headers", ()) if name == b"content-type"]
    return [value.decode("latin-1").lower().strip() for value in values] or [""]


def _object(raw: bytes, kind: str) -> dict[str, Any] | None:
    """The JSON object in a body of this content type, as vLLM reads it; None for other bodies, which pass unchanged.

    Raises `ApiError` for broken JSON, and `RecursionError`: a body that cannot be read here cannot be stripped, and vLLM might
    still read it.
    """
    try:
        body = json.loads(raw)
    except ValueError:
        if raw.strip() and "json" in kind.partition(";")[0]:
            raise refuse("the body is no JSON") from None
        return None
    return body if isinstance(body, dict) else None


class _Reply:
    """Adds the field `kvblend` to one reply of vLLM's: to the whole document, or to the first event of a stream."""

    def __init__(self, shown: dict[str, Any]) -> None:
        self._shown = shown
        self._start: Message | None = None  # of a document, held until it is whole
        self._body = bytearray()
        self._streams = False  # and its first event is yet to come

    def passed(self, message: Message) -> Iterator[Message]:
        """What is sent for a message of vLLM's."""
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            succeeded = message["status"] == 200
            self._streams = succeeded and kind.startswith(b"text/event-stream")
            if succeeded and kind.startswith(b"application/json"):
                self._start = message
                return
        elif self._streams:
            self._streams = False
            message = {**message, "body": self._first_event(message.get("body", b""))}
        elif self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            body = self._added(bytes(self._body))
            headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
            yield {**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
            self._start = None
            message = {**message, "body": body}
        yield message

    def _first_event(self, body: bytes) -> bytes:
        event, mark, later = body.partition(b"\n\n")
        if not (mark and event.startswith(_EVENT)):
            return body
        return _EVENT + self._added(event.removeprefix(_EVENT)) + mark + later

    def _added(self, document: bytes) -> bytes:
        """With the connector's figures of this prompt, which a stream begins without."""
        try:
            reply = json.loads(document)
        except ValueError:
            return document
        if not isinstance(reply, dict):
            return document
        transfer = reply.get(_TRANSFER)
        shown = self._shown
        if isinstance(transfer, dict) and PARAMETER in transfer:
            reply[_TRANSFER] = None
            shown = {**shown, "figures": {**shown.get("figures", {}), **transfer[PARAMETER]}}
        return json.dumps({**reply, "kvblend": shown}).encode()
