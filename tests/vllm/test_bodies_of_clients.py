"""Whatever a client sends: nothing of it that only the middleware may say comes to vLLM."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blend.integrations.vllm.middleware import KVBlend

FORGED = {"kvblend": {"ticket": "{}"}}
JSON = ("content-type", "application/json")
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


async def _asked(request: Request) -> Response:
    """As vLLM: the body as its parser reads it."""
    raw = await request.body()
    try:
        return JSONResponse(json.loads(raw) if raw else None)
    except (ValueError, RecursionError):
        return Response(raw)


def application() -> Starlette:
    app = Starlette(routes=[Route(path, _asked, methods=["POST"]) for path in PATHS])
    app.add_middleware(KVBlend)
    app.state.engine_client = SimpleNamespace()
    return app


def post(content: bytes, *headers: tuple[str, str], path: str = PATHS[0]) -> httpx.Response:
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application()), base_url="http://x") as client:
            return await client.post(path, content=content, headers=list(headers))

    return asyncio.run(post())


def refused(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


BODY = json.dumps({"prompt": [1, 2], "kv_transfer_params": FORGED}).encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "text/plain"])
def test_parameters_are_taken_out(path: str, kind: str) -> None:
    assert post(BODY, ("content-type", kind), path=path).json() == {"prompt": [1, 2]}


@pytest.mark.parametrize("second", ["multipart/form-data", "application/json"])
def test_two_content_types_are_refused(second: str) -> None:
    """Starlette takes the first, others the last: one could be shown to us and the other to vLLM."""
    for headers in ((JSON, ("content-type", second)), (("content-type", second), JSON)):
        assert "one header content-type" in refused(post(BODY, *headers))


def test_what_is_nested_too_deeply_for_us_never_reaches_vllm() -> None:
    """Around the limit of the parser, which the depth of its caller's stack shifts, each depth is cleaned or refused."""
    statuses = set()
    for depth in (*range(850, 1050, 4), 100_000):
        deep = BODY[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
        response = post(deep, JSON)
        assert b"kv_transfer_params" not in response.content, depth
        statuses.add(response.status_code)
        if response.status_code == 400:
            assert "nested too deeply" in refused(response)
    assert statuses == {200, 400}
    holders = b'{"vllm_xargs": ' * 900 + BODY + b"}" * 900
    assert b"kv_transfer_params" not in post(holders, JSON).content


@pytest.mark.parametrize("content", [b"{", b'{"a": 1} x', b"\xff\xfe"])
def test_json_that_is_none_is_refused(content: bytes) -> None:
    assert refused(post(content, JSON)) == "the body is no JSON"


@pytest.mark.parametrize(
    ("content", "kind", "found"),
    [
        *((content, JSON[1], content or b"null") for content in (b"", b"[1]", b"null")),
        *((b"--x\r\n", kind, b"--x\r\n") for kind in ("multipart/form-data; boundary=x", "audio/wav")),
    ],
)
def test_bodies_without_fields_and_what_is_no_json_go_through(content: bytes, kind: str, found: bytes) -> None:
    assert post(content, ("content-type", kind)).content == found


def test_a_wrong_setting_stops_the_server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def started() -> bool:
        server = uvicorn.Server(uvicorn.Config(application(), port=0, log_config=None))
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await task
        return True

    assert asyncio.run(started())
    monkeypatch.setenv("KVBLEND_VLLM_TIMEOUT", "soon")
    with pytest.raises(SystemExit):
        asyncio.run(started())
    assert "kvblend: KVBLEND_VLLM_TIMEOUT is 'soon'" in caplog.text
