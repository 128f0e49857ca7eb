"""What happened, one JSON object a line, without anybody's text: what people ask and are answered is not for the log."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend.serve.faults import LOG, log_error
from blend.serve.http.errors import DoorError, Failure, failure_of
from blend.serve.metrics import Metrics

_ARGUMENTS = re.compile(r"\([^)].*")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class Entry:
    """What is noted of one request while it runs.

    status: what it came to, if not what was sent. begun: when it came, by the monotonic clock.
    """

    id: str
    tenant: str = ""
    rows: int | None = None
    ttft_s: float | None = None
    status: int | None = None
    error: str = ""
    begun: float = field(default_factory=time.monotonic)

    def failed(self, failure: Failure) -> None:
        """It ended with a failure."""
        self.status, self.error = failure.status, failure.code


def entry_of(request: Request) -> Entry:
    """The entry of a request."""
    entry = request.scope["kvblend.entry"]
    assert isinstance(entry, Entry)
    return entry


class Accounts:
    """Around the application: gives each request an id, logs and counts it, and answers for what nobody caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = scope["kvblend.entry"] = Entry(_given_id(scope) or uuid4().hex)
        sent = 0

        async def noting(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", entry.id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            failure = failure_of(error)
            entry.failed(failure)
            if failure.status >= 500 and not isinstance(error, DoorError):  # what is told on purpose is in the entry
                log_error(error, entry.id)
            if not sent:
                await failure.response(scope, receive, noting)
        finally:
            self._note(scope, entry, entry.status or sent, time.monotonic() - entry.begun)

    def _note(self, scope: Scope, entry: Entry, status: int, seconds: float) -> None:
        route = _route(scope)
        self._metrics.responded(route, status)
        if entry.error:
            self._metrics.refused(entry.error)
        told = {"method": scope["method"], "path": route, "status": status, "seconds": round(seconds, 4)}
        more = {"tenant": entry.tenant, "rows": entry.rows, "ttft_s": entry.ttft_s, "error": entry.error}
        LOG.info("request", extra={"told": {"id": entry.id, **told, **{k: v for k, v in more.items() if v}}})


def _route(scope: Scope) -> str:
    """The path as the application knows it, without anybody's ids."""
    routes, endpoint = scope["app"].routes, scope.get("endpoint")
    return next((one.path for one in routes if isinstance(one, Route) and one.endpoint is endpoint), "other")


def _given_id(scope: Scope) -> str:
    """The id that the client gave its request, "" if it gave none that can be one."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if _ID.fullmatch(given) else ""


def _kind(message: object) -> str:
    """What a library's message begins with: asyncio writes out the arguments of a callback, and more in further lines."""
    return _ARGUMENTS.sub("", str(message).partition("\n")[0])


class _Lines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, event and what was told of it; an exception by its type alone."""
        told: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        told["event"] = record.getMessage() if record.name == LOG.name else f"{record.name}: {_kind(record.msg)}"
        if record.exc_info and record.exc_info[0] is not None:
            told["exception"] = record.exc_info[0].__name__
        return json.dumps({**told, **getattr(record, "told", {})})


def log_to_stderr(*, requests: bool = True) -> None:
    """Write what happens to standard error. requests: each of them, not only what fails."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    others = dict.fromkeys(("uvicorn.error", "asyncio", "opentelemetry", "kvblend.retrieval"), logging.WARNING)
    for name, level in {LOG.name: logging.INFO if requests else logging.WARNING, **others}.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
