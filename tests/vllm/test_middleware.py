"""What vLLM's server is asked instead of what the client asked; a small application stands for vLLM."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from blend.integrations.vllm.prompts import LocalPrompts
from tests.tiny_model import save_tiny_model
from tests.vllm.applications import CHAT, application, engine_of

TEXT = "The harbour has {0} gates and a bell of {0}00 kilograms. Its keeper counts {0}4 visitors a day. "
DOCUMENTS = [{"title": f"Town {number}", "text": TEXT.format(number) * 6} for number in range(3)]
QUESTION = [{"role": "user", "content": "How many gates are there?"}]
BODY = {"model": "tiny", "messages": QUESTION, "documents": DOCUMENTS, "max_tokens": 3, "tool_choice": "auto"}


class Client:
    def __init__(self, tokenizer: Any, store: Path, **model: Any) -> None:
        self.app = application(engine_of(tokenizer, str(store), **model))

    def post(self, body: Any, path: str = CHAT, key: str = "key") -> httpx.Response:
        return TestClient(self.app).post(path, json=body, headers={"authorization": f"Bearer {key}"})

    def asked(self, body: Any, path: str = CHAT) -> Any:
        response = self.post(body, path)
        assert response.status_code == 200, response.text
        return response.json()["asked"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = "\n".join(one["text"] for one in DOCUMENTS)
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("middleware") / "tiny", texts))


@pytest.fixture
def client(tokenizer: Any, tmp_path: Path) -> Client:
    return Client(tokenizer, tmp_path / "store")


def test_documents_become_token_ids_a_ticket_and_a_salt(client: Client) -> None:
    document = client.post(BODY).json()
    reply, shown = document["asked"], document["kvblend"]
    assert set(reply) == {"model", "messages", "max_tokens", "tool_choice", "cache_salt", "kv_transfer_params"}
    assert [one["title"] for one in shown["sources"]] == [one["title"] for one in DOCUMENTS]
    assert client.asked(BODY)["cache_salt"] == reply["cache_salt"]
    assert client.asked({**BODY, "cache_salt": "mine"})["cache_salt"] not in ("mine", reply["cache_salt"])


def test_a_stream_shows_the_blend_in_its_first_event(client: Client) -> None:
    events = client.post({**BODY, "stream": True}).text.split("\n\n")
    assert json.loads(events[0][6:])["kvblend"]["figures"] == {"method": "rows"}
    assert events[1:] == ["data: [DONE]", ""]


def test_without_a_key_nothing_is_computed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalPrompts, "prompt", lambda *_: pytest.fail("a client without a key was heard"))
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


def test_a_prompt_beyond_vllms_context_is_refused(client: Client, tokenizer: Any, tmp_path: Path) -> None:
    ids = client.asked(BODY)["kv_transfer_params"]["prompt_token_ids"]
    response = Client(tokenizer, tmp_path, max_model_len=len(ids)).post(BODY)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {len(ids)} tokens" in response.json()["error"]["message"]
    assert Client(tokenizer, tmp_path, max_model_len=len(ids) + 1).post(BODY).status_code == 200


def test_a_client_that_hangs_up_leaves_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.asked(BODY)
    before = _other_threads()
    make = LocalPrompts.prompt

    def slowly(prompts: LocalPrompts, part: Any) -> Any:
        time.sleep(0.2)
        return make(prompts, part)

    monkeypatch.setattr(LocalPrompts, "prompt", slowly)
    for _ in range(5):
        asyncio.run(_hang_up(client.app))
    assert _other_threads() <= before


def _other_threads() -> set[threading.Thread]:
    """Those that are no pool's of an event loop."""
    return {one for one in threading.enumerate() if not one.name.startswith("asyncio_")}


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
