"""The models that there are to ask: the decoder's, and the same with each corpus that it can retrieve from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from blend.limits import shown
from blend.serve.http.auth import admitted
from blend.serve.http.errors import json_response, refuse
from blend.serve.http.hall import hall_of
from blend.serve.http.parsing import Offered

if TYPE_CHECKING:
    from blend.serve.service import Service


async def models(request: Request) -> Response:
    """GET /v1/models."""
    names, service = await _names(request), hall_of(request).open()
    return json_response({"object": "list", "data": [_model(name, service) for name in names]})


async def model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    name, names = request.path_params["model"], await _names(request)
    if name not in names:
        there = ", ".join(names)
        raise refuse(f"the model {shown(name)} does not exist; there are: {there}", "model", "model_not_found", 404)
    return json_response(_model(name, hall_of(request).open()))


async def _names(request: Request) -> tuple[str, ...]:
    tenant, service = admitted(request), hall_of(request).open()
    return (await run_in_threadpool(lambda: Offered(service.model, tenant, service.corpora(tenant)))).names


def _model(name: str, service: Service) -> dict[str, Any]:
    """OpenAI's fields, and vLLM's, by which clients learn how long a prompt may be. created: when the server was started."""
    theirs = {"root": service.model, "parent": None, "max_model_len": service.context_length}
    return {"id": name, "object": "model", "created": service.created, "owned_by": "kvblend", **theirs}
