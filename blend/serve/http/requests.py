"""What all HTTP requests share: the application's state, who may send them, and the log.

The log has one JSON object a line, without any text of prompts or answers.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cachetools import TTLCache
from pythonjsonlogger.core import merge_record_extra
from pythonjsonlogger.json import JsonFormatter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.errors import ConfigError
from blend.limits import check_corpus_name, is_loopback, shown
from blend.serve.events import EngineFailedError
from blend.serve.failures import LOG, log_error
from blend.serve.http.body_budget import BodyBudget
from blend.serve.http.errors import ApiError, closing, failure_of, refuse, unavailable
from blend.serve.http.tracing import LogEntry, Tracing
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics
from blend.serve.turns import Turns
from blend.store.seal import read_secret

if TYPE_CHECKING:
    from blend.serve.service import Service

_MOST_QUESTIONS = 512  # accepted
_QUESTIONS = 40  # prepared at a time
_SHARE = 10  # of these, of one client
_MOST_FORMS = 64
_FORMS = 2  # each compiles in a process with limits, and then here
_MOST_EMBEDDINGS = 64
_MOST_DOCUMENTS = 256
_DOCUMENTS = 16  # requests about documents
_ARGUMENTS = re.compile(r"\([^)].*")
_LONGEST_FILE = 1 << 20
_LONGEST_KEY = 512
_MINUTE_S = 60.0
_MOST_MESSAGES = 1000
_THROTTLED = ("uvicorn.error", "asyncio", "kvblend.connections")  # loggers of faults that each connection may repeat
_PORT = re.compile(r":[0-9]*$")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ApiKeys:
    """The known API keys, each with its tenant.

    Args:
        keys: pairs of key and tenant. Keys of the tenant "" share the server's own store; without any key all clients do.

    Raises:
        ConfigError: a key that no header can carry, an invalid tenant name, or one key of two tenants.

    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._tenants = dict[bytes, str]()
        for key, tenant in keys:
            _check_key(key, tenant)
            if self._tenants.setdefault(_digest(key), tenant) != tenant:
                raise ConfigError(
                    f"one API key is given to two tenants, {tenant or 'none'} and another: give each its own"
                )

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    def tenant_of(self, key: str | None) -> str | None:
        """The tenant of a key; None for an unknown key. Digests are looked up: the time says nothing of other keys."""
        return self._tenants.get(_digest(key or "")) if self.required else ""


def read_keys(path: Path) -> list[tuple[str, str]]:
    """Read a file of keys: a key a line, with its tenant behind it if it has one; # starts a comment.

    Raises `ConfigError` for a file that cannot be read or parsed. Warns if other users can read it.
    """
    try:
        text = read_secret(path, "file of API keys", _LONGEST_FILE).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"the file of API keys {path} is not UTF-8 text") from None
    keys = list(_keys_in(text, path))
    if not keys:
        raise ConfigError(
            f"the file of API keys {path} holds none: write a key a line, with its tenant behind it if any"
        )
    return keys


def _keys_in(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if len(words) > 2:
                raise ConfigError(f"a line is `KEY` or `KEY TENANT`; it has {len(words)} words")
            key, tenant = (*words, "")[:2]
            _check_key(key, tenant)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        yield key, tenant


def _check_key(key: str, tenant: str) -> None:
    if not (key.isascii() and key.isprintable() and key.split() == [key] and len(key) <= _LONGEST_KEY):
        raise ConfigError(f"an API key is 1 to {_LONGEST_KEY} printable ASCII characters without spaces")
    check_corpus_name(tenant)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass
class AppState:
    """The application's state, shared by all requests.

    Attributes:
        service: None while it is loading.
        closing: no more requests are accepted.
        questions, forms, embeddings, documents: turns of clients that have questions prepared, the forms of their answers
            compiled, texts embedded, and documents accepted, listed and deleted.

    """

    service: Service | None
    keys: ApiKeys
    limits: RequestLimits
    metrics: Metrics
    closing: bool = False
    tracing: Tracing | None = None
    questions: Turns = field(default_factory=lambda: Turns(_QUESTIONS, _SHARE, _MOST_QUESTIONS))
    forms: Turns = field(default_factory=lambda: Turns(_FORMS, 1, _MOST_FORMS))
    embeddings: Turns = field(default_factory=lambda: Turns(1, 1, _MOST_EMBEDDINGS))
    documents: Turns = field(default_factory=lambda: Turns(_DOCUMENTS, _DOCUMENTS // 4, _MOST_DOCUMENTS))

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits)

    def require_service(self) -> Service:
        """The service. Raises `ApiError` while it is loading, closing or failed."""
        if self.closing:
            raise closing()
        if self.service is None or not self.service.ready:
            raise unavailable("the server is loading its model; try again in a moment", "loading", 2.0)
        if not self.service.engine.alive:
            raise failure_of(EngineFailedError())
        return self.service

    def close(self) -> None:
        """Accept nothing more, and end what has not reached the engine."""
        self.closing = True
        for turns in (self.questions, self.forms, self.embeddings, self.documents):
            turns.close(closing)


def state_of(request: Request) -> AppState:
    """The state of the application that serves this request."""
    state = request.app.state.shared
    assert isinstance(state, AppState)
    return state


def admitted(request: Request) -> str:
    """The tenant of a request, "" without tenants. Raises `ApiError` for an unknown key or a foreign page."""
    state = state_of(request)
    _refuse_foreign_pages(request, state.limits)
    if not (state.keys.required or state.limits.any_host):
        _refuse_foreign_hosts(request)
    tenant = state.keys.tenant_of(_key_of(request))
    if tenant is None:
        raise refuse("the API key is missing or unknown; send Authorization: Bearer KEY", None, "invalid_api_key", 401)
    entry_of(request).tenant = tenant
    return tenant


async def disconnected(request: Request) -> None:
    """Wait until the client leaves; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_of(request: Request) -> str:
    """Who takes turns with others, of an admitted request: a tenant, else the holder of a key, else a peer's address."""
    if tenant := entry_of(request).tenant:
        return f"tenant {tenant}"
    if state_of(request).keys.required:
        return f"key {_digest(_key_of(request) or '').hex()}"
    return f"address {request.client.host if request.client else ''}"


def _key_of(request: Request) -> str | None:
    """OpenAI's header, or Anthropic's."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")


def require_operator(request: Request) -> None:
    """Raise `ApiError` if the request's key belongs to a tenant, for endpoints that concern all tenants."""
    if admitted(request):
        raise _forbidden("this needs an API key without a tenant")


def _refuse_foreign_pages(request: Request, limits: RequestLimits) -> None:
    """Refuse pages of other sites, which run in browsers that can reach this server.

    An API key does not help: a proxy may add one to every request. Sec-Fetch-Site, which no script can set, identifies
    the server's own page behind a proxy that changes Host. Browsers send it over TLS and to loopback.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin is None or origin in limits.origins or headers.get("sec-fetch-site") == "same-origin":
        return
    if origin.lower().partition("://")[2] != headers.get("host", "").lower():
        words = "permit them with --allow-origin, or have the proxy in front of it pass on Host"
        raise _forbidden(f"pages of {shown(origin)} may not ask this server, not with a key either: {words}")


def _refuse_foreign_hosts(request: Request) -> None:
    """Refuse other names than loopback if no key is needed: DNS rebinding would make any page the server's own."""
    if not is_loopback(_PORT.sub("", request.headers.get("host", "")).strip("[]").lower()):
        raise _forbidden("this server answers to localhost alone; give others a key (--api-key)")


def _forbidden(message: str) -> ApiError:
    return refuse(message, None, "forbidden", 403)


def entry_of(request: Request) -> LogEntry:
    """The log entry of a request."""
    entry = request.scope["kvblend.entry"]
    assert isinstance(entry, LogEntry)
    return entry


class RequestLog:
    """Middleware: gives each request an id, logs and counts it, and answers uncaught exceptions."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        entry = scope["kvblend.entry"] = LogEntry(_client_id(scope) or uuid4().hex)
        sent = 0

        async def send_with_id(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", entry.id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            failure = failure_of(error)
            entry.failed(failure.status, failure.code)
            if failure.status >= 500 and not isinstance(error, ApiError):
                log_error(error, entry.id)
            clear_frames(error.__traceback__)  # they hold the body, and a cycle that only the garbage collector ends
            if not sent:
                await failure.response(scope["path"])(scope, receive, send_with_id)
        finally:
            self._note(scope, entry, entry.status or sent)

    def _note(self, scope: Scope, entry: LogEntry, status: int) -> None:
        route = _route(scope)
        seconds = time.monotonic() - entry.begun
        self._metrics.responded(route, status)
        if entry.error:
            self._metrics.refused(entry.error)
        fields = {
            "id": entry.id,
            "method": scope["method"],
            "path": route,
            "status": status,
            "seconds": round(seconds, 4),
        }
        rows = entry.figures.rows if entry.figures is not None else 0
        optional = {"tenant": entry.tenant, "rows": rows, "ttft_s": entry.ttft_s, "error": entry.error}
        LOG.info("request", extra={**fields, **{name: value for name, value in optional.items() if value}})


def _route(scope: Scope) -> str:
    """The path as the application declares it, without ids from the request."""
    routes = scope["app"].routes
    endpoint = scope.get("endpoint")
    return next((route.path for route in routes if isinstance(route, Route) and route.endpoint is endpoint), "other")


def _client_id(scope: Scope) -> str:
    """The id that the client gave its request, "" without a valid one."""
    client_id = Headers(scope=scope).get("x-request-id", "")
    return client_id if _ID.fullmatch(client_id) else ""


def _without_arguments(message: object) -> str:
    """A library's message without quoted values: asyncio adds the arguments of callbacks and further lines."""
    return _ARGUMENTS.sub("", str(message).partition("\n")[0])


class JsonLines(JsonFormatter):
    """Time, level, event and the record's extra fields; of an exception only its type."""

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Fill the line's object."""
        log_data |= {"time": round(record.created, 3), "level": record.levelname.lower()}
        is_ours = record.name == LOG.name
        log_data["event"] = record.getMessage() if is_ours else f"{record.name}: {_without_arguments(record.msg)}"
        if record.exc_info and record.exc_info[0] is not None:
            log_data["exception"] = record.exc_info[0].__name__
        merge_record_extra(record, log_data, reserved=self.reserved_attrs)


class OncePerMinute(logging.Filter):
    """Lets one record of each message pass in a minute. clock: gives seconds, and never goes back, as a record's time may."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._passed = TTLCache[tuple[str, str], bool](_MOST_MESSAGES, _MINUTE_S, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this record passes."""
        kind = (record.name, _without_arguments(record.msg))
        passes = kind not in self._passed
        if passes:
            self._passed[kind] = True
        return passes


def log_to_stderr(*, requests: bool = True) -> None:
    """Write the log to standard error. requests: every request, not only failures."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    libraries = dict.fromkeys(("opentelemetry", "kvblend.retrieval", *_THROTTLED), logging.WARNING)
    for name, level in {LOG.name: logging.INFO if requests else logging.WARNING, **libraries}.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
        logger.filters = [OncePerMinute()] if name in _THROTTLED else []
