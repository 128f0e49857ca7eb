"""`blend serve` as a process: its one line, its answers, its mistakes, its end."""

import json
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from blend_process import Blend, Running, one_line

from blend.cli import blend as group
from blend.config import PromptConfig
from blend.errors import ConfigError
from tests.store import servers

QUESTION = "How many gates does the harbour have?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@contextmanager
def served(
    blend: Blend, *arguments: str | Path, last: signal.Signals = signal.SIGTERM, **options: Any
) -> Iterator[tuple[Running, httpx.Client]]:
    """A server that is ready; it must end well when it is told to."""
    running = blend.start("serve", "--port", "0", *arguments, **options)
    with httpx.Client(base_url=running.url(), timeout=60) as client:
        yield running, client
        result = running.send(last).wait()
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert result.out.count("\n") == 1


def test_it_answers_as_the_command_does(filled):
    told = filled("answer", QUESTION, "--json", "--top-k", "4", "--max-new-tokens", "8", "--dtype", "float32").json
    mine = ("--instructions", PromptConfig.instruction)
    quality = ("--quality", "0.05")  # of which the store has no estimates
    with served(filled, "--top-k", "4", "--max-new-tokens", "8", "--dtype", "float32", *mine, *quality) as (
        running,
        http,
    ):
        names = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert names == ["tiny", "tiny+corpus"]
        asked = PromptConfig.question.replace("{question}", QUESTION)
        messages = [{"role": "system", "content": PromptConfig.system}, {"role": "user", "content": asked}]
        retrieved = http.post("/v1/chat/completions", json={"model": "tiny+corpus", "messages": MESSAGES}).json()
        sources = retrieved["kvblend"]["sources"]
        documents = [{"title": one["title"], "text": one["text"]} for one in sources]
        body = {"messages": messages, "documents": documents}
        answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "abc"}).json()
        metrics = http.get("/metrics").text
    assert answer["choices"][0]["message"]["content"].strip() == told["answer"]
    assert [source["id"] for source in sources] == [chunk["id"] for chunk in told["chunks"]]
    assert all(source["hit"] for source in answer["kvblend"]["sources"])
    assert answer["kvblend"]["figures"]["full_estimated_s"] > 0
    assert "kvblend_time_to_first_token_seconds_count 2.0" in metrics
    logged = [json.loads(line) for line in running.err.splitlines() if line.startswith("{")]
    assert [line["path"] for line in logged] == ["/v1/models", *["/v1/chat/completions"] * 2, "/metrics"]
    assert logged[2]["id"] == "abc"
    assert running.err.count("`blend precompute --questions`") == 1
    assert "gates" not in running.err


def test_without_a_corpus_and_without_blending(blend):
    with served(blend, "--full", "-q") as (running, http):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]
        body = {"messages": MESSAGES, "max_tokens": 2, "documents": [{"text": "The harbour has two gates. " * 20}]}
        answers = [http.post("/v1/chat/completions", json=body).json() for _ in range(2)]
        assert [answer["kvblend"]["figures"]["method"] for answer in answers] == ["full"] * 2
        assert http.post("/v1/chat/completions", json={**body, "kvblend": {"retrieve": {}}}).status_code == 400
    assert '"path"' not in running.err


@pytest.mark.parametrize("last", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_waits_for_nobody(blend, last):
    body = {"messages": MESSAGES, "max_tokens": 3900, "stream": True}
    with served(blend, "--grace", "600", last=last) as (running, http):
        stack = ExitStack()
        lines = stack.enter_context(http.stream("POST", "/v1/chat/completions", json=body)).iter_lines()
        next(lines)
        running.send(signal.SIGTERM)
        running.until(lambda: http.get("/ready").status_code == 503)
    with stack, suppress(httpx.TransportError):
        assert not [line for line in lines if '"finish_reason": "length"' in line]


def test_requests_are_refused_politely_while_what_runs_is_finished(blend):
    body = {"messages": MESSAGES, "max_tokens": 400, "stream": True}
    raw = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    with served(blend, "--grace", "600") as (running, http), ExitStack() as stack:
        lines = stack.enter_context(http.stream("POST", "/v1/chat/completions", json=body)).iter_lines()
        next(lines)
        begun = stack.enter_context(socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=60))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        begun.sendall(head.encode() + raw[:5])
        running.send(signal.SIGINT)
        running.until(lambda: http.get("/ready").status_code == 503)
        asked = [http.post("/v1/chat/completions", json=body), http.get("/ready"), http.get("/v1/models")]
        for refused in (*asked, http.post("/v1/documents", json={"documents": [{"text": "The mill has a wheel."}]})):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
        begun.sendall(raw[5:])
        assert b"shutting_down" in b"".join(iter(lambda: begun.recv(100_000), b""))
        found = [line for line in lines if line.startswith("data: ")]
        assert found[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in found[-2]
        running.until(lambda: refuses(str(http.base_url)))


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def test_all_folders_below_a_store_are_the_owners_alone(blend):
    """Those of tenants, corpora, uploads and learned passages too; processes here have the umask 022."""
    store, keys = blend.folder / "new" / "store", blend.folder / "keys"
    keys.write_text("of-ann ann\n")
    keys.chmod(0o600)
    asked = {"messages": MESSAGES, "max_tokens": 1, "documents": [{"text": "The harbour has two gates. " * 40}]}
    with served(blend.at(store), "--api-keys", keys, env={"KVBLEND_API_KEY": "of-all"}) as (running, http):
        for key in ("of-all", "of-ann"):
            http.headers["authorization"] = f"Bearer {key}"
            http.post("/v1/chat/completions", json=asked).raise_for_status()
            for corpus in ("", "mine"):
                texts = {"documents": [{"id": "mill", "text": "The mill has a wheel of oak. " * 20}], "corpus": corpus}
                http.post("/v1/documents", json=texts).raise_for_status()
                mill = f"/v1/documents/mill?corpus={corpus}"
                running.until(lambda mill=mill: http.get(mill).json()["status"] == "ready")
    found = [store.parent, store, *(path for path in store.rglob("*") if path.is_dir())]
    names = {str(path.relative_to(store)) for path in found[1:]}
    assert names >= {f"{room}{name}" for room in ("", "tenants/ann/") for name in ("kv", "index", "corpora/mine/index")}
    assert {str(path): oct(path.stat().st_mode & 0o777) for path in found if path.stat().st_mode & 0o077} == {}
    assert (store / "tenants" / "ann" / "learned.sqlite").stat().st_mode & 0o777 == 0o600


def test_keys_out_of_a_file_and_the_environment(blend):
    keys = blend.folder / "keys"
    keys.write_text("of-ann ann\n")
    keys.chmod(0o600)
    with served(blend, "--api-keys", keys, env={"KVBLEND_API_KEY": "one two"}) as (_, http):
        status = {
            key: http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
            for key in ("one", "two", "of-ann", "three")
        }
    assert status == {"one": 200, "two": 200, "of-ann": 200, "three": 401}


def test_a_port_that_is_taken(blend):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = blend("serve", "--port", str(other.getsockname()[1]))
    assert "is in use: choose another one with --port" in result.refused(2)
    assert "Loading" not in result.err


def test_what_cannot_be_loaded_ends_it(blend):
    folder = blend.folder / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    result = blend("serve", "--port", "0", "--model", folder)
    assert result.code in (2, 4)
    one_line(result.err)


def test_a_signal_ends_it_while_it_loads(blend):
    running = blend.start("serve", "--port", "0")
    running.until(lambda: "Loading" in running.err)
    result = running.send(signal.SIGTERM).wait()
    assert result.code == 0, result.err
    assert "Traceback" not in result.err


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install 'kvblend\[serve\]'"):
        group.main(["serve"], standalone_mode=False)


def test_a_redis_that_would_evict_indexes_is_refused(blend, tmp_path):
    port = servers.redis_port("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    env = {"KVBLEND_STORE": f"redis://127.0.0.1:{port}/0", "KVBLEND_STORE_CACHE": str(tmp_path / "near")}
    result = blend("serve", "--port", "0", env=env)
    assert (result.code, result.out) == (7, "")
    assert "its maxmemory-policy is allkeys-lru): set it to volatile-lru" in result.err.splitlines()[-1]
