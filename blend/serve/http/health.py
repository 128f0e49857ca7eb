"""For whoever watches the server: whether it lives, whether it takes requests, what it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from blend.serve.http.auth import operator
from blend.serve.http.errors import DoorError, json_response
from blend.serve.http.hall import hall_of
from blend.serve.prompt_metrics import CONTENT_TYPE
from blend.serve.store_metrics import StoreFigures

if TYPE_CHECKING:
    from blend.serve.engine import Holding
    from blend.serve.service import Service


async def health(request: Request) -> Response:
    """GET /health: 200 while the process lives and its engine runs."""
    service = hall_of(request).service
    alive = service is None or service.alive
    return json_response({"status": "ok" if alive else "failed"}, 200 if alive else 503)


async def ready(request: Request) -> Response:
    """GET /ready: 200 when requests are taken."""
    try:
        hall_of(request).open()
    except DoorError as error:
        return error.failure.response
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """GET /metrics: in Prometheus' text format."""
    operator(request)
    hall = hall_of(request)
    page = await run_in_threadpool(lambda: hall.metrics.page(*_figures(hall.service)))
    return Response(page, headers={"content-type": CONTENT_TYPE})


def _figures(service: Service | None) -> tuple[Holding | None, StoreFigures]:
    return (None, StoreFigures()) if service is None else (service.engine.holding(), StoreFigures.of(service.stores))
