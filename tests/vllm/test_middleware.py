"""What vLLM's server is asked instead of what the client asked; a small application stands for vLLM."""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from machines import until
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from tiny import serving

from blend.config import BlendConfig, CorpusConfig
from blend.integrations.vllm.middleware import KVBlend, Rewriter
from blend.integrations.vllm.server import PrefillService
from blend.integrations.vllm.transport import VARIABLE, KVPool, TransportError, request
from blend.model.cache import BlendedCache
from blend.rag import Rag
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.service import Service
from tests.store.reading import flip
from tests.tiny_model import save_tiny_model

TEXT = "The harbour has {0} gates and a bell of {0}00 kilograms. Its keeper counts {0}4 visitors a day. "
DOCUMENTS = [{"title": f"Town {number}", "text": TEXT.format(number) * 6} for number in range(3)]
QUESTION = [{"role": "user", "content": "How many gates are there?"}]
CHAT = "/v1/chat/completions"
REFUSED = {"method": "full", "reason": "refused"}


class Prefill:
    """A prefill process without the process."""

    def __init__(self, service: Service, pool: KVPool) -> None:
        self.service, self.pool, self.socket = service, pool, f"@kvblend-test-{secrets.token_hex(4)}"
        self.prompts = PrefillService(service, pool)

    def idle(self) -> None:
        """Wait until nothing is held or computed."""
        until(lambda: self.service.engine.stats().idle and not len(self.pool), 60)

    def holding(self) -> dict[str, Any]:
        return request(self.socket, {"holding": True}, 10)[0]


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
    found = Prefill(service, KVPool(1 << 28))
    with serving(found.prompts, found.pool, found.socket):
        yield found
        found.idle()


async def asked(request: HttpRequest) -> Response:
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


def application(service: Service, reason: str = "", **model: Any) -> Starlette:
    """vLLM's server. reason: what a comparison with its model comes to. model: what vLLM knows of it."""

    async def compare(*given: Any) -> str:
        return reason

    paths = (CHAT, "/v1/completions", "/invocations")
    app = Starlette(routes=[Route(path, asked, methods=["POST"]) for path in paths])
    app.add_middleware(KVBlend, make_rewriter=partial(Rewriter, compare=compare))
    tokenizer = service.tenant("").rag().decoder.tokenizer
    app.state.engine_client = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(**{"dtype": torch.float32, **model})),
    )
    return app


class Client:
    def __init__(self, app: Starlette) -> None:
        self.app = app

    def post(self, body: Any, path: str = CHAT, key: str = "key") -> httpx.Response:
        return TestClient(self.app).post(path, json=body, headers={"authorization": f"Bearer {key}"})

    def asked(self, body: Any, path: str = CHAT) -> Any:
        response = self.post(body, path)
        assert response.status_code == 200, response.text
        return response.json()["asked"]


@pytest.fixture
def client(service: Service, prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv(VARIABLE, prefill.socket)
    return Client(application(service))


BODY = {"model": "tiny", "messages": QUESTION, "documents": DOCUMENTS, "max_tokens": 3, "tool_choice": "auto"}


def warm(client: Client, prefill: Prefill) -> dict[str, Any]:
    """Ask until the caches are there."""
    first = client.post(BODY).json()
    assert first["kvblend"]["figures"]["reason"] in ("cold", "")
    prefill.idle()
    found: dict[str, Any] = client.post(BODY).json()
    return found


def test_documents_become_token_ids_a_ticket_and_a_salt(client: Client, prefill: Prefill) -> None:
    found = warm(client, prefill)
    body = found["asked"]
    assert set(body) == {"model", "messages", "max_tokens", "tool_choice", "cache_salt", "kv_transfer_params"}
    transfer = body["kv_transfer_params"]
    assert len(transfer["prompt_token_ids"]) == found["kvblend"]["figures"]["rows"]
    assert len(transfer["kvblend"]["ticket"]) == 32
    assert len(found["kvblend"]["sources"]) >= 3
    assert 0 < found["kvblend"]["figures"]["rows_computed"] < found["kvblend"]["figures"]["rows"]
    prefill.idle()  # released with the reply
    again = client.asked(BODY)
    assert again["cache_salt"] == body["cache_salt"]  # the same prompt, blended of the same
    assert again["kv_transfer_params"]["kvblend"]["ticket"] != transfer["kvblend"]["ticket"]
    assert client.asked({**BODY, "cache_salt": "mine"})["cache_salt"] not in ("mine", body["cache_salt"])
    other = client.asked({**BODY, "documents": DOCUMENTS[::-1]})
    assert other["cache_salt"] != body["cache_salt"]
    prefill.service.tenant("").rag().store.advance()
    assert client.asked(BODY)["cache_salt"] != body["cache_salt"]  # another generation of the store


def test_full_prefill_on_demand_and_a_stream_that_shows_the_blend_first(client: Client, prefill: Prefill) -> None:
    warm(client, prefill)
    events = client.post({**BODY, "stream": True}).text.split("\n\n")
    assert json.loads(events[0][6:])["kvblend"]["figures"]["reason"] == ""
    assert events[1:] == ["data: [DONE]", ""]
    figures = client.post({**BODY, "kvblend": {"method": "full"}}).json()["kvblend"]["figures"]
    assert (figures["method"], figures["reason"]) == ("full", "")


def test_without_a_key_nothing_is_computed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillService, "ask", lambda *_: pytest.fail("a client without a key was heard"))
    assert client.post(BODY, key="no").status_code == 401


def test_other_requests_pass_unchanged(client: Client) -> None:
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
        ({"kvblend": {"nonsense": 1}}, "kvblend.nonsense: "),
        ({"kvblend": {"retrieve": {"corpus": "none"}}}, "no document is indexed yet"),
    ],
)
def test_refusals(client: Client, wrong: dict[str, Any], words: str) -> None:
    response = client.post({**BODY, **wrong})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_damage_is_logged_and_not_shown(client: Client, prefill: Prefill, caplog: pytest.LogCaptureFixture) -> None:
    root = prefill.service.tenant("").rag().root
    others = set((root / "kv" / "objects").rglob("*.safetensors"))
    body = {**BODY, "documents": [{"title": "Quay", "text": TEXT.format(7) * 6}]}
    assert client.post(body).json()["kvblend"]["figures"]["reason"] == "cold"
    prefill.idle()
    for path in set((root / "kv" / "objects").rglob("*.safetensors")) - others:
        flip(path, -100)
    reply = client.post(body)
    lines = [record.why for record in caplog.records if record.message == "damaged"]  # type: ignore[attr-defined]
    assert lines
    assert reply.json()["kvblend"]["figures"]["notes"] == []
    assert not any(words in reply.text for words in (*lines, str(root)))


def test_a_refused_model_is_blended_no_more(
    service: Service, prefill: Prefill, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    blended = warm(client, prefill)
    sources, ids = blended["kvblend"]["sources"], blended["asked"]["kv_transfer_params"]["prompt_token_ids"]
    refusing = Client(application(service, "it differs"))
    assert refusing.post(BODY).json()["kvblend"]["figures"] == REFUSED
    prefill.idle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "take", lambda *given: pytest.fail("blended in vain"))
        for _ in range(2):
            found = refusing.post(BODY).json()
            assert found["kvblend"]["figures"] == REFUSED
            assert [one["text"] for one in found["kvblend"]["sources"]] == [one["text"] for one in sources]
            assert found["asked"]["kv_transfer_params"] == {"prompt_token_ids": ids}
            assert "cache_salt" not in found["asked"]
    assert prefill.holding()["refused"] == "it differs"
    errors = [record.name for record in caplog.records if record.levelname == "ERROR"]
    assert sorted(errors) == ["kvblend.serve", "vllm.kvblend"], "each process logs it once, in either order"


def test_another_dtype_than_vllms_is_refused_with_the_remedy(
    service: Service, prefill: Prefill, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    other = Client(application(service, dtype=torch.bfloat16))
    assert other.post(BODY).json()["kvblend"]["figures"] == REFUSED
    assert "start blend vllm with --dtype bfloat16" in caplog.text
    assert "--dtype bfloat16" in prefill.holding()["refused"]


def test_models_are_compared_whenever_a_server_starts(service: Service, prefill: Prefill, client: Client) -> None:
    for reason in ("it differs", ""):
        with TestClient(application(service, reason)):
            until(lambda reason=reason: prefill.holding()["refused"] == reason)


def test_a_prompt_beyond_vllms_context_is_refused(service: Service, prefill: Prefill, client: Client) -> None:
    ids = warm(client, prefill)["asked"]["kv_transfer_params"]["prompt_token_ids"]
    response = Client(application(service, max_model_len=len(ids))).post(BODY)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {len(ids)} tokens" in response.json()["error"]["message"]
    assert Client(application(service, max_model_len=len(ids) + 1)).post(BODY).status_code == 200


def test_without_a_prefill_process_the_tokens_are_the_same(
    service: Service,
    prefill: Prefill,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blended = warm(client, prefill)
    ids = blended["asked"]["kv_transfer_params"]["prompt_token_ids"]
    monkeypatch.setenv(VARIABLE, "@kvblend-nobody-is-here")
    alone = Client(application(service))
    shown = alone.post(BODY).json()["kvblend"]
    for one in blended["kvblend"]["sources"]:
        del one["hit"]
    assert shown["sources"] == blended["kvblend"]["sources"]
    for _ in range(2):
        assert alone.asked(BODY) == {
            **{name: value for name, value in BODY.items() if name != "documents"},
            "kv_transfer_params": {"prompt_token_ids": ids},
        }
    assert alone.asked({"model": "tiny", "messages": QUESTION}) == {"model": "tiny", "messages": QUESTION}
    assert alone.post({**BODY, "kvblend": {"retrieve": {}}}).status_code == 503
    assert [record.levelname for record in caplog.records if record.name == "vllm.kvblend"] == ["WARNING"]


def test_a_prompt_beyond_the_pool_is_left_to_vllm_and_a_full_one_is_busy(client: Client, prefill: Prefill) -> None:
    rows = warm(client, prefill)["kvblend"]["figures"]["rows"]  # compared, which needs room
    prefill.pool.budget = 1000
    shown = client.post(BODY).json()
    assert shown["asked"]["kv_transfer_params"].keys() == {"prompt_token_ids"}
    assert shown["kvblend"]["figures"] == {"method": "full", "reason": "too long"}, "it never fits"
    assert len(shown["kvblend"]["sources"]) >= 3
    prefill.pool.budget = rows * row_bytes(prefill)
    with prefill.pool.ticket() as ticket:
        cache = BlendedCache(1, 9)
        cache.layers[0].write_run(0, torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4))
        prefill.pool.put(ticket, cache, range(9))
        assert client.post(BODY).json()["kvblend"]["figures"] == {"method": "full", "reason": "busy"}
    assert client.post(BODY).json()["kvblend"]["figures"]["reason"] == ""


def row_bytes(prefill: Prefill) -> int:
    decoder = prefill.service.tenant("").rag().decoder
    return sum(layer.width for layer in decoder.rotations) * decoder.dtype.itemsize


def test_a_check_without_memory_holds_nothing(prefill: Prefill) -> None:
    """Or every API server that starts while much is held would take the rest for good."""
    prefill.pool.budget = (2 * 32 + 149) * row_bytes(prefill)  # one prompt's KV, and half of another's
    with pytest.raises(TransportError):
        request(prefill.socket, {"check": "float32"}, 60)
    prefill.idle()


def test_a_client_that_hangs_up_leaves_nothing(
    client: Client, service: Service, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(client, prefill)
    before = other_threads()
    slow = service.engine.submit

    def submit(work: Any, on_event: Any) -> Any:
        time.sleep(0.2)
        return slow(work, on_event)

    monkeypatch.setattr(service.engine, "submit", submit)
    for _ in range(5):
        asyncio.run(_hang_up(client.app))
    prefill.idle()
    assert other_threads() <= before


def other_threads() -> set[threading.Thread]:
    """Those that are no pool's of an event loop."""
    pools = ("asyncio_", "kvblend-prefill")
    return {one for one in threading.enumerate() if not one.name.startswith(pools)}


async def _hang_up(app: Starlette) -> None:
    messages = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("no reply is sent")

    headers = [(b"authorization", b"Bearer key"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b"", "root_path": ""}
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the inner application makes of it
        await app(scope, receive, send)
