"""A small application in place of vLLM's server, with the middleware in front of it."""

import json
from types import SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from blend.integrations.vllm.middleware import KVBlend

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/responses", "/v1/rerank", "/invocations", "/inference/v1/generate")
KEY = "Bearer key"


def engine_of(tokenizer: Any, store: str, **model: Any) -> Any:
    """vLLM's client of an engine with the connector. model: what vLLM knows of its model."""
    transfer = SimpleNamespace(kv_connector_extra_config={"store": store}, engine_id="an engine")
    return SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
        vllm_config=SimpleNamespace(kv_transfer_config=transfer, model_config=SimpleNamespace(**model)),
    )


async def _asked(request: Request) -> Response:
    """What it was asked, once the key is right: as vLLM, it looks at the key first and then reads the body."""
    if request.headers.get("authorization", KEY) != KEY:
        return Response(status_code=401)
    raw = await request.body()
    try:
        body = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return Response(raw)
    if not (isinstance(body, dict) and body.get("stream")):
        return JSONResponse({"asked": body})

    async def events() -> Any:
        yield f"data: {json.dumps({'asked': body})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def application(engine: Any) -> Starlette:
    app = Starlette(routes=[Route(path, _asked, methods=["POST"]) for path in PATHS])
    app.add_middleware(KVBlend)
    app.state.engine_client = engine
    return app
