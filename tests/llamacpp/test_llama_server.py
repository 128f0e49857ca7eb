"""`blend serve --upstream` in front of llama.cpp's own server: answers, streams, tenants, and clients that leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from blend import Rag
from blend.attached.known import KnownTexts
from blend.integrations.llamacpp.library import Library
from tests.cli.blend_process import Blend, preloaded
from tests.llamacpp.llama_fronts import (
    QUESTION,
    TEXTS,
    Front,
    Fronts,
    chat,
    environment,
    made_rag,
    reused,
    said,
    save_model,
)

LONG = 3000  # tokens of an answer: seconds
UNKNOWN = " ".join(f"Nobody in town {number} had ever heard of it before." for number in range(12))


@pytest.fixture(scope="module")
def model(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rag(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Rag:
    """A store of the model's."""
    return made_rag(model, tmp_path_factory.mktemp("rag"))


@pytest.fixture(scope="module")
def fronts(rag: Rag, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    """Proxies over that store."""
    with preloaded() as process:
        blend = Blend(process, tmp_path_factory.mktemp("cli"), model, rag.root, env=environment())
        yield Fronts(blend, model)


@pytest.fixture(scope="module")
def front(fronts: Fronts) -> Iterator[Front]:
    """One in front of a server with four slots, which learns nothing."""
    with fronts.front("--no-correction", "--no-learn", n_parallel=4, kv_unified=True, n_ctx=4096) as front:
        yield front


def completion(ids: tuple[int, ...]) -> dict[str, object]:
    return {"prompt": list(ids), "n_predict": 6, "temperature": 0, "return_tokens": True}


def blended_tokens(rag: Rag, ids: tuple[int, ...]) -> list[int]:
    """What llama.cpp says behind the rows that kvblend gives this prompt."""
    known = KnownTexts(rag, rag.blend_config, 0)
    blend = known.prefill(known.layout(ids))
    tokens = [blend.first_token]
    while len(tokens) < 6:
        tokens.append(int(blend.append(torch.tensor([tokens[-1:]]))[0, -1].argmax()))
    return tokens


def prompt_of(rag: Rag, *topics: int) -> tuple[int, ...]:
    """A prompt about these documents, as the template writes it."""
    tokenizer = rag.decoder.tokenizer
    messages = chat(*(TEXTS[topic] for topic in topics))["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def test_an_answer_is_that_of_the_blended_rows(front: Front, rag: Rag) -> None:
    """llama-server goes on from exactly the rows that kvblend computes; it computes one token of the prompt."""
    ids = prompt_of(rag, 3, 0, 5)
    reply = front.proxy.post("/completion", json=completion(ids))
    assert reply.json()["timings"]["prompt_n"] == 1
    assert reused(reply) > len(ids) / 2
    assert reply.headers["x-kvblend-rows"].endswith(f" of {len(ids)}")
    assert "x-kvblend-reason" not in reply.headers
    assert reply.json()["tokens"] == blended_tokens(rag, ids)
    alone = front.server.post("/completion", json={**completion(ids), "cache_prompt": False})
    assert alone.json()["tokens"] != reply.json()["tokens"], "this prompt tells blended rows from others"


def test_exact_rows_give_the_answer_of_the_server_alone(front: Front, rag: Rag) -> None:
    """A first chunk right behind the prefix is exact, whoever computes it."""
    template = rag.template
    chunk = template.chunk_ids(rag.index.chunks[0])
    ids = (*template.prefix, *chunk, *rag.decoder.tokenizer.encode(QUESTION, add_special_tokens=False))
    reply = front.proxy.post("/completion", json=completion(ids))
    assert reused(reply) > 100
    assert reply.json()["timings"]["prompt_n"] == 1
    alone = front.server.post("/completion", json={**completion(ids), "cache_prompt": False})
    assert reply.json()["tokens"] == alone.json()["tokens"]


def test_a_chat_is_blended_from_the_servers_own_template(front: Front) -> None:
    """The client sends text alone; a second client that asks the same takes the rows that the server holds."""
    body = chat(TEXTS[1], TEXTS[2])
    first = front.proxy.post("/v1/chat/completions", json=body)
    assert reused(first) > 200
    assert first.json()["usage"]["prompt_tokens"] == int(first.headers["x-kvblend-rows"].rpartition(" ")[2])
    again = front.proxy.post("/v1/chat/completions", json=body)
    assert (reused(again), again.headers["x-kvblend-reason"]) == (0, "llama-server holds most of it")
    assert said(again) == said(first)


def test_streams_pass_byte_by_byte(front: Front) -> None:
    """The same events as without the proxy, and the same text as without a stream."""
    body = chat(TEXTS[2], TEXTS[4], stream=True)
    with front.proxy.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reused(reply) > 200
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert text == said(front.server.post("/v1/chat/completions", json=chat(TEXTS[2], TEXTS[4])))


def test_tools_and_everything_else_pass(front: Front) -> None:
    """The prompt with tools is the server's own; other paths, errors and refusals are, too."""
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    body = chat(TEXTS[5], TEXTS[6], tools=[{"type": "function", "function": function}])
    reply, alone = (client.post("/v1/chat/completions", json=body) for client in (front.proxy, front.server))
    assert reused(reply) > 200
    assert reply.json()["usage"]["prompt_tokens"] == alone.json()["usage"]["prompt_tokens"]
    for method, path, content in (
        ("GET", "/v1/models", None),
        ("GET", "/nothing", None),
        ("POST", "/tokenize", {"content": "The harbour"}),
        ("POST", "/v1/chat/completions", {"messages": 3}),
        ("POST", "/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "temperature": 0}),
    ):
        replies = [client.request(method, path, json=content) for client in (front.proxy, front.server)]
        assert replies[0].status_code == replies[1].status_code
        assert keys_of(replies[0]) == keys_of(replies[1])


def keys_of(reply: httpx.Response) -> list[str]:
    return sorted(reply.json())


def test_anthropics_protocol_is_blended_too(front: Front) -> None:
    """With a tool's result, and the line that Claude Code puts in front: the prompt's tokens are llama-server's to the last."""
    header = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;You are an agent."
    call = {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "glacier.md", "rows": [1, 20]}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": TEXTS[7]}]}
    body = {
        "system": [{"type": "text", "text": header}],
        "messages": [
            {"role": "user", "content": f"{TEXTS[3]}\n\nRead the file."},
            {"role": "assistant", "content": [{"type": "text", "text": "I read."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": QUESTION}]},
        ],
        "tools": [{"name": "read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}],
        "max_tokens": 4,
        "temperature": 0,
    }
    reply = front.proxy.post("/v1/messages", json=body)
    assert reused(reply) > 200, reply.headers
    usage = reply.json()["usage"]
    assert usage["cache_read_input_tokens"] == int(reply.headers["x-kvblend-rows"].rpartition(" ")[2]) - 1
    picture = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/picture.png"}}
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": TEXTS[3]}, picture]}]
    refused = front.proxy.post("/v1/messages", json=body)
    assert refused.status_code == front.server.post("/v1/messages", json=body).status_code
    assert refused.headers["x-kvblend-rows"] == "0"


def test_unknown_text_is_left_to_the_server(front: Front) -> None:
    """The same answer, and a reason."""
    body = chat(UNKNOWN)
    reply = front.proxy.post("/v1/chat/completions", json=body)
    assert (reused(reply), reply.headers["x-kvblend-reason"]) == (0, "nothing to reuse")
    assert said(reply) == said(front.server.post("/v1/chat/completions", json=body))


@pytest.mark.parametrize("fields", [{"id_slot": 2}, {"cache_prompt": False}], ids=str)
def test_clients_that_choose_themselves_are_left_alone(front: Front, fields: dict[str, object]) -> None:
    """A slot of their own, or no cache."""
    reply = front.proxy.post("/completion", json={"prompt": TEXTS[0] + TEXTS[1], "n_predict": 2, **fields})
    assert reply.headers["x-kvblend-rows"] == "0"
    assert next(iter(fields)) in reply.headers["x-kvblend-reason"]


def test_a_request_that_the_server_refuses_is_answered_by_the_server(front: Front) -> None:
    """A body that is no JSON."""
    reply, alone = (client.post("/v1/chat/completions", content=b"{") for client in (front.proxy, front.server))
    assert reply.status_code == alone.status_code
    assert reply.content == alone.content


def test_two_clients_at_once_get_the_answers_that_they_get_alone(front: Front, rag: Rag) -> None:
    """Each slot is filled and taken without another request in between."""
    prompts = [prompt_of(rag, *topics) for topics in ((6, 7), (7, 3), (0, 7), (4, 7))]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda ids: front.proxy.post("/completion", json=completion(ids)), prompts))
    assert [reply.json()["timings"]["prompt_n"] for reply in replies] == [1, 1, 1, 1]
    assert [reply.json()["tokens"] for reply in replies] == [blended_tokens(rag, ids) for ids in prompts]


def test_a_client_that_leaves_ends_the_work_for_it(front: Front) -> None:
    """In the middle of a stream, and before anything came."""
    body = {"prompt": TEXTS[3] + TEXTS[1] + QUESTION, "n_predict": LONG, "temperature": 0, "stream": True}
    with front.proxy.stream("POST", "/completion", json=body) as reply:
        assert reused(reply) > 200
        next(reply.iter_lines())
    assert most_held(front) < LONG
    with pytest.raises(httpx.ReadTimeout):
        front.proxy.post("/completion", json={**body, "stream": False}, timeout=0.5)
    assert most_held(front) < LONG


def most_held(front: Front) -> int:
    """The most tokens of a prompt and its answer that a slot holds, once all are idle."""
    until = time.monotonic() + 60
    slots = front.server.get("/slots").json()
    while any(slot["is_processing"] for slot in slots):
        assert time.monotonic() < until, "llama-server still works for a client that left"
        time.sleep(1.5)  # llama-server looks for clients that left when it has given no answer to anybody for a second
        slots = front.server.get("/slots").json()
    return max(slot.get("n_prompt_tokens", 0) for slot in slots)


def test_everything_recomputed_is_left_to_the_server(fronts: Fronts) -> None:
    """With --ratio 1 the answers are the server's own."""
    with fronts.front("--ratio", "1", "--no-learn") as front:
        body = chat(TEXTS[0], TEXTS[1])
        reply = front.proxy.post("/v1/chat/completions", json=body)
        assert (reused(reply), reply.headers["x-kvblend-reason"]) == (0, "everything is recomputed")
        assert said(reply) == said(front.server.post("/v1/chat/completions", json=body))


def test_what_a_single_slot_held_is_kept(fronts: Fronts) -> None:
    """A blended prompt takes the only slot; the conversation before it goes on from llama-server's prompt cache."""
    with fronts.front("--no-correction", "--no-learn", n_parallel=1, cache_ram_mib=512) as front:
        conversation = {"prompt": UNKNOWN * 3, "n_predict": 1, "temperature": 0}
        rows = front.proxy.post("/completion", json=conversation).json()["timings"]["prompt_n"]
        blended = front.proxy.post("/v1/chat/completions", json=chat(TEXTS[0], TEXTS[1]))
        assert reused(blended) > 200
        goes_on = front.proxy.post("/completion", json={**conversation, "prompt": UNKNOWN * 3 + " And then?"})
        assert goes_on.json()["timings"]["cache_n"] > rows - 8


def test_learned_text_serves_its_own_key_alone(fronts: Fronts, tmp_path: Path) -> None:
    """Text that comes again is reused for the same key and end user, and for nobody else."""
    text = " ".join(
        f"Keeper {number} of the old mill has {number * 7} lamps and one white goat." for number in range(40)
    )
    body = {"prompt": f"{text}\n{QUESTION}", "n_predict": 1, "temperature": 0}
    with fronts.front("--store", str(tmp_path), "--no-correction", n_parallel=1) as front:

        def ask(key: str, start: str, user: str = "") -> int:
            fields = {**body, "prompt": f"{start} {body['prompt']}", "user": user}
            return reused(front.proxy.post("/completion", json=fields, headers={"authorization": f"Bearer {key}"}))

        assert ask("first", "Once.") == 0
        time.sleep(4)  # it learns when it is idle
        assert ask("first", "Twice, if that.") > 200
        assert ask("second", "Now somebody else.") == 0
        assert ask("first", "And of the same key another one.", user="Ann") == 0
        assert ask("first", "The first one again.") > 200
