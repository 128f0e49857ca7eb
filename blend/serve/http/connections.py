"""Connections: how many there may be, how long each part of a request may take, and refusals of what is no request."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import h11
from starlette.applications import Starlette
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from blend.serve.http.errors import ApiError, refuse, unavailable
from blend.serve.http.framing import RequestHead, RequestReader, invalid
from blend.serve.http.state import AppState

ACCEPTED_AT_ONCE = 4
"""Connections accepted before the first of them can be refused."""

_MOST_DESCRIPTORS = 16_384
_RESERVE = 8  # one of so many connections is left to health checks
_MONITORING = frozenset({"/health", "/ready", "/metrics"})
_UNREAD_S = 1.0  # of an answer that is not read, before it makes room
_FOLLOW_S = 0.005  # a request that comes so soon behind an answer is one of a series
_MOST_IN_SERIES = 64  # before the connection rests after each
_STEP_S = 0.0002  # what a small step costs the event loop, with the tasks that it wakes
_REST = 8  # times the cost of a step: what a connection rests behind it
_LOG = logging.getLogger("kvblend.connections")


def _used(limit: int) -> int:
    """How many of so many files the process would use."""
    return _MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, _MOST_DESCRIPTORS)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, at most 16,384: many systems start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _used(soft) < _used(hard):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (_used(hard), hard))


def most_connections() -> int:
    """Half of the open files that the process may have; the store and the model need the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _used(soft) // 2


class HttpConnection(H11Protocol):
    """One connection: reads one request at a time, each part within a time, and rests if it keeps the event loop busy.

    If there are too many connections, it takes the place of the oldest idle one. If there are too many requests, the slowest
    body or the slowest reader makes room; else the new request gets 503, unless it is a health check.
    """

    connections: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection."""
        state = cast(Starlette, self.config.app).state.shared
        assert isinstance(state, AppState)
        self.state = state
        self.since = time.monotonic()
        self.unread_since: float | None = None
        self._reader = RequestReader()
        self._path = ""
        self._answered_at = 0.0
        self._series = 0  # requests, each of which came at once behind the answer to the one before
        self._refused = False
        self._resting: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        if len(self.connections) >= most_connections():
            self._make_room()
        super().connection_made(transport)
        self._set_deadline(state.limits.head_s, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection's timers."""
        self._cancel_deadline()
        self.resume_writing()
        if self._resting is not None:
            self._resting.cancel()
            self._end_rest()
        super().connection_lost(exc)

    @property
    def has_request(self) -> bool:
        """Whether a request waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete and not self._refused

    # Reading

    def data_received(self, data: bytes) -> None:
        """Read what has come, unless an earlier request waits for its answer."""
        if self._refused:
            return  # the client reads the refusal only after it has sent everything
        self._cancel_keep_alive()
        if self._reader.is_idle and not self.has_request:
            self._set_deadline(self.state.limits.head_s, self._end_late_head)
        self._reader.add(data)
        self._read()

    def _read(self) -> None:
        """Pass on the heads and bodies that have come."""
        try:
            while not (self._resting or self._refused or self.transport.is_closing()) and self._step():
                pass
        except ApiError as error:
            self.refuse(error)
        self._set_reading()

    def _step(self) -> bool:
        """Pass on a head or a part of a body; whether there may be more."""
        reader = self._reader
        if reader.in_body:
            return self._pass_on_body()
        if self.has_request:
            return False
        self._path = reader.path
        head = reader.head()
        if head is None:
            return False
        self._begin(head)
        return True

    def _begin(self, head: RequestHead) -> None:
        """Begin a request, if there is a place for it."""
        self._cancel_deadline()
        follows = self.loop.time() - self._answered_at < _FOLLOW_S
        self._series = self._series + 1 if follows else 0
        if head.path not in _MONITORING:
            self._require_place()
        self._pass_on(head.raw)

    def _pass_on_body(self) -> bool:
        begun = time.perf_counter()
        part = self._reader.body_part()
        self._pass_on(part)
        if part and self._reader.in_pieces:
            self._rest(max(_STEP_S, time.perf_counter() - begun))
        if self._reader.in_body:
            return self._reader.has_more
        if not self.has_request:
            self._set_deadline(self.timeout_keep_alive, self._close)  # this was the rest of an answered request
        return True

    def _pass_on(self, data: bytes) -> None:
        if data:
            self.conn.receive_data(data)
            self.handle_events()

    def _set_reading(self) -> None:
        """Read on, unless the connection rests or has sent more than the request that waits for its answer."""
        if self._resting or (self.has_request and not self._reader.in_body and not self._reader.is_idle):
            self.transport.pause_reading()
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        """Read on: the rest of the body, or the next request."""
        super().on_response_complete()
        self._answered_at = self.loop.time()
        self._watch_unread()
        if self.transport.is_closing():
            return
        if self._reader.in_body:
            self._set_deadline(self.state.limits.head_s, self._close)
        elif not self._reader.is_idle:
            self._cancel_keep_alive()
            self._set_deadline(self.state.limits.head_s, self._end_late_head)
        if self._series > _MOST_IN_SERIES:
            self._rest(_STEP_S)
        self.loop.call_soon(self._read)

    def _rest(self, cost_s: float) -> None:
        """Read nothing for a while. The more connections rest, the longer: together they take a small share of the time."""
        if self._resting is None:
            self.state.resting += 1
            self._resting = self.loop.call_later(cost_s * _REST * self.state.resting, self._end_rest)

    def _end_rest(self) -> None:
        self._resting = None
        self.state.resting -= 1
        self._answered_at = self.loop.time()  # what waited meanwhile belongs to the series
        self._read()

    # Answering

    def pause_writing(self) -> None:
        """Wait until the client has read more of its answer, for a while."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Go on with the answer."""
        super().resume_writing()
        self.unread_since = None
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    def _watch_unread(self) -> None:
        """Close the connection if the client does not read what waits for it."""
        waiting = self.transport.get_write_buffer_size()
        if waiting and self._unread_deadline is None:
            self.unread_since = self.unread_since or time.monotonic()
            self._unread_bytes = waiting
            self._unread_deadline = self.loop.call_later(self.state.limits.unread_s, self._end_unread)

    def _end_unread(self) -> None:
        self._unread_deadline = None
        waiting = self.transport.get_write_buffer_size()
        if waiting > self._unread_bytes / 2:
            _LOG.warning("answers that their clients do not read are given up")
            self.transport.abort()
        elif waiting:
            self._watch_unread()
        else:
            self.unread_since = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what the HTTP library cannot read."""
        self.refuse(invalid(msg))

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, and close the connection when the client has read it."""
        self._refused = True
        self._cancel_keep_alive()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            self.state.metrics.responded("other", error.status)
            self.state.metrics.refused(error.code)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write(error.response(self._path))
            self._set_deadline(self.state.limits.head_s, self.transport.abort)
            with suppress(OSError):  # the client has gone
                self.transport.write_eof()
        else:
            self.transport.abort()

    def _write(self, response: Response) -> None:
        headers = [*self.server_state.default_headers, *response.raw_headers]
        reason = STATUS_PHRASES[response.status_code]
        head = h11.Response(status_code=response.status_code, headers=headers, reason=reason)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    # Places and times

    def _make_room(self) -> None:
        """Close the oldest connection without a request."""
        idle = filter(_is_idle, self.connections)
        oldest = min(idle, key=lambda connection: connection.since, default=None) or self._slowest_reader()
        if oldest is not None:
            oldest.transport.abort()
            _LOG.warning("more connections than open files allow: idle ones are closed")

    def _require_place(self) -> None:
        """Make room for a request. Raises `ApiError` if all places are taken by requests that are being answered."""
        most = most_connections()
        if len(self.tasks) < most - most // _RESERVE or self.state.bodies.end_slowest():
            return
        if (reader := self._slowest_reader()) is not None:
            reader.transport.abort()
            return
        raise unavailable("the server is answering as many requests as it may have connections").and_close()

    def _slowest_reader(self) -> HttpConnection | None:
        """The connection whose client has left its answer unread for the longest time, if that is a while."""
        before = time.monotonic() - _UNREAD_S
        readers = (connection for connection in self.connections if (connection.unread_since or before) < before)
        return min(readers, key=lambda connection: connection.unread_since, default=None)

    def _set_deadline(self, seconds: float, end: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, end)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_keep_alive(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _close(self) -> None:
        self.transport.close()

    def _end_late_head(self) -> None:
        self.refuse(refuse("the request's head did not come in time", None, "timeout", 408).and_close())


def _is_idle(connection: HttpConnection) -> bool:
    return not connection.has_request and not connection.transport.is_closing()
