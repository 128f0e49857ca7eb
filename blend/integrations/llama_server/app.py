"""The proxy's application: prompts are blended, and everything is passed on to llama-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from blend.integrations.llama_server.prompt_ids import PATHS
from blend.integrations.llama_server.proxy import ClientRequest, Passed, Proxy
from blend.integrations.llama_server.upstream import UpstreamError, replied_headers
from blend.serve.http.app import allowing_origins
from blend.serve.http.errors import ApiError, closing, ended_early
from blend.serve.http.keys import ApiKeys
from blend.serve.http.request_log import RequestLog
from blend.serve.http.state import AppState, admitted, disconnected, holder_of, state_of
from blend.serve.http.tracing import entry_of
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_OPEN = ("/health", "/v1/health")  # without a key, as in llama-server
_TAIL = 1 << 13  # bytes


def make_app(proxy: Proxy, keys: ApiKeys, limits: RequestLimits) -> Starlette:
    """The ASGI application. `app.state.shared` is its `AppState`."""
    metrics = Metrics()
    app = Starlette(
        routes=[
            *(Route(path, partial(_answer), methods=["POST"]) for path in PATHS),  # one each: the log names it
            Route("/{path:path}", _pass_on, methods=_METHODS),
        ],
        middleware=[*allowing_origins(limits.origins), Middleware(RequestLog, metrics=metrics)],
        exception_handlers={UpstreamError: _unreachable},
    )
    app.state.shared = AppState(None, keys, limits, metrics)
    app.state.proxy = proxy
    return app


async def _unreachable(request: Request, error: Exception) -> Response:
    """Answer in place of a llama-server that does not."""
    entry_of(request).error = "upstream_unreachable"
    failure = ApiError(502, f"{error}", "upstream_unreachable", None, "server_error")
    return failure.response(request.url.path)


async def _answer(request: Request) -> Response:
    """A request that begins an answer."""
    client_request = await _received(request)
    answering = asyncio.ensure_future(_proxy_of(request).answer(client_request))
    leaving = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ended_early("cancelled")
        proxy, passed = _proxy_of(request), answering.result()
        return RelayedReply(passed.reply, partial(proxy.ended, passed), passed.said)
    finally:
        leaving.cancel()
        await _given_up(answering)


async def _given_up(answering: asyncio.Future[Passed]) -> None:
    """End what is not done."""
    if not answering.done():
        answering.cancel()
        await asyncio.wait({answering})


async def _pass_on(request: Request) -> Response:
    """Any other request."""
    reply = await _proxy_of(request).pass_on(await _received(request))
    return RelayedReply(reply, lambda _: reply.aclose())


class RelayedReply(StreamingResponse):
    """llama-server's reply, byte by byte. If its client leaves, llama-server's work ends, too.

    Args:
        reply: its body is still to be read.
        on_end: called with the last bytes once it was read, or given up.
        headers: more of them.

    """

    def __init__(
        self,
        reply: httpx.Response,
        on_end: Callable[[bytes], Awaitable[None]],
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(self._parts(reply), reply.status_code)
        self.raw_headers = [*replied_headers(reply), *headers]
        self._on_end = on_end
        self._tail = b""

    async def _parts(self, reply: httpx.Response) -> AsyncIterator[bytes]:
        async for part in reply.aiter_raw():
            self._tail = (self._tail + part)[-_TAIL:]
            yield part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._on_end(self._tail)))


async def _received(request: Request) -> ClientRequest:
    """A request of a known client, with its body. Raises `ApiError`."""
    state = state_of(request)
    if state.closing:
        raise closing()
    path = request.scope["path"]
    if path not in _OPEN and request.method != "OPTIONS":
        admitted(request)
    with state.bodies.receiving(request, uploads=path not in PATHS) as received:
        body = await received.body()
    scope = request.scope
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    return ClientRequest(entry_of(request).id, request.method, path, target, scope["headers"], body, holder_of(request))


def _proxy_of(request: Request) -> Proxy:
    proxy = request.app.state.proxy
    assert isinstance(proxy, Proxy)
    return proxy
