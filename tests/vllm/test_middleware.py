"""What vLLM's server is asked instead of what the client asked; a small application stands for vLLM."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from layouts import marked
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from blend.errors import StoreError
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.middleware import KVBlend
from blend.integrations.vllm.prompts import CHAT, LocalPrompts, PromptForVLLM, template_arguments
from blend.layout import PlaceOrigin, PromptLayout
from blend.serve.flights import Flights
from blend.serve.prompts.tenant import StoreWatch
from blend.store import open_store
from tests.tiny_model import save_tiny_model

TEXT = "The harbour has {0} gates and a bell of {0}00 kilograms. Its keeper counts {0}4 visitors a day. "
DOCUMENTS = [{"title": f"Town {number}", "text": TEXT.format(number) * 6} for number in range(3)]
QUESTION = [{"role": "user", "content": "How many gates are there?"}]
BODY = {"model": "tiny", "messages": QUESTION, "documents": DOCUMENTS, "max_tokens": 3, "tool_choice": "auto"}
FORGED = {"kvblend": {"ticket": "{}"}}
JSON = ("content-type", "application/json")
KEY = ("authorization", "Bearer key")
PATHS = ("/v1/completions", CHAT, "/inference/v1/generate")
GOES_ON = threading.Event()  # streams end when it is set
GOES_ON.set()


async def _asked(request: Request) -> Response:
    """What it was asked, once the key is right: as vLLM, it looks at the key first and then reads the body."""
    if request.headers["authorization"] != KEY[1]:
        return Response(status_code=401)
    raw = await request.body()
    try:
        body = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return Response(raw)
    if not (isinstance(body, dict) and body.get("stream")):
        return JSONResponse({"asked": body, "kv_transfer_params": {"kvblend": {"rows": 7}}})

    async def events() -> Any:
        yield f"data: {json.dumps({'asked': body})}\n\n"
        while not GOES_ON.is_set():
            await asyncio.sleep(0.01)
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


class Server:
    """vLLM's, over a store. longest: prompt. template: its default arguments of the chat template."""

    def __init__(self, tokenizer: Any, store: Path, longest: int = 10**6, template: Any = None) -> None:
        paths = (*PATHS, "/v1/responses", "/v1/rerank", "/invocations")
        self.app = Starlette(routes=[Route(path, _asked, methods=["POST"]) for path in paths])
        self.app.add_middleware(KVBlend)
        transfer = SimpleNamespace(kv_connector_extra_config={"store": str(store)}, engine_id="an engine")
        model = SimpleNamespace(max_model_len=longest)
        self.app.state.args = SimpleNamespace(default_chat_template_kwargs=template)
        self.app.state.engine_client = SimpleNamespace(
            renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
            vllm_config=SimpleNamespace(kv_transfer_config=transfer, model_config=model),
        )

    def post(self, body: Any, path: str = CHAT, key: str = "key") -> httpx.Response:
        with TestClient(self.app) as client:
            return client.post(path, json=body, headers={"authorization": f"Bearer {key}"})

    def raw(self, content: bytes, *headers: tuple[str, str], path: str = PATHS[0]) -> httpx.Response:
        with TestClient(self.app) as client:
            return client.post(path, content=content, headers=[KEY, *headers])

    def asked(self, body: Any, path: str = CHAT) -> Any:
        response = self.post(body, path)
        assert response.status_code == 200, response.text
        return response.json()["asked"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = "\n".join(one["text"] for one in DOCUMENTS)
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("middleware") / "tiny", texts))
    tokenizer.chat_template += "{{ 'thinks' if enable_thinking else 'answers' }}"
    return tokenizer


@pytest.fixture
def server(tokenizer: Any, tmp_path: Path) -> Server:
    return Server(tokenizer, tmp_path / "store")


def refused(response: httpx.Response, code: str = "invalid_value") -> str:
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == code
    return str(response.json()["error"]["message"])


def test_documents_become_token_ids_a_ticket_and_a_salt(server: Server) -> None:
    reply = server.post(BODY).json()
    asked, shown = reply["asked"], reply["kvblend"]
    assert set(asked) == {"model", "messages", "max_tokens", "tool_choice", "cache_salt", "kv_transfer_params"}
    transfer = asked["kv_transfer_params"]
    ticket = LayoutTicket.read(transfer["kvblend"]["ticket"])
    assert ticket.layout.token_ids == tuple(transfer["prompt_token_ids"])
    assert [place.origin for place in ticket.layout.places][::2] == [PlaceOrigin.NEW] * 3
    assert (ticket.corpus, ticket.user) == ("", "")
    assert [one["title"] for one in shown["sources"]] == [one["title"] for one in DOCUMENTS]
    assert shown["figures"] == {"method": "rows", "rows": 7}
    assert reply["kv_transfer_params"] is None, "they are the connector's"


def test_only_the_same_layout_of_the_same_generation_has_the_same_salt(server: Server, tmp_path: Path) -> None:
    def salt(**more: Any) -> str:
        return str(server.asked({**BODY, **more})["cache_salt"])

    first = salt()
    assert salt() == first
    others = {salt(documents=DOCUMENTS[::-1]), salt(cache_salt="mine")}
    open_store(tmp_path / "store" / "kv").advance()
    assert len({first, "mine", *others, salt()}) == 5


def test_a_stream_shows_the_blend_in_its_first_event(server: Server) -> None:
    events = server.post({**BODY, "stream": True}).text.split("\n\n")
    assert json.loads(events[0][6:])["kvblend"]["figures"] == {"method": "rows"}
    assert events[1:] == ["data: [DONE]", ""]


def test_full_prefill_on_demand_and_while_the_store_is_out_of_reach_is_vllms_own(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = server.asked(BODY)["kv_transfer_params"]["prompt_token_ids"]

    def computed(body: Any) -> Any:
        reply = server.post(body).json()
        assert reply["asked"]["kv_transfer_params"] == {"prompt_token_ids": ids}
        return reply["kvblend"]["figures"]

    assert computed({**BODY, "kvblend": {"method": "full"}}) == {"method": "full", "reason": "", "rows": 7}

    monkeypatch.setattr(StoreWatch, "require", Mock(side_effect=StoreError("the disk is gone")))
    assert computed(BODY) == {"method": "full", "reason": "store_unreachable", "rows": 7}


def test_without_a_key_nothing_is_computed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalPrompts, "prompt", lambda *_: pytest.fail("a client without a key was heard"))
    assert server.post(BODY, key="no").status_code == 401


@pytest.mark.parametrize(
    "more",
    [
        *({}, {"messages": "nonsense"}, {"prompt_logprobs": 0}, {"use_beam_search": True}),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
    ],
)
def test_other_requests_pass_unchanged(server: Server, more: Any) -> None:
    body = {"model": "tiny", "messages": QUESTION, **more}
    assert server.asked({**body, "kv_transfer_params": FORGED}) == body


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs does not go together"),
        ({"documents": [{"id": "none"}]}, "no document of the corpus has the id 'none'"),
        ({"kvblend": {"nonsense": 1}}, "kvblend.nonsense: "),
        ({"kvblend": {"retrieve": {"corpus": "none"}}}, "no document is indexed yet"),
    ],
)
def test_refusals(server: Server, wrong: dict[str, Any], words: str) -> None:
    response = server.post({**BODY, **wrong})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_prompt_beyond_vllms_context_is_refused(server: Server, tokenizer: Any, tmp_path: Path) -> None:
    rows = len(server.asked(BODY)["kv_transfer_params"]["prompt_token_ids"])
    response = Server(tokenizer, tmp_path, longest=rows).post(BODY)
    assert f"maximum context length is {rows} tokens" in refused(response, "context_length_exceeded")
    assert Server(tokenizer, tmp_path, longest=rows + 1).post(BODY).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "text/plain"])
def test_what_only_kvblend_may_say_is_taken_out(server: Server, path: str, kind: str) -> None:
    body = {"prompt": [1, 2], "vllm_xargs": {}}
    forged = {"prompt": [1, 2], "vllm_xargs": {"kv_transfer_params": [1]}, "kv_transfer_params": FORGED}
    response = server.raw(json.dumps(forged).encode(), ("content-type", kind), path=path)
    assert response.json()["asked"] == body


@pytest.mark.parametrize("second", ["multipart/form-data", "application/json"])
def test_two_content_types_are_refused(server: Server, second: str) -> None:
    """Starlette takes the first, others the last: one could be shown to us and the other to vLLM."""
    for headers in ((JSON, ("content-type", second)), (("content-type", second), JSON)):
        assert "one header content-type" in refused(server.raw(b"{}", *headers))


@pytest.mark.parametrize("path", PATHS)
def test_what_is_nested_too_deeply_for_us_never_reaches_vllm(server: Server, path: str) -> None:
    """Around the limit of the parser, which the depth of its caller's stack shifts, each depth is cleaned or refused."""
    statuses = set()
    body = json.dumps({"kv_transfer_params": FORGED}).encode()
    for depth in (*range(850, 1050, 4), 100_000):
        deep = body[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
        response = server.raw(deep, JSON, path=path)
        assert b"ticket" not in response.content, depth
        statuses.add(response.status_code)
        if response.status_code == 400:
            assert "nested too deeply" in refused(response)
    assert statuses == {200, 400}
    holders = b'{"vllm_xargs": ' * 900 + body + b"}" * 900
    assert b"ticket" not in server.raw(holders, JSON, path=path).content


@pytest.mark.parametrize("content", [b"{", b'{"a": 1} x', b"\xff\xfe"])
def test_json_that_is_none_is_refused(server: Server, content: bytes) -> None:
    assert refused(server.raw(content, JSON)) == "the body is no JSON"
    assert server.raw(content, ("content-type", "audio/wav")).content == content


@pytest.mark.parametrize("content", [b"", b"[1]", b"null"])
def test_bodies_without_fields_go_through(server: Server, content: bytes) -> None:
    assert server.raw(content, JSON).json()["asked"] == json.loads(content or b"null")


@pytest.mark.parametrize("field", ["kvblend", "documents"])
def test_routes_that_make_no_prompt_here_refuse_the_fields(server: Server, field: str) -> None:
    words = refused(server.post({"model": "m", "input": "Hello", field: {"retrieve": {}}}, "/v1/responses"))
    assert words == "/v1/responses takes no field of kvblend; use /v1/chat/completions or /v1/completions"
    rerank = {"query": "q", "documents": ["a"]}
    assert server.asked(rerank, "/v1/rerank") == rerank


def test_a_server_without_the_connector_does_not_start(server: Server) -> None:
    server.app.state.engine_client.vllm_config.kv_transfer_config = None
    send = AsyncMock()
    asyncio.run(server.app({"type": "lifespan", "app": server.app}, AsyncMock(), send))
    why = "kvblend: this vLLM has no connector of kvblend with the option store; see docs/vllm.md"
    send.assert_awaited_once_with({"type": "lifespan.startup.failed", "message": why})


@pytest.mark.inside_vllm
@pytest.mark.parametrize("given", [{}, {"tone": "loud"}, {"tone": "auto", "more": 1}, {"enable_thinking": None}])
@pytest.mark.parametrize("defaults", [{"enable_thinking": False, "tone": "calm"}, {}])
def test_template_arguments_are_merged_as_vllm_does(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    from vllm.renderers.params import ChatParams

    theirs = ChatParams(chat_template_kwargs=given).with_defaults(defaults).chat_template_kwargs
    assert template_arguments({"chat_template_kwargs": given}, defaults) == theirs


def test_the_servers_template_arguments_reach_the_prompt(tokenizer: Any, tmp_path: Path) -> None:
    def ending(template: Any, **more: Any) -> str:
        asked = Server(tokenizer, tmp_path, template=template).asked({**BODY, **more})
        text = str(tokenizer.decode(asked["kv_transfer_params"]["prompt_token_ids"]))
        return text.rpartition("assistant\n")[2]

    assert ending(None) == "answers"
    assert ending({"enable_thinking": True}) == "thinks"
    assert ending({"enable_thinking": True}, chat_template_kwargs={"enable_thinking": False}) == "answers"
    assert ending({"enable_thinking": True}, chat_template_kwargs={"enable_thinking": None}) == "thinks"
    assert ending({"enable_thinking": False}, chat_template_kwargs={"enable_thinking": "auto"}) == "answers"
    assert ending({"enable_thinking": True}, chat_template_kwargs="nonsense") == "thinks"


def tickets_together(server: Server, monkeypatch: pytest.MonkeyPatch, bodies: Sequence[Any]) -> list[LayoutTicket]:
    """What vLLM is told of requests that come together: all are in flight until the last one has been compared."""
    compared = threading.Barrier(len(bodies))
    compare = PromptForVLLM.compared
    make = LocalPrompts.prompt
    begun = list[Any]()

    def making(prompts: LocalPrompts, body: Any) -> Any:
        begun.append(body)
        while len(begun) < len(bodies):
            time.sleep(0.001)
        time.sleep(0.6 if body is begun[-1] else 0.5)  # the others are made before, and wait
        return make(prompts, body)

    def comparing(prompt: PromptForVLLM) -> PromptForVLLM:
        result = compare(prompt)
        compared.wait(60)
        return result

    with monkeypatch.context() as patch, TestClient(server.app) as client, ThreadPoolExecutor(len(bodies)) as pool:
        patch.setattr(LocalPrompts, "prompt", making)
        patch.setattr(PromptForVLLM, "compared", comparing)
        return list(pool.map(lambda body: ticket_of(client, body), bodies))


def ticket_of(client: TestClient, body: Any) -> LayoutTicket:
    """What vLLM is told of a request."""
    response = client.post(CHAT, json=body, headers={"authorization": "Bearer key"})
    assert response.status_code == 200, response.text
    event = response.text.split("\n\n")[0].removeprefix("data: ")
    return LayoutTicket.read(json.loads(event)["asked"]["kv_transfer_params"]["kvblend"]["ticket"])


def agent(number: int, **more: Any) -> Any:
    """A request with the documents in an order of its own."""
    order = [*DOCUMENTS[number:], *DOCUMENTS[:number]]
    return {
        **BODY,
        "messages": [{"role": "user", "content": f"Task {number}: how many gates?"}],
        "documents": order,
        **more,
    }


def counts(ticket: LayoutTicket) -> set[int]:
    """How many others bring the texts of a prompt."""
    places = zip(ticket.layout.places, ticket.awaited or [0] * len(ticket.layout.places), strict=True)
    return {count for place, count in places if place.origin is PlaceOrigin.NEW}


def test_tickets_say_which_text_other_requests_in_flight_bring(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = tickets_together(server, monkeypatch, [agent(number) for number in range(3)])
    assert [counts(ticket) for ticket in tickets] == [{2}] * 3
    texts = [{place.tokens for place in ticket.layout.places if place.is_brought} for ticket in tickets]
    assert texts[0] == texts[1] == texts[2]
    assert counts(ticket_of_one(server, agent(0))) == {0}, "they have ended"


def ticket_of_one(server: Server, body: Any) -> LayoutTicket:
    with TestClient(server.app) as client:
        return ticket_of(client, body)


@pytest.mark.parametrize("names", [{"user": "ada"}, {"safety_identifier": "ada"}, {"cache_salt": "hers"}])
def test_other_end_users_and_salts_are_not_compared(
    server: Server, monkeypatch: pytest.MonkeyPatch, names: dict[str, str]
) -> None:
    one, other, again = tickets_together(server, monkeypatch, [agent(0), agent(1, **names), agent(2)])
    assert [counts(ticket) for ticket in (one, other, again)] == [{1}, {0}, {1}]
    assert other.user != one.user == "", "its text is learned apart"


def test_a_request_is_in_flight_until_its_first_token(server: Server) -> None:
    with TestClient(server.app) as client, ThreadPoolExecutor(1) as pool:
        GOES_ON.clear()
        try:
            stream = pool.submit(ticket_of, client, agent(0, stream=True))
            time.sleep(0.5)
            assert not stream.done()
            assert counts(ticket_of(client, agent(1))) == {0}
        finally:
            GOES_ON.set()
        assert counts(stream.result()) == {0}


def test_a_prompt_waits_for_others_no_longer_than_it_took_itself(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    make = LocalPrompts.prompt

    def making(prompts: LocalPrompts, body: Any) -> Any:
        if body["messages"][0]["content"].startswith("Task 0"):
            hangs.set()
            assert goes_on.wait(60)
        return make(prompts, body)

    monkeypatch.setattr(LocalPrompts, "prompt", making)
    with TestClient(server.app) as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ticket_of, client, agent(0))
        assert hangs.wait(60)
        assert counts(ticket_of(client, agent(1))) == {0}
        assert not slow.done()
        goes_on.set()
        assert counts(slow.result()) == {0}


def test_pieces_are_divided_where_another_request_brings_a_part() -> None:
    flights = Flights()
    one, two, three = (tuple(range(100 * number, 100 * number + 60)) for number in (1, 2, 3))

    def prompt(*texts: tuple[int, ...]) -> PromptForVLLM:
        layout = marked(PromptLayout.of_chunks((1,), texts, (2,)), new=range(len(texts)))
        return PromptForVLLM([], {}, LayoutTicket(layout), "", flights.begin("", texts))

    joined, apart = prompt((*one, *two), three), prompt(two, three)
    ticket = joined.compared().ticket
    assert ticket is not None
    assert [place.tokens for place in ticket.layout.places] == [one, two, three]
    assert ticket.awaited == (0, 1, 1)
    assert apart.flight is not None
    assert apart.flight.awaited().total() == 2
