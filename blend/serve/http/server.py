"""Listen at one address until a signal ends the server gracefully."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from blend.errors import ConfigError
from blend.serve.http.connections import ACCEPTED_AT_ONCE, HttpConnection
from blend.serve.http.state import AppState

_BACKLOG = 512
_LAST_WORDS_S = 5.0  # for streams to send their last event
_POLL_S = 0.05


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises `ConfigError` if the address is not available."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is no address of this machine ({error})") from None
    family, kind, protocol, _, address = addresses[0]
    place = socket.socket(family, kind, protocol)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
        place.listen(_BACKLOG)  # bind alone succeeds even if another process listens
    except OSError as error:
        place.close()
        raise ConfigError(_taken(host, port, error)) from None
    return place


def url_of(place: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = place.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves an application until SIGTERM, SIGINT or `stop`.

    It then refuses requests with 503, lets running answers finish for `grace_s` seconds, and closes the socket. Longer answers
    end with an error. A second signal ends them at once. on_started: called when it listens; must not block.
    """

    def __init__(
        self, app: Starlette, place: socket.socket, *, grace_s: float, on_started: Callable[[], None] = lambda: None
    ) -> None:
        state = app.state.shared
        assert isinstance(state, AppState)
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=round(_LAST_WORDS_S),
            )
        )
        self.state = state
        self._place = place
        self._grace_s = grace_s
        self._on_started = on_started

    def serve_until_stopped(self) -> None:
        """Serve; returns when the server has stopped."""
        self.run(sockets=[self._place])

    def stop(self) -> None:
        """Stop as SIGTERM does; any thread may call it."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; uvicorn's own handler ignores a second SIGTERM, and raises signals again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and call `on_started`."""
        await super().startup(sockets)
        self._place.listen(_BACKLOG)  # asyncio's backlog is also how many connections it accepts at once
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully; uvicorn's part closes the socket, so it comes last."""
        self.state.close()
        until = time.monotonic() + self._grace_s
        closing = asyncio.create_task(asyncio.to_thread(self._close, self._grace_s))
        while not self.force_exit and (not closing.done() or (self.server_state.tasks and time.monotonic() < until)):
            await asyncio.sleep(_POLL_S)
        if self.force_exit:
            await asyncio.to_thread(self._close, 0.0)
        await super().shutdown(sockets)
        await closing

    def _close(self, finish_s: float) -> None:
        if self.state.service is not None:
            self.state.service.close(finish_s)


def _taken(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: choose another one with --port (0 takes a free one)"
    return f"cannot listen at port {port} of {host} ({error.strerror}): choose another with --host and --port"
