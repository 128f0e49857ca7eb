"""The log: one JSON object a line, without any text of prompts or answers."""

from __future__ import annotations

import logging
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pythonjsonlogger.core import merge_record_extra
from pythonjsonlogger.json import JsonFormatter
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.serve.failures import LOG, log_error
from blend.serve.http.errors import ApiError, Failure, failure_of
from blend.serve.metrics import Metrics

_ARGUMENTS = re.compile(r"\([^)].*")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class LogEntry:
    """What the log gets of one request when it ends.

    status: overrides the status that was sent. begun: arrival, by `time.monotonic`.
    """

    id: str
    tenant: str = ""
    rows: int | None = None
    ttft_s: float | None = None
    status: int | None = None
    error: str = ""
    begun: float = field(default_factory=time.monotonic)

    def failed(self, failure: Failure) -> None:
        """The request ended with a failure."""
        self.status, self.error = failure.status, failure.code


def entry_of(request: Request) -> LogEntry:
    """The log entry of a request."""
    entry = request.scope["kvblend.entry"]
    assert isinstance(entry, LogEntry)
    return entry


class RequestLog:
    """Middleware: gives each request an id, logs and counts it, and answers uncaught exceptions."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
            entry.failed(failure)
            if failure.status >= 500 and not isinstance(error, ApiError):
                log_error(error, entry.id)
            if not sent:
                await failure.response(scope, receive, send_with_id)
        finally:
            self._note(scope, entry, entry.status or sent, time.monotonic() - entry.begun)

    def _note(self, scope: Scope, entry: LogEntry, status: int, seconds: float) -> None:
        route = _route(scope)
        self._metrics.responded(route, status)
        if entry.error:
            self._metrics.refused(entry.error)
        fields = {"id": entry.id, "method": scope["method"], "path": route, "status": status}
        more = {"tenant": entry.tenant, "rows": entry.rows, "ttft_s": entry.ttft_s, "error": entry.error}
        given = {name: value for name, value in more.items() if value}
        LOG.info("request", extra={**fields, "seconds": round(seconds, 4), **given})


def _route(scope: Scope) -> str:
    """The path as the application declares it, without ids from the request."""
    routes, endpoint = scope["app"].routes, scope.get("endpoint")
    return next((one.path for one in routes if isinstance(one, Route) and one.endpoint is endpoint), "other")


def _client_id(scope: Scope) -> str:
    """The id that the client gave its request, "" without a valid one."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if _ID.fullmatch(given) else ""


def _without_arguments(message: object) -> str:
    """A library's message without what it quotes: asyncio adds the arguments of callbacks and further lines."""
    return _ARGUMENTS.sub("", str(message).partition("\n")[0])


class JsonLines(JsonFormatter):
    """Time, level, event and the record's extra fields; of an exception only its type."""

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Fill the line's object."""
        log_data |= {"time": round(record.created, 3), "level": record.levelname.lower()}
        own = record.name == LOG.name
        log_data["event"] = record.getMessage() if own else f"{record.name}: {_without_arguments(record.msg)}"
        if record.exc_info and record.exc_info[0] is not None:
            log_data["exception"] = record.exc_info[0].__name__
        merge_record_extra(record, log_data, reserved=self.reserved_attrs)


def log_to_stderr(*, requests: bool = True) -> None:
    """Write the log to standard error. requests: every request, not only failures."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    others = dict.fromkeys(("uvicorn.error", "asyncio", "opentelemetry", "kvblend.retrieval"), logging.WARNING)
    for name, level in {LOG.name: logging.INFO if requests else logging.WARNING, **others}.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
