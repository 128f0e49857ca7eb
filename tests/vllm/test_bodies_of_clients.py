"""Whatever a client sends: nothing of it that only the middleware may say comes to vLLM."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from tests.vllm.applications import application, engine_of

FORGED = {"kvblend": {"ticket": "{}"}}
JSON = ("content-type", "application/json")
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


def post(content: bytes, *headers: tuple[str, str], path: str = PATHS[0]) -> httpx.Response:
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(application(engine_of(None, "/nonexistent"))), base_url="http://x"
        ) as client:
            return await client.post(path, content=content, headers=list(headers))

    return asyncio.run(post())


def refused(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


BODY = json.dumps({"prompt": [1, 2], "kv_transfer_params": FORGED}).encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "text/plain"])
def test_parameters_are_taken_out(path: str, kind: str) -> None:
    assert post(BODY, ("content-type", kind), path=path).json() == {"asked": {"prompt": [1, 2]}}


@pytest.mark.parametrize("second", ["multipart/form-data", "application/json"])
def test_two_content_types_are_refused(second: str) -> None:
    """Starlette takes the first, others the last: one could be shown to us and the other to vLLM."""
    for headers in ((JSON, ("content-type", second)), (("content-type", second), JSON)):
        assert "one header content-type" in refused(post(BODY, *headers))


@pytest.mark.parametrize("path", PATHS)
def test_what_is_nested_too_deeply_for_us_never_reaches_vllm(path: str) -> None:
    """Around the limit of the parser, which the depth of its caller's stack shifts, each depth is cleaned or refused."""
    statuses = set()
    for depth in (*range(850, 1050, 4), 100_000):
        deep = BODY[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
        response = post(deep, JSON, path=path)
        assert b"kv_transfer_params" not in response.content, depth
        statuses.add(response.status_code)
        if response.status_code == 400:
            assert "nested too deeply" in refused(response)
    assert statuses == {200, 400}
    holders = b'{"vllm_xargs": ' * 900 + BODY + b"}" * 900
    assert b"kv_transfer_params" not in post(holders, JSON, path=path).content


@pytest.mark.parametrize("content", [b"{", b'{"a": 1} x', b"\xff\xfe"])
def test_json_that_is_none_is_refused(content: bytes) -> None:
    assert refused(post(content, JSON)) == "the body is no JSON"


@pytest.mark.parametrize(
    ("content", "kind", "found"),
    [
        *((content, JSON[1], b'{"asked":%s}' % (content or b"null")) for content in (b"", b"[1]", b"null")),
        *((b"--x\r\n", kind, b"--x\r\n") for kind in ("multipart/form-data; boundary=x", "audio/wav")),
    ],
)
def test_bodies_without_fields_and_what_is_no_json_go_through(content: bytes, kind: str, found: bytes) -> None:
    assert post(content, ("content-type", kind)).content == found


@pytest.mark.parametrize("field", ["kvblend", "documents"])
def test_routes_that_make_no_prompt_here_refuse_the_fields(field: str) -> None:
    content = json.dumps({"model": "m", "input": "Hello", field: {"retrieve": {}}}).encode()
    words = refused(post(content, JSON, path="/v1/responses"))
    assert words == "/v1/responses takes no field of kvblend; use /v1/chat/completions or /v1/completions"


def test_a_rerank_keeps_its_documents() -> None:
    content = json.dumps({"query": "q", "documents": ["a"]}).encode()
    assert post(content, JSON, path="/v1/rerank").json()["asked"] == {"query": "q", "documents": ["a"]}


def test_a_server_without_the_connector_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    async def started(engine: Any) -> bool:
        server = uvicorn.Server(uvicorn.Config(application(engine), port=0, log_config=None))
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await task
        return True

    assert asyncio.run(started(engine_of(None, "/nonexistent")))
    with pytest.raises(SystemExit):
        asyncio.run(started(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None))))
    assert "kvblend: this vLLM has no connector of kvblend; add --kv-transfer-config" in caplog.text
