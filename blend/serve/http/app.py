"""The application: its routes, and what stands around all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from blend.serve.http import completions, documents, health, models, pages
from blend.serve.http.errors import refuse
from blend.serve.http.hall import DoorLimits, Hall
from blend.serve.http.log import Accounts
from blend.serve.metrics import Metrics
from blend.serve.tenants import Tenants

if TYPE_CHECKING:
    from blend.serve.service import Service


def make_app(service: Service | None, tenants: Tenants, limits: DoorLimits, metrics: Metrics) -> Starlette:
    """The server's application. `app.state.hall` holds what it stands in: a service that is loaded later is put there."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", completions.chat, methods=["POST"]),
            Route("/v1/completions", completions.text, methods=["POST"]),
            Route("/v1/models", models.models),
            Route("/v1/models/{model:path}", models.model),
            Route("/v1/documents", documents.listing),
            Route("/v1/documents", documents.add, methods=["POST"]),
            Route("/v1/documents/{id:path}", documents.get),
            Route("/v1/documents/{id:path}", documents.delete, methods=["DELETE"]),
            Route("/health", health.health),
            Route("/ready", health.ready),
            Route("/metrics", health.metrics),
            Route("/", pages.index),
            Route("/page/{name}", pages.file),
        ],
        middleware=[*_for_pages(limits.origins), Middleware(Accounts, metrics=metrics)],
        exception_handlers={HTTPException: _no_route},
    )
    app.state.hall = Hall(service, tenants, limits, metrics)
    return app


def _for_pages(origins: tuple[str, ...]) -> list[Middleware]:
    """What lets browsers give answers, refusals too, to pages of these origins."""
    if not origins:
        return []
    methods, readable = ("GET", "POST", "DELETE"), ("x-request-id", "retry-after")
    return [
        Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=readable
        )
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    """What no route takes, in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = refuse(f"{request.method} is not for this path; it takes {allowed}", None, "method_not_allowed", 405)
        answer = response.failure.response
        answer.headers["allow"] = allowed
        return answer
    raise refuse("there is nothing here; see /v1/models", None, "not_found", error.status_code)
