"""vLLM's own server with the middleware, and the prefill process, asked by common clients."""

import concurrent.futures
import json
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from machines import KEY, TOKENS, Machines, body, engine_process, fill, rag_over, shared_files, threads, until, whole

from blend.integrations.vllm.server import THREADS
from blend.quality import RATIOS, Estimator, Signals
from blend.sampling import Sampling
from blend.serve.engine.scheduler import LOADING, EmbeddedEngine
from blend.serve.events import Finished, Output, Started
from blend.serve.request import Message, Request
from blend.serve.service import Service
from blend.store import open_store
from tests.store.reading import damage_caches
from tests.towns import TOPICS

pytestmark = pytest.mark.inside_vllm
# What `own` does: passages are retrieved, entries are read each time, and nothing of earlier prompts is used.
ALIKE = ("--no-learn", "--prefix-budget", "0", "--memory-budget", "0")
QUESTION = "How many gates does the harbour have?"
QUESTIONS = [f"How many gates does the {topic} have, and who keeps it?" for topic in TOPICS]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return fill(tmp_path_factory.mktemp("filled"))


@contextmanager
def _service(store: Path, model: Path) -> Iterator[Service]:
    rag = rag_over(store, model)
    service = Service(rag, EmbeddedEngine(rag.blender, prefix_budget=0), learn_budget=0)
    service.warm_up()
    try:
        yield service
    finally:
        service.close()


@pytest.fixture(scope="module")
def own(filled: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """kvblend's own server over a copy of the store: what answers are to be."""
    with _service(shutil.copytree(filled[0], tmp_path_factory.mktemp("own") / "store"), filled[1]) as service:
        yield service


@pytest.fixture(scope="module")
def machines(filled: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    found = Machines(folder, shutil.copytree(filled[0], folder / "store"), filled[1])
    try:
        found.start_prefill(*ALIKE)
        found.start_server(KVBLEND_VLLM_TIMEOUT="240")
        yield found
    finally:
        found.end()


def answered(service: Service, question: str, **more: Any) -> tuple[str, Started]:
    """What kvblend answers by itself."""
    import threading

    replies, done = [], threading.Event()

    def on_reply(reply: Any) -> None:
        replies.append(reply)
        if not isinstance(reply, Started | Output):
            done.set()

    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    service.submit(Request((Message("user", question),), sampling=sampling, **more), on_reply)
    assert done.wait(300)
    assert isinstance(replies[-1], Finished)
    return whole("".join(reply.text for reply in replies if isinstance(reply, Output))), replies[0]


CORPUS = {"kvblend": {"retrieve": {"top_k": 4}}}


def test_documents_corpus_and_pasted_text(machines: Machines, own: Service) -> None:
    expected, opened = answered(own, QUESTION, top_k=4)
    assert opened.figures.reason == ""
    text, shown = machines.ask(QUESTION, **CORPUS)
    assert text == expected
    assert shown["figures"]["rows_computed"] == opened.figures.rows_computed < shown["figures"]["rows"]
    assert [one["id"] for one in shown["sources"]] == [one.id for one in opened.sources]
    assert all(one["hit"] for one in shown["sources"])
    assert machines.ask(QUESTION, model="tiny+corpus")[0] == expected
    given = [{"title": one.title, "text": one.text} for one in opened.sources]
    assert machines.ask(QUESTION, documents=given)[0] == expected
    rag = own.tenant("").rag()
    config = rag.prompt_config
    from blend.prompt import render_chunk

    pasted = f"{config.chat_instructions}\n\n" + "".join(render_chunk(one) for one in opened.sources)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": pasted + QUESTION}]
    text, shown = machines.ask(QUESTION, messages=messages)
    assert text == expected
    assert [one["kind"] for one in shown["sources"]] == ["pasted"] * 4
    full, figures = machines.ask(QUESTION, kvblend={"retrieve": {"top_k": 4}, "method": "full"})
    assert full == answered(own, QUESTION, top_k=4, method="full")[0] != expected
    assert figures["figures"]["rows_computed"] == figures["figures"]["rows"]


def test_a_quality_that_a_request_asks_for(machines: Machines, own: Service) -> None:
    signals, kl = tuple(Signals(0.5, one) for one in (0.4, 0.2, 0.1, 0.05)), (0.4, 0.2, 0.1, 0.05)
    estimator = Estimator((signals,) * 20, (kl,) * 20, ((False,) * len(RATIOS),) * 20)
    rag, theirs = own.tenant("").rag(), open_store(str(machines.store / "kv"))
    for store in (rag.store, theirs):
        identity = rag.blender.library(rag.template.prefix).isolated.identity
        store.write_artifact(identity.quality_name, estimator.to_bytes())
    for quality, ratio in ((50.0, RATIOS[0]), (1e-6, 1.0)):
        expected, opened = answered(own, QUESTION, top_k=4, quality=quality)
        assert opened.figures.quality["ratio"] == ratio
        text, shown = machines.ask(QUESTION, kvblend={"retrieve": {"top_k": 4}, "quality": quality})
        assert (text, shown["figures"]["quality"]) == (expected, opened.figures.quality)
        assert shown["figures"]["rows_computed"] == opened.figures.rows_computed


def test_eight_at_once_half_of_them_streaming(machines: Machines, own: Service) -> None:
    expected = [answered(own, question, top_k=4)[0] for question in QUESTIONS]
    alone = [machines.ask(question, **CORPUS)[0] for question in QUESTIONS]
    assert alone == expected

    def one(number: int) -> str:
        return machines.ask(QUESTIONS[number], stream=number % 2 == 0, **CORPUS)[0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == expected
    until(machines.idle)


def test_what_others_bring_is_vllms(machines: Machines) -> None:
    """Keys, refusals, tools and requests without context."""
    before = machines.metrics()["vllm:request_success_total"]
    for key, more, status in (
        ("", {}, 401),
        ("no", {}, 401),
        (KEY, {"kvblend": {"retrieve": {"corpus": "none"}}}, 400),
        (KEY, {"documents": [{"text": "a"}], "prompt_logprobs": 1}, 400),
        (KEY, {"model": "other"}, 404),
    ):
        response = machines.post(body(QUESTION, **{**CORPUS, **more}), key=key)
        assert response.status_code == status, response.text
    assert machines.metrics()["vllm:request_success_total"] == before
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert machines.ask(QUESTION, tools=[tool], tool_choice="none")[1] == {}
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    assert httpx.post(f"{machines.url}/v1/chat/completions", content=b"{", headers=headers).status_code == 400
    models = httpx.get(f"{machines.url}/v1/models", headers=headers).json()
    assert models["data"][0]["id"] == "tiny"


def test_parameters_of_clients_are_taken_out(machines: Machines) -> None:
    """Another request's ticket, its salt and its tokens give nothing: the answer is that of the messages."""
    import asyncio

    from blend.integrations.vllm.transport import Connection

    plain, _ = machines.ask("Hello, who is there?")

    async def stolen() -> None:
        part = {"messages": [{"role": "user", "content": QUESTION}], "model": "tiny", **CORPUS}
        with closing(await Connection.open(machines.socket, {"ask": part})) as connection:
            ids, ready = (await connection.receive())["prompt"], (await connection.receive())["ready"]
            theirs = {"kvblend": {"ticket": ready["ticket"]}, "prompt_token_ids": ids}
            found = await asyncio.to_thread(
                machines.ask, "Hello, who is there?", kv_transfer_params=theirs, cache_salt=ready["salt"]
            )
            assert found == (plain, {})

    asyncio.run(stolen())
    until(machines.idle)


def test_openai_and_langchain(machines: Machines, own: Service) -> None:
    import openai

    expected = answered(own, QUESTION, top_k=4)[0]
    options = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {**CORPUS, "ignore_eos": True}}
    messages: Any = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=f"{machines.url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
        whole = client.chat.completions.create(model="tiny", messages=messages, **options)
        parts = list(
            client.chat.completions.create(
                model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}, **options
            )
        )
    assert whole.choices[0].message.content == expected
    assert len(whole.kvblend["sources"]) == 4
    assert whole.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    assert parts[-1].usage.completion_tokens == TOKENS
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(base_url=f"{machines.url}/v1", api_key=KEY, model="tiny", timeout=300, **options)
    assert model.invoke(QUESTION).content == expected
    assert "".join(str(part.content) for part in model.stream(QUESTION)) == expected


def test_clients_that_hang_up_leave_nothing(machines: Machines, own: Service) -> None:
    machines.ask(QUESTION, **CORPUS)
    until(machines.idle)
    assert machines.server is not None
    engine, prefill = engine_process(machines.server), machines.prefill.process.pid
    before = threads(engine), threads(prefill)
    machines.prefill.send(signal.SIGSTOP)
    packed = json.dumps(body(QUESTION, **CORPUS)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    clients = []
    for _ in range(100):
        client = socket.create_connection(("127.0.0.1", int(machines.url.rpartition(":")[2])))
        client.sendall(f"{head}content-length: {len(packed)}\r\n\r\n".encode() + packed)
        clients.append(client)
    until(lambda: _connections(machines) >= 100)
    for client in clients[:50]:
        client.close()
    machines.prefill.send(signal.SIGCONT)
    for client in clients[50:]:  # in the middle of whatever it is
        client.close()
    until(machines.idle)
    until(
        lambda: machines.metrics()["vllm:num_requests_running"] == machines.metrics()["vllm:num_requests_waiting"] == 0
    )
    # Pools start their threads when they are first needed; a connection leaves none.
    pools = LOADING + THREADS
    until(lambda: threads(engine) <= before[0] and threads(prefill) <= before[1] + pools)
    assert machines.metrics()["vllm:kv_cache_usage_perc"] == 0
    assert shared_files(engine) == shared_files(prefill) == 0
    assert machines.ask(QUESTION, **CORPUS)[0] == answered(own, QUESTION, top_k=4)[0]


def _connections(machines: Machines) -> int:
    """Of the prefill process, as the kernel lists them: taken, or in its queue."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(machines.socket) for line in lines) - 1


def test_a_damaged_entry(machines: Machines, filled: tuple[Path, Path], tmp_path: Path) -> None:
    question = "Tell me of the glacier and its bell."
    other = shutil.copytree(filled[0], tmp_path / "store")
    for store in (machines.store, other):
        damage_caches(store / "kv")
    with _service(other, filled[1]) as service:
        expected, opened = answered(service, question, top_k=4)
    assert not all(one.hit for one in opened.sources)
    text, _ = machines.ask(question, **CORPUS)
    assert text == expected
    # What was damaged is computed again.
    until(lambda: all(one["hit"] for one in machines.ask(question, **CORPUS)[1]["sources"]), 60)
    shutil.copytree(filled[0] / "kv" / "objects", machines.store / "kv" / "objects", dirs_exist_ok=True)


def test_a_killed_prefill_process(machines: Machines, own: Service) -> None:
    expected, opened = answered(own, QUESTION, top_k=4)
    given = [{"title": one.title, "text": one.text} for one in opened.sources]
    full = machines.ask(QUESTION, kvblend={"method": "full"}, documents=given)[0]
    assert full != expected
    until(machines.idle)
    machines.prefill.end(signal.SIGKILL)
    said = len(machines.server.said)
    assert not any(machines.socket[1:] in line for line in Path("/proc/net/unix").read_text().splitlines())
    assert [machines.ask(QUESTION, documents=given)[0] for _ in range(3)] == [full] * 3
    warnings = [line for line in machines.server.said[said:].splitlines() if "WARNING" in line and "kvblend" in line]
    assert len(warnings) == 1, warnings
    response = machines.post(body(QUESTION, **CORPUS))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    machines.start_prefill(*ALIKE)
    text, shown = machines.ask(QUESTION, documents=given)
    assert shown["figures"]["reason"] == ""
    assert text == expected


def test_a_missing_store(machines: Machines, own: Service) -> None:
    _, opened = answered(own, QUESTION, top_k=4)
    given = [{"title": one.title, "text": one.text} for one in opened.sources]
    full = machines.ask(QUESTION, kvblend={"method": "full"}, documents=given)[0]
    away = machines.store.rename(machines.store.with_name("away"))
    try:
        assert machines.ask(QUESTION, documents=given)[0] == full
    finally:
        shutil.rmtree(machines.store, ignore_errors=True)
        away.rename(machines.store)
