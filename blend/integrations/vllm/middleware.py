"""ASGI middleware for vLLM's own server: `--middleware blend.integrations.vllm.middleware.KVBlend`.

Authentication, streams, tools and metrics stay vLLM's. A request's body is rewritten when vLLM reads it, which is after it
checked the key. vLLM's reply goes out unchanged, with the field `kvblend` added where kvblend made the prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple, cast

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.errors import ConfigError
from blend.integrations.vllm.contract import LOG, PARAMETER, Signer, reason_against, rows_options
from blend.integrations.vllm.prompts import (
    LocalPrompt,
    LocalPrompts,
    another_prompt,
    blended,
    part_of,
    plain_body,
    plain_model,
    wants_context,
    with_ids,
)
from blend.integrations.vllm.transport import SOCKET, VARIABLE, PrefillConnection, TransportError
from blend.integrations.vllm.transport import Message as PrefillMessage
from blend.serve.http.errors import ApiError, failure_of, refuse, unavailable
from blend.serve.types import ASKED_FOR

NO_PROCESS = "no prefill process"
"""Why a prompt was not blended: `blend vllm` is not there."""
_TIMEOUT = "KVBLEND_VLLM_TIMEOUT"
_SLOW_S = 1.0  # a failure that took longer opens the circuit; asking again after a quicker one costs nothing
_PATHS = ("/v1/chat/completions", "/v1/completions")
_OURS_ALONE = "kv_transfer_params"
_HOLDERS = ("vllm_xargs", "sampling_params", "extra_args")
_EVENT = b"data: "

Compare = Callable[[Any, Sequence[Mapping[str, Any]], Signer], Awaitable[str]]
"""vLLM's client of its engine, checks and a signer -> why blended KV must not be used, or "". See `reason_against`."""


class PrefillTimeouts(NamedTuple):
    """Seconds. ask: for a blend. plain: of that, for a request without fields of kvblend's. pause: of an open circuit."""

    ask: float = 60.0
    plain: float = 5.0
    check: float = 300.0
    pause: float = 5.0

    @classmethod
    def from_environment(cls) -> PrefillTimeouts:
        """Raises `ConfigError`."""
        text = os.environ.get(_TIMEOUT, "60")
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < 86_400:
            raise ConfigError(f"{_TIMEOUT} is {text!r}; give seconds, more than 0")
        return cls(found)


class Rewritten(NamedTuple):
    """A request for vLLM. shown: for the reply's field `kvblend`. connection: to be closed when the reply has ended."""

    body: dict[str, Any]
    shown: dict[str, Any] | None = None
    connection: PrefillConnection | None = None


class _SkippedError(TransportError):
    """The circuit is open: the prefill process was not asked."""


class _LostError(TransportError):
    """The prefill process has gone after it had sent the prompt's tokens and its sources."""

    def __init__(self, words: str, prompt: list[int], sources: list[Any]) -> None:
        super().__init__(words)
        self.prompt, self.sources = prompt, sources


class PrefillCircuit:
    """Keeps a prefill process that hangs from delaying all requests. For one event loop.

    A slow failure opens the circuit for `pause_s`; then one request at a time tries again. Each outage is one line in the log.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s, self._until = pause_s, 0.0
        self._warned = self._open = self._trying = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one request to the process. Raises `_SkippedError` at once while the circuit is open."""
        if self._open and (self._trying or time.monotonic() < self._until):
            raise _SkippedError("the circuit is open")
        tries = self._trying = self._open
        begin = time.monotonic()
        try:
            yield
        except ApiError:  # an answer
            self.answered()
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) or time.monotonic() - begin > _SLOW_S:
                self._open, self._until = True, time.monotonic() + self._pause_s
            raise
        else:
            self.answered()
        finally:
            if tries:
                self._trying = False

    def warn(self, why: str) -> None:
        """Log it, once an outage."""
        if not self._warned:
            LOG.warning("kvblend: %s; vLLM prefills by itself until it works again", why)
        self._warned = True

    def answered(self) -> None:
        """The outage, if there was one, is over."""
        if self._warned:
            LOG.info("kvblend: prompts are blended again")
        self._warned = self._open = False


class Rewriter:
    """Decides what vLLM is asked instead of a request. For one server process, in its event loop.

    engine: vLLM's client of its engine. template: default arguments of the chat template. compare: see `reason_against`.
    prompts: makes prompts in this process. Raises `ConfigError`.
    """

    def __init__(
        self,
        engine: Any,
        template: Mapping[str, Any] | None = None,
        *,
        timeouts: PrefillTimeouts | None = None,
        compare: Compare | None = None,
        prompts: LocalPrompts | None = None,
    ) -> None:
        self._engine, self._template = engine, template or {}
        self._compare = compare or reason_against
        self._timeouts = timeouts or PrefillTimeouts.from_environment()
        self._socket = os.environ.get(VARIABLE, SOCKET)
        config = getattr(engine, "vllm_config", None)
        self._signer = Signer.of(config)
        self._rows = rows_options(config)
        self._model_config = getattr(config, "model_config", None)
        self._local = prompts
        self._circuit = PrefillCircuit(self._timeouts.pause)
        self._checked: dict[str, asyncio.Future[str]] = {}
        self._refused: dict[str, str] = {}

    async def rewritten(self, body: dict[str, Any], path: str) -> Rewritten:
        """What vLLM is to be asked instead. Raises `ApiError`."""
        wanted = wants_context(body)
        other = another_prompt(body, path)
        if other and wanted:
            raise refuse(f"{other} does not go together with documents or kvblend; leave one of them out", other)
        if other:
            return Rewritten(body)
        part = part_of(body, self._template)
        plain = plain_body(body) if wanted else body
        if self._rows is not None:
            return await self._by_rows(part, plain, wanted, path)
        try:
            with self._circuit():
                async with asyncio.timeout(self._timeouts.ask):
                    return await self._by_prefill(part, plain, wanted, path)
        except ApiError:
            raise
        except Exception as error:  # whatever it is, vLLM can answer
            if not isinstance(error, TransportError | TimeoutError):
                LOG.error("kvblend: a request could not be handed over", exc_info=error)
            elif not isinstance(error, _SkippedError):
                self._circuit.warn(str(error) or "the prefill process did not answer in time")
            if not wanted:
                return Rewritten(plain)
            if isinstance(error, _LostError):
                return _full(plain, error.prompt, error.sources, NO_PROCESS, path)
            return await self._without_process(part, plain, path)

    async def _by_prefill(self, part: dict[str, Any], plain: dict[str, Any], wanted: bool, path: str) -> Rewritten:
        connection: PrefillConnection | None = None
        try:
            async with asyncio.timeout(None if wanted else self._timeouts.plain):
                connection = await PrefillConnection.open(self._socket, {"ask": part, "refused": self._refused})
                message = await connection.next()
            found = await self._followed(connection, message, plain, wanted, path)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if found.connection is None:
            connection.close()
        return found

    async def _followed(
        self, connection: PrefillConnection, message: PrefillMessage, plain: dict[str, Any], wanted: bool, path: str
    ) -> Rewritten:
        """The prefill process's answer, from its first message on."""
        if "error" in message:
            status, words, code, param = message["error"]
            if status >= 500:
                raise TransportError("the prefill process failed at a request, its log says where")
            if wanted:
                raise ApiError(status, words, code, param)
            return Rewritten(plain)  # it may be right for vLLM
        if "pass" in message:
            return Rewritten(plain)
        ids, sources = message["prompt"], message["sources"]
        if wanted:
            self._require_fit(ids)
        try:
            refused = await self._reason_against(message["model"])
            message = await connection.next()
        except TransportError as error:
            raise _LostError(str(error), ids, sources) from None
        shown = message["shown"]
        if "ready" in message and not refused:
            return Rewritten(blended(plain, ids, message["ready"], path, self._signer), shown, connection)
        if not wanted:
            return Rewritten(plain)
        if refused or not shown:
            return _full(plain, ids, sources, "refused" if refused else message["plain"], path)
        return Rewritten(with_ids(plain, ids, path), shown)

    async def _by_rows(self, part: dict[str, Any], plain: dict[str, Any], wanted: bool, path: str) -> Rewritten:
        """VLLM's own model blends."""
        try:
            found = await self._prompt(part)
        except ApiError as error:
            if wanted:
                raise
            if error.status >= 500:
                self._circuit.warn(f"passages in a prompt could not be looked for ({error.__cause__})")
            return Rewritten(plain)  # it may be right for vLLM
        self._circuit.answered()
        if found is None:
            return Rewritten(plain)
        asked, sources = found.asked, list(found.sources)
        ids = list(asked.layout.token_ids)
        if wanted:
            self._require_fit(ids)
        if found.reason:
            reason = "" if found.reason == ASKED_FOR else found.reason
            full = _full(plain, ids, sources, reason, path)
            return full if wanted else full._replace(body=plain)
        ready = {"ticket": asked.ticket(), "salt": asked.salt(found.generation)}
        shown = {"sources": sources, "figures": {"method": "rows"}}
        return Rewritten(blended(plain, ids, ready, path, self._signer), shown)

    async def _without_process(self, part: dict[str, Any], plain: dict[str, Any], path: str) -> Rewritten:
        """While the prefill process is away: documents become a prompt here, and a corpus cannot be searched."""
        ours, model = part.get("kvblend") or {}, str(part.get("model", ""))
        if not isinstance(ours, dict) or ours.get("retrieve") is not None or plain_model(model) != model:
            raise unavailable("the corpus cannot be searched now; the server's log says why")
        found: LocalPrompt | None = None
        if part.get("documents") or ours.get("documents"):
            found = await self._prompt(part)
        if found is None:
            return Rewritten(plain)
        ids = list(found.asked.layout.token_ids)
        self._require_fit(ids)
        return _full(plain, ids, list(found.sources), NO_PROCESS, path)

    def _require_fit(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that vLLM can never take, before it is blended."""
        longest = getattr(self._model_config, "max_model_len", None)
        if longest is not None and len(ids) >= longest:
            raise refuse(
                f"the prompt has {len(ids)} tokens with its passages; this model's maximum context length is {longest} tokens. "
                "Send fewer or shorter documents, or retrieve fewer passages",
                code="context_length_exceeded",
            )

    async def _prompt(self, part: dict[str, Any]) -> LocalPrompt | None:
        """Made in this process. Raises `ApiError`."""
        try:
            if self._local is None:
                self._local = LocalPrompts(self._engine.renderer.get_tokenizer(), self._rows)
            return await asyncio.to_thread(self._local.prompt, part)
        except ApiError:
            raise
        except Exception as error:
            raise failure_of(error) from error

    def begin(self) -> None:
        """At the server's start: compare with a prefill process that is there already."""
        if self._rows is None:
            self._first_check = asyncio.ensure_future(self._check_first())

    async def _check_first(self) -> None:
        with suppress(TransportError, TimeoutError):
            with closing(await PrefillConnection.open(self._socket, {"holding": True})) as connection:
                model = str((await connection.next())["model"])
            await self._reason_against(model)

    async def _reason_against(self, model: str) -> str:
        """Why KV of this model must not be used; compared when it is first seen. A request may stop waiting for it."""
        if model not in self._checked:
            self._checked[model] = asyncio.ensure_future(self._checking(model))
        return await asyncio.shield(self._checked[model])

    async def _checking(self, model: str) -> str:
        try:
            reason = await self._compared()
        except BaseException:
            del self._checked[model]  # the next request tries again
            raise
        if reason:
            self._refused[model] = reason
            LOG.error("kvblend: blended KV is not used: %s", reason)
        else:
            LOG.info("kvblend: vLLM's log-probabilities over KV of the prefill process are its own")
        return reason

    async def _compared(self) -> str:
        asked = {"check": str(getattr(self._model_config, "dtype", "")).removeprefix("torch.")}
        async with asyncio.timeout(self._timeouts.check):
            with closing(await PrefillConnection.open(self._socket, asked)) as connection:
                message = await connection.next()
                if "refused" in message:
                    return str(message["refused"])
                try:
                    reason = await self._compare(self._engine, message["checks"], self._signer)
                except Exception as error:  # vLLM would say the same again
                    reason = f"it could not be compared with vLLM's own ({error})"
                await connection.send({"verdict": reason})
                return reason


def _full(plain: dict[str, Any], ids: list[int], sources: list[Any], reason: str, path: str) -> Rewritten:
    """The prompt with its passages, which vLLM computes by itself."""
    return Rewritten(with_ids(plain, ids, path), {"sources": sources, "figures": {"method": "full", "reason": reason}})


class KVBlend:
    """The middleware; vLLM makes one a server process. make_rewriter: from vLLM's engine client and template arguments."""

    def __init__(self, app: ASGIApp, make_rewriter: Callable[[Any, Any], Rewriter] = Rewriter) -> None:
        self._app, self._make_rewriter = app, make_rewriter
        self._rewriter: Rewriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its body rewritten. At the server's start, check the settings."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        kinds = _content_types(scope)
        if scope["type"] == "http" and len(kinds) > 1:  # readers could disagree about which one counts
            await refuse("a request has one header content-type, not several").response(scope, receive, send)
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
            await exchange.failure.response(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._rewriter_of(scope).begin()
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

    def __init__(self, rewriter: Rewriter, scope: Scope, receive: Receive, send: Send) -> None:
        self._rewriter, self._receive, self._send = rewriter, receive, send
        self._path, self._kind = scope["path"].removeprefix(scope.get("root_path", "")), _content_types(scope)[0]
        self._begun = False
        self._next: asyncio.Future[Message] | None = None
        self._found = Rewritten({})
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
            for one in self._reply.passed(message) if self._reply is not None else [message]:
                await self._send(one)

    def close(self) -> None:
        """The exchange has ended."""
        if self._next is not None:
            self._next.cancel()
        if self._found.connection is not None:
            self._found.connection.close()

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
        """Have the body rewritten. Returns the client's message if it hung up meanwhile."""
        work = asyncio.ensure_future(self._rewriter.rewritten(body, self._path))
        self._next = asyncio.ensure_future(cast(Any, self._receive()))
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
            LOG.error("kvblend: a request could not be rewritten", exc_info=True)
            raise failure_of(error) from error
        if self._found.shown is not None:
            self._reply = _Reply(self._found.shown)
        return None

    def _failed(self, error: ApiError) -> HTTPException:
        """For vLLM, so that it stops; its own reply to this is not sent."""
        self.failure = error
        return HTTPException(error.status)


def strip(body: dict[str, Any]) -> None:
    """Remove the fields that only kvblend may set: a client's own could name other clients' KV."""
    body.pop(_OURS_ALONE, None)
    for name in _HOLDERS:
        if isinstance(held := body.get(name), dict):
            strip(held)


def _content_types(scope: Scope) -> list[str]:
    """Of all headers of this name, at least one."""
    found = [value for name, value in scope.get("headers", ()) if name == b"content-type"]
    return [value.decode("latin-1").lower().strip() for value in found] or [""]


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
        self._start: Message | None = None
        self._body = bytearray()
        self._done = False

    def passed(self, message: Message) -> Iterator[Message]:
        """What is sent for a message of vLLM's."""
        if not self._done and message["type"] == "http.response.start":
            yield from self._begun(message)
        elif not self._done and message["type"] == "http.response.body":
            yield from self._more(message)
        else:
            yield message

    def _begun(self, message: Message) -> Iterator[Message]:
        kind = dict(message.get("headers", ())).get(b"content-type", b"")
        if message["status"] == 200 and kind.startswith(b"application/json"):
            self._start = message
            return
        self._done = message["status"] != 200 or not kind.startswith(b"text/event-stream")
        yield message

    def _more(self, message: Message) -> Iterator[Message]:
        if self._start is None:
            self._done = True
            yield {**message, "body": self._first_event(message.get("body", b""))}
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        self._done = True
        body = self._added(bytes(self._body))
        headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
        yield {**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        yield {**message, "body": body}

    def _first_event(self, body: bytes) -> bytes:
        line, mark, rest = body.partition(b"\n\n")
        if not (mark and line.startswith(_EVENT)):
            return body
        return _EVENT + self._added(line.removeprefix(_EVENT)) + mark + rest

    def _added(self, document: bytes) -> bytes:
        try:
            found = json.loads(document)
        except ValueError:
            return document
        return json.dumps({**found, **self._with_figures(found)}).encode() if isinstance(found, dict) else document

    def _with_figures(self, found: dict[str, Any]) -> dict[str, Any]:
        """With the connector's figures of this prompt, which a stream begins without."""
        given = found.get("kv_transfer_params")
        if not (isinstance(given, dict) and PARAMETER in given):
            return {"kvblend": self._shown}
        figures = {**self._shown.get("figures", {}), **given[PARAMETER]}
        return {"kv_transfer_params": None, "kvblend": {**self._shown, "figures": figures}}
