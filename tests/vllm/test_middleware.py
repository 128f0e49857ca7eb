"""What vLLM's server is asked instead of what the client asked; an application that tells it stands for vLLM."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from blend.config import BlendConfig, CorpusConfig
from blend.integrations.vllm import gate as gates
from blend.integrations.vllm import network, wire
from blend.integrations.vllm.desk import CHECKED_ROWS, Desk
from blend.integrations.vllm.middleware import KVBlend
from blend.integrations.vllm.prefill import PrefillServer
from blend.integrations.vllm.shelf import Shelf, digest
from blend.rag import Rag
from blend.serve.embedded import EmbeddedEngine
from blend.serve.service import Service
from tests.tiny_model import save_tiny_model

TEXT = "The harbour has {0} gates and a bell of {0}00 kilograms. Its keeper counts {0}4 visitors a day. "
DOCUMENTS = [{"title": f"Town {number}", "text": TEXT.format(number) * 6} for number in range(3)]
QUESTION = [{"role": "user", "content": "How many gates are there?"}]
CHAT = "/v1/chat/completions"


class Prefill:
    """A prefill process without the process."""

    def __init__(self, service: Service, shelf: Shelf, name: str = "") -> None:
        self.service, self.shelf, self.socket = service, shelf, name or f"@kvblend-test-{secrets.token_hex(4)}"
        self._place = wire.bind(self.socket)
        self.desk = Desk(service, shelf)
        self.server = PrefillServer(self.desk, shelf, self._place, self.desk.metrics)
        self._thread = threading.Thread(target=self.server.serve_until_stopped)
        self._thread.start()

    def idle(self) -> None:
        """Wait until nothing is held or computed."""
        for _ in range(3000):
            holding = self.service.engine.stats()
            if not (len(self.shelf) or holding.running or holding.waiting or holding.encoding):
                return
            time.sleep(0.02)
        raise AssertionError("it goes on")

    def counted(self, name: str) -> float:
        """A metric without its prefix; 0 where there is none yet."""
        lines = self.desk.page().decode().splitlines()
        return next((float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"kvblend_{name} ")), 0.0)

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(10)
        wire.close(self._place, self.socket)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("middleware")
    model = save_tiny_model(folder / "tiny", "\n".join(one["text"] for one in DOCUMENTS))
    rag = Rag(
        folder / "store", model=str(model), device="cpu", blend=BlendConfig(), corpus=CorpusConfig(codec="native")
    )
    service = Service(rag, EmbeddedEngine(rag.blender))
    yield service
    service.close()


@pytest.fixture
def prefill(service: Service) -> Iterator[Prefill]:
    found = Prefill(service, Shelf(1 << 28))
    yield found
    found.idle()
    found.stop()


async def asked(request: Request) -> Response:
    """An inner application, as vLLM's is: it looks at the key first, then reads the body."""
    if request.headers.get("authorization") != "Bearer key":
        return Response(status_code=401)
    body = await request.json()
    if not body.get("stream"):
        return JSONResponse({"asked": body})

    async def events() -> Any:
        yield f"data: {json.dumps({'asked': body})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def application(service: Service) -> Starlette:
    paths = (CHAT, "/v1/completions", "/invocations")
    app = Starlette(routes=[Route(path, asked, methods=["POST"]) for path in paths])
    app.add_middleware(KVBlend)
    tokenizer = service.tenant("").rag().decoder.tokenizer
    app.state.engine_client = SimpleNamespace(renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer))
    return app


class Client:
    def __init__(self, app: Starlette) -> None:
        self._app = app

    def post(self, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post(
                    path, json=body, headers={"authorization": "Bearer key", **headers}, timeout=60
                )

        return asyncio.run(post())

    def asked(self, body: Any, path: str = CHAT) -> Any:
        response = self.post(body, path)
        assert response.status_code == 200, response.text
        return response.json()["asked"]


@pytest.fixture
def client(service: Service, prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv(wire.VARIABLE, prefill.socket)
    _agree(monkeypatch, "")
    return Client(application(service))


def _agree(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """What comparing with vLLM, which is not here, came to."""

    async def compared(self: gates.Gate) -> str:
        return reason

    monkeypatch.setattr(gates.Gate, "_compared", compared)


BODY = {"model": "tiny", "messages": QUESTION, "documents": DOCUMENTS, "max_tokens": 3, "tool_choice": "auto"}


def warm(client: Client, prefill: Prefill) -> dict[str, Any]:
    """Ask until the caches are there."""
    first = client.post(BODY).json()
    assert first["kvblend"]["figures"]["reason"] in ("cold", "")
    prefill.idle()
    found: dict[str, Any] = client.post(BODY).json()
    return found


def test_documents_become_token_ids_a_ticket_and_a_salt(client: Client, prefill: Prefill, monkeypatch: Any) -> None:
    held: list[tuple[Any, ...]] = []
    put = Shelf.put
    monkeypatch.setattr(Shelf, "put", lambda self, cache, ids: held.append((ids, put(self, cache, ids))) or held[-1][1])
    found = warm(client, prefill)
    body = found["asked"]
    assert set(body) == {"model", "messages", "max_tokens", "tool_choice", "cache_salt", "kv_transfer_params"}
    transfer = body["kv_transfer_params"]
    assert digest(transfer["prompt_token_ids"]) == digest(held[-1][0])
    assert transfer["kvblend"]["ticket"] == held[-1][1]
    assert len(found["kvblend"]["sources"]) >= 3
    assert 0 < found["kvblend"]["figures"]["rows_computed"] < found["kvblend"]["figures"]["rows"]
    prefill.idle()  # given back with the reply
    again = client.asked(BODY)
    assert again["cache_salt"] == body["cache_salt"]  # the same prompt, blended of the same
    assert client.asked({**BODY, "cache_salt": "mine"})["cache_salt"] not in ("mine", body["cache_salt"])
    other = client.asked({**BODY, "documents": DOCUMENTS[::-1]})
    assert other["cache_salt"] != body["cache_salt"]
    prefill.service.tenant("").rag().store.advance()
    assert client.asked(BODY)["cache_salt"] != body["cache_salt"]  # a generation of its own


def test_operators_see_what_became_of_prompts(client: Client, prefill: Prefill) -> None:
    names = ("prompts_blended_total", "rows_prompt_total", "rows_recomputed_total", "handover_seconds_count")
    warm(client, prefill)
    before = [prefill.counted(name) for name in names]
    held = prefill.counted("handed_over_bytes_total")
    figures = client.post(BODY).json()["kvblend"]["figures"]
    grown = [prefill.counted(name) - was for name, was in zip(names, before, strict=True)]
    assert grown == [1, figures["rows"], figures["rows_computed"], 1]
    assert prefill.counted("handed_over_bytes_total") > held
    prefill.idle()
    assert prefill.counted("held_prompts") == prefill.counted("held_bytes") == 0
    full = client.post({**BODY, "kvblend": {"method": "full"}}).json()["kvblend"]["figures"]
    assert (full["method"], full["reason"]) == ("full", ""), "as was asked for"
    assert prefill.counted("prompts_blended_total") == before[0] + 1
    assert client.post({**BODY, "model": "tiny+corpus:nowhere"}).status_code == 404
    assert prefill.counted('errors_total{kind="model_not_found"}') == 1


def test_from_another_machine(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("a key of at least sixteen bytes")
    key.chmod(0o600)
    monkeypatch.setenv(network.KEY_VARIABLE, str(key))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        name = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    prefill = Prefill(service, Shelf(1 << 28), name)
    try:
        monkeypatch.setenv(wire.VARIABLE, name)
        _agree(monkeypatch, "")
        client = Client(application(service))
        assert "kvblend" in warm(client, prefill)["asked"]["kv_transfer_params"]
        prefill.idle()  # given back with the reply
        monkeypatch.delenv(network.KEY_VARIABLE)
        told = client.post(BODY).json()
        assert told["kvblend"]["figures"] == {"method": "full", "reason": "no prefill process"}
    finally:
        prefill.idle()
        prefill.stop()


def test_a_stream_tells_in_its_first_event(client: Client, prefill: Prefill) -> None:
    warm(client, prefill)
    events = client.post({**BODY, "stream": True}).text.split("\n\n")
    assert json.loads(events[0][6:])["kvblend"]["figures"]["reason"] == ""
    assert events[1:] == ["data: [DONE]", ""]


def test_without_a_key_nothing_is_computed(client: Client, prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Desk, "ask", lambda *_: pytest.fail("somebody without a key was heard"))
    assert client.post(BODY, authorization="Bearer no").status_code == 401


def test_what_is_not_ours_goes_through_as_it_came(client: Client) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    for body in (
        {"model": "tiny", "messages": QUESTION},
        {"model": "tiny", "messages": [image]},
        {"model": "tiny", "messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        {"model": "tiny", "messages": QUESTION, "prompt_logprobs": 0},
        {"model": "tiny", "messages": QUESTION, "use_beam_search": True},
        {"model": "tiny", "messages": "nonsense"},
    ):
        assert client.asked({**body, "kv_transfer_params": {"kvblend": {"ticket": "0" * 32}}}) == body
    assert client.asked({"prompt": [1, 2], "kv_transfer_params": {}}, "/v1/completions") == {"prompt": [1, 2]}
    assert client.asked({"vllm_xargs": {"kv_transfer_params": [1]}}, "/invocations") == {"vllm_xargs": {}}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs does not go together"),
        ({"use_beam_search": True}, "use_beam_search does not go together"),
        ({"documents": [{"text": 1}]}, "documents"),
        ({"documents": [{"id": "none"}]}, "no document of the corpus has the id 'none'"),
        ({"kvblend": {"nonsense": 1}}, "unknown field kvblend.nonsense"),
        ({"kvblend": {"retrieve": {"corpus": "none"}}}, "no document is indexed yet"),
    ],
)
def test_refusals(client: Client, wrong: dict[str, Any], words: str) -> None:
    response = client.post({**BODY, **wrong})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_model_that_does_not_agree_is_not_used(
    service: Service, prefill: Prefill, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = warm(client, prefill)["asked"]["kv_transfer_params"]["prompt_token_ids"]
    _agree(monkeypatch, "it differs")
    found = Client(application(service)).post(BODY).json()
    assert found["asked"]["kv_transfer_params"] == {"prompt_token_ids": ids}
    assert "cache_salt" not in found["asked"]
    assert found["kvblend"]["figures"]["reason"] == "refused"


def test_damaged_entries_are_logged_and_counted_and_no_business_of_clients(
    client: Client, prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    root = prefill.service.tenant("").rag().root
    others = set((root / "kv" / "objects").rglob("*.safetensors"))
    body = {**BODY, "documents": [{"title": "Quay", "text": TEXT.format(7) * 6}]}
    assert client.post(body).json()["kvblend"]["figures"]["reason"] == "cold"
    prefill.idle()
    before = prefill.counted("damaged_entries_total")
    for path in set((root / "kv" / "objects").rglob("*.safetensors")) - others:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    reply = client.post(body)
    lines = [record.why for record in caplog.records if record.message == "damaged"]  # type: ignore[attr-defined]
    assert lines
    assert prefill.counted("damaged_entries_total") == before + len(lines)
    assert reply.json()["kvblend"]["figures"]["notes"] == []
    assert not any(words in reply.text for words in (*lines, str(root)))


def test_a_refused_model_is_blended_no_more(
    service: Service,
    prefill: Prefill,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = warm(client, prefill)["kvblend"]["sources"]
    _agree(monkeypatch, "it differs")
    refusing = Client(application(service))
    assert refusing.post(BODY).json()["kvblend"]["figures"] == REFUSED
    prefill.idle()
    before = prefill.counted("prompts_blended_total")
    for _ in range(2):
        found = refusing.post(BODY).json()
        assert found["kvblend"]["figures"] == REFUSED
        assert [one["text"] for one in found["kvblend"]["sources"]] == [one["text"] for one in sources]
        assert found["asked"]["kv_transfer_params"].keys() == {"prompt_token_ids"}
    assert prefill.counted("prompts_blended_total") == before
    assert prefill.counted('fallbacks_total{reason="refused"}') == 2
    assert held(prefill)["refused"] == "it differs"
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.name for record in told] == ["vllm.kvblend", "kvblend.serve"], "each process says it once"


REFUSED = {"method": "full", "reason": "refused"}


def held(prefill: Prefill) -> dict[str, Any]:
    with wire.connect(prefill.socket, 10) as sock:
        wire.send(sock, {"holding": True})
        return wire.receive(sock)[0]


def test_another_dtype_than_vllms_is_refused_with_the_remedy(
    service: Service, prefill: Prefill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(wire.VARIABLE, prefill.socket)
    app = application(service)
    app.state.engine_client.vllm_config = vllm_config(dtype=torch.bfloat16)
    assert Client(app).post(BODY).json()["kvblend"]["figures"] == REFUSED
    assert "start blend vllm with --dtype bfloat16" in caplog.text
    assert "--dtype bfloat16" in held(prefill)["refused"]


def vllm_config(**model: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(**model))


def test_models_are_compared_when_the_server_starts_and_again_when_it_starts_anew(
    service: Service, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.VARIABLE, prefill.socket)
    differing, alike = application(service), application(service)
    differing.state.engine_client.vllm_config = vllm_config(dtype=torch.bfloat16)
    alike.state.engine_client.vllm_config = vllm_config(dtype=torch.float32)

    async def likeliest(engine: Any, prompt: Any, ticket: str | None, signer: Any) -> dict[int, float]:
        return {1: 0.0 if ticket is None or ticket in held_right else -1.0}

    held_right: set[str] = set()
    check = Desk.check
    monkeypatch.setattr(
        Desk, "check", lambda self, number: held_right.add((found := check(self, number))["right"]) or found
    )
    monkeypatch.setattr("blend.integrations.vllm.check._likeliest", likeliest)
    asyncio.run(_started(differing, lambda: "--dtype bfloat16" in held(prefill)["refused"]))
    asyncio.run(_started(alike, lambda: not held(prefill)["refused"]))
    prefill.idle()


async def _started(app: Starlette, until: Any) -> None:
    """Start an application as a server does, and wait."""
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    running = asyncio.ensure_future(app({"type": "lifespan", "app": app}, incoming.get, send))
    await incoming.put({"type": "lifespan.startup"})
    for _ in range(500):
        if await asyncio.to_thread(until):
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError(sent)
    await incoming.put({"type": "lifespan.shutdown"})
    await running


def test_a_prompt_beyond_vllms_context_is_refused(service: Service, prefill: Prefill, client: Client) -> None:
    ids = warm(client, prefill)["asked"]["kv_transfer_params"]["prompt_token_ids"]
    app = application(service)
    app.state.engine_client.vllm_config = vllm_config(max_model_len=len(ids))
    response = Client(app).post(BODY)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {len(ids)} tokens" in response.json()["error"]["message"]
    app = application(service)
    app.state.engine_client.vllm_config = vllm_config(max_model_len=len(ids) + 1)
    assert Client(app).post(BODY).status_code == 200


def test_without_a_prefill_process_the_tokens_are_the_same(
    service: Service,
    prefill: Prefill,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blended = warm(client, prefill)
    ids = blended["asked"]["kv_transfer_params"]["prompt_token_ids"]
    monkeypatch.setenv(wire.VARIABLE, "@kvblend-nobody-is-here")
    alone = Client(application(service))
    told = alone.post(BODY).json()["kvblend"]
    for one in blended["kvblend"]["sources"]:
        del one["hit"]
    assert told["sources"] == blended["kvblend"]["sources"]
    for _ in range(2):
        assert alone.asked(BODY) == {
            **{name: value for name, value in BODY.items() if name != "documents"},
            "kv_transfer_params": {"prompt_token_ids": ids},
        }
    assert alone.asked({"model": "tiny", "messages": QUESTION}) == {"model": "tiny", "messages": QUESTION}
    assert alone.post({**BODY, "kvblend": {"retrieve": {}}}).status_code == 503
    assert [record.levelname for record in caplog.records if record.name == "vllm.kvblend"] == ["WARNING"]


def test_a_full_shelf_leaves_it_to_vllm(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Prefill(service, Shelf(1000))
    monkeypatch.setenv(wire.VARIABLE, found.socket)
    _agree(monkeypatch, "")
    told = Client(application(service)).post(BODY).json()
    assert told["asked"]["kv_transfer_params"].keys() == {"prompt_token_ids"}
    assert told["kvblend"]["figures"] == {"method": "full", "reason": "too long"}, "it never fits"
    assert len(told["kvblend"]["sources"]) >= 3
    assert found.counted('fallbacks_total{reason="too long"}') == 1
    found.stop()


def test_a_shelf_that_others_fill_is_busy(client: Client, prefill: Prefill) -> None:
    rows = warm(client, prefill)["kvblend"]["figures"]["rows"]
    prefill.idle()
    other = prefill.desk.check(2)
    prefill.shelf.budget = rows * prefill.shelf.size(other["right"]) // (CHECKED_ROWS[2] - 1)
    assert client.post(BODY).json()["kvblend"]["figures"] == {"method": "full", "reason": "busy"}
    prefill.shelf.release(other["right"])
    prefill.shelf.release(other["wrong"])
    assert client.post(BODY).json()["kvblend"]["figures"]["reason"] == ""


def test_who_hangs_up_leaves_nothing(client: Client, service: Service, prefill: Prefill, monkeypatch: Any) -> None:
    warm(client, prefill)
    before = threading.active_count()
    slow = service.engine.submit

    def submit(work: Any, on_event: Any) -> Any:
        time.sleep(0.2)
        return slow(work, on_event)

    monkeypatch.setattr(service.engine, "submit", submit)
    for _ in range(5):
        asyncio.run(_hang_up(client._app))
    prefill.idle()
    for _ in range(200):
        if threading.active_count() <= before:
            return
        time.sleep(0.05)
    raise AssertionError(threading.enumerate())


async def _hang_up(app: Starlette) -> None:
    messages = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nobody hears this")

    headers = [(b"authorization", b"Bearer key"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b"", "root_path": ""}
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the inner application makes of it
        await app(scope, receive, send)
