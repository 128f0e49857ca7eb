"""The log of requests: one JSON object a line, without any text of prompts or answers."""

from __future__ import annotations

import logging
import re
import sys
import time
from asyncio import CancelledError
from collections.abc import Callable
from traceback import clear_frames
from typing import Any
from uuid import uuid4

from cachetools import TTLCache
from pythonjsonlogger.core import merge_record_extra
from pythonjsonlogger.json import JsonFormatter
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.serve.failures import LOG, log_error
from blend.serve.http.errors import ApiError, closing, failure_of
from blend.serve.http.tracing import LogEntry
from blend.serve.metrics import Metrics

_ARGUMENTS = re.compile(r"\([^)].*")
_MINUTE_S = 60.0
_MOST_MESSAGES = 1000
_THROTTLED = ("uvicorn.error", "asyncio", "kvblend.connections")  # loggers of faults that each connection may repeat
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestLog:
    """Middleware: gives each request an id, logs and counts it, and answers uncaught exceptions and the server's end."""

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
        except (Exception, CancelledError) as error:
            failure = failure_of(error) if isinstance(error, Exception) else closing()
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
