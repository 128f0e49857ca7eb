"""The clients that people have: one question, the same answer through all of them; and the vectors of /v1/embeddings."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from changing import WordCounts, until
from rooms import QUESTION, serving
from served import Served, listening, refusal

from blend.prompt_template import render_chunk
from blend.serve.turns import Turns
from blend_retrieval import Chunk

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
RETRIEVE = {"kvblend": {"retrieve": {"top_k": 4}}}
TOKENS = 12


@pytest.fixture(scope="module")
def expected(served: Served) -> str:
    """What the corpus answers, asked without any client library."""
    answer = served.ask(messages=MESSAGES, max_tokens=TOKENS, **RETRIEVE).json()
    assert [source["kind"] for source in answer["kvblend"]["sources"]] == ["retrieved"] * 4
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def chunks(served: Served) -> list[Chunk]:
    """From which it answers."""
    return [hit.chunk for hit in served.rag.retriever.search(QUESTION, 4)]


def test_openai(served: Served, client: openai.OpenAI, expected: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": TOKENS}
    corpus = f"{served.model}+corpus"
    whole = client.chat.completions.create(model=served.model, **asked, extra_body=RETRIEVE)
    by_name = client.chat.completions.create(model=corpus, messages=MESSAGES, max_completion_tokens=TOKENS)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(model=corpus, **asked, **options))
    assert whole.choices[0].message.content == by_name.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == TOKENS
    assert 0 < whole.usage.prompt_tokens_details.cached_tokens < whole.usage.prompt_tokens
    assert len(whole.kvblend["sources"]) == 4
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    assert parts[-1].usage.completion_tokens == TOKENS
    assert len(parts[0].kvblend["sources"]) == 4


def test_openai_learns_what_the_model_reads(served: Served, client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [served.model, f"{served.model}+corpus"]
    assert client.models.retrieve(models[1].id) == models[1]
    for model in models:
        assert (model.object, model.owned_by, model.root) == ("model", "kvblend", served.model)
        assert model.max_model_len == served.rag.decoder.context_length
        assert model.created > 1_700_000_000


def test_what_clients_dump_may_be_sent_back(served: Served, client: openai.OpenAI) -> None:
    said = client.responses.create(model=served.model, input=QUESTION, max_output_tokens=TOKENS)
    items: list[Any] = [*MESSAGES, *(item.model_dump() for item in said.output), *MESSAGES]
    assert client.responses.create(model=served.model, input=items, max_output_tokens=4).output_text
    parts = [{"type": "text", "text": QUESTION, "cache_control": None}]
    own: list[Any] = [{"role": "user", "content": parts, "provider_specific_fields": None}]
    assert client.chat.completions.create(model=served.model, messages=own, max_tokens=4).choices


@pytest.mark.parametrize(
    "spelled",
    [
        lambda text, title: f"{title}\n{text}",
        lambda text, title: {"data": f"{title}\n{text}"},
        lambda text, title: {"data": {"title": title, "text": text}},
        lambda text, title: {"data": {"title": title, "snippet": text}, "id": "one"},
        lambda text, title: {"title": title, "text": text, "id": "one"},
    ],
)
def test_documents_as_texts_and_as_cohere_has_them(
    served: Served, chunks: list[Chunk], expected: str, spelled: Callable[[str, str], Any]
) -> None:
    documents = [spelled(chunk.text, chunk.title) for chunk in chunks]
    answer = served.ask(messages=MESSAGES, max_tokens=TOKENS, documents=documents).json()
    assert answer["choices"][0]["message"]["content"] == expected
    named = isinstance(documents[0], dict) and "id" in documents[0]
    assert [source["document"] == "one" for source in answer["kvblend"]["sources"]] == [named] * 4


def test_langchain(served: Served, chunks: list[Chunk], expected: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": served.base_url, "api_key": "none", "max_retries": 0, "max_tokens": TOKENS}
    model = ChatOpenAI(model=f"{served.model}+corpus", **options)
    answer = model.invoke([HumanMessage(QUESTION)])
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == TOKENS
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    assert "".join(str(part.content) for part in model.stream([HumanMessage(QUESTION)])) == expected
    chain = ChatPromptTemplate([("user", "{context}")]) | ChatOpenAI(model=served.model, **options)
    pasted = f"{served.rag.prompt_config.chat_instructions}\n\n" + "".join(map(render_chunk, chunks)) + QUESTION
    assert chain.invoke({"context": pasted}).content == expected


def test_llamaindex(served: Served, expected: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=f"{served.model}+corpus",
        api_base=served.base_url,
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=TOKENS,
        max_retries=0,
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(messages).message.content == expected
    assert "".join(part.delta or "" for part in model.stream_chat(messages)) == expected


TEXTS = ["The harbour has nine gates.", "Who keeps the bell?", "It opened in 1849. " * 5]
EMBEDDINGS = "/v1/embeddings"


def test_embeddings(served: Served, client: openai.OpenAI) -> None:
    embedder = served.rag.embedder
    expected = embedder.embed(TEXTS)
    for name in (embedder.name, served.model, f"{served.model}+corpus"):
        base64 = client.embeddings.create(model=name, input=TEXTS)  # as this client asks for
        assert base64.model == name
        assert [one.index for one in base64.data] == [0, 1, 2]
        assert np.array_equal(np.array([one.embedding for one in base64.data], np.float32), expected)
    numbers = client.embeddings.create(model=served.model, input=TEXTS, encoding_format="float", dimensions=384)
    assert np.array_equal(np.array([one.embedding for one in numbers.data], np.float32), expected)
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens == sum(embedder.count(TEXTS))
    alone = client.embeddings.create(model=served.model, input=TEXTS[0], user="me").data[0].embedding
    assert np.allclose(alone, expected[0], atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model=served.model, input=[[1, 2, 3]])  # as LangChain does without this option


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *(
            ({"input": wrong}, "input", "invalid_value")
            for wrong in ([], "", ["a", ""], [1, 2], [[1, 2]], ["a"] * 2049)
        ),
        ({"input": ["a", {"text": "b"}]}, "input[1]", "invalid_value"),
        ({}, "input", "missing_required_parameter"),
        ({"input": "a", "dimensions": 64}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "truncate": "END"}, "truncate", "unknown_parameter"),
        ({"input": ["a", "word " * 255]}, "input", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_embedded_is_refused(http: httpx.Client, fields: dict[str, Any], param: str, code: str) -> None:
    response = http.post(EMBEDDINGS, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert "\n" not in error["message"]


def test_the_model_must_be_one_that_there_is(http: httpx.Client, served: Served) -> None:
    for name in ("text-embedding-3-small", f"{served.model}+corpus:other"):
        response = http.post(EMBEDDINGS, json={"input": "a", "model": name})
        assert refusal(response) == (404, "model_not_found")
        assert f"there are: minilm, {served.model}," in response.json()["error"]["message"]


def test_a_tenant_names_models_of_its_own(locked: Served) -> None:
    for key, model, status in (("anns", "minilm", 200), ("anns", f"{locked.model}+corpus", 404), ("x", "minilm", 401)):
        assert locked.send("POST", EMBEDDINGS, key, json={"input": "a", "model": model}).status_code == status


@pytest.fixture
def empty(tmp_path: Path, model: Path) -> Iterator[Served]:
    """A server without a corpus."""
    with serving(tmp_path / "empty", model, learn_budget=0) as service, listening(service) as served:
        yield served


def test_without_a_corpus(empty: Served) -> None:
    found = empty.send("POST", EMBEDDINGS, json={"input": "a"}).json()
    assert (found["model"], len(found["data"][0]["embedding"])) == ("minilm", 384)


def test_a_corpus_that_is_found_by_words_has_no_vectors(empty: Served) -> None:
    empty.rag.corpus_config = replace(empty.rag.corpus_config, embedder="words")
    response = empty.send("POST", EMBEDDINGS, json={"input": "a"})
    assert refusal(response) == (404, "model_not_found")
    assert "no embedding model" in response.json()["error"]["message"]


def test_without_an_embedding_model(empty: Served, tmp_path: Path) -> None:
    empty.rag.corpus_config = replace(empty.rag.corpus_config, embedder=str(tmp_path))
    response = empty.send("POST", EMBEDDINGS, json={"input": "a"})
    assert refusal(response) == (503, "unavailable")
    assert "embedding model cannot be loaded" in response.json()["error"]["message"]
    assert str(tmp_path) not in response.text
    assert empty.ask().status_code == 200


@pytest.fixture
def embedded(empty: Served) -> list[str]:
    """The texts that were embedded; each takes a while."""
    texts: list[str] = []
    empty.rag.embedder = embedder = WordCounts()

    def slowly(text: str) -> None:
        texts.append(text)
        time.sleep(0.05)

    embedder.before = slowly
    return texts


def test_who_leaves_is_embedded_no_further(empty: Served, embedded: list[str]) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{empty.url}{EMBEDDINGS}", json={"input": ["a"] * 2000}, timeout=0.5)
    until(lambda: b'path="/v1/embeddings",status="499"' in empty.metrics.page(None))
    assert 2 < len(embedded) < 200


def test_more_requests_of_one_address_than_may_wait_are_refused(empty: Served, embedded: list[str]) -> None:
    empty.state.embeddings = Turns(1, 1, 4)

    def ask(address: str = "127.0.0.1") -> httpx.Response:
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, timeout=60) as client:
            return client.post(f"{empty.url}{EMBEDDINGS}", json={"input": ["a"] * 40})

    with ThreadPoolExecutor(8) as pool:
        running = pool.submit(ask)
        until(lambda: bool(embedded))
        waiting = [pool.submit(ask) for _ in range(3)]
        until(lambda: sum(answer.done() for answer in waiting) == 2)
        if sys.platform == "linux":  # elsewhere loopback has one address
            assert ask("127.0.0.2").status_code == 200
        answers = [answer.result() for answer in waiting]
    assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refusal(refused)[1] == "rate_limit_exceeded"
    assert running.result().status_code == 200
