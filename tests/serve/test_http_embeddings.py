"""/v1/embeddings: the vectors with which the server searches, through the clients that people have."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from changing import WordCounts, until
from rooms import serving
from served import Served, listening

from blend.serve.http.requests import ApiKeys
from blend.serve.turns import Turns
from blend_retrieval.embedders import Embedder, Progress

TEXTS = ["The harbour has nine gates.", "Who keeps the bell?", "It opened in 1849. " * 5]
PATH = "/v1/embeddings"


def embedder_of(served: Served) -> Embedder:
    found: Embedder = served.state.service.tenant("").rag().embedder
    return found


def test_openai(served: Served, client: openai.OpenAI) -> None:
    embedder = embedder_of(served)
    expected = embedder.embed(TEXTS)
    for name in (embedder.name, served.model, f"{served.model}+corpus"):
        found = client.embeddings.create(model=name, input=TEXTS)  # this client asks for base64
        assert found.model == name
        assert [one.index for one in found.data] == [0, 1, 2]
        assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), expected)
    numbers = client.embeddings.create(model=served.model, input=TEXTS, encoding_format="float", dimensions=384)
    assert np.array_equal(np.array([one.embedding for one in numbers.data], np.float32), expected)
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens == sum(embedder.count(TEXTS))
    alone = client.embeddings.create(model=served.model, input=TEXTS[0], user="me").data[0].embedding
    assert np.allclose(alone, expected[0], atol=1e-5)
    assert np.linalg.norm(alone) == pytest.approx(1, abs=1e-5)
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
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], param: str, code: str) -> None:
    response = http.post(PATH, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert "\n" not in error["message"]


def test_the_model_must_be_one_that_there_is(http: httpx.Client, served: Served) -> None:
    for name in ("text-embedding-3-small", f"{served.model}+corpus:other"):
        response = http.post(PATH, json={"input": "a", "model": name})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert f"there are: minilm, {served.model}," in response.json()["error"]["message"]
    with listening(served.state.service, ApiKeys([("anns", "ann")]), shared=True) as locked:
        for key, model, status in (
            ("anns", "minilm", 200),
            ("anns", f"{served.model}+corpus", 404),
            ("x", "minilm", 401),
        ):
            headers = {"authorization": f"Bearer {key}"}
            asked = {"input": "a", "model": model}
            assert httpx.post(f"{locked.url}{PATH}", json=asked, headers=headers, timeout=60).status_code == status


def test_without_a_corpus_and_without_an_embedding_model(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "empty", model, learn_budget=0) as service, listening(service) as served:
        found = httpx.post(f"{served.url}{PATH}", json={"input": "a"}, timeout=60).json()
        assert (found["model"], len(found["data"][0]["embedding"])) == ("minilm", 384)
    with serving(tmp_path / "other", model, learn_budget=0) as service, listening(service) as served:
        rag = service.tenant("").rag()
        rag.corpus_config = replace(rag.corpus_config, embedder=str(tmp_path))
        response = httpx.post(f"{served.url}{PATH}", json={"input": "a"}, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert "embedding model cannot be loaded" in response.json()["error"]["message"]
        assert str(tmp_path) not in response.text
        asked = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        assert httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=60).status_code == 200


class Slow(WordCounts):
    """Counts the texts that it has embedded."""

    done = 0

    def embed(self, texts: Any, progress: Progress | None = None) -> Any:
        for number, _ in enumerate(texts):
            time.sleep(0.05)
            self.done += 1
            if progress is not None:
                progress("embed", number + 1, len(texts))
        return super().embed(texts)


def test_who_leaves_is_embedded_no_further(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "empty", model, learn_budget=0) as service, listening(service) as served:
        rag = service.tenant("").rag()
        rag.embedder = slow = Slow()

        def ask() -> None:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{served.url}{PATH}", json={"input": ["a"] * 2000}, timeout=0.5)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: slow.done > 2)
        asking.join()
        until(lambda: b'path="/v1/embeddings",status="499"' in served.metrics.page(None))
        assert slow.done < 200


def test_more_requests_of_one_address_than_may_wait_are_refused(tmp_path: Path, model: Path) -> None:
    with (
        serving(tmp_path / "empty", model, learn_budget=0) as service,
        listening(service) as served,
        ThreadPoolExecutor(8) as pool,
    ):
        service.tenant("").rag().embedder = slow = Slow()
        served.state.embeddings = Turns(1, 1, 4)

        def ask(address: str = "127.0.0.1") -> httpx.Response:
            transport = httpx.HTTPTransport(local_address=address)
            with httpx.Client(transport=transport, timeout=60) as client:
                return client.post(f"{served.url}{PATH}", json={"input": ["a"] * 40})

        running = pool.submit(ask)
        until(lambda: slow.done > 0)
        waiting = [pool.submit(ask) for _ in range(3)]
        until(lambda: sum(answer.done() for answer in waiting) == 2)
        if sys.platform == "linux":  # elsewhere loopback has one address
            assert ask("127.0.0.2").status_code == 200
        answers = [answer.result() for answer in waiting]
        assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert running.result().status_code == 200
