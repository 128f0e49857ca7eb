"""The application: routes, the page for people, health, metrics and models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from blend.serve.http import completions, documents, embeddings, messages, responses
from blend.serve.http.errors import Json, failure_of, json_response, refuse
from blend.serve.http.keys import ApiKeys
from blend.serve.http.request_log import RequestLog
from blend.serve.http.state import AppState, admitted, require_operator, state_of
from blend.serve.http.to_requests import ModelNames, unknown_model
from blend.serve.limits import RequestLimits
from blend.serve.metrics import CONTENT_TYPE, Metrics, StoreFigures

if TYPE_CHECKING:
    from blend.serve.service import Service

_PAGE = StaticFiles(packages=[("blend.serve", "page")])
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def make_app(service: Service | None, keys: ApiKeys, limits: RequestLimits, metrics: Metrics) -> Starlette:
    """The ASGI application. `app.state.shared` is its `AppState`; set its `service` when it is loaded."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", completions.chat, methods=["POST"]),
            Route("/v1/completions", completions.text, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
            Route("/v1/embeddings", embeddings.embeddings, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/v1/models/{model:path}", _model),
            Route("/v1/documents", documents.listing),
            Route("/v1/documents", documents.add, methods=["POST"]),
            Route("/v1/documents/{id:path}/retry", documents.retry, methods=["POST"]),
            Route("/v1/documents/{id:path}", documents.get),
            Route("/v1/documents/{id:path}", documents.delete, methods=["DELETE"]),
            Route("/v1/sessions/{session}", documents.delete_session, methods=["DELETE"]),
            Route("/health", _health),
            Route("/ready", _ready),
            Route("/metrics", _metrics),
            Route("/", _page),
            Route("/page/{name}", _page),
        ],
        middleware=[*allowing_origins(limits.origins), Middleware(RequestLog, metrics=metrics)],
        exception_handlers={HTTPException: _no_route, Exception: _failed},
    )
    app.state.shared = AppState(service, keys, limits, metrics)
    return app


def allowing_origins(origins: tuple[str, ...]) -> list[Middleware]:
    """Middleware that lets pages of these origins read answers, refusals too."""
    if not origins:
        return []
    methods = ("GET", "POST", "DELETE")
    readable = ("x-request-id", "retry-after")
    return [
        Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=readable
        )
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer paths and methods that no route takes, in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refused = refuse(f"{request.method} is not for this path; it takes {allowed}", None, "method_not_allowed", 405)
        response = refused.response()
        response.headers["allow"] = allowed
        return response
    raise refuse("there is nothing here; see /v1/models", None, "not_found", error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer what a middleware could not."""
    return failure_of(error).response(request.url.path)


async def _health(request: Request) -> Response:
    """GET /health: 200 while the engine runs, also while the model is loading."""
    service = state_of(request).service
    alive = service is None or service.engine.alive
    return json_response({"status": "ok" if alive else "failed"}, 200 if alive else 503)


async def _ready(request: Request) -> Response:
    """GET /ready: 200 while requests are accepted."""
    state_of(request).require_service()
    return json_response({"status": "ready"})


async def _metrics(request: Request) -> Response:
    """GET /metrics: in Prometheus' text format."""
    require_operator(request)
    state = state_of(request)

    def page() -> bytes:
        if (service := state.service) is None:
            return state.metrics.page()
        return state.metrics.page(service.engine.stats(), StoreFigures.of(service.stores))

    return Response(await run_in_threadpool(page), headers={"content-type": CONTENT_TYPE})


async def _models(request: Request) -> Response:
    """GET /v1/models: the decoder, and the same with each corpus that it can retrieve from."""
    models = await _described(request)
    if "anthropic-version" not in request.headers:
        return json_response({"object": "list", "data": list(models.values())})
    names = list(models)
    data = [_in_anthropics_form(model) for model in models.values()]
    return json_response({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})


async def _model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    name = request.path_params["model"]
    models = await _described(request)
    if name not in models:
        raise unknown_model(name, models)
    model = models[name]
    return json_response(_in_anthropics_form(model) if "anthropic-version" in request.headers else model)


def _in_anthropics_form(model: Json) -> Json:
    created = datetime.fromtimestamp(model["created"], UTC).isoformat()
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}


async def _described(request: Request) -> dict[str, Json]:
    """The models by their names, in OpenAI's fields, and vLLM's `max_model_len`: the longest prompt."""
    tenant = admitted(request)
    service = state_of(request).require_service()
    names = (await run_in_threadpool(ModelNames.of, service, tenant)).names
    vllm = {"root": service.model, "parent": None, "max_model_len": service.context_length}
    model = {"object": "model", "created": service.created, "owned_by": "kvblend", **vllm}
    return {name: {"id": name, **model} for name in names}


async def _page(request: Request) -> Response:
    """GET / and /page/{name}: the page, and a file that it loads."""
    name = request.path_params.get("name", "index.html")
    response = await _PAGE.get_response(name, request.scope)
    response.headers.update(_PAGE_HEADERS)
    if name.endswith(".js"):  # the system's table may call it plain text, which browsers do not run
        response.headers["content-type"] = "text/javascript; charset=utf-8"
    return response
